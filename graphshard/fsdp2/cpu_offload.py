"""`CPUOffloadPolicy`: the host has shards, their gradients and what the optimizer makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy


def offloads_to_cpu(raw: Any) -> bool:
    """raw: an FSDPParamGroup."""
    return isinstance(raw.offload_policy, CPUOffloadPolicy)


def is_on_host(raw: Any) -> bool:
    """And that is not the device's own memory."""
    return offloads_to_cpu(raw) and has_own_memory(raw.device)


def has_own_memory(device: torch.device) -> bool:
    return device.type != "cpu"


def pins_memory(raw: Any) -> bool:
    """Of what the host has."""
    return offloads_to_cpu(raw) and bool(raw.offload_policy.pin_memory)
