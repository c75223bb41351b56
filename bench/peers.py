"""SimpleFSDP of torchtitan 0.3.0, which graphshard is compared with.

In: nothing; the wheel comes from the package index on the first use and stays in build/peers. Out:
its `data_parallel`. Only its one module is loaded. The rest of torchtitan needs packages that a
measurement does not: of it the module uses a base class that configures modules, and gets torch's.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

WHEEL = "torchtitan==0.3.0"
FOLDER = Path(__file__).resolve().parents[1] / "build" / "peers" / WHEEL.replace("==", "-")
SOURCE = FOLDER / "torchtitan" / "experiments" / "graph_trainer" / "simple_fsdp.py"
NAME = "torchtitan.experiments.graph_trainer.simple_fsdp"
BASE = "torchtitan.protocols.module"


class PeerMissing(Exception):
    """The peer is not on this machine, and the package index did not give it."""


def install() -> None:
    """Raises PeerMissing, with what pip said."""
    if SOURCE.exists():
        return
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--target", folder, WHEEL], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            raise PeerMissing(
                f"SimpleFSDP is in the wheel {WHEEL}, which could not be installed; pip said: "
                f"{said}\nname other --modes to measure without it"
            )
        Path(folder).rename(FOLDER)
        Path(folder).mkdir()  # which leaving the context removes


def simple_fsdp() -> Callable[..., nn.Module]:
    """`data_parallel(model, mesh, mode="fully_shard")`. Raises PeerMissing."""
    install()
    if NAME not in sys.modules:
        base: Any = ModuleType(BASE)
        base.Module = nn.Module
        sys.modules.setdefault(BASE, base)
        spec = importlib.util.spec_from_file_location(NAME, SOURCE)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    found: Callable[..., nn.Module] = sys.modules[NAME].data_parallel
    return found
