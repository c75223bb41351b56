"""From the costs of a model with few blocks to that of the model with all of them.

In: costs in which `Repeat.captured` alike blocks stand in a row. Out: what they would be with the
whole row, op by op; or None where blocks EARLY - 1 and EARLY do not repeat exactly, so that
nothing can be said. What is repeated in each direction is the one of these two that comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

from graphshard.offline.repeats import EARLY, Repeat, is_inside
from graphshard.offline.unroll_lifetimes import Row, unrolled_lifetimes
from graphshard.pricing.held import HeldValue
from graphshard.pricing.liveness import Live
from graphshard.pricing.offload import OffloadUse
from graphshard.pricing.op_costs import GraphCosts, OpCosts
from graphshard.pricing.recompute import RecomputeUnit
from graphshard.pricing.usage import GradReady, GroupUse, ParamUse
from graphshard.schedule.plan import Direction, GroupInfo

# A group is named in a graph by a float32 scalar (`graphshard.runtime.live.register`).
ANCHOR_BYTES = 4
_Item = TypeVar("_Item", GroupUse, ParamUse, GradReady)
_Unit = TypeVar("_Unit", RecomputeUnit, OffloadUse)


@dataclass(frozen=True, slots=True)
class _Naming:
    """Numbers of groups in the short costs and in the whole ones.

    owner: short number -> (block, suffix of the FQN below the block), for groups of blocks.
    moved: short number -> its number in the whole. copy: (block of the whole, suffix) -> number.
    """

    repeat: Repeat
    groups: tuple[GroupInfo, ...]
    owner: Mapping[int, tuple[int, str]]
    moved: Mapping[int, int]
    copy: Mapping[tuple[int, str], int]


@dataclass(frozen=True, slots=True)
class _Insert:
    """`copies` more runs of the ops [start, stop), right after them.

    blocks: the captured blocks in the order of this direction. early: so many of them come before
    the copies; the last of these is the one that is repeated. firsts: the first op of each.
    """

    start: int
    stop: int
    copies: int
    blocks: tuple[int, ...]
    early: int
    firsts: Mapping[int, int]

    @property
    def row(self) -> Row:
        return Row(self.firsts, self.start, self.period)

    @property
    def period(self) -> int:
        return self.stop - self.start

    @property
    def added(self) -> int:
        return self.copies * self.period

    def moved(self, block: int | None, op: int) -> int:
        """The new number of op `op` of a captured block, or of none."""
        late = op >= self.stop if block is None else self.blocks.index(block) >= self.early
        return op + self.added if late else op

    def copied(self, copy: int, op: int) -> int:
        return op + copy * self.period


def unrolled(costs: GraphCosts, repeat: Repeat, infos: Sequence[GroupInfo]) -> GraphCosts | None:
    """`costs` with all blocks of `repeat`. infos: the groups of the whole model, in any order."""
    naming = _naming(costs, repeat, infos)
    if naming is None:
        return None
    inserts: dict[Direction, _Insert] = {}
    for direction, op_costs in costs.by_direction.items():
        insert = _insert(op_costs, naming)
        if insert is None:
            return None
        inserts[direction] = insert
    by_direction = {
        direction: _longer(op_costs, naming, inserts[direction])
        for direction, op_costs in costs.by_direction.items()
    }
    found = _units(costs.units, naming, inserts, attrgetter("number"))
    units = tuple(sorted(found, key=lambda unit: (unit.after, unit.number)))
    copies = _units(costs.offloads, naming, inserts, lambda offload: 0)
    kept = _with_kept(by_direction, naming.groups)
    held = tuple(_held(costs.held, inserts[Direction.FORWARD]))
    rows = {direction: insert.row for direction, insert in inserts.items()}
    tensors = unrolled_lifetimes(costs.lifetimes, repeat, rows)
    return GraphCosts(costs.name, naming.groups, kept, units, held, tuple(copies), tensors)


def _naming(costs: GraphCosts, repeat: Repeat, infos: Sequence[GroupInfo]) -> _Naming | None:
    """None if the whole model lacks a group."""
    owner = owners_of(costs.groups, repeat)
    repeated = [g.id for g in costs.groups if owner.get(g.id, (None,))[0] == EARLY - 1]
    shift = repeat.count - repeat.captured
    names: list[tuple[str, int | None, tuple[int, str] | None]] = []
    for group in costs.groups:
        block, suffix = owner.get(group.id, (None, ""))
        if block is None:
            names.append((group.fqn, group.id, None))
        else:
            place = block if block < EARLY else block + shift
            names.append((repeat.names[place] + suffix, group.id, None))
        if repeated and group.id == repeated[-1]:
            for place in range(EARLY, EARLY + shift):
                for number in repeated:
                    key = place, owner[number][1]
                    names.append((repeat.names[place] + key[1], None, key))
    known = {info.fqn: info for info in infos}
    if not repeated or any(name not in known for name, _, _ in names):
        return None
    return _Naming(
        repeat,
        tuple(replace(known[name], id=number) for number, (name, _, _) in enumerate(names)),
        owner,
        {short: number for number, (_, short, _) in enumerate(names) if short is not None},
        {key: number for number, (_, _, key) in enumerate(names) if key is not None},
    )


def owners_of(groups: Iterable[GroupInfo], repeat: Repeat) -> dict[int, tuple[int, str]]:
    """The number of a group of a captured block -> the block, and the group's name there."""
    return {g.id: found for g in groups if (found := _owner(g.fqn, repeat)) is not None}


