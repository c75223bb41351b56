"""Costs of a coarser grouping from those of a finer one.

In: costs of a captured step and the groups of a world, of the finest grouping; and which of these
groups are one in another grouping. Out: the same for that grouping, as if it had been captured.
Compute is the same: only what travels together, and for how long it is there, changes. Of what
could be computed again, what one group hands to the next is missing, which a union of both could.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from graphshard.fsdp2.settings import GroupSettings, TrainableShards
from graphshard.pricing.op_costs import GraphCosts, OpCosts
from graphshard.pricing.recompute import RecomputeUnit
from graphshard.pricing.usage import GradReady, GroupUse, Usage
from graphshard.schedule.plan import GroupInfo
from graphshard.schedule.setting import Resharding


@dataclass(frozen=True, slots=True)
class Described:
    """A group on one world."""

    info: GroupInfo
    settings: GroupSettings


@dataclass(frozen=True, slots=True)
class Union:
    """Groups that are one. members: their names. is_root: the model's own group."""

    name: str
    members: tuple[str, ...]
    is_root: bool


@dataclass(frozen=True, slots=True)
class Merged:
    """Costs of a grouping on a world, and the settings of its groups."""

    costs: GraphCosts
    settings: tuple[GroupSettings, ...]


@dataclass(frozen=True, slots=True)
class _Numbers:
    """group: old number of a group -> new one. param: (old group, place) -> new place."""

    group: Mapping[int, int]
    param: Mapping[tuple[int, int], int]


def merged(
    costs: GraphCosts,
    world: Mapping[str, Described],
    unions: Sequence[Union],
    order: Sequence[str],
) -> Merged:
    """costs: of the finest grouping, whose groups `world` has by name. order: FQNs of parameters,
    as they stand in groups."""
    rank = {name: place for place, name in enumerate(order)}
    old = {g.fqn: g.id for g in costs.groups}
    used = [u for u in unions if any(name in old for name in u.members)]
    used.sort(key=lambda u: min(old[name] for name in u.members if name in old))
    group: dict[int, int] = {}
    param: dict[tuple[int, int], int] = {}
    found: list[Described] = []
    for number, union in enumerate(used):
        names = [name for name in union.members if name in old]
        places = sorted(
            ((name, place) for name in names for place in range(len(world[name].info.params))),
            key=lambda at: rank.get(world[at[0]].info.params[at[1]].fqn, len(rank)),
        )
        group |= {old[name]: number for name in names}
        param |= {(old[name], at): new for new, (name, at) in enumerate(places)}
        found.append(described([world[name] for name in names], union, number, places, world))
    numbers = _Numbers(group, param)
    infos = tuple(one.info for one in found)
    by_direction = {
        direction: _renumbered(op_costs, numbers, infos)
        for direction, op_costs in costs.by_direction.items()
    }
    return Merged(
        replace(
            costs,
            groups=infos,
            by_direction=by_direction,
            units=tuple(_units(costs.units, numbers)),
            offloads=tuple(replace(o, group=group[o.group]) for o in costs.offloads),
        ),
        tuple(one.settings for one in found),
    )


def described(
    parts: Sequence[Described],
    union: Union,
    number: int,
    places: Sequence[tuple[str, int]],
    world: Mapping[str, Described],
) -> Described:
    """One group of several. places: (name of a part, place in it) of each parameter, in order."""
    first = parts[0]
    params = tuple(world[name].info.params[place] for name, place in places)
    dtypes = [word for part in parts for word in part.info.reduce_dtype.split("+") if word]
    info = replace(
        first.info,
        id=number,
        fqn=union.name,
        params=params,
        gathered_bytes=sum(part.info.gathered_bytes for part in parts),
        reduce_bytes=sum(part.info.reduce_bytes for part in parts),
        reduce_dtype="+".join(dict.fromkeys(dtypes)),
        reshard_after_forward=not union.is_root,
    )
    own = [part.settings for part in parts]
    settings = replace(
        first.settings,
        is_root=union.is_root,
        shard_bytes=sum(one.shard_bytes for one in own),
        trainable=TrainableShards(
            bytes=sum(one.trainable.bytes for one in own),
            numel=sum(one.trainable.numel for one in own),
        ),
        reduce_item_bytes=max(one.reduce_item_bytes for one in own),
        casts=any(one.casts for one in own),
        reduces_plainly=all(one.reduces_plainly for one in own),
        has_hooks=any(one.has_hooks for one in own),
    )
    return Described(info, settings)


