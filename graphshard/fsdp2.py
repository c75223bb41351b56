"""The one module that reads FSDP2's private state (torch 2.11 to 2.15).

Everything else sees `FsdpParam` and `FsdpGroup`: thin views whose attributes are read live, so
that a setting changed by the user between two steps takes effect at the next use, as in FSDP2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from graphshard.errors import RuntimeStateError
from graphshard.plan import Direction

State = FSDPState
ShardedModule = FSDPModule
TrainingState = _fsdp_common.TrainingState


def states_under(root: nn.Module) -> list[FSDPState]:
    """The FSDP states in `root`'s module tree, each once, in `named_modules` order."""
    found = (state_of(m) for m in root.modules() if isinstance(m, FSDPModule))
    return list(dict.fromkeys(found))


def state_of(module: nn.Module) -> FSDPState:
    """The state that `fully_shard` attached to `module`."""
    return module._get_fsdp_state()  # type: ignore[operator, no-any-return]


def modules_of(state: FSDPState) -> tuple[nn.Module, ...]:
    """The modules that one `fully_shard` call put together."""
    return state._modules


def siblings(state: FSDPState) -> list[FSDPState]:
    """All states of the same root; `lazy_init` must have run."""
    return list(dict.fromkeys(state._state_ctx.all_states))  # 2.11 lists grouped ones twice


def is_root(state: FSDPState) -> bool:
    return bool(state._is_root)


def lazy_init(state: FSDPState) -> None:
    """FSDP2's own lazy initialisation, which finds the root, names and validates parameters.

    Raises what FSDP2 raises (a parameter shared between groups, parameters on meta, ...).
    """
    state._lazy_init()


def fsdp_groups(state: FSDPState) -> list[FsdpGroup]:
    """The parameter groups of one state (none if all its parameters belong to children)."""
    groups = getattr(state, "_fsdp_param_groups", None)  # torch >= 2.13
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return [FsdpGroup(g, state) for g in groups]


@dataclass(frozen=True, slots=True)
class CastPolicy:
    """The parts of a MixedPrecisionPolicy that act on activations."""

    input_dtype: torch.dtype | None
    output_dtype: torch.dtype | None


def cast_policy(state: FSDPState) -> CastPolicy:
    policy = state._mp_policy
    cast_inputs = policy.cast_forward_inputs and policy.param_dtype is not None
    return CastPolicy(policy.param_dtype if cast_inputs else None, policy.output_dtype)


def device_of(state: FSDPState) -> torch.device:
    return state._device


@dataclass(frozen=True, slots=True)
class Slot:
    """One place in a module where a parameter is registered."""

    module: nn.Module
    name: str


