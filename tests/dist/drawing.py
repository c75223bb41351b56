"""How drawn cases run on real ranks: the same ones each time, or, with a seed, others."""

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, seed, settings


def drawing(count: int, given_seed: str | None) -> Callable[[Any], Any]:
    """Stands above `@given`. count: of cases. given_seed: None for those that CI draws."""

    def decorated(test: Any) -> Any:
        own = settings(
            max_examples=count,
            derandomize=given_seed is None,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        return seed(int(given_seed or 0))(own(test))

    return decorated
