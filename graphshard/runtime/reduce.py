"""Reduce-scatter of one group's gradients: issue, wait, hand over to `.grad`.

Packing order, reduction dtype, divide factors and the order of casts are FSDP2's, so that the
result is bitwise the same.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.fsdp2 import FsdpGroup, FsdpParam, ReducePolicy, gradients
from graphshard.fsdp2.layouts import copy_of
from graphshard.runtime.live import LiveGroup
from graphshard.runtime.ranges import step_range
from graphshard.runtime.waiting import finish
from graphshard.schedule import StepKind


class Reduction:
    """One reduce-scatter, from issue until the sharded gradients are assigned."""

    __slots__ = ("_input", "_live", "_output", "_params", "_policy", "work")

    def __init__(self, live: LiveGroup, grads: dict[int, Tensor]) -> None:
        """grads: parameter index -> unsharded gradient; may be empty (nothing to reduce)."""
        self._live = live
        self._params = [live.fsdp.params[i] for i in grads]
        self.work: dist.Work | None = None
        self._input: Tensor | None = None
        if not grads:
            return
        with step_range(StepKind.REDUCE_ISSUE, live.fqn):
            self._issue(list(grads.values()))

    def _issue(self, grads: list[Tensor]) -> None:
        fsdp = self._live.fsdp
        world = fsdp.world_size
        self._policy = fsdp.reduce_policy(self._params, grads)
        packed = _pack(grads, self._params, world, self._policy, fsdp.reduce_comm)
        if world == 1:
            factor = fsdp.single_rank_divide_factor
            self._output = packed if factor is None else packed / factor
            return
        self._output = fsdp.reduce_comm.allocate(
            (packed.numel() // world,), dtype=packed.dtype, device=packed.device
        )
        self._input = packed
        self.work = reduce_scatter(
            self._output,
            packed,
            self._policy,
            fsdp.reduce_process_group,
            fsdp.reduce_comm,
        )
        self._live.counters.reduce_scatters += 1

    def wait(self) -> None:
        """Wait, then set or add to each `.grad` and run its hooks, in registration order."""
        if not self._params:
            return
        with step_range(StepKind.REDUCE_WAIT, self._live.fqn):
            self.drain()
            if self._all_reduce():
                self._assign()
        del self._output  # the run remembers this object until it ends

    def _all_reduce(self) -> bool:
        """HSDP's second reduction. False if it is put off to a later micro-step."""
        live, output = self._live, self._output
        group = live.fsdp.replicate_process_group
        if group is None:
            return True
        partial = gradients.take_partial(live.fsdp, self._params, output.dtype)
        if partial is not None:
            output.add_(partial)
        if not live.fsdp.all_reduces:
            gradients.leave_partial(live.fsdp, output)
            return False
        dist.all_reduce(output, group=group, op=self._policy.all_reduce_op)
        live.counters.all_reduces += 1
        return True

    def _assign(self) -> None:
        fsdp, output = self._live.fsdp, self._output
        fsdp.run_all_reduce_hook(output)
        if self._policy.postdivide not in (None, 1):
            output.div_(self._policy.postdivide)
        # One cast per dtype, as in FSDP2: gradients of one dtype share memory.
        outputs = {d: output.to(d or output.dtype) for d in {p.grad_dtype for p in self._params}}
        offset = 0
        for param in self._params:
            flat = outputs[param.grad_dtype]
            grad = flat.as_strided(param.local_size, param.local_stride, offset)
            param.add_sharded_grad(grad)
            offset += math.prod(param.padded_shard_size)

    @property
    def holds_input(self) -> bool:
        return self._input is not None

    def drain(self) -> None:
        """Wait for the collective, if any, and free its input; the result may be thrown away."""
        if self.work is not None:
            finish(self.work, self._live)
            self.work = None
        self._input = None


def reduce_scatter(
    output: Tensor,
    packed: Tensor,
    policy: ReducePolicy,
    group: dist.ProcessGroup | None,
    comm: Any,
) -> dist.Work | None:
    """Asynchronous reduce-scatter of `packed` (rank-major) into `output` by FSDP2's `comm`."""
    work = comm(
        output_tensor=output, input_tensor=packed, group=group, op=policy.scatter_op, async_op=True
    )
    return work  # type: ignore[no-any-return]


def _pack(
    grads: list[Tensor], params: list[FsdpParam], world: int, policy: ReducePolicy, comm: Any
) -> Tensor:
    """Rank-major flat input of the reduce-scatter in the reduction dtype, padded per parameter."""
    rows = [
        torch.cat(g.chunk(world, dim=p.shard_dim)) if p.shard_dim and world > 1 else g
        for g, p in zip(grads, params, strict=True)
    ]
    numel = world * sum(math.prod(p.padded_shard_size) for p in params)
    packed: Tensor = comm.allocate((numel,), dtype=policy.reduce_dtype, device=grads[0].device)
    if len({r.dtype for r in rows}) > 1:
        rows = [r.to(policy.reduce_dtype) for r in rows]
    torch._chunk_cat(rows, dim=0, num_chunks=world, out=packed.view(world, -1))
    if policy.predivide not in (None, 1):
        packed.div_(policy.predivide)
    return packed


def merge(first: dict[int, Tensor], second: dict[int, Tensor]) -> dict[int, Tensor]:
    """Sums by parameter index, in autograd's order of addition."""
    total = dict(first)
    for index, grad in second.items():
        total[index] = total[index] + grad if index in total else grad
    return dict(sorted(total.items()))


def merge_unreduced(fsdp: FsdpGroup, grads: dict[int, Tensor]) -> dict[int, Tensor]:
    """Add to `grads` what earlier micro-steps left unreduced, compiled or eager.

    Returns all (local) gradients by parameter index in packing order; clears what it takes.
    """
    merged: dict[int, Tensor] = {}
    for index in fsdp.reduce_order():
        param = fsdp.params[index]
        before, grad = gradients.take_unreduced(param), grads.get(index)
        if before is not None:
            grad = before if grad is None else before + grad
        if grad is not None:
            merged[index] = param.local_gradient(grad)
        elif gradients.waits_for_all_reduce(fsdp, param) or (
            fsdp.reduces_unused and param.sharded.requires_grad
        ):
            merged[index] = torch.zeros(param.size, dtype=param.dtype, device=fsdp.device)
    if fsdp.reduces_unused:
        gradients.mark_gathered(fsdp)
    gradients.nothing_unreduced(fsdp)
    return merged


def keep_unreduced(live: LiveGroup, grads: dict[int, Tensor]) -> None:
    """`set_requires_gradient_sync(False)`: leave unsharded gradients with FSDP2."""
    for index, grad in grads.items():
        param = live.fsdp.params[index]
        before = gradients.take_unreduced(param)
        held = param.as_accumulated(grad if before is None else before + grad)
        # A gradient may share memory with another tensor of the graph (an expanded sum).
        gradients.leave_unreduced(live.fsdp, param, copy_of(held) if held is grad else held)
