"""The file that `graphshard calibrate` writes, and how it joins a preset.

In: a calibration's results. Out: versioned JSON and back, and a `Machine` in which what was
measured wins over what was assumed. Every fit keeps its samples, so that a file can be judged (and
fitted again) later.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from graphshard.cost import presets
from graphshard.cost.comm import CollectiveKind, MeasuredCurve, RankGroup
from graphshard.cost.curve import Curve, Fit, Sample, SizeClass, Trust
from graphshard.cost.machine import HostCopies, Machine
from graphshard.cost.roofline import Arithmetic, AttentionRate
from graphshard.errors import CostError
from graphshard.files.decode import Amount, DecodeError, Positive, decode, parse
from graphshard.files.reading import names_file, read_bytes, shown

PROFILE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Origin:
    """Where and how a profile was measured. `date` is ISO 8601 in UTC."""

    device: str
    host: str
    cpus: int
    threads: int
    world_size: int
    backend: str
    torch_version: str
    date: str
    command: str


@dataclass(frozen=True, slots=True)
class CommFit:
    """One kind of collective on one group; amounts are the ring's bytes per rank."""

    kind: CollectiveKind
    group: RankGroup
    fit: Fit


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Results of one calibration, the same on every rank.

    arithmetic, attention: matrix products and causal attention per dtype, amounts are flops.
    memory: a pointwise op, amounts are bytes read and written. host: a copy to the host or back,
    the slower of the two, on all ranks at once; None where the device is the host. issue_us,
    wait_us: see `Machine`; None where nobody measured a step.
    """

    origin: Origin
    comm: tuple[CommFit, ...]
    arithmetic: tuple[tuple[str, Fit], ...]
    attention: tuple[tuple[str, Fit], ...]
    memory: Fit
    host: Fit | None = None
    issue_us: float | None = None
    wait_us: float | None = None

    def to_json(self) -> str:
        data = {
            "version": PROFILE_VERSION,
            "origin": asdict(self.origin),
            "comm": [
                {"kind": c.kind, "group": _group_to_dict(c.group), **_fit_to_dict(c.fit)}
                for c in self.comm
            ],
            "arithmetic": {dtype: _fit_to_dict(fit) for dtype, fit in self.arithmetic},
            "attention": {dtype: _fit_to_dict(fit) for dtype, fit in self.attention},
            "memory": _fit_to_dict(self.memory),
            **({} if self.host is None else {"host": _fit_to_dict(self.host)}),
            **({} if self.issue_us is None else {"issue_us": self.issue_us}),
            **({} if self.wait_us is None else {"wait_us": self.wait_us}),
        }
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str | bytes) -> CostProfile:
        """Read what `to_json` wrote. Raises CostError (GS503) that names the place."""
        try:
            data = parse(text)
            version = data.get("version") if isinstance(data, dict) else None
            if version != PROFILE_VERSION:
                raise DecodeError(f"version {PROFILE_VERSION} expected, found {version!r}")
            return _profile_of(decode(_ProfileFile, data))
        except DecodeError as error:
            raise CostError("GS503", str(error)) from error


def read_profile(path: Path) -> CostProfile:
    """Raises FileError if it cannot be read, or CostError (GS503) that names the file."""
    raw = read_bytes(path)
    try:
        return CostProfile.from_json(raw)
    except CostError as error:
        raise CostError(error.code, f"{shown(path)}: {error.message}") from error


def look_up(machine: str) -> None:
    """Raises CostError or FileError if there is no such preset or profile."""
    if names_file(machine):
        read_profile(Path(machine))
    else:
        presets.preset(machine)


def calibrated(preset: Machine, profile: CostProfile) -> Machine:
    """The preset with everything that the profile measured in place of its own numbers.

    A dtype or collective that was not measured keeps the preset's.
    """
    own = preset.processor
    arithmetic = tuple(Arithmetic(d, fit.curve, Trust.CALIBRATED) for d, fit in profile.arithmetic)
    attention = tuple(AttentionRate(d, fit.curve, Trust.CALIBRATED) for d, fit in profile.attention)
    products, attentions = ({entry.dtype for entry in of} for of in (arithmetic, attention))
    processor = replace(
        own,
        arithmetic=arithmetic + tuple(a for a in own.arithmetic if a.dtype not in products),
        attention=attention + tuple(a for a in own.attention if a.dtype not in attentions),
        memory=profile.memory.curve,
        memory_trust=Trust.CALIBRATED,
    )
    comm = tuple(MeasuredCurve(c.kind, c.group, c.fit.curve) for c in profile.comm)
    host = profile.host and HostCopies(profile.host.curve, Trust.CALIBRATED)
    issue_us = preset.issue_us if profile.issue_us is None else profile.issue_us
    wait_us = preset.wait_us if profile.wait_us is None else profile.wait_us
    return replace(
        preset,
        processor=processor,
        measured=comm,
        host=host or preset.host,
        issue_us=issue_us,
        wait_us=wait_us,
    )


def _group_to_dict(group: RankGroup) -> dict[str, Any]:
    """Which nodes it was measured on, a profile does not say."""
    return {"ranks": group.ranks, "ranks_per_node": group.ranks_per_node, "name": group.name}


def _fit_to_dict(fit: Fit) -> dict[str, Any]:
    """JSON has no infinity: the last class's bound is null. Residuals are for the reader."""
    return {
        "base_us": fit.curve.base_us,
        "classes": [
            {**asdict(c), "upto": None if math.isinf(c.upto) else c.upto} for c in fit.curve.classes
        ],
        "samples": [[s.amount, s.us] for s in fit.samples],
        "residuals": [round(r, 4) for r in fit.residuals],
    }


