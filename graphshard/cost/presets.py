"""Machines from data sheets, for when nothing was measured yet.

In: a preset's name ("h100", or "h100-ib200" with another network) or a device's own name. Out: a
`Machine` all of whose numbers come from presets.toml, each with its source there.
"""

from __future__ import annotations

import difflib
import tomllib
import warnings
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from graphshard.cost.comm import CollectiveKind, Network, Protocol
from graphshard.cost.curve import Trust, line
from graphshard.cost.machine import HostCopies, Machine
from graphshard.cost.roofline import Arithmetic, AttentionRate, Bandwidth, Kernel, Processor
from graphshard.errors import CostError, GraphshardWarning

UNKNOWN = "unknown"
US_PER_S = 1e6


def preset_names() -> tuple[str, ...]:
    """Names that `preset` knows without a network; "-NETWORK" may follow."""
    return tuple(_tables()["device"])


def network_names() -> tuple[str, ...]:
    return tuple(_tables()["network"])


def preset(name: str) -> Machine:
    """The machine called "DEVICE" or "DEVICE-NETWORK". Raises CostError GS501 for another name."""
    tables = _tables()
    device_name, _, network_name = name.lower().partition("-")
    device = tables["device"].get(device_name)
    network = device and tables["network"].get(network_name or device["network"])
    if not network:
        devices, networks = ", ".join(preset_names()), ", ".join(network_names())
        raise CostError(
            "GS501",
            f"no preset {name!r}: {_near(device_name, network_name)}give one of {devices}, "
            f"and after a - one of {networks}",
        )
    library = tables["library"][network["library"]]
    return Machine(
        name.lower(), _processor(device), _network(device, network, library), host=_host(device)
    )


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
    known = [n for n, d in _tables()["device"].items() if any(m in lowered for m in d["match"])]
    if not known:
        warnings.warn(
            f"GS502: no preset for device {device_name!r}: costs are conservative guesses until "
            "`graphshard calibrate` has run on it",
            GraphshardWarning,
            stacklevel=2,
        )
    name = known[0] if known else UNKNOWN
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
    )
