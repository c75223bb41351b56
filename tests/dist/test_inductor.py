"""Compiled compute: within tolerance of eager FSDP2, few regions, each compiled once."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from models import CASES, GPT, LENGTH, Llama, shard_blocks
from parity import assert_equal, build, parity_case, train
from patching import compiled_in_place
from pool import Ctx, Pool
from semantic_cases import STEPS, both
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.cost.comm import CollectiveKind, RankGroup
from graphshard.cost.curve import Fit, line
from graphshard.cost.profile import CommFit, CostProfile, Origin
from graphshard.schedule.plan import Plan, StepKind


@pytest.fixture(scope="module")
def inductor() -> Iterator[Pool]:
    with Pool("inductor") as workers:
        yield workers


@pytest.mark.parametrize("name", list(CASES))
def test_models_follow_eager_fsdp2(inductor: Pool, name: str) -> None:
    inductor.run(2, parity_case, name, "in place", 5, {}, timeout_s=300)


def sends_in_place(ctx: Ctx) -> None:
    """Collectives go from and to where tensors are."""
    with compiled_in_place():
        parity_case(ctx, "llama", "in place", 5, {})


@pytest.mark.parametrize("ranks", [2, 4])
def test_nothing_is_packed(inductor: Pool, ranks: int) -> None:
    inductor.run(ranks, sends_in_place, timeout_s=300)


def slow_link(ranks: int) -> CostProfile:
    """A network that takes somewhat longer than compute, and next to nothing for a launch."""
    fit = Fit(line(1.0, 55.0 * ranks), ())
    kinds = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    comm = tuple(CommFit(kind, RankGroup(ranks, ranks, "world"), fit) for kind in kinds)
    origin = Origin("cpu", "host", 1, 1, ranks, "gloo", "2.13.0", "", "")
    return CostProfile(origin, comm, (), (), Fit(line(1.0, 1e4), ()))


def budgeted(ctx: Ctx, shares: list[float]) -> list[Plan]:
    """Plans under budgets in shares of FSDP2's peak, each trained with."""
    case, found, own_bytes = CASES["llama"], [], 2**40
    expected = train(build(case, ctx), case, ctx, 3)
    with TemporaryDirectory() as folder:
        machine = Path(folder, "slow.json")
        machine.write_text(slow_link(ctx.world_size).to_json())
        for share in (1.0, *shares):
            model = build(case, ctx)
            options = {"memory_budget": int(own_bytes * share), "machine": str(machine)}
            model.compile(
                backend="graphshard", fullgraph=True, options={"fallback": "error", **options}
            )
            assert_equal(expected, train(model, case, ctx, 3))
            (plan,) = graphshard.plans(model)
            own_bytes = plan.estimate.fsdp2.peak_bytes
            found.append(plan)
    return found


@pytest.mark.parametrize(("ranks", "shares"), [(2, [0.85, 0.75]), (4, [0.75])])
def test_parts_of_the_last_blocks_travel_alone_and_blocks_are_computed_again(
    inductor: Pool, ranks: int, shares: list[float]
) -> None:
    plans = inductor.run(ranks, budgeted, shares, timeout_s=300)
    assert all(own == plans[0] for own in plans)
    free, *tight = plans[0]
    assert not free.recompute.activations
    assert all(plan.recompute.activations for plan in tight)
    parts = [s for d in free.schedules for s in d.steps if s.params]
    seen = {(s.kind, free.groups[s.groups[0]].fqn) for s in parts}
    last = "blocks.3"
    assert {(StepKind.GATHER_ISSUE, last), (StepKind.REDUCE_ISSUE, last)} <= seen


def replacing(ctx: Ctx) -> tuple[Plan, str]:
    """A model with checkpoints, which the plan may replace within FSDP2's own peak."""
    case = CASES["gpt_tied_ac"]
    expected = train(build(case, ctx), case, ctx, 3)
    model = build(case, ctx)
    options = {"fallback": "error", "recompute": "auto"}
    model.compile(backend="graphshard", fullgraph=True, options=options)
    assert_equal(expected, train(model, case, ctx, 3))
    (plan,) = graphshard.plans(model)
    return plan, str(graphshard.explain(model))


def test_checkpoints_may_be_replaced(inductor: Pool) -> None:
    """Whether they are is a matter of what this machine was measured at."""
    (plan, text), (other, _) = inductor.run(2, replacing, timeout_s=200)
    assert plan == other
    assert plan.recompute.checkpoints == 3
    said = "replaced by the plan" if plan.recompute.replaced else "as the model has them"
    assert f"3 checkpointed regions {said}" in text


