"""What a test puts in the place of something else, for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphshard.capture.root_state import handle_of
from graphshard.fsdp2 import group
from graphshard.runtime import buckets


@contextmanager
def patched(module: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, make(original))
    try:
        yield
    finally:
        setattr(module, name, original)


def compiled_in_place() -> Any:
    """Collectives of what is compiled inside go from and to where tensors are, as NCCL's do.

    gloo takes many tensors in one collective, too; only that it copies them inside, for which
    graphshard does not use it so. Here it is told to.
    """
    return patched(group, "COPYING_BACKENDS", lambda names: ())


def gather_as_one_tensor() -> None:
    """gloo's all-gather of many tensors corrupts the heap while another collective is under way
    (torch 2.13): a process that does nothing else dies within a minute, of SIGSEGV or SIGABRT.
    Nobody but tests uses it. Here the bytes travel as one tensor, and are there when issued.
    """
    original = buckets.gather_in_place

    @wraps(original)
    def call(outputs: list[Tensor], inputs: list[Tensor], ranks: dist.ProcessGroup) -> dist.Work:
        if inputs[0].device.type != "cpu":
            return original(outputs, inputs, ranks)
        own = torch.cat([part.reshape(-1).view(torch.uint8) for part in inputs])
        rows = own.new_empty(ranks.size(), own.numel())
        work = dist.all_gather_into_tensor(rows.view(-1), own, group=ranks, async_op=True)
        work.wait()
        places = [output.view(torch.uint8).view(ranks.size(), -1) for output in outputs]
        torch.split_with_sizes_copy(rows, [place.shape[1] for place in places], dim=1, out=places)
        return work

    buckets.gather_in_place = call


@contextmanager
def in_place(model: nn.Module, yes: bool = True) -> Iterator[None]:
    """Collectives of a model that is compiled go from and to where tensors are, or do not."""
    handles = [handle for net in model.modules() if (handle := handle_of(net)) is not None]
    found = {live.fsdp for handle in handles for live in handle.lives}
    before = {each: each.sends_in_place for each in found}
    for each in found:
        each.sends_in_place = yes
    try:
        yield
    finally:
        for each in found:
            each.sends_in_place = before[each]


def without_clones() -> Any:
    """Plans count no copies of gloo's, as with a backend that makes none: they have more room."""
    return patched(group, "CLONING_BACKENDS", lambda names: ())
