"""Machines from data sheets, for when nothing was measured yet.

In: a preset's name ("h100", "h100-ib200" with another network, or "h100-200gbit" with a rate
between nodes, "h100-ib400:pod=32:oversubscribed=2" with levels of switches) or a device's own name.
Out: a `Machine` all of whose numbers but such a rate and levels come from presets.toml, each with
its source there.
"""

from __future__ import annotations

import difflib
import re
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any

from graphshard.cost.comm import CollectiveKind, Network, Protocol, SwitchLevel
from graphshard.cost.curve import Trust, line
from graphshard.cost.machine import HostCopies, Machine
from graphshard.cost.roofline import Arithmetic, AttentionRate, Bandwidth, Kernel, Processor
from graphshard.errors import CostError, GraphshardWarning
from graphshard.files.reading import names_file

UNKNOWN = "unknown"
US_PER_S = 1e6
# The source of a rate that stands in a machine's name.
GIVEN = "as the name says"
BITS = 8
GIGA = 1e9
# GPUs in one node of the usual servers (DGX and HGX A100, H100, H200, B200).
RANKS_PER_NODE = 8
# Slower or faster than anything that joins nodes, in bytes per second.
SLOWEST, FASTEST = 1e6, 1e13
# Nodes of a pod, and how many times more their adapters send than leaves it.
POD, OVERSUBSCRIBED = "pod", "oversubscribed"
MOST_NODES, MOST_OVERSUBSCRIBED = 10**6, 1e3
LEVELS = f"and after that levels of switches, as :{POD}=32:{OVERSUBSCRIBED}=2"
_LEVEL = re.compile(rf"(?:{POD}=(\d+):)?{OVERSUBSCRIBED}=(\d+(?:\.\d+)?)(?::|$)")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*(gbit|gbit/s|gbps|gb/s)", re.IGNORECASE)


def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows without a network; "-NETWORK" may follow."""
    return tuple(_tables()["device"])


def network_names() -> tuple[str, ...]:
    return tuple(_tables()["network"])


def preset(name: str) -> Machine:
    """The machine called "DEVICE", "DEVICE-NETWORK" or "DEVICE-RATE".

    A rate is what one GPU has of its node's adapters, as "200Gbit" or "25GB/s"; programs get the
    share of it that presets.toml says. A network or a rate may have levels of switches behind it,
    as "ib400:pod=32:oversubscribed=2"; a pod has one node if it is not said. Raises CostError GS501
    for another name.
    """
    tables = _tables()
    device_name, _, whole_name = name.lower().partition("-")
    network_name, colon, level_text = whole_name.partition(":")
    device = tables["device"].get(device_name)
    rate = line_rate(network_name)
    network = device and tables["network"].get(network_name or device["network"])
    if device and rate is not None:
        network, name = _network_of(rate), f"{device_name}-{rate_name(rate)}"
        name += colon + level_text
    if network and colon:
        network = _with_levels(network, level_text, name)
    if not network:
        devices, networks = ", ".join(preset_names()), ", ".join(network_names())
        raise CostError(
            "GS501",
            f"no preset {name!r}: {_near(device_name, network_name)}give one of {devices}, "
            f"and after a - one of {networks}, or a rate per GPU such as 200Gbit or 25GB/s, "
            f"{LEVELS}",
        )
    library = tables["library"][network["library"]]
    return Machine(
        name.lower(),
        _processor(device),
        _network(device, network, library),
        host=_host(device),
        ranks_per_node=int(device.get("ranks_per_node", {"value": RANKS_PER_NODE})["value"]),
        compute_spread=float(device.get("compute_spread", {"value": 0.0})["value"]),
    )


def with_network(name: str, network: str) -> str:
    """The name of preset `name` with another network. Raises CostError GS501 if it names one, or
    is the path of a profile, which has measured its own."""
    if names_file(name):
        raise CostError("GS501", f"{name!r} is a profile, of one network: leave out {network!r}")
    if "-" in name:
        raise CostError("GS501", f"{name!r} names its network already: leave out {network!r}")
    return f"{name}-{network.strip()}"


def line_rate(text: str) -> float | None:
    """Bytes per second of "200Gbit", "200Gbit/s", "200Gbps" or "25GB/s"; None if it is no rate."""
    found = _RATE.fullmatch(text.strip())
    if found is None:
        return None
    bits = 1 if found[2].lower() == "gb/s" else BITS
    rate = float(found[1]) * GIGA / bits
    return rate if SLOWEST <= rate <= FASTEST else None


def rate_name(bytes_per_s: float) -> str:
    """One name for one rate: "200gbit"."""
    return f"{bytes_per_s * BITS / GIGA:.6g}gbit"


def _network_of(bytes_per_s: float) -> dict[str, Any]:
    """As one of presets.toml's networks."""
    given = _tables()["given_rate"]
    share = given["share"]
    rate = {"value": bytes_per_s, "share": share["value"], "share_from": share["from"]}
    return {"library": given["library"], "inter_bytes_per_s": rate}