def _owner(fqn: str, repeat: Repeat) -> tuple[int, str] | None:
    for block, name in enumerate(repeat.names[: repeat.captured]):
        if is_inside(fqn, name):
            return block, fqn.removeprefix(name)
    return None


# -- what repeats ----------------------------------------------------------------------------------


def _insert(op_costs: OpCosts, naming: _Naming) -> _Insert | None:
    """None unless the last early block and the one after it are alike, op by op."""
    firsts: dict[int, int] = {}
    for use in op_costs.usage.uses:
        if use.group in naming.owner:
            block = naming.owner[use.group][0]
            firsts[block] = min(use.first, firsts.get(block, use.first))
    blocks = sorted(firsts, key=lambda block: firsts[block])
    repeat = naming.repeat
    forward = list(range(repeat.captured))
    if blocks not in (forward, forward[::-1]):
        return None
    early = EARLY if blocks == forward else repeat.late
    start, middle, stop = (firsts[block] for block in blocks[early - 1 : early + 2])
    copies = repeat.count - repeat.captured
    insert = _Insert(start, middle, copies, tuple(blocks), early, firsts)
    first, second = (
        _items(op_costs, naming, blocks[early - 1], start),
        _items(op_costs, naming, blocks[early], middle),
    )
    alike = (
        middle - start == stop - middle
        and op_costs.us[start:middle] == op_costs.us[middle:stop]
        and _growth(op_costs, insert) is not None
        and first == second
        and _cuts(op_costs, start, middle) == _cuts(op_costs, middle, stop)
        and not _strangers(op_costs, naming, range(start, stop))
    )
    return insert if alike else None


def _cuts(op_costs: OpCosts, start: int, stop: int) -> list[int]:
    """Where compiled code is cut after `start` and until `stop`, counted from `start`."""
    return [cut - start for cut in op_costs.usage.regions if start < cut <= stop]


def _growth(op_costs: OpCosts, insert: _Insert) -> Live | None:
    """What one more block adds to the bytes alive; None if that differs from op to op."""
    one = op_costs.live[insert.start : insert.stop]
    next_one = op_costs.live[insert.stop : insert.stop + insert.period]
    found = {_plus(b, a, -1) for a, b in zip(one, next_one, strict=True)}
    return found.pop() if len(found) == 1 else None


def _plus(live: Live, other: Live, times: int) -> Live:
    return Live(
        live.inputs + times * other.inputs,
        live.made + times * other.made,
        live.grads + times * other.grads,
    )


def _items(op_costs: OpCosts, naming: _Naming, block: int, start: int) -> list[Any]:
    """Uses and gradients of one block, counted from its start."""

    def own(items: Sequence[_Item]) -> list[Any]:
        mine = [item for item in items if naming.owner.get(item.group, (None,))[0] == block]
        back = [replace(_shifted(item, lambda op: op - start), group=0) for item in mine]
        return [
            (naming.owner[item.group][1], moved) for item, moved in zip(mine, back, strict=True)
        ]

    usage = op_costs.usage
    return [own(usage.uses), own(usage.params), own(usage.reductions)]


def _strangers(op_costs: OpCosts, naming: _Naming, inside: range) -> bool:
    """A group that is in no block is first or last used, or reduced, among the repeated ops."""
    usage = op_costs.usage
    ends = [(u.group, op) for u in usage.uses for op in (u.first, u.last) if op is not None]
    ends += [(r.group, r.after) for r in usage.reductions]
    return any(op in inside for group, op in ends if group not in naming.owner)


# -- the whole row ---------------------------------------------------------------------------------


