"""What may become of activations until backward: computed again, or held by the host.

Plain numbers; regions are those of `graphshard.planner.problem.Problem`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from graphshard.schedule.plan import Activation, Lane, Step

# So much longer than predicted was computing again seen to take (docs/design.md).
DEARER = 0.5


@dataclass(frozen=True, slots=True)
class Recompute:
    """Activations that may be recomputed instead of kept.

    `saved_bytes` are then free after forward region `after` and until backward region `before`,
    which takes `extra_us` longer. What is computed twice is counted twice where several are taken.
    needs: the option, earlier in the list, without which this one means nothing.
    """

    activation: Activation
    after: int
    before: int
    saved_bytes: int
    extra_us: float
    needs: int | None = None


@dataclass(frozen=True, slots=True)
class Offload:
    """Activations of `group` that the host holds meanwhile: they travel together.

    `bytes` are complete after forward region `after`, and take `us` to the host, and back again
    before backward region `before`. They are free from the end of the one copy to the start of the
    other.
    """

    group: int
    after: int
    before: int
    bytes: int
    us: float


@dataclass(frozen=True, slots=True)
class OffloadOption:
    """An activation that may be offloaded; `alone`: what that is with no other of its group."""

    activation: Activation
    alone: Offload


@dataclass(frozen=True, slots=True)
class HostLink:
    """The lanes of copies to the host and back, indices of Problem.lanes. limit_bytes: what this
    rank may hold there; None: anything."""

    out_lane: int
    back_lane: int
    launch_us: float
    limit_bytes: int | None = None

    def lane_of(self, step: Step) -> int:
        """The lane of the copy that `step` issues or waits for."""
        return self.out_lane if step.lane is Lane.OFFLOAD else self.back_lane


def in_one_copy(chosen: Iterable[OffloadOption], launch_us: float) -> Iterator[Offload]:
    """Those of one group travel in one copy, with one launch."""
    offloads = sorted((option.alone for option in chosen), key=attrgetter("group"))
    for group, found in groupby(offloads, attrgetter("group")):
        own = list(found)
        yield Offload(
            group,
            after=max(one.after for one in own),
            before=min(one.before for one in own),
            bytes=sum(one.bytes for one in own),
            us=sum(one.us for one in own) - launch_us * (len(own) - 1),
        )
