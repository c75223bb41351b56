"""When FSDP2 gathers in backward, against what the planner takes for it.

FSDP2's own peak is the default budget, and it depends on how early each group is gathered. Drawn is
what each block keeps after forward. Eager FSDP2 says by its own ranges in torch's profiler in which
group's pre-backward hook each gather is issued; the planner's order of FSDP2 has to say the same.
`GRAPHSHARD_ORDER=50 GRAPHSHARD_ORDER_SEED=1` draws more than CI's 3.
"""

import os
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawing import drawing
from hypothesis import example, given
from hypothesis import strategies as st
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

import graphshard
from graphshard.schedule.plan import Direction, Plan, StepKind

pytestmark = pytest.mark.dist

COUNT = int(os.environ.get("GRAPHSHARD_ORDER", "3"))
SEED = os.environ.get("GRAPHSHARD_ORDER_SEED")
NUM_LAYERS, DIM, VOCABULARY = 5, 16, 32
RANGE = re.compile(r"FSDP::(pre_backward|all_gather)(?: \((.*)\))?$")

Reshard = tuple[bool | None, ...]
Order = list[tuple[str, str]]  # in which group's hook, which group is gathered


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu()


class Net(nn.Module):
    """The root has parameters at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), tokens)


def sharded(ctx: Ctx, reshard: Reshard) -> Any:
    torch.manual_seed(0)
    model = Net()
    for layer, after_forward in zip(model.layers, reshard, strict=True):
        fully_shard(layer, mesh=ctx.mesh, reshard_after_forward=after_forward)
    return fully_shard(model, mesh=ctx.mesh)


def of_eager(model: Any) -> Order:
    loss = model(torch.arange(8))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loss.backward()
    found, hook = [], ""
    # Not `profiler.events()`: it makes a tree of all ops, which takes longer than the step.
    results = profiler.profiler.kineto_results
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        match = RANGE.match(event.name())
        if match is None:
            continue
        if match[1] == "pre_backward":
            hook = match[2] or ""
        else:
            found.append((hook, match[2] or ""))
    return found


def of_plan(plan: Plan) -> Order:
    """The root's hook comes first: before any group is waited for."""
    assert plan.fsdp2 is not None
    (backward,) = (s for s in plan.fsdp2.schedules if s.direction is Direction.BACKWARD)
    names = {info.id: info.fqn for info in plan.groups}
    root = next(name for name in names.values() if name in ("", "(root)"))
    kept = {info.id for info in plan.groups if not info.reshard_after_forward}
    found, hook = [], root
    for step in backward.steps:
        if step.kind is StepKind.GATHER_WAIT:
            hook = names[step.group]
        elif step.kind is StepKind.GATHER_ISSUE and step.group not in kept:
            found.append((hook, names[step.group]))
    return [tuple("" if name == root else name for name in pair) for pair in found]


def compared(ctx: Ctx, reshard: Reshard) -> tuple[Order, Order]:
    eager = of_eager(sharded(ctx, reshard))
    torch._dynamo.reset()
    model = sharded(ctx, reshard)
    model.compile(backend="graphshard", options={"fallback": "error"})
    model(torch.arange(8)).backward()
    (plan,) = graphshard.plans(model)
    return eager, of_plan(plan)


def test_groups_are_gathered_in_the_hooks_that_fsdp2_gathers_them_in(pool: Pool) -> None:
    @drawing(COUNT, SEED)
    @given(st.tuples(*[st.sampled_from([True, False, None])] * NUM_LAYERS))
    @example((None, None, True, False, False))
    @example((None, None, None, None, None))
    @example((None, False, None, False, True))
    def compare(reshard: Reshard) -> None:
        for eager, planned in pool.run(2, compared, reshard, timeout_s=60.0):
            assert planned == eager, reshard

    compare()
