"""PyTorch's `fully_shard`, which explains itself to those who pass FSDP1's arguments."""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.fsdp import fully_shard as torch_fully_shard

from graphshard.errors import MigrateError

# What FSDP1 (torch.distributed.fsdp.FullyShardedDataParallel) takes and fully_shard does not, and
# what says the same to fully_shard.
_INSTEAD = {
    "process_group": 'mesh=DeviceMesh.from_group(process_group, "cuda")',
    "sharding_strategy": (
        "reshard_after_forward=True for FULL_SHARD, False for SHARD_GRAD_OP; for HYBRID_SHARD also "
        'mesh=init_device_mesh("cuda", (nodes, ranks_per_node))'
    ),
    "cpu_offload": "offload_policy=CPUOffloadPolicy()",
    "auto_wrap_policy": "one call for each block, then one for the model",
    "fsdp_auto_wrap_policy": "one call for each block, then one for the model",
    "backward_prefetch": "nothing: the next group is always gathered early",
    "mixed_precision": "mp_policy=MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)",
    "ignored_modules": "ignored_params=set(module_to_ignore.parameters())",
    "ignored_states": "ignored_params={...}, a set of parameters",
    "param_init_fn": "model.to_empty(device=...) and model.reset_parameters() after sharding",
    "device_id": "torch.cuda.set_device(device_id) before",
    "sync_module_states": (
        "set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, "
        "broadcast_from_rank0=True)) after sharding"
    ),
    "forward_prefetch": "module.set_modules_to_forward_prefetch([next_module])",
    "limit_all_gathers": "nothing: the CPU never waits",
    "use_orig_params": "nothing: parameters are always the original ones",
    "device_mesh": "mesh=device_mesh",
}


@functools.wraps(torch_fully_shard)
def fully_shard(*args: Any, **kwargs: Any) -> Any:
    """torch.distributed.fsdp.fully_shard; MigrateError (GS1001) for arguments of FSDP1."""
    wrong = [name for name in kwargs if name in _INSTEAD]
    if wrong:
        told = "".join(f"\n  {name}=   ->  {_INSTEAD[name]}" for name in wrong)
        raise MigrateError(
            "GS1001",
            f"{', '.join(wrong)}: arguments of FSDP1, which fully_shard does not take. Instead:"
            f"{told}\nor keep the call and import FullyShardedDataParallel from graphshard.migrate",
        )
    return torch_fully_shard(*args, **kwargs)
