"""torchtitan's models, as its trainer makes them: blocks compiled by a backend's name, then
sharded.

    torchtitan_blocks.py llama3|qwen3 [BACKEND]

qwen3 is a mixture of experts; each rank has some of them, and gets their tokens from all ranks.

Trains STEPS steps; rank 0 prints the losses and what `graphshard.explain` says, as JSON. Without
BACKEND, torchtitan compiles nothing.
"""

import json
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

# Triton's kernels for mixtures of experts: there is no Triton for a CPU.
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()

from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, parallel_dims  # noqa: E402
from torchtitan.distributed.utils import set_spmd_backend  # noqa: E402
from torchtitan.models import llama3, qwen3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config  # noqa: E402

import graphshard  # noqa: E402

SPECS = {
    "llama3": lambda: llama3.model_registry("debugmodel", attn_backend="varlen"),
    "qwen3": lambda: qwen3.model_registry("debugmodel_moe", attn_backend="varlen"),
}
SPMD = "partial_dtensor"
STEPS = 3
LAYERS = 2
TOKENS = 32


def main(name: str, backend: str = "") -> None:
    dist.init_process_group("gloo")
    set_spmd_backend(SPMD)
    model = sharded(name, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(step + STEPS * dist.get_rank())
        loss = model(torch.randint(2048, (2, TOKENS))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    report = graphshard.explain(model)
    options = [f"{name}={given}" for name, given in report.options]
    groups = [report.captured, report.present, len(graphshard.plans(model))]
    if dist.get_rank() == 0:
        print(json.dumps({"losses": losses, "options": options, "groups": groups}))
    dist.destroy_process_group()


def sharded(name: str, backend: str) -> nn.Module:
    spec, experts = SPECS[name](), dist.get_world_size() if name == "qwen3" else 1
    config = replace(spec.model, layers=[causal(layer) for layer in spec.model.layers[:LAYERS]])
    if name == "qwen3":
        set_qwen3_sharding_config(config, enable_sp=False, enable_ep=True)
    with torch.device("meta"):
        model = config.build()
    spec.parallelize_fn(
        model,
        parallel_dims=one_dimension(experts),
        training=TrainingConfig(seq_len=TOKENS, mixed_precision_param="float32"),
        parallelism=ParallelismConfig(spmd_backend=SPMD),
        compile_config=CompileConfig(enable=bool(backend), backend=backend, components=["model"]),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model


def causal(layer: Any) -> Any:
    """With torchtitan's attention that needs neither Triton nor a GPU."""
    attention = replace(layer.attention, inner_attention=ScaledDotProductAttention.Config())
    return replace(layer, attention=attention)


def one_dimension(experts: int) -> ParallelDims:
    """All ranks shard, on the CPU: torchtitan takes a GPU for granted. experts: over so many ranks
    they are divided."""
    parallel_dims.device_type = "cpu"
    ranks = dist.get_world_size()
    dims = ParallelDims(
        dp_replicate=1, dp_shard=ranks, cp=1, tp=1, pp=1, ep=experts,
        world_size=ranks, spmd_backend=SPMD,
    )  # fmt: skip
    dims.build_mesh()
    return dims


if __name__ == "__main__":
    main(*sys.argv[1:])
