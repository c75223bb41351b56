"""An emulated network behind torch.distributed: this process is rank 0 of N ranks.

In: the number of ranks, the rate of the link, the latency of a collective; for several nodes those
of the link inside each. Out: a process group whose collectives take the time that `network.h` gives
them, on a virtual clock, and a timeline of them. The clock is the CPU time of this thread plus what
it waited for, so other processes on the machine hardly disturb it. What a step frees stays with the
process, as with the caching allocator of a GPU. The first use on a machine compiles the C++ part
(about a minute).
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

BACKEND = "emulated"
BETWEEN, INSIDE = 0, 1  # links, by their numbers in network.h
SOURCES = ("network.h", "backend.cpp")
FOLDER = Path(__file__).parent
CACHE = FOLDER.parents[1] / "build" / "emulator"
BYTES_PER_US_OF_ONE_GBIT = 125.0  # 1e9 bits / 8 / 1e6 us
TRIM_THRESHOLD, MMAP_MAX = -1, -4  # glibc's malloc.h: M_TRIM_THRESHOLD, M_MMAP_MAX
NEVER = 2**31 - 1


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
        extra_compile_args=["-O2", "-g0", "-std=c++20", "-fvisibility=hidden"],
    )
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = BuildExtension.with_options(use_ninja=False, no_python_abi_suffix=True)
        build = command(Distribution({"ext_modules": [extension]}))
        build.build_lib = build.build_temp = folder
        build.ensure_finalized()
        build.run()
        os.replace(Path(folder) / library.name, library)


def keep_memory() -> None:
    """What is freed does not go back to the system, so that a step pays for no new pages.

    Else glibc gives back what is free at the heap's end, which is where a step has its peak: that
    part of the model takes up to twice as long. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, NEVER)
        mallopt(MMAP_MAX, 0)


def make_network(*, gbit: float, alpha_us: float, cpu_clock: bool = True) -> Any:
    """A network without ranks. gbit: rate of the link, 1e9 bits a second, each direction."""
    return load_extension().Network(
        bytes_per_us=gbit * BYTES_PER_US_OF_ONE_GBIT, alpha_us=alpha_us, cpu_clock=cpu_clock
    )


@dataclass(frozen=True, slots=True)
class Nodes:
    """Ranks are numbered node by node. faster: how many times the rate of the link inside each node
    is that of the one between them; its latency is as many times less."""

    ranks_per_node: int
    faster: float


def set_rate(network: Any, *, gbit: float, alpha_us: float, nodes: Nodes | None = None) -> None:
    """Of the link between nodes; that inside each follows."""
    rate = gbit * BYTES_PER_US_OF_ONE_GBIT
    network.set_link(BETWEEN, bytes_per_us=rate, alpha_us=alpha_us)
    if nodes is not None:
        faster = nodes.faster
        network.set_link(INSIDE, bytes_per_us=rate * faster, alpha_us=alpha_us / faster)


def join(
    num_ranks: int,
    *,
    gbit: float,
    alpha_us: float,
    nodes: Nodes | None = None,
    poison: bool = False,
) -> Any:
    """Make this process rank 0 of `num_ranks`, once per process; returns its network.

    nodes: None for one link for all. poison: what a collective writes is NaN until somebody waits
    for it.
    """
    keep_memory()
    extension = load_extension()
    network = make_network(gbit=gbit, alpha_us=alpha_us)
    network.poison = poison
    per_node = num_ranks if nodes is None else nodes.ranks_per_node
    set_rate(network, gbit=gbit, alpha_us=alpha_us, nodes=nodes)

    def create(options: Any, backend_options: Any) -> Any:
        ranks = options.global_ranks_in_group or range(num_ranks)
        is_inside = nodes is not None and len({rank // per_node for rank in ranks}) == 1
        link = INSIDE if is_inside else BETWEEN
        return extension.EmulatedBackend(options.group_rank, options.group_size, network, link)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    # The other ranks of a new group do not come to its barrier.
    distributed_c10d._store_based_barrier = lambda *args, **kwargs: None  # type: ignore[assignment]
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node)
    dist.init_process_group(BACKEND, rank=0, world_size=num_ranks, store=dist.HashStore())
    return network
