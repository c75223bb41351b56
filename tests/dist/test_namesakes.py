"""Identical models that share a compiled graph: each has its own plan, measurements and code."""

from typing import Any

import pytest
import torch
from pool import Ctx, Pool
from students import WIDTH, Outer, Student, facts, in_place, sharded, wrapped
from torch import nn

import graphshard
from graphshard.capture.root_state import root_states_under
from graphshard.compiler.executable import Executable
from graphshard.schedule.plan import Plan

pytestmark = pytest.mark.dist


def running_of(model: nn.Module) -> Executable:
    (record,) = root_states_under(model)
    (found,) = record.plans.values()
    assert isinstance(found.running, Executable)
    return found.running


def alternately(ctx: Ctx) -> None:
    for way in (in_place, wrapped):
        torch._dynamo.reset()
        students = [Student(ctx, seed, way) for seed in (1, 2, 3)]
        for _ in range(3):
            for student in students:
                student.step()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
        programs = {id(running_of(s.model).program) for s in students}
        assert len(programs) == 1, "they share the compiled graph"
        assert len({id(running_of(s.model)) for s in students}) == 3
        expected = (2, 3, ["(root)", "blocks.0", "blocks.1"])
        assert [facts(s.model) for s in students] == [expected] * 3


def test_models_that_are_called_in_turn(pool: Pool) -> None:
    pool.run(2, alternately, timeout_s=240)


def under_another_name(ctx: Ctx) -> Plan:
    torch._dynamo.reset()
    first = Student(ctx, 1, in_place)
    first.step()

    def only_inner(model: Any) -> Any:
        in_place(model.inner, promote=False)
        return model

    second = Student(ctx, 2, only_inner, Outer())
    for _ in range(2):
        second.step()
        first.step()
    assert facts(first.model) == (2, 3, ["(root)", "blocks.0", "blocks.1"])
    (plan,) = graphshard.plans(second.model)
    return plan


def test_a_root_under_another_name(pool: Pool) -> None:
    for plan in pool.run(2, under_another_name):
        assert {g.fqn for g in plan.groups} == {"inner.blocks.0", "inner.blocks.1", "inner"}
        assert all(p.fqn.startswith("inner.") for g in plan.groups for p in g.params)
        collectives = " ".join(entry.group for entry in plan.collective_signature)
        assert "inner.blocks.0" in collectives


def measured_apart(ctx: Ctx) -> None:
    torch._dynamo.reset()
    first, second = (Student(ctx, seed, in_place) for seed in (1, 2))
    for _ in range(2):
        first.step()
        second.step()
    with graphshard.profile(second.model, steps=3):
        for _ in range(4):
            first.step()
            second.step()
    assert graphshard.measurements(first.model) == [None]
    (found,) = graphshard.measurements(second.model)
    assert found is not None
    assert found.measured.num_steps == 3


def test_profile_measures_one_of_them(pool: Pool) -> None:
    pool.run(2, measured_apart, timeout_s=240)


def replanned_apart(ctx: Ctx) -> None:
    torch._dynamo.reset()
    first, second = (
        Student(ctx, seed, lambda model: in_place(model, replan_after=3)) for seed in (1, 2)
    )
    for _ in range(5):
        first.step()
    second.step()
    assert graphshard.measurements(first.model)[0] is not None
    assert graphshard.measurements(second.model) == [None]
    assert running_of(first.model).program is not running_of(second.model).program
    for _ in range(4):
        second.step()
        first.step()
    assert graphshard.measurements(second.model)[0] is not None
    assert facts(second.model)[:2] == (2, 3)


def test_each_is_planned_again_by_itself(pool: Pool) -> None:
    pool.run(2, replanned_apart, timeout_s=240)


def before_it_ran(ctx: Ctx) -> tuple[str, str, str]:
    plain = nn.Linear(WIDTH, WIDTH)
    model = sharded(ctx)
    new = str(graphshard.explain(in_place(model)))
    model(torch.ones(2, WIDTH)).sum().backward()
    return str(graphshard.explain(plain)), new, str(graphshard.explain(model))


def test_explain_before_the_first_call(pool: Pool) -> None:
    for plain, new, ran in pool.run(2, before_it_ran):
        assert plain.startswith("no fully_shard group in this model")
        assert new.startswith("not run yet  3 groups")
        assert "3 of 3 run in a graph" in ran
        assert "not run yet" not in ran
