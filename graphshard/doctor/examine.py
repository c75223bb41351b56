"""The whole examination of a training command: run it with eager FSDP2, with graphshard, compare.

In: a command. Out: an `Examination`. A third run, eager again, is made only where the two do not
start alike, to tell a script that does not repeat itself from a difference that graphshard makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphshard.doctor.attach import EAGER, OURS
from graphshard.doctor.findings import Finding, Level, fault, worst
from graphshard.doctor.launch import LaunchedRun, run_watched
from graphshard.doctor.lints import lint
from graphshard.doctor.verdict import Verdict, compare, starts_alike, verdict_of

Launch = Callable[[str], LaunchedRun]


@dataclass(frozen=True, slots=True)
class Examination:
    """verdict: None where one of the runs did not come so far. tail: what a failed run printed."""

    command: tuple[str, ...]
    verdict: Verdict | None
    findings: tuple[Finding, ...]
    tail: tuple[str, ...] = ()

    @property
    def level(self) -> Level:
        return worst(self.findings)


def examine(
    command: Sequence[str], num_steps: int, limit_s: float, say: Callable[[str], None]
) -> Examination:
    """num_steps: optimizer steps of a run, 0: until the script ends. limit_s: seconds of a run.

    Raises DoctorError (GS1141) if the command cannot be started.
    """

    def launch(mode: str) -> LaunchedRun:
        say(f"running with {'eager FSDP2' if mode == EAGER else OURS}: {' '.join(command)}")
        return run_watched(command, mode, num_steps, limit_s)

    return judge(tuple(command), launch)


def judge(command: tuple[str, ...], launch: Launch) -> Examination:
    """launch: runs the command in a mode, at most three times."""
    eager = launch(EAGER)
    if not _has_steps(eager):
        return Examination(command, None, (*_failed(eager), *lint([eager.facts])), eager.tail)
    ours = launch(OURS)
    runs = [eager.facts, ours.facts]
    if not _has_steps(ours):
        return Examination(command, None, (*_failed(ours), *lint(runs)), ours.tail)
    if len(ours.facts) != len(eager.facts) or _steps(ours) != _steps(eager):
        return Examination(command, None, (_different(eager, ours), *lint(runs)))
    again = () if starts_alike(*runs) else launch(EAGER).facts
    findings = (*compare(eager.facts, ours.facts, again), *lint(runs))
    return Examination(command, verdict_of(eager.facts, ours.facts), findings)


def _has_steps(run: LaunchedRun) -> bool:
    return run.is_whole and _steps(run) > 0


def _steps(run: LaunchedRun) -> int:
    return min(len(rank.steps) for rank in run.facts)


def _failed(run: LaunchedRun) -> tuple[Finding, ...]:
    """One finding, or none where the script ran but trained nothing that a lint explains."""
    if run.is_whole:
        what = f"the command made no optimizer step after a backward with {_words(run)}"
        return (fault("GS1110", what, "give a command that trains, and for some steps"),)
    advice = {
        EAGER: "see the findings below and what the command printed last: graphshard is not "
        "involved",
        OURS: "graphshard is involved: please report it, with what the command printed last; "
        "GRAPHSHARD_DISABLE=1 trains without",
    }
    code = "GS1110" if run.mode == EAGER else "GS1114"
    return (fault(code, f"the command fails with {_words(run)}: {run.why}", advice[run.mode]),)


def _words(run: LaunchedRun) -> str:
    return "eager FSDP2" if run.mode == EAGER else "graphshard"


def _different(eager: LaunchedRun, ours: LaunchedRun) -> Finding:
    return fault(
        "GS1115",
        f"{len(eager.facts)} ranks made {_steps(eager)} steps with eager FSDP2, "
        f"{len(ours.facts)} ranks {_steps(ours)} with graphshard: nothing can be compared",
        "make the number of steps independent of time and of the losses, or give fewer --steps",
    )
