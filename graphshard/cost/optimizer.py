"""How long an optimizer step takes, and what it keeps. It comes once per step, after backward.

In: a processor, an optimizer, and one rank's shards that it steps. Out: microseconds and bytes. An
optimizer computes next to nothing per byte, so memory traffic is its time; launches are left out (a
few dozen per step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from graphshard.cost.algebra import Quantity
from graphshard.cost.curve import curve_us
from graphshard.cost.roofline import Processor
from graphshard.schedule.estimate import OptimizerKind

# Tensors as large as the parameters that an optimizer reads and writes, op by op, from torch 2.13.
#   foreach AdamW (torch/optim/adam.py, _multi_tensor_adam): mul_ 2, lerp_ 3, mul_ 2, addcmul_ 3,
#   sqrt 2, div_ 2, add_ 2, addcdiv_ 4. Of CPU tensors torch runs the same ops, one after another.
#   fused AdamW: one kernel reads parameter, gradient and two moments, and writes all but one.
#   8-bit AdamW (torchao/optim/adam.py, single_param_adam; bitsandbytes): one compiled graph reads
#   parameter and gradient and writes the parameter; its states are counted by their own bytes.
#   foreach SGD (torch/optim/sgd.py, _multi_tensor_sgd): add_ 3; with momentum mul_ 2, add_ 3, too.
PASSES: Mapping[OptimizerKind, int] = MappingProxyType(
    {
        OptimizerKind.ADAMW: 20,
        OptimizerKind.ADAMW_FUSED: 7,
        OptimizerKind.ADAMW_8BIT: 3,
        OptimizerKind.SGD: 3,
        OptimizerKind.SGD_MOMENTUM: 8,
    }
)
# torch.nn.utils.clip_grad_norm_(foreach=True): the norms read the gradients, mul_ reads and writes
# them. Its all-reduce of one number is left out.
CLIP_PASSES = 3
# Tensors like the parameters that it keeps for them.
STATES: Mapping[OptimizerKind, int] = MappingProxyType(
    {
        OptimizerKind.ADAMW: 2,
        OptimizerKind.ADAMW_FUSED: 2,
        OptimizerKind.ADAMW_8BIT: 0,
        OptimizerKind.SGD: 0,
        OptimizerKind.SGD_MOMENTUM: 1,
    }
)
# A state of torchao's or bitsandbytes' 8-bit AdamW has a byte for each element and a float32 for
# each block of 256. (Both leave tensors of less than 4,096 elements as they are.)
EIGHT_BIT_STATES = 2
BYTES_PER_EIGHT_BIT_ELEMENT = 1 + 4 / 256


@dataclass(frozen=True, slots=True)
class Optimizer:
    """What steps the parameters. clips: gradients are clipped by their norm before."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    clips: bool = False


# torch's own default, and no clipping.
DEFAULT = Optimizer()


@dataclass(frozen=True, slots=True)
class Stepped:
    """One rank's shards that an optimizer steps, as stored; gradients have the same dtype."""

    bytes: Quantity
    numel: Quantity


def state_bytes(kind: OptimizerKind, shards: Stepped) -> Quantity:
    """What the optimizer keeps for `shards` from step to step, but for its step counts."""
    return STATES[kind] * shards.bytes + _eight_bit_bytes(kind, shards)


def optimizer_us(processor: Processor, optimizer: Optimizer, shards: Stepped) -> Quantity:
    """One step of `optimizer` on `processor`, with the gradients clipped before if it does that."""
    passes = PASSES[optimizer.kind] + (CLIP_PASSES if optimizer.clips else 0)
    packed_bytes = 2 * _eight_bit_bytes(optimizer.kind, shards)  # read and written
    return curve_us(processor.memory, passes * shards.bytes + packed_bytes)


def _eight_bit_bytes(kind: OptimizerKind, shards: Stepped) -> Quantity:
    if kind is not OptimizerKind.ADAMW_8BIT:
        return 0
    return EIGHT_BIT_STATES * BYTES_PER_EIGHT_BIT_ELEMENT * shards.numel
