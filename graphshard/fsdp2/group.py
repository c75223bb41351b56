"""A live view of one FSDP2 parameter group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from graphshard.errors import RuntimeStateError
from graphshard.fsdp2 import cpu_offload, extensions, versions
from graphshard.fsdp2.backends import CLONING_BACKENDS, COPYING_BACKENDS, backend_name
from graphshard.fsdp2.param import FsdpParam
from graphshard.schedule.plan import Direction

version_of = attrgetter("_version")
_TRAINABLE = attrgetter("sharded_param.requires_grad")


def fsdp_groups(state: FSDPState) -> list[FsdpGroup]:
    """The parameter groups of one state (none if all its parameters belong to children)."""
    if versions.PARAM_GROUPS_ARE_A_LIST:
        raws = state._fsdp_param_groups
        names = _mesh_names(raws)
        return [FsdpGroup(raw, state, name) for raw, name in zip(raws, names, strict=True)]
    return [FsdpGroup(state._fsdp_param_group, state)] if state._fsdp_param_group else []


def _mesh_names(raws: Sequence[Any]) -> Sequence[str]:
    """What tells the groups of one `fully_shard` call apart: names of mesh dims, if they do."""
    if len(raws) == 1:
        return [""]
    names = [", ".join(raw.mesh_info.mesh.mesh_dim_names or ()) for raw in raws]
    distinct = len(set(names)) == len(names) and all(names)
    return names if distinct else [f"mesh {number}" for number in range(1, len(raws) + 1)]


@dataclass(frozen=True, slots=True)
class ReducePolicy:
    """How one group reduces now. Factors and ops are FSDP2's own."""

    reduce_dtype: torch.dtype
    predivide: float | None
    postdivide: float | None
    scatter_op: Any
    all_reduce_op: Any


