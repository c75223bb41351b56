"""The machines that plans can be made for without measuring one, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from textwrap import TextWrapper

from graphshard.cost.presets import Fact, Unit

TABLE = "{:<12}{:>9}{:>11}{:>11}{:>11}{:>12}{:>7}  {}"
WIDTH = 100
SOURCES = TextWrapper(
    WIDTH,
    initial_indent=" " * 6,
    subsequent_indent=" " * 6,
    break_on_hyphens=False,
    break_long_words=False,  # an address stays whole
)
UNITS = {
    Unit.BYTES_PER_S: (1e9, "GB/s"),
    Unit.FLOPS_PER_S: (1e12, "TFLOP/s"),
    Unit.US: (1.0, "us"),
}
GIB = 2**30
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz")


def machines_text(devices: Sequence[Sequence[Fact]], networks: Sequence[Sequence[Fact]]) -> str:
    """A row for each device and each network, by their data sheets."""
    lines = [
        "Of data sheets; `graphshard machines NAME` shows what programs get of it, and sources.",
        "",
        TABLE.format(
            "device", "memory", "memory", "bfloat16", "float8", "in a node", "per", "network"
        ),
        TABLE.format("", "GiB", "TB/s", "TFLOP/s", "TFLOP/s", "GB/s", "node", "between nodes"),
        *map(_device_row, devices),
        "",
        f"{'network':<16}{'GB/s per GPU':>14}{'programs get':>14}",
        *map(_network_row, networks),
        "",
        "A machine is a device, or a device and a network or its rate: h100, h100-ib200, "
        "h100-200Gbit.",
        "Switches may follow, by the nodes below them: h100-ib400:pod=32:oversubscribed=2.",
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def machine_text(facts: Sequence[Fact]) -> str:
    """Every number with its source."""
    lines = []
    for (kind, name), found in groupby(facts, key=lambda fact: fact.table):
        lines += [f"{kind} {name}", *(line for fact in found for line in _fact(fact)), ""]
    return "\n".join(lines)


def _device_row(facts: Sequence[Fact]) -> str:
    name = next(name for kind, name in (fact.table for fact in facts) if kind == "device")
    network = next(name for kind, name in (fact.table for fact in facts) if kind == "network")
    own = {fact.path: fact for fact in facts if fact.table[0] == "device"}
    fp8 = next((own[key] for dtype in FP8 if (key := ("flops_per_s", dtype)) in own), None)
    per_node = own.get(("ranks_per_node",))
    return TABLE.format(
        name,
        _number(own.get(("capacity_bytes",)), GIB),
        _number(own.get(("memory_bytes_per_s",)), 1e12),
        _number(own.get(("flops_per_s", "bfloat16")), 1e12),
        _number(fp8, 1e12),
        _number(own.get(("intra_bytes_per_s",)), 1e9),
        _number(per_node, 1) if per_node else "8",
        network,
    )


def _network_row(facts: Sequence[Fact]) -> str:
    rate = next(fact for fact in facts if fact.path == ("inter_bytes_per_s",))
    got = rate.value * rate.share / 1e9
    return f"{rate.table[1]:<16}{rate.value / 1e9:>14,.4g}{got:>14,.4g}"


def _number(fact: Fact | None, scale: float) -> str:
    return "-" if fact is None else f"{fact.value / scale:,.4g}"


def _fact(fact: Fact) -> Iterator[str]:
    name = " ".join(fact.path)
    share = f", programs get {fact.share:.0%}" if fact.share != 1 else ""
    yield f"  {name:<44}{_value(fact):>18}{share}"
    for source in (fact.source, fact.share_source):
        if source:
            yield from SOURCES.wrap(source)


def _value(fact: Fact) -> str:
    if fact.unit is Unit.BYTES:
        return f"{fact.value / GIB:,.2f} GiB"
    scale, unit = UNITS.get(fact.unit, (1.0, ""))
    return f"{fact.value / scale:,.6g} {unit}".rstrip()
