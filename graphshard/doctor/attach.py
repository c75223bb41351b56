"""Puts the doctor's observations into a process of the user's command.

`attach()` is called by a `sitecustomize` that `graphshard.doctor.launch` puts first on PYTHONPATH,
before anything of the script runs. True afterwards: torch's functions that FSDP2 users call are
watched; in all runs what is sharded is compiled for graphshard, which GRAPHSHARD_DISABLE takes out
of the eager one, and in whose place `aot_eager` stands in the one that is named after it; and the
random numbers of an unseeded script are the same in all.
"""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphshard.doctor.watch import StepWatch

MODE = "GRAPHSHARD_DOCTOR"
FOLDER = "GRAPHSHARD_DOCTOR_DIR"
STEPS = "GRAPHSHARD_DOCTOR_STEPS"
EAGER, OURS, AOT = "eager", "graphshard", "aot_eager"

# By the methods of a process group that torch.distributed, FSDP2 and graphshard's runtime call:
# the names of torch 2.13 and later, and the older ones.
COLLECTIVES = {
    "all_gather_single": "all_gathers",
    "all_gather_single_coalesced": "all_gathers",
    "_allgather_base": "all_gathers",
    "allgather_into_tensor_coalesced": "all_gathers",
    "reduce_scatter_single": "reduce_scatters",
    "reduce_scatter_single_coalesced": "reduce_scatters",
    "_reduce_scatter_base": "reduce_scatters",
    "reduce_scatter_tensor_coalesced": "reduce_scatters",
    "allgather": "other",
    "allreduce": "other",
    "allreduce_coalesced": "other",
    "alltoall": "other",
    "alltoall_base": "other",
    "broadcast": "other",
    "reduce_scatter": "other",
}


def attach() -> None:
    """Watch this process, if the doctor started it; then run the user's own sitecustomize."""
    _run_next_sitecustomize()
    mode = os.environ.get(MODE)
    if mode is None or "torch._inductor.compile_worker" in " ".join(sys.orig_argv):
        return
    from graphshard.doctor.watch import StepWatch

    watch = StepWatch(mode, Path(os.environ[FOLDER]), int(os.environ[STEPS]))
    _seed(int(os.environ.get("RANK", 0)))
    _patch_sharding(watch)
    _patch_compile(watch)
    _patch_training(watch)
    _patch_collectives(watch)
    _write_at_exit(watch)


def _run_next_sitecustomize() -> None:
    """Ours hides the one of the installation, which may set up what the script needs."""
    own = os.environ.get(FOLDER, "")
    paths = [path for path in sys.path if not own or Path(path) != Path(own) / "hook"]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _seed(rank: int) -> None:
    """A script that seeds itself does so later and wins."""
    import torch

    random.seed(rank)
    torch.manual_seed(rank)
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(rank)


def _patch_sharding(watch: StepWatch) -> None:
    import torch
    from torch.distributed import fsdp

    from graphshard.doctor import watch as seen
    from graphshard.doctor import whole

    original, compiles = fsdp.fully_shard, torch.compile  # as long as that is torch's own

    @functools.wraps(original)
    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        modules = list(module) if isinstance(module, list | tuple) else [module]
        seen.sharding(watch, modules)
        result = original(module, *args, **kwargs)
        seen.sharded(watch, modules)
        for one in modules:
            if watch.mode == EAGER:
                _watch_forward(watch, one)
            elif watch.mode == AOT:
                whole.compile_whole(watch, compiles, one)
            elif not watch.functions and not _is_compiled(watch, one):
                _compile_later(watch, one)
        return result

    for name, place in sorted(sys.modules.items()):
        if name.startswith("torch.distributed") and vars(place).get("fully_shard") is original:
            place.fully_shard = fully_shard  # type: ignore[attr-defined]


def _watch_forward(watch: StepWatch, module: Any) -> None:
    """In the eager run, where nothing traces it: a forward without FSDP2's hooks around it."""
    from graphshard import fsdp2

    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if fsdp2.is_idle(fsdp2.state_of(module)):
            watch.direct[module] = watch.direct.get(module, 0) + 1
        return original(*args, **kwargs)

    module.forward = forward


