"""`graphshard.migrate` against `fully_shard` written by hand, to the bit, and real FSDP1."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from migration import BLOCKS, LLAMA, STRICT, fresh, from_code, near, real_fsdp1, shard
from models import CASES, ConvNet, Llama, LlamaBlock, Stage, token_loss
from parity import assert_equal, count_collectives, local, train
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.migrate import FullyShardedDataParallel, code_of

pytestmark = pytest.mark.dist

# Blocks get a rotary table in float32 from a buffer, so their inputs have to be cast too.
BF16 = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True)


class Scaled(nn.Module):
    """Blocks whose second input is float32, which shows whether it was cast."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(2))
        self.register_buffer("scale", torch.linspace(0.9, 1.1, 16))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.scale)
        return x


class ScaledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + (self.linear(x).float() * scale.float()).to(x.dtype)


def scaled_step(model: nn.Module, ctx: Ctx) -> list[Tensor]:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(ctx.rank))
    loss = model(x).float().square().mean()
    loss.backward()
    grads = [local(p.grad) for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [loss.detach(), *grads]


def same(expected: list[Tensor], actual: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def losses(model: nn.Module, ctx: Ctx, steps: int = 3, case: Any = LLAMA) -> list[Tensor]:
    return train(model, case, ctx, steps).losses


# name: FSDP1's arguments, and those of fully_shard.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({"sharding_strategy": ShardingStrategy.FULL_SHARD}, {}),
    "grad_op": (
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"reshard_after_forward": False},
    ),
    "bf16": (
        {"mixed_precision": BF16},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    ),
    "no_prefetch": ({"backward_prefetch": None}, {}),
}


def as_by_hand(ctx: Ctx, name: str, steps: int) -> tuple[float, str]:
    """By hand, migrated, and from the lines that it said: the same bits, eager and compiled."""
    given, by_hand = SETTINGS[name]
    expected = train(shard(fresh(), **by_hand), LLAMA, ctx, steps)

    def migrated() -> nn.Module:
        return FullyShardedDataParallel(fresh(), auto_wrap_policy=BLOCKS, **given)

    model = migrated()
    assert_equal(expected, train(model, LLAMA, ctx, steps))
    again = from_code(code_of(model), fresh())
    assert_equal(expected, train(again, LLAMA, ctx, steps))
    model = migrated()
    model.compile(backend="graphshard", **STRICT)
    assert_equal(expected, train(model, LLAMA, ctx, steps))
    assert len(graphshard.plans(model)) > 0
    if name == "full":
        compiled = torch.compile(model := migrated(), backend="graphshard", **STRICT)
        run = partial(token_loss, compiled)
        assert_equal(expected, train(model, LLAMA, ctx, steps, run=run))

    oracle = real_fsdp1(fresh(), auto_wrap_policy=BLOCKS, **given)
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    return near(losses(oracle, ctx, steps), expected.losses, dtype), code_of(model)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_the_same_as_by_hand_and_near_fsdp1(pool: Pool, name: str) -> None:
    found = pool.run(2, as_by_hand, name, 3)
    print(name, "differs from FSDP1 by", max(worst for worst, _ in found))
    assert "\nfor block in model.blocks:\n    fully_shard(block" in found[0][1]


# -- which modules are sharded ---------------------------------------------------------------------


def only_down(module: nn.Module) -> bool | dict[str, Any]:
    if isinstance(module, LlamaBlock):
        return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
    return isinstance(module, nn.Linear) and module.in_features == 95


def is_block(module: nn.Module) -> bool:
    return isinstance(module, LlamaBlock)


POLICIES: dict[str, Any] = {
    "none": None,
    "classes": BLOCKS,
    "custom": CustomPolicy(only_down),
    "transformer": partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaBlock}),
    "lambda": partial(lambda_auto_wrap_policy, lambda_fn=is_block),
    "size": partial(size_based_auto_wrap_policy, min_num_params=4000),
    "tiny": partial(size_based_auto_wrap_policy, min_num_params=1),
}


def chosen(ctx: Ctx, make: Callable[[], nn.Module], given: dict[str, Any]) -> dict[str, Any]:
    """For each policy: names that FSDP1 wraps, that are sharded here, and that the lines shard."""
    found = {}
    for name, policy in POLICIES.items():
        theirs = real_fsdp1(fresh(0, make), auto_wrap_policy=policy, **given)
        ours = FullyShardedDataParallel(fresh(0, make), auto_wrap_policy=policy, **given)
        again = from_code(code_of(ours), fresh(0, make))
        found[name] = (
            sorted(
                n.replace("_fsdp_wrapped_module", "").replace("..", ".").strip(".")
                for n, m in theirs.named_modules()
                if isinstance(m, Fsdp1)
            ),
            sorted(n for n, m in ours.named_modules() if isinstance(m, FSDPModule)),
            sorted(n for n, m in again.named_modules() if isinstance(m, FSDPModule)),
        )
        keys = list(fresh(0, make).state_dict())
        assert keys == list(ours.state_dict())
    return found


@pytest.mark.filterwarnings("ignore")
def test_policies_choose_what_fsdp1_chooses(pool: Pool) -> None:
    for found in pool.run(2, chosen, Llama, {}):
        sizes = {}
        for name, (theirs, ours, again) in found.items():
            assert theirs == ours == again, name
            sizes[name] = len(ours)
        assert sizes["none"] == 1 < sizes["classes"] == sizes["lambda"] < sizes["custom"]
        assert sizes["size"] not in (1, sizes["tiny"])


