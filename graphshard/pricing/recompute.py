"""What backward could compute again instead of saving: activations of a group's inner forward.

In: a placed program and its costs. Out: `RecomputeUnit`s, one for each op of a group's forward that
makes what is saved, with the nodes to tag for the partition, the bytes that this frees and the time
that it costs. Random and writing ops are never repeated, nor what reads what the graph writes to (a
norm's running statistics), nor what the user's own checkpointing already decides.

Each is computed from what the others save, or compute again, so that any of them may be chosen:
they free together what they free one by one, and cost together at most what they cost one by one.
Where a smaller value on the way to an activation is worth saving in its place, there are two units:
what makes it from that value, and, beyond the first, the rest (`rungs`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from operator import attrgetter
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.graph.origins import origin_of
from graphshard.graph.owners import fills_memory, maker, owner
from graphshard.graph.program import Program, compute_nodes, is_view, output_node, step_of
from graphshard.planner.activations import Recompute
from graphshard.planner.checked import checked
from graphshard.planner.problem import Problem
from graphshard.pricing.liveness import tensor_bytes
from graphshard.pricing.repeatable import repeatable, size_deciders, written_inputs
from graphshard.pricing.rungs import Rung, ancestors, rungs
from graphshard.pricing.usage import GroupUse, Usage
from graphshard.schedule.plan import Activation, GroupInfo, Origin, Recomputed


@dataclass(frozen=True, slots=True)
class RecomputeUnit:
    """`nodes` (names in the joint graph) are computed again: activation `number` of a group.

    Their memory, `saved_bytes`, is free between forward op `after` and backward op `before`;
    backward takes `extra_us` longer. origin: what made it. needs: the number of the unit of this
    group that has to be chosen too; both figures are what this one adds to it. op: what makes the
    activation. held_bytes: what the host would hold of it; 0 where it cannot leave.
    """

    group: int
    number: int
    nodes: tuple[str, ...]
    after: int
    before: int
    saved_bytes: int
    extra_us: float
    origin: Origin
    needs: int | None = None
    op: str = ""
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ChosenUnits:
    """again: to be computed again. offloaded: the host holds what they free."""

    again: tuple[RecomputeUnit, ...] = ()
    offloaded: tuple[RecomputeUnit, ...] = ()

    @property
    def ops_offloaded(self) -> dict[str, int]:
        """The ops whose results the host holds, each with its group."""
        return {unit.op: unit.group for unit in self.offloaded}


NO_UNITS = ChosenUnits()


def units(program: Program, forward: Usage, us: Sequence[float]) -> tuple[RecomputeUnit, ...]:
    """Units of a placed program that free memory. us: of each forward op."""
    if program.forward is None or program.backward is None:
        return ()
    compute = compute_nodes(program.forward.graph)
    results, saved = returned(program)
    outside, kept = set(map(owner, results)), set(map(owner, saved))
    readers = _first_reader(program.backward.graph)
    written = written_inputs(program.forward.graph)
    decisive = size_deciders(program.forward.graph)
    # Both graphs are copies of one joint graph, where a name stands for one op.
    names = {node.name for node in compute_nodes(program.backward.graph)}
    again = {node for node in compute if node.name in names}
    once = {n: own_us for n, own_us in zip(compute, us, strict=True) if n not in again}
    last_views = _last_views(compute)
    found: list[RecomputeUnit] = []
    for group, first, last in _innermost(forward.uses):
        ops = compute[first : last + 1]
        made = set(ops)
        ops += [view for view in last_views if view not in made and owner(view) in made]
        inside = repeatable(ops, group, outside, written, decisive)
        freed = [n for n in saved if n in inside and owner(n) in inside and n.name in readers]
        span = _Span(inside, freed, {inside[n] for n in freed}, again, kept, once)
        found += sorted(_units_of(group, last, span, readers), key=attrgetter("number"))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Span:
    """The forward of one group: ops that may run twice, in order, each with its maker; those of
    their results that could be freed, and the makers of these. Of all forward: what runs twice in
    any case, what is saved, and the microseconds of what does not run twice in any case.

    What is asked of one activation looks at its neighbours alone: a group may have thousands.
    """

    inside: Mapping[fx.Node, fx.Node]
    freed: Sequence[fx.Node]
    makers: Collection[fx.Node]
    again: Collection[fx.Node]
    kept: Collection[fx.Node]
    once: Mapping[fx.Node, float]

    def rungs(self, own: Sequence[fx.Node]) -> list[Rung]:
        """Ways to make `own` again. Each reads what is saved anyway, or has to be then."""
        freed = _owners(own)

        def freed_bytes(nodes: Sequence[fx.Node]) -> int:
            more = [n for n in _inputs(nodes) if n in freed or n not in self.kept]
            return sum(map(tensor_bytes, freed)) - sum(map(tensor_bytes, more))

        return rungs(own, self.repeated(own), freed_bytes, self.once)

    def repeated(self, own: Sequence[fx.Node]) -> list[fx.Node]:
        """`own` and what it is made from, where the rest of `freed` is there. Results of one op are
        computed again together."""
        makers = {self.inside[n] for n in own}

        def is_repeated(node: fx.Node) -> bool:
            made_by = self.inside.get(node)
            return made_by in makers or (made_by is not None and made_by not in self.makers)

        return ancestors(own, is_repeated)

    def readers(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Views of `nodes`, and what is made from them and runs twice in any case: else they or
        their source would be saved instead."""
        found, outside, queue = set(nodes), set[fx.Node](), list(nodes)
        while queue:
            node = queue.pop()
            for user in node.users:
                shows = owner(user) in found
                if user in found or user in outside:
                    continue
                if user in self.inside and (shows or (node in found and user in self.again)):
                    found.add(user)
                elif shows:  # a view of it may be inside
                    outside.add(user)
                else:
                    continue
                queue.append(user)
        return sorted(found.difference(nodes))


