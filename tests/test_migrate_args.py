"""Wrong and untranslatable arguments of FSDP1: each is refused with what to write instead."""

import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

import graphshard
from graphshard.errors import MigrateError
from graphshard.migrate import FullyShardedDataParallel as FSDP
from graphshard.migrate import code_of, get_state_dict_type
from graphshard.offline.world import pretended

HYBRID = ShardingStrategy.HYBRID_SHARD
LINEARS = ModuleWrapPolicy({nn.Linear})


@pytest.fixture
def world():
    with pretended(4):
        yield


def two() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def refused(code: str, *words: str, **kwargs: Any) -> None:
    """The error says all `words`, and the model is as it was."""
    model = two()
    with pytest.raises(MigrateError) as raised:
        FSDP(model, **kwargs)
    assert raised.value.code == code
    assert [word for word in words if word not in raised.value.message] == []
    assert not any(isinstance(m, FSDPModule) for m in model.modules())


FSDP1_ARGUMENTS = [
    name for name in inspect.signature(fsdp.FullyShardedDataParallel).parameters if name != "module"
]


def test_the_signature_is_that_of_fsdp1():
    ours = inspect.signature(FSDP)
    theirs = inspect.signature(fsdp.FullyShardedDataParallel)
    assert list(ours.parameters) == list(theirs.parameters)
    for name, parameter in theirs.parameters.items():
        # use_orig_params: None tells "not given" from False, which has no equivalent.
        if name != "use_orig_params":
            assert ours.parameters[name].default == parameter.default, name


@pytest.mark.parametrize("name", FSDP1_ARGUMENTS)
def test_fully_shard_explains_arguments_of_fsdp1(name):
    with pytest.raises(MigrateError, match=rf"GS1001: {name}: .*\n  {name}=   ->  \w"):
        graphshard.fully_shard(two(), **{name: None})


def test_fully_shard_lists_all_of_them_and_keeps_torchs_own_errors():
    with pytest.raises(
        ValueError, match=r"sharding_strategy=(.|\n)*reshard_after_forward(.|\n)*mp_policy="
    ):
        graphshard.fully_shard(two(), sharding_strategy=HYBRID, mixed_precision=None)
    with pytest.raises(TypeError, match="no_such_argument"):
        graphshard.fully_shard(two(), no_such_argument=1)


def test_fully_shard_looks_like_torchs():
    assert inspect.signature(graphshard.fully_shard) == inspect.signature(fsdp.fully_shard)
    assert graphshard.fully_shard.__doc__ == fsdp.fully_shard.__doc__
    assert graphshard.fully_shard.state is fsdp.fully_shard.state


def test_migrate_is_reachable_and_lazy():
    code = (
        "import sys, graphshard; assert 'torch' not in sys.modules; "
        "print(graphshard.migrate.FullyShardedDataParallel.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "FullyShardedDataParallel"


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"mixed_precision": MixedPrecisionPolicy()}, "FSDP1's MixedPrecision"),
        ({"cpu_offload": CPUOffloadPolicy()}, "FSDP1's CPUOffload"),
        ({"cpu_offload": True}, "FSDP1's CPUOffload"),
        ({"sharding_strategy": "FULL_SHARD"}, "FSDP1's ShardingStrategy"),
        ({"backward_prefetch": "pre"}, "FSDP1's BackwardPrefetch"),
        ({"auto_wrap_policy": {nn.Linear}}, "torch.distributed.fsdp.wrap"),
        ({"ignored_modules": [], "ignored_states": []}, "both given"),
        ({"ignored_modules": [nn.Parameter(torch.ones(1))]}, "Parameter"),
        ({"auto_wrap_policy": CustomPolicy(lambda m: {"ignored_states": []})}, "ignored_states="),
    ],
)
def test_arguments_of_the_wrong_kind(world, given, word):
    refused("GS1002", word, **given)


def test_what_has_no_equivalent(world):
    post = BackwardPrefetch.BACKWARD_POST
    refused("GS1003", "BACKWARD_POST", "BACKWARD_PRE", "memory_budget", backward_prefetch=post)
    kept = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
    refused("GS1003", "keep_low_precision_grads", "model.to(", mixed_precision=kept)
    override = CustomPolicy(lambda m: isinstance(m, nn.Linear) and {"backward_prefetch": post})
    refused("GS1003", "BACKWARD_POST", auto_wrap_policy=override)

    model = FSDP(two())
    with pytest.raises(MigrateError, match=r"GS1003: .*SHARDED_STATE_DICT"):
        FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(MigrateError, match=r"GS1003: .*set_all_reduce_hook"):
        model.register_comm_hook(None, print)
    for name in ("full", "sharded", "shard_full", "scatter_full", "flatten_sharded"):
        with pytest.raises(MigrateError, match=r"GS1003: .*: use optim_state_dict"):
            getattr(FSDP, f"{name}_optim_state_dict")(model, None)
    with pytest.raises(MigrateError, match=r"GS1003: .*parameter names"):
        FSDP.rekey_optim_state_dict({}, None, model)


