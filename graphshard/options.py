"""`torch.compile(..., backend="graphshard", options={...})`, parsed once into a frozen value."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from graphshard.errors import GraphshardError, OptionsError

DISABLE = "GRAPHSHARD_DISABLE"

# More ranks, steps, sequences or tokens than anyone has.
MOST_COUNT = 2**24
_CHOICES = {
    "compute": ("aten", "inductor"),
    "fallback": ("warn", "error"),
    "reshard": ("fsdp2", "auto"),
    "verify": ("compile", "every", "off"),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for.

    compute: "inductor" compiles the ops between two communication points; "aten" runs the captured
    ATen ops as they are (bitwise equal to eager FSDP2).
    inductor: settings of `torch._inductor.config` for that.
    fallback: "warn" runs what cannot be captured through FSDP2, "error" raises instead.
    dump_dir: folder for the emitted Python and the plan of each graph, or None.
    report_dir: folder for the plan, its page and its trace, of each graph and rank, or None.
    memory_budget_bytes: hard limit on the predicted peak of a rank; the planner then decides what
    the user left open. None: FSDP2's predicted peak, gathers one group ahead as in FSDP2.
    reshard: "fsdp2" keeps gathered what FSDP2's settings say (with a budget: what the user set, the
    planner decides the rest); "auto" leaves it to the planner for all groups.
    verify: "compile": the ranks agree on each new plan before it runs; "every": and on each forward
    call; "off": on nothing.
    machine: what costs are taken from: a preset's name or the path of a calibrated profile; None:
    the preset of the device.
    micro_steps: forward and backward runs per optimizer step, of which the last one synchronises
    gradients (`set_requires_gradient_sync`).
    overlap_optimizer: the first gathers of the next step are issued as soon as the optimizer has
    changed their shards, instead of when the next forward begins.
    replan_after: forwards after which the plan is made again from measured times; None: never.
    """

    compute: str = "inductor"
    fallback: str = "warn"
    dump_dir: Path | None = None
    memory_budget_bytes: int | None = None
    reshard: str = "fsdp2"
    machine: str | None = None
    micro_steps: int = 1
    overlap_optimizer: bool = False
    replan_after: int | None = None
    verify: str = "compile"
    report_dir: Path | None = None
    inductor: tuple[tuple[str, object], ...] = ()

    def terms(self) -> dict[str, object]:
        """By name, what all ranks need alike: it decides what they ask each other and send, or
        what they do when one of them cannot go on."""
        names = ("verify", "fallback", "compute", "reshard", "micro_steps")
        own = {name: getattr(self, name) for name in names}
        return (
            {DISABLE: False}
            | own
            | self.terms_of_calls()
            | {"memory_budget": self.memory_budget_bytes}
        )

    def terms_of_calls(self) -> dict[str, object]:
        """Those of them that act in each call, also in what was compiled with other options."""
        return {
            "verify": self.verify,
            "replan_after": self.replan_after,
            "overlap_optimizer": self.overlap_optimizer,
        }


