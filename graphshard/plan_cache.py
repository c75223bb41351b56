"""Plans on disk, so that a second launch does not search again.

In: a problem as it is priced (graph structure, costs, settings, budget; no rank, device index or
name of a process group is in it). Out: the plan that was found for it before, by this version of
torch and these sources of the planner. A file that cannot be used is ignored with one warning; a
folder that cannot be written to costs nothing but the next search.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

from graphshard.errors import GraphshardWarning
from graphshard.planner.problem import Problem
from graphshard.schedule import to_json
from graphshard.step_plan import GroupInfo, Plan

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """`GRAPHSHARD_CACHE_DIR`, or ~/.cache/graphshard."""
    given = os.environ.get("GRAPHSHARD_CACHE_DIR")
    return Path(given) if given else Path.home() / ".cache" / "graphshard"


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
    here = Path(__file__).parent
    files = [here / "step_plan.py", here / "schedule.py", *sorted((here / "planner").glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def load(key: str, name: str) -> Plan | None:
    """The plan under `key`, with the name of this graph; None if there is none.

    A damaged file is ignored with a GraphshardWarning (GS706).
    """
    path = _path(key)
    try:
        data = json.loads(path.read_text())
        if data["key"] != key:
            raise ValueError(f"it is the file of another plan, {data['key']!r}")
        return replace(Plan.from_json(data["plan"]), name=name)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        text = f"GS706: {path} is ignored, and planned again: {type(error).__name__}: {error}"
        warnings.warn(text, GraphshardWarning, stacklevel=2)
        return None


def save(key: str, plan: Plan) -> None:
    """Write `plan` under `key`: a reader sees the whole file or none."""
    path, text = _path(key), json.dumps({"key": key, "plan": plan.to_json(indent=None)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        logger.info("the plan cache cannot be written: %s", error)


def _path(key: str) -> Path:
    return cache_dir() / f"{key[:32]}.plan.json"