class FsdpParam:
    """A live view of one FSDPParam."""

    __slots__ = ("raw", "slots")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        info = raw._module_info
        shared = zip(info.shared_modules, info.shared_param_names, strict=True)
        self.slots = (Slot(info.module, info.param_name), *(Slot(m, n) for m, n in shared))

    @property
    def fqn(self) -> str:
        return str(self.raw._param_fqn or self.raw._module_info.param_name)

    @property
    def size(self) -> tuple[int, ...]:
        """Unsharded size."""
        return tuple(self.raw._orig_size)

    @property
    def padded_shard_size(self) -> tuple[int, ...]:
        """This rank's shard with FSDP2's padding; the same on every rank."""
        return tuple(self.raw.padded_sharded_param_size)

    @property
    def shard_dim(self) -> int:
        return int(self.raw.fsdp_placement.dim)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that compute sees: the policy's `param_dtype`, else the parameter's own."""
        return self.raw.param_dtype or self.raw.orig_dtype  # type: ignore[no-any-return]

    @property
    def shard(self) -> Tensor:
        """This rank's padded data, one-dimensional, in the parameter's own dtype, no gradient."""
        return self.raw._sharded_param_data  # type: ignore[no-any-return]

    @property
    def sharded(self) -> nn.Parameter:
        """The DTensor parameter that the optimizer sees."""
        return self.raw.sharded_param  # type: ignore[no-any-return]

    @property
    def version(self) -> tuple[int, int, int]:
        """Changes when the shard is written to (by an optimizer, say) or replaced.

        An operation on the DTensor counts on the DTensor, one on its local tensor only there.
        """
        param = self.raw.sharded_param
        local = param._local_tensor
        if local.is_inference():
            return local.data_ptr(), 0, 0
        return local.data_ptr(), param._version, local._version

    def take_eager_grad(self) -> Tensor | None:
        """The unsharded gradient that eager micro-steps left without reducing; cleared here."""
        grad = getattr(self.raw, "unsharded_accumulated_grad", None)
        if grad is not None:
            self.raw.unsharded_accumulated_grad = None
            return grad  # type: ignore[no-any-return]
        param = getattr(self.raw, "_unsharded_param", None)
        if param is None or param.grad is None:
            return None
        grad, param.grad = param.grad, None
        return grad  # type: ignore[no-any-return]

    def add_sharded_grad(self, local: Tensor) -> None:
        """Set or add to `.grad` and run the post-accumulate-grad hooks, as FSDP2 does.

        local: this rank's part of the reduced gradient, of the sharded size.
        """
        param = self.raw.sharded_param
        if param.grad is None:
            param.grad = self.raw.to_sharded_dtensor(local)
        else:
            param.grad._local_tensor += local
        for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(param)

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """Dtype of the sharded `.grad`; None leaves it in the reduction's dtype."""
        dtype = getattr(self.raw, "sharded_grad_dtype", self.raw.orig_dtype)  # torch >= 2.15
        return dtype  # type: ignore[no-any-return]

    def as_accumulated(self, grad: Tensor) -> Tensor:
        """`grad` in the dtype in which FSDP2 accumulates it over micro-steps without sync."""
        if hasattr(self.raw, "unsharded_grad_dtype"):  # torch >= 2.15
            dtype = self.raw.unsharded_grad_dtype
        else:
            dtype = self.raw.reduce_dtype
        return grad if dtype is None else grad.to(dtype)

    def as_autograd_gives(self, grad: Tensor) -> Tensor:
        """`grad` as a leaf of this torch would receive it: 2.15 narrows it at once."""
        dtype = getattr(self.raw, "unsharded_grad_dtype", None)
        narrow = dtype is not None and dtype.itemsize < grad.dtype.itemsize
        return grad.to(dtype) if narrow else grad

    @property
    def local_size(self) -> tuple[int, ...]:
        """Size of this rank's part without padding."""
        return tuple(self.raw.sharded_size)

    @property
    def local_stride(self) -> tuple[int, ...]:
        return tuple(self.raw.contiguous_sharded_stride)


@dataclass(frozen=True, slots=True)
class ReducePolicy:
    """How one group reduces now. Factors and ops are FSDP2's own."""

    reduce_dtype: torch.dtype
    predivide: float | None
    postdivide: float | None
    scatter_op: Any
    all_reduce_op: Any


