"""FSDP2's own behaviour as choices and placements, so that it is simulated like any plan.

Sources: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_state.py of torch 2.13.
A group is gathered one ahead: in forward by the implicit prefetch (the host runs ahead of the
device), in backward by the prefetch in reverse post-forward order; both are issued once the copy
out of the group before is under way, in backward also where that group is still gathered and
nothing is copied: its pre-backward hook issues them (the root's when backward begins). An explicit
list replaces that for its group. One reduce-scatter input is in flight: the reduction before is
awaited before the next one is packed. An all-reduce over replicas is awaited when backward ends.
The root stays gathered from forward to backward unless the user says otherwise.

Known differences: in forward, stream order lets FSDP2 start one further gather while a group still
computes; a group that backward does not need is gathered in backward all the same; in backward all
groups of a `fully_shard` call with several meshes are gathered ahead at once.
"""

from __future__ import annotations

from dataclasses import replace

from graphshard.planner.choices import Choices
from graphshard.planner.memory import profile_of, view_of
from graphshard.planner.placement import UNLIMITED, FillPolicy, fill, wait_before
from graphshard.planner.problem import Part, Problem, with_transfers
from graphshard.planner.stage import (
    Placement,
    Reduced,
    Stage,
    next_gather_position,
    position_before,
)
from graphshard.schedule.plan import Direction, StepKind

ONE_AHEAD = FillPolicy(gathers=1)


def together(problem: Problem) -> Problem:
    """`problem` with reductions on the lanes of gathers, where the planner had moved them."""
    if not problem.reduces_apart:
        return problem
    groups = (replace(g, reduce_lane=g.gather_lane) for g in problem.groups)
    return replace(problem, groups=tuple(groups), reduces_apart=False)


def with_copies(problem: Problem) -> Problem:
    """`problem` as FSDP2 runs it: no transfer is in place."""
    return replace(
        problem,
        groups=tuple(replace(g, parts=tuple(map(_copied, g.parts))) for g in problem.groups),
    )


def _copied(part: Part) -> Part:
    return with_transfers(part, lambda transfer: replace(transfer, in_place=False))


def fsdp2_choices(problem: Problem) -> Choices:
    """What FSDP2 keeps gathered; one bucket per group, nothing recomputed beyond the graph."""
    return Choices(
        kept=tuple(g.id for g in problem.groups if keeps(problem, g.id)),
        across=tuple(g.id for g in problem.groups if g.keep_across and problem.micro_steps > 1),
    )


def keeps(problem: Problem, number: int) -> bool:
    """FSDP2 keeps the group from forward to backward, and backward needs it."""
    group = problem.groups[number]
    carried = bool(group.keep_across) and problem.micro_steps > 1
    both = all(group.use_in(d) is not None for d in Direction)
    return both and (group.kept_by_fsdp2 or carried) and group.post_forward is None


def fsdp2_placement(problem: Problem, stage: Stage) -> Placement:
    """FSDP2's positions for the jobs of `stage`, whatever its choices."""
    gathers = listed_positions(problem, stage)
    if not has_lists(problem, stage.direction):
        profile = profile_of(problem, [stage], [0])
        view = view_of(profile, UNLIMITED**2)
        assert view is not None
        one_ahead = fill(stage, profile, view, UNLIMITED**2, ONE_AHEAD)
        gathers = tuple(map(max, one_ahead.gathers, _hooks_before(problem, stage)))
    return Placement(gathers, with_buffers(stage, 1))


def eager_placement(problem: Problem, stage: Stage) -> Placement:
    """The same as FSDP2 itself runs it: on a stream of its own an all-reduce follows its reduction
    at once, whenever compute waits for that. Here it is issued at that wait."""
    placement = fsdp2_placement(problem, stage)
    if not stage.all_reduces:
        return placement
    chained = tuple(replace(one, chained=True) for one in placement.reductions)
    return replace(placement, reductions=chained)


def _hooks_before(problem: Problem, stage: Stage) -> list[int]:
    """For each gather the first position after the wait for the group that is used before its own;
    0 for the first one, and after the root, which waits when the direction begins."""
    own = {id(job.wait) for job in stage.gathers}
    found, before = [], 0
    for position, event in stage.fixed:
        if event.step.kind is StepKind.RELOAD_WAIT:
            found.append(0)
        if event.step.kind is not StepKind.GATHER_WAIT:
            continue
        if id(event) in own:
            found.append(before)
        is_root = any(problem.groups[number].is_root for number in event.step.groups)
        before = 0 if is_root else next_gather_position(stage, position)
    return found


def with_buffers(stage: Stage, buffers: int) -> tuple[Reduced, ...]:
    """Reductions issued when ready, at most `buffers` in flight when one more is packed."""
    jobs = stage.reductions
    before = [job.at for job in jobs[buffers:]] if buffers else [job.at + 1 for job in jobs]
    waits = [wait_before(stage, job.at, at) for job, at in zip(jobs, before, strict=False)]
    waits += [stage.end] * (len(jobs) - len(waits))
    return tuple(map(Reduced, range(len(jobs)), (job.at for job in jobs), waits))


def has_lists(problem: Problem, direction: Direction) -> bool:
    """The user named what to gather ahead; then nobody else decides it in that direction."""
    return any(g.prefetch_in(direction) for g in problem.groups)


def listed_positions(problem: Problem, stage: Stage) -> tuple[int, ...]:
    """Issue positions of the gathers where the user gave prefetch lists.

    Right after the wait for a group, what its list names is issued, or, if it has none, the next
    group. What nobody named is issued right before its own wait.
    """
    own = {id(job.wait): i for i, job in enumerate(stage.gathers)}
    rows = [(n, i) for i, job in enumerate(stage.gathers) for n in job.bucket.groups]
    issued: dict[int, int] = {}
    for position, event in stage.fixed:
        if event.step.kind not in (StepKind.GATHER_WAIT, StepKind.RELOAD_WAIT):
            continue
        if id(event) in own:
            issued.setdefault(own[id(event)], position_before(stage, position))
        if event.step.kind is StepKind.RELOAD_WAIT:
            continue
        named = [
            n for g in event.step.groups for n in problem.groups[g].prefetch_in(stage.direction)
        ]
        places = [place for n in named for number, place in rows if number == n]
        if not named:
            places = [i for i, job in enumerate(stage.gathers) if job.at > position][:1]
        for place in places:
            issued.setdefault(place, position + 1)
    return tuple(issued[place] for place in range(len(stage.gathers)))


def cpu_placement(problem: Problem, stage: Stage) -> Placement:
    """FSDP2's positions on a CPU, where it waits for each collective at once.

    Gathers that the user's lists name are asynchronous (`_set_unshard_async_op`).
    """
    gathers = tuple(position_before(stage, job.at) for job in stage.gathers)
    if has_lists(problem, stage.direction):
        gathers = listed_positions(problem, stage)
    at_once = tuple(replace(one, done=one.wait) for one in with_buffers(stage, 0))
    return Placement(gathers, at_once)
