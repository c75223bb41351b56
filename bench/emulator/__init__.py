"""An emulated network behind torch.distributed: this process is rank 0 of N ranks.

In: the number of ranks, the rate of the link, the latency of a collective. Out: a process group
whose collectives take the time that `network.h` gives them, on a virtual clock, and a timeline of
them. The clock is the CPU time of this thread plus what it waited for, so other processes on the
machine hardly disturb it. The first use on a machine compiles the C++ part (about a minute).
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist

BACKEND = "emulated"
SOURCES = ("network.h", "backend.cpp")
FOLDER = Path(__file__).parent
CACHE = FOLDER.parents[1] / "build" / "emulator"
BYTES_PER_US_OF_ONE_GBIT = 125.0  # 1e9 bits / 8 / 1e6 us


class Transfer(Protocol):
    """One collective of the timeline, as `network.h` defines it. Times are virtual."""

    kind: str
    lane: int
    link_bytes: int
    issue_us: float
    start_us: float
    end_us: float
    waited_us: float


def load_extension() -> ModuleType:
    """The compiled part; compiles it if this torch and these sources have not been seen.

    Raises setuptools' CompileError if there is no C++ compiler.
    """
    digest = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for source in SOURCES:
        digest.update((FOLDER / source).read_bytes())
    name = f"graphshard_emulator_{digest.hexdigest()[:16]}"
    if name in sys.modules:  # its types can be registered only once
        return sys.modules[name]
    library = CACHE / f"{name}.so"
    if not library.exists():
        _compile(name, library)
    spec = importlib.util.spec_from_file_location(name, library)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(name: str, library: Path) -> None:
    """In a folder of its own, so that a run that is killed leaves no lock and no half file.

    With torch's setuptools command rather than its `load`, which needs ninja on the PATH.
    """
    from setuptools import Distribution
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    print("bench: compiling the emulated network", file=sys.stderr, flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    extension = CppExtension(
        name,
        [str(FOLDER / "backend.cpp")],
        extra_compile_args=["-O2", "-std=c++20", "-fvisibility=hidden"],
    )
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = BuildExtension.with_options(use_ninja=False, no_python_abi_suffix=True)
        build = command(Distribution({"ext_modules": [extension]}))
        build.build_lib = build.build_temp = folder
        build.ensure_finalized()
        build.run()
        os.replace(Path(folder) / library.name, library)


def make_network(*, gbit: float, alpha_us: float, cpu_clock: bool = True) -> Any:
    """A network without ranks. gbit: rate of the link, 1e9 bits a second, each direction."""
    return load_extension().Network(
        bytes_per_us=gbit * BYTES_PER_US_OF_ONE_GBIT, alpha_us=alpha_us, cpu_clock=cpu_clock
    )


def set_rate(network: Any, *, gbit: float, alpha_us: float) -> None:
    network.set_link(bytes_per_us=gbit * BYTES_PER_US_OF_ONE_GBIT, alpha_us=alpha_us)


def join(num_ranks: int, *, gbit: float, alpha_us: float, poison: bool = False) -> Any:
    """Make this process rank 0 of `num_ranks`, once per process; returns its network.

    poison: what a collective writes is NaN until somebody waits for it.
    """
    extension = load_extension()
    network = make_network(gbit=gbit, alpha_us=alpha_us)
    network.poison = poison

    def create(store: dist.Store, rank: int, size: int, timeout: Any) -> Any:
        return extension.EmulatedBackend(rank, size, network)

    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    dist.init_process_group(BACKEND, rank=0, world_size=num_ranks, store=dist.HashStore())
    return network
