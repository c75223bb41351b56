"""Reduce-scatter of one group's gradients: issue, wait, hand over to `.grad`.

Packing order, reduction dtype, divide factors and the order of casts are FSDP2's, so that the
result is bitwise the same. Where it need not be, or where two numbers are added, which is the same
in any place, a backend that can takes each gradient from where it is, and nothing is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.fsdp2 import FsdpGroup, FsdpParam, ReducePolicy, gradients
from graphshard.fsdp2.cpu_offload import pins_memory
from graphshard.fsdp2.layouts import copy_of
from graphshard.fsdp2.param import add_sharded_grads, grad_dtypes, hooks_of
from graphshard.fsdp2.settings import sums_may_move
from graphshard.runtime.calls import current_task, more_calls_ahead
from graphshard.runtime.host_copies import offload
from graphshard.runtime.issued import note
from graphshard.runtime.live import LiveGroup
from graphshard.runtime.ranges import step_range
from graphshard.runtime.waiting import NamedCollective, finish, trying_in_place
from graphshard.schedule.steps import StepKind


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Where the gradients of `params` lie in what one rank receives; made once for each case.

    places: size, stride and offset of each, without padding. columns: elements of each, with
    padding; numel: of all. crosswise: positions of those that are not sharded on dim 0.
    """

    params: tuple[FsdpParam, ...]
    places: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    columns: tuple[int, ...]
    numel: int
    crosswise: tuple[int, ...]


def packing_of(live: LiveGroup, indices: tuple[int, ...]) -> Packing:
    known = live.packings.get(indices)
    if known is None:
        params = tuple(live.fsdp.params[i] for i in indices)
        columns = tuple(p.padded_numel for p in params)
        ends = list(accumulate(columns, initial=0))
        rows = zip(params, ends, strict=False)
        places = tuple((p.local_size, p.local_stride, offset) for p, offset in rows)
        crosswise = tuple(at for at, p in enumerate(params) if p.shard_dim)
        known = live.packings[indices] = Packing(params, places, columns, ends[-1], crosswise)
    return known


