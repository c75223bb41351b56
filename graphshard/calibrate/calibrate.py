"""Measures the running job's own groups and device, and fits the cost model to them.

In: process groups by name (all ranks give the same names in the same order) and this rank's
device. Out: a `Profile` that is the same on every rank. Progress goes to stderr, by rank 0 only.
"""

from __future__ import annotations

import os
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphshard.calibrate.fit import fit_curve
from graphshard.calibrate.measure import (
    ATTENTION_DIM,
    ATTENTION_HEADS,
    attention_time_us,
    collective_time_us,
    host_copy_time_us,
    matmul_time_us,
    pointwise_time_us,
)
from graphshard.cost.comm import CollectiveKind, RankGroup, wire_bytes
from graphshard.cost.curve import Fit, Sample
from graphshard.cost.profile import CommFit, CostProfile, Origin
from graphshard.errors import CostError, GraphshardWarning
from graphshard.pricing.sizes import dtype_name

KIB = 1024
CPU_SIZES_BYTES = tuple(4 * KIB * 4**i for i in range(8))  # 4 KiB to 64 MiB
GPU_SIZES_BYTES = tuple(4 * KIB * 4**i for i in range(10))  # 4 KiB to 1 GiB
# Denser: caches and page faults make steps.
CPU_TENSORS_BYTES = tuple(4 * KIB * 2**i for i in range(16))  # 4 KiB to 128 MiB
GPU_TENSORS_BYTES = tuple(4 * KIB * 2**i for i in range(19))  # 4 KiB to 1 GiB
HOST_COPIES_BYTES = tuple(64 * KIB * 4**i for i in range(7))  # 64 KiB to 256 MiB
CPU_MATRICES = (64, 128, 256, 512, 1024)
GPU_MATRICES = (256, 512, 1024, 2048, 4096, 8192)
CPU_LENGTHS = (64, 128, 256, 512, 1024)
GPU_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
# A product that takes longer than this ends its dtype's sweep.
LONG_US = 3e5
REPETITIONS = 25
# Of a sweep whose times make no sense; half of what is measured may be so far from the curve.
ATTEMPTS, MOST_ERROR = 3, 0.5
# What the largest amount costs over the constant, for a rate to be known at all.
LEAST_SHARE = 1e-3
MOST_BYTES = 2**36

Value = TypeVar("Value")
Key = TypeVar("Key", bound=Hashable)


def calibrate(
    groups: Mapping[str, dist.ProcessGroup],
    device: torch.device,
    *,
    sizes_bytes: Sequence[int] | None = None,
    repetitions: int = REPETITIONS,
    command: str = "",
    say: Callable[[str], None] | None = None,
) -> CostProfile:
    """Sweep collectives on every group; matrix products, attention, pointwise ops on the device.

    Collective over all ranks of the job. Groups of one rank are left out. sizes_bytes: of the
    collectives, of the whole. say: takes a line of progress on rank 0; stderr by default. Raises
    CostError (GS504) for fewer than two sizes or one that is not positive, (GS505) if the machine
    was too busy to measure its memory. What else it was too busy for is left out, with a
    GraphshardWarning (GS505).
    """
    sizes = tuple(sizes_bytes or _default_sizes(device))
    if len({*sizes}) < 2 or min(sizes) <= 0 or max(sizes) > MOST_BYTES:
        raise CostError(
            "GS504",
            f"calibration needs two different sizes from 1 to {MOST_BYTES:,} bytes, got {sizes}",
        )
    tell = (say or _to_stderr) if dist.get_rank() == 0 else _nowhere
    comm = [
        fit
        for name, group in groups.items()
        if group.size() > 1
        for fit in _sweep_group(name, group, device, sizes, repetitions, tell)
    ]
    tell("matrix products")
    arithmetic = _sweep_dtypes(
        "matrix products",
        device,
        lambda n, d: matmul_time_us(n, d, device, repetitions),
        _matrix_flops(device),
    )
    tell("attention")
    attention = _sweep_dtypes(
        "attention",
        device,
        lambda n, d: attention_time_us(n, d, device, repetitions),
        _attention_flops(device),
    )
    tell("pointwise ops")
    tensors = CPU_TENSORS_BYTES if device.type == "cpu" else GPU_TENSORS_BYTES
    memory = believed(
        "pointwise ops",
        lambda: {2.0 * n: pointwise_time_us(n, device, repetitions) for n in tensors},
    )
    if memory is None:
        raise CostError("GS505", "times of pointwise ops make no sense: the machine is too busy")
    host = None if device.type == "cpu" else _host_copies(device, repetitions, tell)
    origin = _origin(device, command)
    profile = CostProfile(origin, tuple(comm), arithmetic, attention, memory, host)
    return _from_rank_0(profile)


