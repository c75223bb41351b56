"""`graphshard doctor [-- COMMAND]`: is the environment fit, and does a script use FSDP2 well?"""

from __future__ import annotations

import argparse
import math

from graphshard.cli.common import EXIT_CAPTURE, EXIT_OK, print_json, print_text, say
from graphshard.options import MOST_COUNT


def add_doctor(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = verbs.add_parser(
        "doctor",
        usage="graphshard doctor [-h] [--steps N] [--limit-s S] [--no-aot-eager] [--json] "
        "[-- COMMAND ...]",
        help="check the environment, or a training script: eager FSDP2 against graphshard",
        description="Without COMMAND: what is installed. With it (torchrun ... train.py, or python "
        "train.py): runs it for some steps with eager FSDP2 and with graphshard, compares losses, "
        "gradients, collectives, time and memory, and says what the script does wrong with "
        "fully_shard. Exit status 1 if there is a fault.",
    )
    doctor.add_argument(
        "--steps",
        metavar="N",
        type=_count,
        default=4,
        help="optimizer steps after which a run is ended; 0: run to the script's end (default: 4)",
    )
    doctor.add_argument(
        "--limit-s",
        metavar="S",
        type=_seconds,
        default=600.0,
        help="seconds after which a run is stopped (default: 600)",
    )
    doctor.add_argument(
        "--no-aot-eager",
        action="store_true",
        help="where there is a difference, do not run once more with torch's aot_eager to say "
        "whether it is AOTAutograd's",
    )
    doctor.add_argument("--json", action="store_true", help="print the result as JSON")
    doctor.add_argument("command", metavar="COMMAND", nargs=argparse.REMAINDER)
    doctor.set_defaults(run=_doctor)


def _count(word: str) -> int:
    if not word.isdecimal() or len(word) > 20 or int(word) > MOST_COUNT:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of steps")
    return int(word)


def _seconds(word: str) -> float:
    try:
        found = float(word)
    except ValueError:
        found = math.nan
    if not 0 < found < MOST_COUNT:
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of seconds")
    return found


def _doctor(args: argparse.Namespace) -> int:
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    return _examine(args, command) if command else _check(args)


def _check(args: argparse.Namespace) -> int:
    from graphshard.doctor.environment import probe_environment
    from graphshard.doctor.findings import Level
    from graphshard.doctor.text import environment_dict, environment_text

    probes = probe_environment()
    if args.json:
        print_json(environment_dict(probes))
    else:
        print_text(environment_text(probes))
    return EXIT_CAPTURE if any(probe.level is Level.FAULT for probe in probes) else EXIT_OK


def _examine(args: argparse.Namespace, command: list[str]) -> int:
    from graphshard.doctor.examine import examine
    from graphshard.doctor.findings import Level
    from graphshard.doctor.text import examination_dict, examination_text

    finds_origin = not args.no_aot_eager
    found = examine(command, args.steps, args.limit_s, say, finds_origin=finds_origin)
    for line in found.tail:
        say(f"  | {line}")
    if args.json:
        print_json(examination_dict(found))
    else:
        print_text(examination_text(found))
    return EXIT_CAPTURE if found.level is Level.FAULT else EXIT_OK
