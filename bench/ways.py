"""Ways to run one model: how it is sharded, and who compiles it.

In: a way, a model, its blocks, a mesh. Afterwards the model is called as before. graphshard is
imported by its own ways only, so that no other pays for it where whole processes are timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from bench import peers
from bench.rounds import say


@dataclass(frozen=True, slots=True)
class Way:
    """sharding: "", "fsdp2" or "simple_fsdp". compiler: "", "inductor", "blocks" or "graphshard".

    "inductor" compiles the whole model as one graph, "blocks" each block by itself, as is usual
    with FSDP2. options: of graphshard.
    """

    name: str
    title: str
    sharding: str = ""
    compiler: str = ""
    options: tuple[tuple[str, object], ...] = ()


ATEN, INDUCTOR = ("compute", "aten"), ("compute", "inductor")
WAYS = (
    Way("single", "one process"),
    Way("inductor", "one process, Inductor", compiler="inductor"),
    Way("graphshard_single", "one process, graphshard", "", "graphshard", (INDUCTOR,)),
    Way("fsdp2", "FSDP2", "fsdp2"),
    Way("fsdp2_blocks", "FSDP2, blocks by Inductor", "fsdp2", "blocks"),
    Way("simple_fsdp", "SimpleFSDP, Inductor", "simple_fsdp", "inductor"),
    Way("graphshard_aten", "graphshard, aten", "fsdp2", "graphshard", (ATEN,)),
    Way("graphshard", "graphshard, Inductor", "fsdp2", "graphshard", (INDUCTOR,)),
    Way(
        "graphshard_cudagraphs", "graphshard, CUDA graphs", "fsdp2", "graphshard",
        (INDUCTOR, ("triton.cudagraphs", True)),
    ),
)  # fmt: skip


def choose(text: str) -> tuple[Way, ...]:
    """The ways that `text` names, with commas. For argparse, which shows the error."""
    known = {way.name: way for way in WAYS}
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}")
    return tuple(known[name] for name in text.split(","))


def exists(way: Way) -> bool:
    """Whether this graphshard knows the way's options."""
    from graphshard.errors import OptionsError
    from graphshard.options import parse_options

    try:
        parse_options(dict(way.options))
    except OptionsError:
        return False
    return True


def usable(ways: Iterable[Way]) -> list[Way]:
    """Those whose options this graphshard knows; says which it leaves out. Raises PeerMissing."""
    found = []
    for way in ways:
        if not exists(way):
            say(f"left out: {way.title}, whose options this graphshard does not know")
            continue
        if way.sharding == "simple_fsdp":
            peers.install()
        found.append(way)
    return found


def shard(
    way: Way,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh | None,
    how: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """mesh: not for ways without sharding. how: more for `fully_shard`. Raises PeerMissing."""
    if way.sharding == "fsdp2":
        for block in blocks:
            fully_shard(block, mesh=mesh, **how)
        fully_shard(model, mesh=mesh, **how)
    elif way.sharding == "simple_fsdp":
        peers.simple_fsdp()(model, mesh, mode="fully_shard")


def compile_as(
    way: Way,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    more: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Say who compiles; compiling itself is left to the first calls. more: options of graphshard.

    SimpleFSDP runs without the overlap passes of Inductor, which is Inductor's default.
    """
    if way.compiler == "blocks":
        for block in blocks:
            block.compile(fullgraph=True)
    elif way.compiler == "inductor":
        model.compile(fullgraph=True)
    elif way.compiler == "graphshard":
        # The other ranks are emulated: there is nobody to agree with.
        options = {"fallback": "error", "verify": "off", **dict(way.options), **more}
        model.compile(fullgraph=True, backend="graphshard", options=options)
