"""A model that `bench/plan_time.py` plans and the examples lack."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for a graphshard elsewhere, too

from examples import llama


def bare_8b() -> Any:
    """Llama 3 8B without checkpoints."""
    return llama.sharded(replace(llama.LLAMA3_8B, recompute="none"), batch=2, seq=8_192)