def _host_copies(device: torch.device, repetitions: int, tell: Callable[[str], None]) -> Fit | None:
    """All ranks copy at once, as they do in a step."""
    tell("copies to the host")
    return believed(
        "copies to the host",
        lambda: {float(n): host_copy_time_us(n, device, repetitions) for n in HOST_COPIES_BYTES},
    )


def believed(what: str, measure: Callable[[], Mapping[float, float]]) -> Fit | None:
    """The curve of what `measure` finds (amount -> microseconds), the same decision on all ranks.

    Times that make no sense are measured again, and of each amount the shortest counts: whatever
    else runs on the machine only adds to it. None, with a GraphshardWarning (GS505) on rank 0, if
    they still make none.
    """
    times: dict[float, float] = {}
    fault = None
    for _ in range(ATTEMPTS):
        found = _agreed(measure())
        times = {n: min(us, times.get(n, us)) for n, us in found.items()}
        fit = _fit(times)
        # Fits may round differently: one rank decides.
        fault = _from_rank_0(_fault(fit))
        if fault is None:
            return fit
    if dist.get_rank() == 0:
        text = f"GS505: {what} left out, costs stay those of the preset: {fault}, {ATTEMPTS} times"
        warnings.warn(text, GraphshardWarning, stacklevel=2)
    return None


def _fault(fit: Fit) -> str | None:
    """Why nobody should plan with this curve."""
    largest_us = float(fit.curve.classes[-1].us_per_unit) * fit.samples[-1].amount
    if largest_us <= LEAST_SHARE * float(fit.curve.base_us):
        return "more bytes or operations took no longer, as if the rate was infinite"
    if fit.median_error > MOST_ERROR:
        return f"times scatter by {fit.median_error:.0%} about any curve"
    return None


def groups_of(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """One group per mesh dimension, by its name (or "dim0", "dim1", ...)."""
    names = mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(mesh.ndim))
    return {name: mesh.get_group(dim) for dim, name in enumerate(names)}


def calibrate_job(sizes_bytes: Sequence[int] | None, repetitions: int, command: str) -> CostProfile:
    """What the command line runs under torchrun: start the job, calibrate, end it.

    Groups: "world"; with several nodes also "intra" (the ranks of a node) and "inter" (the ranks
    with one number on each node). Raises CostError (GS504) outside torchrun.
    """
    if not dist.is_torchelastic_launched():
        raise CostError(
            "GS504", "start it with torchrun --nproc-per-node N -m graphshard calibrate"
        )
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        groups = _job_groups(device, int(os.environ["LOCAL_WORLD_SIZE"]))
        return calibrate(
            groups, device, sizes_bytes=sizes_bytes, repetitions=repetitions, command=command
        )
    finally:
        dist.destroy_process_group()


def _job_groups(device: torch.device, per_node: int) -> dict[str, dist.ProcessGroup]:
    assert dist.group.WORLD is not None
    groups = {"world": dist.group.WORLD}
    nodes = dist.get_world_size() // per_node
    if nodes > 1 and nodes * per_node == dist.get_world_size():
        names = ("inter", "intra")
        groups |= groups_of(init_device_mesh(device.type, (nodes, per_node), mesh_dim_names=names))
    return groups


