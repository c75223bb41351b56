"""How fast this job's network and device are, from a few collectives and matrix products.

A preset does not know the network, nor what else uses it, nor how much of a device a process has.
And what to compute again in backward has to be decided before the first step. So before the first
plan of an FSDP root the ranks run three collectives of each kind, of the size of a group (of
LARGEST_BYTES at most; an all-reduce over replicas of the size of its shard), and three products in
each dtype of the groups. None is run where a rank does not come: it has the graph already, or
cannot compile it.

Assumed: the products of the model reach about the rate of these. If they do not, only the first
plan is another one: what steps take is measured (`graphshard.compiler.tuning`). Pointwise ops stay
at the preset's rate: they are the smaller part of a step, and what a single one takes says less of
the next one than of what caches and the allocator held.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import sleep

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from graphshard.cost.comm import CollectiveKind
from graphshard.runtime.agree import told
from graphshard.runtime.ballot import Ballot, whole_of
from graphshard.runtime.costs import collect_unless_away
from graphshard.runtime.live import LiveGroup
from graphshard.runtime.timed import collective, elapsed_us, product
from graphshard.runtime.waiting import NamedCollective, finish

ROUNDS = 3  # the first one connects or warms up, and is not counted
# 4 MiB take 0.3 s at 0.1 Gbit/s; 64 MiB take 3 ms at 25 GB/s.
LARGEST_BYTES = {"cpu": 2**22, "": 2**26}
# n of the product of two n x n matrices: 3 ms at 80 GFlop/s, 0.2 ms at 600 TFlop/s. Smaller ones
# reach less of a device's rate.
MATRIX = {"cpu": 512, "": 4096}
# Between two collectives. A gloo thread frees the tensors of the last one under a lock, and needs
# the interpreter for it; whoever issues the next one at once waits for that lock with the
# interpreter.
PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class SeenCollective:
    """One collective of `size_bytes` (of the whole) on the process group of `live` for that."""

    live: LiveGroup
    kind: CollectiveKind
    size_bytes: int
    us: float


@dataclass(frozen=True, slots=True)
class SeenProduct:
    """A product of two matrices. us: of the slowest rank, for which the others wait."""

    dtype: torch.dtype
    flops: float
    us: float


@dataclass(frozen=True, slots=True)
class Probed:
    """The same on all ranks; empty where nothing was run."""

    collectives: tuple[SeenCollective, ...] = ()
    products: tuple[SeenProduct, ...] = ()


def probe(lives: Sequence[LiveGroup], ballots: Sequence[Ballot]) -> Probed:
    """What the process groups and the device of `lives` take.

    All ranks of the ballots are about to plan the same graph. Raises what a collective of a step
    does, and DivergedRanks.
    """
    if not all_come(ballots):
        return Probed()
    with _disable_current_modes(), torch.no_grad():  # a graph is being traced
        runs = list(_runs(lives))
        own = [[_elapsed_us(*one) for _ in range(ROUNDS)] for one in runs]
        device = lives[0].fsdp.device
        products = list(_products(lives, device)) if runs else []
        own += [[elapsed_us(run, device) for _ in range(ROUNDS)] for _, _, run in products]
    counted = json.dumps([rounds[1:] for rounds in own])
    every = [json.loads(text) for text in told(ballots, "probe", counted)]
    columns = list(zip(*every, strict=True))  # of one run, by rank
    return Probed(
        tuple(
            # Who came last waited for nobody.
            SeenCollective(live, kind, size_bytes, min(map(min, column)))
            for (live, kind, size_bytes, _), column in zip(runs, columns, strict=False)
        ),
        tuple(
            SeenProduct(dtype, flops, max(map(min, column)))
            for (dtype, flops, _), column in zip(products, columns[len(runs) :], strict=True)
        ),
    )


def all_come(ballots: Sequence[Ballot]) -> bool:
    """Whether all ranks (of the mesh that has them) will run the same collectives now: before the
    first plan of this root.

    A rank that comes says so and waits for the others. One that has answered the ballot's question
    without coming, or has the graph already, will not come, and all see that.
    """
    ballot = whole_of(ballots)
    if ballot is None or ballot.agreed:
        return False
    keys = {rank: f"{ballot.slot}/{rank}/comes" for rank in ballot.ranks}
    ballot.store.set(keys[ballot.rank], "comes")
    return collect_unless_away(ballot, keys, "the first collectives") is not None


Run = tuple[LiveGroup, CollectiveKind, int, Callable[[], dist.Work]]


def _runs(lives: Sequence[LiveGroup]) -> Iterator[Run]:
    """One of each kind for each process group, of the size of its groups on the median."""
    kinds = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE
    for kind in kinds:
        by_group: dict[dist.ProcessGroup, list[LiveGroup]] = {}
        for live in lives:
            group = _process_group(kind, live)
            if group is not None and group.size() > 1:
                by_group.setdefault(group, []).append(live)
        for group, found in by_group.items():
            sizes = sorted(_moved_bytes(kind, live) for live in found)
            device = found[0].fsdp.device
            most = LARGEST_BYTES.get(device.type, LARGEST_BYTES[""])
            each = max(1, min(most, sizes[len(sizes) // 2]) // 4 // group.size())
            size_bytes = each * 4 * group.size()
            yield found[0], kind, size_bytes, collective(kind, size_bytes, group, device)


Product = tuple[torch.dtype, float, Callable[[], object]]


def _products(lives: Sequence[LiveGroup], device: torch.device) -> Iterator[Product]:
    """One in each dtype that parameters are gathered in; there are none of whole numbers, and other
    ones of numbers of one byte."""
    size = MATRIX.get(device.type, MATRIX[""])
    for dtype in dict.fromkeys(dtype for live in lives for dtype in live.dtypes):
        if dtype.is_floating_point and dtype.itemsize > 1:
            yield dtype, 2.0 * size**3, product(size, dtype, device)


def _process_group(kind: CollectiveKind, live: LiveGroup) -> dist.ProcessGroup | None:
    if kind is CollectiveKind.ALL_REDUCE:
        return live.fsdp.replicate_process_group
    gathers = kind is CollectiveKind.ALL_GATHER
    return live.fsdp.gather_process_group if gathers else live.fsdp.reduce_process_group


def _moved_bytes(kind: CollectiveKind, live: LiveGroup) -> int:
    """Of all ranks' shards together; of an all-reduce, of one."""
    params = zip(live.fsdp.params, live.dtypes, strict=True)
    shard_bytes = sum(p.sent_numel * dtype.itemsize for p, dtype in params)
    return shard_bytes * (1 if kind is CollectiveKind.ALL_REDUCE else live.fsdp.world_size)


def _elapsed_us(
    live: LiveGroup, kind: CollectiveKind, _: int, run: Callable[[], dist.Work]
) -> float:
    """Of one collective, from its issue to its end."""
    device, group = live.fsdp.device, _process_group(kind, live)
    name = NamedCollective("first collective", live, lambda: [live.fqn], group)
    if device.type == "cpu":
        sleep(PAUSE_S)
    return elapsed_us(lambda: finish(run(), name), device)
