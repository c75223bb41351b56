"""The measured plan of the model that examples/train.py trains, as rank 0 writes it.

    torchrun --nproc-per-node 2 bench/viewer_launch.py OUT.plan.json

In: nothing but the processes. Out: the plan, with what five steps took (`graphshard.profile`) and
what more memory would buy (`graphshard.explain`).
"""

from __future__ import annotations

import sys
from pathlib import Path

# Instead of bench/, whose modules have common names.
sys.path[0] = str(Path(__file__).resolve().parents[1] / "examples")

import torch.distributed as dist  # noqa: E402
import train  # noqa: E402

import graphshard  # noqa: E402

WARM, STEPS = 14, 5


def main() -> int:
    mesh = train.open_mesh()
    try:
        config = train.LlamaConfig(256, 8, 128)
        job = train.Job(config, mesh, train.read_corpus(), 4, 20, WARM, lambda what: None)
        run = train.start("graphshard", job, compute="inductor")
        train.train(run, job, 0, WARM)
        with graphshard.profile(run.model, steps=STEPS):
            for step in range(STEPS):
                train.train_step(run, *job.batch(WARM + step))
        report = graphshard.explain(run.model)
        if dist.get_rank() == 0:
            print(report)
            Path(sys.argv[1]).write_text(graphshard.plans(run.model)[0].to_json())
        return 0
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
