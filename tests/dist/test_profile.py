"""`graphshard.profile`: what ran is measured and in the plan; what runs afterwards is unmarked."""

from typing import Any

import pytest
import torch
from models import CASES
from parity import assert_equal, build, train
from pool import Ctx, Pool

import graphshard
from graphshard.capture.root_state import root_states_under
from graphshard.compiler.executable import Executable
from graphshard.errors import MeasureError
from graphshard.schedule.plan import Plan, StepKind

pytestmark = pytest.mark.dist


def compiled(ctx: Ctx, name: str, **options: Any) -> Any:
    model = build(CASES[name], ctx)
    model.compile(backend="graphshard", options={"fallback": "error", **options})
    return model


def running_of(model: Any) -> Executable:
    (record,) = root_states_under(model)
    (found,) = record.plans.values()
    assert isinstance(found.running, Executable)
    return found.running


def assert_unmarked(model: Any) -> None:
    running = running_of(model)
    assert not running.segments
    for direction, body in running.bodies.items():
        assert not body.watched
        assert not body.watches
        assert "run.mark" not in running.program.by_direction[direction].code
        assert body.call.__self__ is running.program.by_direction[direction]


def profiled(ctx: Ctx, name: str, before: int) -> str:
    """The plan after a profile of 7 steps, `before` steps of training into the run."""
    case = CASES[name]
    expected = train(build(case, ctx), case, ctx, 7)
    model = compiled(ctx, name)
    if before:
        train(model, case, ctx, before)
        assert graphshard.measurements(model) == [None]
        model.load_state_dict(build(case, ctx).state_dict())
    with graphshard.profile(model, steps=4):
        found = train(model, case, ctx, 7)
    assert_equal(expected, found)
    assert_unmarked(model)
    (plan,) = graphshard.plans(model)
    measured = plan.measured
    assert measured is not None
    assert measured.num_steps == 4
    assert measured.step_time_us > measured.exposed_us >= 0
    gathers = [s for s in measured.forward if s.step.kind is StepKind.GATHER_ISSUE]
    assert [s for s in gathers if not (s.comm_us or 0) > 0] == []
    (told,) = graphshard.measurements(model)
    assert told is not None
    assert "predicted us" in str(told)
    assert Plan.from_json(plan.to_json()) == plan
    return plan.to_json()


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name", ["llama", "gpt_tied_ac"])
def test_a_profile_is_in_the_plan_of_every_rank(pool: Pool, name: str, before: int) -> None:
    first, second = pool.run(2, profiled, name, before, timeout_s=250)
    assert first == second


def _fails_after(trained: object) -> None:
    raise ZeroDivisionError


def again(ctx: Ctx) -> list[int]:
    """Two profiles, one after another; an exception in a third leaves what was there."""
    case, counts = CASES["llama"], []
    model = compiled(ctx, "llama")
    for steps in (2, 3):
        with graphshard.profile(model, steps=steps):
            train(model, case, ctx, 6)
        counts.append(graphshard.plans(model)[0].measured.num_steps)
    with pytest.raises(ZeroDivisionError), graphshard.profile(model):
        _fails_after(train(model, case, ctx, 2))
    counts.append(graphshard.plans(model)[0].measured.num_steps)
    assert_unmarked(model)
    return counts


def test_a_later_profile_takes_the_place_of_an_earlier_one(pool: Pool) -> None:
    assert pool.run(2, again) == [[2, 3, 3]] * 2


def nothing(ctx: Ctx) -> list[str]:
    codes = []
    case, model = CASES["llama"], compiled(ctx, "llama")
    for steps, why in ((0, "no graph"), (1, "is compiled does not count")):
        with pytest.raises(MeasureError, match=why) as caught, graphshard.profile(model):
            train(model, case, ctx, steps)
        codes.append(caught.value.code)
    with pytest.raises(MeasureError) as caught, graphshard.profile(model, steps=0):
        pass
    codes.append(caught.value.code)
    other = compiled(ctx, "llama")
    with (
        pytest.raises(MeasureError, match=r"it has no graph \(yet\): graphshard.explain") as caught,
        graphshard.profile(other),
    ):
        train(model, case, ctx, 3)
    codes.append(caught.value.code)
    assert graphshard.measurements(model) == [None]
    return codes


def test_nothing_measured_is_an_error(pool: Pool) -> None:
    assert pool.run(2, nothing) == [["GS801", "GS801", "GS802", "GS801"]] * 2


def replanned(ctx: Ctx) -> list[bool]:
    case = CASES["llama"]
    model = compiled(ctx, "llama", replan_after=3)
    with graphshard.profile(model, steps=2):
        train(model, case, ctx, 7)
    assert_unmarked(model)
    (record,) = root_states_under(model)
    (found,) = record.plans.values()
    return [found.before is not None, found.measured is not None, found.plan.measured is not None]


def test_a_profile_waits_for_replan_after(pool: Pool) -> None:
    assert pool.run(2, replanned) == [[True, True, True]] * 2


def inference(ctx: Ctx) -> list[int]:
    """Forward alone, under no_grad."""
    case, model = CASES["llama"], compiled(ctx, "llama")
    with torch.no_grad(), graphshard.profile(model, steps=2):
        for step in range(4):
            case.loss(model, case.batch(step, ctx.rank, ctx.device))
    (plan,) = graphshard.plans(model)
    assert plan.measured is not None
    assert plan.measured.backward == ()
    assert_unmarked(model)
    return [plan.measured.num_steps, len(plan.measured.forward) > 0]


def test_a_forward_alone_is_measured(pool: Pool) -> None:
    assert pool.run(2, inference) == [[2, True]] * 2


def blocks(ctx: Ctx) -> list[int]:
    """Blocks compiled one by one share a graph: each call of it is a step of that graph."""
    case = CASES["llama"]
    expected = train(build(case, ctx), case, ctx, 4)
    model = build(case, ctx)
    for block in model.blocks:
        block.compile(backend="graphshard", options={"fallback": "error", "promote": False})
    with graphshard.profile(model, steps=6):
        assert_equal(expected, train(model, case, ctx, 4))
    return [plan.measured.num_steps for plan in graphshard.plans(model) if plan.measured]


def test_a_graph_that_blocks_share_is_measured_once(pool: Pool) -> None:
    first, second = pool.run(2, blocks)
    assert first == second
    assert max(first) == 6
