"""Activations that the host holds until backward: real copies, eager's bits, the plan's peak."""

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from models import CASES
from parity import assert_equal, backward_twice, build, difference, train
from patching import patched
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from traced_once import TracedOnce

import graphshard
from graphshard.cost import presets
from graphshard.cost.curve import line
from graphshard.cost.machine import HostCopies
from graphshard.planner.infeasible import LEAST_PLAUSIBLE_BYTES
from graphshard.runtime import host_copies
from graphshard.schedule.plan import Plan, StepKind
from graphshard.schedule.steps import ISSUES

pytestmark = pytest.mark.dist
FAST = HostCopies(line(0.01, 1e6))
TRACES: defaultdict[str, TracedOnce] = defaultdict(TracedOnce)  # of this rank, by model


def with_host(original: Any) -> Any:
    """A CPU has no host to copy to; here it is priced as if it had, and a fast way there."""
    return lambda device: FAST


def compiled(ctx: Ctx, name: str, budget: int, compute: str, **more: object) -> nn.Module:
    options = {"compute": compute, "memory_budget": budget, **more}
    return TRACES[name].compiled(partial(build, CASES[name], ctx), **options)


def copies_of(plan: Plan) -> int:
    issues = (StepKind.OFFLOAD_ISSUE, StepKind.RELOAD_ISSUE)
    return sum(1 for s in plan.schedules for _ in s.of_kind(*issues))


def within(ctx: Ctx, name: str, compute: str) -> list[int]:
    """Budgets between the least feasible peak and FSDP2's own, as the error says them."""
    with patched(presets, "_host", with_host), pytest.raises(graphshard.InfeasibleBudget) as error:
        train(compiled(ctx, name, LEAST_PLAUSIBLE_BYTES, compute), CASES[name], ctx, 1)
    shortage = error.value.shortage
    more_bytes = shortage.fsdp2_bytes - shortage.least_bytes
    return [shortage.least_bytes + more_bytes * part // 10 for part in (1, 3)]


Budgets = Callable[[str, str], list[int]]


@pytest.fixture(scope="module")
def budgets(pool: Pool) -> Budgets:
    """Asked for once for each model and way to compute."""

    @cache
    def found(name: str, compute: str) -> list[int]:
        first, second = pool.run(2, within, name, compute, keeps_compiled=True)
        assert first == second
        return first

    return found


def offloading(ctx: Ctx, name: str, compute: str, budgets: list[int]) -> list[tuple[int, int, int]]:
    """How many activations the host holds, the budget, the plan's peak."""
    expected, found = backward_twice(build(CASES[name], ctx), CASES[name], ctx), []
    with patched(presets, "_host", with_host):
        for budget in budgets:
            model = compiled(ctx, name, budget, compute)
            actual = backward_twice(model, CASES[name], ctx)
            for value, other in zip(expected, actual, strict=True):
                if compute == "inductor":
                    torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-5)
                else:
                    assert difference(value, other) is None, (budget, difference(value, other))
            (plan,) = graphshard.plans(model)
            assert plan.summary().fsdp2.peak_bytes > budget
            held = len(plan.recompute.offloaded)
            assert (copies_of(plan) > 0) == (held > 0)
            found.append((held, budget, plan.summary().peak_bytes))
    return found


@pytest.mark.parametrize(
    ("name", "compute"),
    [("llama", "aten"), ("llama", "inductor"), ("gpt_tied_ac", "aten"), ("moe", "aten")],
)
def test_what_the_host_holds_comes_back_as_it_was(
    pool: Pool, budgets: Budgets, name: str, compute: str
) -> None:
    """With dropout, with checkpoints of the user's, with retain_graph."""
    first, second = pool.run(
        2, offloading, name, compute, budgets(name, compute), timeout_s=280, keeps_compiled=True
    )
    assert first == second
    assert all(peak_bytes <= budget for _, budget, peak_bytes in first)
    assert any(held > 0 for held, *_ in first)


class Watched:
    """What is copied: (group, bytes) of each copy, and the memory that it is copied from or to."""

    def __init__(self) -> None:
        self.copies: list[tuple[str, int]] = []
        self.memory: list[weakref.ref[Any]] = []

    def note(self, name: str, tensors: Sequence[Tensor]) -> None:
        self.copies.append((name, sum(tensor.nbytes for tensor in tensors)))
        self.memory += [weakref.ref(tensor.untyped_storage()) for tensor in tensors]

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.memory)


@contextmanager
def watched() -> Iterator[tuple[Watched, Watched]]:
    """On their way out: what is copied from. On their way back: what is copied to."""
    out, back = Watched(), Watched()

    def offload(original: Any) -> Any:
        def copied(device: torch.device, tensors: Sequence[Tensor], name: str) -> Any:
            out.note(name, tensors)
            return original(device, tensors, name)

        return copied

    def reload(original: Any) -> Any:
        def copied(device: torch.device, tensors: Sequence[Tensor], name: str) -> Any:
            copy = original(device, tensors, name)
            back.note(name, copy._targets)
            return copy

        return copied

    with patched(host_copies, "offload", offload), patched(host_copies, "reload", reload):
        yield out, back


