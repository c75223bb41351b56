"""How long compute takes: the longer of arithmetic and memory traffic, plus a launch.

In: the work of ops (flops, bytes, dtype) and a machine's curves. Out: microseconds per op or per
region. The model is the roofline (S. Williams, A. Waterman, D. Patterson, CACM 52(4), 2009) with a
curve in place of each roof, so that small matrix products may run at a lower rate than large ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from graphshard.cost.algebra import Quantity, is_number, most
from graphshard.cost.curve import Curve, Trust, curve_us


@dataclass(frozen=True, slots=True)
class OpWork:
    """What one op does. A view has no launch and costs nothing.

    launches: 0 also for an op that is fused into another kernel: its traffic counts, no launch.
    dtype: of the arithmetic, by torch's name without "torch.", or "tf32". attention: a fused
    attention kernel, which reaches other rates than a matrix product. known: whether `flops`
    is exact; of an unknown op only the bytes are known.
    """

    flops: Quantity
    bytes: Quantity
    dtype: str = "float32"
    launches: int = 1
    known: bool = True
    attention: bool = False


FREE = OpWork(0, 0, launches=0)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Time over flops for one dtype, of matrix products or of attention."""

    dtype: str
    curve: Curve
    trust: Trust
    attention: bool = False


@dataclass(frozen=True, slots=True)
class Processor:
    """One rank's device. `memory` is time over bytes read and written; curves include a launch.

    capacity_bytes: None where the device does not say (host memory).
    """

    arithmetic: tuple[Arithmetic, ...]
    memory: Curve
    memory_trust: Trust
    capacity_bytes: int | None = None


def op_us(processor: Processor, work: OpWork) -> Quantity:
    """max(arithmetic(flops), memory(bytes)); the constant of each curve is its launch."""
    memory = curve_us(processor.memory, work.bytes, work.launches)
    if is_number(work.flops) and work.flops == 0:
        return memory
    arithmetic = arithmetic_of(processor, work.dtype, attention=work.attention).curve
    return most(curve_us(arithmetic, work.flops, work.launches), memory)


def region_us(processor: Processor, works: Sequence[OpWork], start: int, stop: int) -> Quantity:
    """Time of compute ops [start, stop), one after the other."""
    return sum(op_us(processor, work) for work in works[start:stop])


def ends_us(processor: Processor, works: Iterable[OpWork]) -> tuple[Quantity, ...]:
    """When each op ends if all run one after the other: region times are differences of these."""
    return tuple(accumulate(op_us(processor, work) for work in works))


def copy_us(processor: Processor, size_bytes: Quantity) -> Quantity:
    """Copying `size_bytes` on the device (packing and unpacking buckets): a read and a write."""
    return curve_us(processor.memory, 2 * size_bytes)


def arithmetic_of(processor: Processor, dtype: str, *, attention: bool = False) -> Arithmetic:
    """The table's entry for `dtype`; without one for attention, that of matrix products.

    A dtype that is not listed gets the slowest entry, by the time of a large product, so that it is
    not thought fast.
    """
    entries = [a for a in processor.arithmetic if a.dtype == dtype]
    if not attention:
        entries = [a for a in entries if not a.attention]
    if entries:
        return max(entries, key=lambda a: a.attention)
    return max(processor.arithmetic, key=lambda a: a.curve.classes[-1].us_per_unit)
