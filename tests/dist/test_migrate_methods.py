"""FSDP1's methods, its ways to start from nothing, and its meshes, on modules sharded by FSDP2."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from migration import BLOCKS, LLAMA, STRICT, fresh, from_code, near, real_fsdp1, shard
from models import token_loss
from parity import assert_equal, count_collectives, difference, grads, local, train
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import MigrateError
from graphshard.migrate import FullyShardedDataParallel as FSDP
from graphshard.migrate import code_of

pytestmark = pytest.mark.dist

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


def migrated(compiled: bool = False, seed: int = 0, **kwargs: Any) -> Any:
    model = FSDP(fresh(seed), auto_wrap_policy=BLOCKS, **kwargs)
    if compiled:  # collectives are counted
        model.compile(backend="graphshard", options={"fallback": "error", "schedule": "fsdp2"})
    return model


def backward(model: nn.Module, ctx: Ctx, step: int) -> None:
    token_loss(model, LLAMA.batch(step, ctx.rank, ctx.device)).backward()


def assert_same(expected: dict[str, Any], actual: dict[str, Any]) -> None:
    assert list(expected) == list(actual)
    for name, value in expected.items():
        assert (problem := difference(value, actual[name])) is None, f"{name}: {problem}"


# -- no_sync ---------------------------------------------------------------------------------------


def accumulate(ctx: Ctx, compiled: bool, strategy: ShardingStrategy) -> tuple[int, int, int]:
    """Two micro-steps: the same as by hand. Collectives of the first: reductions, all; gathers of
    the second."""
    by_hand = shard(
        fresh(),
        reshard_after_forward=False if strategy is ShardingStrategy.SHARD_GRAD_OP else None,
    )
    by_hand.set_requires_gradient_sync(False)
    backward(by_hand, ctx, 0)
    by_hand.set_requires_gradient_sync(True)
    backward(by_hand, ctx, 1)

    model = migrated(compiled, sharding_strategy=strategy)
    for _ in range(2):  # the second finds everything compiled
        model.zero_grad()
        with model.no_sync(), count_collectives() as first:
            with model.no_sync():
                pass  # ends nothing
            backward(model, ctx, 0)
        with count_collectives() as second:
            backward(model, ctx, 1)
        assert_same(grads(by_hand), grads(model))
    with pytest.raises(ZeroDivisionError), model.no_sync():
        raise ZeroDivisionError
    model.zero_grad()
    backward(model, ctx, 0)
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    return first.reduce_scatter, second.reduce_scatter, second.all_gather


@pytest.mark.parametrize("compiled", [False, True])
def test_no_sync(pool: Pool, compiled: bool) -> None:
    groups = 5
    for found in pool.run(2, accumulate, compiled, ShardingStrategy.FULL_SHARD):
        assert found[:2] == (0, groups)
        assert found[2] > groups
    for found in pool.run(2, accumulate, compiled, ShardingStrategy.SHARD_GRAD_OP):
        assert found == (0, groups, 0)  # what no_sync gathered is still there


# -- clip_grad_norm_ -------------------------------------------------------------------------------


def clip(ctx: Ctx, norm_type: float) -> float:
    model, by_hand = migrated(), shard(fresh())
    for one in (model, by_hand):
        backward(one, ctx, 0)
    expected = torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5, norm_type)
    norm = model.clip_grad_norm_(0.5, norm_type)
    assert type(norm) is Tensor
    assert torch.equal(norm, expected.full_tensor())
    assert_same(grads(by_hand), grads(model))

    theirs = real_fsdp1(fresh(), auto_wrap_policy=BLOCKS)
    backward(theirs, ctx, 0)
    near([theirs.clip_grad_norm_(0.5, norm_type)], [norm])
    return float(norm)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clip_grad_norm(pool: Pool, norm_type: float) -> None:
    first, second = pool.run(2, clip, norm_type)
    assert first == second


def clip_with_ignored(ctx: Ctx) -> None:
    """Whole gradients beside sharded ones, which torch's function alone refuses."""
    model = fresh()
    model = FSDP(model, auto_wrap_policy=BLOCKS, ignored_states=[model.norm.weight])
    model(torch.zeros(2, 8, dtype=torch.int64)).square().mean().backward()  # equal on all ranks
    whole = [g.full_tensor() if isinstance(g := p.grad, DTensor) else g for p in model.parameters()]
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in whole]))
    norm = model.clip_grad_norm_(1e-3)
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(model.clip_grad_norm_(1.0), torch.tensor(1e-3), rtol=1e-3, atol=0)


def test_clip_grad_norm_with_ignored_parameters(pool: Pool) -> None:
    pool.run(2, clip_with_ignored)