def memory_of_copies(ctx: Ctx, name: str, budget: int) -> int:
    case = CASES[name]
    with patched(presets, "_host", with_host), watched() as (out, back):
        model = compiled(ctx, name, budget, "aten")
        for step in range(2):
            for one in (out, back):
                one.copies, one.memory = [], []
            loss = case.loss(model, case.batch(step, ctx.rank, ctx.device))
            assert out.alive == 0
            loss.backward()
            assert back.alive == 0
    (plan,) = graphshard.plans(model)
    names = {group.id: group.fqn for group in plan.groups}
    size = {group.fqn: group.offloaded_bytes for group in plan.groups}
    order = ((StepKind.OFFLOAD_ISSUE, out), (StepKind.RELOAD_ISSUE, back))
    for schedule, (kind, one) in zip(plan.schedules, order, strict=True):
        planned = [names[step.group] for step in schedule.of_kind(kind)]
        assert one.copies == [(fqn, size[fqn]) for fqn in planned]
    return len(out.copies)


def test_the_memory_of_what_is_away_is_free(pool: Pool, budgets: Budgets) -> None:
    """All of it, and nothing else, is copied in the plan's order; none of it is left on the device
    when forward is over, nor of what came back when backward is."""
    budget, _ = budgets("llama", "aten")
    first, second = pool.run(2, memory_of_copies, "llama", budget, keeps_compiled=True)
    assert first == second >= 2


def a_copy_fails(ctx: Ctx, name: str, budget: int) -> None:
    """Where it is made, on a CPU in a thread: the step raises, the next one goes on."""
    case, fails = CASES[name], [False]
    expected = train(build(case, ctx), case, ctx, 2)
    on_cpu = ctx.device.type == "cpu"
    queue = host_copies.ThreadQueue if on_cpu else host_copies.StreamQueue

    def copy(original: Any) -> Any:
        def copied(queue: Any, pairs: Any) -> Any:
            if fails[0]:
                raise MemoryError("the host is full")
            return original(queue, pairs)

        return copied

    with patched(presets, "_host", with_host):
        model = compiled(ctx, name, budget, "aten")
        with patched(queue, "_copy" if on_cpu else "copy", copy):
            fails[0] = True
            with pytest.raises(MemoryError, match="the host is full"):
                case.loss(model, case.batch(0, ctx.rank, ctx.device))
            assert all(isinstance(param, DTensor) for param in model.parameters())
            fails[0] = False
            assert_equal(expected, train(model, case, ctx, 2))


def test_a_copy_that_fails_loses_nothing(pool: Pool, budgets: Budgets) -> None:
    budget, _ = budgets("llama", "aten")
    pool.run(2, a_copy_fails, "llama", budget, keeps_compiled=True)


SLOW_S = 0.004


def slow_copy(original: Any) -> Any:
    def copied(queue: Any, pairs: Any) -> None:
        time.sleep(SLOW_S)
        original(queue, pairs)

    return copied


def planned_again(ctx: Ctx, name: str, budget: int) -> int:
    """How many activations the host holds when the plan was made again from measured times."""
    case, plans = CASES[name], []
    slowly = patched(host_copies.ThreadQueue, "_copy", slow_copy)
    with patched(presets, "_host", with_host), slowly:
        model, oracle = compiled(ctx, name, budget, "aten", replan_after=3), build(case, ctx)
        for first_step in (0, 2, 4):
            expected, actual = (
                train(one, case, ctx, 2, first_step=first_step) for one in (oracle, model)
            )
            assert_equal(expected, actual)
            plans += graphshard.plans(model)
    first, _, plan = plans
    (measurement,) = graphshard.measurements(model)
    assert measurement is not None
    measured = measurement.measured
    assert plan.recompute == first.recompute
    assert copies_of(plan) == copies_of(first) > 0
    segments = (*measured.forward, *measured.backward)
    took_us = [s.comm_us for s in segments if s.step.kind in ISSUES and s.step.is_copy]
    assert len(took_us) == copies_of(plan)
    least_us = 1e6 * SLOW_S if ctx.device.type == "cpu" else 0.0
    assert all(us is not None and us > least_us for us in took_us), took_us
    return len(plan.recompute.offloaded)


def test_a_plan_that_is_made_again_has_the_host_hold_the_same(pool: Pool, budgets: Budgets) -> None:
    """And it knows what the copies took."""
    budget, _ = budgets("llama", "aten")
    first, second = pool.run(2, planned_again, "llama", budget, timeout_s=200, keeps_compiled=True)
    assert first == second > 0
