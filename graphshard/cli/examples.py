"""What `--help` shows as examples, for each verb; "" is the command without one.

Each is a line of a shell that parses: tests/test_cli_examples.py reads them.
"""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "graphshard plan demo:llama3_8b --world 64 --hw h100-ib400",
        "graphshard view llama3_8b.plan.json",
        "graphshard doctor -- torchrun --nproc-per-node 2 train.py",
    ),
    "plan": (
        "graphshard plan demo:llama3_8b --world 64 --hw h100-ib400",
        "graphshard plan demo:llama3_70b --world 512 --hw h100-ib400 --budget 72GiB",
        "graphshard plan model.py:build --world 64,512 --hw h100-200Gbit --batch 1,2 -o plans",
    ),
    "tune": (
        "graphshard tune demo:llama3_8b --gpus 64 --hw h100-ib400 --batch 1,2",
        "graphshard tune model.py:build --gpus 64,128 --hw h100-ib400 --batch-tokens 4M -o tuned",
    ),
    "machines": (
        "graphshard machines",
        "graphshard machines h100-ib400",
    ),
    "show": (
        "graphshard show llama3_8b.plan.json",
        "graphshard show llama3_8b.plan.json --why --group layers.31",
    ),
    "view": (
        "graphshard view llama3_8b.plan.json",
        "graphshard view llama3_8b.plan.json -o llama.html --measured rank0_trace.json",
        "graphshard view llama3_8b.plan.json --perfetto llama3_8b.trace.json",
    ),
    "diff": (
        "graphshard diff before.plan.json after.plan.json",
        "graphshard diff llama3_8b.plan.json --measured rank0_trace.json",
    ),
    "calibrate": (
        "torchrun --nproc-per-node 8 -m graphshard calibrate -o machine.json",
        "torchrun --nproc-per-node 8 -m graphshard calibrate --sizes 64KiB,1MiB,16MiB --json",
    ),
    "doctor": (
        "graphshard doctor",
        "graphshard doctor --steps 10 -- torchrun --nproc-per-node 2 train.py",
    ),
}
