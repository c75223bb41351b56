"""How long an optimizer step takes. A plan's step time is forward and backward; this comes after.

In: a processor, and the bytes of one rank's shards. Out: microseconds. An optimizer computes next
to nothing per byte, so memory traffic is its time; launches are left out (a few dozen per step).
"""

from __future__ import annotations

from graphshard.cost.algebra import Quantity
from graphshard.cost.curve import curve_us
from graphshard.cost.roofline import Processor

# Tensors as large as the parameters that torch.optim.AdamW(foreach=True) reads and writes, op by
# op (torch 2.13, torch/optim/adam.py, _multi_tensor_adam): mul_ 2, lerp_ 3, mul_ 2, addcmul_ 3,
# sqrt 2, div_ 2, add_ 2, addcdiv_ 4.
ADAMW_PASSES = 20
# torch.nn.utils.clip_grad_norm_(foreach=True): the norms read the gradients, mul_ reads and writes
# them. Its all-reduce of one number is left out.
CLIP_PASSES = 3


def adamw_us(processor: Processor, shard_bytes: Quantity, *, clips: bool = False) -> Quantity:
    """One step of torch.optim.AdamW as torch runs it by default on a GPU (foreach, not fused).

    shard_bytes: of one rank's parameters as stored. clips: gradients are clipped by their norm
    before.
    """
    passes = ADAMW_PASSES + (CLIP_PASSES if clips else 0)
    return curve_us(processor.memory, passes * shard_bytes)
