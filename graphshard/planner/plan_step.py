"""The planner: a problem in, the schedule of each direction out.

The budget is the problem's own or, without one, the peak of FSDP2's own schedule, with the copies
that FSDP2 makes; it holds in the simulation. What is not faster than FSDP2's schedule is replaced
by it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter

from graphshard.errors import InfeasibleBudget
from graphshard.planner.activations import DEARER
from graphshard.planner.alap import just_in_time, lean
from graphshard.planner.bounds import lower_bound_us
from graphshard.planner.checked import checked
from graphshard.planner.choices import Choices
from graphshard.planner.compare import Place, forecasts, placed_as, schedules, simulated
from graphshard.planner.fsdp2 import eager_placement, fsdp2_choices, together, with_copies
from graphshard.planner.infeasible import shortage_of
from graphshard.planner.memo import Memo
from graphshard.planner.problem import Problem
from graphshard.planner.reasons import reasons_of
from graphshard.planner.score import Candidate, SearchContext, candidate
from graphshard.planner.search import search, search_from_each
from graphshard.planner.simulate import Simulation
from graphshard.planner.thrift import LEAST, thrifty
from graphshard.schedule.forecast import Forecast
from graphshard.schedule.plan import Baseline, Estimate, Figures, Moment, Schedule, Spent
from graphshard.schedule.reasons import Decision, Reason

# Of the step: what shards that nodes hold until backward have to gain.
NODES_WORTH = 0.02


@dataclass(frozen=True, slots=True)
class Planned:
    """The chosen schedules, and what they and FSDP2's own (`fsdp2`) come to in the simulation.

    recompute, offload: indices of the problem's options that are taken. across: groups that stay
    gathered between micro-steps. forecasts: one per schedule. reduces_apart: see `Problem`.
    """

    schedules: tuple[Schedule, ...]
    estimate: Estimate
    recompute: tuple[int, ...] = ()
    across: tuple[int, ...] = ()
    reasons: tuple[Reason, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    fsdp2: Baseline | None = None
    reduces_apart: bool = False
    offload: tuple[int, ...] = ()


def plan_step(
    problem: Problem, baseline: Problem | None = None, start: Choices | None = None
) -> Planned:
    """The best schedules found. Raises InfeasibleBudget (GS601) if none fits the budget.

    start: what is good for a problem much like this one.

    baseline: what FSDP2 would run, where that is not `problem` (other activations are computed
    again); then also the one whose peak is the budget.
    Raises PlanError (GS602) for a problem that contradicts itself.
    """
    memo = Memo(checked(problem))
    own = placed_as(memo, fsdp2_choices(memo.problem))
    copies, copied = memo, own
    if (with_all := with_copies(memo.problem)) != memo.problem:
        copies = Memo(with_all)
        copied = placed_as(copies, fsdp2_choices(with_all))
    run, theirs = copies, _eager(copies)
    eager = theirs
    if baseline is not None:
        run = Memo(with_copies(together(checked(baseline))))
        theirs = _eager(run)
    budget = theirs.peak_bytes if problem.budget_bytes is None else problem.budget_bytes
    bound = lower_bound_us(memo.problem)
    context = SearchContext(
        memo, budget, enough_us=bound * (1 + problem.near) if problem.near else 0.0
    )
    best = fullest = _chosen(context, own, start)
    if best is None or fullest is None:
        raise InfeasibleBudget(shortage_of(memo.problem, budget, theirs.peak_bytes))
    if problem.thrift and (less := _thrifty(context, own, best)) is not None:
        # Within what it takes it is as it is for other reasons than within the budget.
        best, context = less, SearchContext(memo, less.peak_bytes)
    before = [(Decision.ALL_REDUCES, copied), (Decision.IN_PLACE, own)]
    if memo.problem.reduces_apart:
        before.insert(0, (Decision.SEPARATE_GROUP, eager))
        other = Memo(with_copies(together(memo.problem)))
        eager = _eager(other)
        if baseline is None:
            run, theirs = other, eager
    if baseline is not None:
        before.insert(0, (Decision.COMPUTES_AGAIN, eager))
    simulation = simulated(run, theirs)
    ours = simulated(memo, best)
    estimate = Estimate(_figures(ours), _figures(simulation), budget, bound, memo.problem.optimizer)
    if best is not fullest:
        estimate = replace(estimate, all_spent=Spent(fullest.us, fullest.peak_bytes))
    reasons = reasons_of(context, before, best, ours, simulation)
    choices = best.choices
    return Planned(
        schedules=schedules(memo, best),
        estimate=estimate,
        recompute=choices.recompute,
        across=choices.across,
        reasons=tuple(reasons),
        forecasts=forecasts(memo, best),
        fsdp2=Baseline(schedules(run, theirs), forecasts(run, theirs)),
        reduces_apart=memo.problem.reduces_apart,
        offload=choices.offload,
    )


def as_placed(memo: Memo, placed: Candidate) -> Planned:
    """`placed`, whatever its peak, as a plan of its problem."""
    ours, with_all = simulated(memo, placed), with_copies(memo.problem)
    run = Memo(with_all)
    theirs = _eager(run)
    budget = theirs.peak_bytes if memo.problem.budget_bytes is None else memo.problem.budget_bytes
    return Planned(
        schedules=schedules(memo, placed),
        estimate=Estimate(
            _figures(ours),
            _figures(simulated(run, theirs)),
            budget,
            lower_bound_us(memo.problem),
            memo.problem.optimizer,
        ),
        across=placed.choices.across,
        forecasts=forecasts(memo, placed),
        fsdp2=Baseline(schedules(run, theirs), forecasts(run, theirs)),
    )


def _eager(memo: Memo) -> Candidate:
    """What FSDP2 itself runs, where `memo` has a problem with its copies."""
    return placed_as(memo, fsdp2_choices(memo.problem), eager_placement)


def fsdp2(problem: Problem, place: Place = eager_placement) -> Candidate:
    """FSDP2's own choices and positions, whether they fit or not. place: its positions."""
    memo = Memo(with_copies(checked(problem)))
    return placed_as(memo, fsdp2_choices(memo.problem), place)


