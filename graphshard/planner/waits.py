"""Waits for reductions as soon as they are done.

In comes a placed backward, out come the same issues with other waits. All of them, where memory is
to be given back, or gradients are used at once (`earlier_waits`). Or only those that an all-reduce
over the replicas follows (`prompt_waits`): it starts where its reduction is waited for, so a late
wait would leave it less compute to hide behind.

Assumed: a collective takes LONGER than predicted at most; if it takes longer still, compute waits
for the rest. Waits stay in the order of issues, so that all ranks issue their all-reduces in one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from graphshard.planner.events import Event
from graphshard.planner.problem import Problem
from graphshard.planner.simulate import play
from graphshard.planner.stage import Placement, Reduced, Stage, placed

# A collective may take so much longer than predicted before an early wait for it stalls.
LONGER = 0.25


def earlier_waits(problem: Problem, stage: Stage, placement: Placement) -> Placement:
    """Each wait at the first region that starts after its collective is done.

    stage: of the last micro-step, which has every reduction.
    """
    return _all_reduced(problem, stage, _reduced(problem, stage, placement, lambda _: True))


def prompt_waits(problem: Problem, stage: Stage, placement: Placement) -> Placement:
    """The same for reductions that an all-reduce follows. That is waited for at the end, unless
    gradients are used at once."""
    if not stage.all_reduces:
        return placement
    found = _reduced(
        problem, stage, placement, lambda one: stage.reductions[one.job].all_reduce is not None
    )
    return _all_reduced(problem, stage, found) if problem.early_waits else found


def _reduced(
    problem: Problem, stage: Stage, placement: Placement, moves: Callable[[Reduced], bool]
) -> Placement:
    """The waits for reductions that `moves` says."""
    run = _Run.of(problem, stage, placement)
    found, earliest = [], 0
    for reduced in placement.reductions:
        wait = reduced.wait
        if moves(reduced):
            wait = run.first_after(
                stage.reductions[reduced.job].issue, max(reduced.issue, earliest), wait
            )
        earliest = wait = max(wait, earliest)
        found.append(replace(reduced, wait=wait))
    return replace(placement, reductions=tuple(found))


def _all_reduced(problem: Problem, stage: Stage, placement: Placement) -> Placement:
    """The waits for all-reduces."""
    if not stage.all_reduces:
        return placement
    run = _Run.of(problem, stage, placement)
    found, earliest = [], 0
    for reduced in placement.reductions:
        pair = stage.reductions[reduced.job].all_reduce
        if pair is None:
            found.append(reduced)
            continue
        done = run.first_after(pair[0], max(reduced.wait, earliest), stage.end + 1)
        earliest = max(done, earliest)
        found.append(replace(reduced, done=None if done > stage.end else done))
    return replace(placement, reductions=tuple(found))


@dataclass(frozen=True, slots=True)
class _Run:
    """When compute reaches each position, and when each job is done."""

    positions: list[int]
    reached_us: list[float]
    finished_us: dict[int, float]
    slots: range

    @staticmethod
    def of(problem: Problem, stage: Stage, placement: Placement) -> _Run:
        entries = placed(stage, placement)
        run = play((event for _, event in entries), 0, problem.lanes)
        return _Run(
            [at for at, _ in entries],
            [*run.reached_us, run.us],
            run.finished_us,
            range(0, stage.num_regions * stage.stride + 1, stage.stride),
        )

    def first_after(self, issue: Event, position: int, last: int) -> int:
        """The first slot after `position` that compute reaches when the collective that `issue`
        starts is done; `last` at the latest."""
        done_us = self.finished_us.get(issue.job, 0.0) + LONGER * issue.comm_us
        first = bisect_right(self.slots, position)
        slot = bisect_left(
            self.slots,
            done_us,
            first,
            key=lambda p: self.reached_us[bisect_left(self.positions, p)],
        )
        return min(last, self.slots[slot]) if slot < len(self.slots) else last