def renamed(own: Described, block: str, other: str) -> Described:
    """The group of a block as that of another one, which is alike."""

    def name(fqn: str) -> str:
        return other + fqn.removeprefix(block)

    info = own.info
    params = tuple(replace(param, fqn=name(param.fqn)) for param in info.params)
    return replace(own, info=replace(info, fqn=name(info.fqn), params=params))


def resharded(own: Described, reshard: Resharding, ranks_per_node: int) -> Described:
    """A group that was left to FSDP2, with what a setting says of it; the root stays as it is."""
    info, settings = own.info, own.settings
    if settings.is_root or reshard in (Resharding.OPEN, Resharding.AS_IS):
        return own
    keeps = reshard is Resharding.NEVER
    info = replace(info, reshard_after_forward=not keeps)
    settings = replace(settings, reshard=not keeps)
    if reshard is Resharding.NODE:
        settings = replace(
            settings,
            post_forward_ranks=ranks_per_node,
            post_forward_lane=f"{settings.gather_lane}, node",
            regroups=False,
            node_ranks=0,
        )
    return Described(info, settings)


def _renumbered(op_costs: OpCosts, numbers: _Numbers, infos: Sequence[GroupInfo]) -> OpCosts:
    usage, group, param = op_costs.usage, numbers.group, numbers.param
    uses: dict[int, list[GroupUse]] = {}
    for use in usage.uses:
        uses.setdefault(group[use.group], []).append(use)
    ready: dict[int, list[GradReady]] = {}
    for one in usage.reductions:
        ready.setdefault(group[one.group], []).append(one)
    needed = {number for number in uses if not infos[number].reshard_after_forward}
    changed = replace(
        usage,
        uses=tuple(_use(number, own) for number, own in uses.items()),
        params=tuple(
            replace(use, group=group[use.group], param=param[use.group, use.param])
            for use in usage.params
        ),
        reductions=tuple(_ready(number, own, numbers) for number, own in ready.items()),
        kept=frozenset(needed),
    )
    return replace(op_costs, usage=_in_order(changed))


def _in_order(usage: Usage) -> Usage:
    """As the placed program has them: gathers by first use, reductions by when they are ready."""
    uses = tuple(sorted(usage.uses, key=attrgetter("first")))
    return replace(
        usage, uses=uses, reductions=tuple(sorted(usage.reductions, key=attrgetter("after")))
    )


def _use(number: int, own: Sequence[GroupUse]) -> GroupUse:
    lasts = [use.last for use in own if use.last is not None]
    last = max(lasts) if len(lasts) == len(own) else None
    return GroupUse(number, min(use.first for use in own), last)


def _ready(number: int, own: Sequence[GradReady], numbers: _Numbers) -> GradReady:
    def of(name: str) -> tuple[tuple[int, int], ...]:
        pairs = ((one, pair) for one in own for pair in getattr(one, name))
        return tuple(sorted((numbers.param[one.group, p], op) for one, (p, op) in pairs))

    return GradReady(number, max(one.after for one in own), of("comes"), of("made"))


def _units(units: Sequence[RecomputeUnit], numbers: _Numbers) -> Iterator[RecomputeUnit]:
    """In the same order, numbered again in each group; a unit needs one of its own old group."""
    count: dict[int, int] = {}
    new: dict[tuple[int, int], int] = {}
    for unit in units:
        group = numbers.group[unit.group]
        new[unit.group, unit.number] = count.setdefault(group, 0)
        count[group] += 1
    for unit in units:
        yield replace(
            unit,
            group=numbers.group[unit.group],
            number=new[unit.group, unit.number],
            needs=None if unit.needs is None else new[unit.group, unit.needs],
        )
