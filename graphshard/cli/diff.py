"""`graphshard diff A B` and `graphshard diff A --measured FILE`: what moved, and what it costs."""

from __future__ import annotations

import argparse
from pathlib import Path

from graphshard.cli.common import print_json, print_text, read_measured
from graphshard.errors import OptionsError
from graphshard.schedule.plan import Plan


def add_diff(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    diff = verbs.add_parser(
        "diff", help="compare two plans, or a plan and what was measured: what moved, what it costs"
    )
    diff.add_argument("plan", metavar="A", type=Path, help="a plan file")
    diff.add_argument("other", metavar="B", type=Path, nargs="?", help="another plan of the model")
    diff.add_argument(
        "--measured",
        metavar="FILE",
        type=Path,
        help="a measured plan, or a trace of torch.profiler (default: what A was measured at)",
    )
    diff.add_argument("--json", action="store_true", help="print the result as JSON")
    diff.set_defaults(run=_diff)


def _diff(args: argparse.Namespace) -> None:
    from graphshard.view.diff import diff, diff_measured
    from graphshard.view.diff_text import diff_dict, diff_text

    if args.other is not None and args.measured is not None:
        raise OptionsError("GS105", "give B or --measured FILE, not both")
    plan = Plan.load(args.plan)
    if args.other is not None:
        found = diff(plan, Plan.load(args.other))
    else:
        found = diff_measured(plan, read_measured(plan, args.measured or args.plan))
    if args.json:
        print_json(diff_dict(found))
    else:
        print_text(diff_text(found))