def _units_of(
    group: int, last: int, span: _Span, readers: Mapping[str, int]
) -> Iterator[RecomputeUnit]:
    """Of the group whose forward, `span`, ends with op `last`. readers: `_first_reader`'s."""
    by_op = _by_op(span.freed)
    for first, own in enumerate(by_op):
        before = Rung((), 0, 0.0, instead=maker(own[0]))
        needs = None
        for number, rung in zip(count(first, len(by_op)), span.rungs(own), strict=False):
            assert before.instead is not None
            yield RecomputeUnit(
                group=group,
                number=number,
                nodes=tuple(n.name for n in (*rung.nodes, *span.readers(rung.nodes))),
                after=last,
                before=min(readers[n.name] for n in own),
                saved_bytes=rung.saved_bytes - before.saved_bytes,
                extra_us=rung.extra_us - before.extra_us,
                origin=origin_of(maker(before.instead)),
                needs=needs,
                op=maker(own[0]).name,
                held_bytes=_held_bytes(own) if needs is None else 0,
            )
            before, needs = rung, number


def _held_bytes(own: Sequence[fx.Node]) -> int:
    """Two values that share their memory cannot leave."""
    alone = len(own) == len(_owners(own)) and all(map(fills_memory, own))
    return sum(map(tensor_bytes, own)) if alone else 0


