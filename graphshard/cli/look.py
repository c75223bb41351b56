"""`graphshard view PLAN` and `graphshard show PLAN`: a plan file as a page or as text."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from graphshard.cli.common import BadFile, beside, print_text, read_plan, write_text


def add_view(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    view = verbs.add_parser("view", help="draw a plan as one HTML file and print its path")
    view.add_argument(
        "-o", "--output", metavar="OUT", type=Path, help="default: PLAN with the suffix .html"
    )
    _add_plan(view)
    view.set_defaults(run=_view)


def add_show(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    show = verbs.add_parser("show", help="print a plan's summary, or why it is as it is")
    show.add_argument(
        "--why", action="store_true", help="print reasons: gains, what is kept, why not earlier"
    )
    show.add_argument("--group", metavar="FQN", help="print the reasons of this group only")
    _add_plan(show)
    show.set_defaults(run=_show)


def _add_plan(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "plan", metavar="PLAN", type=Path, help="from `graphshard plan` or Plan.to_json()"
    )
    verb.add_argument("--json", action="store_true", help="print the result as JSON")


def _view(args: argparse.Namespace) -> None:
    plan = read_plan(args.plan)
    # Jinja2 takes longer to import than everything else here together: only for this verb.
    from graphshard.view.html import render

    out: Path = args.output or beside(args.plan, ".html")
    if out.exists() and out.samefile(args.plan):
        raise BadFile(f"cannot write {out}: it is the plan itself")
    write_text(out, render(plan))
    print(json.dumps({"path": str(out)}) if args.json else out)


def _show(args: argparse.Namespace) -> None:
    plan = read_plan(args.plan)
    from graphshard.view.text import summary_lines
    from graphshard.view.why import reasons_of, why_text

    if args.why or args.group is not None:
        try:
            found = reasons_of(plan, args.group)
        except ValueError as error:
            raise BadFile(f"{args.plan}: {error}") from error
        if args.json:
            print(json.dumps([asdict(reason) for reason in found], indent=1))
        else:
            print_text(why_text(plan, args.group))
    elif args.json:
        print(json.dumps(plan.summary(), indent=1))
    else:
        print_text(summary_lines(plan))
