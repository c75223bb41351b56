"""A machine: one rank's processor, its network, and what was measured on it.

`collective_us` and the functions of `graphshard.cost.roofline` are what a planner calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from graphshard.cost.algebra import Quantity, most
from graphshard.cost.comm import (
    CollectiveKind,
    MeasuredCurve,
    Network,
    RankGroup,
    bulk_curve,
    measured_us,
    nearest,
    network_us,
)
from graphshard.cost.curve import Curve, Trust, curve_us, scaled, through
from graphshard.cost.roofline import Arithmetic, OpWork, Processor, arithmetic_of, op_us


@dataclass(frozen=True, slots=True)
class HostCopies:
    """What a copy between the device and pinned memory of the host takes, for its bytes: the same
    each way, also if both ways are busy at once."""

    curve: Curve
    trust: Trust = Trust.PRESET


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that turns bytes and flops into time. `measured` wins over `network`.

    host: None where the device has no memory of its own, or nobody knows how it is reached.
    compute_spread: standard deviation of compute times among ranks, as a share of their mean.
    ranks_per_node: as many share the fast links, where nobody says otherwise.
    issue_us, wait_us: what a rank's collective takes of compute, beside copies: where the thread
    that computes issues it and waits for it (a CPU). A device is given work ahead of time.
    """

    name: str
    processor: Processor
    network: Network
    measured: tuple[MeasuredCurve, ...] = ()
    host: HostCopies | None = None
    ranks_per_node: int = 8
    compute_spread: float = 0.0
    issue_us: float = 0.0
    wait_us: float = 0.0


def host_copy_us(host: HostCopies, size_bytes: Quantity) -> Quantity:
    """Microseconds of one copy to the host, or back."""
    return curve_us(host.curve, size_bytes)


def collective_us(
    machine: Machine, kind: CollectiveKind, group: RankGroup, size_bytes: Quantity
) -> Quantity:
    """Microseconds of one collective of `size_bytes` (of the whole, see `graphshard.cost.comm`)."""
    found = nearest(machine.measured, kind, group)
    if found is None:
        return network_us(machine.network, kind, group, size_bytes)
    return measured_us(machine.network, found, group, size_bytes)


def work_us(machine: Machine, work: OpWork) -> Quantity:
    """Microseconds of one op. A collective of the model's own is waited for where it is issued, as
    it stands in a graph, so it takes compute's time."""
    own = work.collective
    if own is None:
        return op_us(machine.processor, work)
    return collective_us(machine, own.kind, own.group(machine.ranks_per_node), own.size_bytes)


def collective_trust(machine: Machine, kind: CollectiveKind, group: RankGroup) -> Trust:
    """Where the numbers behind `collective_us` come from."""
    found = nearest(machine.measured, kind, group)
    return Trust.PRESET if found is None else found.trust


def launch_us(
    machine: Machine, kind: CollectiveKind, group: RankGroup, size_bytes: Quantity
) -> Quantity:
    """What two collectives of `size_bytes` take longer than one of twice the size, never below 0.

    In the alpha-beta model this is alpha: what merging saves and splitting costs.
    """
    one = collective_us(machine, kind, group, size_bytes)
    return most(2 * one - collective_us(machine, kind, group, 2 * size_bytes), 0)


def observed_collective(
    machine: Machine, kind: CollectiveKind, group: RankGroup, samples: Sequence[tuple[float, float]]
) -> Machine:
    """The machine after `kind` was seen on `group` in this job: (size_bytes, microseconds) pairs.

    A few sizes do not carry a fit, so the curve keeps its shape and moves by the median ratio of
    measured to predicted time. Nothing changes without samples.
    """
    ratios = [us / collective_us(machine, kind, group, size) for size, us in samples]
    if not ratios:
        return machine
    ratio = median(ratios)
    found = nearest(machine.measured, kind, group)
    curve = bulk_curve(machine.network, found, kind, group)
    seen = MeasuredCurve(kind, group, scaled(curve, ratio, 1 / ratio), Trust.MEASURED)
    others = (m for m in machine.measured if (m.kind, m.group) != (kind, group))
    return replace(machine, measured=(seen, *others))


def observed_product(machine: Machine, dtype: str, flops: float, us: float) -> Machine:
    """The machine after a matrix product in `dtype` was seen in this job. Attention is not one."""
    processor = machine.processor
    curve = through(arithmetic_of(processor, dtype).curve, flops, us)
    seen = Arithmetic(dtype, curve, Trust.MEASURED)
    others = (a for a in processor.arithmetic if a.dtype != dtype)
    return replace(machine, processor=replace(processor, arithmetic=(seen, *others)))
