"""`memory_budget="device"`: what a rank may fill, and where nobody can say what that is."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from graphshard.compiler import device_memory
from graphshard.compiler.device_memory import STEP_BYTES, capacity_of, device_budget
from graphshard.cost.presets import preset
from graphshard.errors import OptionsError

GIB = 2**30


def test_a_tenth_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = preset("h100-ib400")
    budget = device_budget(machine)
    capacity = machine.processor.capacity_bytes
    assert 0.9 * capacity - STEP_BYTES < budget <= 0.9 * capacity
    assert budget % STEP_BYTES == 0
    tiny = replace(machine, processor=replace(machine.processor, capacity_bytes=10))
    assert device_budget(tiny) == STEP_BYTES, (
        "less than any model: the planner says what is missing"
    )


def test_a_machine_that_does_not_say() -> None:
    machine = preset("cpu")
    assert machine.processor.capacity_bytes is None
    with pytest.raises(OptionsError, match=r"GS103: option memory_budget='device': .*cpu does"):
        device_budget(machine)


def test_others_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which others hold 3; of the 60 of this process the allocator has 20 to spare."""
    module = SimpleNamespace(
        mem_get_info=lambda device: (17 * GIB, 80 * GIB),
        memory_reserved=lambda device: 60 * GIB,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert capacity_of(torch.device("cuda", 0)) == 77 * GIB
    del module.mem_get_info
    assert capacity_of(torch.device("cuda", 0)) is None


def test_ranks_on_one_host_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup = tmp_path / "memory.max"
    monkeypatch.setattr(device_memory, "CGROUP", cgroup)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    all_of_it = capacity_of(torch.device("cpu"))
    assert all_of_it is not None
    assert all_of_it > 2**28
    cgroup.write_text("max\n")
    assert capacity_of(torch.device("cpu")) == all_of_it
    cgroup.write_text("4194304\n")
    assert capacity_of(torch.device("cpu")) == 2**20
