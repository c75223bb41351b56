"""What is planned without a calibrated profile tunes itself, alike on all ranks, and settles."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import OPTIONS, cache_in, first_launch, tunings
from models import CASES, of_depth
from parity import assert_equal, build, train
from patching import patched, without_clones
from pool import Ctx, Pool
from torch import nn
from traced_once import TracedOnce

import graphshard
from graphshard.compiler import planning_inputs, replan
from graphshard.compiler.tuning import Phase
from graphshard.runtime import probe
from graphshard.schedule.measured import Measured, Segment
from graphshard.schedule.plan import Direction, Plan, StepKind

pytestmark = pytest.mark.dist

CASE = of_depth("llama", 2)
TRACED = TracedOnce()  # of this rank


def unseen() -> Any:
    """Inside, nothing tells of network and device before the first plan."""
    return patched(planning_inputs, "probe", lambda _: lambda *args: probe.Probed())


def alike(segment: Segment) -> Segment:
    """Regions of 100 us; gathers of 150, and reductions of next to nothing."""
    if segment.step.kind is StepKind.COMPUTE:
        return replace(segment, us=100.0)
    is_gather = segment.step.kind is StepKind.GATHER_ISSUE
    comm_us = None if segment.comm_us is None else 150.0 if is_gather else 1.0
    return replace(segment, us=1.0, comm_us=comm_us)


def measuring(step_us: Callable[[int], float]) -> Any:
    """Measurement k takes `step_us(k)` in all; what its parts take is worth another plan."""

    def make(original: Callable[..., Measured | None]) -> Callable[..., Measured | None]:
        count = iter(range(100))

        def call(*args: Any, **kwargs: Any) -> Measured | None:
            found = original(*args, **kwargs)
            if found is None:
                return None
            own = {d: tuple(map(alike, found.of(d))) for d in Direction}
            return replace(
                found,
                forward=own[Direction.FORWARD],
                backward=own[Direction.BACKWARD],
                step_time_us=step_us(next(count)),
            )

        return call

    return patched(replan, "combined", make)


def compiled(ctx: Ctx, **options: Any) -> nn.Module:
    given = {**OPTIONS, **options}
    if "verify" not in options:
        return TRACED.compiled(partial(build, CASE, ctx), **given)
    model = build(CASE, ctx)
    model.compile(backend="graphshard", fullgraph=True, options=given)
    return model


def equal_step(ctx: Ctx, oracle: nn.Module, model: nn.Module, step: int) -> None:
    told = {"first_step": step}
    assert_equal(train(oracle, CASE, ctx, 1, **told), train(model, CASE, ctx, 1, **told))


@first_launch
def settles(ctx: Ctx, options: dict[str, Any]) -> tuple[str, int]:
    """Trained on, equal to eager; the plan, and how many forwards it took to settle."""
    oracle = build(CASE, ctx)
    with tunings() as made:
        model = compiled(ctx, **options)
        assert_equal(train(oracle, CASE, ctx, 2), train(model, CASE, ctx, 2))
    (one,) = made
    count = 2
    while one.phase is not Phase.SETTLED:
        equal_step(ctx, oracle, model, count)
        count += 1
    (found,) = graphshard.measurements(model)
    (plan,) = graphshard.plans(model)
    assert found is not None
    assert found.plan.schedules == plan.schedules, "what runs is what was measured"
    (gained,) = graphshard.explain(model).gained
    assert gained.measured == found.measured
    assert (gained.more_us is None) == (plan.estimate.all_spent is not None)
    return plan.to_json(), count


@pytest.mark.parametrize("options", [{}, {"verify": "off"}, {"memory_budget": "1GiB"}], ids=str)
def test_it_settles_within_12_steps_alike_on_all_ranks(pool: Pool, options: dict[str, Any]) -> None:
    first, second = pool.run(2, settles, options, keeps_compiled=True)
    assert first == second
    assert first[1] <= 12


@first_launch
def tried(ctx: Ctx, second_us: float) -> tuple[bool, bool]:
    """Was another plan run, and does it run still?"""
    oracle, model, plans = build(CASE, ctx), compiled(ctx), []
    # Of a busy machine the probe may tell what `alike` tells, and nothing would be planned anew.
    with unseen(), measuring(lambda k: (1000.0, second_us)[k]):
        for step in range(13):
            equal_step(ctx, oracle, model, step)
            plans.append(graphshard.plans(model)[0].to_json())
    return len(set(plans)) > 1, plans[-1] != plans[0]


@pytest.mark.parametrize(("second_us", "stays"), [(999.0, True), (1001.0, False)])
def test_a_plan_that_measures_slower_is_given_back(
    pool: Pool, second_us: float, stays: bool
) -> None:
    assert pool.run(2, tried, second_us, keeps_compiled=True) == [(True, stays)] * 2


@first_launch
def follows(ctx: Ctx) -> list[Phase]:
    """Steps become slower on the lowest rank alone, and stay so."""
    oracle = build(CASE, ctx)
    with tunings() as made:
        model = compiled(ctx)
        train(model, CASE, ctx, 12)
    (one,) = made
    assert one.phase is Phase.SETTLED
    train(oracle, CASE, ctx, 12)
    phases = []
    for step in range(12, 34):
        if step > 20 and ctx.rank == 0:
            time.sleep(0.5)
        equal_step(ctx, oracle, model, step)
        phases.append(one.phase)
    return phases


def test_steps_that_stay_slower_are_measured_again(pool: Pool) -> None:
    first, second = pool.run(2, follows, keeps_compiled=True)
    assert first == second
    assert Phase.MEASURED in first
    assert set(first[:8]) == {Phase.SETTLED}


@first_launch
def lengths(ctx: Ctx, alike_until: int) -> tuple[list[Phase], bool]:
    """Ranks run different graphs at the same step, and not equally often: after `alike_until`.

    Without the first collectives (`unseen`): before they are measured, two graphs have one order
    only where gathers take next to nothing. tests/dist/test_lengths.py has such collectives. With
    two blocks they have not one order either.
    """
    with tunings() as made, measuring(lambda k: 1000.0 - k), unseen(), without_clones():
        made_of = partial(build, CASES["llama"], ctx)
        oracle, model = made_of(), TRACED.compiled(made_of, **OPTIONS)
        plans, seen = [], []
        for step in range(14):
            cut = 4 if (step + ctx.rank * (step > alike_until)) % 3 != 1 else 2
            assert len({length_step(ctx, net, step, cut) for net in (oracle, model)}) == 1
            seen.append(made[0].phase)
            plans.append({order(plan) for plan in graphshard.plans(model)})
    assert len(made) == 2
    assert made[0] is made[1]
    assert all(len(orders) == 1 for orders in plans), "all graphs change over together"
    return seen, len({tuple(orders) for orders in plans}) > 1


def length_step(ctx: Ctx, net: nn.Module, step: int, cut: int) -> float:
    ids, targets = (t[:, :cut] for t in CASE.batch(step, ctx.rank, ctx.device))
    loss = CASE.loss(net, (ids, targets))
    loss.backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    net.zero_grad()
    return loss.item()


def order(plan: Plan) -> str:
    return str([list(schedule.steps) for schedule in plan.schedules])


@pytest.mark.parametrize("alike_until", [0, 6])
def test_ranks_may_run_different_graphs(pool: Pool, alike_until: int) -> None:
    first, second = pool.run(2, lengths, alike_until, keeps_compiled=True)
    assert first == second
    phases, changed = first
    assert phases[-1] is Phase.SETTLED
    assert changed or alike_until == 0


@first_launch
def stays_as_it_is(ctx: Ctx, options: dict[str, Any]) -> int:
    with tunings() as made:
        train(compiled(ctx, **options), CASE, ctx, 1)
    return len(made)


@pytest.mark.parametrize(
    ("options", "number"),
    [({"replan_after": 0}, 0), ({"schedule": "fsdp2"}, 0), ({}, 1)],
    ids=str,
)
def test_what_tunes_itself(pool: Pool, options: dict[str, Any], number: int) -> None:
    assert pool.run(2, stays_as_it_is, options, keeps_compiled=True) == [number] * 2


@first_launch
def profiled(ctx: Ctx) -> tuple[str, int]:
    """The user measures while a plan is tried, and afterwards it is tried on."""
    oracle = build(CASE, ctx)
    with tunings() as made:
        model = compiled(ctx)
        assert_equal(train(oracle, CASE, ctx, 8), train(model, CASE, ctx, 8))
        (one,) = made
        phase, count = one.phase, 8
        with graphshard.profile(model, steps=3):
            for _ in range(5):
                equal_step(ctx, oracle, model, count)
                count += 1
        assert one.phase is phase
        (plan,) = graphshard.plans(model)
        assert plan.measured is not None
        while one.phase is not Phase.SETTLED:
            equal_step(ctx, oracle, model, count)
            count += 1
    return plan.to_json(), count


def test_a_profile_meanwhile_is_no_measurement_of_the_tuning(pool: Pool) -> None:
    first, second = pool.run(2, profiled, keeps_compiled=True)
    assert first == second
    assert first[1] <= 8 + 5 + 6


def launches(ctx: Ctx, folder: str) -> list[list[str]]:
    """The plans of the steps of two launches; each rank has a disk of its own, or none has.

    Here no collectives tell of the network first: on this machine they take another time in each
    launch, and may lead to a graph that computes other things again, of which nothing is known.
    """
    launched = []
    with cache_in(Path(folder) / str(ctx.rank)), unseen():
        for _ in range(2):
            oracle, model, plans = build(CASE, ctx), compiled(ctx), []
            with measuring(lambda k: 1000.0 - k):
                for step in range(13):
                    equal_step(ctx, oracle, model, step)
                    plans.append(order(graphshard.plans(model)[0]))
            launched.append(plans)
    return launched


def test_the_next_launch_begins_with_what_was_tuned(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, launches, str(tmp_path), keeps_compiled=True)
    assert first == second
    before, after = first
    assert before[0] != before[-1]
    assert after[0] == before[-1], "what follows its own measurements say"
    assert [len(list((tmp_path / rank).glob("*.costs.json"))) for rank in "01"] == [1, 0]
