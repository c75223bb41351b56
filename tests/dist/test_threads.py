"""Ranks as threads of one process, as PyTorch's own tests have them: eager FSDP2, and said so."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

SCRIPT = """
import unittest
import warnings

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.common_distributed import MultiThreadedTestCase

import graphshard

torch._dynamo.lookup_backend("graphshard")  # torch's registry takes a name from one thread only


class Threads(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_step(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for part in model:
            fully_shard(part)
        fully_shard(model)
        model.compile(backend="graphshard")
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        report = graphshard.explain(model)
        assert report.present == 2, report
        assert all("threads of one process" in why for why in report.reasons.values()), report
        assert len(report.reasons) == 2, report


warnings.simplefilter("ignore")
unittest.main()
"""


@pytest.mark.timeout(120)
def test_ranks_that_are_threads_run_through_eager_fsdp2(tmp_path: Path) -> None:
    script = tmp_path / "threads.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "OK" in done.stderr
