"""Plans on disk, so that a second launch does not search again.

In: a problem as it is priced (graph structure, costs, settings, budget; no rank, device index or
name of a process group is in it). Out: the plan that was found for it before, by this version of
torch and these sources of the planner.

A file is trusted if the checksum of its plan is right, the plan contradicts nothing and suits the
problem (`check`). Any other is named in one warning, and replaced when the plan is made again.
Files are written whole, so that launches may share a folder; the ones that were not used for
longest go when the folder holds more than MOST_BYTES. Nothing here ends a compile.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from graphshard.errors import FileError, GraphshardWarning, PlanError
from graphshard.files.decode import DecodeError, decode
from graphshard.files.information import informing, write_whole
from graphshard.files.reading import read_json, reason, shown
from graphshard.planner.problem import Problem, checked
from graphshard.planner.separate_group import reductions_apart
from graphshard.planner.simulate import simulated_as
from graphshard.schedule.plan import GroupInfo, Plan
from graphshard.schedule.steps import to_json

# A plan of 100 groups takes about 1 MiB.
MOST_BYTES = 2**28
SUFFIX = ".plan.json"
# Only a launch that was killed while it wrote leaves a part behind.
PART_SUFFIX, PART_AGE_S = ".part", 3600.0


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """What a file holds: `plan` as text, and the SHA-256 of that text."""

    key: str
    sha256: str
    plan: str


def cache_dir() -> Path:
    """`GRAPHSHARD_CACHE_DIR`, or ~/.cache/graphshard."""
    given = os.environ.get("GRAPHSHARD_CACHE_DIR")
    return Path(given) if given else Path("~/.cache/graphshard").expanduser()


def key_of(
    problem: Problem, baseline: Problem | None, groups: tuple[GroupInfo, ...], torch_version: str
) -> str:
    """SHA-256 over all that a plan depends on. The budget, the costs and the user's settings are
    in the problem."""
    text = to_json([_planner(), torch_version, groups, problem, baseline])
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _planner() -> str:
    """Changes with every version of graphshard that may plan otherwise."""
    here = Path(__file__).parents[1]
    schedule = [here / "schedule" / "plan.py", here / "schedule" / "steps.py"]
    files = [*schedule, *sorted((here / "planner").glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def load(key: str, name: str, check: Callable[[Plan], None] = lambda plan: None) -> Plan | None:
    """The plan under `key`, with the name of this graph; None if there is none that can be used.

    check: raises PlanError for a plan that does not suit. A file that is damaged, or holds such a
    plan, is named in a GraphshardWarning (GS706).
    """
    path = None
    try:
        path = _path(key)
        if not path.exists():
            return None
        plan = _plan_of(key, path)
        check(plan)
    except (OSError, RuntimeError, DecodeError, FileError, PlanError) as error:
        why = reason(error).removeprefix(f"GS1204: {shown(path)}: ") if path else reason(error)
        text = f"GS706: {path or cache_dir} is ignored, and planned again: {why}"
        warnings.warn(text, GraphshardWarning, stacklevel=2)
        return None
    with contextlib.suppress(OSError):  # a folder of someone else's: then it is not kept for longer
        os.utime(path)
    return replace(plan, name=name)


def _plan_of(key: str, path: Path) -> Plan:
    found: CacheEntry = decode(CacheEntry, read_json(path))
    if found.key != key:
        raise DecodeError("it is the file of another plan")
    if hashlib.sha256(found.plan.encode(errors="replace")).hexdigest() != found.sha256:
        raise DecodeError("the checksum of its plan is wrong")
    return Plan.from_json(found.plan)


def check(plan: Plan, problem: Problem, groups: tuple[GroupInfo, ...], torch_version: str) -> None:
    """Raises PlanError (GS603) unless `plan` is one of `problem`: what it is simulated to take, to
    hold and to send is what it says."""
    own, asked = (
        tuple(replace(g, between_micro_steps=False) for g in x) for x in (plan.groups, groups)
    )
    if own != asked or plan.torch_version != torch_version:
        raise PlanError("GS603", "it is of other groups, or of another torch")
    if not set(plan.recompute) <= {o.name for o in problem.recompute} or plan.estimate is None:
        raise PlanError("GS603", "it computes again what the graph does not have")
    if plan.reduces_apart != problem.reduces_apart:
        if not plan.reduces_apart or not problem.may_reduce_apart:
            raise PlanError("GS603", "it reduces on other process groups")
        problem = reductions_apart(problem)
    if len(plan.schedules) != len(problem.directions):
        raise PlanError("GS603", "it has another number of directions")
    found = simulated_as(checked(problem), plan)
    ours = plan.estimate.ours
    pairs = (
        (found.step_us, ours.step_time_us),
        (found.exposed_us, ours.exposed_us),
        (found.peak.bytes, ours.peak_bytes),
    )
    if not all(math.isclose(*pair, rel_tol=1e-6, abs_tol=1e-3) for pair in pairs):
        raise PlanError("GS603", "its schedule does not take what it says")


def save(key: str, plan: Plan) -> None:
    """Write `plan` under `key`: a reader sees the whole file or none."""
    with informing("the plan cache", os.environ.get("GRAPHSHARD_CACHE_DIR", "~/.cache/graphshard")):
        text = plan.to_json(indent=None)
        entry = CacheEntry(key, hashlib.sha256(text.encode()).hexdigest(), text)
        path = _path(key)
        if path.is_dir():  # in the place of a file: not ours to delete
            return
        write_whole(path, to_json(entry))
        _evict(path)


def _evict(newest: Path) -> None:
    """The files that were not used for longest go until what is left is within MOST_BYTES."""
    left = MOST_BYTES
    for used_s, size, path in sorted(_files(newest.parent), reverse=True):
        left -= size
        is_part = path.name.endswith(PART_SUFFIX)
        is_old = time.time() - used_s > PART_AGE_S
        if path != newest and (is_old if is_part else left < 0):
            path.unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """When each file of the cache was last used, and its size; other files are not looked at."""
    for found in os.scandir(folder):
        if found.name.endswith((SUFFIX, PART_SUFFIX)) and found.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):  # another launch evicts too
                facts = found.stat()
                yield facts.st_mtime, facts.st_size, Path(found.path)


def _path(key: str) -> Path:
    return cache_dir() / f"{key[:32]}{SUFFIX}"
