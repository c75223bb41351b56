"""FSDP1's arguments and a module in; the module sharded in place, and what was done in words, out.

Everything is translated, and refused where that is due, before anything is changed. Modules are
sharded children first; each is filled, broadcast and cast right before, as FSDP1 does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, ShardingStrategy, fully_shard

from graphshard.errors import MigrateError
from graphshard.fsdp2 import cast_inputs, state_of
from graphshard.migrate.arguments import (
    HYBRID,
    KEPT,
    Arguments,
    Call,
    casts_inputs,
    check,
    notes,
    translated,
)
from graphshard.migrate.code import Sharded, buffer_line, lines_of
from graphshard.migrate.meshes import Placed, device_type_of, mesh_for
from graphshard.migrate.policies import Ignored, WrapUnit, units_of
from graphshard.migrate.prepare import broadcast, cast_buffers, materialize, own_modules
from graphshard.migrate.record import Migrated, recorded, remember

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One `fully_shard` call that is to be made."""

    unit: WrapUnit
    call: Call
    placed: Placed
    mesh_name: str
    ignores: bool

    @property
    def sharded(self) -> Sharded:
        mesh = "" if self.placed.line is None else self.mesh_name
        return Sharded(self.unit.fqn, self.call, mesh, self.ignores)


def shard(root: nn.Module, arguments: Arguments, policy: Any, ignored: Ignored) -> None:
    """Shard `root` and what `policy` chooses in it; rank 0 logs the code that does the same.

    Raises MigrateError (GS1002 to GS1007), before anything is changed except where a module on the
    meta device cannot be filled.
    """
    _check_unsharded(root, policy)
    jobs = _jobs(root, arguments, policy, ignored)
    names = {id(p): name for name, p in root.named_parameters()}
    kept = [names[id(p)] for p in ignored.params if id(p) in names]
    inner, kind = recorded(root), type(root).__name__
    said = list(dict.fromkeys(note for job in jobs for note in notes(job.unit.arguments)))
    buffers: list[str] = []
    for job in jobs:
        more, casts = _run(root, job, ignored)
        said += [note for note in more if note not in said]
        buffers += casts
    said += _settle_inner(root, inner)
    setup = dict.fromkeys(_named(job) for job in jobs if job.placed.line is not None)
    code = [
        *(f"# {n}" for n in said),
        *lines_of(root, [j.sharded for j in jobs], list(setup), kept),
    ]
    record = _record(jobs[-1], "\n".join([*code, *buffers]))
    remember(root, record)
    if dist.get_rank() == 0:
        # A warning, because it has to be seen without any configuration of logging.
        text = (record.code or "").replace("\n", "\n    ")
        logger.warning(
            "FullyShardedDataParallel(%s) did what these lines do:\n    %s",
            kind,
            text,
        )


def _check_unsharded(root: nn.Module, policy: Any) -> None:
    """FSDP1's rule: what a policy chooses from is not sharded yet, nor is the module itself."""
    looked = list(root.named_modules()) if policy is not None else [("", root)]
    found = next((name for name, m in looked if isinstance(m, FSDPModule)), None)
    if found is not None:
        what = repr(found) if found else "the module itself"
        raise MigrateError(
            "GS1007",
            f"{what} is sharded already"
            + (": an auto_wrap_policy takes a model without sharded modules" if found else ""),
        )


def _jobs(root: nn.Module, arguments: Arguments, policy: Any, ignored: Ignored) -> list[Job]:
    check(arguments)
    units = units_of(root, policy, arguments, ignored)
    types = [device_type_of(unit.arguments) for unit in units]
    calls = [
        translated(unit.arguments, kind, is_root=unit is units[-1], apart=unit.apart)
        for unit, kind in zip(units, types, strict=True)
    ]
    meshes: dict[tuple[object, ...], Placed] = {}
    kept = {id(p) for p in ignored.params}
    jobs = []
    for unit, kind, call in zip(units, types, calls, strict=True):
        key = (kind, *_mesh_key(unit.arguments))
        if key not in meshes:  # one for all that ask for the same: making one makes process groups
            meshes[key] = mesh_for(unit.arguments, kind, has_policy=policy is not None)
        place = list(meshes).index(key)
        ignores = any(id(p) in kept for p in unit.module.parameters())
        jobs.append(Job(unit, call, meshes[key], f"mesh_{place}" if place else "mesh", ignores))
    return jobs


def _mesh_key(arguments: Arguments) -> tuple[object, ...]:
    strategy = arguments.sharding_strategy
    kind = "hybrid" if strategy in HYBRID else strategy is ShardingStrategy.NO_SHARD
    return id(arguments.process_group), id(arguments.device_mesh), kind


def _named(job: Job) -> str:
    assert job.placed.line is not None
    return job.placed.line.replace("mesh", job.mesh_name, 1)


def _run(root: nn.Module, job: Job, ignored: Ignored) -> tuple[list[str], list[str]]:
    """Do it. Returns notes on what had to be done before, and lines that cast buffers."""
    unit, arguments, mesh = job.unit, job.unit.arguments, job.placed.mesh
    own = own_modules(unit.module, ignored.modules)
    device = _device(mesh.device_type)
    said, casts = [], []
    if materialize(own, device, arguments.param_init_fn, ignored.params):
        said.append(
            "meta device: filled before sharding, as FSDP1 does; with fully_shard alone, call "
            "model.to_empty(device=...) and model.reset_parameters() after it"
        )
    if arguments.sync_module_states:
        broadcast(own, mesh, device, ignored.params)
        said.append(
            "sync_module_states: broadcast before sharding; with fully_shard alone, "
            "set_model_state_dict with StateDictOptions(full_state_dict=True, "
            "broadcast_from_rank0=True)"
        )
    if job.call.buffer_dtype is not None:
        paths = {module: name for name, module in root.named_modules()}
        names = cast_buffers({paths[m]: m for m in own}, job.call.buffer_dtype)
        casts += [buffer_line(names, job.call.buffer_dtype)] if names else []
    keywords: dict[str, Any] = {"mesh": mesh, **job.call.keywords}
    if job.ignores:
        keywords["ignored_params"] = set(ignored.params)
    sharded = fully_shard(unit.module, **keywords)
    if not job.call.prefetches:
        # A list that names only itself: already gathered then, so nothing is gathered early.
        sharded.set_modules_to_backward_prefetch([sharded])
    remember(unit.module, _record(job, None))
    return said, casts


def _device(device_type: str) -> torch.device:
    """The one that `fully_shard` takes for a mesh of this type."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def _record(job: Job, code: str | None) -> Migrated:
    arguments = job.unit.arguments
    mixed = arguments.mixed_precision
    differs = mixed is not None and mixed.cast_forward_inputs != mixed.cast_root_forward_inputs
    return Migrated(
        casts_inside=casts_inputs(mixed, is_root=False) if mixed is not None and differs else None,
        keeps=arguments.sharding_strategy in KEPT,
        code=code,
    )


def _settle_inner(root: nn.Module, inner: Sequence[tuple[nn.Module, Migrated]]) -> list[str]:
    """What was a root when it was sharded is inside now: FSDP1's rule for inputs is another."""
    names = {module: name for name, module in root.named_modules()}
    said = []
    for module, record in inner:
        if record.casts_inside is None or record.code is None:
            continue
        cast_inputs(state_of(module), record.casts_inside)
        remember(module, replace(record, casts_inside=None))
        said.append(
            f"{names[module]}: cast_forward_inputs={record.casts_inside} from now on, as FSDP1 "
            "sets it inside another module"
        )
    return said
