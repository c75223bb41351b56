"""What the verbs share: reading plans, sizes on the command line, printing."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import warnings
from pathlib import Path

from graphshard.errors import FileError, OptionsError
from graphshard.files.information import printable
from graphshard.files.reading import reason, shown
from graphshard.options import MOST_COUNT, parse_bytes
from graphshard.schedule.estimate import OptimizerKind
from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Plan

EXIT_OK = 0
EXIT_CAPTURE = 1
EXIT_USAGE = 2
EXIT_INFEASIBLE = 3
EXIT_USER_CODE = 4
# As a shell says of a process that a signal ended.
EXIT_INTERRUPT, EXIT_PIPE = 130, 141


class ClosedPipe(Exception):
    """Whoever read stdout has enough."""


def read_measured(plan: Plan, path: Path) -> Measured:
    """What `plan` was measured at: from a measured plan, or a trace of torch.profiler.

    Raises FileError if it cannot be read, MeasureError if it is of something else.
    """
    from graphshard.view.profiled import measured_of_file

    return measured_of_file(plan, path)


def make_folder(path: Path) -> None:
    """Raises FileError (GS1203)."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise FileError("GS1203", f"cannot make {shown(path)}: {reason(error)}") from error


def is_same(one: Path, other: Path) -> bool:
    """Both are there, and one file."""
    try:
        return one.samefile(other)
    except (OSError, ValueError):
        return False


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


def count(text: str) -> int:
    """A number from 1 on, for argparse."""
    if not text.isdecimal() or len(text) > 20 or not 1 <= int(text) <= MOST_COUNT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {MOST_COUNT:,}")
    return int(text)


def print_json(value: object) -> None:
    """Raises FileError, ClosedPipe as `print_text`."""
    _write(json.dumps(value, indent=1) + "\n")


def print_text(text: str) -> None:
    """With coloured numbers on a terminal if rich is there; always the same characters.

    What a terminal would obey is shown instead. Raises FileError (GS1203) if stdout takes nothing,
    ClosedPipe if whoever reads it has gone.
    """
    text = printable(text, keep="\n")
    if sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            # FQNs may hold brackets and names may hold emoji codes: neither is markup.
            Console(soft_wrap=True).print(text, markup=False, emoji=False, end="")
            return
    _write(text)


def _write(text: str) -> None:
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        encoding = sys.stdout.encoding or "utf-8"  # of a terminal, perhaps not all of Unicode
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
        raise ClosedPipe from None
    except (OSError, ValueError) as error:
        _drop_stdout()
        raise FileError("GS1203", f"cannot write the result: {reason(error)}") from error


def _drop_stdout() -> None:
    """What is still in its buffer goes nowhere, so that the end of the process says nothing."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def without_notes_of_torch() -> None:
    """From now on torch does not say what concerns nobody who plans: that numpy is not there, and
    that checkpointed regions must not write in place (nothing is run)."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_concerns_a_planner)


def _concerns_a_planner(record: logging.LogRecord) -> bool:
    return "context_fn is passed" not in record.getMessage()


def say(text: str, keep: str = "") -> None:
    """A line of progress or an error, on stderr; lost if there is none. keep: see `printable`."""
    with contextlib.suppress(OSError, ValueError):
        print(f"graphshard: {printable(text, keep)}", file=sys.stderr, flush=True)


def add_optimizer(parser: argparse.ArgumentParser) -> None:
    """What follows backward in a step."""
    parser.add_argument(
        "--optimizer",
        choices=[kind.value for kind in OptimizerKind],
        default=OptimizerKind.ADAMW.value,
        help="what steps the parameters, in the step's time and memory (default: adamw, torch's "
        "foreach)",
    )
    parser.add_argument(
        "--clip",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="gradients are clipped by their norm before the optimizer (default: they are not)",
    )
