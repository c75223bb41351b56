"""What planning takes, by what is being done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter


@dataclass(slots=True)
class Clock:
    """seconds: so far."""

    seconds: dict[str, float] = field(
        default_factory=lambda: {"capture": 0.0, "passes": 0.0, "plan": 0.0}
    )

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Adds to the time of `what`; what is timed inside counts there only."""
        began, inside = perf_counter(), sum(self.seconds.values())
        try:
            yield
        finally:
            within = sum(self.seconds.values()) - inside
            self.seconds[what] += perf_counter() - began - within