def _by_op(freed: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """`freed` by the op that makes it. A place in this list means the same whatever the sizes are,
    so that ranks with batches of other lengths mean the same by an activation's number."""
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in freed:
        found.setdefault(maker(node), []).append(node)
    return list(found.values())


def activation_of(unit: RecomputeUnit, groups: Sequence[GroupInfo]) -> Activation:
    return Activation(groups[unit.group].fqn, unit.number)


def chosen_units(
    units: Sequence[RecomputeUnit], groups: Sequence[GroupInfo], chosen: Recomputed
) -> ChosenUnits:
    """Those of `units` that `chosen` names. groups: under the names that `chosen` has them by."""

    def those(wanted: Collection[Activation]) -> tuple[RecomputeUnit, ...]:
        return tuple(unit for unit in units if activation_of(unit, groups) in wanted)

    return ChosenUnits(those(set(chosen.activations)), those(set(chosen.offloaded)))


def offered(
    problem: Problem, groups: Sequence[GroupInfo], found: Sequence[RecomputeUnit]
) -> Problem:
    """`problem` with the units as options; same order."""
    regions = regions_of(problem)
    places = {(unit.group, unit.number): place for place, unit in enumerate(found)}
    options = tuple(
        Recompute(
            activation_of(unit, groups),
            *regions(unit.after, unit.before),
            saved_bytes=unit.saved_bytes,
            extra_us=unit.extra_us,
            needs=None if unit.needs is None else places[unit.group, unit.needs],
        )
        for unit in found
    )
    return checked(replace(problem, recompute=options))


def regions_of(problem: Problem) -> Callable[[int, int], tuple[int, int]]:
    """From an op of forward and one of backward to the regions that they are in."""
    forward, backward = (
        [0, *accumulate(region.num_ops for region in regions)]
        for regions in (problem.forward, problem.backward)
    )

    def found(after: int, before: int) -> tuple[int, int]:
        return bisect_right(forward, after) - 1, bisect_right(backward, before) - 1

    return found


def tag(joint: fx.Graph, chosen: Sequence[RecomputeUnit], kept: Collection[str] = ()) -> None:
    """Have the partition compute the chosen units again, and save `kept` (names)."""
    # One region for each group: of two regions, what the second reads of the first is saved.
    regions = {group: place for place, group in enumerate(dict.fromkeys(u.group for u in chosen))}
    place = {name: regions[unit.group] for unit in chosen for name in unit.nodes}
    for node in joint.nodes:
        if "recompute" in node.meta or node.op != "call_function":
            continue
        if node.name in place:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = place[node.name]
        elif node.name in kept:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def kept_beside(program: Program, chosen: Sequence[RecomputeUnit]) -> frozenset[str]:
    """What the partition of `program` saves, as far as `chosen` does not free it, and what has to
    be saved because `chosen` reads it."""
    assert program.forward is not None
    _, saved = returned(program)
    again = {name for unit in chosen for name in unit.nodes}
    repeated = [n for n in program.forward.graph.nodes if n.name in again]
    kept = [n for n in saved if n.name not in again]
    return frozenset(n.name for n in (*kept, *_inputs(repeated)))


def returned(program: Program) -> tuple[dict[fx.Node, None], dict[fx.Node, None]]:
    """What forward returns: to the caller, and for backward."""
    assert program.forward is not None
    outputs: Any = output_node(program.forward.graph).args[0]
    results, rest = outputs[: program.num_outputs], outputs[program.num_outputs :]
    return _nodes(results), _nodes(rest)


def _nodes(values: Sequence[Any]) -> dict[fx.Node, None]:
    return dict.fromkeys(value for value in values if isinstance(value, fx.Node))


def _innermost(uses: Sequence[GroupUse]) -> Iterator[tuple[int, int, int]]:
    """(group, first, last) of the uses in which no other group's use begins or ends, unless that
    goes on beyond on both sides: no op is in two of them."""
    spans = [(u.group, u.first, u.last) for u in uses if u.last is not None and u.last >= u.first]
    for span in spans:
        _, first, last = span
        others = (o for o in spans if o is not span and not _encloses(o[1:], span[1:]))
        if not any(first <= end <= last for o in others for end in o[1:]):
            yield span


def _encloses(outer: tuple[int, int], inner: tuple[int, int]) -> bool:
    return outer != inner and outer[0] <= inner[0] and inner[1] <= outer[1]


def _last_views(ops: Sequence[fx.Node]) -> list[fx.Node]:
    """Views that forward makes for backward alone. Where they are not the model's own but their
    gradients', as a transposed operand, they come after all groups."""
    found: dict[fx.Node, None] = {}
    for node in reversed(ops):
        if is_view(node) and all(user.op == "output" or user in found for user in node.users):
            found[node] = None
    return list(reversed(found))


def _owners(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    return list(dict.fromkeys(map(owner, nodes)))


def _inputs(repeated: Sequence[fx.Node]) -> list[fx.Node]:
    """What `repeated` reads that the graph makes. Parameters are gathered again."""
    inner = set(repeated)
    sources = [s for n in repeated for s in n.all_input_nodes if s not in inner]
    made = [s for s in _owners(sources) if s.op == "call_function" and "val" in s.meta]
    return [s for s in made if step_of(s) is None]


def _first_reader(backward: fx.Graph) -> dict[str, int]:
    """Name of each saved tensor -> the first backward op that reads more than its shape."""
    compute = {node: index for index, node in enumerate(compute_nodes(backward))}
    found: dict[str, int] = {}
    for node in backward.find_nodes(op="placeholder"):
        reading = [compute[u] for u in _all_readers(node) if u in compute]
        if reading:
            found[node.name] = min(reading)
    return found


def _all_readers(node: fx.Node) -> Iterator[fx.Node]:
    """Readers of `node` and of its views."""
    for user in node.users:
        if is_view(user):
            yield from _all_readers(user)
        else:
            yield user
