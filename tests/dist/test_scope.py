"""Importing or using graphshard changes nothing for other backends and for eager FSDP2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# Prints frames and graphs that Dynamo sees for other backends, as JSON: before graphshard is
# imported, after that, and after it has compiled.
PROGRAM = """
import json
import torch, torch.nn as nn, torch.distributed as dist
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))

def sharded():
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 4))
    for block in model[:2]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def grouped():
    model = nn.Sequential(Block(), nn.Linear(8, 8), nn.Linear(8, 4))
    fully_shard([model[1], model[2]], mesh=mesh)
    return fully_shard(model, mesh=mesh)

def hooked():
    model = nn.Sequential(Block(), Block())
    for block in model:
        block.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        block.register_forward_hook(lambda m, args, out: out + 1)
    return model

def compile_with_graphshard():
    for make in (sharded, grouped):
        model = make()
        model.compile(backend="graphshard", fullgraph=True)
        model(torch.randn(2, 8)).sum().backward()
        import graphshard
        assert len(graphshard.plans(model)) == 1
        eager = make()
        eager(torch.randn(2, 8)).sum().backward()

def frames():
    rows = {}
    for backend in ("aot_eager", "inductor"):
        for make in (sharded, grouped, hooked):
            for how in ("wrapped", "in place"):
                torch._dynamo.reset()
                counters.clear()
                torch.manual_seed(0)
                model = make()
                counter = CompileCounterWithBackend(backend)
                if how == "wrapped":
                    run = torch.compile(model, backend=counter)
                else:
                    model.compile(backend=counter)
                    run = model
                x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
                run(x).sum().backward()
                rows[f"{backend} {make.__name__} {how}"] = [
                    counter.frame_count, counter.op_count, dict(counters["frames"]),
                    sum(counters["graph_break"].values()),
                ]
    return rows

found = [frames()]
import graphshard.backend
found.append(frames())
compile_with_graphshard()
found.append(frames())
print(json.dumps(found))
"""


@pytest.mark.slow
def test_frames_and_graphs_of_other_backends_stay_the_same() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    without, imported, used = json.loads(result.stdout.splitlines()[-1])
    assert any(row[0] for row in without.values())
    assert imported == without
    assert used == without
