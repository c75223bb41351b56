"""What a compiled loss saves and writes: by hand, and against what Inductor's code allocates."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from bench.peaks import step_peaks
from graphshard.cost.presets import preset
from graphshard.offline.point import Point
from graphshard.offline.study import Study
from graphshard.offline.target import made_of
from graphshard.pricing.problem import PlanningPolicy
from graphshard.schedule.plan import Direction

TOKENS, WIDE, WORDS = 512, 32, 4_096


def loss(logits, targets):
    return F.cross_entropy(logits.float(), targets)


class Head(nn.Module):
    """A block, and a loss over many words behind it."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.block = nn.Linear(WIDE, WIDE, bias=False, dtype=torch.bfloat16)
        self.head = nn.Linear(WIDE, WORDS, bias=False, dtype=torch.bfloat16)

    def compute(self, x):
        return F.silu(self.block(x))

    def forward(self, x, targets):
        y = (
            checkpoint(self.compute, x, use_reentrant=False)
            if self.checkpoints
            else self.compute(x)
        )
        return F.cross_entropy(self.head(y).float(), targets)


def inputs():
    return torch.randn(TOKENS, WIDE, dtype=torch.bfloat16), torch.randint(WORDS, (TOKENS,))


def priced(*, checkpoints, fused):
    def build(sizes):
        model = Head(checkpoints=checkpoints)
        fully_shard(model)
        return made_of("head", (model, inputs()))

    point = Point(1, 1, preset("cpu"), PlanningPolicy(), fused=fused)
    study = Study("head", build, (point,))
    study.prepare()
    return study.costs(point)


def most(costs, direction):
    """Activations and temporaries at their most."""
    return max(live.inputs + live.made + live.grads for live in costs.by_direction[direction].live)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_compiled_loss_keeps_no_logits_in_float32(checkpoints):
    logits_bytes = TOKENS * WORDS * 2
    fused, whole = (priced(checkpoints=checkpoints, fused=fused) for fused in (True, False))
    for direction in Direction:
        assert most(fused, direction) < 2.3 * logits_bytes
        assert most(whole, direction) > 4 * logits_bytes


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at that of the logits
def test_inductor_allocates_as_much():
    """For a loss that is compiled by itself: the logits are not its own to write to, as what a
    region reads is not."""
    model, (x, targets) = Head(checkpoints=False), inputs()
    compiled = torch.compile(loss, fullgraph=True)

    def step():
        compiled(model.head(model.compute(x)), targets).backward()

    step()
    model.zero_grad()
    measured_bytes = step_peaks(step).allocated_bytes
    costs = priced(checkpoints=False, fused=True)
    predicted_bytes = max(most(costs, direction) for direction in Direction)
    assert predicted_bytes == pytest.approx(measured_bytes, rel=0.03)
