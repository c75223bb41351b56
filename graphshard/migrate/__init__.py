"""FSDP1's vocabulary for models that FSDP2 shards.

    from graphshard.migrate import FullyShardedDataParallel as FSDP

takes the place of the import from torch.distributed.fsdp. The call shards in place with
`fully_shard`, and says which lines do the same. docs/migrate.md has what each argument becomes.
"""

from graphshard.migrate.checkpoints import (
    get_state_dict_type,
    optim_state_dict,
    optim_state_dict_to_load,
    set_state_dict_type,
    state_dict_type,
)
from graphshard.migrate.fsdp1 import FullyShardedDataParallel, code_of
from graphshard.migrate.training import clip_grad_norm_, no_sync
from graphshard.migrate.whole import summon_full_params

__all__ = [
    "FullyShardedDataParallel",
    "clip_grad_norm_",
    "code_of",
    "get_state_dict_type",
    "no_sync",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "set_state_dict_type",
    "state_dict_type",
    "summon_full_params",
]
