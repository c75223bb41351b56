"""What the verbs share: reading plans, sizes on the command line, printing."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from graphshard.errors import OptionsError
from graphshard.measured import Measured
from graphshard.options import parse_bytes
from graphshard.step_plan import Plan

EXIT_OK = 0
EXIT_CAPTURE = 1
EXIT_USAGE = 2
EXIT_INFEASIBLE = 3


class BadFile(Exception):
    """A file given by the user cannot be used; the text says which and why."""


def read_plan(path: Path) -> Plan:
    """Raises BadFile."""
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadFile(f"{path} is not a plan: {error}") from error


def read_measured(plan: Plan, path: Path) -> Measured:
    """What `plan` was measured at: from a measured plan, or a trace of torch.profiler.

    Raises BadFile if it cannot be read, MeasureError if it is of something else.
    """
    from graphshard.view.profiled import measured_of_file

    try:
        return measured_of_file(plan, path)
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Raises BadFile."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadFile(f"cannot write {path}: {error.strerror or error}") from error


def make_folder(path: Path) -> None:
    """Raises BadFile."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFile(f"cannot make {path}: {error.strerror or error}") from error


def beside(plan: Path, suffix: str) -> Path:
    """Next to a plan: `llama.plan.json` and `llama.json` give `llama` + suffix."""
    name = plan.name.removesuffix(".json").removesuffix(".plan")
    return plan.with_name(f"{name or plan.name}{suffix}")


def size(word: str) -> int:
    """ "64KiB" in bytes, for argparse."""
    try:
        return parse_bytes("size", word.strip())
    except OptionsError as error:
        raise argparse.ArgumentTypeError(
            f"{word!r} is not a size such as 4096, 64KiB or 70GiB"
        ) from error


def sizes(text: str) -> tuple[int, ...]:
    """ "64KiB,1MiB" in bytes, for argparse."""
    return tuple(size(word) for word in text.split(","))


def print_text(text: str) -> None:
    """With coloured numbers on a terminal if rich is there; always the same characters."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            # FQNs may hold brackets and names may hold emoji codes: neither is markup.
            Console(soft_wrap=True).print(text, markup=False, emoji=False, end="")
            return
    sys.stdout.write(text)
