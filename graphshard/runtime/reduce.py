"""Reduce-scatter of one group's gradients, and its all-reduce over replicas: issue, wait, hand over
to `.grad`.

The all-reduce of HSDP is issued when the reduce-scatter is waited for, and itself waited for when
the plan says so, so that compute goes on meanwhile. Packing order, reduction dtype, divide factors
and the order of casts are FSDP2's, so that the result is bitwise the same. Where it need not be, or
where two numbers are added, which is the same in any place, a backend that can takes each gradient
from where it is, and nothing is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.fsdp2 import FsdpParam, ReducePolicy, gradients
from graphshard.fsdp2.cpu_offload import pins_memory
from graphshard.fsdp2.param import add_sharded_grads, grad_dtypes, hooks_of
from graphshard.fsdp2.settings import sums_may_move
from graphshard.runtime.calls import current_task
from graphshard.runtime.host_copies import offload
from graphshard.runtime.issued import note
from graphshard.runtime.live import LiveGroup
from graphshard.runtime.ranges import step_range
from graphshard.runtime.waiting import NamedCollective, Work, finish, trying_in_place
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
    """One reduce-scatter, from issue until the sharded gradients are assigned, or given to the
    all-reduce over replicas (`AllReduce`) that follows."""

    __slots__ = (
        "_exact_sums", "_input", "_output", "_packing", "_part", "_policy", "_puts_off",
        "is_put_off", "live", "work",
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
        them. puts_off: asked when it is to be waited for, whether somebody else does so later
        (`is_put_off`).
        """
        self.live, self._part = live, part
        self._puts_off, self.is_put_off = puts_off, False
        self._exact_sums = exact_sums
        self._packing = packing_of(live, tuple(grads))
        self.work: dist.Work | None = None
        self._input: Sequence[Tensor] = ()
        if not grads:
            return
        with step_range(StepKind.REDUCE_ISSUE, self.names):
            self._issue(list(grads.values()))

    def names(self) -> list[str]:
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

    def wait(self) -> Reduction:
        """Now or later; then set or add to each `.grad` and run its hooks, in registration order.
        Over replicas that is left to the all-reduce."""
        if self._packing.params:
            self.is_put_off = self._puts_off is not None and self._puts_off(self)
            if not self.is_put_off:
                self._wait()
        return self

    def _wait(self) -> None:
        with step_range(StepKind.REDUCE_WAIT, self.names):
            self.drain()
            if self.live.fsdp.replicate_process_group is None:
                self.assign(self._take_output())

    def go_on(self) -> AllReduce:
        """What was put off: wait for it now. What goes on then has still to be completed."""
        self.is_put_off = False
        self._wait()
        return AllReduce(self)

    def complete(self) -> None:
        """All of it, now."""
        if self._packing.params:
            self.go_on().complete()

    def all_reduce(self) -> tuple[Tensor, Work | None] | None:
        """Issue HSDP's second reduction. Returns what it works on; None if there is none, or if it
        is left to a later micro-step."""
        group = self.live.fsdp.replicate_process_group
        if self.is_put_off or not self._packing.params or group is None:
            return None
        with step_range(StepKind.ALL_REDUCE_ISSUE, self.names):
            return self._issue_all_reduce(group)

    def _issue_all_reduce(self, group: dist.ProcessGroup) -> tuple[Tensor, Work | None] | None:
        live, output = self.live, self._take_output()
        partial = gradients.take_partial(live.fsdp, self._packing.params, output.dtype)
        if partial is not None:
            output.add_(partial)
        if not live.fsdp.all_reduces:
            gradients.leave_partial(live.fsdp, output)
            return None
        note(live, (self._packing, group), lambda: f"all-reduce of {live.fqn}")
        work = dist.all_reduce(output, group=group, op=self._policy.all_reduce_op, async_op=True)
        live.counters.all_reduces += 1
        return output, work

    def _take_output(self) -> Tensor:
        """The run remembers this object until it ends."""
        output = self._output
        del self._output
        return output

    def assign(self, output: Tensor) -> None:
        """output: all reduced."""
        fsdp = self.live.fsdp
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
    def is_read_early(self) -> bool:
        """Hooks, or copies to the host, take gradients as soon as they are there."""
        sharded = (param.sharded for param in self._packing.params)
        return self.live.fsdp.is_on_host or any(map(hooks_of, sharded))

    @property
    def holds_input(self) -> bool:
        return bool(self._input)

    def drain(self, *, limit_s: float | None = None) -> None:
        """Wait for the collective, if any, and free its input."""
        if self.work is not None:
            group = self.live.fsdp.reduce_process_group
            collective = NamedCollective("reduce-scatter", self.live, self.names, group)
            finish(self.work, collective, limit_s=limit_s)
            self.work = None
        self._input = ()

    def drop(self, *, limit_s: float | None = None) -> None:
        """Wait for the collective and throw its result away."""
        self.drain(limit_s=limit_s)


class AllReduce:
    """HSDP's all-reduce of what a reduction left, from issue until gradients are assigned.

    Nothing, where that reduction is put off, or leaves a part to a later micro-step.
    puts_off: asked when it is to be waited for, whether somebody else does so later.
    """

    __slots__ = ("_output", "_puts_off", "_reduction", "work")

    def __init__(
        self, reduction: Reduction, *, puts_off: Callable[[AllReduce], bool] | None = None
    ) -> None:
        self._reduction, self._puts_off = reduction, puts_off
        self._output: Tensor | None = None
        self.work: Work | None = None
        if (issued := reduction.all_reduce()) is not None:
            self._output, self.work = issued

    @property
    def is_under_way(self) -> bool:
        return self._output is not None

    def wait(self) -> None:
        """`complete`, now or later."""
        if self._output is None or self._puts_off is None or not self._puts_off(self):
            self.complete()

    def complete(self) -> None:
        """Wait, then set or add to each `.grad` and run its hooks, in registration order."""
        output, self._output = self._output, None
        if output is not None:
            with step_range(StepKind.ALL_REDUCE_WAIT, self._reduction.names):
                self._drain()
                self._reduction.assign(output)

    def _drain(self, *, limit_s: float | None = None) -> None:
        work, self.work = self.work, None
        if work is not None:
            reduction = self._reduction
            group = reduction.live.fsdp.replicate_process_group
            collective = NamedCollective("all-reduce", reduction.live, reduction.names, group)
            finish(work, collective, limit_s=limit_s)

    def drop(self, *, limit_s: float | None = None) -> None:
        """Wait for the collective and throw its result away."""
        self._output = None
        self._drain(limit_s=limit_s)


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
