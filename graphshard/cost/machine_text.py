"""A machine as text, which one rank writes and the others of its job read.

Numbers come back bit for bit, so all ranks plan with the same machine. A machine with symbols in it
has no text. Standard library only.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from graphshard.cost.comm import (
    CollectiveKind,
    MeasuredCurve,
    Network,
    Protocol,
    RankGroup,
    SwitchLevel,
)
from graphshard.cost.curve import Curve, SizeClass, Trust
from graphshard.cost.machine import HostCopies, Machine
from graphshard.cost.roofline import Arithmetic, AttentionRate, Bandwidth, Kernel, Processor


def to_text(machine: Machine) -> str:
    return json.dumps(asdict(machine), separators=(",", ":"))


def from_text(text: str) -> Machine:
    """Raises KeyError, TypeError or ValueError for what `to_text` did not write."""
    data = json.loads(text)
    network = data["network"]
    traffic = tuple((CollectiveKind(kind), share) for kind, share in network["traffic"])
    protocols = tuple(Protocol(**p) for p in network["protocols"])
    levels = tuple(SwitchLevel(**level) for level in network["levels"])
    return Machine(
        data["name"],
        _processor(data["processor"]),
        Network(**{**network, "protocols": protocols, "traffic": traffic, "levels": levels}),
        tuple(map(_measured, data["measured"])),
        data["host"] and _host(data["host"]),
        data["ranks_per_node"],
        data["compute_spread"],
        data["issue_us"],
        data["wait_us"],
    )


def _processor(data: dict[str, Any]) -> Processor:
    return Processor(
        tuple(Arithmetic(**_rate(entry)) for entry in data["arithmetic"]),
        _curve(data["memory"]),
        Trust(data["memory_trust"]),
        data["capacity_bytes"],
        tuple(AttentionRate(**_rate(entry)) for entry in data["attention"]),
        tuple(Bandwidth(Kernel(b["kernel"]), _curve(b["curve"])) for b in data["slower"]),
    )


def _rate(data: dict[str, Any]) -> dict[str, Any]:
    return {**data, "curve": _curve(data["curve"]), "trust": Trust(data["trust"])}


def _host(data: dict[str, Any]) -> HostCopies:
    return HostCopies(_curve(data["curve"]), Trust(data["trust"]))


def _measured(data: dict[str, Any]) -> MeasuredCurve:
    kind, trust = CollectiveKind(data["kind"]), Trust(data["trust"])
    return MeasuredCurve(kind, RankGroup(**data["group"]), _curve(data["curve"]), trust)


def _curve(data: dict[str, Any]) -> Curve:
    return Curve(data["base_us"], tuple(SizeClass(**c) for c in data["classes"]))
