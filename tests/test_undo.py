"""`fully_shard` taken back: the model is as it was, and the facts shard it again as it had been."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mesh_models import two_meshes
from offline_models import Block, Net, tokens
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from graphshard.fsdp2.describe import name_of
from graphshard.fsdp2.undo import Sharding, obstacle, sharding_of, undo
from graphshard.fsdp2.versions import TORCH
from graphshard.offline.world import Made, World, built, faked, groups_of, pretended, world_of
from graphshard.schedule.setting import Obstacle

RANKS, PER_NODE = 16, 4
MODULES = ("embedding", "blocks.0", "blocks.0.up", "blocks.1", "blocks.1.down", "head")
POLICIES = (
    MixedPrecisionPolicy(),
    MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
)


@dataclass(frozen=True)
class Wrapping:
    """One call of `fully_shard` on one module or on several."""

    modules: tuple[str, ...]
    reshard: bool | int | None
    policy: MixedPrecisionPolicy
    offload: bool
    over_columns: bool


@st.composite
def wrappings(draw):
    """Calls on modules of a net, children before parents, and the mesh of them all."""
    chosen = draw(st.lists(st.sampled_from(MODULES), unique=True))
    calls = [(name,) for name in sorted(chosen, key=lambda name: -name.count("."))]
    if {"embedding", "head"} <= set(chosen) and draw(st.booleans()):
        calls = [*(c for c in calls if c not in (("embedding",), ("head",))), ("embedding", "head")]
    calls.append(("",))
    made = [
        Wrapping(
            modules,
            draw(st.sampled_from([None, True, False, 2])),
            draw(st.sampled_from(POLICIES)),
            draw(st.booleans()),
            draw(st.booleans()),
        )
        for modules in calls
    ]
    return made, draw(st.sampled_from([(RANKS,), (4, 4), (1, RANKS)]))


def net() -> nn.Module:
    return Net(nn.ModuleList([Block(16), Block(16)]), 16)


def wrap(model: nn.Module, wrapping: Wrapping, mesh) -> None:
    found = [model.get_submodule(name) for name in wrapping.modules]
    fully_shard(
        found[0] if len(found) == 1 else found,
        mesh=mesh,
        reshard_after_forward=wrapping.reshard,
        mp_policy=wrapping.policy,
        offload_policy=CPUOffloadPolicy(pin_memory=False) if wrapping.offload else OffloadPolicy(),
        shard_placement_fn=columns if wrapping.over_columns else None,
    )


def columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 2 and param.shape[1] % RANKS == 0 else None


def again(model: nn.Module, sharding: Sharding) -> None:
    """As the facts say."""
    dims = {model.get_parameter(name): dim for name, dim in sharding.dims}
    for call in sharding.calls:
        found = [model.get_submodule(name) for name in call.modules]
        fully_shard(
            found[0] if len(found) == 1 else found,
            mesh=call.mesh,
            reshard_after_forward=call.reshard_after_forward,
            mp_policy=call.mixed_precision,
            offload_policy=call.offload,
            shard_placement_fn=lambda param: Shard(dims.get(param, 0)),
            ignored_params={model.get_parameter(name) for name in sharding.whole} or None,
        )


def looked_at(model: nn.Module) -> dict[str, World]:
    fake = faked(lambda: Made(model, (tokens(),), {}))
    names = [name_of(group) for group in groups_of(fake)]
    world = world_of(fake, names, PER_NODE)
    pairs = zip(world.infos, world.settings, strict=True)
    return {name: pair for name, pair in zip(names, pairs, strict=True)}


def facts_of(model: nn.Module) -> list[tuple[object, ...]]:
    """All that a model is, tensors by what they are."""
    tensors = [
        (name, type(t), tuple(t.shape), t.dtype, t.requires_grad)
        for name, t in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    ]
    modules = [
        (
            name,
            type(module),
            tuple(sorted(vars(module))),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            len(module._state_dict_hooks),
        )
        for name, module in model.named_modules()
    ]
    return [*tensors, *modules]


@settings(max_examples=40, deadline=None)
@given(wrappings())
def test_undone_and_done_again_is_the_same(drawn) -> None:
    calls, shape = drawn
    with pretended(RANKS):
        with torch.device("meta"):
            bare = facts_of(net())
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns")[: len(shape)])
            once, twice = net(), net()
            for model in (once, twice):
                for wrapping in calls:
                    wrap(model, wrapping, mesh)
            assert obstacle(twice) is None
            found = undo(twice)
            assert facts_of(twice) == bare
            assert undo(twice) == Sharding()
            again(twice, found)
        assert sharding_of(twice) == found
        assert looked_at(twice) == looked_at(once)


def test_what_calls_were_given() -> None:
    with pretended(RANKS), torch.device("meta"):
        model = net()
        kept = model.blocks[0].up.bias
        fully_shard(model.blocks[0], reshard_after_forward=4, ignored_params={kept})
        fully_shard(model.blocks[1], reshard_after_forward=False, mp_policy=POLICIES[1])
        fully_shard(model, ignored_params={kept})
        found = undo(model)
    second, first, root = found.calls
    assert (first.modules, second.modules, root.modules) == (("blocks.0",), ("blocks.1",), ("",))
    assert [c.reshard_after_forward for c in (first, second, root)] == [4, False, None]
    assert second.mixed_precision == POLICIES[1]
    assert root.params == ("embedding.weight", "head.weight", "head.bias")
    assert found.whole == ("blocks.0.up.bias",)
    assert model.blocks[0].up.bias is kept


def test_tied_parameters_stay_tied() -> None:
    with pretended(RANKS), torch.device("meta"):
        model = net()
        model.head.weight = model.embedding.weight
        fully_shard([model.embedding, model.head])
        fully_shard(model)
        undo(model)
    assert model.head.weight is model.embedding.weight
    assert tuple(model.head.weight.shape) == (32, 16)


def test_tensor_parallel_stays() -> None:
    with pretended(RANKS), torch.device("meta"):
        mesh = init_device_mesh("cpu", (4, 4), mesh_dim_names=("dp", "tp"))
        model = net()
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
        before = {name: param for name, param in model.named_parameters()}
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        found = undo(model)
    assert found.has_dtensors
    for name, param in model.named_parameters():
        assert type(param.data) is type(before[name].data), name
        assert param.shape == before[name].shape
        if isinstance(param.data, DTensor):
            assert param.placements == before[name].placements
            assert param.device_mesh == before[name].device_mesh
            assert param.to_local().shape == before[name].to_local().shape


def test_a_registered_method_is_an_obstacle() -> None:
    with pretended(RANKS), torch.device("meta"):
        model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
        fully_shard(model[0])
        assert obstacle(model) is None
        register_fsdp_forward_method(model[0], "merge_masks")
        assert obstacle(model) is Obstacle.METHODS


@pytest.mark.skipif(TORCH < (2, 13), reason="needs torch 2.13")
def test_a_call_over_several_meshes_is_an_obstacle() -> None:
    with pretended(64):
        assert obstacle(built(lambda: Made(two_meshes(), (), {})).model) is Obstacle.MESHES


def test_replicas_alone_are_an_obstacle() -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    with pretended(RANKS), torch.device("meta"):
        model = net()
        replicate(model, mesh=init_device_mesh("cpu", (RANKS,)))
        assert isinstance(model, FSDPModule)
        assert obstacle(model) is Obstacle.REPLICATES
