"""`set_symm_mem_for_comm` in graphs, as far as a machine without NVLink can tell.

torch's calls for symmetric memory are replaced by ones that note what they are given; FSDP2's own
classes call them. What NCCL makes of such memory was never run here.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from models import CASES
from parity import assert_equal, build, train
from pool import Ctx, Pool, device_type
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from graphshard.fsdp2.versions import TORCH

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(device_type() != "cpu", reason="replaces what a GPU really has"),
    pytest.mark.skipif(TORCH < (2, 13), reason="needs torch 2.13"),
]


class Symmetric:
    """Stands for torch.distributed._symmetric_memory.

    exchanged: bytes of each tensor of which ranks exchange addresses, in order.
    """

    def __init__(self) -> None:
        self.exchanged: list[int] = []

    def set_backend(self, backend: str) -> None:
        assert backend == "NCCL"

    def get_mem_pool(self, device: torch.device) -> object:
        return device

    def rendezvous(self, tensor: torch.Tensor, group: str) -> None:
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, "the whole of an allocation"
        self.exchanged.append(tensor.nbytes)


@contextlib.contextmanager
def symmetric() -> Iterator[Symmetric]:
    memory = Symmetric()
    with contextlib.ExitStack() as stack:
        for module in (torch.cuda, torch.cpu):  # torch 2.15 asks the device's module
            pool = patch.object(module, "use_mem_pool", contextlib.nullcontext, create=True)
            stack.enter_context(pool)
        stack.enter_context(patch.object(_fsdp_collectives, "symm_mem", memory))
        yield memory


def on_symmetric(ctx: Ctx, sums: bool) -> nn.Module:
    """sums: FSDP2 takes symmetric memory for reductions then, too."""
    model: Any = build(CASES["llama"], ctx)
    for module in model.modules():
        if hasattr(module, "set_symm_mem_for_comm"):
            module.set_force_sum_reduction_for_comms(sums)
            module.set_symm_mem_for_comm()
    return model


def exchanges(ctx: Ctx, sums: bool) -> tuple[list[int], list[int]]:
    """What eager FSDP2 exchanges, and what a graph does."""
    case, found = CASES["llama"], []
    traces = []
    for compiled in (False, True):
        with symmetric() as memory:
            model = on_symmetric(ctx, sums)
            if compiled:
                options = {"fallback": "error", "schedule": "fsdp2"}
                model.compile(backend="graphshard", fullgraph=True, options=options)
            traces.append(train(model, case, ctx, 3))
        found.append(memory.exchanged)
    assert_equal(*traces)
    return found[0], found[1]


@pytest.mark.parametrize("sums", [False, True])
def test_the_same_memory_is_exchanged(pool: Pool, sums: bool) -> None:
    """On all ranks in one order, since each exchange waits for the others."""
    first, second = pool.run(2, exchanges, sums)
    assert first == second
    eager, ours = first
    assert len(ours) > 0
    assert Counter(eager) == Counter(ours)


def planned(ctx: Ctx) -> list[int]:
    case = CASES["llama"]
    with symmetric() as memory:
        expected = train(on_symmetric(ctx, True), case, ctx, 3)
        memory.exchanged.clear()
        model = on_symmetric(ctx, True)
        model.compile(backend="graphshard", fullgraph=True, options={"fallback": "error"})
        assert_equal(expected, train(model, case, ctx, 3))
    return memory.exchanged


def test_a_plan_of_our_own(pool: Pool) -> None:
    first, second = pool.run(2, planned)
    assert first == second
    assert len(first) > 0
