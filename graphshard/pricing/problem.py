"""From a placed program to a priced problem: all that the planner knows, as plain numbers.

In come a program's `GraphCosts` (times and bytes of each op), what FSDP2's settings say of each
group, and a machine. Out comes a `Problem`: regions with times and bytes alive, and per group its
transfers, uses and gradients. Nothing here measures or communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import median

from graphshard.cost.comm import CollectiveKind
from graphshard.cost.comm import RankGroup as Ranks
from graphshard.cost.machine import Machine, collective_us
from graphshard.cost.optimizer import DEFAULT, Optimizer
from graphshard.cost.roofline import copy_us
from graphshard.fsdp2.settings import GroupSettings
from graphshard.planner.checked import checked
from graphshard.planner.problem import (
    CollectiveLane,
    Gradient,
    Group,
    Part,
    PostForwardMesh,
    Problem,
    Region,
    Transfer,
    Use,
)
from graphshard.pricing.lanes import (
    grad_input_bytes,
    lanes_of,
    links_of,
    node_ranks,
    post_forward_ranks,
    replica_ranks,
    shard_ranks,
)
from graphshard.pricing.offload import shard_host, slower_by, with_host
from graphshard.pricing.op_costs import GraphCosts
from graphshard.pricing.optimizer import optimizer_step, resident
from graphshard.pricing.region_cuts import AT_START, AT_TURN
from graphshard.pricing.region_split import Divided, divided, with_late_gradients
from graphshard.pricing.usage import Usage
from graphshard.schedule.plan import Direction, GroupInfo, Reshard

# A group that is larger than this many typical ones may travel in several parts, at most MAX_PARTS;
# so may the root.
HUGE = 4
MAX_PARTS = 8


# Of the step: what the last part of memory together has to bring to be taken. Predictions are not
# better, and memory that is left serves the allocator, other libraries and longer batches.
THRIFT = 0.005


@dataclass(frozen=True, slots=True)
class PlanningPolicy:
    """What the planner may decide beyond the order and the waits of collectives.

    budget_bytes: hard limit on the peak; None: FSDP2's own peak. most_ahead: gathers in flight;
    None: as many as memory allows. reshard: OPEN leaves it groups without a setting, AUTO all.
    recompute: activations may be computed again. replaces_checkpoints: also others than the user's
    checkpoints would, where these leave it open. regroup: gathers may be merged and split.
    micro_steps: forward and backward runs per optimizer step, of which the last one reduces.
    offload: activations may be held by the host meanwhile, host_bytes of them at most (None: any).
    near: a step that is longer than the lower bound by this share of it is good enough.
    optimizer: what steps the parameters.
    """

    budget_bytes: int | None = None
    most_ahead: int | None = None
    reshard: Reshard = Reshard.FSDP2
    recompute: bool = False
    replaces_checkpoints: bool = False
    regroup: bool = False
    micro_steps: int = 1
    near: float = 0.0
    offload: bool = False
    host_bytes: int | None = None
    optimizer: Optimizer = DEFAULT


def price(
    costs: GraphCosts, settings: Sequence[GroupSettings], machine: Machine, policy: PlanningPolicy
) -> Problem:
    """The problem that `costs` poses on `machine`. Raises PlanError if it contradicts itself."""
    library = machine.network
    settings = [own.with_library(library.in_place, clones=library.clones) for own in settings]
    lanes, links = lanes_of(costs.groups, settings, machine), links_of(settings)
    first = costs.by_direction[Direction.FORWARD].usage
    parts = _parts_by_group(costs.groups, settings, first) if policy.regroup else {}
    stages = {
        direction: divided(op_costs, parts) for direction, op_costs in costs.by_direction.items()
    }
    groups = tuple(
        _group(
            info,
            settings[info.id],
            stages,
            lanes,
            machine,
            policy.reshard,
            parts.get(info.id, [tuple(range(len(info.params)))]),
        )
        for info in costs.groups
    )
    forward, backward = stages[Direction.FORWARD].regions, _backward(costs, groups, stages)
    if policy.reshard is not Reshard.AUTO:
        asked = [g for g in groups if settings[g.id].reshard is False]
        forward, backward = with_unread(forward, backward, asked)
    problem = checked(
        Problem(
            groups=groups,
            lanes=tuple(
                CollectiveLane(name, us, links.get(name, ""), machine.issue_us, machine.wait_us)
                for name, us in lanes.items()
            ),
            forward=forward,
            backward=backward,
            resident=tuple(resident(settings, machine, policy.optimizer)),
            optimizer=optimizer_step(settings, machine, policy.optimizer) if backward else None,
            regroup_gathers=policy.regroup and all(own.regroups for own in settings),
            split_reductions=policy.regroup and all(own.splits_reductions for own in settings),
            most_ahead=policy.most_ahead,
            micro_steps=policy.micro_steps,
            sync_each=policy.micro_steps == 1,
            budget_bytes=policy.budget_bytes,
            near=policy.near,
            thrift=THRIFT,
            clones=any(own.clones for own in settings),
            early_waits=any(
                own.has_hooks or (own.all_reduce_lane and shard_host(own, machine) is not None)
                for own in settings
            ),
            keeps_reduce_order=any(own.has_all_reduce_hook for own in settings),
            may_reduce_apart=machine.network.concurrent
            and policy.regroup
            and all(own.may_reduce_apart or own.ranks == 1 for own in settings),
        )
    )
    host = machine.host if policy.offload or costs.offloads else None
    return with_host(problem, costs.offloads, host, policy.host_bytes)


def _backward(
    costs: GraphCosts, groups: Sequence[Group], stages: Mapping[Direction, Divided]
) -> tuple[Region, ...]:
    last = stages.get(Direction.BACKWARD)
    return () if last is None else with_late_gradients(last, costs.groups, groups)


def with_unread(
    forward: tuple[Region, ...], backward: tuple[Region, ...], groups: Sequence[Group]
) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """The regions of both directions, with what stays gathered after forward because the user wants
    it, although backward does not read it (an embedding). groups: those with that setting."""
    for group in groups if backward else ():
        use = group.use_in(Direction.FORWARD)
        if use is None or use.last is None or group.use_in(Direction.BACKWARD) is not None:
            continue
        last, more_bytes = use.last, group.room_bytes
        forward = tuple(_fuller(r, more_bytes * (i > last)) for i, r in enumerate(forward))
        backward = tuple(_fuller(region, more_bytes) for region in backward)
    return forward, backward


def _fuller(region: Region, more_bytes: int) -> Region:
    return replace(region, activation_bytes=region.activation_bytes + more_bytes)


# -- groups --------------------------------------------------------------------------------------


def _parts_by_group(
    groups: Sequence[GroupInfo], settings: Sequence[GroupSettings], forward: Usage
) -> dict[int, list[tuple[int, ...]]]:
    """The parts of those groups that may travel in parts: large ones, and those where nothing hides
    collectives.

    The latter are the root, whose first parameters (an embedding) and last ones (a head) are needed
    far apart, and the first and the last few of the others in forward. See
    `graphshard.pricing.region_cuts`.
    """
    reads: dict[int, dict[int, int]] = {g.id: {} for g in groups}
    for use in forward.params:
        reads[use.group][use.param] = use.first
    parts = {g.id: _parts(g, reads[g.id]) for g in groups if len(g.params) > 1}
    typical = median([g.gathered_bytes for g in groups])
    used = [use.group for use in sorted(forward.uses, key=lambda use: (use.first, use.group))]
    inner = [g for g in used if not settings[g].is_root and len(parts.get(g, ())) > 1]
    ends = {*inner[:AT_START], *inner[-AT_TURN:]}
    return {
        number: found
        for number, found in parts.items()
        if groups[number].gathered_bytes > HUGE * typical
        or settings[number].is_root
        or number in ends
    }


def _group(
    info: GroupInfo,
    own: GroupSettings,
    stages: dict[Direction, Divided],
    lanes: dict[str, float],
    machine: Machine,
    reshard: Reshard,
    parts: Sequence[tuple[int, ...]],
) -> Group:
    decided = {Reshard.OPEN: own.reshard, Reshard.AUTO: None}
    return Group(
        id=info.id,
        fqn=info.fqn,
        parts=tuple(_part(info, params, own, stages, lanes, machine) for params in parts),
        gather_lane=list(lanes).index(own.gather_lane),
        reduce_lane=list(lanes).index(own.reduce_lane),
        world_size=own.ranks,
        reshard=decided.get(reshard, info.reshard_after_forward),
        is_root=own.is_root,
        keep_across=True if own.kept_after_backward else None,
        post_forward=_smaller_mesh(info, post_forward_ranks(own), list(lanes)),
        node=_smaller_mesh(info, node_ranks(own), list(lanes)),
        forward_prefetch=own.forward_prefetch,
        backward_prefetch=own.backward_prefetch,
        all_reduce_lane=(list(lanes).index(own.all_reduce_lane) if own.all_reduce_lane else None),
    )


def _smaller_mesh(
    info: GroupInfo, ranks: Ranks | None, lanes: Sequence[str]
) -> PostForwardMesh | None:
    if ranks is None:
        return None
    return PostForwardMesh(info.gathered_bytes // int(ranks.ranks), lanes.index(ranks.name))


def _parts(info: GroupInfo, reads: Mapping[int, int]) -> list[tuple[int, ...]]:
    """Parameters that forward reads first at the same cut, or at neighbouring ones: each part is
    at least 1 / MAX_PARTS of the group but for the last. reads: the first op of each."""
    unused = max(reads.values(), default=0) + 1
    order = sorted(range(len(info.params)), key=lambda place: (reads.get(place, unused), place))
    parts: list[tuple[int, ...]] = []
    part: list[int] = []
    for place, after in zip_longest(order, order[1:]):
        part.append(place)
        size_bytes = sum(info.params[p].gathered_bytes for p in part)
        ends = after is None or reads.get(after, unused) != reads.get(place, unused)
        if after is None or (ends and size_bytes * MAX_PARTS >= info.gathered_bytes):
            parts.append(tuple(sorted(part)))
            part = []
    return parts


def _part(
    info: GroupInfo,
    params: tuple[int, ...],
    own: GroupSettings,
    stages: dict[Direction, Divided],
    lanes: dict[str, float],
    machine: Machine,
) -> Part:
    size_bytes = sum(info.params[place].gathered_bytes for place in params)

    def share(ranks: Ranks) -> Transfer:
        whole = _gather(info, ranks, machine, in_place=own.gathers_in_place)
        return _share(whole, lanes[ranks.name], size_bytes, info.gathered_bytes)

    whole = len(params) == len(info.params)
    smaller, node = post_forward_ranks(own), node_ranks(own)
    uses = {d: _use(stage, info.id, () if whole else params) for d, stage in stages.items()}
    return Part(
        gathered_bytes=size_bytes,
        made_bytes=sum(info.params[place].held_bytes for place in params) - size_bytes,
        gather=slower_by(
            share(shard_ranks(own, own.gather_lane)),
            shard_host(own, machine),
            own.shard_bytes * size_bytes // max(1, info.gathered_bytes),
        ),
        regather=None if smaller is None else share(smaller),
        node_gather=None if node is None else share(node),
        forward=uses[Direction.FORWARD],
        backward=uses.get(Direction.BACKWARD),
        gradient=_gradient(info, params, own, stages, lanes, machine),
        params=params,
    )


def _gather(info: GroupInfo, ranks: Ranks, machine: Machine, *, in_place: bool) -> Transfer:
    """The whole group from `ranks`, each of which has as much of it as the others."""
    return Transfer(
        us=float(collective_us(machine, CollectiveKind.ALL_GATHER, ranks, info.gathered_bytes)),
        pack_us=float(copy_us(machine.processor, info.gathered_bytes / ranks.ranks)),
        unpack_us=float(copy_us(machine.processor, info.gathered_bytes)),
        in_place=in_place,
    )


def _share(whole: Transfer, launch_us: float, part_bytes: int, whole_bytes: int) -> Transfer:
    """A part alone: its share of what the whole takes, with a launch of its own.

    So the parts, less all launches but one, take as long as the whole in one collective.
    """
    share = part_bytes / max(1, whole_bytes)
    launch_us = min(whole.us, launch_us)
    us = launch_us + (whole.us - launch_us) * share
    return Transfer(us, whole.pack_us * share, whole.unpack_us * share, whole.in_place)


def _use(stage: Divided, group: int, params: tuple[int, ...]) -> Use | None:
    """When the group is read; if `params` are given, when these are."""
    whole = [u for u in stage.usage.uses if u.group == group]
    some = [u for u in stage.usage.params if u.group == group and u.param in params]
    found = some if params else whole
    if not found:
        return None
    first = min(u.first for u in found)
    lasts = [u.last for u in found if u.last is not None]
    last = stage.region_of(max(first, *lasts)) if len(lasts) == len(found) else None
    return Use(stage.region_of(first), last)


def _gradient(
    info: GroupInfo,
    params: tuple[int, ...],
    own: GroupSettings,
    stages: dict[Direction, Divided],
    lanes: dict[str, float],
    machine: Machine,
) -> Gradient | None:
    stage = stages.get(Direction.BACKWARD)
    if stage is None:
        return None
    ready = next((r for r in stage.usage.reductions if r.group == info.id), None)
    first = [] if ready is None else [op for place, op in ready.comes if place in params]
    if ready is None or not first:
        return None
    trainable = [p for p in info.params if p.trainable]
    chosen = [p for place, p in enumerate(info.params) if p.trainable and place in params]
    whole_bytes, input_bytes = (grad_input_bytes(of, own) for of in (trainable, chosen))
    reduce, all_reduce = (
        found and _share(found, lanes[lane], input_bytes, whole_bytes)
        for found, lane in zip(
            _reductions(own, whole_bytes, machine),
            (own.reduce_lane, own.all_reduce_lane),
            strict=True,
        )
    )
    assert reduce is not None
    host, output_bytes = shard_host(own, machine), input_bytes // own.ranks
    if all_reduce is None:
        reduce = slower_by(reduce, host, output_bytes)
    else:
        all_reduce = slower_by(all_reduce, host, output_bytes)
    return Gradient(
        first=stage.region_of(min(first)),
        ready=stage.region_of(ready.after if chosen == trainable else max(first)),
        bytes=sum(p.grad_bytes for p in chosen),
        reduce=reduce,
        input_bytes=input_bytes,
        output_bytes=output_bytes if host is None else 0,
        all_reduce=all_reduce,
        staged_bytes=output_bytes if host is not None and all_reduce is not None else 0,
    )


def _reductions(
    own: GroupSettings, size_bytes: int, machine: Machine
) -> tuple[Transfer, Transfer | None]:
    """The reduce-scatter of gradients of `size_bytes`, and the all-reduce over replicas. What was
    reduced is handed over after the last of them."""
    ranks, replicas = shard_ranks(own, own.reduce_lane), replica_ranks(own)
    shard_bytes = size_bytes / own.ranks
    reduce = Transfer(
        us=float(collective_us(machine, CollectiveKind.REDUCE_SCATTER, ranks, size_bytes)),
        pack_us=float(copy_us(machine.processor, size_bytes)),
        unpack_us=float(copy_us(machine.processor, shard_bytes)),
        in_place=own.reduces_in_place,
    )
    if replicas is None:
        return reduce, None
    us = float(collective_us(machine, CollectiveKind.ALL_REDUCE, replicas, shard_bytes))
    return replace(reduce, unpack_us=0.0), replace(reduce, us=us, pack_us=0.0)
