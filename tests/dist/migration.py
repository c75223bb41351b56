"""A llama sharded by real FSDP1, by hand with FSDP2, and from the lines that `migrate` says."""

from collections.abc import Callable
from typing import Any

import torch
from models import CASES, Llama, LlamaBlock
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

STRICT: dict[str, Any] = {"options": {"fallback": "error"}}
BLOCKS = ModuleWrapPolicy({LlamaBlock})
LLAMA = CASES["llama"]
# Of a loss, in a few steps: FSDP1 reduces flat buckets of other shapes than FSDP2.
FSDP1_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def fresh(seed: int = 0, make: Callable[[], nn.Module] = Llama) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def real_fsdp1(model: nn.Module, **kwargs: Any) -> nn.Module:
    return Fsdp1(model, device_id=torch.device("cpu"), use_orig_params=True, **kwargs)


def shard(model: nn.Module, mesh: Any = None, inner: Any = None, **kwargs: Any) -> nn.Module:
    """By hand: `inner` are arguments for the blocks that the root does not get."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **{**kwargs, **(inner or {})})
    return fully_shard(model, mesh=mesh, **kwargs)


def from_code(code: str, model: nn.Module, **names: Any) -> nn.Module:
    exec(code, {"model": model, **names})
    return model


def near(expected: list[Tensor], actual: list[Tensor], dtype: torch.dtype = torch.float32) -> float:
    worst = max(float((a - b).abs() / b.abs()) for a, b in zip(actual, expected, strict=True))
    assert worst <= FSDP1_TOLERANCE[dtype], worst
    return worst
