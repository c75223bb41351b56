"""A machine: one rank's processor, its network, and what was measured on it.

`collective_us` and the functions of `graphshard.cost.roofline` are what a planner calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.cost.algebra import Quantity
from graphshard.cost.comm import (
    Collective,
    Group,
    Measured,
    Network,
    measured_us,
    nearest,
    network_us,
)
from graphshard.cost.curve import Trust
from graphshard.cost.roofline import Processor


@dataclass(frozen=True, slots=True)
class Machine:
    """Everything that turns bytes and flops into time. `measured` wins over `network`."""

    name: str
    processor: Processor
    network: Network
    measured: tuple[Measured, ...] = ()


def collective_us(
    machine: Machine, kind: Collective, group: Group, size_bytes: Quantity
) -> Quantity:
    """Microseconds of one collective of `size_bytes` (of the whole, see `graphshard.cost.comm`)."""
    found = nearest(machine.measured, kind, group)
    if found is None:
        return network_us(machine.network, kind, group, size_bytes)
    return measured_us(machine.network, found, group, size_bytes)


def collective_trust(machine: Machine, kind: Collective, group: Group) -> Trust:
    """Where the numbers behind `collective_us` come from."""
    found = nearest(machine.measured, kind, group)
    return Trust.PRESET if found is None else found.trust
