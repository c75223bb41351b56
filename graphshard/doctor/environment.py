"""Is everything here that training with graphshard needs? One `Probe` per question.

In: nothing but this process. Out: what was found, and a finding where it is not enough. Nothing is
compiled and no process group is made.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graphshard._version import NEWEST_TORCH, OLDEST_TORCH
from graphshard.cost.profile import look_up
from graphshard.doctor.findings import Finding, Level, fault, warning
from graphshard.errors import OptionsError
from graphshard.options import parse_options

PROBE_S = 20.0


@dataclass(frozen=True, slots=True)
class Probe:
    """found: what is here, in words. finding: None if that is enough."""

    name: str
    found: str
    finding: Finding | None = None

    @property
    def level(self) -> Level:
        return Level.OK if self.finding is None else self.finding.level


def probe_environment() -> tuple[Probe, ...]:
    """All probes, in the order in which a faulty one spoils those after it."""
    import torch
    import torch.distributed as dist

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    has_gloo = dist.is_available() and dist.is_gloo_available()
    has_nccl = dist.is_available() and dist.is_nccl_available()
    return (
        probe_torch(torch.__version__),
        probe_backend(torch._dynamo.list_backends()),
        Probe("devices", devices_text(gpus, os.cpu_count() or 1)),
        probe_collectives(has_gloo, has_nccl, num_gpus=len(gpus)),
        probe_compiler(_compiler, has_gpu=bool(gpus)),
        probe_cache(_cache_folder),
        probe_options(),
    )


def probe_torch(version: str) -> Probe:
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST_TORCH, NEWEST_TORCH))
    tested = f"tested with {oldest} to {newest}"
    found = (*map(int, re.findall(r"\d+", version)[:2]),)
    if OLDEST_TORCH <= found <= NEWEST_TORCH:
        return Probe("torch", f"{version} ({tested})")
    if found < OLDEST_TORCH:
        what = f"torch {version} is older than {oldest}, the oldest that is supported"
        return Probe("torch", version, fault("GS1101", what, f'pip install "torch>={oldest}"'))
    what = f"torch {version} is newer than {newest}, the newest that was tested"
    fix = "compare a few steps with eager FSDP2, or install a tested torch"
    return Probe("torch", version, warning("GS1101", what, fix))


def probe_backend(names: list[str]) -> Probe:
    """names: what `torch._dynamo.list_backends` finds by the entry points of packages."""
    if "graphshard" in names:
        return Probe("backend", 'torch.compile(..., backend="graphshard")')
    finding = fault(
        "GS1102",
        f"torch.compile knows {', '.join(names)}, not graphshard: the package is on the path but "
        "not installed",
        "pip install graphshard (or pip install -e . in a checkout)",
    )
    return Probe("backend", "not registered", finding)


def devices_text(gpus: list[str], cores: int) -> str:
    cpu = f"CPU with {cores} cores"
    kinds = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return ", ".join([*kinds, cpu]) if kinds else f"no GPU, {cpu}"


def probe_collectives(has_gloo: bool, has_nccl: bool, *, num_gpus: int) -> Probe:
    here = [name for name, is_here in (("nccl", has_nccl), ("gloo", has_gloo)) if is_here]
    text = ", ".join(here) or "none"
    if num_gpus and not has_nccl:
        what = f"{num_gpus} GPUs, but torch is built without NCCL ({text})"
        return Probe("collectives", text, fault("GS1103", what, "install torch's CUDA build"))
    if not here:
        what = "torch is built without gloo and NCCL: there is nothing to shard over"
        return Probe("collectives", text, fault("GS1103", what, "install an official torch build"))
    return Probe("collectives", text)


def probe_compiler(find: Callable[[], str], *, has_gpu: bool) -> Probe:
    """find: the C++ compiler's name and version; raises if there is none that works."""
    try:
        return Probe("compiler", find())
    except Exception as error:  # Inductor raises what it likes
        first = (str(error).splitlines() or [""])[0]
        finding = fault(
            "GS1104",
            f"Inductor has no C++ compiler ({type(error).__name__}: {first})",
            "install g++ or clang, or name one with CXX=...; compute='aten' needs none",
        )
        if has_gpu:
            finding = warning(finding.code, finding.what, finding.fix)
        return Probe("compiler", "none", finding)


def _compiler() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler

    name = get_cpp_compiler()
    done = subprocess.run(
        [name, "--version"], capture_output=True, text=True, timeout=PROBE_S, check=True
    )
    return done.stdout.splitlines()[0]


def probe_cache(find: Callable[[], Path]) -> Probe:
    """find: Inductor's cache folder."""
    folder = None
    try:
        folder = find()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        finding = fault(
            "GS1105",
            f"Inductor cannot write to its cache {folder or ''} ({error.strerror or error})",
            "make it writable, or set TORCHINDUCTOR_CACHE_DIR to a folder that is",
        )
        return Probe("cache", str(folder or "none"), finding)
    return Probe("cache", str(folder))


def _cache_folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def probe_options() -> Probe:
    """What environment and file give; what a script gives goes over it."""
    try:
        given = parse_options(None, None, look_up).given
    except OptionsError as error:
        fix = "mend it where it stands; docs/reference/options.md lists the options"
        return Probe("options", "wrong", fault(error.code, error.message, fix))
    names = ", ".join(f"{name}={value}" for name, value in given)
    return Probe("options", names or "none in the environment or a file")