def batch_norm_apart(ctx: Ctx) -> None:
    """FSDP1 shards batch norms apart and leaves them in float32, for every kind of policy."""
    chosen_by = {
        "objects": ModuleWrapPolicy({Stage}),
        "functions": partial(transformer_auto_wrap_policy, transformer_layer_cls={Stage}),
    }
    case = CASES["convnet"]
    for policy in chosen_by.values():
        theirs = real_fsdp1(fresh(0, ConvNet), auto_wrap_policy=policy, mixed_precision=BF16)
        expected = losses(theirs, ctx, 3, case)
        ours = FullyShardedDataParallel(
            fresh(0, ConvNet), auto_wrap_policy=policy, mixed_precision=BF16
        )
        assert isinstance(ours.stem[1], FSDPModule)
        near(expected, losses(ours, ctx, 3, case), torch.bfloat16)
        again = from_code(code_of(ours), fresh(0, ConvNet))
        again.load_state_dict(get_model_state_dict(again))
        assert isinstance(again.stages[0].norm1, FSDPModule)


def test_batch_norms_stay_out_of_mixed_precision(pool: Pool) -> None:
    pool.run(2, batch_norm_apart)


def casts(ctx: Ctx) -> None:
    """The root's inputs are cast, those of blocks are not; calls one by one are like a policy."""
    low = MixedPrecision(param_dtype=torch.bfloat16)
    policy = MixedPrecisionPolicy(torch.bfloat16)
    as_fsdp1 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False)}
    expected = scaled_step(shard(fresh(0, Scaled), inner=as_fsdp1, mp_policy=policy), ctx)
    assert not same(expected, scaled_step(shard(fresh(0, Scaled), mp_policy=policy), ctx))

    wraps = ModuleWrapPolicy({ScaledBlock})
    at_once = FullyShardedDataParallel(
        fresh(0, Scaled), auto_wrap_policy=wraps, mixed_precision=low
    )
    assert same(expected, scaled_step(at_once, ctx))
    assert same(expected, scaled_step(from_code(code_of(at_once), fresh(0, Scaled)), ctx))
    single = fresh(0, Scaled)
    for i, block in enumerate(single.blocks):
        single.blocks[i] = FullyShardedDataParallel(block, mixed_precision=low)
    single = FullyShardedDataParallel(single, mixed_precision=low)
    assert "blocks.0: cast_forward_inputs=False from now on" in code_of(single)
    assert same(expected, scaled_step(single, ctx))
    theirs = real_fsdp1(fresh(0, Scaled), auto_wrap_policy=wraps, mixed_precision=low)
    near(scaled_step(theirs, ctx)[:1], expected[:1], torch.bfloat16)


def test_inputs_are_cast_as_by_fsdp1(pool: Pool) -> None:
    pool.run(2, casts)


def buffers_cast(ctx: Ctx) -> None:
    """With the rotary table in bfloat16, blocks need no cast of their inputs."""
    low = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    model = FullyShardedDataParallel(fresh(), auto_wrap_policy=BLOCKS, mixed_precision=low)
    assert (model.cos.dtype, model.sin.dtype) == (torch.bfloat16,) * 2
    again = from_code(code_of(model), fresh())
    assert again.cos.dtype is torch.bfloat16
    trace = train(model, LLAMA, ctx, 2)
    assert_equal(train(again, LLAMA, ctx, 2), trace)
    theirs = real_fsdp1(fresh(), auto_wrap_policy=BLOCKS, mixed_precision=low)
    near(losses(theirs, ctx, 2), trace.losses, torch.bfloat16)


def test_buffers_are_cast(pool: Pool) -> None:
    pool.run(2, buffers_cast)


def ignored(ctx: Ctx) -> None:
    for as_modules in (True, False):
        model = fresh()
        first = model.blocks[0]
        given = (
            {"ignored_modules": [first]}
            if as_modules
            else {"ignored_states": list(first.parameters())}
        )
        model = FullyShardedDataParallel(model, auto_wrap_policy=BLOCKS, **given)
        assert not any(isinstance(p, DTensor) for p in model.blocks[0].parameters())
        assert all(isinstance(p, DTensor) for p in model.blocks[1].parameters())
        assert isinstance(model.blocks[0], FSDPModule) == (not as_modules)
        again = from_code(code_of(model), fresh())
        assert_equal(train(again, LLAMA, ctx, 2), train(model, LLAMA, ctx, 2))


def test_ignored_modules_and_parameters_stay_whole(pool: Pool) -> None:
    pool.run(2, ignored)


def offloaded(ctx: Ctx) -> None:
    model = FullyShardedDataParallel(
        fresh(), auto_wrap_policy=BLOCKS, cpu_offload=CPUOffload(offload_params=True)
    )
    assert "offload_policy=CPUOffloadPolicy(pin_memory=False)" in code_of(model)
    expected = train(shard(fresh()), LLAMA, ctx, 2)
    assert_equal(expected, train(model, LLAMA, ctx, 2))


def test_cpu_offload(pool: Pool) -> None:
    pool.run(2, offloaded)


def one_gather_at_a_time(ctx: Ctx) -> list[str]:
    """Collectives of a backward: nothing is gathered before it is needed."""
    found = []
    for prefetch in (BackwardPrefetch.BACKWARD_PRE, None):
        model = FullyShardedDataParallel(
            fresh(), auto_wrap_policy=BLOCKS, backward_prefetch=prefetch
        )
        for _ in range(2):
            loss = token_loss(model, LLAMA.batch(0, ctx.rank, ctx.device))
            with count_collectives() as counts:
                loss.backward()
        found.append(" ".join("g" if kind == "all_gather" else "r" for kind in counts.order))
    return found


def test_no_backward_prefetch(pool: Pool) -> None:
    for early, late in pool.run(2, one_gather_at_a_time):
        assert early == "g g r g r g r r r"  # one gather ahead; the root last
        assert late == "g r g r g r g r r"
