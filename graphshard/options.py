"""`torch.compile(..., backend="graphshard", options={...})`, parsed once into a frozen value.

What the script does not say may stand in the environment or a file of the project
(`graphshard.files.configuration`).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path

from graphshard.errors import GraphshardError, OptionsError
from graphshard.files.configuration import IN_CODE, Given, Origin, configured
from graphshard.files.reading import names_file

DISABLE = "GRAPHSHARD_DISABLE"

# More ranks, steps, sequences or tokens than anyone has.
MOST_COUNT = 2**24
_CHOICES = {
    "compute": ("aten", "inductor"),
    "fallback": ("warn", "error"),
    "offload": ("auto", "never"),
    "optimizer": ("adamw", "adamw_fused", "adamw_8bit", "sgd", "sgd_momentum"),
    "recompute": ("auto", "user"),
    "reshard": ("fsdp2", "auto"),
    "schedule": ("fsdp2", "planned"),
    "verify": ("compile", "every", "off"),
}


class Device(Enum):
    """A budget that is found where the model runs."""

    MEMORY = "device"


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for.

    compute: "inductor" compiles the ops between two communication points; "aten" runs the captured
    ATen ops as they are (bitwise equal to eager FSDP2).
    inductor: settings of `torch._inductor.config` for that.
    fallback: "warn" runs what cannot be captured through FSDP2, "error" raises instead.
    dump_dir: folder for the emitted Python and the plan of each graph, or None.
    report_dir: folder for the plan, its page and its trace, of each graph and rank, or None.
    schedule: "planned": the planner decides what the user left open; "fsdp2": FSDP2's order and
    what it keeps, gathers one group ahead.
    memory_budget: hard limit on the predicted peak of a rank in bytes, or what its device has.
    None: FSDP2's predicted peak.
    recompute: "user": regions of the model that are checkpointed are computed again as the user
    says; "auto": the planner decides what is, where their policy leaves it open; None: "auto" with
    a memory budget, else "user".
    offload: "auto": with a memory budget, the host may hold activations from forward to backward;
    "never": it does not.
    reshard: "fsdp2" keeps gathered what FSDP2's settings say ("planned": what the user set, the
    planner decides the rest); "auto" leaves it to the planner for all groups.
    verify: "compile": the ranks agree on each new plan before it runs; "every": and on each forward
    call; "off": on nothing.
    machine: what costs are taken from: a preset's name or the path of a calibrated profile; None:
    the preset of the device.
    optimizer, clip: what steps the parameters, and whether gradients are clipped by their norm
    before: part of the predicted step and peak.
    micro_steps: forward and backward runs per optimizer step, of which the last one synchronises
    gradients (`set_requires_gradient_sync`).
    overlap_optimizer: the first gathers of the next step are issued as soon as the optimizer has
    changed their shards, instead of when the next forward begins.
    replan_after: forwards after which the plan is made again from measured times, once; 0: never;
    None: what is planned without a calibrated profile tunes itself.
    promote: the root is compiled in the place of blocks in it, or of a module around it.
    given: what was written, and where, by the name that users write.
    """

    compute: str = "inductor"
    fallback: str = "warn"
    dump_dir: Path | None = None
    memory_budget: int | Device | None = None
    reshard: str = "fsdp2"
    machine: str | None = None
    micro_steps: int = 1
    overlap_optimizer: bool = False
    replan_after: int | None = None
    verify: str = "compile"
    schedule: str = "planned"
    report_dir: Path | None = None
    promote: bool = True
    recompute: str | None = None
    offload: str = "auto"
    optimizer: str = "adamw"
    clip: bool = False
    inductor: tuple[tuple[str, object], ...] = ()
    given: tuple[tuple[str, Given], ...] = field(default=(), compare=False)

    @property
    def is_planned(self) -> bool:
        return self.schedule == "planned"

    @property
    def replaces_checkpoints(self) -> bool:
        """The planner decides in the place of the user's checkpoints."""
        if self.recompute is None:
            return self.memory_budget is not None
        return self.recompute == "auto"

    @property
    def offloads(self) -> bool:
        """The plan may have the host hold activations."""
        return self.offload == "auto" and self.memory_budget is not None

    def terms(self) -> dict[str, object]:
        """By name, what all ranks need alike: it decides what they ask each other and send, or
        what they do when one of them cannot go on."""
        decide = ("verify", "fallback", "compute", "schedule", "reshard", "micro_steps", "promote")
        names = (*decide, "optimizer", "clip")
        own = {name: getattr(self, name) for name in names}
        budget = self.memory_budget
        said = budget.value if isinstance(budget, Device) else budget
        rest = {
            "memory_budget": said,
            "recompute": "auto" if self.replaces_checkpoints else "user",
            "offload": "auto" if self.offloads else "never",
        }
        return {DISABLE: False} | own | self.terms_of_calls() | rest

    def terms_of_calls(self) -> dict[str, object]:
        """Those of them that act in each call, also in what was compiled with other options."""
        return {
            "verify": self.verify,
            "replan_after": self.replan_after,
            "overlap_optimizer": self.overlap_optimizer,
        }


