"""`graphshard calibrate`: measure this machine under torchrun. Rank 0 writes and prints."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from graphshard.cli.common import count, print_text, sizes
from graphshard.files.writing import save_text


def add_calibrate(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    calibrate = verbs.add_parser(
        "calibrate",
        help="measure collectives and compute of this machine, under torchrun",
        description="Run under torchrun, on the ranks and network that are to be measured: "
        "torchrun --nproc-per-node N -m graphshard calibrate -o machine.json",
    )
    calibrate.add_argument(
        "-o", "--output", metavar="FILE", type=Path, help="write the profile there, as JSON"
    )
    calibrate.add_argument(
        "--sizes",
        metavar="LIST",
        type=sizes,
        help="sizes of the collectives, such as 64KiB,1MiB,16MiB (default: 4KiB to 64MiB, on a "
        "GPU to 1GiB)",
    )
    calibrate.add_argument(
        "--repetitions", metavar="N", type=count, default=25, help="of each size (default: 25)"
    )
    calibrate.add_argument("--json", action="store_true", help="print the result as JSON")
    calibrate.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace) -> None:
    from graphshard.calibrate.calibrate import calibrate_job
    from graphshard.view.costs import profile_lines

    command = shlex.join(["graphshard", *sys.argv[1:]])
    profile = calibrate_job(args.sizes, args.repetitions, command)
    if os.environ["RANK"] != "0":
        return
    if args.output is not None:
        save_text(args.output, profile.to_json())
    if args.json:
        print_text(profile.to_json())
    else:
        print_text(profile_lines(profile))
