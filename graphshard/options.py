"""`torch.compile(..., backend="graphshard", options={...})`, parsed once into a frozen value."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from graphshard.errors import OptionsError

_CHOICES = {"compute": ("aten",), "fallback": ("warn", "error")}


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for.

    compute: "aten" runs the captured ATen ops as they are (bitwise equal to eager FSDP2).
    fallback: "warn" runs what cannot be captured through FSDP2, "error" raises instead.
    dump_dir: folder for the emitted Python and the plan of each graph, or None.
    """

    compute: str = "aten"
    fallback: str = "warn"
    dump_dir: Path | None = None


def parse_options(options: Mapping[str, object] | None, mode: str | None = None) -> Options:
    """Options over environment (GRAPHSHARD_DUMP_DIR) over defaults.

    Raises OptionsError (a ValueError) for an unknown key, with the nearest known one, or for a
    value that is not among the choices.
    """
    if mode not in (None, "default"):
        raise OptionsError("GS101", f"mode={mode!r} is not supported; leave it out")
    given, default = dict(options or {}), Options()
    known = [f.name for f in fields(Options)]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise OptionsError("GS102", f"unknown option {key!r}; {hint}")
    for key, choices in _CHOICES.items():
        if key in given and given[key] not in choices:
            raise OptionsError("GS103", f"option {key}={given[key]!r}; choose one of {choices}")
    dump_dir = given.get("dump_dir", os.environ.get("GRAPHSHARD_DUMP_DIR") or None)
    if dump_dir is not None and not isinstance(dump_dir, str | Path):
        raise OptionsError("GS103", f"option dump_dir={dump_dir!r} is not a path")
    return Options(
        compute=str(given.get("compute", default.compute)),
        fallback=str(given.get("fallback", default.fallback)),
        dump_dir=Path(dump_dir) if dump_dir else None,
    )


def is_disabled() -> bool:
    """True when GRAPHSHARD_DISABLE takes graphshard out of the process."""
    return os.environ.get("GRAPHSHARD_DISABLE", "") not in ("", "0")
