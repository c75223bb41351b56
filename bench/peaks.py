"""Peaks of memory in one step, measured from outside by torch's profiler, the same for all modes.

In: a function that makes one step. Out: the most bytes of gathered parameters, and of tensors
that the step allocated, alive at one time. What the step finds allocated is not in either.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

GATHER = "::all_gather"  # FSDP::all_gather*, graphshard::all_gather*


@dataclass(frozen=True, slots=True)
class Peaks:
    gathered_bytes: int
    allocated_bytes: int


def step_peaks(step: Callable[[], object]) -> Peaks:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return peaks_of(events)


def peaks_of(events: list[dict[str, Any]]) -> Peaks:
    """Gathered is what was allocated inside a gather's range, until it is freed."""
    spans = [
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e.get("cat") in ("user_annotation", "cpu_op") and GATHER in e["name"]
    ]
    alive: dict[int, tuple[int, int]] = {}  # address -> bytes, and bytes if gathered
    allocated = gathered = 0
    peaks = Peaks(0, 0)
    for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size > 0:
            is_gathered = any(start <= event["ts"] <= stop for start, stop in spans)
            alive[address] = (size, size if is_gathered else 0)
            sign, change = 1, alive[address]
        else:
            sign, change = -1, alive.pop(address, (0, 0))
        allocated += sign * change[0]
        gathered += sign * change[1]
        peaks = Peaks(max(peaks.gathered_bytes, gathered), max(peaks.allocated_bytes, allocated))
    return peaks


def resident_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Parameters (this rank's shards) and optimizer state, by storage."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(storages.values())