def _sweep_group(
    name: str,
    group: dist.ProcessGroup,
    device: torch.device,
    sizes: Sequence[int],
    repetitions: int,
    tell: Callable[[str], None],
) -> list[CommFit]:
    facts = _group_facts(name, group)
    fits = []
    for kind in CollectiveKind:
        tell(f"{kind} on {name}, {group.size()} ranks")

        def times(kind: CollectiveKind = kind) -> dict[float, float]:
            return {
                _amount(kind, size, group): collective_time_us(
                    kind, size, group, device, repetitions
                )
                for size in sizes
            }

        fit = believed(f"{kind} on {name}", times)
        if fit is not None:
            fits.append(CommFit(kind, facts, fit))
    return fits


def _amount(kind: CollectiveKind, size_bytes: int, group: dist.ProcessGroup) -> float:
    return float(wire_bytes(kind, group.size(), size_bytes))


def _sweep_dtypes(
    what: str,
    device: torch.device,
    time_us: Callable[[int, torch.dtype], float],
    flops: Mapping[int, float],
) -> tuple[tuple[str, Fit], ...]:
    """One fit per dtype; `flops` of each size in rising order."""
    on_cpu = device.type == "cpu"
    fits = []
    for dtype in (torch.float32, torch.bfloat16, *(() if on_cpu else (torch.float16,))):

        def times(dtype: torch.dtype = dtype) -> dict[float, float]:
            found: dict[float, float] = {}
            for size, amount in flops.items():
                found[amount] = time_us(size, dtype)
                if found[amount] > LONG_US:
                    break
            return found

        fit = believed(f"{what} of {dtype}", times)
        if fit is not None:
            fits.append((dtype_name(dtype, device), fit))
    return tuple(fits)


def _matrix_flops(device: torch.device) -> dict[int, float]:
    """2 n^3 for a product of n x n matrices, as torch.utils.flop_counter counts."""
    return {n: 2.0 * n**3 for n in (CPU_MATRICES if device.type == "cpu" else GPU_MATRICES)}


def _attention_flops(device: torch.device) -> dict[int, float]:
    """Two products of length x length x width: torch.utils.flop_counter counts no causal half."""
    lengths = CPU_LENGTHS if device.type == "cpu" else GPU_LENGTHS
    return {n: 4.0 * ATTENTION_HEADS * ATTENTION_DIM * n**2 for n in lengths}


def _fit(times: Mapping[float, float]) -> Fit:
    return fit_curve(Sample(amount, us) for amount, us in times.items())


def _agreed(times: Mapping[Key, float]) -> dict[Key, float]:
    """The median over all ranks of the job, for what every rank measured."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(times))
    return {
        key: median(one[key] for one in everyone)
        for key in everyone[0]
        if all(key in one for one in everyone)
    }


def _from_rank_0(value: Value) -> Value:
    """Equal samples do not give equal fits: least squares may round by how memory is aligned."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def _group_facts(name: str, group: dist.ProcessGroup) -> RankGroup:
    hosts: list[Any] = [None] * group.size()
    dist.all_gather_object(hosts, platform.node(), group=group)
    return RankGroup(group.size(), max(Counter(hosts).values()), name)


def _origin(device: torch.device, command: str) -> Origin:
    on_cpu = device.type == "cpu"
    return Origin(
        device=_cpu_name() if on_cpu else torch.cuda.get_device_name(device),
        host=platform.node(),
        cpus=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        world_size=dist.get_world_size(),
        backend=dist.get_backend(),
        torch_version=torch.__version__,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
    )


def _cpu_name() -> str:
    """Starts with "cpu", by which the preset is found."""
    return f"cpu ({platform.processor() or platform.machine()})"


def _default_sizes(device: torch.device) -> tuple[int, ...]:
    return CPU_SIZES_BYTES if device.type == "cpu" else GPU_SIZES_BYTES


def _to_stderr(text: str) -> None:
    print(f"graphshard calibrate: {text}", file=sys.stderr, flush=True)


def _nowhere(text: str) -> None:
    pass