# -- summon_full_params ----------------------------------------------------------------------------


def summon(ctx: Ctx, compiled: bool) -> None:
    model, reference = migrated(compiled), fresh()
    before = {name: local(p) for name, p in model.named_parameters()}
    backward(model, ctx, 0)
    shards = dict(model.named_parameters())
    with FSDP.summon_full_params(model, with_grads=True):
        assert_same(dict(reference.named_parameters()), dict(model.named_parameters()))
        assert all(p.grad.shape == p.shape for p in model.parameters())
        with torch.no_grad():
            model.head.weight.mul_(2)
            model.blocks[0].down.weight.grad.zero_()
    assert all(p is shards[name] for name, p in model.named_parameters())
    assert torch.equal(local(model.head.weight), 2 * before["head.weight"])
    assert torch.equal(local(model.embed.weight), before["embed.weight"])
    assert not model.blocks[0].down.weight.grad.to_local().any()

    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        whole = type(model.embed.weight) is nn.Parameter and not isinstance(
            model.embed.weight.data, DTensor
        )
        assert whole == (ctx.rank == 0)
        if whole:
            model.embed.weight.data.zero_()
    assert torch.equal(local(model.embed.weight), before["embed.weight"])
    with FSDP.summon_full_params(model, recurse=False, writeback=False):
        assert isinstance(model.blocks[0].up.weight.data, DTensor)
        assert not isinstance(model.head.weight.data, DTensor)

    refused = pytest.raises(MigrateError, match=r"GS1008: .*Llama was called inside")
    with FSDP.summon_full_params(model), refused:
        model(torch.zeros(1, 4, dtype=torch.int64))

    reference.head.weight.data.mul_(2)  # what was written is what runs
    expected = train(shard(reference), LLAMA, ctx, 2)
    model.zero_grad()
    assert_equal(expected, train(model, LLAMA, ctx, 2))


@pytest.mark.parametrize("compiled", [False, True])
def test_summon_full_params(pool: Pool, compiled: bool) -> None:
    pool.run(2, summon, compiled)


# -- state dicts -----------------------------------------------------------------------------------


def state_dicts(ctx: Ctx) -> None:
    reference = fresh().state_dict()
    model = migrated()
    assert_same(reference, model.state_dict())  # whole, as with FSDP1
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(True, True)):
        assert list(model.state_dict()) == (list(reference) if ctx.rank == 0 else [])
        with pytest.raises(MigrateError, match=r"GS1003: .*LOCAL_STATE_DICT"):
            FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    before = FSDP.set_state_dict_type(model, SHARDED)
    assert before.state_dict_type is FULL
    assert FSDP.get_state_dict_type(model).state_dict_type is SHARDED
    shards = model.state_dict()
    assert all(isinstance(value, DTensor) for value in shards.values())

    other = migrated(seed=1)
    theirs = real_fsdp1(fresh(), auto_wrap_policy=BLOCKS).state_dict()
    for given in (reference, shards, theirs):  # all are loaded
        other.load_state_dict(fresh(2).state_dict())
        assert not torch.equal(local(other.head.weight), local(model.head.weight))
        other.load_state_dict(given)
        assert_same(reference, other.state_dict())

    # PyTorch's own functions, under either type.
    options = StateDictOptions(full_state_dict=True)
    for kind in (FULL, SHARDED):
        FSDP.set_state_dict_type(other, kind)
        assert_same(reference, get_model_state_dict(model, options=options))
        other.load_state_dict(fresh(2).state_dict())
        set_model_state_dict(other, dict(reference), options=options)
        with FSDP.state_dict_type(other, FULL):
            assert_same(reference, other.state_dict())
    assert all(isinstance(v, DTensor) for v in get_model_state_dict(model).values())


def test_state_dicts(pool: Pool) -> None:
    pool.run(2, state_dicts)


def nested_types(ctx: Ctx) -> None:
    """The type set for the model holds for modules that were given one by one."""
    model = fresh()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = FSDP(block)
    model = FSDP(model)
    with FSDP.state_dict_type(model, SHARDED):
        assert all(isinstance(v, DTensor) for v in model.state_dict().values())
        assert all(isinstance(v, DTensor) for v in model.blocks[1].state_dict().values())
    assert_same(fresh().state_dict(), model.state_dict())
    compiled = torch.compile(model, backend="graphshard")
    assert list(compiled.state_dict()) == [f"_orig_mod.{n}" for n in fresh().state_dict()]
    assert not any(isinstance(v, DTensor) for v in compiled.state_dict().values())
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert len(FSDP.fsdp_modules(model)) == 5
    assert isinstance(model, FSDP)
    assert not isinstance(model.norm, FSDP)
    assert model.module is model