# -- the file's own form ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ClassFile:
    """upto: None for the last class, which is open."""

    upto: Amount | None
    us_per_unit: Amount


@dataclass(frozen=True, slots=True)
class _FitFile:
    base_us: Amount
    classes: tuple[_ClassFile, ...]
    samples: tuple[tuple[Amount, Amount], ...]
    residuals: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class _GroupFile:
    ranks: Positive
    ranks_per_node: Positive
    name: str


@dataclass(frozen=True, slots=True)
class _CommFile(_FitFile):
    # Keyword-only, since the fit's last field has a default.
    kind: CollectiveKind = field(kw_only=True)
    group: _GroupFile = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class _ProfileFile:
    version: int
    origin: Origin
    comm: tuple[_CommFile, ...]
    arithmetic: dict[str, _FitFile]
    attention: dict[str, _FitFile]
    memory: _FitFile
    host: _FitFile | None = None
    issue_us: Amount | None = None
    wait_us: Amount | None = None


def _profile_of(data: _ProfileFile) -> CostProfile:
    comm = []
    for place, c in enumerate(data.comm):
        group = RankGroup(c.group.ranks, c.group.ranks_per_node, c.group.name)
        comm.append(CommFit(c.kind, group, _fit_of(c, "comm", place)))
    return CostProfile(
        origin=data.origin,
        comm=tuple(comm),
        arithmetic=tuple((k, _fit_of(fit, "arithmetic", k)) for k, fit in data.arithmetic.items()),
        attention=tuple((k, _fit_of(fit, "attention", k)) for k, fit in data.attention.items()),
        memory=_fit_of(data.memory, "memory"),
        host=None if data.host is None else _fit_of(data.host, "host"),
        issue_us=data.issue_us,
        wait_us=data.wait_us,
    )


def _fit_of(data: _FitFile, *place: str | int) -> Fit:
    """The fit at `place` of the file. Raises DecodeError if it is none."""
    classes = tuple(
        SizeClass(math.inf if c.upto is None else c.upto, c.us_per_unit) for c in data.classes
    )
    samples = tuple(Sample(amount, us) for amount, us in data.samples)
    fault = _fault(data.base_us, classes, samples)
    if fault is not None:
        error = DecodeError(fault)
        error.path[:] = place
        raise error
    return Fit(Curve(data.base_us, classes), samples)


def _fault(
    base_us: float, classes: tuple[SizeClass, ...], samples: tuple[Sample, ...]
) -> str | None:
    bounds = [c.upto for c in classes]
    if not bounds or not math.isinf(bounds[-1]) or any(a >= b for a, b in pairwise([0.0, *bounds])):
        return f"size classes must rise from 0 and end with an open one (null), found {bounds}"
    if any(s.amount <= 0 or s.us <= 0 for s in samples):
        return "samples have amounts and times above 0"
    if base_us + sum(c.us_per_unit for c in classes) <= 0:
        return "work that takes no time"
    return None