def _longer(op_costs: OpCosts, naming: _Naming, insert: _Insert) -> OpCosts:
    start, stop, copies = insert.start, insert.stop, insert.copies
    us = op_costs.us[:stop] + op_costs.us[start:stop] * copies + op_costs.us[stop:]
    old, growth = op_costs.usage, _growth(op_costs, insert)
    assert growth is not None
    backward = old.direction is Direction.BACKWARD
    # Backward ends with nothing saved, however many blocks there are; forward has the anchors of
    # all groups from the start.
    anchors = copies * len({suffix for _, suffix in naming.copy}) * ANCHOR_BYTES
    held = Live(-copies * growth.inputs if backward else anchors, 0, 0)
    live = [
        *op_costs.live[:stop],
        *(_plus(one, growth, n) for n in range(1, copies + 1) for one in op_costs.live[start:stop]),
        *(_plus(one, growth, copies) for one in op_costs.live[stop:]),
    ]

    def place(copy: int) -> int:
        """The block of the whole that copy `copy` of the repeated block is."""
        return naming.repeat.count - naming.repeat.late - copy if backward else EARLY - 1 + copy

    def all_of(items: Sequence[_Item]) -> tuple[_Item, ...]:
        return tuple(_all_items(items, naming, insert, place))

    repeated = _cuts(op_costs, start, stop)
    regions = [
        *(cut for cut in old.regions if cut <= stop),
        *(insert.copied(copy, start + cut) for copy in range(1, copies + 1) for cut in repeated),
        *(cut + insert.added for cut in old.regions if cut > stop),
    ]
    usage = replace(
        old,
        regions=tuple(regions),
        num_ops=old.num_ops + insert.added,
        uses=all_of(old.uses),
        params=all_of(old.params),
        reductions=all_of(old.reductions),
    )
    return OpCosts(usage, us, tuple(_plus(one, held, 1) for one in live))


def _all_items(
    items: Sequence[_Item], naming: _Naming, insert: _Insert, place: Callable[[int], int]
) -> Iterator[_Item]:
    """The items with their new numbers; the copies come after those that they are copies of."""
    owner = {item.group: naming.owner.get(item.group, (None, "")) for item in items}
    repeated = [item for item in items if owner[item.group][0] == insert.blocks[insert.early - 1]]
    for item in items:
        block = owner[item.group][0]
        moved = _shifted(item, partial(insert.moved, block))
        yield replace(moved, group=naming.moved[item.group])
        if repeated and item is repeated[-1]:
            for copy in range(1, insert.copies + 1):
                for one in repeated:
                    group = naming.copy[place(copy), owner[one.group][1]]
                    yield replace(_shifted(one, partial(insert.copied, copy)), group=group)


def _shifted(item: _Item, at: Callable[[int], int]) -> _Item:
    """The item with other ops. at: old op -> new one."""
    if isinstance(item, GradReady):
        comes, made = (tuple((p, at(op)) for p, op in pairs) for pairs in (item.comes, item.made))
        return replace(item, after=at(item.after), comes=comes, made=made)
    return replace(item, first=at(item.first), last=None if item.last is None else at(item.last))


def _with_kept(
    by_direction: Mapping[Direction, OpCosts], groups: Sequence[GroupInfo]
) -> dict[Direction, OpCosts]:
    backward = by_direction.get(Direction.BACKWARD)
    needed = {use.group for use in backward.usage.uses} if backward is not None else set()
    kept = frozenset(g.id for g in groups if not g.reshard_after_forward and g.id in needed)
    return {d: replace(s, usage=replace(s.usage, kept=kept)) for d, s in by_direction.items()}


def _held(values: Sequence[HeldValue], forward: _Insert) -> Iterator[HeldValue]:
    for value in values:
        yield replace(value, at=forward.moved(None, value.at))
        if forward.start <= value.at < forward.stop:
            for copy in range(1, forward.copies + 1):
                yield replace(value, at=forward.copied(copy, value.at))


def _units(
    units: Sequence[_Unit],
    naming: _Naming,
    inserts: Mapping[Direction, _Insert],
    number: Callable[[_Unit], int],
) -> Iterator[_Unit]:
    """What may be computed again in the whole, or what it offloads. Nodes of copies are nowhere, so
    they name none. number: of a unit among those of its group."""
    if not units:
        return
    forward, backward = inserts[Direction.FORWARD], inserts[Direction.BACKWARD]
    first_in_backward = {
        (s, number(u)): u
        for u in units
        for b, s in [naming.owner.get(u.group, (0, ""))]
        if b == EARLY
    }
    for unit in units:
        block, suffix = naming.owner.get(unit.group, (None, ""))
        yield replace(
            unit,
            group=naming.moved[unit.group],
            after=forward.moved(block, unit.after),
            before=backward.moved(block, unit.before),
        )
        if block != EARLY - 1 or (suffix, number(unit)) not in first_in_backward:
            continue
        for copy in range(1, forward.copies + 1):
            place = block + copy
            late = naming.repeat.count - naming.repeat.late - place
            yield replace(
                unit,
                group=naming.copy[place, suffix],
                after=forward.copied(copy, unit.after),
                before=backward.copied(late, first_in_backward[suffix, number(unit)].before),
            )
