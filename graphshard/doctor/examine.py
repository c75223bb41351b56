"""The whole examination of a training command: run it with eager FSDP2, with graphshard, compare.

In: a command. Out: an `Examination`. Another run, eager again, is made only where the two do not
start alike, to tell a script that does not repeat itself from a difference that graphshard makes.
One with `aot_eager` is made only where there is a difference, to tell whose it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphshard.doctor.attach import AOT, EAGER, OURS
from graphshard.doctor.blame import departure_of, origin_of
from graphshard.doctor.facts import Facts
from graphshard.doctor.findings import Finding, Level, fault, worst
from graphshard.doctor.launch import LaunchedRun, run_watched
from graphshard.doctor.lints import lint
from graphshard.doctor.origin import Origin
from graphshard.doctor.verdict import Verdict, compare, repeats, starts_alike, verdict_of

Launch = Callable[[str], LaunchedRun]
NAMES = {EAGER: "eager FSDP2", OURS: "graphshard", AOT: "aot_eager"}


@dataclass(frozen=True, slots=True)
class Examination:
    """verdict: None where one of the runs did not come so far. origin: whose the first difference
    is; None if there is none, or that was not looked for. tail: what a failed run printed."""

    command: tuple[str, ...]
    verdict: Verdict | None
    findings: tuple[Finding, ...]
    origin: Origin | None = None
    tail: tuple[str, ...] = ()

    @property
    def level(self) -> Level:
        return worst(self.findings)


def examine(
    command: Sequence[str],
    num_steps: int,
    limit_s: float,
    say: Callable[[str], None],
    *,
    finds_origin: bool = True,
) -> Examination:
    """num_steps: optimizer steps of a run, 0: until the script ends. limit_s: seconds of a run.
    finds_origin: may run it with `aot_eager`.

    Raises DoctorError (GS1141) if the command cannot be started.
    """

    def launch(mode: str) -> LaunchedRun:
        say(f"running with {NAMES[mode]}: {' '.join(command)}")
        return run_watched(command, mode, num_steps, limit_s)

    return judge(tuple(command), launch, finds_origin=finds_origin)


def judge(command: tuple[str, ...], launch: Launch, *, finds_origin: bool = True) -> Examination:
    """launch: runs the command in a mode, at most four times."""
    eager = launch(EAGER)
    if not _has_steps(eager):
        return _failed_examination(command, eager, [eager.facts])
    ours = launch(OURS)
    runs = [eager.facts, ours.facts]
    if not _has_steps(ours):
        return _failed_examination(command, ours, runs)
    if len(ours.facts) != len(eager.facts) or _steps(ours) != _steps(eager):
        return Examination(command, None, (_different(eager, ours), *lint(runs)))
    again = () if starts_alike(*runs) else launch(EAGER).facts
    may_find = finds_origin and repeats(eager.facts, again)
    origin, tail = _originate(eager, ours, launch) if may_find else (None, ())
    findings = (*compare(eager.facts, ours.facts, again, origin), *lint(runs))
    return Examination(command, verdict_of(eager.facts, ours.facts), findings, origin, tail)


def _originate(
    eager: LaunchedRun, ours: LaunchedRun, launch: Launch
) -> tuple[Origin | None, tuple[str, ...]]:
    """Also what the run with `aot_eager` printed, if it failed."""
    departure = departure_of(eager.facts, ours.facts)
    if departure is None:
        return None, ()
    aot = launch(AOT)
    came = _has_steps(aot) and len(aot.facts) == len(eager.facts) and _steps(aot) == _steps(eager)
    found = origin_of(departure, eager.facts, ours.facts, aot.facts if came else ())
    return found, () if came else aot.tail


def _failed_examination(
    command: tuple[str, ...], run: LaunchedRun, runs: Sequence[Sequence[Facts]]
) -> Examination:
    return Examination(command, None, (*_failed(run), *lint(runs)), tail=run.tail)


def _has_steps(run: LaunchedRun) -> bool:
    return run.is_whole and _steps(run) > 0


def _steps(run: LaunchedRun) -> int:
    return min(len(rank.steps) for rank in run.facts)


def _failed(run: LaunchedRun) -> tuple[Finding, ...]:
    """One finding, or none where the script ran but trained nothing that a lint explains."""
    if run.is_whole:
        what = f"the command made no optimizer step after a backward with {NAMES[run.mode]}"
        return (fault("GS1110", what, "give a command that trains, and for some steps"),)
    advice = {
        EAGER: "see the findings below and what the command printed last: graphshard is not "
        "involved",
        OURS: "graphshard is involved: please report it, with what the command printed last; "
        "GRAPHSHARD_DISABLE=1 trains without",
    }
    code = "GS1110" if run.mode == EAGER else "GS1114"
    return (fault(code, f"the command fails with {NAMES[run.mode]}: {run.why}", advice[run.mode]),)


def _different(eager: LaunchedRun, ours: LaunchedRun) -> Finding:
    return fault(
        "GS1115",
        f"{len(eager.facts)} ranks made {_steps(eager)} steps with eager FSDP2, "
        f"{len(ours.facts)} ranks {_steps(ours)} with graphshard: nothing can be compared",
        "make the number of steps independent of time and of the losses, or give fewer --steps",
    )
