"""`graphshard tune FILE.py:FUNCTION --gpus 64,128 --hw h100-ib400`: the best settings there."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from graphshard.cli.common import (
    EXIT_INFEASIBLE,
    EXIT_OK,
    add_optimizer,
    count,
    make_folder,
    print_json,
    print_text,
    say,
    size,
)
from graphshard.errors import OptionsError
from graphshard.files.writing import save_text
from graphshard.schedule.estimate import OptimizerKind
from graphshard.view.front import front_svg
from graphshard.view.tune import GainRow, Tuned, TuneRow, panels_of, tune_text

if TYPE_CHECKING:
    from graphshard.offline.target import Sizes, Target
    from graphshard.tune.pricing import Priced, Pricer
    from graphshard.tune.search import Asked, Found
    from graphshard.tune.subject import Subject

# Powers of two up to here are tried as sequences per rank, where nothing else is asked for.
MOST_BATCH = 16
SEARCHES = (
    "FUNCTION returns (model, inputs) as for `graphshard plan`, the model sharded "
    "or not, and takes batch and seq. Searched are FSDP and HSDP meshes, which modules are "
    "groups, what is resharded and computed again, and the micro-batch; and tensor parallel if "
    "the model, or a module of it, has a plan: an attribute tp_plan, a dict from names of "
    "modules to torch's styles or transformers' words (colwise, rowwise), or a function that "
    "is called with the mesh and parallelizes the model."
)
SCALES = {"K": 2**10, "M": 2**20, "G": 2**30}


def add_tune(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tune = verbs.add_parser(
        "tune",
        help="find the best mesh, groups, checkpointing and batch on machines you do not have",
        description=SEARCHES,
    )
    tune.add_argument(
        "target",
        metavar="FILE.py:FUNCTION",
        help="or demo:NAME, a model that comes with graphshard (`demo:` alone lists them)",
    )
    tune.add_argument("--gpus", metavar="N", type=_counts, required=True, help="numbers of ranks")
    tune.add_argument(
        "--hw",
        metavar="NAME",
        required=True,
        help="machine: a preset such as h100-ib400, or a profile from `graphshard calibrate`",
    )
    tune.add_argument(
        "--batch-tokens",
        metavar="N",
        type=tokens,
        help="of all ranks in one optimizer step, as 4M (2**22); default: one micro-batch each",
    )
    tune.add_argument(
        "--max-memory",
        metavar="SIZE",
        type=size,
        help="peak per rank, as 72GiB (default: the machine's memory, less a tenth)",
    )
    _add_tried(tune)
    tune.add_argument("--per-node", metavar="N", type=count, help="ranks per node (default: 8)")
    tune.add_argument(
        "--compute",
        choices=("aten", "inductor"),
        default="inductor",
        help="price ops as fused, about as the backend runs them by default (inductor, default), "
        "or one by one (aten)",
    )
    add_optimizer(tune)
    tune.add_argument(
        "--price", metavar="USD", type=_price, help="of one GPU for an hour: adds cost per token"
    )
    tune.add_argument(
        "-o", "--output", metavar="DIR", type=Path, help="write code and a picture there"
    )
    tune.add_argument("--json", action="store_true", help="print the result as JSON")
    tune.set_defaults(run=_tune)


def _add_tried(tune: argparse.ArgumentParser) -> None:
    """Sizes and degrees."""
    tune.add_argument(
        "--batch",
        metavar="N",
        type=_counts,
        help=f"sequences per rank to try (default: powers of two up to {MOST_BATCH})",
    )
    tune.add_argument("--seq", metavar="N", type=count, help="tokens per sequence")
    tune.add_argument(
        "--tp",
        metavar="N",
        type=_counts,
        help="ranks of a tensor-parallel group to try (default: powers of two up to a node; 1: no "
        "tensor parallel)",
    )


def _counts(text: str) -> list[int]:
    return list(dict.fromkeys(count(word) for word in text.split(",")))


def tokens(text: str) -> int:
    """ "4M" is 4 * 2**20, for argparse."""
    scale = SCALES.get(text[-1:].upper(), 1)
    return count(text[:-1] if scale > 1 else text) * scale


def _price(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a price such as 2.5")
    return found


def _tune(args: argparse.Namespace) -> int:
    began = perf_counter()
    from graphshard.capture.interpreter import no_collections

    with no_collections():  # of what torch imports nothing is garbage
        from graphshard.offline.target import target_of
        from graphshard.tune.aside import side_by_side
        from graphshard.tune.pricing import Pricer
        from graphshard.tune.search import Asked

    target = target_of(args.target)
    present = _sizes(args, target)
    subject = _subject(args, target, present)
    asked = Asked(_budget(args, subject), subject.sizes, args.batch_tokens)
    with no_collections():
        subject.prepare()
        pricer = Pricer(subject)
        for gpus in args.gpus:
            subject.degrees(gpus)  # which are captured before worlds are searched side by side
        works = [partial(_found, subject, pricer, asked, gpus, present) for gpus in args.gpus]
        every = [_tuned(args, target, subject, pricer, own) for own in side_by_side(works)]
    where, picture = subject.machines.machine.name, None
    drawn = panels_of(target.name, where, every)
    if args.output is not None and drawn:
        picture = args.output / f"{target.name}.front.svg"
        save_text(picture, front_svg(drawn, columns=2))
    took_s = perf_counter() - began
    if args.json:
        gpus, left_out = (
            [asdict(one) for one in those] for those in (every, subject.tensor.left_out)
        )
        print_json({"took_s": took_s, "kept": subject.kept, "no_tensor": left_out, "gpus": gpus})
    else:
        at = None if picture is None else str(picture)
        about = subject.kept, subject.tensor.left_out
        print_text(tune_text(target.name, where, every, took_s, at, *about))
    return EXIT_OK if all(tuned.front for tuned in every) else EXIT_INFEASIBLE


def _sizes(args: argparse.Namespace, target: Target) -> Sizes:
    """Those that the model has now. Raises OfflineError (GS907, GS912)."""
    from graphshard.errors import OfflineError

    sizes = target.sizes({} if args.seq is None else {"seq": args.seq})
    for name in ("batch", "seq"):
        if name not in target.parameters:
            why = f"{target.signature} has no parameter {name!r}, which tune sets; add it"
            raise OfflineError("GS907", why)
        if name not in dict(sizes) and name != "batch":
            raise OfflineError("GS912", f"{target.name} has no default for seq: give --seq")
    if "batch" not in dict(sizes):
        sizes = target.sizes({**dict(sizes), "batch": 1})
    return sizes


def _subject(args: argparse.Namespace, target: Target, present: Sizes) -> Subject:
    from graphshard.cost.optimizer import Optimizer
    from graphshard.offline.api import is_fused, machine_of
    from graphshard.tune.degrees import Degrees
    from graphshard.tune.subject import Machines, Subject

    powers = [2**n for n in range(MOST_BATCH.bit_length())]
    batches = args.batch or sorted({*powers, dict(present)["batch"]})
    sizes = [target.sizes({**dict(present), "batch": batch}) for batch in batches]
    machine = machine_of(args.hw)
    per_node = args.per_node or machine.ranks_per_node
    machines = Machines(machine, per_node, is_fused(args.compute))
    every = tuple(dict.fromkeys([*sizes, present]))
    optimizer = Optimizer(OptimizerKind(args.optimizer), args.clip)
    worlds = tuple(args.gpus)
    tensor = Degrees(None if args.tp is None else tuple(args.tp))
    return Subject(target.name, target.build, machines, worlds, every, say, optimizer, tensor)


def _budget(args: argparse.Namespace, subject: Subject) -> int:
    from graphshard.compiler.device_memory import device_budget

    if args.max_memory is not None:
        return int(args.max_memory)
    return device_budget(subject.machines.machine)


def _found(subject: Subject, pricer: Pricer, asked: Asked, gpus: int, present: Sizes) -> Found:
    """Raises OptionsError (GS105) for tokens that no batch divides."""
    from graphshard.tune.search import Accumulated, found_for, present_of, space_of

    space = space_of(subject, gpus, asked)
    if not any(space.batches.values()):
        raise OptionsError(
            "GS105",
            f"--batch-tokens {asked.batch_tokens:,}: no number of micro-steps of "
            f"{subject.data_ranks(gpus):,} ranks has so many tokens; with --batch 1 a micro-step "
            f"has {subject.data_ranks(gpus) * dict(present)['seq']:,}",
        )
    say(f"{gpus:,} GPUs: {space.size:,} settings")
    # FSDP2 reduces in each micro-step unless it is told not to.
    own = (batch for batch in space.batches[1] if batch.sizes == present)
    now = next(own, Accumulated(present))
    return found_for(subject, pricer, space, present_of(subject, gpus, now))


def _tuned(
    args: argparse.Namespace, target: Target, subject: Subject, pricer: Pricer, found: Found
) -> Tuned:
    def row(priced: Priced) -> TuneRow:
        if priced.plan is None:
            return TuneRow(priced.setting, least_bytes=priced.least_bytes)
        setting = priced.setting
        rate = pricer.rate(priced)
        usd = None if args.price is None else args.price * setting.world_size / 3_600 / rate * 1e6
        return TuneRow(setting, rate, priced.step_us, priced.exposed_us, priced.peak_bytes, usd)

    path = None
    if args.output is not None and found.best is not None:
        from graphshard.tune.code import code_of

        make_folder(args.output)
        path = args.output / f"{target.name}_{found.world_size}.py"
        save_text(path, code_of(subject, subject.bare(), found.best.setting))
    return Tuned(
        found.world_size,
        None if found.present is None else row(found.present),
        tuple(map(row, found.front)),
        tuple(GainRow(gain.decision, row(gain.without)) for gain in found.gains),
        found.num_settings,
        found.num_planned,
        found.left,
        None if found.nearest is None else row(found.nearest),
        None if path is None else str(path),
    )
