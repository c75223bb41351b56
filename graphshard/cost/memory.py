"""How many bytes a group's parameters take, in the categories of torch's FSDPMemTracker.

In: the parameters of a `fully_shard` group, the number of ranks (a number or a symbol) and the
optimizer. Out: bytes on the rank that holds most, per category. When each of them is alive is the
schedule's business, not this module's; activations and temporaries come from the graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from graphshard.cost.algebra import Quantity, ceil_div, if_one
from graphshard.schedule.plan import Category as Category
from graphshard.schedule.plan import GroupInfo

# Bytes per element by torch's name of the dtype, without importing torch.
ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
        **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
        **dict.fromkeys(("float32", "int32"), 4),
        **dict.fromkeys(("float64", "int64", "complex64"), 8),
        "complex128": 16,
    }
)


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """What an optimizer keeps for each parameter.

    tensors: of the parameter's size and dtype. scalars: of 4 bytes (the step count).
    """

    tensors: int
    scalars: int = 0


# As in torch.optim with default arguments; read off each optimizer's `_init_group`.
OPTIMIZERS: Mapping[str, OptimizerState] = MappingProxyType(
    {
        "sgd": OptimizerState(0),
        "sgd_momentum": OptimizerState(1),
        "adagrad": OptimizerState(1, 1),
        "rmsprop": OptimizerState(1, 1),
        "adam": OptimizerState(2, 1),
        "adamw": OptimizerState(2, 1),
        "adamw_amsgrad": OptimizerState(3, 1),
    }
)


@dataclass(frozen=True, slots=True)
class ParamFacts:
    """One parameter: unsharded shape, shard dimension, and bytes per element in each role.

    item_bytes: as stored (and its `.grad`). gather_bytes: as gathered and computed with.
    reduce_bytes: as its gradient is reduced.
    """

    shape: tuple[int, ...]
    item_bytes: int
    gather_bytes: int
    reduce_bytes: int
    shard_dim: int = 0
    trainable: bool = True


@dataclass(frozen=True, slots=True)
class GroupBytes:
    """Bytes of one group on one rank, by category, each while it is alive.

    reduce_output is the reduce-scatter's result in the dtype of the reduction; if that is the
    stored dtype it becomes the sharded gradient itself and no memory is added.
    """

    sharded_param: Quantity
    sharded_grad: Quantity
    opt_state: Quantity
    unsharded_param: Quantity
    unsharded_grad: Quantity
    all_gather: Quantity
    reduce_scatter: Quantity
    reduce_output: Quantity

    @property
    def resident(self) -> Quantity:
        """Alive all the time between two steps: shards, their gradients, optimizer state."""
        return self.sharded_param + self.sharded_grad + self.opt_state


def params_of(
    group: GroupInfo, stored_dtype: str | None = None, reduce_dtype: str | None = None
) -> tuple[ParamFacts, ...]:
    """The facts of a planned group's parameters, sharded on dim 0.

    stored_dtype: of the sharded parameters; None: as compute sees them (no mixed precision).
    reduce_dtype: FSDP2's policy; None: as compute sees them. Raises KeyError for a dtype that
    ITEM_BYTES does not list.
    """
    return tuple(
        ParamFacts(
            p.shape,
            ITEM_BYTES[stored_dtype or p.dtype],
            ITEM_BYTES[p.dtype],
            ITEM_BYTES[reduce_dtype or p.dtype],
            trainable=p.trainable,
        )
        for p in group.params
    )


def padded_shard_numel(param: ParamFacts, world: Quantity) -> Quantity:
    """Elements of one rank's shard with FSDP2's padding: ceil(size / world) rows of it.

    As `torch.chunk` cuts (FSDPParam._init_sharded_param): the first rank's chunk is the largest
    and every rank's storage has its size.
    """
    size = param.shape[param.shard_dim]
    row = math.prod(n for dim, n in enumerate(param.shape) if dim != param.shard_dim)
    return ceil_div(size, world) * row


def group_bytes(
    params: Iterable[ParamFacts], world: Quantity, optimizer: OptimizerState
) -> GroupBytes:
    """Every category of one group.

    A gathered group is padded to `world` equal shards in its bucket and once more in the flat
    parameters that are copied out of it; with one rank there is no bucket. An unsharded gradient
    has the parameter's own size and dtype of compute.
    """
    every = tuple(params)
    trainable = tuple(p for p in every if p.trainable)
    shards = {p: padded_shard_numel(p, world) for p in every}
    gathered = sum(world * shards[p] * p.gather_bytes for p in every)
    reduced = sum(shards[p] * p.reduce_bytes for p in trainable)
    grads = sum(shards[p] * p.item_bytes for p in trainable)
    return GroupBytes(
        sharded_param=sum(shards[p] * p.item_bytes for p in every),
        sharded_grad=grads,
        opt_state=optimizer.tensors * grads + 4 * optimizer.scalars * len(trainable),
        unsharded_param=gathered,
        unsharded_grad=sum(math.prod(p.shape) * p.gather_bytes for p in trainable),
        all_gather=if_one(world, 0, gathered),
        reduce_scatter=if_one(world, 0, world * reduced),
        reduce_output=reduced,
    )


def total_bytes(groups: Iterable[GroupBytes]) -> GroupBytes:
    """The sum over groups, category by category."""
    every = tuple(groups)
    return GroupBytes(
        **{f.name: sum(getattr(g, f.name) for g in every) for f in fields(GroupBytes)}
    )


def by_category(total: GroupBytes) -> dict[Category, Quantity]:
    """The parameters' categories by FSDPMemTracker's names."""
    return {
        Category.SHARDED_PARAM: total.sharded_param,
        Category.SHARDED_GRAD: total.sharded_grad,
        Category.OPT_STATE: total.opt_state,
        Category.UNSHARDED_PARAM: total.unsharded_param,
        Category.UNSHARDED_GRAD: total.unsharded_grad,
        Category.ALL_GATHER: total.all_gather,
        Category.REDUCE_SCATTER: total.reduce_scatter,
    }
