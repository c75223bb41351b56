"""How long compute takes: the longer of arithmetic and memory traffic, plus a launch.

In: the work of ops (flops, bytes, dtype) and a machine's curves. Out: microseconds per op or per
region. The model is the roofline (S. Williams, A. Waterman, D. Patterson, CACM 52(4), 2009) with a
curve in place of each roof, so that small matrix products may run at a lower rate than large ones,
and with lower roofs for kernels that were seen to stay below the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from graphshard.cost.algebra import Quantity, is_number, most
from graphshard.cost.comm import Collective
from graphshard.cost.curve import Curve, Trust, curve_us

FLOAT8 = "float8"  # how torch's names of them start


class Kernel(StrEnum):
    """Kernels that move memory, by how near they come to its bandwidth."""

    COPY = "copy"  # and eager pointwise ops
    CAST = "cast"  # to a dtype of another size
    NORM = "norm"  # a normalisation, forward or backward, as one kernel
    FUSED = "fused"  # what a compiler makes of pointwise ops


@dataclass(frozen=True, slots=True)
class Attention:
    """A fused attention kernel. length: of the keys. causal: half of its flops are left out, which
    are counted all the same."""

    head_dim: Quantity
    length: Quantity
    causal: bool = True
    backward: bool = False


@dataclass(frozen=True, slots=True)
class OpWork:
    """What one op does. A view has no launch and costs nothing.

    launches: 0 also for an op that is fused into another kernel: its traffic counts, no launch.
    dtype: of the arithmetic, by torch's name without "torch.", or "tf32". attention: it reaches
    other rates than a matrix product. known: whether `flops` is exact; of an unknown op only the
    bytes are known. collective: what it is, if it is one of the model's own, and nothing else.
    """

    flops: Quantity
    bytes: Quantity
    dtype: str = "float32"
    launches: int = 1
    known: bool = True
    attention: Attention | None = None
    kernel: Kernel = Kernel.COPY
    collective: Collective | None = None


FREE = OpWork(0, 0, launches=0)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Time over flops of matrix products in one dtype."""

    dtype: str
    curve: Curve
    trust: Trust


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """Time over flops of causal attention in one dtype; the flops are counted in full.

    head_dim, backward: of which it was measured; None: of any. half_length: keys at which it runs
    at half the rate of endless ones, as it does more of what the mask hides.
    """

    dtype: str
    curve: Curve
    trust: Trust
    head_dim: int | None = None
    backward: bool | None = None
    half_length: float = 0.0


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Time over bytes of kernels that stay below the memory's bandwidth."""

    kernel: Kernel
    curve: Curve


@dataclass(frozen=True, slots=True)
class Processor:
    """One rank's device. `memory` is time over bytes read and written; curves include a launch.

    capacity_bytes: None where the device does not say (host memory). attention: without an entry
    for a dtype its attention takes what products take. slower: kernels that were seen to be.
    """

    arithmetic: tuple[Arithmetic, ...]
    memory: Curve
    memory_trust: Trust
    capacity_bytes: int | None = None
    attention: tuple[AttentionRate, ...] = ()
    slower: tuple[Bandwidth, ...] = ()


def op_us(processor: Processor, work: OpWork) -> Quantity:
    """max(arithmetic(flops), memory(bytes)); the constant of each curve is its launch."""
    memory = _memory_us(processor, work)
    if is_number(work.flops) and work.flops == 0:
        return memory
    if work.attention is not None and (rate := attention_of(processor, work)) is not None:
        flops = _causal_flops(rate, work.attention, work.flops)
        return most(curve_us(rate.curve, flops, work.launches), memory)
    arithmetic = arithmetic_of(processor, work.dtype).curve
    return most(curve_us(arithmetic, work.flops, work.launches), memory)


def _memory_us(processor: Processor, work: OpWork) -> Quantity:
    found = curve_us(processor.memory, work.bytes, work.launches)
    for other in processor.slower:
        if other.kernel is work.kernel:
            found = most(found, curve_us(other.curve, work.bytes, work.launches))
    return found


def _causal_flops(rate: AttentionRate, attention: Attention, flops: Quantity) -> Quantity:
    """What causal attention over endless keys does in the same time."""
    if not attention.causal:
        return 2 * flops  # nothing is left out
    return flops * (1 + rate.half_length / attention.length) if rate.half_length else flops


def region_us(processor: Processor, works: Sequence[OpWork], start: int, stop: int) -> Quantity:
    """Time of compute ops [start, stop), one after the other."""
    return sum(op_us(processor, work) for work in works[start:stop])


def ends_us(processor: Processor, works: Iterable[OpWork]) -> tuple[Quantity, ...]:
    """When each op ends if all run one after the other: region times are differences of these."""
    return tuple(accumulate(op_us(processor, work) for work in works))


def copy_us(processor: Processor, size_bytes: Quantity) -> Quantity:
    """Copying `size_bytes` on the device (packing and unpacking buckets): a read and a write."""
    return curve_us(processor.memory, 2 * size_bytes)


def arithmetic_of(processor: Processor, dtype: str) -> Arithmetic:
    """The table's entry for products in `dtype`.

    Every format of 8 bits runs at the rate of the one that is listed. Another dtype that is not
    listed gets the slowest entry, by the time of a large product, so that it is not thought fast.
    """
    entries = [a for a in processor.arithmetic if a.dtype == dtype] or [
        a for a in processor.arithmetic if a.dtype.startswith(FLOAT8) and dtype.startswith(FLOAT8)
    ]
    return entries[0] if entries else max(processor.arithmetic, key=lambda a: _slope(a.curve))


def attention_of(processor: Processor, work: OpWork) -> AttentionRate | None:
    """The entry for the dtype and direction of `work` with the nearest size of heads, if any."""
    asked = work.attention
    assert asked is not None
    entries = [
        rate
        for rate in processor.attention
        if rate.dtype == work.dtype and rate.backward in (None, asked.backward)
    ]
    dim = asked.head_dim if is_number(asked.head_dim) else 0
    return min(entries, key=lambda rate: abs((rate.head_dim or dim) - dim), default=None)


def _slope(curve: Curve) -> Quantity:
    return curve.classes[-1].us_per_unit
