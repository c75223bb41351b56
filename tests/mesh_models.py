"""Blocks of which parameters are sharded over meshes of their own."""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from graphshard.offline.repeats import CAPTURED

WIDTH = 256


def blocks() -> nn.Sequential:
    """More alike ones than are captured, so that the others' groups are described unseen."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(CAPTURED + 2)
        )
    )


def two_meshes() -> nn.Module:
    """The second weight of each block is sharded over one rank of each node, all else over all."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    whole = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    outer = init_device_mesh("cpu", (8, 8), mesh_dim_names=("outer", "inner"))["outer"]
    model = blocks()
    seconds = {block[2].weight for block in model}
    of_seconds, of_others = FSDPMeshInfo(outer, 0), FSDPMeshInfo(whole, 0)

    def placement(param: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(Shard(0), of_seconds if param in seconds else of_others)

    for block in model:
        fully_shard(block, mesh=whole, shard_placement_fn=placement)
    return fully_shard(model, mesh=whole)