def _compile_later(watch: StepWatch, module: Any) -> None:
    """Compile the module at its first call if the script does not: it is in the place where
    `Module.compile` puts what it makes, which a call of the script overwrites."""

    def first_call(*args: Any, **kwargs: Any) -> Any:
        _forget_first_calls(module)
        if not _is_compiled(watch, module):
            module.compile(backend=OURS)
        return module(*args, **kwargs)

    first_call.__graphshard_doctor__ = True  # type: ignore[attr-defined]
    module._compiled_call_impl = first_call


def _is_compiled(watch: StepWatch, root: Any) -> bool:
    """The script compiled it, a part of it, or what it is in."""
    parts = dict.fromkeys(map(id, root.modules()))
    return any(
        id(module) in parts or any(root is inner for inner in module.modules())
        for module in watch.compiled
    )


def _forget_first_calls(root: Any) -> None:
    for module in root.modules():
        if hasattr(module._compiled_call_impl, "__graphshard_doctor__"):
            module._compiled_call_impl = None


def _patch_compile(watch: StepWatch) -> None:
    """Sharded modules are compiled for graphshard, whatever the script asks for."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    from graphshard.doctor.whole import compile_with_aot

    original = torch.compile

    @functools.wraps(original)
    def compile_(model: Any = None, **kwargs: Any) -> Any:
        module = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
        backend = kwargs.get("backend", "inductor")
        is_ours = backend == OURS or hasattr(backend, "is_graphshard_backend")
        if isinstance(module, nn.Module):
            is_sharded = any(isinstance(m, FSDPModule) for m in module.modules())
            watch.compiled.append(module)
            if is_sharded:
                _forget_first_calls(module)
                kwargs["backend"] = backend if is_ours else OURS
        elif model is not None and is_ours:
            watch.functions += 1
            for root in watch.sharded:
                _forget_first_calls(root)
        if is_ours or kwargs.get("backend") == OURS:
            if watch.mode == AOT:
                return compile_with_aot(watch, original, model, kwargs.get("dynamic"))
            _same_random_numbers()
        return original(model, **kwargs)

    torch.compile = compile_


def _same_random_numbers() -> None:
    """Dropout in compiled code as in eager: Inductor's own random numbers are others."""
    from torch._inductor import config

    config.fallback_random = True


def _patch_training(watch: StepWatch) -> None:
    import torch
    from torch.optim import optimizer

    from graphshard.doctor import watch as seen

    backward = torch.autograd.backward

    @functools.wraps(backward)
    def watched(tensors: Any, *args: Any, **kwargs: Any) -> None:
        # A checkpoint that is not functional calls backward inside backward.
        if watch.depth == 0:
            given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            seen.before_backward(watch, given)
        watch.depth += 1
        try:
            backward(tensors, *args, **kwargs)
        finally:
            watch.depth -= 1
        if watch.depth == 0:
            seen.after_backward(watch)

    # Not to be traced where the script compiles its whole step.
    torch.autograd.backward = torch.compiler.disable(watched)

    def before(chosen: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.before_update(watch, chosen)

    def after(chosen: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.after_update(watch)

    optimizer.register_optimizer_step_pre_hook(torch.compiler.disable(before))
    optimizer.register_optimizer_step_post_hook(torch.compiler.disable(after))
    save = torch.save

    @functools.wraps(save)
    def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        seen.saving(watch, obj, f)
        save(obj, f, *args, **kwargs)

    torch.save = saved


def _patch_collectives(watch: StepWatch) -> None:
    import torch.distributed as dist

    def counted(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            watch.counts[kind] = watch.counts.get(kind, 0) + 1
            return original(*args, **kwargs)

        return call

    group = dist.ProcessGroup
    for name, kind in COLLECTIVES.items():
        if hasattr(group, name):
            setattr(group, name, counted(getattr(group, name), kind))


def _write_at_exit(watch: StepWatch) -> None:
    from graphshard.doctor import watch as seen

    show = sys.excepthook

    def failed(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        watch.failure = seen.describe_failure(error)
        show(kind, error, trace)

    sys.excepthook = failed
    atexit.register(seen.write, watch)


def hook_text() -> Sequence[str]:
    """The lines of the `sitecustomize` that starts all this."""
    return ("from graphshard.doctor.attach import attach", "attach()")