class FsdpGroup:
    """A live view of one FSDPParamGroup."""

    __slots__ = ("params", "raw", "state")

    def __init__(self, raw: Any, state: FSDPState) -> None:
        self.raw = raw
        self.state = state
        self.params = tuple(FsdpParam(p) for p in raw.fsdp_params)

    @property
    def fqn(self) -> str:
        """Module FQN from the root ("" for the root itself, "a, b" for grouped modules)."""
        return self.raw._module_fqn or ""

    @property
    def world_size(self) -> int:
        return int(self.raw.mesh_info.shard_mesh_size)

    @property
    def device(self) -> torch.device:
        return self.raw.device  # type: ignore[no-any-return]

    @property
    def gather_process_group(self) -> dist.ProcessGroup:
        return self.raw.mesh_info.shard_process_group  # type: ignore[no-any-return]

    @property
    def reduce_process_group(self) -> dist.ProcessGroup:
        return getattr(self.raw, "_reduce_scatter_process_group", None) or self.gather_process_group

    @property
    def reshard_after_forward(self) -> bool:
        return bool(self.raw._reshard_after_forward)

    @property
    def reshard_after_backward(self) -> bool:
        return bool(self.raw.reshard_after_backward)

    @property
    def reduces(self) -> bool:
        """`set_requires_gradient_sync`."""
        return bool(self.raw.reduce_grads)

    @property
    def reduces_unused(self) -> bool:
        """`set_reduce_scatter_unused_params` (torch >= 2.13)."""
        return bool(getattr(self.raw, "reduce_scatter_unused_params", False))

    def reduce_order(self) -> Sequence[int]:
        """Parameter indices in the order in which FSDP2 packs their gradients.

        Registration order; torch 2.15 puts parameters of one dtype together.
        """
        indices: Sequence[int] = getattr(self.raw, "_reduce_scatter_param_indices", ())
        return indices or range(len(self.params))

    def reduce_dtype(self, params: Sequence[FsdpParam], grads: Sequence[Tensor]) -> torch.dtype:
        """The dtype on the wire for these gradients.

        Raises RuntimeStateError where FSDP2 refuses gradients of several dtypes (torch < 2.15).
        """
        if hasattr(self.raw, "_get_reduce_dtype"):  # torch >= 2.15
            return self.raw._get_reduce_dtype([p.raw for p in params], list(grads))  # type: ignore[no-any-return]
        dtypes = {g.dtype for g in grads}
        if len(dtypes) > 1:
            names = ", ".join(sorted(map(str, dtypes)))
            raise RuntimeStateError("GS404", f"gradients of {self.fqn} have dtypes {names}")
        return self.raw._reduce_dtype or dtypes.pop()

    def reduce_policy(self, params: Sequence[FsdpParam], grads: Sequence[Tensor]) -> ReducePolicy:
        """Reduction dtype, divide factors and ops for these gradients."""
        reduce_dtype = self.reduce_dtype(params, grads)
        pre, post, scatter_op, all_reduce_op = _fsdp_collectives._get_gradient_divide_factors(
            self.reduce_process_group,
            self.replicate_process_group,
            reduce_dtype,
            self.device.type,
            self.raw.gradient_divide_factor,
            self.raw.force_sum_reduction_for_comms,
        )
        return ReducePolicy(reduce_dtype, pre, post, scatter_op, all_reduce_op)

    @property
    def single_rank_divide_factor(self) -> float | None:
        """On one rank FSDP2 skips the collective but keeps an explicit divide factor."""
        return self.raw.gradient_divide_factor  # type: ignore[no-any-return]

    @property
    def replicate_process_group(self) -> dist.ProcessGroup | None:
        """The all-reduce group of HSDP, or None."""
        if not isinstance(self.raw.mesh_info, _fsdp_common.HSDPMeshInfo):
            return None
        return self.raw._all_reduce_process_group  # type: ignore[no-any-return]

    @property
    def all_reduces(self) -> bool:
        """`set_requires_all_reduce`."""
        return bool(self.raw.all_reduce_grads)

    @property
    def gather_comm(self) -> Any:
        """FSDP2's AllGather: its own, or one set by `set_custom_all_gather` and the like."""
        return self.raw._all_gather_comm

    @property
    def reduce_comm(self) -> Any:
        """FSDP2's ReduceScatter: its own, or one set by `set_custom_reduce_scatter`."""
        return self.raw._reduce_scatter_comm

    def run_all_reduce_hook(self, output: Tensor) -> None:
        """`set_all_reduce_hook`, on its stream if one was given; the caller's stream waits."""
        hook, stream = self.raw._all_reduce_hook, self.raw._all_reduce_hook_stream
        if hook is None:
            return
        if stream is None or self.replicate_process_group is not None:
            hook(output)
            return
        current = self.raw.device_handle.current_stream()
        stream.wait_stream(current)
        with self.raw.device_handle.stream(stream):
            hook(output)
        current.wait_stream(stream)

    def prefetches(self, direction: Direction) -> Sequence[FSDPState]:
        """`set_modules_to_forward_prefetch` / `set_modules_to_backward_prefetch`, as states."""
        if direction is Direction.FORWARD:
            return self.state._states_to_forward_prefetch
        return self.state._states_to_backward_prefetch

    @property
    def post_forward_process_group(self) -> dist.ProcessGroup | None:
        """The smaller group of an int `reshard_after_forward`, or None."""
        if not self.raw._use_post_forward_mesh:
            return None
        return self.raw.post_forward_mesh_info.shard_process_group  # type: ignore[no-any-return]

    def take_unsharded(self) -> list[Tensor] | None:
        """A flat copy of each parameter that FSDP2 has gathered itself (`unshard()`, say).

        FSDP2's own memory is given back: the group is SHARDED afterwards. None if it was.
        """
        if self.raw._all_gather_result is not None:
            self.raw.wait_for_unshard()
        flats = None
        if self.raw.is_unsharded:
            flats = [p.raw.all_gather_outputs[0].clone() for p in self.params]
        if not self.raw.is_sharded:
            self.reshard()
        return flats

    @property
    def is_sharded(self) -> bool:
        return bool(self.raw.is_sharded)

    def reshard(self) -> None:
        """Back to the SHARDED state, DTensors registered."""
        self.raw._to_sharded()
        for param in self.params:
            param.raw._setattr_on_modules(param.raw.sharded_param)

    def unsupported(self) -> str | None:
        """Why this group has to run through eager FSDP2, or None. Checked in FSDP2's terms."""
        return next(_unsupported(self), None)