def _chosen(context: SearchContext, own: Candidate, start: Choices | None) -> Candidate | None:
    """What the search found, just in time; FSDP2's own schedule where that is as good."""
    best = _found(context, [own.choices] if start is None else [own.choices, start])
    if own.peak_bytes <= context.budget_bytes and (best is None or own.us <= best.us):
        return own
    return None if best is None else _finished(own, context, best)


def _thrifty(context: SearchContext, own: Candidate, best: Candidate) -> Candidate | None:
    """`best` with less memory, if that takes hardly longer, and no longer than FSDP2's own."""
    if best == own:
        return None
    most_us = best.us * (1 + context.problem.thrift)
    if own.peak_bytes <= context.budget_bytes:
        most_us = min(most_us, own.us)
    finish = partial(_finished, own)
    less = thrifty(context, best, best.choices, most_us, finish)
    # Collectives that carry more groups take memory that the knee above cannot give back.
    plain = thrifty(context, best, own.choices, most_us, finish)
    if plain is None or (less is not None and plain.peak_bytes > (1 - LEAST) * less.peak_bytes):
        return less
    within = SearchContext(context.memo, plain.peak_bytes)
    again = _chosen(within, own, plain.choices)
    return plain if again is None or again.us > plain.us else again


def _finished(own: Candidate, context: SearchContext, best: Candidate) -> Candidate:
    """Just in time, and lean unless FSDP2's own schedule is as good then."""
    pairs = zip(context.problem.directions, best.directions, strict=True)
    late = [just_in_time(context, best.choices, direction, scored) for direction, scored in pairs]
    chosen = Candidate(best.choices, tuple(late))
    both = zip(context.problem.directions, late, strict=True)
    leaner = Candidate(best.choices, tuple(lean(context, best.choices, d, s) for d, s in both))
    return leaner if own.peak_bytes > context.budget_bytes or leaner.us <= own.us else chosen


def _found(context: SearchContext, starts: list[Choices]) -> Candidate | None:
    """What the search finds. Copies to the host are added to the best without them, so that they
    are never a loss."""
    if not context.problem.offload_options:
        return _found_without_copies(context, starts)
    without = Memo(replace(context.problem, offload_options=()))
    best = _found_without_copies(
        SearchContext(without, context.budget_bytes, context.enough_us),
        [replace(start, offload=()) for start in starts],
    )
    return search(context, starts if best is None else [*starts, best.choices])


def _found_without_copies(context: SearchContext, starts: list[Choices]) -> Candidate | None:
    """With shards that nodes hold, where that may be worth it: they cost a communicator, and add to
    what has to be searched."""
    problem = context.problem
    if not any(group.node for group in problem.groups):
        return search(context, starts)
    groups = tuple(replace(group, node=None) for group in problem.groups)
    without = Memo(replace(problem, groups=groups))
    best = search(
        SearchContext(without, context.budget_bytes, context.enough_us),
        [replace(start, on_node=()) for start in starts],
    )
    if best is None:
        return min(search_from_each(context, starts), key=attrgetter("rank"), default=None)
    compute_us = sum(r.us for direction in problem.directions for r in problem.regions(direction))
    if best.us - problem.micro_steps * compute_us < NODES_WORTH * best.us:
        return candidate(context, best.choices)
    found = search_from_each(context, [*starts, best.choices])
    worth = [one for one in found if _is_worth_nodes(problem, one, best)]
    return min(worth, key=attrgetter("rank"), default=None) or candidate(context, best.choices)


def _is_worth_nodes(problem: Problem, found: Candidate, best: Candidate) -> bool:
    """Even where what is computed again takes DEARER than predicted, of which nodes may spare."""
    spared_us = _again_us(problem, best) - _again_us(problem, found)
    gained_us = best.us - found.us
    return gained_us > 0 and gained_us + DEARER * spared_us >= NODES_WORTH * best.us


def _again_us(problem: Problem, found: Candidate) -> float:
    once_us = sum(problem.recompute[index].extra_us for index in found.choices.recompute)
    return problem.micro_steps * once_us


def _figures(found: Simulation) -> Figures:
    peak = found.peak
    at = Moment(peak.direction, peak.index)
    return Figures(found.step_us, found.exposed_us, peak.bytes, peak.by_category, peak.owners, at)