def _with_levels(network: dict[str, Any], text: str, name: str) -> dict[str, Any]:
    """`network` with the levels of `text` in the place of its own. Raises CostError GS501."""
    found = [(int(one[1] or 1), float(one[2])) for one in _LEVEL.finditer(text)]
    nodes = [pod for pod, _ in found]
    if (
        not found
        or _LEVEL.sub("", text)
        or text.endswith(":")
        or not all(1 <= pod <= MOST_NODES for pod in nodes)
        or nodes != sorted(set(nodes))
        or not all(1 <= times <= MOST_OVERSUBSCRIBED for _, times in found)
    ):
        raise CostError(
            "GS501",
            f"no preset {name!r}: {LEVELS}, a number of nodes (1 if not given) and how many times "
            "more their adapters send than leaves them, from small pods to large ones",
        )
    levels = [{"nodes": {"value": pod}, "oversubscribed": {"value": times}} for pod, times in found]
    return {**network, "level": levels}


def _near(device_name: str, network_name: str) -> str:
    """The nearest name that there is, as the start of a hint; "" if none is near."""
    device = difflib.get_close_matches(device_name, preset_names(), n=1)
    network = difflib.get_close_matches(network_name, network_names(), n=1) if network_name else []
    if not device or bool(network_name) != bool(network):
        return ""
    return f"did you mean {'-'.join((*device, *network))!r}? Else "


def preset_for(device_name: str, network: str | None = None) -> Machine:
    """The preset of a device by the name that torch reports, such as "NVIDIA H100 80GB HBM3".

    An unknown device gets conservative numbers and a GraphshardWarning (GS502), which Python
    shows once.
    """
    lowered = device_name.lower()
    devices = _tables()["device"].items()
    known = [(len(m), n) for n, d in devices for m in d["match"] if m in lowered]
    if not known:
        warnings.warn(
            f"GS502: no preset for device {device_name!r}: costs are conservative guesses until "
            "`graphshard calibrate` has run on it",
            GraphshardWarning,
            stacklevel=2,
        )
    _, name = max(known, default=(0, UNKNOWN))  # "gb200" says more than "b200"
    return preset(f"{name}-{network}" if network else name)


def sources() -> dict[str, str]:
    """Every number of presets.toml by its path, with where it comes from."""
    texts = _tables()["sources"]
    found: dict[str, str] = {}
    for path, entry in _entries(_tables(), ()):
        found[".".join(path)] = texts[entry["from"]]
        if "share" in entry:
            found[".".join((*path, "share"))] = texts[entry["share_from"]]
    return found


class Unit(StrEnum):
    """Of a number in presets.toml, as its name there says."""

    BYTES = "bytes"
    BYTES_PER_S = "bytes_per_s"
    FLOPS_PER_S = "flops_per_s"
    US = "us"
    PLAIN = ""


@dataclass(frozen=True, slots=True)
class Fact:
    """One number of presets.toml. table: "device", "network" or "library" and its name there.

    share: what programs get of it, 1 if all.
    """

    table: tuple[str, str]
    path: tuple[str, ...]
    unit: Unit
    value: float
    source: str
    share: float = 1.0
    share_source: str = ""


