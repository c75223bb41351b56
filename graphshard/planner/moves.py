"""Single changes of `Choices`, and the orders in which it pays to try them.

A move is only offered where the user left the decision open: `reshard_after_forward` at None, no
prefetch list in the direction, regrouping allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any

from graphshard.planner.activations import OffloadOption, Recompute
from graphshard.planner.choices import (
    Bucket,
    Choices,
    Cuts,
    first_use,
    gather_buckets,
    ready_after,
    reduce_buckets,
)
from graphshard.planner.fsdp2 import has_lists
from graphshard.planner.memo import Memo, once
from graphshard.planner.problem import Group, Problem, gather_of
from graphshard.schedule.plan import Activation, Direction

# Regions by which a reduction may be held back.
DELAYS = (1, 2, 3, 5, 8)


class What(StrEnum):
    """What a move changes: a field of `Choices`."""

    KEPT = "kept"
    ACROSS = "across"
    ON_NODE = "on_node"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCE = "reduce"
    DELAY = "delays"


@dataclass(frozen=True, slots=True)
class Move:
    """Flip `item`: a group, or an option of recomputation or of offloading.

    split: the group's split, not its join. slots: the delay of its reduction, in regions. instead:
    options of the other of the two that mean nothing beside it.
    """

    what: What
    item: int
    split: bool = False
    slots: int = 0
    instead: tuple[int, ...] = ()


# Of these a group is in one at most, but that what is kept between micro-steps is kept before it.
_STAYS = {
    What.KEPT: (What.ACROSS, What.ON_NODE),
    What.ON_NODE: (What.ACROSS, What.KEPT),
    What.ACROSS: (What.ON_NODE,),
}
_FREES = {What.RECOMPUTE: What.OFFLOAD, What.OFFLOAD: What.RECOMPUTE}


@dataclass(slots=True)
class _Opened:
    """`choices` while moves change them: many moves cost no more than one."""

    choices: Choices
    delays: dict[int, int]
    items: dict[What, set[int]] = field(default_factory=dict)
    cuts: dict[tuple[What, str], set[int]] = field(default_factory=dict)

    def of(self, what: What) -> set[int]:
        if what not in self.items:
            self.items[what] = set(getattr(self.choices, what))
        return self.items[what]

    def cut(self, what: What, name: str) -> set[int]:
        if (what, name) not in self.cuts:
            self.cuts[what, name] = set(getattr(getattr(self.choices, what), name))
        return self.cuts[what, name]

    def closed(self) -> Choices:
        changed: dict[str, Any] = {str(w): tuple(sorted(found)) for w, found in self.items.items()}
        for (what, name), found in self.cuts.items():
            cuts: Cuts = changed.get(str(what), getattr(self.choices, what))
            named: Any = {name: tuple(sorted(found))}
            changed[str(what)] = replace(cuts, **named)
        return replace(self.choices, delays=tuple(sorted(self.delays.items())), **changed)


def taken(choices: Choices, moves: Iterable[Move]) -> Choices:
    """`choices` with `moves` flipped, one after the other."""
    opened = _Opened(choices, dict(choices.delays))
    for move in moves:
        _flip(opened, move)
    return opened.closed()


def _flip(opened: _Opened, move: Move) -> None:
    """What is kept between micro-steps is kept from forward too, and of what is kept a node needs
    no shard."""
    if move.what is What.DELAY:
        if opened.delays.pop(move.item, 0) != move.slots:
            opened.delays[move.item] = move.slots
        return
    if move.what in _FREES:
        opened.of(_FREES[move.what]).difference_update(move.instead)
    for other in _STAYS.get(move.what, ()):
        opened.of(other).discard(move.item)
    if move.what is What.ACROSS:
        opened.of(What.KEPT).add(move.item)
    is_cut = move.what in (What.FORWARD, What.BACKWARD, What.REDUCE)
    name = "split" if move.split else "joined"
    items = opened.cut(move.what, name) if is_cut else opened.of(move.what)
    items ^= {move.item}


def unmoved(choices: Choices, family: Iterable[Move]) -> Choices:
    """`choices` with nothing of `family` taken."""
    for what in dict.fromkeys(m.what for m in family):
        if what in (What.KEPT, What.ACROSS, What.ON_NODE, What.RECOMPUTE, What.OFFLOAD):
            items = {m.item for m in family if m.what is what}
            left: Any = tuple(i for i in getattr(choices, what) if i not in items)
            choices = replace(choices, **{str(what): left})
            if what is What.KEPT:
                choices = replace(choices, across=tuple(n for n in choices.across if n in left))
        else:
            empty: Any = Cuts()
            choices = replace(choices, **{str(what): empty})
    return choices


def moves(memo: Memo) -> list[Move]:
    """Every open decision, those that usually matter most first."""
    found = list(_kept_moves(memo, _by_need(memo)))
    found += node_moves(memo)
    for what in (What.BACKWARD, What.FORWARD, What.REDUCE):
        found += _joins(memo, what)
        found += _splits(memo, what)
    found += [Move(What.ACROSS, g.id) for g in _carried(memo)]
    found += _delays(memo)
    # Most of them are settled by their price: a flip pays off where room is left over.
    found += recompute_moves(memo)
    found += offload_moves(memo)
    return found


def families(memo: Memo) -> list[list[Move]]:
    """Moves of one kind in an order in which a prefix makes sense; none of them empty."""
    dense, across = _dense_moves(memo)
    found = [
        recompute_moves(memo),
        offload_moves(memo),
        _dear_first(memo, offload_moves(memo)),
        dense,
        list(_kept_moves(memo, _by_need(memo))),
        node_moves(memo),
        across,
    ]
    for what in (What.BACKWARD, What.FORWARD, What.REDUCE):
        found.append(_cheap_joins(memo, what))
        found.append(_splits(memo, what))
    return [family for family in found if family]


def lean_choices(memo: Memo) -> Choices:
    """The choices with the least peak: nothing kept that need not be, all splits, all options."""
    kept = tuple(g.id for g in memo.problem.groups if _must_keep(memo, g))
    return Choices(
        kept=kept,
        across=tuple(
            n for n in kept if memo.problem.groups[n].keep_across and memo.problem.micro_steps > 1
        ),
        recompute=tuple(range(len(memo.problem.recompute))),
        forward=_all_split(memo, What.FORWARD),
        backward=_all_split(memo, What.BACKWARD),
        reduce=_all_split(memo, What.REDUCE),
    )


def still_open(memo: Memo, choices: Choices) -> list[Move]:
    """What may still be kept: from forward first, then between micro-steps, the densest first."""
    dense, across = _dense_moves(memo)
    return [m for m in (*dense, *across) if m.item not in getattr(choices, m.what)]


def stays(memo: Memo, choices: Choices) -> list[Move]:
    """What is kept in `choices` though it need not be: shards on nodes, then what stays gathered
    from forward, then between micro-steps; each the densest first."""
    dense, across = _dense_moves(memo)
    found = (*node_moves(memo), *dense, *across)
    return [m for m in found if m.item in getattr(choices, m.what)]


def _all_split(memo: Memo, what: What) -> Cuts:
    return Cuts(split=tuple(sorted(m.item for m in _splits(memo, what))))


# -- what is open --------------------------------------------------------------------------------


def _in_both(group: Group) -> bool:
    return all(group.use_in(d) is not None for d in Direction) and group.post_forward is None


def _must_keep(memo: Memo, group: Group) -> bool:
    carried = bool(group.keep_across) and memo.problem.micro_steps > 1
    return _in_both(group) and (group.reshard is False or carried)


def _kept_moves(memo: Memo, groups: Iterable[Group]) -> Iterable[Move]:
    for group in groups:
        if group.reshard is None and not _must_keep(memo, group):
            yield Move(What.KEPT, group.id)


def recompute_moves(memo: Memo) -> list[Move]:
    """The cheapest per byte first."""
    away = once(memo, "offload option of", lambda: _by_activation(memo.problem.offload_options))
    found = memo.problem.recompute
    return [
        Move(What.RECOMPUTE, i, instead=tuple(away.get(found[i].activation, ())))
        for i in _by_price(memo)
    ]


def offload_moves(memo: Memo) -> list[Move]:
    """Those first that have the longest way to backward: their copies have the most time."""
    return once(memo, "offload moves", lambda: _offload_moves(memo.problem))


def _offload_moves(problem: Problem) -> list[Move]:
    again = _by_activation(problem.recompute)

    def instead(option: OffloadOption) -> tuple[int, ...]:
        first = again.get(option.activation, [])
        return tuple(first + _needing(problem.recompute, first))

    options = problem.offload_options
    order = sorted(range(len(options)), key=lambda i: (options[i].alone.after, i))
    return [Move(What.OFFLOAD, i, instead=instead(options[i])) for i in order]


def _dear_first(memo: Memo, offloads: list[Move]) -> list[Move]:
    """In the place of what takes longest to compute again, for its bytes."""
    found = memo.problem.recompute

    def price(move: Move) -> float:
        own = [found[i] for i in move.instead[:1]]
        return max((o.extra_us / max(1, o.saved_bytes) for o in own), default=float("inf"))

    return sorted(offloads, key=price, reverse=True)


def _by_activation(
    options: Sequence[Recompute | OffloadOption],
) -> dict[Activation, list[int]]:
    found: dict[Activation, list[int]] = {}
    for index, option in enumerate(options):
        found.setdefault(option.activation, []).append(index)
    return found


def _needing(options: Sequence[Recompute], first: list[int]) -> list[int]:
    """The options that mean nothing without those of `first`."""
    found: list[int] = []
    for index, option in enumerate(options):
        if option.needs is not None and option.needs in (*first, *found):
            found.append(index)
    return found


def node_moves(memo: Memo) -> list[Move]:
    """Groups that may leave a shard on each node where they may be kept, but are not."""
    open_groups = (move.item for move in _kept_moves(memo, _by_need(memo)))
    return [Move(What.ON_NODE, n) for n in open_groups if memo.problem.groups[n].node is not None]


def _carried(memo: Memo) -> list[Group]:
    """Groups that may stay gathered between micro-steps."""
    if memo.problem.micro_steps == 1:
        return []
    may = (g for g in memo.problem.groups if g.keep_across is None and g.reshard is not True)
    return [g for g in may if _in_both(g)]


def _splits(memo: Memo, what: What) -> list[Move]:
    may_split = what is What.REDUCE and memo.problem.split_reductions
    if not (may_split or _may_regroup(memo, what)):
        return []
    many = [g for g in memo.problem.groups if len(g.parts) > 1 and g.world_size > 1]
    many.sort(key=lambda g: (-g.gathered_bytes, g.id))
    return [Move(what, g.id, split=True) for g in many]


def _delays(memo: Memo) -> list[Move]:
    """Reductions that let others go first."""
    if memo.problem.keeps_reduce_order:
        return []
    found = []
    for bucket in reduce_buckets(memo, Choices()):
        longest = len(memo.problem.backward) - 1 - ready_after(memo, bucket)
        slots = (n for n in DELAYS if n <= longest)
        found += [Move(What.DELAY, bucket.groups[0], slots=n) for n in slots]
    return found


def _may_regroup(memo: Memo, what: What) -> bool:
    if what is What.REDUCE:
        return memo.problem.regroup_reductions
    return memo.problem.regroup_gathers and not has_lists(memo.problem, Direction(str(what)))


def _dense_moves(memo: Memo) -> tuple[list[Move], list[Move]]:
    """What to keep from forward, and between micro-steps; each the densest first."""
    dense = sorted(_by_need(memo), key=_density)
    carried = sorted(_carried(memo), key=_density)
    return list(_kept_moves(memo, dense)), [Move(What.ACROSS, g.id) for g in carried]


def _joins(memo: Memo, what: What) -> list[Move]:
    return [Move(what, later.groups[0]) for _, later in pairwise(_stream(memo, what))]


def _cheap_joins(memo: Memo, what: What) -> list[Move]:
    """Joins, the smallest buckets first: there a launch weighs most."""
    pairs = list(pairwise(_stream(memo, what)))
    sizes = [sum(memo.problem.groups[b.groups[0]].gathered_bytes for b in pair) for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda i: (sizes[i], i))
    return [Move(what, pairs[i][1].groups[0]) for i in order]


def _stream(memo: Memo, what: What) -> list[Bucket]:
    """The stream's buckets with one group each."""
    if not _may_regroup(memo, what):
        return []
    if what is What.REDUCE:
        return reduce_buckets(memo, Choices())
    return gather_buckets(memo, Choices(), Direction(str(what)))


# -- what is worth most --------------------------------------------------------------------------


def _by_need(memo: Memo) -> list[Group]:
    """Groups used in both directions, those that backward needs first in front."""
    both = [g for g in memo.problem.groups if _in_both(g)]
    both.sort(key=lambda g: (first_use(memo, Bucket((g.id,)), Direction.BACKWARD), g.id))
    return both


def _density(group: Group) -> float:
    """Bytes to be held for each microsecond of gather that is saved; small is good."""
    saved_us = sum(gather_of(part, Direction.BACKWARD).us for part in group.parts)
    return group.gathered_bytes / saved_us if saved_us else float("inf")


def _by_price(memo: Memo) -> list[int]:
    """Options of recomputation, the cheapest per byte first."""

    def price(index: int) -> tuple[float, int]:
        option = memo.problem.recompute[index]
        return option.extra_us / max(1, option.saved_bytes), index

    return sorted(range(len(memo.problem.recompute)), key=price)