def _unsupported(group: FsdpGroup) -> Iterator[str]:
    raw = group.raw
    mesh = raw.mesh_info
    if len(fsdp_groups(group.state)) > 1:
        yield "its parameters use several meshes (ShardPlacementResult)"
    if not isinstance(mesh, _fsdp_common.FSDPMeshInfo):
        yield "its mesh replicates only"
    if isinstance(raw.offload_policy, CPUOffloadPolicy):
        yield "it uses CPUOffloadPolicy"
    for param in group.params:
        if param.shard_dim and raw.post_forward_mesh_info not in (None, mesh):
            yield f"{param.fqn} is not sharded on dim 0 and reshard_after_forward is an int"
        if param.raw.is_dtensor:
            yield f"{param.fqn} is a DTensor before sharding (tensor parallel)"
        if hasattr(param.raw._sharded_local_tensor, "fsdp_pre_all_gather"):
            yield f"{param.fqn} is a tensor subclass with all-gather extensions"
        for slot in param.slots:
            if type(slot.module).__setattr__ is not nn.Module.__setattr__:
                yield f"{type(slot.module).__name__} of {param.fqn} overrides __setattr__"


def is_mid_iteration(state: FSDPState) -> bool:
    """FSDP2's own (eager) state machine is between the start and the end of a step."""
    return (
        state._training_state is not TrainingState.IDLE
        or state._state_ctx.iter_forward_root is not None
        or state._state_ctx.post_backward_final_callback_queued
    )


def reset_iteration(states: Sequence[FSDPState]) -> None:
    """Drop what an exception left in FSDP2's eager state machine; all groups are SHARDED after.

    torch 2.11 and 2.12 have no `reset_iter_state`, so its parts are done here for them.
    """
    for state in states:
        if hasattr(state, "_reset_iter_state"):
            if is_root(state):
                state._reset_iter_state()
            continue
        context = state._state_ctx
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
        state._training_state = TrainingState.IDLE
        state._comm_ctx.all_gather_state = None
        state._comm_ctx.post_forward_order.clear()
        for group in fsdp_groups(state):
            _reset_group(group.raw)


def _reset_group(raw: Any) -> None:
    pending = raw._all_gather_result
    if pending is not None and isinstance(pending.all_gather_work, dist.Work):
        pending.all_gather_work.wait()
    raw._all_gather_result = None
    raw._post_forward_indices.clear()
    raw._training_state = TrainingState.IDLE
    raw._to_sharded()


def forward_hooks(state: FSDPState) -> Iterator[tuple[Callable[..., Any], bool]]:
    """FSDP2's hook functions of a grouped state (`fully_shard([a, b])`), which are closures.

    Yields (hook, is_pre): ordinary functions with `__wrapped__`, one pair per module.
    """
    if len(state._modules) == 1:
        return
    names = {"_pre_forward": True, "_post_forward": False}
    for module in state._modules:
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        for hook in hooks:
            inner = getattr(hook, "__wrapped__", None)
            is_pre = names.get(getattr(inner, "__name__", ""))
            if is_pre is not None and not isinstance(hook, functools.partial):
                yield hook, is_pre
