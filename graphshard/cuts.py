"""Where compiled code is cut so that communication can stand between: few places, cheap ones.

A compiler fuses what nothing separates. So a group's wait, its release and its reduction do not
stand at the exact op that needs them but at a cut near it: where the fewest bytes cross, which is
where one block of the model hands over to the next. In: an outline of one direction with exact
uses, the time of each op and the bytes that cross each place. Out: the outline with all uses at
cuts; what lies between two cuts is one region.

At the ends of a step nothing hides communication: compute cannot start before the first parameters
are there, and the last gradients are reduced after it. So where parts of a group may travel alone,
the stay at which that happens is cut in two.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from operator import attrgetter
from statistics import median
from typing import TypeVar

from torch import fx

from graphshard.cost.live import owner, tensor_bytes
from graphshard.ir import compute_nodes
from graphshard.planner.outline import GroupUse, Outline, ParamUse

_Use = TypeVar("_Use", GroupUse, ParamUse)

# A wait may come earlier by this part of the time of the ops that read the group, a release or a
# reduction later by this part of the time since the cut before: exposed time at the worst, against
# the traffic of tensors that cross.
SLACK = 0.1
# The stay at the start of a step is cut between these parts of its time.
MIDDLE = (0.2, 0.6)


def snapped(
    outline: Outline,
    crossing: Sequence[int],
    us: Sequence[float],
    *,
    halves: bool = False,
    late: Collection[tuple[int, int]] = (),
) -> Outline:
    """`outline` with its uses and reductions moved to cuts, which it names as `regions`.

    crossing: bytes that cross place p, from the ops before op p to op p and later; one more entry
    than ops. us: of each op. halves: parts of a group may travel alone, so the stay at the start of
    a step is cut in two. late: groups and parameters (`late_params`) whose gradients may be reduced
    before the rest of their group's.
    """
    times = [0.0, *accumulate(us)]
    done = _done(outline)
    cuts = {0, outline.num_ops}
    for first, last in _stays(outline):
        slack = SLACK * (times[last + 1] - times[first])
        before = max((p for p in done if p <= first), default=0)
        low = bisect_left(times, times[first] - slack, hi=first)
        # One cut for the end of one stay and the start of the next, if it can be.
        cuts.add(_cheapest(crossing, max(low, before), first, late=before < low))
    for place in done:
        ordered = sorted(cuts)
        after = bisect_left(ordered, place)
        behind, before = ordered[after], ordered[max(after - 1, 0)]
        slack = SLACK * (times[place] - times[before])
        if times[behind] - times[place] > slack:
            high = max(bisect_right(times, times[place] + slack) - 1, place)
            cuts.add(_cheapest(crossing, place, high, late=False))
    if halves:
        cuts.update(_first_half(outline, crossing, times))
    cuts.update(_last_half(outline, crossing, times, late))
    return _moved(outline, tuple(sorted(cuts)))


def late_params(forward: Outline) -> frozenset[tuple[int, int]]:
    """Group and place of the parameters that the second half of a stay that was cut reads first."""
    regions: dict[int, dict[int, int]] = defaultdict(dict)
    for use in forward.params:
        regions[use.group][use.param] = bisect_right(forward.regions, use.first)
    return frozenset(
        (group, param)
        for group, firsts in regions.items()
        for param, region in firsts.items()
        if sorted(set(firsts.values())) == [region - 1, region]
    )


def _first_half(outline: Outline, crossing: Sequence[int], times: Sequence[float]) -> Iterator[int]:
    """A cheap cut in the middle of the first stay; one that is much shorter than the others (an
    embedding) is passed over."""
    stays = _stays(outline)
    lengths = [times[last + 1] - times[first] for first, last in stays]
    typical = median(lengths or [0.0])
    for (first, last), length in zip(stays, lengths, strict=True):
        if length >= typical / 2:
            low, high = (bisect_left(times, times[first] + share * length) for share in MIDDLE)
            if first < low <= high <= last:
                yield _cheapest(crossing, low, high, late=False)
            return


def _last_half(
    outline: Outline,
    crossing: Sequence[int],
    times: Sequence[float],
    late: Collection[tuple[int, int]],
) -> Iterator[int]:
    """A cheap cut soon after the gradients of `late` are complete."""
    for reduction in outline.reductions:
        comes = dict(reduction.comes)
        found = [comes[p] for group, p in late if group == reduction.group and p in comes]
        place = max(found, default=outline.num_ops) + 1
        if place < outline.num_ops and place <= max(comes.values()):
            slack = SLACK * (times[max(comes.values())] - times[min(comes.values())])
            high = max(bisect_right(times, times[place] + slack) - 1, place)
            yield _cheapest(crossing, place, high, late=False)


def crossing_bytes(graph: fx.Graph) -> list[int]:
    """Bytes of what ops before each place make and later ops read, through views."""
    place = {node: index for index, node in enumerate(compute_nodes(graph))}
    last: dict[fx.Node, int] = {}
    for node, index in place.items():
        for source in node.all_input_nodes:
            last[owner(source)] = index
    changes = [0] * (len(place) + 2)
    for node, index in last.items():
        if (born := place.get(node)) is not None and index > born:
            size = tensor_bytes(node)
            changes[born + 1] += size
            changes[index + 1] -= size
    return list(accumulate(changes[: len(place) + 1]))


def _done(outline: Outline) -> list[int]:
    """Places at which a group is read for the last time or its gradients are complete."""
    ready = {reduction.after + 1 for reduction in outline.reductions}
    released = {use.last + 1 for use in outline.uses if use.last is not None}
    return sorted(ready | released)


def _stays(outline: Outline) -> list[tuple[int, int]]:
    """First and last op of each stay at one group, before another group's parameters are read."""
    order = sorted(outline.params, key=attrgetter("first", "group", "param"))
    stays: list[list[ParamUse]] = [list(u) for _, u in groupby(order, key=attrgetter("group"))]
    ends = [*(stay[0].first - 1 for stay in stays[1:]), outline.num_ops - 1][: len(stays)]
    return [
        (stay[0].first, max(stay[0].first, min(end, max(u.last or u.first for u in stay))))
        for stay, end in zip(stays, ends, strict=True)
    ]


def _cheapest(crossing: Sequence[int], low: int, high: int, *, late: bool) -> int:
    """The last or first of the places from `low` to `high` that the fewest bytes cross."""
    return min(range(low, high + 1), key=lambda p: (crossing[p], -p if late else p))


def _moved(outline: Outline, cuts: tuple[int, ...]) -> Outline:
    def down(op: int) -> int:
        return cuts[bisect_right(cuts, op) - 1]

    def up(op: int) -> int:
        """The last op of the region of `op`."""
        return cuts[bisect_left(cuts, op + 1)] - 1

    def use(one: _Use) -> _Use:
        last = None if one.last is None else up(one.last)
        return replace(one, first=min(down(one.first), outline.num_ops - 1), last=last)

    return replace(
        outline,
        uses=tuple(map(use, outline.uses)),
        params=tuple(map(use, outline.params)),
        reductions=tuple(
            replace(r, after=up(r.after), comes=tuple((param, up(op)) for param, op in r.comes))
            for r in outline.reductions
        ),
        regions=cuts,
    )