def test_types_of_nested_modules(pool: Pool) -> None:
    pool.run(2, nested_types)


def optimizer_states(ctx: Ctx) -> None:
    """Saved in one run and loaded in another, which goes on with the same bits."""
    model = migrated()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        backward(model, ctx, number)
        optimizer.step()
        optimizer.zero_grad()

    backward(model, ctx, 0)
    moments = {n: 0.1 * p.grad.full_tensor() for n, p in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    theirs = real_fsdp1(fresh(), auto_wrap_policy=BLOCKS)
    other = torch.optim.AdamW(theirs.parameters(), 1e-2)
    step(theirs, other, 0)
    expected = Fsdp1.optim_state_dict(theirs, other)
    for rank0_only in (False, True):
        with FSDP.state_dict_type(model, FULL, None, FullOptimStateDictConfig(True, rank0_only)):
            saved = FSDP.optim_state_dict(model, optimizer)
            assert bool(saved) == (ctx.rank == 0 or not rank0_only)
            if saved:  # FSDP1's format
                assert sorted(saved["state"]) == sorted(expected["state"])
                for name, state in expected["state"].items():
                    shapes = {key: value.shape for key, value in state.items()}
                    assert {k: v.shape for k, v in saved["state"][name].items()} == shapes
                    torch.testing.assert_close(saved["state"][name]["exp_avg"], moments[name])
            weights = model.state_dict()
            resumed = migrated(seed=5)
            resumed.load_state_dict(weights)
            again = torch.optim.AdamW(resumed.parameters(), 1e-2)
            FSDP.set_state_dict_type(
                resumed, FULL, None, FullOptimStateDictConfig(True, rank0_only)
            )
            again.load_state_dict(FSDP.optim_state_dict_to_load(resumed, again, saved))
        twin = shard(fresh())
        steps = torch.optim.AdamW(twin.parameters(), 1e-2)
        for number in range(2):
            step(twin, steps, number)
        step(resumed, again, 1)
        assert_same(
            {n: local(p) for n, p in twin.named_parameters()},
            {n: local(p) for n, p in resumed.named_parameters()},
        )
    FSDP.set_state_dict_type(model, SHARDED)
    saved = FSDP.optim_state_dict(model, optimizer)
    assert all(isinstance(m["exp_avg"], DTensor) for m in saved["state"].values())


def test_optimizer_state_dicts(pool: Pool) -> None:
    pool.run(2, optimizer_states)


# -- from nothing ----------------------------------------------------------------------------------


class Table(nn.Module):
    """Tensors that only its own reset_parameters knows how to fill."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(7, 16))
        self.register_buffer("shift", torch.empty(16))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.table)
        nn.init.uniform_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table.T @ self.table + self.shift


def stack() -> nn.Module:
    return nn.Sequential(Table(), nn.Linear(16, 16), nn.Sequential(Table(), nn.Linear(16, 5)))


def wrapped(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or isinstance(module, Table)


def fill(module: nn.Module) -> None:
    """Its own tensors only."""
    module.to_empty(device=torch.device("cpu"), recurse=False)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        nn.init.normal_(tensor)


def from_meta(ctx: Ctx, init: Any, sync: bool) -> None:
    """The same weights as FSDP1 has from the same seed. sync: only rank 0 here has that seed.

    FSDP1 does not broadcast on CPUs, so there all its ranks have it.
    """

    def made(kind: Any, seed: int, **kwargs: Any) -> nn.Module:
        torch.manual_seed(seed)
        with torch.device("meta"):
            model = stack()
        return kind(
            model,
            auto_wrap_policy=wrapped,
            param_init_fn=init,
            device_id=torch.device("cpu"),
            **kwargs,
        )

    theirs = made(Fsdp1, 3, use_orig_params=True)
    ours = made(FSDP, 3 + ctx.rank if sync else 3, sync_module_states=sync)
    with Fsdp1.summon_full_params(theirs):
        expected = {
            name.replace("_fsdp_wrapped_module.", ""): value.detach().clone()
            for name, value in (*theirs.named_parameters(), *theirs.named_buffers())
        }
    actual = dict(ours.state_dict())
    assert_same({name: expected[name] for name in actual}, actual)
    assert len(expected) == len(actual)
    assert "# meta device: filled before sharding" in code_of(ours)
    assert ("# sync_module_states: " in code_of(ours)) == sync
    ours(torch.ones(2, 16)).sum().backward()


@pytest.mark.filterwarnings("ignore")
def test_meta_device_and_broadcast(pool: Pool) -> None:
    pool.run(2, from_meta, None, False)
    pool.run(2, from_meta, fill, True)


# -- meshes ----------------------------------------------------------------------------------------


def hybrid(ctx: Ctx, strategy: ShardingStrategy) -> float:
    """Two nodes of two ranks: given as a mesh, as two process groups, or found."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    reshard = None if strategy is ShardingStrategy.HYBRID_SHARD else False
    expected = train(shard(fresh(), mesh, reshard_after_forward=reshard), LLAMA, ctx, 2)
    pair = (mesh.get_group("shard"), mesh.get_group("replicate"))
    for given in ({"device_mesh": mesh}, {"process_group": pair}, {}):
        model = migrated(sharding_strategy=strategy, **given)
        if not given and strategy is ShardingStrategy.HYBRID_SHARD:
            model.compile(backend="graphshard", **STRICT)
        assert_equal(expected, train(model, LLAMA, ctx, 2))
        assert model.embed.weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
        names = {"device_mesh": mesh, "shard_group": pair[0], "replicate_group": pair[1]}
        again = from_code(code_of(model), fresh(), **names)
        assert again.embed.weight.placements == model.embed.weight.placements
        assert again.embed.weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    theirs = real_fsdp1(
        fresh(), auto_wrap_policy=BLOCKS, sharding_strategy=strategy, device_mesh=mesh
    )
    return near(train(theirs, LLAMA, ctx, 2).losses, expected.losses)


def test_hybrid_strategies(pool: Pool) -> None:
    print("HYBRID_SHARD", max(pool.run(4, hybrid, ShardingStrategy.HYBRID_SHARD)))
    print("ZERO2", max(pool.run(4, hybrid, ShardingStrategy._HYBRID_SHARD_ZERO2)))


def part_of_the_world(ctx: Ctx) -> None:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = groups[ctx.rank % 2]
    model = migrated(process_group=own)
    mesh = model.embed.weight.device_mesh
    assert mesh.mesh.tolist() == [ctx.rank % 2, ctx.rank % 2 + 2]
    again = from_code(code_of(model), fresh(), process_group=own)
    assert_equal(train(again, LLAMA, ctx, 2), train(model, LLAMA, ctx, 2))
    # Sources of a broadcast are ranks in the group.
    model = migrated(process_group=own, sync_module_states=True, seed=ctx.rank)
    assert_same(fresh(ctx.rank % 2).state_dict(), model.state_dict())
    # Ignored parameters are each rank's own.
    model = fresh(ctx.rank)
    given = {"ignored_states": [model.norm.weight], "sync_module_states": True}
    model.norm.weight.data.fill_(ctx.rank)
    model = FSDP(model, auto_wrap_policy=BLOCKS, **given)
    assert torch.equal(model.norm.weight, torch.full_like(model.norm.weight, ctx.rank))
    assert torch.equal(model.head.weight.full_tensor(), fresh(0).head.weight)


def test_a_group_of_some_ranks(pool: Pool) -> None:
    pool.run(4, part_of_the_world)


@pytest.mark.filterwarnings("ignore")
def no_shard(ctx: Ctx) -> float:
    model = migrated(sharding_strategy=ShardingStrategy.NO_SHARD)
    assert model.head.weight.to_local().shape == model.head.weight.shape
    model.compile(backend="graphshard", **STRICT)
    actual = train(model, LLAMA, ctx, 3)
    again = from_code(code_of(model), fresh())
    assert_equal(train(again, LLAMA, ctx, 3), actual)
    ddp = nn.parallel.DistributedDataParallel(fresh())
    return near(train(ddp, LLAMA, ctx, 3).losses, actual.losses)


def test_no_shard_is_ddp(pool: Pool) -> None:
    print("NO_SHARD", max(pool.run(2, no_shard)))


# -- graphshard.fully_shard ------------------------------------------------------------------------


def own_fully_shard(ctx: Ctx) -> None:
    model = fresh()
    for block in model.blocks:
        assert graphshard.fully_shard(block, reshard_after_forward=False) is block
    grouped = [model.norm, model.head]
    assert graphshard.fully_shard(grouped) == grouped
    graphshard.fully_shard(model, mesh=ctx.mesh)
    assert isinstance(model, FSDPModule)
    state = graphshard.fully_shard.state(model)
    assert state is not None
    assert state is fully_shard.state(model)
    assert graphshard.fully_shard.state(nn.Linear(1, 1)) is None
    by_hand = fresh()
    for block in by_hand.blocks:
        fully_shard(block, reshard_after_forward=False)
    fully_shard([by_hand.norm, by_hand.head])
    fully_shard(by_hand)
    assert_equal(train(by_hand, LLAMA, ctx, 2), train(model, LLAMA, ctx, 2))


def test_graphshards_fully_shard_is_that_of_torch(pool: Pool) -> None:
    pool.run(2, own_fully_shard)
