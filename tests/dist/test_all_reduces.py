"""HSDP's all-reduces on real ranks: two replicas of two shards.

All cases train the same model with the same options: what is compiled for the first is kept for the
others (`shared`), each of which has its own model and says what plan it runs.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from contract_models import mesh_of
from launches import first_launch
from models import CASES, of_depth
from parity import assert_equal, build, count_collectives, train, twin
from patching import patched
from pool import Ctx, Pool, capped
from replanning import Programs, kept_programs, run_as
from torch import nn

import graphshard
from graphshard.capture.root_state import root_states_under
from graphshard.compiler import planning_inputs, replan
from graphshard.cost import presets
from graphshard.fsdp2 import fsdp_groups, states_under
from graphshard.planner.problem import Group, Problem
from graphshard.runtime.live import Root
from graphshard.runtime.probe import Probed
from graphshard.runtime.reduce import AllReduce, Reduction
from graphshard.schedule.plan import Plan, Schedule, StepKind

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(capped(4) < 4, reason="needs 4 ranks"),
]
STRICT = {"fallback": "error", "compute": "aten"}
PROGRAMS: Programs = {}  # of this rank: what was compiled, for `run_as`


def hybrid(ctx: Ctx) -> Ctx:
    return replace(ctx, mesh=mesh_of(ctx, (2, 2), "replicate", "shard"))


def compiled(model: Any, **options: Any) -> Any:
    model.compile(backend="graphshard", fullgraph=True, options={**STRICT, **options})
    return model


def first_step(ctx: Ctx, model: Any, number: int = 0) -> None:
    """Compiles `model`, or finds what an earlier case has compiled, and leaves it as it was."""
    case = CASES["llama"]
    with kept_programs() as programs:
        case.loss(compiled(model), case.batch(number, ctx.rank, ctx.device)).backward()
    model.zero_grad()
    PROGRAMS.update(programs)


def prompt(plan: Plan) -> Plan:
    """The same with each reduction waited for where the next one is issued, as soon as may be."""
    backward = plan.backward
    assert backward is not None
    pairs = (StepKind.REDUCE_WAIT, StepKind.ALL_REDUCE_ISSUE)
    waits = {kind: {s.group: s for s in backward.of_kind(kind)} for kind in pairs}
    steps: list[Any] = []
    before = None
    for step in (s for s in backward.steps if s.kind not in pairs):
        at_end = step.kind is StepKind.ALL_REDUCE_WAIT
        if before is not None and (at_end or step.kind is StepKind.REDUCE_ISSUE):
            steps += [waits[kind][before] for kind in pairs]
            before = None
        steps.append(step)
        if step.kind is StepKind.REDUCE_ISSUE:
            before = step.group
    return replace(plan, backward=Schedule(backward.direction, tuple(steps)), forecasts=())


@contextmanager
def told(into: list[str]) -> Iterator[None]:
    """What is issued and waited for, in order."""

    def telling(word: str) -> Callable[[Any], Any]:
        def tell(original: Any) -> Any:
            def call(self: Any, *args: Any, **kwargs: Any) -> Any:
                reduction = self if isinstance(self, Reduction) else self._reduction
                into.append(f"{word} {reduction.live.fqn}")
                return original(self, *args, **kwargs)

            return call

        return tell

    with (
        patched(Reduction, "_issue", telling("reduce")),
        patched(Reduction, "_issue_all_reduce", telling("all-reduce")),
        patched(AllReduce, "complete", telling("complete")),
    ):
        yield


def root_of(model: nn.Module) -> Root:
    (root,) = (root for state in root_states_under(model) for root in state.roots)
    return root


def is_clean(model: nn.Module) -> bool:
    groups = [g for state in states_under(model) for g in fsdp_groups(state)]
    return all(group.is_sharded for group in groups)


# -- bits ------------------------------------------------------------------------------------------


def accumulate(model: Any, micro: int, count: int, how: str) -> None:
    last = micro == count - 1
    if how == "sync":
        model.set_requires_gradient_sync(last)
    elif how == "all-reduce":
        model.set_requires_all_reduce(last)


def steps_of(model: Any, ctx: Ctx, how: str, optimizer: Any) -> list[torch.Tensor]:
    """Losses and gradients of four steps of three micro-steps (one, without `how`)."""
    case, seen = CASES["llama"], []
    optim = optimizer(model.parameters())
    count = 3 if how else 1
    for step in range(4):
        for micro in range(count):
            accumulate(model, micro, count, how)
            loss = case.loss(model, case.batch(step * count + micro, ctx.rank, ctx.device))
            loss.backward()
            seen.append(loss.detach().clone())
        grads = [p.grad for p in model.parameters()]
        seen += [g.to_local().clone() for g in grads if g is not None]
        optim.step()
        optim.zero_grad()
    return [*seen, *(p.to_local().detach().clone() for p in model.parameters())]


def same_bits(ctx: Ctx, how: str, is_prompt: bool) -> int:
    ctx = hybrid(ctx)
    oracle, model = twin(CASES["llama"], ctx)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    expected = steps_of(oracle, ctx, how, sgd)
    first_step(ctx, model)
    if is_prompt:
        run_as(model, PROGRAMS, prompt)
    found = steps_of(model, ctx, how, sgd)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert is_clean(model)
    return sum(live.counters.all_reduces for live in root_of(model).groups)


@pytest.mark.parametrize("is_prompt", [False, True], ids=["planned", "prompt"])
@pytest.mark.parametrize("how", ["", "sync", "all-reduce"])
def test_bits_are_those_of_eager_fsdp2(pool: Pool, how: str, is_prompt: bool) -> None:
    counts = pool.run(4, same_bits, how, is_prompt, keeps_compiled=True)
    assert len(set(counts)) == 1
    assert counts[0] > 0


# -- hooks -----------------------------------------------------------------------------------------


def in_backward(model: nn.Module, into: list[str]) -> None:
    """An optimizer in backward: each parameter is stepped as soon as its gradient is there."""
    for name, param in model.named_parameters():
        optim = torch.optim.SGD([param], lr=0.1)

        def step(p: Any, optim: Any = optim, name: str = name) -> None:
            into.append(name)
            optim.step()
            optim.zero_grad()

        param.register_post_accumulate_grad_hook(step)


def hooked(ctx: Ctx) -> list[str]:
    ctx, case = hybrid(ctx), CASES["llama"]
    oracle, model = twin(case, ctx)
    orders: list[list[str]] = [[], []]
    for one, order in zip((oracle, model), orders, strict=True):
        in_backward(one, order)
    compiled(model)
    losses = []
    for one in (oracle, model):
        for step in range(4):
            loss = case.loss(one, case.batch(step, ctx.rank, ctx.device))
            loss.backward()
            losses.append(loss.detach().clone())
    assert all(map(torch.equal, losses[:4], losses[4:]))
    params = [[p.to_local() for p in one.parameters()] for one in (oracle, model)]
    assert all(map(torch.equal, *params))
    assert orders[0] == orders[1]
    return orders[1]


def test_hooks_see_what_all_replicas_have(pool: Pool) -> None:
    first, *others = pool.run(4, hooked, keeps_compiled=True)
    assert all(other == first for other in others)


# -- beside compute --------------------------------------------------------------------------------


def beside(ctx: Ctx) -> list[str]:
    ctx, case = hybrid(ctx), CASES["llama"]
    model = build(case, ctx)
    first_step(ctx, model)
    run_as(model, PROGRAMS, prompt)
    seen: list[str] = []
    with told(seen), count_collectives() as counts:
        case.loss(model, case.batch(1, ctx.rank, ctx.device)).backward()
    assert counts.all_reduce == len([text for text in seen if text.startswith("all-reduce")])
    return seen


def test_compute_goes_on_while_replicas_add_up(pool: Pool) -> None:
    """All gradients of other groups come, and leave, before the first all-reduce is waited for."""
    first, *others = pool.run(4, beside, keeps_compiled=True)
    assert all(other == first for other in others)
    words = [text.split()[0] for text in first]
    count = words.count("reduce")
    assert count > 2
    turns = ["reduce", *["all-reduce", "reduce"] * (count - 1), "all-reduce"]
    assert words == turns + ["complete"] * count


# -- failures --------------------------------------------------------------------------------------


class Interrupted(Exception):
    """In the middle of a backward."""


def failed(ctx: Ctx, where: str) -> int:
    ctx, case = hybrid(ctx), CASES["llama"]
    oracle, model = twin(case, ctx)
    first_step(ctx, model, 9)
    run_as(model, PROGRAMS, prompt)
    made: list[AllReduce] = []
    in_flight = 0

    def keeping(original: Any) -> Any:
        def init(self: AllReduce, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            made.append(self)

        return init

    def failing(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal in_flight
            in_flight = sum(one.is_under_way for one in made)
            if in_flight == 2:
                raise Interrupted
            return original(self, *args, **kwargs)

        return call

    point = (Reduction, "_issue") if where == "compute" else (AllReduce, "complete")
    with (
        patched(AllReduce, "__init__", keeping),
        patched(*point, failing),
        pytest.raises(Interrupted),
    ):
        case.loss(model, case.batch(8, ctx.rank, ctx.device)).backward()
    assert in_flight == 2
    assert all(one.work is None and not one.is_under_way for one in made)
    assert is_clean(model)
    model.zero_grad()
    expected = train(oracle, case, ctx, 3)
    assert_equal(expected, train(model, case, ctx, 3))
    return len(made)


@pytest.mark.parametrize("where", ["compute", "wait"])
def test_a_backward_that_fails_leaves_nothing_under_way(pool: Pool, where: str) -> None:
    """The groups are SHARDED, and the next steps are those of a model where nothing failed."""
    counts = pool.run(4, failed, where, keeps_compiled=True)
    assert len(set(counts)) == 1
    assert counts[0] >= 2


# -- a plan of its own -----------------------------------------------------------------------------


@contextmanager
def quick_network() -> Iterator[None]:
    """As said by the preset, and not measured: collectives take no time beside compute."""

    def said(original: Any) -> Any:
        def network(*args: Any) -> Any:
            found = original(*args)
            quick = tuple(
                replace(p, base_us=0.1, intra_hop_us=0.1, inter_hop_us=0.1) for p in found.protocols
            )
            return replace(found, protocols=quick, intra_bytes_per_us=1e6, inter_bytes_per_us=1e6)

        return network

    def nothing(original: Any) -> Any:
        return lambda *args: Probed()

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, GRAPHSHARD_CACHE_DIR=folder),
        patched(presets, "_network", said),
        patched(planning_inputs, "probe", nothing),
    ):
        yield


def own_plan(ctx: Ctx) -> list[str]:
    ctx, case = hybrid(ctx), CASES["llama"]
    oracle, model = twin(case, ctx)
    expected = train(oracle, case, ctx, 3)
    seen: list[str] = []
    with quick_network():
        compiled(model)
        with told(seen):
            case.loss(model, case.batch(0, ctx.rank, ctx.device)).backward()
        model.zero_grad()
    assert_equal(expected, train(model, case, ctx, 3))
    return seen


def test_a_plan_waits_for_reductions_in_time(pool: Pool) -> None:
    """Of its own: where collectives are quick, all-reduces are under way while others compute."""
    seen = pool.run(4, own_plan)[0]
    words = [text.split()[0] for text in seen]
    last_reduce = len(words) - 1 - words[::-1].index("reduce")
    assert words.index("all-reduce") < last_reduce < words.index("complete")


# -- what is measured ------------------------------------------------------------------------------


def measured(ctx: Ctx) -> list[tuple[float, float]]:
    """Microseconds of each all-reduce: measured, and as the rank that plans again has it then."""
    ctx, case = hybrid(ctx), CASES["llama"]
    problems: list[tuple[Problem, Problem]] = []

    def noting(original: Any) -> Any:
        def call(before: Problem, *args: Any) -> Problem:
            problems.append((before, original(before, *args)))
            return problems[-1][1]

        return call

    with patched(replan, "observed", noting):
        model = compiled(build(case, ctx), replan_after=8, memory_budget="1GiB")
        train(model, case, ctx, 12)
    (found,) = graphshard.measurements(model)
    assert found is not None
    seen = {
        s.step.group: s.comm_us or 0.0
        for s in found.measured.backward
        if s.step.kind is StepKind.ALL_REDUCE_ISSUE
    }
    assert len(seen) == len(found.plan.groups)
    return [
        (seen[group.id], together_us(before, group))
        for before, after in problems
        for group in after.groups
    ]


def together_us(before: Problem, group: Group) -> float:
    """Of the parts in one collective, with one of the launches that each has got."""
    assert group.all_reduce_lane is not None
    launch_us = before.lanes[group.all_reduce_lane].launch_us
    grads = [part.gradient for part in group.parts if part.gradient is not None]
    each = [grad.all_reduce.us for grad in grads if grad.all_reduce is not None]
    return sum(each) - launch_us * (len(each) - 1)


@pytest.mark.alone
def test_a_plan_is_made_again_from_what_they_took(pool: Pool) -> None:
    rows = [row for own in pool.run(4, measured, timeout_s=250) for row in own]
    assert rows
    assert all(seen_us > 0 for seen_us, _ in rows)
    assert [us for us, _ in rows] == pytest.approx([us for _, us in rows], abs=0.1)


@first_launch
def probed(ctx: Ctx) -> list[str]:
    ctx, case = hybrid(ctx), of_depth("llama", 1)
    kinds: list[str] = []

    def noting(original: Any) -> Any:
        def call(*args: Any) -> Probed:
            found: Probed = original(*args)
            kinds.extend(str(one.kind) for one in found.collectives)
            return found

        return call

    with patched(planning_inputs, "probe", noting):
        model = compiled(build(case, ctx), replan_after=None)
        case.loss(model, case.batch(0, ctx.rank, ctx.device)).backward()
    return kinds


def test_the_first_plan_knows_what_one_takes(pool: Pool) -> None:
    for kinds in pool.run(4, probed):
        assert kinds == ["all_gather", "reduce_scatter", "all_reduce"]
