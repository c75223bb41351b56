"""A problem that does not contradict itself, with exact times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from graphshard.errors import PlanError
from graphshard.planner.activations import Offload, Recompute
from graphshard.planner.problem import (
    CollectiveLane,
    Group,
    Part,
    Problem,
    Transfer,
    exact_us,
    transfers_of,
    use_of,
    with_transfers,
)
from graphshard.schedule.plan import Direction


def checked(problem: Problem) -> Problem:
    """`problem` with exact times. Raises PlanError (GS602), naming the first contradiction."""
    for fault in _faults(problem):
        raise PlanError("GS602", fault)
    return replace(
        problem,
        groups=tuple(replace(g, parts=tuple(map(_exact_part, g.parts))) for g in problem.groups),
        lanes=tuple(map(_exact_lane, problem.lanes)),
        forward=tuple(replace(r, us=exact_us(r.us)) for r in problem.forward),
        backward=tuple(replace(r, us=exact_us(r.us)) for r in problem.backward),
        recompute=tuple(replace(o, extra_us=exact_us(o.extra_us)) for o in problem.recompute),
        offloads=tuple(map(_exact_offload, problem.offloads)),
        offload_options=tuple(
            replace(o, alone=_exact_offload(o.alone)) for o in problem.offload_options
        ),
        host=problem.host and replace(problem.host, launch_us=exact_us(problem.host.launch_us)),
    )


def _exact_offload(offload: Offload) -> Offload:
    return replace(offload, us=exact_us(offload.us))


def _exact_lane(lane: CollectiveLane) -> CollectiveLane:
    return replace(
        lane,
        launch_us=exact_us(lane.launch_us),
        issue_us=exact_us(lane.issue_us),
        wait_us=exact_us(lane.wait_us),
    )


def _exact_part(part: Part) -> Part:
    return with_transfers(part, _exact_transfer)


def _exact_transfer(transfer: Transfer) -> Transfer:
    return replace(
        transfer,
        us=exact_us(transfer.us),
        pack_us=exact_us(transfer.pack_us),
        unpack_us=exact_us(transfer.unpack_us),
    )


def _faults(problem: Problem) -> Iterator[str]:
    if not problem.forward:
        yield "forward has no regions"
    if problem.micro_steps < 1:
        yield f"micro_steps is {problem.micro_steps}, and must be at least 1"
    for direction in problem.directions:
        for place, region in enumerate(problem.regions(direction)):
            if region.us < 0:
                yield f"region {place} of {direction} takes {region.us} us"
    for index, group in enumerate(problem.groups):
        if group.id != index:
            yield f"group {group.id} ({group.fqn}) stands at place {index}"
        if not group.parts:
            yield f"{group.fqn} has no parts"
        if len(group.parts) > 1 and not all(p.params for p in group.parts):
            yield f"{group.fqn} has several parts that do not say which parameters they hold"
        meshes = [mesh for mesh in (group.post_forward, group.node) if mesh is not None]
        lanes = [group.gather_lane, group.reduce_lane, *(mesh.lane for mesh in meshes)]
        if group.all_reduce_lane is not None:
            lanes.append(group.all_reduce_lane)
        if len(meshes) > 1:
            yield f"{group.fqn} has two smaller meshes"
        if not all(0 <= lane < len(problem.lanes) for lane in lanes):
            yield f"{group.fqn} names a lane that does not exist"
        for part in group.parts:
            yield from _part_faults(problem, group, part)
    for index, option in enumerate(problem.recompute):
        if option.needs is not None and not 0 <= option.needs < index:
            yield f"recompute {option.activation} needs option {option.needs}, which is not earlier"
        if not _is_inside(problem, option):
            yield f"recompute {option.activation} names a region that does not exist"
    for offload in (*problem.offloads, *(o.alone for o in problem.offload_options)):
        if problem.host is None:
            yield f"offload of group {offload.group}: there is no host"
        if not _is_inside(problem, offload):
            yield f"offload of group {offload.group} names a region that does not exist"


def _is_inside(problem: Problem, one: Recompute | Offload) -> bool:
    return 0 <= one.after < len(problem.forward) and 0 <= one.before < len(problem.backward)


def _part_faults(problem: Problem, group: Group, part: Part) -> Iterator[str]:
    for direction in (Direction.FORWARD, Direction.BACKWARD):
        use, count = use_of(part, direction), len(problem.regions(direction))
        if use is not None and not 0 <= use.first <= (count if use.last is None else use.last):
            yield f"{group.fqn} is used from region {use.first} to {use.last} of {direction}"
        if use is not None and use.last is not None and use.last >= count:
            yield f"{group.fqn} is used in region {use.last} of {count} of {direction}"
    grad = part.gradient
    if grad is not None and not -1 <= grad.first <= grad.ready < len(problem.backward):
        yield f"gradients of {group.fqn} come in regions {grad.first} to {grad.ready}"
    if grad is not None and (grad.all_reduce is None) != (group.all_reduce_lane is None):
        yield f"{group.fqn} has an all-reduce without a lane, or a lane without one"
    for lane, transfer in transfers_of(group, part):
        runs = group.world_size > 1 or lane == group.all_reduce_lane
        if runs and transfer.us < problem.lanes[lane].launch_us:
            yield f"a collective of {group.fqn} takes {transfer.us} us, less than its launch"
