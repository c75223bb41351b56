"""The file that `graphshard calibrate` writes, and how it joins a preset.

In: a calibration's results. Out: versioned JSON and back, and a `Machine` in which what was
measured wins over what was assumed. Every fit keeps its samples, so that a file can be judged (and
fitted again) later.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from graphshard.cost.comm import Collective, Group, Measured
from graphshard.cost.curve import Curve, Fit, Sample, SizeClass, Trust
from graphshard.cost.machine import Machine
from graphshard.cost.roofline import Arithmetic
from graphshard.errors import CostError

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

    kind: Collective
    group: Group
    fit: Fit


@dataclass(frozen=True, slots=True)
class Profile:
    """Results of one calibration, the same on every rank.

    arithmetic, attention: matrix products and causal attention per dtype, amounts are flops.
    memory: a pointwise op, amounts are bytes read and written.
    """

    origin: Origin
    comm: tuple[CommFit, ...]
    arithmetic: tuple[tuple[str, Fit], ...]
    attention: tuple[tuple[str, Fit], ...]
    memory: Fit

    def to_json(self) -> str:
        data = {
            "version": PROFILE_VERSION,
            "origin": asdict(self.origin),
            "comm": [
                {"kind": c.kind, "group": asdict(c.group), **_fit_to_dict(c.fit)} for c in self.comm
            ],
            "arithmetic": {dtype: _fit_to_dict(fit) for dtype, fit in self.arithmetic},
            "attention": {dtype: _fit_to_dict(fit) for dtype, fit in self.attention},
            "memory": _fit_to_dict(self.memory),
        }
        return json.dumps(data, indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Profile:
        """Read what `to_json` wrote. Raises CostError (GS503) for anything else."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise CostError("GS503", f"not JSON: {error}") from error
        version = data.get("version") if isinstance(data, dict) else None
        if version != PROFILE_VERSION:
            raise CostError("GS503", f"version {PROFILE_VERSION} expected, found {version!r}")
        try:
            return _profile_from_dict(data)
        except KeyError as error:
            raise CostError("GS503", f"entry {error} is missing") from error
        except (AttributeError, TypeError, ValueError) as error:
            raise CostError("GS503", f"broken entry: {error}") from error


def read_profile(path: Path) -> Profile:
    """Raises OSError, or CostError (GS503) that names the file."""
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise CostError("GS503", f"{path}: not text") from error
    except CostError as error:
        raise CostError(error.code, f"{path}: {error.message}") from error


def calibrated(preset: Machine, profile: Profile) -> Machine:
    """The preset with everything that the profile measured in place of its own numbers.

    A dtype or collective that was not measured keeps the preset's.
    """
    measured = tuple(
        Arithmetic(dtype, fit.curve, Trust.CALIBRATED, attention)
        for fits, attention in ((profile.arithmetic, False), (profile.attention, True))
        for dtype, fit in fits
    )
    found = {(a.dtype, a.attention) for a in measured}
    others = tuple(a for a in preset.processor.arithmetic if (a.dtype, a.attention) not in found)
    processor = replace(
        preset.processor,
        arithmetic=measured + others,
        memory=profile.memory.curve,
        memory_trust=Trust.CALIBRATED,
    )
    comm = tuple(Measured(c.kind, c.group, c.fit.curve) for c in profile.comm)
    return replace(preset, processor=processor, measured=comm)


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


def _fit_from_dict(data: dict[str, Any]) -> Fit:
    classes = tuple(
        SizeClass(math.inf if c["upto"] is None else _positive(c["upto"]), _cost(c["us_per_unit"]))
        for c in data["classes"]
    )
    samples = tuple(Sample(_positive(amount), _positive(us)) for amount, us in data["samples"])
    return Fit(Curve(_cost(data["base_us"]), classes), samples)


def _profile_from_dict(data: dict[str, Any]) -> Profile:
    return Profile(
        origin=Origin(**data["origin"]),
        comm=tuple(
            CommFit(Collective(c["kind"]), _group_from_dict(c["group"]), _fit_from_dict(c))
            for c in data["comm"]
        ),
        arithmetic=_fits_from_dict(data["arithmetic"]),
        attention=_fits_from_dict(data["attention"]),
        memory=_fit_from_dict(data["memory"]),
    )


def _fits_from_dict(data: dict[str, Any]) -> tuple[tuple[str, Fit], ...]:
    return tuple((dtype, _fit_from_dict(fit)) for dtype, fit in data.items())


def _group_from_dict(data: dict[str, Any]) -> Group:
    ranks, per_node = int(_positive(data["ranks"])), int(_positive(data["ranks_per_node"]))
    return Group(ranks, per_node, str(data["name"]))


def _cost(value: Any) -> float:
    if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is not a cost")
    return float(value)


def _positive(value: Any) -> float:
    if _cost(value) == 0:
        raise ValueError("0 where a positive number belongs")
    return float(value)
