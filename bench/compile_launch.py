"""One launch of one way: a fresh process that compiles a model of identical blocks and steps.

In: `Request` as JSON in argv[1]; the caches that the environment names. Out: `Measured` as JSON,
the last line on stdout. Times are real seconds; only the network is emulated.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch._dynamo.utils import compilation_time_metrics, counters
from torch.distributed.device_mesh import init_device_mesh

from bench import emulator
from bench.models import Config, Llama, WithLoss
from bench.ways import WAYS, compile_as, shard

SEED = 0


@dataclass(frozen=True, slots=True)
class Request:
    """lengths: of the sequence, one step each; the first one is the first step."""

    way: str
    num_blocks: int
    num_ranks: int
    dim: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One forward and backward, of a length that was not seen before.

    graphs: that Dynamo captured in it. misses: graphs for which Inductor made code; hits: of its
    cache of compiled graphs. (Its own count of misses is stored with each entry and added up again
    when that is read.)
    """

    seq_len: int
    seconds: float
    graphs: int
    misses: int
    hits: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The first of `steps` counts from the torch.compile call. phases_s: of it, by Dynamo's name.

    breaks: graph breaks.
    """

    steps: list[Step]
    phases_s: dict[str, float]
    breaks: int


def make(request: Request) -> WithLoss:
    config = Config(request.dim, request.num_blocks, 4, 2 * request.dim, 256, request.lengths[0])
    torch.manual_seed(SEED)
    return WithLoss(Llama(config))


def run(request: Request) -> Measured:
    torch.set_num_threads(1)
    emulator.join(request.num_ranks, gbit=1e9, alpha_us=0.0)
    mesh = init_device_mesh("cpu", (request.num_ranks,))
    (way,) = (way for way in WAYS if way.name == request.way)
    model = make(request)
    blocks = list(model.model.layers)
    shard(way, model, blocks, mesh)
    began = time.perf_counter()
    compile_as(way, model, blocks)
    steps: list[Step] = []
    phases_s: dict[str, float] = {}
    for seq_len in request.lengths:
        steps.append(step(model, seq_len, began))
        phases_s = phases_s or seconds(compilation_time_metrics)
        began = time.perf_counter()
    return Measured(steps, phases_s, sum(counters["graph_break"].values()))


def step(model: Any, seq_len: int, began: float) -> Step:
    before = counted()
    tokens, targets = torch.zeros(2, 1, seq_len, dtype=torch.int64)
    model(tokens, targets).backward()
    took_s = time.perf_counter() - began
    graphs, misses, hits = (now - then for now, then in zip(counted(), before, strict=True))
    for param in model.parameters():
        param.grad = None
    return Step(seq_len, took_s, graphs, misses, hits)


def counted() -> tuple[int, int, int]:
    return (
        counters["stats"]["unique_graphs"],
        len(compilation_time_metrics.get("GraphLowering.codegen", ())),
        counters["inductor"]["fxgraph_cache_hit"],
    )


def seconds(metrics: Mapping[str, list[float]]) -> dict[str, float]:
    """The sum of each phase, longest first. Phases lie in each other."""
    sums = {name: sum(times) for name, times in metrics.items()}
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def main() -> None:
    request = json.loads(sys.argv[1])
    request["lengths"] = tuple(request["lengths"])
    print(json.dumps(asdict(run(Request(**request)))), flush=True)


if __name__ == "__main__":
    main()
