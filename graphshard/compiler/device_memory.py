"""What `memory_budget="device"` means: how much of its device a rank may fill."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from graphshard.cost.machine import Machine
from graphshard.errors import OptionsError

# What an allocator reserves is up to 11 % more than what a plan predicts to be alive at its peak
# (docs/cost-model.md, memory of published runs).
RESERVE = 0.1
# Of the host's memory, for activations of all its ranks. The rest is for data loaders, checkpoints
# that are being written, and what else runs there.
HOST_SHARE = 0.5
# Budgets are whole steps of this: what a driver holds differs a little from launch to launch, and
# plans on disk are found by their budget.
STEP_BYTES = 2**26
CGROUP = Path("/sys/fs/cgroup/memory.max")


def device_budget(machine: Machine) -> int:
    """In bytes: the device's memory but for RESERVE. Raises OptionsError (GS103) where the machine
    does not say how much that is."""
    capacity = machine.processor.capacity_bytes
    if capacity is None:
        why = f"{machine.name} does not say how much memory it has; give a number of bytes"
        raise OptionsError("GS103", f"option memory_budget='device': {why}")
    return max(int((1 - RESERVE) * capacity) // STEP_BYTES, 1) * STEP_BYTES


def capacity_of(device: torch.device) -> int | None:
    """Bytes that this process may have there: all but what other processes, the driver and
    communicators hold now. On the CPU an equal share of the machine's for each rank on it.

    None where torch cannot tell.
    """
    if device.type == "cpu":
        return _host_bytes()
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device))


def host_budget() -> int:
    """Bytes of activations that this rank may have its host hold."""
    return int(HOST_SHARE * _host_bytes()) // STEP_BYTES * STEP_BYTES


def _host_bytes() -> int:
    """An equal share for each rank on it of the machine's, or of those of the control group (cgroup
    v2) that the process is in."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CGROUP.read_text().strip() if CGROUP.exists() else "max"
    whole = physical if limit == "max" else min(physical, int(limit))
    return whole // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