def regions(ctx: Ctx, depth: int) -> dict[str, tuple[int, int]]:
    torch.manual_seed(0)
    model = shard_blocks(("blocks",), Llama(depth), ctx.mesh)
    options = {"fallback": "error", "schedule": "fsdp2"}
    model.compile(backend="graphshard", fullgraph=True, options=options)
    model(torch.zeros(2, LENGTH, dtype=torch.int64)).sum().backward()
    return graphshard.explain(model).regions


def test_distinct_regions_do_not_grow_with_depth(inductor: Pool) -> None:
    few, many = (
        list(inductor.run(2, regions, depth, timeout_s=300)[0].values()) for depth in (5, 9)
    )
    assert len(few) == len(many) == 1
    assert many[0][0] >= few[0][0] + 8  # a region for each block, forward and backward
    assert few[0][1] == many[0][1] <= 20


@pytest.mark.parametrize("name", STEPS)
def test_semantics_are_those_of_fsdp2(inductor: Pool, name: str) -> None:
    inductor.run(2, both, STEPS[name], timeout_s=300)


class Drops(nn.Module):
    """Blocks of which each returns what it dropped; `checkpointed` computes the first one again."""

    def __init__(self, depth: int, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)) for _ in range(depth)
        )
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for number, block in enumerate(self.blocks):
            if self.checkpointed and number == 0:
                found.append(checkpoint(block, x, use_reentrant=False))
            else:
                found.append(block(x))
        return found


def dropped(ctx: Ctx, checkpointed: bool) -> list[list[list[bool]]]:
    """Masks of 2 steps; the gradients of the biases are those of the masks."""
    torch.manual_seed(ctx.rank)
    model = shard_blocks(("blocks",), Drops(2, checkpointed=checkpointed), ctx.mesh)
    options = {"fallback": "error", "fallback_random": False}
    model.compile(backend="graphshard", fullgraph=True, options=options)
    steps = []
    for _ in range(2):
        outputs = model(torch.randn(8, 32))
        sum(y.sum() for y in outputs).backward()
        for block, y in zip(model.blocks, outputs, strict=True):
            count = 2.0 * (y != 0).sum(0)  # kept ones were doubled
            dist.all_reduce(count)
            assert torch.equal(block[0].bias.grad.full_tensor(), count / ctx.world_size)
        model.zero_grad()
        steps.append([(y != 0).flatten().tolist() for y in outputs])
    return steps


@pytest.mark.parametrize("checkpointed", [False, True])
def test_backward_has_the_masks_of_forward(inductor: Pool, checkpointed: bool) -> None:
    """With Inductor's own random numbers, as users have them."""
    ranks = inductor.run(2, dropped, checkpointed)
    masks = [mask for steps in ranks for step in steps for mask in step]
    assert len({tuple(mask) for mask in masks}) == len(masks) == 8
    assert all(60 < sum(mask) < 196 for mask in masks)


def drop_regions(ctx: Ctx, depth: int) -> tuple[int, int]:
    model = shard_blocks(("blocks",), GPT(depth=depth), ctx.mesh)
    options = {"fallback": "error", "schedule": "fsdp2", "fallback_random": False}
    model.compile(backend="graphshard", fullgraph=True, options=options)
    model(torch.zeros(2, LENGTH, dtype=torch.int64)).sum().backward()
    (found,) = graphshard.explain(model).regions.values()
    return found


def test_distinct_regions_do_not_grow_with_depth_where_blocks_drop(inductor: Pool) -> None:
    few, many = (inductor.run(2, drop_regions, depth, timeout_s=300)[0] for depth in (5, 8))
    assert many[0] > few[0]
    assert few[1] == many[1]


def as_plain(ctx: Ctx) -> None:
    """The loss of a model that drops is plain Inductor's, for one seed."""
    losses = []
    for backend in ("inductor", "graphshard"):
        torch.manual_seed(0)
        model: nn.Module = GPT(depth=2)
        if backend == "graphshard":
            model = shard_blocks(("blocks",), model, ctx.mesh)
        model.compile(backend=backend, options={"fallback_random": False})
        torch.manual_seed(ctx.rank)
        losses.append(
            CASES["gpt_tied"].loss(model, CASES["gpt_tied"].batch(0, ctx.rank, ctx.device))
        )
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


def test_random_numbers_are_plain_inductors(inductor: Pool) -> None:
    inductor.run(2, as_plain, timeout_s=300)
