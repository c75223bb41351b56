"""The command line: `graphshard plan`, `tune`, `machines`, `show`, `view`, `diff` and others.

Only plan, tune, calibrate and doctor import torch, when they run. Results go to stdout, everything
else to stderr. Exit status: 0 ok, 1 the model cannot be built or captured or doctor found a fault,
2 wrong usage or a file that cannot be read or written, 3 no schedule fits the budget (of a sweep:
of one row at least; of tune: of one number of GPUs), 4 the user's own file or function fails. 141:
nobody reads stdout any more; 130: interrupted.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from graphshard._version import __version__
from graphshard.cli.calibrate import add_calibrate
from graphshard.cli.common import (
    EXIT_CAPTURE,
    EXIT_INFEASIBLE,
    EXIT_INTERRUPT,
    EXIT_OK,
    EXIT_PIPE,
    EXIT_USAGE,
    EXIT_USER_CODE,
    ClosedPipe,
    say,
    without_notes_of_torch,
)
from graphshard.cli.diff import add_diff
from graphshard.cli.doctor import add_doctor
from graphshard.cli.examples import EXAMPLES
from graphshard.cli.look import add_show, add_view
from graphshard.cli.machines import add_machines
from graphshard.cli.plan import add_plan
from graphshard.cli.tune import add_tune
from graphshard.errors import (
    CostError,
    DoctorError,
    FileError,
    GraphshardError,
    InfeasibleBudget,
    MeasureError,
    OptionsError,
    UserCodeError,
)
from graphshard.files.information import printable


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status (argparse itself exits for --help and usage)."""
    args = _parser().parse_args(argv)
    without_notes_of_torch()
    try:
        status: int | None = args.run(args)
    except ClosedPipe:
        return EXIT_PIPE
    except KeyboardInterrupt:
        return EXIT_INTERRUPT
    except (FileError, CostError, DoctorError, MeasureError, OptionsError) as error:
        return _failed(error, EXIT_USAGE)
    except UserCodeError as error:
        return _failed(error, EXIT_USER_CODE)
    except InfeasibleBudget as error:
        say(infeasible_text(error), keep="\n")
        return EXIT_INFEASIBLE
    except GraphshardError as error:
        return _failed(error, EXIT_CAPTURE)
    return EXIT_OK if status is None else status


def infeasible_text(error: InfeasibleBudget) -> str:
    """The error as a screen."""
    from graphshard.view.shortage import shortage_lines

    first, *rest = shortage_lines(error.shortage)
    return "\n".join([f"error: {error.code}: {first}", *rest])


def _failed(error: Exception, status: int) -> int:
    # A message of several lines would not be one line of a log.
    say(f"error: {' '.join(str(error).split())}")
    return status


class _Parser(argparse.ArgumentParser):
    """Its errors repeat what was typed: shown, not obeyed. Its help ends with examples."""

    examples: tuple[str, ...] = ()

    def format_help(self) -> str:
        lines = (f"  {example}\n" for example in self.examples)
        return "".join([super().format_help(), "\nexamples:\n", *lines])

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="graphshard",
        description="Plan models sharded with fully_shard, find their best settings, look at "
        "plans, measure machines, examine training scripts.",
    )
    parser.add_argument("--version", action="version", version=f"graphshard {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    for add in (
        add_plan,
        add_tune,
        add_machines,
        add_show,
        add_view,
        add_diff,
        add_calibrate,
        add_doctor,
    ):
        add(verbs)
    for name, each in {"": parser, **verbs.choices}.items():
        assert isinstance(each, _Parser)
        each.examples = EXAMPLES[name]
    return parser
