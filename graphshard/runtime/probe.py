"""How fast this job's network is, from a few collectives before anything is planned.

A preset knows neither the network nor what else uses it, and what to compute again in backward has
to be decided before the first step. So the ranks run three collectives of each kind, of the size of
a group (of LARGEST_BYTES at most), before the first plan of an FSDP root. None is run where a rank
does not come: it has the graph already, or cannot compile it.
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
from graphshard.runtime.ballot import Ballot
from graphshard.runtime.costs import collect_unless_away
from graphshard.runtime.live import LiveGroup
from graphshard.runtime.timed import collective, elapsed_us
from graphshard.runtime.waiting import NamedCollective, finish

ROUNDS = 3  # the first one connects, and is not counted
# 4 MiB take 0.3 s at 0.1 Gbit/s; 64 MiB take 3 ms at 25 GB/s.
LARGEST_BYTES = {"cpu": 2**22, "": 2**26}
# Between two of them. A gloo thread frees the tensors of the last one under a lock, and needs the
# interpreter for it; whoever issues the next one at once waits for that lock with the interpreter.
PAUSE_S = 0.02


@dataclass(frozen=True, slots=True)
class Seen:
    """One collective of `size_bytes` (of the whole) on the gather or reduce group of `live`."""

    live: LiveGroup
    kind: CollectiveKind
    size_bytes: int
    us: float


def probe(lives: Sequence[LiveGroup], ballots: Sequence[Ballot]) -> list[Seen]:
    """What each process group of `lives` takes; the same on all ranks, and empty where nothing was
    run.

    All ranks of the ballots are about to plan the same graph. Raises what a collective of a step
    does, and DivergedRanks.
    """
    if not all_come(ballots):
        return []
    with _disable_current_modes(), torch.no_grad():  # a graph is being traced
        runs = list(_runs(lives))
        own = [[_elapsed_us(live, run) for _ in range(ROUNDS)] for live, _, _, run in runs]
    every = [json.loads(text) for text in told(ballots, "probe", json.dumps(own))]
    found = []
    for place, (live, kind, size_bytes, _) in enumerate(runs):
        # Who came last waited for nobody.
        rounds = [min(rank[place][number] for rank in every) for number in range(1, ROUNDS)]
        found.append(Seen(live, kind, size_bytes, min(rounds)))
    return found


def all_come(ballots: Sequence[Ballot]) -> bool:
    """Whether all ranks of the one mesh will run the same collectives now: before the first plan of
    this root.

    A rank that comes says so and waits for the others. One that has answered the ballot's question
    without coming, or has the graph already, will not come, and all see that.
    """
    if len(ballots) != 1 or ballots[0].agreed:
        return False
    (ballot,) = ballots
    keys = {rank: f"{ballot.slot}/{rank}/comes" for rank in ballot.ranks}
    ballot.store.set(keys[ballot.rank], "comes")
    return collect_unless_away(ballot, keys, "the first collectives") is not None


Run = tuple[LiveGroup, CollectiveKind, int, Callable[[], dist.Work]]


def _runs(lives: Sequence[LiveGroup]) -> Iterator[Run]:
    """One of each kind for each process group, of the size of its groups on the median."""
    for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER):
        by_group: dict[dist.ProcessGroup, list[LiveGroup]] = {}
        for live in lives:
            gathers = kind is CollectiveKind.ALL_GATHER
            fsdp = live.fsdp
            group = fsdp.gather_process_group if gathers else fsdp.reduce_process_group
            if group is not None and group.size() > 1:
                by_group.setdefault(group, []).append(live)
        for group, found in by_group.items():
            sizes = sorted(_gathered_bytes(live) for live in found)
            device = found[0].fsdp.device
            most = LARGEST_BYTES.get(device.type, LARGEST_BYTES[""])
            each = max(1, min(most, sizes[len(sizes) // 2]) // 4 // group.size())
            size_bytes = each * 4 * group.size()
            yield found[0], kind, size_bytes, collective(kind, size_bytes, group, device)


def _gathered_bytes(live: LiveGroup) -> int:
    params = zip(live.shards(), live.dtypes, strict=True)
    return live.fsdp.world_size * sum(part.numel() * dtype.itemsize for part, dtype in params)


def _elapsed_us(live: LiveGroup, run: Callable[[], dist.Work]) -> float:
    """Of one collective, from its issue to its end."""
    device, group = live.fsdp.device, live.fsdp.gather_process_group
    name = NamedCollective("first collective", live, lambda: [live.fqn], group)
    if device.type == "cpu":
        sleep(PAUSE_S)
    return elapsed_us(lambda: finish(run(), name), device)
