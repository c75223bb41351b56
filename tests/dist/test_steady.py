"""A steady step allocates nothing new: the same sizes in every step, and all of them given back.

On a GPU these come from memory that torch's allocator has already; there its segments are counted.
On CPU torch has no such pool, so that equal sizes are all that can be asked for.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from models import CASES, Case
from parity import build, reseed, sgd
from patching import patched
from pool import Ctx, Pool
from torch import nn
from torch.profiler import ProfilerActivity, profile

from graphshard.runtime import gather_buffers

pytestmark = [pytest.mark.dist, pytest.mark.alone]

WARM_UP = 12  # what tunes itself has settled by then
STEADY = 4
TUNES: dict[str, Any] = {"fallback": "error", "replan_after": None}
LATE_S = 0.4  # gloo's threads let go of a collective's tensors a little after its end


def allocations(step: Callable[[], None]) -> tuple[Counter[int], int]:
    """How often which size is allocated on the CPU, and what is left of it in the end, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
        time.sleep(LATE_S)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    sizes = [e["args"]["Bytes"] for e in events if e["name"] == "[memory]"]
    return Counter(size for size in sizes if size > 0), sum(sizes)


def steps_of(model: nn.Module, case: Case, ctx: Ctx) -> Callable[[], None]:
    """A training step; the batch is the same each time."""
    optimizer = sgd(model.parameters())
    batch = case.batch(0, ctx.rank, ctx.device)

    def step() -> None:
        case.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steady(ctx: Ctx, options: dict[str, Any]) -> int:
    """Bytes that are left of each steady step, or of the one that left least."""
    case = CASES["llama"]
    model = build(case, ctx)
    model.compile(backend="graphshard", options={**TUNES, **options})
    step = steps_of(model, case, ctx)
    made: list[Any] = []

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            made.append(args)
            return original(*args)

        return call

    def segments() -> int:
        if ctx.device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats()["segment.all.allocated"])

    reseed(ctx, 0)
    for _ in range(WARM_UP):
        step()
    before = segments()
    with patched(gather_buffers, "_new_buffer", noted):
        seen = [allocations(step) for _ in range(STEADY)]
    assert segments() == before
    assert made == [], "gather buffers are made once"
    assert all(sizes == seen[0][0] for sizes, _ in seen)
    return min((abs(left) for _, left in seen))


@pytest.mark.parametrize("options", [{"schedule": "fsdp2"}, {}, {"reshard": "auto"}], ids=str)
def test_a_steady_step_allocates_nothing_new(pool: Pool, options: dict[str, Any]) -> None:
    assert pool.run(2, steady, options) == [0, 0]


def test_by_inductor(pool: Pool) -> None:
    options = {"compute": "inductor"}
    assert pool.run(2, steady, options, timeout_s=240) == [0, 0]