class Reduction:
    """One reduce-scatter, from issue until the sharded gradients are assigned."""

    __slots__ = (
        "_exact_sums", "_input", "_output", "_packing", "_part", "_policy", "_puts_off", "live",
        "work",
    )  # fmt: skip

    def __init__(
        self,
        live: LiveGroup,
        grads: Mapping[int, Tensor],
        part: tuple[int, ...] = (),
        *,
        exact_sums: bool = True,
        puts_off: Callable[[Reduction], bool] | None = None,
    ) -> None:
        """grads: parameter index -> unsharded gradient; may be empty (nothing to reduce).

        part: the parameters that the plan means, where not all of the group.
        exact_sums: FSDP2's to the last bit, for which their numbers have to stand where FSDP2 has
        them. puts_off: asked when it is to be waited for, whether somebody else does so later.
        """
        self.live, self._part = live, part
        self._puts_off = puts_off
        self._exact_sums = exact_sums
        self._packing = packing_of(live, tuple(grads))
        self.work: dist.Work | None = None
        self._input: Sequence[Tensor] = ()
        if not grads:
            return
        with step_range(StepKind.REDUCE_ISSUE, self._names):
            self._issue(list(grads.values()))

    def _names(self) -> list[str]:
        return [f"{self.live.fqn} {list(self._part)}" if self._part else self.live.fqn]

    def _issue(self, grads: list[Tensor]) -> None:
        fsdp, comm = self.live.fsdp, self.live.fsdp.reduce_comm
        world, packing = fsdp.world_size, self._packing
        self._policy = policy = fsdp.reduce_policy(packing.params, grads)
        if world > 1:
            self.live.counters.reduce_scatters += 1
            note(self.live, (packing, policy.reduce_dtype), self._described)
        if self._may_stay(grads):
            with trying_in_place([self.live]):
                self._issue_in_place(grads)
                return
        packed = _pack(grads, packing, world, policy, comm)
        if world == 1:
            factor = fsdp.single_rank_divide_factor
            self._output = packed if factor is None else packed / factor
            return
        self._output = comm.allocate((packing.numel,), dtype=packed.dtype, device=packed.device)
        self._input = (packed,)
        self.work = reduce_scatter(self._output, packed, policy, fsdp.reduce_process_group, comm)

    def _described(self) -> str:
        """This reduce-scatter as the ranks compare it."""
        packing, dtype = self._packing, self._policy.reduce_dtype
        fqns = [param.fqn for param in packing.params]
        return f"reduce-scatter of {self.live.fqn} {fqns} ({dtype}, {packing.numel} a rank)"

    def _may_stay(self, grads: list[Tensor]) -> bool:
        """The reduction may take each gradient from where it is."""
        fsdp, policy = self.live.fsdp, self._policy
        return (
            sums_may_move(fsdp.world_size, exact=self._exact_sums)
            and fsdp.sends_in_place
            and fsdp.reduces_plainly
            and policy.predivide in (None, 1)
            and not self._packing.crosswise
            and all(grad.dtype == policy.reduce_dtype for grad in grads)
        )

    def _issue_in_place(self, grads: list[Tensor]) -> None:
        packing, group = self._packing, self.live.fsdp.reduce_process_group
        assert group is not None
        world, first = group.size(), grads[0]
        inputs = [
            _padded(grad, columns, world)
            for grad, columns in zip(grads, packing.columns, strict=True)
        ]
        output = torch.empty(packing.numel, dtype=first.dtype, device=first.device)
        outputs = list(output.split_with_sizes(packing.columns))
        self.work = reduce_in_place(outputs, inputs, self._policy, group)
        self._input, self._output = inputs, output

    def wait(self) -> None:
        """`complete`, now or later."""
        if self._packing.params and (self._puts_off is None or not self._puts_off(self)):
            self.complete()

    def complete(self) -> None:
        """Wait, then set or add to each `.grad` and run its hooks, in registration order."""
        with step_range(StepKind.REDUCE_WAIT, self._names):
            self.drain()
            if self._all_reduce():
                self._assign()
        del self._output  # the run remembers this object until it ends

    def _all_reduce(self) -> bool:
        """HSDP's second reduction. False if it is put off to a later micro-step."""
        live, output = self.live, self._output
        group = live.fsdp.replicate_process_group
        if group is None:
            return True
        partial = gradients.take_partial(live.fsdp, self._packing.params, output.dtype)
        if partial is not None:
            output.add_(partial)
        if not live.fsdp.all_reduces:
            gradients.leave_partial(live.fsdp, output)
            return False
        note(live, (self._packing, group), lambda: f"all-reduce of {live.fqn}")
        work = dist.all_reduce(output, group=group, op=self._policy.all_reduce_op, async_op=True)
        if work is not None:
            finish(work, NamedCollective("all-reduce", live, self._names, group))
        live.counters.all_reduces += 1
        return True

    def _assign(self) -> None:
        fsdp, output = self.live.fsdp, self._output
        fsdp.run_all_reduce_hook(output)
        if self._policy.postdivide not in (None, 1):
            output.div_(self._policy.postdivide)
        params, places = self._packing.params, self._packing.places
        dtypes = grad_dtypes(params)
        # One cast per dtype, as in FSDP2: gradients of one dtype share memory.
        flats = {dtype: output.to(dtype or output.dtype) for dtype in dict.fromkeys(dtypes)}
        rows = zip(dtypes, places, strict=True)
        local: Sequence[Tensor] = [flats[dtype].as_strided(*place) for dtype, place in rows]
        add_sharded_grads(params, self._on_host(local) if fsdp.is_on_host else local)

    def _on_host(self, local: Sequence[Tensor]) -> Sequence[Tensor]:
        """Copies of reduced gradients, which are there when backward ends. Who reads them before
        waits here: a sum with earlier ones, and hooks."""
        live, root = self.live, self.live.root
        copy = offload(live.fsdp.device, local, live.fqn, pins=pins_memory(live.fsdp.raw))
        sharded = [param.sharded for param in self._packing.params]
        is_read = any(one.grad is not None or hooks_of(one) for one in sharded)
        if is_read or root is None or current_task() < 0:
            copy.synchronize()
            return copy.targets
        if root.to_host:  # one group's reduced gradients are in the device's memory
            root.to_host[-1].wait()
        root.to_host.append(copy)
        return copy.targets

    @property
    def holds_input(self) -> bool:
        return bool(self._input)

    def drain(self, *, limit_s: float | None = None) -> None:
        """Wait for the collective, if any, and free its input."""
        if self.work is not None:
            group = self.live.fsdp.reduce_process_group
            collective = NamedCollective("reduce-scatter", self.live, self._names, group)
            finish(self.work, collective, limit_s=limit_s)
            self.work = None
        self._input = ()

    def drop(self, *, limit_s: float | None = None) -> None:
        """Wait for the collective and throw its result away."""
        self.drain(limit_s=limit_s)


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