def parse_options(
    options: Mapping[str, object] | None,
    mode: str | None = None,
    machine: Callable[[str], object] = lambda name: None,
) -> Options:
    """Options over environment (GRAPHSHARD_COMPUTE, GRAPHSHARD_DUMP_DIR) over defaults.

    machine: looks up the option of that name, and raises if there is none.
    mode, and keys that are not graphshard's, are Inductor's. Raises OptionsError (a ValueError) for
    a mode or key that neither knows, with the nearest known key, or for a value that is not among
    the choices.
    """
    if options is not None and not isinstance(options, Mapping):
        raise OptionsError("GS103", f"options={options!r} is no dict of options")
    if mode is not None and not isinstance(mode, str):
        raise OptionsError("GS101", f"mode={mode!r} is no name of a mode")
    given, default = dict(options or {}), Options()
    known = [f.name.removesuffix("_bytes") for f in fields(Options) if f.name != "inductor"]
    foreign = {key: given.pop(key) for key in list(given) if key not in known}
    compute = given.setdefault("compute", os.environ.get("GRAPHSHARD_COMPUTE") or default.compute)
    inductor = _parse_inductor(foreign, mode, known)
    if inductor and compute == "aten":
        names = ", ".join(
            [*map(str, foreign), *([] if mode in (None, "default") else [f"mode={mode!r}"])]
        )
        raise OptionsError("GS104", f"compute={compute!r} compiles nothing: leave out {names}")
    for key, choices in _CHOICES.items():
        if key in given and given[key] not in choices:
            raise OptionsError("GS103", f"option {key}={given[key]!r}; choose one of {choices}")
    dump_dir = given.get("dump_dir", os.environ.get("GRAPHSHARD_DUMP_DIR") or None)
    budget = given.get("memory_budget")
    return Options(
        memory_budget_bytes=None if budget is None else parse_bytes("memory_budget", budget),
        machine=_parse_machine(given.get("machine"), machine),
        micro_steps=parse_count("micro_steps", given.get("micro_steps"), least=1) or 1,
        overlap_optimizer=_parse_switch("overlap_optimizer", given.get("overlap_optimizer")),
        replan_after=parse_count("replan_after", given.get("replan_after"), least=2),
        compute=str(compute),
        inductor=tuple(sorted(inductor.items())),
        fallback=str(given.get("fallback", default.fallback)),
        reshard=str(given.get("reshard", default.reshard)),
        verify=str(given.get("verify", default.verify)),
        dump_dir=_parse_path("dump_dir", dump_dir),
        report_dir=_parse_path("report_dir", given.get("report_dir")),
    )


def _parse_inductor(
    given: Mapping[str, object], mode: str | None, known: Sequence[str]
) -> dict[str, object]:
    """Settings of Inductor: those of `mode`, and `given` over them, as `torch.compile` has it."""
    if not given and mode in (None, "default"):
        return {}
    from torch import _inductor  # takes a second to import

    modes: dict[str, dict[str, object]] = _inductor.list_mode_options()
    if mode is not None and mode not in modes:
        raise OptionsError("GS101", f"mode={mode!r} is none of Inductor's: {', '.join(modes)}")
    settings = {} if mode is None else dict(modes[mode])
    possible = _inductor.list_options()
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if not isinstance(key, str) or name not in possible:
            near = difflib.get_close_matches(str(key), [*known, *possible], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise OptionsError("GS102", f"unknown option {key!r}; {hint}")
        settings[name] = value
    return settings


def _parse_machine(value: object, look_up: Callable[[str], object]) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | Path) or not str(value):
        raise OptionsError("GS103", f"option machine={value!r} is no preset and no path")
    try:
        look_up(str(value))
    except (GraphshardError, OSError) as error:
        why = error.message if isinstance(error, GraphshardError) else error
        raise OptionsError("GS103", f"option machine={str(value)!r}: {why}") from error
    return str(value)


def _parse_path(key: str, value: object) -> Path | None:
    if value is not None and not isinstance(value, str | Path):
        raise OptionsError("GS103", f"option {key}={value!r} is not a path")
    return Path(value) if value else None


def parse_count(key: str, value: object, least: int) -> int | None:
    """A number from `least` to MOST_COUNT, or None for None. Raises OptionsError (GS103)."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_COUNT:
        given = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "that many"
        hint = f"give a number from {least} to {MOST_COUNT:,}"
        raise OptionsError("GS103", f"option {key}={given}; {hint}")
    return value


def _parse_switch(key: str, value: object) -> bool:
    if value is not None and not isinstance(value, bool):
        raise OptionsError("GS103", f"option {key}={value!r}; give True or False")
    return bool(value)


MOST_BYTES = 2**60
_UNITS = {"B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(key: str, value: object) -> int:
    """A number of bytes: an int, or text such as "70GiB" or "512 MB". Raises OptionsError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B)?\s*", str(value), re.IGNORECASE)
    if isinstance(value, bool) or not isinstance(value, int | str) or found is None:
        hint = "give a number of bytes or text such as '70GiB'"
        raise OptionsError("GS103", f"option {key}={value!r} is no size; {hint}")
    size = float(found[1]) * _UNITS[(found[2] or "B").upper()]
    if size >= MOST_BYTES:
        raise OptionsError("GS103", f"option {key}: more than {MOST_BYTES:,} bytes")
    return round(size)


def is_disabled() -> bool:
    """True when GRAPHSHARD_DISABLE takes graphshard out of the process."""
    return os.environ.get(DISABLE, "") not in ("", "0")
