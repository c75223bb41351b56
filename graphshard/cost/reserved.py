"""What the CUDA caching allocator keeps reserved, from when each category is alive.

In: the forecasts of a step's directions. Out: bytes, to compare with the peak of
`reserved_bytes.all` in `torch.cuda.memory_stats`. Rounding and fragmentation are left out, so the
allocator never has less.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphshard.schedule.estimate import Category
from graphshard.schedule.forecast import Forecast

# The allocator gives freed memory only to the stream that asked for it first (a block belongs to
# its stream: c10/cuda/CUDACachingAllocator.cpp). FSDP2 asks for what it gathers in its all-gather
# copy-in stream and for sharded gradients in its reduce-scatter stream (torch 2.13,
# torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py); all the rest is compute's.
POOLS: tuple[frozenset[Category], ...] = (
    frozenset({Category.ALL_GATHER}),
    frozenset({Category.SHARDED_GRAD}),
    frozenset(Category) - {Category.ALL_GATHER, Category.SHARDED_GRAD},
)


def reserved_bytes(forecasts: Sequence[Forecast]) -> int:
    """The sum over FSDP2's streams of the most that each ever holds.

    forecasts: of FSDP2's own schedule (`plan.fsdp2.forecasts`), forward and backward.
    """
    return sum(max(_most_bytes(forecast, pool) for forecast in forecasts) for pool in POOLS)


def _most_bytes(forecast: Forecast, pool: frozenset[Category]) -> int:
    rows = [sizes for category, sizes in forecast.memory if category in pool]
    return max(map(sum, zip(*rows, strict=True)), default=0)