def facts_of(name: str) -> tuple[Fact, ...]:
    """Every number of a device, a network or both ("h100-ib200"), and of the network's library.

    Raises CostError GS501 for another name.
    """
    tables = _tables()
    networks = tables["network"]
    if name.lower() in networks:
        device_name, network_name = "", name.lower()
    else:
        device_name, _, network_name = preset(name).name.partition("-")
        network_name = network_name or tables["device"][device_name]["network"]
    plain_name, _, level_text = network_name.partition(":")
    rate = line_rate(plain_name)
    network = networks[plain_name] if rate is None else _network_of(rate)
    if level_text:
        network = _with_levels(network, level_text, name)
    found = list(_facts(("device", device_name), tables["device"].get(device_name, {})))
    found += _facts(("network", network_name), network)
    return tuple([*found, *_facts(("library", network["library"]), _library_of(network))])


def _facts(table: tuple[str, str], content: dict[str, Any]) -> Iterator[Fact]:
    texts = _tables()["sources"]
    for path, entry in _entries(content, ()):
        unit = next(unit for unit in Unit if any(p.endswith(unit) for p in path))
        source = texts[entry["from"]] if "from" in entry else GIVEN
        value, share = float(entry["value"]), float(entry.get("share", 1))
        yield Fact(table, path, unit, value, source, share, texts.get(entry.get("share_from"), ""))


def _library_of(network: dict[str, Any]) -> dict[str, Any]:
    """Protocols by their names."""
    library = _tables()["library"][network["library"]]
    protocols = {protocol["name"]: protocol for protocol in library["protocol"]}
    return {**library, "protocol": protocols}


@cache
def _tables() -> dict[str, Any]:
    text = files("graphshard.cost").joinpath("presets.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _entries(table: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Every `{ value = ..., from = ... }` below `table`."""
    if isinstance(table, list):
        table = {str(i): item for i, item in enumerate(table)}
    if not isinstance(table, dict):
        return
    if "value" in table:
        yield path, table
        return
    for key, inner in table.items():
        yield from _entries(inner, (*path, key))


def _number(entry: dict[str, Any]) -> float:
    return float(entry["value"] * entry.get("share", 1.0))


def _per_us(entry: dict[str, Any]) -> float:
    return _number(entry) / US_PER_S


def _processor(device: dict[str, Any]) -> Processor:
    launch_us = _number(device["launch_us"])
    return Processor(
        arithmetic=tuple(
            Arithmetic(dtype, line(launch_us, _per_us(entry)), Trust.PRESET)
            for dtype, entry in device["flops_per_s"].items()
        ),
        memory=line(launch_us, _per_us(device["memory_bytes_per_s"])),
        memory_trust=Trust.PRESET,
        capacity_bytes=int(device["capacity_bytes"]["value"])
        if "capacity_bytes" in device
        else None,
        attention=tuple(
            _attention(dtype, entry, launch_us)
            for entry in device.get("attention", ())
            for dtype in entry["dtypes"]
        ),
        slower=tuple(
            Bandwidth(Kernel(kernel), line(launch_us, _per_us(entry)))
            for kernel, entry in device.get("kernel_bytes_per_s", {}).items()
        ),
    )


def _attention(dtype: str, entry: dict[str, Any], launch_us: float) -> AttentionRate:
    return AttentionRate(
        dtype,
        line(launch_us, _per_us(entry["flops_per_s"])),
        Trust.PRESET,
        entry["head_dim"],
        entry["backward"],
        _number(entry["half_length"]),
    )


def _host(device: dict[str, Any]) -> HostCopies | None:
    entry = device.get("host_bytes_per_s")
    return entry and HostCopies(line(_number(device["launch_us"]), _per_us(entry)))


def _network(device: dict[str, Any], network: dict[str, Any], library: dict[str, Any]) -> Network:
    return Network(
        intra_bytes_per_us=_per_us(device["intra_bytes_per_s"]),
        inter_bytes_per_us=_per_us(network["inter_bytes_per_s"]),
        protocols=tuple(
            Protocol(**{k: _number(v) for k, v in protocol.items() if k != "name"})
            for protocol in library["protocol"]
        ),
        traffic=tuple(
            (CollectiveKind(k), _number(v)) for k, v in library.get("traffic", {}).items()
        ),
        in_place=library["in_place"]["value"],
        concurrent=library["concurrent"]["value"],
        clones=library["clones"]["value"],
        levels=tuple(
            SwitchLevel(int(level["nodes"]["value"]), _number(level["oversubscribed"]))
            for level in network.get("level", ())
        ),
    )