def reduce_in_place(
    outputs: list[Tensor], inputs: list[Tensor], policy: ReducePolicy, group: dist.ProcessGroup
) -> dist.Work:
    """Asynchronous reduce-scatter of each input into the output at its place, as one collective."""
    options = dist.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = policy.scatter_op, True
    return group.reduce_scatter_tensor_coalesced(outputs, inputs, options)


def _pack(
    grads: Sequence[Tensor], packing: Packing, world: int, policy: ReducePolicy, comm: Any
) -> Tensor:
    """Rank-major flat input of the reduce-scatter in the reduction dtype, padded per parameter."""
    rows = list(grads)
    for at in packing.crosswise if world > 1 else ():
        rows[at] = packing.params[at].by_rank(rows[at], world)
    size, device = (world * packing.numel,), rows[0].device
    packed: Tensor = comm.allocate(size, dtype=policy.reduce_dtype, device=device)
    if len({row.dtype for row in rows}) > 1:
        rows = [row.to(policy.reduce_dtype) for row in rows]
    torch._chunk_cat(rows, dim=0, num_chunks=world, out=packed.view(world, -1))
    if policy.predivide not in (None, 1):
        packed.div_(policy.predivide)
    return packed


def _padded(grad: Tensor, columns: int, world: int) -> Tensor:
    """`grad`, flat, as it is where it needs no padding; `columns` elements for each rank."""
    if grad.numel() == world * columns and grad.is_contiguous():
        return grad.view(-1)
    packed = grad.new_empty(world * columns)
    torch._chunk_cat([grad], dim=0, num_chunks=world, out=packed.view(world, -1))
    return packed


def collect(
    live: LiveGroup, grads: Mapping[int, Tensor], part: tuple[int, ...]
) -> Mapping[int, Tensor]:
    """What is to be reduced now that `grads` have come: nothing while more is to come.

    part: the parameters that this is about; empty: all of the group.
    """
    about = part or live.places
    if live.arrived and live.arrived_in != current_task():
        live.arrived = {}
    before = {i: live.arrived.pop(i) for i in about if i in live.arrived}
    grads = merge(before, live.fsdp.as_autograd_gives(grads))
    if more_calls_ahead(live):
        live.arrived.update(grads)
        live.arrived_in = current_task()
        return {}
    if live.fsdp.reduces:
        return merge_unreduced(live.fsdp, grads, about)
    keep_unreduced(live, grads)
    return {}


def merge(first: Mapping[int, Tensor], second: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    """Sums by parameter index, in autograd's order of addition."""
    if not first:
        return second
    total = dict(first)
    for index, grad in second.items():
        total[index] = total[index] + grad if index in total else grad
    return dict(sorted(total.items()))


def merge_unreduced(
    fsdp: FsdpGroup, grads: Mapping[int, Tensor], about: Sequence[int]
) -> dict[int, Tensor]:
    """Add to `grads` what earlier micro-steps left unreduced of parameters `about`, compiled or
    eager.

    Returns all (local) gradients by parameter index in packing order; clears what it takes.
    """
    merged = dict(merge(gradients.take_all_unreduced(fsdp, about), grads))
    if fsdp.has_dtensors:
        merged = {i: fsdp.params[i].local_gradient(grad) for i, grad in merged.items()}
    for index in gradients.reduced_as_zeros(fsdp):
        if index in about and index not in merged:
            param = fsdp.params[index]
            merged[index] = torch.zeros(param.size, dtype=param.dtype, device=fsdp.device)
    if fsdp.reduces_unused:
        gradients.mark_gathered(fsdp)
    gradients.nothing_unreduced(fsdp)
    return {index: merged[index] for index in fsdp.reduce_order() if index in merged}


def keep_unreduced(live: LiveGroup, grads: Mapping[int, Tensor]) -> None:
    """`set_requires_gradient_sync(False)`: leave unsharded gradients with FSDP2."""
    for index, grad in grads.items():
        param = live.fsdp.params[index]
        before = gradients.take_unreduced(param.raw)
        accumulated = param.as_accumulated(grad if before is None else before + grad)
        # A gradient may share memory with another tensor of the graph (an expanded sum).
        gradients.leave_unreduced(
            live.fsdp, param, copy_of(accumulated) if accumulated is grad else accumulated
        )
