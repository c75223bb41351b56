"""Inductor's passes that overlap and bucket collectives, as well tuned as they can be here.

In: the emulated link. Afterwards every graph that Inductor compiles in this process is scheduled
with them. They are told the link's own arithmetic and this machine's rate of matrix products: by
default they ask a GPU for both. What they import for that needs Triton, so it is answered here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.scheduler
import torch._inductor.utils
import torch.utils._runtime_estimation
from torch import fx
from torch.utils.flop_counter import flop_registry

FLOPS_PER_MS = 1e8  # one core, float32, large products: what `graphshard calibrate` measures here
MEMORY_GB_PER_S = 15
BYTES_PER_MS_OF_ONE_GBIT = 125_000.0
HAS_SIMPLE = hasattr(torch._inductor.config.aten_distributed_optimizations, "enable_simple_overlap")
ASKED = {
    "get_gpu_dram_gbps": lambda: MEMORY_GB_PER_S,
    "get_device_tflops": lambda dtype, device=None: FLOPS_PER_MS / 1e9,
}


def use(link: Any, bucket_mb: float) -> None:
    """link: of `bench.modes`. bucket_mb: the most that one all-gather or reduce-scatter carries."""
    modules: tuple[Any, ...] = (
        torch._inductor.utils,
        torch._inductor.scheduler,
        torch.utils._runtime_estimation,
    )
    for module in modules:
        for name, answer in ASKED.items():
            if hasattr(module, name):
                setattr(module, name, answer)
    config: Any = torch._inductor.config.aten_distributed_optimizations
    config.enable_overlap_scheduling = True
    config.collective_bucketing = True
    config.insert_overlap_deps = True
    config.overlap_scheduling_autofix_cycles = True  # else some bucket sizes fail
    config.compute_estimator = "analytical"
    config.pre_bucketing_fsdp_collectives_bucket_cap_mb = bucket_mb
    config.custom_runtime_estimation = estimator(link)


def simple(on: bool) -> None:
    """The pass that moves collectives up and waits down, without any estimate; where torch has it,
    it is on by default. Raises RuntimeError where it does not."""
    if HAS_SIMPLE:
        torch._inductor.config.aten_distributed_optimizations.enable_simple_overlap = on
    elif on:
        raise RuntimeError(f"torch {torch.__version__} has no simple overlap; 2.15 has")


def estimator(link: Any) -> Callable[..., float | None]:
    """Milliseconds of a node: exact for collectives, by flops for products, else unknown (None)."""

    def wire_ms(tensor: torch.Tensor, share: float) -> float:
        sent_bytes = tensor.numel() * tensor.element_size() * share
        return float(link.alpha_us / 1e3 + sent_bytes / (link.gbit * BYTES_PER_MS_OF_ONE_GBIT))

    def estimate(node: fx.Node, override_size: int | None = None) -> float | None:
        if override_size == 0:
            return link.alpha_us / 1e3 if "_c10d" in str(node.target) else 0.0
        ranks, name = link.num_ranks, str(node.target)
        value = node.meta.get("val")
        if "all_gather_into_tensor" in name and isinstance(value, torch.Tensor):
            return wire_ms(value, (ranks - 1) / ranks)
        if "reduce_scatter_tensor" in name and isinstance(value, torch.Tensor):
            return wire_ms(value, ranks - 1)
        packet = getattr(node.target, "_overloadpacket", None)
        if packet not in flop_registry:
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val", n))
        return float(flop_registry[packet](*args, **kwargs, out_val=value)) / FLOPS_PER_MS

    return estimate