def test_meshes(world):
    mesh, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    group = mesh.get_group()
    refused("GS1004", "both given", process_group=group, device_mesh=mesh)
    refused("GS1004", "two dimensions", sharding_strategy=HYBRID, device_mesh=mesh)
    refused("GS1004", "has 2 dimensions", device_mesh=grid)
    refused("GS1004", "init_device_mesh(", sharding_strategy=HYBRID)
    refused("GS1004", "HYBRID_SHARD", process_group=(group, group))
    refused("GS1004", "shard_group, replicate_group", sharding_strategy=HYBRID, process_group=group)
    none = ShardingStrategy.NO_SHARD
    refused("GS1004", "DistributedDataParallel", sharding_strategy=none, device_mesh=grid)
    part = grid.get_group(0)
    refused("GS1004", "DistributedDataParallel", sharding_strategy=none, process_group=part)


def test_nodes_of_unequal_size(world, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    refused("GS1004", "nodes of 3", sharding_strategy=HYBRID, auto_wrap_policy=LINEARS)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="about machines without accelerator")
def test_devices(world):
    refused("GS1005", "no accelerator", device_id=0)
    mesh = init_device_mesh("cpu", (4,))
    refused("GS1005", "device_mesh", device_id=torch.device("cuda", 0), device_mesh=mesh)
    FSDP(two(), device_id=torch.device("cpu"))


class Silent(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


def test_meta_modules_that_nothing_fills(world):
    with torch.device("meta"):
        model = nn.Sequential(Silent())
    with pytest.raises(MigrateError, match=r"GS1006: Silent .*param_init_fn="):
        FSDP(model)
    with pytest.raises(MigrateError, match=r"GS1006: .* left 1 tensor"):
        FSDP(model, param_init_fn=lambda module: None)


def test_sharded_twice(world):
    model = FSDP(two())
    with pytest.raises(MigrateError, match=r"GS1007: the module itself is sharded already"):
        FSDP(model)
    model = two()
    graphshard.fully_shard(model[1])
    with pytest.raises(MigrateError, match=r"GS1007: '1' is sharded already: an auto_wrap_policy"):
        FSDP(model, auto_wrap_policy=LINEARS)
    FSDP(model)


def test_writing_back_from_one_rank(world):
    model = FSDP(two())
    with (
        pytest.raises(MigrateError, match=r"GS1008: .*writeback=False"),
        FSDP.summon_full_params(model, rank0_only=True),
    ):
        pass


def test_settings_of_what_was_not_migrated(world):
    for ask in (get_state_dict_type, code_of):
        with pytest.raises(MigrateError, match=r"GS1002: .*Sequential"):
            ask(two())
    model = FSDP(two())
    with pytest.raises(MigrateError, match=r"GS1002: .*takes FullStateDictConfig"):
        FSDP.set_state_dict_type(
            model, StateDictType.FULL_STATE_DICT, fsdp.ShardedStateDictConfig()
        )


def test_what_is_not_needed_is_said(world, caplog):
    model = FSDP(
        two(),
        forward_prefetch=True,
        limit_all_gathers=False,
        use_orig_params=False,
        sharding_strategy=ShardingStrategy.NO_SHARD,
    )
    notes = [line for line in code_of(model).splitlines() if line.startswith("# ")]
    said = [note[2:].split(":")[0].split("=")[0] for note in notes]
    assert said == ["forward_prefetch", "limit_all_gathers", "use_orig_params", "NO_SHARD"]
    (record,) = caplog.records
    assert record.name.startswith("graphshard.migrate")
    assert code_of(model).splitlines()[-1] in record.message


def test_lines_of_code(world, caplog):
    """Loops where a list is sharded as a whole, single calls elsewhere, children first."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3))
            self.odd = nn.ModuleDict({"a-b": nn.Linear(4, 4)})
            self.tail = nn.Sequential(nn.ReLU(), nn.Linear(4, 4))

    def chosen(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, nn.Sequential):
            return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        return isinstance(module, nn.Linear)

    model = FSDP(Net(), auto_wrap_policy=CustomPolicy(chosen))
    assert (
        code_of(model)
        == """\
from torch.distributed.fsdp import fully_shard
for block in model.layers:
    fully_shard(block[0])
for block in model.layers:
    fully_shard(block, reshard_after_forward=False)
fully_shard(model.get_submodule('odd.a-b'))
fully_shard(model.tail[1])
fully_shard(model.tail, reshard_after_forward=False)
fully_shard(model)"""
    )
    again = Net()
    exec(code_of(model), {"model": again})
    assert [n for n, m in again.named_modules() if isinstance(m, FSDPModule)] == [
        n for n, m in model.named_modules() if isinstance(m, FSDPModule)
    ]
    assert caplog.records
