"""Where compiled code is cut so that communication can stand between: few places, cheap ones.

A compiler fuses what nothing separates. So a group's wait, its release and its reduction do not
stand at the exact op that needs them but at a cut near it: where the fewest bytes cross, which is
where one block of the model hands over to the next. In: the usage of one direction with exact
uses, the time of each op and the bytes that cross each place. Out: the usage with all uses at
cuts; what lies between two cuts is one region.

Two places of a step hide no communication. At its ends compute cannot start before the first
parameters are there, and the last gradients are reduced after it. Where forward turns to backward,
a link that is behind compute has nothing to do: the last gather is there, and the first gradients
are yet to come. So where parts of a group may travel alone, the first and the last stays of forward
are cut in several, and backward behind the gradients of each part.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from operator import attrgetter
from statistics import median
from types import MappingProxyType
from typing import TypeVar

from torch import fx

from graphshard.graph.owners import owner
from graphshard.graph.program import compute_nodes
from graphshard.pricing.liveness import tensor_bytes
from graphshard.pricing.usage import GroupUse, ParamUse, Usage

_Use = TypeVar("_Use", GroupUse, ParamUse)

# A wait may come earlier by this part of the time of the ops that read the group, a release or a
# reduction later by this part of the time since the cut before: exposed time at the worst, against
# the traffic of tensors that cross.
SLACK = 0.1
# So many stays of forward are cut inside: at its start, and before it turns to backward. There a
# link that is hardly behind compute has work without a break only after some blocks.
AT_START, AT_TURN = 1, 3
# A stay at which parts of a group travel alone is cut once between each of these parts of its time.
INSIDE = ((0.2, 0.6), (0.6, 0.9))


def aligned(
    usage: Usage,
    crossing: Sequence[int],
    us: Sequence[float],
    *,
    fused: Sequence[int] = (),
    inside: bool = False,
    late: Mapping[tuple[int, int], int] = MappingProxyType({}),
) -> Usage:
    """`usage` with its uses and reductions moved to cuts, which it names as `regions`.

    crossing: bytes that cross place p, from the ops before op p to op p and later; one more entry
    than ops. us: of each op. fused: of `crossing`, what is stored only where a cut is between, so
    that a cut before a stay may come earlier than SLACK for it. inside: parts of a group may travel
    alone, so stays are cut inside. late: what `late_params` says of forward, if parts of gradients
    may be reduced alone.
    """
    times = [0.0, *accumulate(us)]
    done = _done(usage)
    cuts = {0, usage.num_ops}
    for first, last in _live_spans(usage):
        slack = SLACK * (times[last + 1] - times[first])
        before = max((p for p in done if p <= first), default=0)
        low = bisect_left(times, times[first] - slack, hi=first)
        while fused and low > before and fused[low]:
            low -= 1
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
    if inside:
        for span in _long_live_spans(usage, times):
            cuts.update(_inside(span, crossing, times))
    cuts.update(_behind_late(usage, crossing, times, late))
    return _moved(usage, tuple(sorted(cuts)))


def late_params(forward: Usage) -> dict[tuple[int, int], int]:
    """Group and place of the parameters that a stay with cuts inside reads only behind one of them,
    with the number of that cut, from 1."""
    regions: dict[int, dict[int, int]] = defaultdict(dict)
    for use in forward.params:
        regions[use.group][use.param] = bisect_right(forward.regions, use.first)
    found: dict[tuple[int, int], int] = {}
    for group, firsts in regions.items():
        numbers = {region: number for number, region in enumerate(sorted(set(firsts.values())))}
        if max(numbers) - min(numbers) <= len(INSIDE):  # one stay; a root has several far apart
            found |= {(group, param): numbers[region] for param, region in firsts.items()}
    return {place: number for place, number in found.items() if number}


@dataclass(frozen=True, slots=True)
class _LiveSpan:
    """first, last: ops. reads: ops that read a parameter of the group first, in rising order."""

    first: int
    last: int
    reads: tuple[int, ...]


def _long_live_spans(usage: Usage, times: Sequence[float]) -> set[_LiveSpan]:
    """The first and the last few of those that read parameters for half of their time (a last norm
    and a head do not), and are not much shorter than the others (an embedding is)."""
    reads = sorted(use.first for use in usage.params)
    found = [
        _LiveSpan(first, last, tuple(reads[bisect_left(reads, first) : bisect_right(reads, last)]))
        for first, last in _live_spans(usage)
    ]
    lengths = [times[span.last + 1] - times[span.first] for span in found]
    typical = median(lengths or [0.0])
    long = [
        span
        for span, length in zip(found, lengths, strict=True)
        if length >= typical / 2 and times[span.reads[-1]] - times[span.first] >= length / 2
    ]
    return {*long[:AT_START], *long[-AT_TURN:]}


def _inside(span: _LiveSpan, crossing: Sequence[int], times: Sequence[float]) -> Iterator[int]:
    """Cheap cuts inside the stay; a parameter is read first before, between and behind them."""
    length = times[span.last + 1] - times[span.first]
    read = span.first
    for shares in INSIDE:
        low, high = (bisect_left(times, times[span.first] + share * length) for share in shares)
        low, high = max(low, read + 1), min(high, span.reads[-1])
        if low <= high:
            cut = _cheapest(crossing, low, high, late=True)
            read = span.reads[bisect_left(span.reads, cut)]
            yield cut


def _behind_late(
    usage: Usage,
    crossing: Sequence[int],
    times: Sequence[float],
    late: Mapping[tuple[int, int], int],
) -> Iterator[int]:
    """Cheap cuts soon after the gradients of what forward reads behind each cut are complete."""
    for reduction in usage.reductions:
        comes = dict(reduction.comes)
        numbers = {p: late[reduction.group, p] for p in comes if (reduction.group, p) in late}
        for number in set(numbers.values()):
            place = max(comes[p] for p, behind in numbers.items() if behind >= number) + 1
            if place < usage.num_ops and place <= max(comes.values()):
                slack = SLACK * (times[max(comes.values())] - times[min(comes.values())])
                high = max(bisect_right(times, times[place] + slack) - 1, place)
                yield _cheapest(crossing, place, high, late=False)


def crossing_bytes(graph: fx.Graph, among: Container[fx.Node] | None = None) -> list[int]:
    """Bytes of what ops before each place make and later ops read, through views. among: of these
    alone."""
    place = {node: index for index, node in enumerate(compute_nodes(graph))}
    last: dict[fx.Node, int] = {}
    for node, index in place.items():
        for source in node.all_input_nodes:
            last[owner(source)] = index
    changes = [0] * (len(place) + 2)
    for node, index in last.items():
        if among is not None and node not in among:
            continue
        if (born := place.get(node)) is not None and index > born:
            size = tensor_bytes(node)
            changes[born + 1] += size
            changes[index + 1] -= size
    return list(accumulate(changes[: len(place) + 1]))


def _done(usage: Usage) -> list[int]:
    """Places at which a group is read for the last time or its gradients are complete."""
    ready = {reduction.after + 1 for reduction in usage.reductions}
    released = {use.last + 1 for use in usage.uses if use.last is not None}
    return sorted(ready | released)


def _live_spans(usage: Usage) -> list[tuple[int, int]]:
    """First and last op of each stay at one group, before another group's parameters are read."""
    order = sorted(usage.params, key=attrgetter("first", "group", "param"))
    stays: list[list[ParamUse]] = [list(u) for _, u in groupby(order, key=attrgetter("group"))]
    ends = [*(span[0].first - 1 for span in stays[1:]), usage.num_ops - 1][: len(stays)]
    return [
        (span[0].first, max(span[0].first, min(end, max(u.last or u.first for u in span))))
        for span, end in zip(stays, ends, strict=True)
    ]


def _cheapest(crossing: Sequence[int], low: int, high: int, *, late: bool) -> int:
    """The last or first of the places from `low` to `high` that the fewest bytes cross."""
    return min(range(low, high + 1), key=lambda p: (crossing[p], -p if late else p))


def _moved(usage: Usage, cuts: tuple[int, ...]) -> Usage:
    def down(op: int) -> int:
        return cuts[bisect_right(cuts, op) - 1]

    def up(op: int) -> int:
        """The last op of the region of `op`."""
        return cuts[bisect_left(cuts, op + 1)] - 1

    def use(one: _Use) -> _Use:
        last = None if one.last is None else up(one.last)
        return replace(one, first=min(down(one.first), usage.num_ops - 1), last=last)

    return replace(
        usage,
        uses=tuple(map(use, usage.uses)),
        params=tuple(map(use, usage.params)),
        reductions=tuple(
            replace(r, after=up(r.after), comes=tuple((param, up(op)) for param, op in r.comes))
            for r in usage.reductions
        ),
        regions=cuts,
    )
