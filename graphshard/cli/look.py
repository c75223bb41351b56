"""`graphshard view PLAN` and `graphshard show PLAN`: a plan file as a page or as text."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from graphshard.cli.common import beside, is_same, print_json, print_text, read_measured
from graphshard.errors import FileError, OptionsError
from graphshard.files.reading import shown
from graphshard.files.writing import save_text
from graphshard.schedule.plan import Plan


def add_view(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    view = verbs.add_parser("view", help="draw a plan as one HTML file and print its path")
    view.add_argument(
        "-o", "--output", metavar="OUT", type=Path, help="default: PLAN with the suffix .html"
    )
    view.add_argument(
        "--measured",
        metavar="FILE",
        type=Path,
        help="draw what was measured: a measured plan, or a trace of torch.profiler",
    )
    view.add_argument(
        "--perfetto", metavar="OUT", type=Path, help="write a trace for ui.perfetto.dev (JSON)"
    )
    view.add_argument(
        "--merge", metavar="TRACE", type=Path, help="add a trace of torch.profiler to it"
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
    plan = Plan.load(args.plan)
    if args.merge is not None and args.perfetto is None:
        raise OptionsError("GS105", "--merge TRACE needs --perfetto OUT")
    written = {}
    if args.perfetto is not None:
        _write_trace(plan, args)
        written["perfetto"] = str(args.perfetto)
    if args.perfetto is None or args.output is not None:
        written["path"] = str(_write_page(plan, args))
    if args.json:
        print_json(written)
    else:
        print_text("\n".join(written.values()) + "\n")


def _write_page(plan: Plan, args: argparse.Namespace) -> Path:
    # Jinja2 takes longer to import than everything else here together: only for this verb.
    from graphshard.view.html import render

    out: Path = args.output or beside(args.plan, ".html")
    if is_same(out, args.plan):
        raise OptionsError("GS105", f"cannot write {shown(out)}: it is the plan itself")
    measured = None if args.measured is None else read_measured(plan, args.measured)
    try:
        page = render(plan, measured)
    except ValueError as error:
        what = shown(args.measured or args.plan)
        raise FileError("GS1202", f"cannot draw {what}: {error}") from error
    save_text(out, page)
    return out


def _write_trace(plan: Plan, args: argparse.Namespace) -> None:
    from graphshard.view.trace import trace_text

    for given in (args.plan, args.merge):
        if given is not None and is_same(args.perfetto, given):
            text = f"cannot write {shown(args.perfetto)}: it is {shown(given)}"
            raise OptionsError("GS105", text)
    save_text(args.perfetto, trace_text(plan, args.merge))


def _show(args: argparse.Namespace) -> None:
    plan = Plan.load(args.plan)
    from graphshard.view.reasons import reason_text
    from graphshard.view.summary import summary_lines
    from graphshard.view.text import group_names
    from graphshard.view.why import reasons_of, why_text

    if args.why or args.group is not None:
        try:
            found = reasons_of(plan, args.group)
        except ValueError as error:
            raise OptionsError("GS105", f"{shown(args.plan)}: {error}") from error
        if args.json:
            names = group_names(plan)
            print_json([{**asdict(reason), "text": reason_text(reason, names)} for reason in found])
        else:
            print_text(why_text(plan, args.group))
    elif args.json:
        print_json(asdict(plan.summary()))
    else:
        print_text(summary_lines(plan))
