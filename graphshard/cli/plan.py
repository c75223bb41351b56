"""`graphshard plan FILE.py:FUNCTION --world 512 --hw h100-ib400`: plan without GPUs and weights."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
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
from graphshard.cli.front import marked, panels
from graphshard.files.writing import save_text
from graphshard.view.brief import compute_text
from graphshard.view.front import Panel, front_svg
from graphshard.view.offline import Effort, SweepRow, plan_text, sweep_text

if TYPE_CHECKING:
    from graphshard.offline.point import Answer, Point
    from graphshard.offline.target import Target


# A row of a sweep may be so much above its lower bound; for one plan alone more is searched.
NEAR = 0.02
BAR = 30


def add_plan(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    plan = verbs.add_parser(
        "plan",
        help="plan a training step on machines that you do not have, without weights",
        description="FUNCTION returns (model, inputs): the model sharded with fully_shard, and the "
        "arguments of one call. It is called on the meta device, with --batch and --seq as "
        "keyword arguments if they are given. Lists with commas plan every combination.",
    )
    plan.add_argument(
        "target",
        metavar="FILE.py:FUNCTION",
        help="or demo:NAME, a model that comes with graphshard (`demo:` alone lists them)",
    )
    plan.add_argument("--world", metavar="N", type=_counts, required=True, help="ranks")
    plan.add_argument(
        "--hw",
        metavar="NAME",
        type=lambda text: text.split(","),
        required=True,
        help="machine: a preset such as h100-ib400 (see `graphshard machines`), or a profile from "
        "`graphshard calibrate`",
    )
    plan.add_argument(
        "--network",
        metavar="NAME",
        type=lambda text: text.split(","),
        help="between nodes: a network such as ib400, or the rate that each GPU has, as 200Gbit or "
        "25GB/s; oversubscribed switches may follow, as ib400:pod=32:oversubscribed=2; default: "
        "the one that --hw names, or that such machines usually have",
    )
    plan.add_argument(
        "--budget",
        metavar="SIZE",
        type=_budgets,
        default=["fsdp2"],
        help="peak per rank, as 72GiB; device: the machine's memory, less a tenth; "
        "fsdp2 (default): the peak of FSDP2's own schedule",
    )
    plan.add_argument("--batch", metavar="N", type=_counts, help="sequences per rank")
    plan.add_argument("--seq", metavar="N", type=_counts, help="tokens per sequence")
    plan.add_argument(
        "--per-node",
        metavar="N",
        type=count,
        help="ranks per node (default: the machine's, 8 for most)",
    )
    _add_options(plan)
    plan.add_argument(
        "--compute",
        choices=("aten", "inductor"),
        default="inductor",
        help="price ops as fused, about as the backend runs them by default (inductor, default), "
        "or one by one (aten)",
    )
    plan.add_argument(
        "-o", "--output", metavar="PATH", type=Path, help="default: FUNCTION.plan.json"
    )
    plan.add_argument("--json", action="store_true", help="print the result as JSON")
    plan.set_defaults(run=_plan)


def _counts(text: str) -> list[int]:
    return [count(word) for word in text.split(",")]


def _add_options(plan: argparse.ArgumentParser) -> None:
    """Those that `options=` has too."""
    plan.add_argument(
        "--schedule",
        choices=("planned", "fsdp2"),
        default="planned",
        help="of the planner (default), or FSDP2's own order",
    )
    plan.add_argument("--reshard", choices=("fsdp2", "auto"), default="fsdp2", help="who decides")
    plan.add_argument(
        "--recompute",
        choices=("auto", "user"),
        help="user: what the model checkpoints is computed again as it says; auto (default with a "
        "budget): the planner decides",
    )
    plan.add_argument(
        "--offload",
        choices=("auto", "never"),
        default="auto",
        help="auto: with a budget, the host may hold activations until backward",
    )
    plan.add_argument(
        "--micro-steps", metavar="N", type=count, default=1, help="per optimizer step"
    )
    add_optimizer(plan)


def _budgets(text: str) -> list[int | str | None]:
    return [word if word in ("device", "fsdp2") else size(word) for word in text.split(",")]


def _plan(args: argparse.Namespace) -> int:
    from graphshard.capture.interpreter import no_collections

    with no_collections():  # of what torch imports nothing is garbage
        from graphshard.offline.study import Study
        from graphshard.offline.target import target_of

    target = target_of(args.target)
    points = _points(args, target)
    marks = marked(points) if len(args.budget) > 1 else []
    one = len(points) == 1
    study = Study(target.name, target.build, (*points, *marks), say=say, room=one)
    found = list(_followed(study.answers(), len(points) + len(marks)))
    answers = found[: len(points)]
    if one:
        _one(args, study.effort, answers[0], target.name)
    else:
        drawn = panels(target.name, answers, found[len(points) :])
        _many(args, study.effort, answers, target.name, drawn)
    fits = all(answer.plan is not None for answer in answers)
    return EXIT_OK if fits else EXIT_INFEASIBLE


def _points(args: argparse.Namespace, target: Target) -> tuple[Point, ...]:
    """Every combination of what is asked for."""
    from graphshard.compiler.planning_inputs import policy_of
    from graphshard.offline.api import is_fused, machine_of
    from graphshard.offline.point import Point
    from graphshard.options import parse_options

    machines = [machine_of(name) for name in _machines(args.hw, args.network)]
    names = ("schedule", "reshard", "micro_steps", "recompute", "offload", "optimizer", "clip")
    given = {name: getattr(args, name) for name in names}
    asked = [parse_options({**given, "memory_budget": size}, elsewhere={}) for size in args.budget]
    batches: list[dict[str, int]] = [{"batch": n} for n in args.batch or ()] or [{}]
    lengths: list[dict[str, int]] = [{"seq": n} for n in args.seq or ()] or [{}]
    fused = is_fused(args.compute)
    points = tuple(
        Point(
            world,
            args.per_node or machine.ranks_per_node,
            machine,
            policy_of(options, machine),
            target.sizes(batch | seq),
            fused,
        )
        for world, machine, options, batch, seq in product(
            args.world, machines, asked, batches, lengths
        )
    )
    if len(points) == 1:
        return points
    return tuple(replace(point, policy=replace(point.policy, near=NEAR)) for point in points)


def _machines(names: list[str], networks: list[str] | None) -> list[str]:
    """Each with each network. Raises CostError (GS501) for what has its own."""
    if networks is None:
        return names
    from graphshard.cost.presets import with_network

    return [with_network(name, network) for name in names for network in networks]


def _one(args: argparse.Namespace, effort: Effort, answer: Answer, name: str) -> None:
    plan = answer.fitting()
    path = args.output or Path(f"{name}.plan.json")
    save_text(path, plan.to_json())
    if args.json:
        told = {"path": str(path), "effort": asdict(effort), **asdict(plan.summary())}
        print_json(told)
    else:
        print_text(plan_text(plan, _where(answer.point), effort, str(path)))


def _many(
    args: argparse.Namespace,
    effort: Effort,
    answers: list[Answer],
    name: str,
    drawn: list[Panel],
) -> None:
    """A row for each point; with -o the plan of each, in a folder. drawn: of several budgets."""
    rows = [_row(answer) for answer in answers]
    folder: Path = args.output or Path()
    picture = folder / f"{name}.front.svg" if drawn else None
    if args.output is not None:
        make_folder(args.output)
        for number, answer in enumerate(answers, start=1):
            if answer.plan is not None:
                path = args.output / f"{name}-{number}.plan.json"
                save_text(path, answer.plan.to_json(indent=None))
    if picture is not None:
        save_text(picture, front_svg(drawn, columns=2))
    at = None if picture is None else str(picture)
    if args.json:
        told = {"effort": asdict(effort), "rows": [asdict(row) for row in rows]}
        print_json(told | {"front": at})
    else:
        title = f"{name}  {compute_text(fused=answers[0].point.fused)}"
        print_text(sweep_text(title, rows, effort, at))


def _where(point: Point) -> str:
    nodes = -(-point.world_size // point.ranks_per_node)
    shape = f" ({nodes} x {point.ranks_per_node})" if nodes > 1 else ""
    compute = compute_text(fused=point.fused)
    return f"{point.world_size:,} ranks{shape}, {point.machine.name}, {compute}"


def _row(answer: Answer) -> SweepRow:
    point = answer.point
    row = SweepRow(point.world_size, point.machine.name, point.policy.budget_bytes, point.sizes)
    if answer.plan is None:
        return replace(row, why_not=str(answer.infeasible))
    estimate, sizes = answer.plan.estimate, dict(point.sizes)
    tokens = None
    if {"batch", "seq"} <= sizes.keys():
        tokens = point.policy.micro_steps * sizes["batch"] * sizes["seq"]
    return replace(
        row,
        step_time_us=estimate.step_time_us,
        optimizer_us=estimate.optimizer_us,
        stragglers_us=None if estimate.stragglers is None else estimate.stragglers.ours_us,
        exposed_us=estimate.exposed_us,
        peak_bytes=estimate.peak_bytes,
        fsdp2_step_time_us=estimate.fsdp2.step_time_us,
        fsdp2_peak_bytes=estimate.fsdp2.peak_bytes,
        tokens_per_s=None if tokens is None else tokens / estimate.whole_step_us * 1e6,
    )


def _followed(answers: Iterator[Answer], total: int) -> Iterator[Answer]:
    """Shows how far it is: a bar on a terminal, in a log a line for every fourth part."""
    terminal = sys.stderr.isatty()
    for done, answer in enumerate(answers, start=1):
        if total > 1 and terminal:
            filled = BAR * done // total
            bar = "#" * filled + "-" * (BAR - filled)
            end = "\n" if done == total else ""
            print(f"\rgraphshard: [{bar}] {done} of {total}", file=sys.stderr, end=end, flush=True)
        elif total > 1 and done * 4 // total > (done - 1) * 4 // total:
            say(f"planned {done} of {total}")
        yield answer