def parse_options(
    options: Mapping[str, object] | Options | None,
    mode: str | None = None,
    machine: Callable[[str], object] = lambda name: None,
    elsewhere: Mapping[str, Given] | None = None,
) -> Options:
    """Options over what environment and file give over defaults; what is parsed stays as it is.

    machine: looks up the option of that name, and raises if there is none. elsewhere: what stands
    in the environment and a file; None: they are read.
    mode, and keys that are not graphshard's, are Inductor's. Raises OptionsError (a ValueError) for
    a mode or key that neither knows, with the nearest known key, or for a value that is not among
    the choices.
    """
    if isinstance(options, Options):
        return options
    if options is not None and not isinstance(options, Mapping):
        raise OptionsError("GS103", f"options={options!r} is no dict of options")
    if mode is not None and not isinstance(mode, str):
        raise OptionsError("GS101", f"mode={mode!r} is no name of a mode")
    code = {key: Given(value, IN_CODE) for key, value in (options or {}).items()}
    given = {**(configured() if elsewhere is None else elsewhere), **code}
    own = _without_weaker({key: given.pop(key) for key in _PARSERS if key in given})
    values = {key: _parsed(key, found) for key, found in own.items()}
    parsed = Options(
        **values,  # type: ignore[arg-type]
        inductor=tuple(sorted(_inductor_settings(given, mode, own.get("compute")).items())),
        given=tuple((own | given).items()),
    )
    if parsed.machine is not None:
        with _from(own["machine"].origin):
            _look_up(parsed.machine, machine)
    return parsed


def _without_weaker(own: dict[str, Given]) -> dict[str, Given]:
    """`schedule="fsdp2"` plans nothing: what a weaker place gives for a planner is left out.

    Raises OptionsError for what as strong a one gives.
    """
    schedule = own.get("schedule")
    if schedule is None or schedule.value != "fsdp2":
        return own
    nothing = {
        "memory_budget": (None, "fsdp2"),
        "reshard": ("fsdp2",),
        "recompute": (None, "user"),
    }
    asks = {k: own[k] for k in nothing if k in own and own[k].value not in nothing[k]}
    for key in _as_strong(asks, schedule):
        with _from(own[key].origin):
            raise OptionsError("GS103", f"schedule='fsdp2' plans nothing: leave out {key}")
    return {key: found for key, found in own.items() if key not in asks}


def _as_strong(given: Mapping[str, Given], other: Given) -> list[str]:
    """The names of those that stand in no weaker place than `other`, which excludes them."""
    return [str(k) for k, v in given.items() if v.origin.source <= other.origin.source]


def _parsed(key: str, given: Given) -> object:
    with _from(given.origin):
        return _PARSERS[key](key, given)


@contextmanager
def _from(origin: Origin) -> Iterator[None]:
    """What is wrong with an option that stands in no code says where it stands."""
    try:
        yield
    except OptionsError as error:
        if origin == IN_CODE:
            raise
        raise OptionsError(error.code, f"{error.message} (from {origin})") from error


