"""Models that `bench/plan_time.py` plans, as functions that `graphshard plan` calls."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a graphshard elsewhere, too

from examples import llama

LENGTH = 8_192


def bare_8b() -> Any:
    """Without checkpoints."""
    return llama.sharded(replace(llama.LLAMA3_8B, recompute="none"), 2, LENGTH)


def llama_70b() -> Any:
    return llama.sharded(llama.LLAMA3_70B, 1, LENGTH)


def llama_405b() -> Any:
    return llama.sharded(llama.LLAMA3_405B, 1, LENGTH)
