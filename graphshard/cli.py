"""The command line: `graphshard view`, `show`, `diff` and `calibrate`.

Only calibrate imports torch, when it runs. Results go to stdout, errors to stderr as one line. Exit
status: 0 ok, 2 wrong usage or a file that cannot be read or written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from graphshard.errors import CostError, MeasureError
from graphshard.plan import Plan

EXIT_OK = 0
EXIT_USAGE = 2


BYTES_PER_UNIT = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class _BadFile(Exception):
    """A file given by the user cannot be used; the text says which and why."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status (argparse itself exits for --help and usage)."""
    args = _parser().parse_args(argv)
    try:
        if args.verb == "calibrate":
            _calibrate(args)
        elif args.verb == "diff":
            _diff(args)
        else:
            print_result = _view if args.verb == "view" else _show
            print_result(_read_plan(args.plan), args)
    except (_BadFile, CostError, MeasureError) as error:
        # A message of several lines would not be one line of a log.
        print(f"graphshard: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="graphshard",
        description="Look at the plans of models compiled with graphshard, measure what runs them.",
    )
    parser.add_argument("--version", action="version", version=f"graphshard {_version()}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    view = verbs.add_parser("view", help="draw a plan as one HTML file and print its path")
    view.add_argument(
        "-o", "--output", metavar="OUT", type=Path, help="default: PLAN with the suffix .html"
    )
    view.add_argument(
        "--perfetto", metavar="OUT", type=Path, help="write a trace for ui.perfetto.dev (JSON)"
    )
    view.add_argument(
        "--merge", metavar="TRACE", type=Path, help="add a trace of torch.profiler to it"
    )
    show = verbs.add_parser("show", help="print a plan's summary, or why it is as it is")
    show.add_argument(
        "--why", action="store_true", help="print reasons: gains, what is kept, why not earlier"
    )
    show.add_argument("--group", metavar="FQN", help="print the reasons of this group only")
    for verb in (view, show):
        verb.add_argument("plan", metavar="PLAN", type=Path, help="written by Plan.to_json()")
    calibrate = _add_calibrate(verbs)
    diff = verbs.add_parser(
        "diff", help="compare two plans, or a plan and what was measured: what moved, what it costs"
    )
    diff.add_argument("plan", metavar="A", type=Path, help="written by Plan.to_json()")
    diff.add_argument("other", metavar="B", type=Path, nargs="?", help="another plan of the model")
    diff.add_argument(
        "--measured",
        metavar="FILE",
        type=Path,
        help="a measured plan, or a trace of torch.profiler (default: what A was measured at)",
    )
    for verb in (view, show, calibrate, diff):
        verb.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _add_calibrate(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    calibrate = verbs.add_parser(
        "calibrate",
        help="measure collectives and compute of this machine, under torchrun",
        description="Run under torchrun, on the ranks and network that are to be measured: "
        "torchrun --no-python --nproc-per-node N graphshard calibrate -o machine.json",
    )
    calibrate.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write the profile there, as JSON"
    )
    calibrate.add_argument(
        "--sizes",
        metavar="LIST",
        type=_sizes,
        help="sizes of the collectives, such as 64KiB,1MiB,16MiB (default: 4KiB to 64MiB, on a "
        "GPU to 1GiB)",
    )
    calibrate.add_argument(
        "--repetitions", metavar="N", type=int, default=25, help="of each size (default: 25)"
    )
    return calibrate


def _sizes(text: str) -> tuple[int, ...]:
    """ "64KiB,1MiB" in bytes."""
    return tuple(_size(word) for word in text.split(","))


def _size(word: str) -> int:
    match = re.fullmatch(r"(\d+)\s*(|KiB|MiB|GiB)", word.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{word!r} is not a size such as 4096, 64KiB or 1MiB")
    return int(match[1]) * BYTES_PER_UNIT[match[2].upper()]


def _version() -> str:
    try:
        return version("graphshard")
    except PackageNotFoundError:
        return "(not installed)"


def _read_plan(path: Path) -> Plan:
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _BadFile(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise _BadFile(f"{path} is not a plan: {error}") from error


def _view(plan: Plan, args: argparse.Namespace) -> None:
    if args.merge is not None and args.perfetto is None:
        raise _BadFile("--merge TRACE needs --perfetto OUT")
    if args.perfetto is not None:
        _write_trace(plan, args)
        if args.output is None:
            print(json.dumps({"perfetto": str(args.perfetto)}) if args.json else args.perfetto)
            return
    # Jinja2 takes longer to import than everything else here together: only for this verb.
    from graphshard.view.html import render

    out: Path = args.output or _default_output(args.plan)
    if out.exists() and out.samefile(args.plan):
        raise _BadFile(f"cannot write {out}: it is the plan itself")
    try:
        out.write_text(render(plan), encoding="utf-8")
    except OSError as error:
        raise _BadFile(f"cannot write {out}: {error.strerror or error}") from error
    if args.json:
        trace = {} if args.perfetto is None else {"perfetto": str(args.perfetto)}
        print(json.dumps({"path": str(out), **trace}))
    else:
        print(out)


def _write_trace(plan: Plan, args: argparse.Namespace) -> None:
    from graphshard.view.trace import write_trace

    for given in (args.plan, args.merge):
        if given is not None and args.perfetto.exists() and args.perfetto.samefile(given):
            raise _BadFile(f"cannot write {args.perfetto}: it is {given}")
    try:
        write_trace(plan, args.perfetto, args.merge)
    except OSError as error:
        where = error.filename or args.perfetto
        raise _BadFile(f"cannot use {where}: {error.strerror or error}") from error


def _default_output(plan: Path) -> Path:
    """Next to the plan: `llama.plan.json` and `llama.json` give `llama.html`."""
    name = plan.name.removesuffix(".json").removesuffix(".plan")
    return plan.with_name(f"{name or plan.name}.html")


def _show(plan: Plan, args: argparse.Namespace) -> None:
    from graphshard.view.text import summary_lines
    from graphshard.view.why import reasons_of, why_text

    if args.why or args.group is not None:
        try:
            found = reasons_of(plan, args.group)
        except ValueError as error:
            raise _BadFile(f"{args.plan}: {error}") from error
        if args.json:
            print(json.dumps([asdict(reason) for reason in found], indent=1))
        else:
            _print_text(why_text(plan, args.group))
    elif args.json:
        print(json.dumps(plan.summary(), indent=1))
    else:
        _print_text(summary_lines(plan))


def _diff(args: argparse.Namespace) -> None:
    from graphshard.view.diff import diff, diff_measured
    from graphshard.view.diff_text import diff_dict, diff_text
    from graphshard.view.profiled import measured_of_file

    if args.other is not None and args.measured is not None:
        raise _BadFile("give B or --measured FILE, not both")
    plan = _read_plan(args.plan)
    if args.other is not None:
        found = diff(plan, _read_plan(args.other))
    else:
        file = args.measured or args.plan
        try:
            measured = measured_of_file(plan, file)
        except OSError as error:
            raise _BadFile(f"cannot read {file}: {error.strerror or error}") from error
        found = diff_measured(plan, measured)
    if args.json:
        print(json.dumps(diff_dict(found), indent=1))
    else:
        _print_text(diff_text(found))


def _calibrate(args: argparse.Namespace) -> None:
    """Every rank measures; rank 0 writes and prints."""
    from graphshard.cost.calibrate import calibrate_job
    from graphshard.view.costs import profile_lines

    command = shlex.join(["graphshard", *sys.argv[1:]])
    profile = calibrate_job(args.sizes, args.repetitions, command)
    if os.environ["RANK"] != "0":
        return
    if args.output is not None:
        try:
            args.output.write_text(profile.to_json(), encoding="utf-8")
        except OSError as error:
            raise _BadFile(f"cannot write {args.output}: {error.strerror or error}") from error
    if args.json:
        sys.stdout.write(profile.to_json())
    else:
        _print_text(profile_lines(profile))


def _print_text(text: str) -> None:
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


if __name__ == "__main__":
    raise SystemExit(main())
