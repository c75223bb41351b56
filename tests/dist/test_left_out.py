"""Modules that Dynamo cannot capture are left to eager FSDP2 by name, and the rest is captured."""

from typing import Any

import pytest
import torch
from checkpoint_cases import WIDTH, CheckpointCase, build
from pool import Ctx, Pool
from torch import Tensor, nn

import graphshard

pytestmark = pytest.mark.dist


def noted(seen: list[Tensor], module: nn.Module, gradients: Any, given: Any) -> None:
    seen.append(given[0].clone())


def backward_hooks(ctx: Ctx, hooked: str, how: str) -> graphshard.Report:
    runs: list[list[Any]] = []
    for compiled in (False, True):
        model: Any = build(ctx, CheckpointCase(layers=3, flavour="none"))
        seen: list[Any] = []

        def hook(*given: Any, seen: list[Any] = seen) -> None:
            noted(seen, *given)

        model.get_submodule(hooked).register_full_backward_hook(hook)
        run = model
        if compiled and how == "in place":
            model.compile(backend="graphshard")
        elif compiled:
            run = torch.compile(model, backend="graphshard")
        for step in range(3):
            torch.manual_seed(step)
            run(torch.randn(2, 4, WIDTH, device=ctx.device)).square().mean().backward()
        runs.append(seen + [p.grad.to_local().clone() for p in model.parameters()])
    assert len(runs[0]) > 3
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second)
    return graphshard.explain(model)


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_backward_hooks_on_a_part_of_a_block(pool: Pool, how: str) -> None:
    for report in pool.run(2, backward_hooks, "blocks.1.mix", how):
        reason = report.reasons["blocks.1"]
        assert "module blocks.1.mix has full-backward hooks" in reason
        assert "backward_hooks.<locals>.hook" in reason
        assert "blocks.0" not in report.reasons
        assert "blocks.2" not in report.reasons
        assert report.captured >= 2


@pytest.mark.parametrize("how", ["in place", "wrapped"])
def test_backward_hooks_on_the_root_leave_the_blocks_in_graphs(pool: Pool, how: str) -> None:
    for report in pool.run(2, backward_hooks, "", how):
        assert list(report.reasons) == ["(root)"]
        assert "module (root) has full-backward hooks" in report.reasons["(root)"]
        assert report.captured == 3
