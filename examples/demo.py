"""What `make demo` runs: examples/train.py on this machine, then the same on a slow network.

    python examples/demo.py [--processes 2]

First torchrun starts examples/train.py, which compares eager FSDP2 with graphshard on processes of
this machine, through loopback. Then a model of the same shapes is trained on an emulated network
(bench/emulator): one process stands for RANKS of them and computes all of its own part; what a
collective takes comes from the link's rate, on a virtual clock. In the end there is one verdict.
Exit status: that of the training, which is 1 if graphshard is not equal to eager FSDP2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RANKS, GBIT, STEPS = 8, 0.8, 4
MODES = {"eager FSDP2": "fsdp2", "graphshard": "default"}  # those of bench/modes.py
# One thread each; the profiler's own notes are left out.
QUIET = {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
NEXT = """next
  open schedule.html                                          the plan that ran, in a browser
  graphshard plan demo:llama3_8b --world 64 --hw h100-ib400   a model on machines you do not have
  graphshard doctor -- torchrun --nproc-per-node 2 train.py   a script of yours, unchanged"""


@dataclass(frozen=True, slots=True)
class Emulated:
    """On the slow link. peak_bytes: of the step."""

    step_ms: float
    waits_ms: float
    peak_bytes: int


def main() -> int:
    parser = argparse.ArgumentParser(description="Eager FSDP2 and graphshard.")
    parser.add_argument("--processes", type=int, default=2)
    processes = parser.parse_args().processes
    with tempfile.TemporaryDirectory() as folder:
        facts = Path(folder) / "facts.json"
        say(f"training three times on {processes} processes")
        status = train(processes, facts)
        if not facts.exists():
            return status or 1
        found = json.loads(facts.read_text())
    say(f"the same shapes on {RANKS} emulated ranks with {GBIT:g} Gbit/s each")
    slow = on_a_slow_link()
    print(slow_table(slow))
    print(f"\n{verdict(found, slow, processes)}\n\n{NEXT}")
    return status


def train(processes: int, facts: Path) -> int:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(processes)),
        *(str(ROOT / "examples/train.py"), "--facts", str(facts)),
    ]
    environment = {**os.environ, **QUIET}
    return subprocess.run(command, env=environment, check=False).returncode


def on_a_slow_link() -> dict[str, Emulated]:
    # Compiled once, before both use it.
    python("-c", "from bench import emulator; emulator.load_extension()")
    with ThreadPoolExecutor() as pool:
        return dict(zip(MODES, pool.map(emulated, MODES), strict=True))


def emulated(name: str) -> Emulated:
    request: dict[str, Any] = {
        "mode": MODES[name],
        "config": "DEMO",
        "num_ranks": RANKS,
        "gbits": [GBIT],
        "alpha_us": 300.0,
        "num_steps": STEPS,
    }
    output = python("-m", "bench.launch", json.dumps(request))
    (rate,) = json.loads(output.splitlines()[-1])["rates"]
    say(f"  {name}: done")
    return Emulated(
        median(step["step_us"] for step in rate["steps"]) / 1e3,
        median(step["exposed_us"] for step in rate["steps"]) / 1e3,
        rate["resident_bytes"] + rate["step_peak_bytes"],
    )


def python(*arguments: str) -> str:
    """Its stdout. Raises CalledProcessError."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT, env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip


def slow_table(slow: dict[str, Emulated]) -> str:
    rows = {
        f"{RANKS} ranks, {GBIT:g} Gbit/s (emulated)": list(slow),
        "step": [f"{one.step_ms:,.0f} ms" for one in slow.values()],
        "  of it waits for the network": [f"{one.waits_ms:,.0f} ms" for one in slow.values()],
        "peak memory": [f"{one.peak_bytes / 1e6:,.1f} MB" for one in slow.values()],
    }
    lines = (f"{title:<36}" + "".join(f"{c:>16}" for c in cells) for title, cells in rows.items())
    return "\n" + "\n".join(lines)


def verdict(found: dict[str, Any], slow: dict[str, Emulated], processes: int) -> str:
    """In one paragraph."""
    eager, default, exact = (column["step_ms"] for column in found["columns"])
    gathered = [f"{column['peak_bytes'] / 1e6:.0f}" for column in found["columns"]]
    slow_eager, slow_default = slow.values()
    gain = slow_eager.step_ms / slow_default.step_ms
    equal = "yes" if found["equal"] else "NO"
    text = (
        f"verdict: equal to eager FSDP2 to the last bit: {equal}. On {processes} processes of this "
        f"machine a step takes {eager:,.0f} ms with eager FSDP2, {default:,.0f} ms with graphshard "
        f"and {exact:,.0f} ms bit by bit; at peak {gathered[1]} MB are gathered instead of "
        f"{gathered[0]}, within FSDP2's own peak of memory. Here it gains least: loopback costs no "
        "wire, and what gloo copies takes the cores that compute. On a link of "
        f"{GBIT:g} Gbit/s a step takes {slow_default.step_ms:,.0f} ms instead of "
        f"{slow_eager.step_ms:,.0f}, {gain:.2f} times as fast, with "
        f"{_memory(slow_eager, slow_default)}."
    )
    return textwrap.fill(text, 96)


def _memory(eager: Emulated, default: Emulated) -> str:
    more = (default.peak_bytes - eager.peak_bytes) / 1e6
    return f"{abs(more):.0f} MB {'more' if more > 0 else 'less'}"


def say(text: str) -> None:
    print(f"demo: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