class FsdpGroup:
    """A live view of one FSDPParamGroup.

    has_dtensors: of parameters before `fully_shard`. has_extensions: all-gather extensions, which
    say what travels. sends_in_place: one collective of the backend takes many tensors from where
    they are, until it says that it cannot. is_on_host: its shards, their gradients and what the
    optimizer makes of them are in the host's memory, not the device's.
    """

    __slots__ = (
        "__weakref__",
        "has_dtensors",
        "has_extensions",
        "is_on_host",
        "mesh_name",
        "params",
        "raw",
        "sends_in_place",
        "state",
    )

    def __init__(self, raw: Any, state: FSDPState, mesh_name: str = "") -> None:
        self.raw = raw
        self.mesh_name = mesh_name
        self.state = state
        self.params = tuple(FsdpParam(p) for p in raw.fsdp_params)
        self.has_dtensors = any(p.is_dtensor for p in raw.fsdp_params)
        self.has_extensions = any(map(extensions.has_extensions, raw.fsdp_params))
        self.is_on_host = cpu_offload.is_on_host(raw)
        backend = backend_name(self.gather_process_group, self.device)
        self.sends_in_place = backend is not None and backend not in COPYING_BACKENDS

    @property
    def clones(self) -> bool:
        """The backend has a copy of what it gathers or reduces, until that is done."""
        return backend_name(self.reduce_process_group, self.device) in CLONING_BACKENDS

    @property
    def fqn(self) -> str:
        """Module FQN from the root ("" for the root itself, "a, b" for grouped modules).

        With the name of its mesh where parameters of these modules have several.
        """
        module_fqn: str = self.raw._module_fqn or ""
        return self.name_among(module_fqn or "(root)") if self.mesh_name else module_fqn

    def name_among(self, modules: str) -> str:
        """`modules`, and the name of its mesh where their parameters have several."""
        return f"{modules} [{self.mesh_name}]" if self.mesh_name else modules

    @property
    def trainable(self) -> tuple[bool, ...]:
        """For each parameter, whether it requires grad now. Cheap: read before every call."""
        return tuple(map(_TRAINABLE, self.raw.fsdp_params))

    @property
    def world_size(self) -> int:
        """Ranks over which parameters are sharded; 1 if the mesh only replicates."""
        return int(self.raw.mesh_info.shard_mesh_size) if self._shards else 1

    @property
    def mesh_ranks(self) -> tuple[int, ...]:
        """Global ranks of the data-parallel mesh, replicas included, in rising order."""
        return tuple(sorted(self.raw.mesh_info.mesh.mesh.flatten().tolist()))

    @property
    def _shards(self) -> bool:
        return isinstance(self.raw.mesh_info, _fsdp_common.FSDPMeshInfo)

    @property
    def device(self) -> torch.device:
        return self.raw.device  # type: ignore[no-any-return]

    @property
    def gather_process_group(self) -> dist.ProcessGroup | None:
        """None if the mesh only replicates."""
        return self.raw.mesh_info.shard_process_group if self._shards else None

    @property
    def reduce_process_group(self) -> dist.ProcessGroup | None:
        if not self._shards:
            return None
        return self.raw._reduce_scatter_process_group  # type: ignore[no-any-return]

    @property
    def reshard_after_forward(self) -> bool:
        return bool(self.raw._reshard_after_forward)

    @property
    def reshard_is_automatic(self) -> bool:
        """The user left `reshard_after_forward` at None and never set it since."""
        return bool(self.state._auto_reshard_after_forward)

    @property
    def reshard_after_backward(self) -> bool:
        return bool(self.raw.reshard_after_backward)

    @property
    def stays_after_backward(self) -> bool:
        """FSDP2 gathers it before its backward (`set_unshard_in_backward`) and then keeps it."""
        return not self.reshard_after_backward and bool(self.raw.unshard_in_backward)

    @property
    def reduces(self) -> bool:
        """`set_requires_gradient_sync`."""
        return bool(self.raw.reduce_grads)

    @property
    def reduces_unused(self) -> bool:
        """`set_reduce_scatter_unused_params` (torch >= 2.13)."""
        return versions.MAY_REDUCE_UNUSED and bool(self.raw.reduce_scatter_unused_params)

    def reduce_order(self) -> Sequence[int]:
        """Parameter indices in the order in which FSDP2 packs their gradients.

        Registration order; torch 2.15 puts parameters of one dtype together.
        """
        known: Sequence[int] = ()
        if versions.GRADS_HAVE_DTYPES:
            known = self.raw._reduce_scatter_param_indices
        return known or range(len(self.params))

    def reduce_dtype(self, params: Sequence[FsdpParam], grads: Sequence[Tensor]) -> torch.dtype:
        """The dtype on the wire for these gradients.

        Raises RuntimeStateError where FSDP2 refuses gradients of several dtypes (torch < 2.15).
        """
        if versions.GRADS_HAVE_DTYPES:
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
        """The all-reduce group of HSDP, or of a mesh that only replicates; else None."""
        if not isinstance(self.raw.mesh_info, _fsdp_common.DDPMeshInfo):
            return None
        return self.raw._all_reduce_process_group  # type: ignore[no-any-return]

    @property
    def replicas(self) -> int:
        """Ranks that all-reduce what this one has reduced; 1 where nothing is replicated."""
        group = self.replicate_process_group
        return 1 if group is None else group.size()

    @property
    def all_reduces(self) -> bool:
        """`set_requires_all_reduce`."""
        return bool(self.raw.all_reduce_grads)

    @property
    def gather_comm(self) -> Any:
        """FSDP2's AllGather: its own, or one set by `set_custom_all_gather` and the like."""
        return self.raw._all_gather_comm

    @property
    def gather_comm_kind(self) -> object:
        """Equal for groups of which either's `gather_comm` may serve both: FSDP2's has no state."""
        comm = self.gather_comm
        return type(comm) if type(comm) is _fsdp_collectives.DefaultAllGather else comm

    @property
    def gathers_plainly(self) -> bool:
        """FSDP2's own collective, over the same ranks in forward and backward."""
        return isinstance(self.gather_comm_kind, type) and self.post_forward_process_group is None

    @property
    def gathers_in_place(self) -> bool:
        """An all-gather may go from and to where the parameters are."""
        return self.sends_in_place and self.gathers_plainly

    @property
    def reduces_plainly(self) -> bool:
        """FSDP2's own reduce-scatter."""
        return type(self.reduce_comm) is _fsdp_collectives.DefaultReduceScatter

    @property
    def reduces_alone(self) -> bool:
        """A gradient is done when FSDP2's own reduce-scatter is: no all-reduce, no hook on it."""
        if self.has_all_reduce_hook or self.replicate_process_group is not None:
            return False
        return self.reduces_plainly

    @property
    def has_all_reduce_hook(self) -> bool:
        """`set_all_reduce_hook`."""
        return self.raw._all_reduce_hook is not None

    @property
    def reduce_comm(self) -> Any:
        """FSDP2's ReduceScatter: its own, or one set by `set_custom_reduce_scatter`."""
        return self.raw._reduce_scatter_comm

    def wait_for_optimizer(self) -> None:
        """`set_post_optim_event`: gathers wait for the optimizer's event, once."""
        context = self.state._state_ctx
        event = context.post_optim_event
        if event is not None:
            context.post_optim_event = None
            self.raw.device_handle.current_stream().wait_event(event)

    @property
    def reduce_input_cap(self) -> int | None:
        """`set_reduce_scatter_max_input_buffers` (torch >= 2.13), None if left at FSDP2's 1."""
        if not versions.MAY_CAP_REDUCE_INPUTS:
            return None
        cap: int = self.state._comm_ctx.reduce_scatter_max_input_buffers
        return cap if cap > 1 else None

    @property
    def keeps_storage(self) -> bool:
        """`set_keep_unsharded_storage` (torch >= 2.15): gathered memory stays in place."""
        return versions.MAY_KEEP_STORAGE and any(p.raw.keep_unsharded_storage for p in self.params)

    def shards(self) -> list[Tensor]:
        """This rank's padded data of every parameter, in registration order.

        One-dimensional, in the parameter's own dtype, without gradient.
        """
        return [p._sharded_param_data for p in self.raw.fsdp_params]

    def versions(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Changes when any shard is written to (by an optimizer, say) or replaced.

        An operation on the DTensor counts on the DTensor, one on its local tensor only there.
        Inference tensors count nothing.
        """
        params = [p.sharded_param for p in self.raw.fsdp_params]
        locals_ = [p._local_tensor for p in params]
        if self.has_extensions:
            locals_ = [t for local in locals_ for t in extensions.plain_tensors(local)]
        params += locals_
        try:
            counts = tuple(map(version_of, params))
        except RuntimeError:
            counts = tuple(0 if t.is_inference() else t._version for t in params)
        return tuple(map(Tensor.data_ptr, locals_)), counts

    def as_autograd_gives(self, grads: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """Gradients by parameter index, as leaves of this torch would receive them."""
        if not versions.GRADS_HAVE_DTYPES:
            return grads
        return {i: self.params[i].as_autograd_gives(grad) for i, grad in grads.items()}

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

    def read_extensions(self) -> None:
        """Ask all-gather extensions what they send and make of it, once, on all ranks together.

        FSDP2 is SHARDED afterwards. Raises what they raise, and TypeError for what cannot be
        traced.
        """
        if not self.has_extensions:
            return
        if not self.is_sharded:
            self.unsharded()
            self.reshard()
        for param in self.params:
            if extensions.has_extensions(param.raw):
                read = extensions.read_extension(param.raw, self.world_size)
                param.extension, param.spare_leaf = read

    def unsharded(self) -> list[Tensor] | None:
        """Each parameter that FSDP2 has gathered itself (`unshard()`, say), or None.

        Flat, the shard of one rank after that of the other. It may be FSDP2's own memory: to be
        copied before `reshard` gives it back. Of a parameter with extensions, bytes.
        """
        if self.raw._all_gather_result is not None:
            self.raw.wait_for_unshard()
        if not self.raw.is_unsharded:
            return None
        return [param.gathered(self.world_size) for param in self.params]

    @property
    def was_gathered(self) -> bool:
        """FSDP2 itself has gathered the group at least once."""
        return any(hasattr(p.raw, "_unsharded_param") for p in self.params)

    @property
    def is_at_work(self) -> bool:
        """FSDP2's own forward of the group is under way, around a registered method, say; or its
        backward, of a list's module that ran outside of the graphs."""
        return self.raw._training_state in (
            _fsdp_common.TrainingState.FORWARD,
            _fsdp_common.TrainingState.PRE_BACKWARD,
        )

    @property
    def is_sharded(self) -> bool:
        """And FSDP2 is not about to gather it."""
        return self.raw._all_gather_result is None and bool(self.raw.is_sharded)

    def reshard(self) -> None:
        """Back to the SHARDED state, DTensors registered."""
        self.raw._to_sharded()
        for param in self.params:
            param.raw._setattr_on_modules(param.raw.sharded_param)