def _inductor_settings(
    given: Mapping[str, Given], mode: str | None, compute: Given | None
) -> dict[str, object]:
    """Settings of Inductor: those of `mode`, and `given` over them, as `torch.compile` has it.

    compute: what was given for it. "aten" takes no settings; those from a weaker place than its own
    are left out.
    """
    if not given and mode in (None, "default"):
        return {}
    from torch import _inductor  # takes a second to import

    modes: dict[str, dict[str, object]] = _inductor.list_mode_options()
    if mode is not None and mode not in modes:
        raise OptionsError("GS101", f"mode={mode!r} is none of Inductor's: {', '.join(modes)}")
    possible = _inductor.list_options()
    names = {key: _name_of(key, found.origin, possible) for key, found in given.items()}
    if compute is not None and compute.value == "aten":
        refused = _as_strong(given, compute)
        refused += [f"mode={mode!r}"] if mode not in (None, "default") else []
        if refused:
            keys = ", ".join(refused)
            raise OptionsError("GS104", f"compute='aten' compiles nothing: leave out {keys}")
        return {}
    settings = {} if mode is None else dict(modes[mode])
    return settings | {names[key]: found.value for key, found in given.items()}


def _name_of(key: object, origin: Origin, possible: Sequence[str]) -> str:
    """Of a setting of Inductor."""
    name = str(key).replace("-", "_")
    if isinstance(key, str) and name in possible:
        return name
    near = difflib.get_close_matches(str(key), [*_PARSERS, *possible], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(_PARSERS)}"
    with _from(origin):
        raise OptionsError("GS102", f"unknown option {key!r}; {hint}")


def _choice(key: str, given: Given) -> object:
    choices = _CHOICES[key]
    if given.value not in choices:
        raise OptionsError("GS103", f"option {key}={given.value!r}; choose one of {choices}")
    return given.value


def _recompute(key: str, given: Given) -> object:
    return None if given.value is None else _choice(key, given)


def _machine(key: str, given: Given) -> str | None:
    """A name of a preset, or the path of a profile, which has a suffix."""
    value = given.value
    if value is None:
        return None
    if not isinstance(value, str | Path) or not str(value):
        raise OptionsError("GS103", f"option machine={value!r} is no preset and no path")
    return str(given.origin.path(value) if names_file(str(value)) else value)


def _look_up(name: str, machine: Callable[[str], object]) -> None:
    try:
        machine(name)
    except (GraphshardError, OSError) as error:
        why = error.message if isinstance(error, GraphshardError) else error
        raise OptionsError("GS103", f"option machine={name!r}: {why}") from error


def _path(key: str, given: Given) -> Path | None:
    value = given.value
    if value is not None and not isinstance(value, str | Path):
        raise OptionsError("GS103", f"option {key}={value!r} is not a path")
    return given.origin.path(value) if value else None


def _budget(key: str, given: Given) -> int | Device | None:
    """None: FSDP2's own."""
    if given.value in (None, "fsdp2"):
        return None
    if given.value == Device.MEMORY.value:
        return Device.MEMORY
    try:
        return parse_bytes(key, given.value)
    except OptionsError as error:
        raise OptionsError(error.code, f"{error.message}, or 'device' or 'fsdp2'") from error


def _count(key: str, given: Given, least: int, default: int | None = None) -> int | None:
    return default if given.value is None else parse_count(key, given.value, least)


def _replan_after(key: str, given: Given) -> int | None:
    return 0 if given.value == 0 and given.value is not False else _count(key, given, least=2)


def _switch(key: str, given: Given, default: bool) -> bool:
    value = default if given.value is None else given.value
    if not isinstance(value, bool):
        raise OptionsError("GS103", f"option {key}={value!r}; give True or False")
    return value


# By the name that users write.
_PARSERS: dict[str, Callable[[str, Given], object]] = {
    "compute": _choice,
    "fallback": _choice,
    "dump_dir": _path,
    "memory_budget": _budget,
    "reshard": _choice,
    "machine": _machine,
    "micro_steps": partial(_count, least=1, default=1),
    "overlap_optimizer": partial(_switch, default=False),
    "replan_after": _replan_after,
    "verify": _choice,
    "schedule": _choice,
    "report_dir": _path,
    "promote": partial(_switch, default=True),
    "recompute": _recompute,
    "offload": _choice,
    "optimizer": _choice,
    "clip": partial(_switch, default=False),
}


def parse_count(key: str, value: object, least: int) -> int | None:
    """A number from `least` to MOST_COUNT, or None for None. Raises OptionsError (GS103)."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST_COUNT:
        given = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "that many"
        hint = f"give a number from {least} to {MOST_COUNT:,}"
        raise OptionsError("GS103", f"option {key}={given}; {hint}")
    return value


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
