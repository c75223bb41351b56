"""What `graphshard doctor` prints, 92 columns wide, and its JSON form."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from graphshard._version import __version__
from graphshard.doctor.environment import Probe
from graphshard.doctor.examine import Examination
from graphshard.doctor.findings import Finding, some, worst
from graphshard.doctor.origin import Cause, Doubt, Origin
from graphshard.doctor.verdict import Verdict
from graphshard.view.text import bytes_text, count_text
from graphshard.view.units import change_text, time_text

WIDTH = 92
NAME, COLUMN = 32, 15
LEVEL, CODE = 9, 8
ORIGIN = 26
DOUBTS = {
    Doubt.FAILED: "the command fails with aot_eager, or makes other steps",
    Doubt.NOT_COMPILED: "torch could compile nothing with aot_eager",
    Doubt.ELSEWHERE: "aot_eager differs from eager FSDP2 too, but elsewhere or by another size",
}


def environment_text(probes: Sequence[Probe]) -> str:
    lines = [f"graphshard {__version__}", ""]
    room = WIDTH - LEVEL - 14
    for probe in probes:
        lines.append(f"{probe.name:14}{_cut(probe.found, room):{room}}{probe.level:>{LEVEL}}")
    findings = [probe.finding for probe in probes if probe.finding is not None]
    return _joined([*lines, "", *_findings(findings)])


def environment_dict(probes: Sequence[Probe]) -> dict[str, Any]:
    findings = tuple(probe.finding for probe in probes if probe.finding is not None)
    return {"level": worst(findings), "probes": [asdict(probe) for probe in probes]}


def examination_text(examination: Examination) -> str:
    lines = textwrap.wrap(shlex.join(examination.command), WIDTH, subsequent_indent="  ")
    verdict = examination.verdict
    if verdict is not None:
        lines += [_ran(verdict), "", *_verdict(verdict)]
    if (origin := examination.origin) is not None:
        lines += ["", *_origin(origin)]
    return _joined([*lines, "", *_findings(examination.findings)])


def examination_dict(examination: Examination) -> dict[str, Any]:
    """JSON has no infinity and no NaN: such a difference is None."""
    found = asdict(examination)
    if (verdict := found["verdict"]) is not None:
        for name in ("loss_difference", "gradient_difference"):
            verdict[name] = verdict[name] if math.isfinite(verdict[name]) else None
    return {"level": examination.level, **found}


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _cut(text: str, room: int) -> str:
    return text if len(text) < room else text[: room - 4] + "..."


def _ran(verdict: Verdict) -> str:
    ran = count_text(verdict.graphshard.steps, "step")
    groups = f"{verdict.in_graph} of {count_text(verdict.groups, 'group')} in a graph"
    return f"{count_text(verdict.ranks, 'rank')}, {ran}, {groups}"


def _verdict(verdict: Verdict) -> Iterator[str]:
    eager, ours = verdict.eager, verdict.graphshard
    yield _row("", "FSDP2", "graphshard", "change")
    allowed = f"at most {verdict.tolerance:g}"
    yield _row("largest difference of a loss", "", f"{verdict.loss_difference:.1e}", allowed)
    where = f"  at {verdict.gradient_group}" if verdict.gradient_difference else ""
    gap = f"{verdict.gradient_difference:.1e}"
    yield _row("largest difference of a gradient", "", gap, allowed) + where
    if eager.step_time_us and ours.step_time_us:
        times = (eager.step_time_us, ours.step_time_us)
        yield _row("step time, median", *map(time_text, times), change_text(*times[::-1]))
    if eager.peak_bytes:
        peaks = (eager.peak_bytes, ours.peak_bytes)
        name = "peak memory" if verdict.on_gpu else "peak memory of the process"
        yield _row(name, *map(bytes_text, peaks), change_text(*peaks[::-1]))
    for name, one, other in (
        ("all-gathers per step", eager.all_gathers, ours.all_gathers),
        ("reduce-scatters per step", eager.reduce_scatters, ours.reduce_scatters),
        ("other collectives per step", eager.other_collectives, ours.other_collectives),
    ):
        yield _row(name, f"{one:g}", f"{other:g}", f"{other - one:+g}" if other != one else "")


def _origin(origin: Origin) -> Iterator[str]:
    parts = ["a loss"] if origin.in_loss else []
    if origin.groups:
        parts.append(f"gradients of {some(list(origin.groups))}")
    place = f"{' and '.join(parts)}, in step {origin.step}"
    for name, text in (("differs first", place), ("whose difference that is", _whose(origin))):
        head = name.ljust(ORIGIN)
        yield from textwrap.wrap(head + text, WIDTH, subsequent_indent=" " * ORIGIN)


def _whose(origin: Origin) -> str:
    if origin.cause is Cause.AOTAUTOGRAD:
        how = "has the same bits there" if origin.is_same else "differs there too, by about as much"
        return f"AOTAutograd's, not sharding's: aot_eager {how}"
    if origin.doubt is None:
        return "not AOTAutograd's: aot_eager does not differ from eager FSDP2 so far"
    return f"undecided: {DOUBTS[origin.doubt]}"


def _row(name: str, *cells: str) -> str:
    return name.ljust(NAME) + "".join(cell.rjust(COLUMN) for cell in cells)


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        yield "nothing found"
    for finding in findings:
        head = f"{finding.level:{LEVEL}}{finding.code:{CODE}}"
        indent = " " * len(head)
        yield from textwrap.wrap(head + finding.what, WIDTH, subsequent_indent=indent)
        yield from textwrap.wrap(
            f"{indent}fix: {finding.fix}", WIDTH, subsequent_indent=indent + "     "
        )
