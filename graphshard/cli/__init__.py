"""The command line: `graphshard plan`, `show`, `view`, `diff`, `calibrate` and `doctor`.

Only plan, calibrate and doctor import torch, when they run. Results go to stdout, everything else
to stderr. Exit status: 0 ok, 1 the model cannot be built or captured or doctor found a fault, 2
wrong usage or a file that cannot be read or written, 3 no schedule fits the budget.
"""

from __future__ import annotations

import argparse
import sys

from graphshard import __version__
from graphshard.cli.calibrate import add_calibrate
from graphshard.cli.common import (
    EXIT_CAPTURE,
    EXIT_INFEASIBLE,
    EXIT_OK,
    EXIT_USAGE,
    BadFile,
)
from graphshard.cli.diff import add_diff
from graphshard.cli.doctor import add_doctor
from graphshard.cli.look import add_show, add_view
from graphshard.cli.plan import add_plan
from graphshard.errors import (
    CostError,
    DoctorError,
    GraphshardError,
    InfeasibleBudget,
    MeasureError,
    OptionsError,
)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status (argparse itself exits for --help and usage)."""
    args = _parser().parse_args(argv)
    try:
        status: int | None = args.run(args)
    except (BadFile, CostError, DoctorError, MeasureError, OptionsError) as error:
        return _failed(error, EXIT_USAGE)
    except InfeasibleBudget as error:
        sys.stderr.write(infeasible_text(error))
        return EXIT_INFEASIBLE
    except GraphshardError as error:
        return _failed(error, EXIT_CAPTURE)
    return EXIT_OK if status is None else status


def infeasible_text(error: InfeasibleBudget) -> str:
    """The error as a screen: what, where and who, what would help; one line for each."""
    from graphshard.view.units import reason_text

    what, _, rest = reason_text(error.message).partition("; ")
    where, _, rest = rest.partition(": ")
    if "(" in where.rsplit(",", 1)[0]:  # "(FSDP2's own schedule: ...)" has a colon of its own
        more, _, rest = rest.partition(": ")
        where = f"{where}: {more}"
    owners, _, helps = rest.partition(". What would help: ")
    lines = [f"graphshard: error: {error.code}: {what}", f"  {where}"]
    lines += [f"    {owner}" for owner in owners.split("; ")]
    lines += ["  what would help"] + [f"    {help}" for help in helps.split("; ")]
    return "\n".join(lines) + "\n"


def _failed(error: Exception, status: int) -> int:
    # A message of several lines would not be one line of a log.
    print(f"graphshard: error: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphshard",
        description="Plan models sharded with fully_shard, look at plans, measure machines, "
        "examine training scripts.",
    )
    parser.add_argument("--version", action="version", version=f"graphshard {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    for add in (add_plan, add_show, add_view, add_diff, add_calibrate, add_doctor):
        add(verbs)
    return parser
