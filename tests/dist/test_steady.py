"""A steady step allocates nothing new: the same sizes in every step, and all of them given back.

On a GPU these come from memory that torch's allocator has already; there its segments are counted.
On CPU torch has no such pool, so that equal sizes are all that can be asked for.
"""

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, Case
from parity import build, reseed, sgd
from patching import patched
from pool import Ctx, Pool
from torch import nn
from torch.profiler import ProfilerActivity, profile

from graphshard.runtime import gather_buffers

pytestmark = pytest.mark.dist

WARM_UP = 12  # what tunes itself has settled by then
STEADY = 4
# More steps are taken, up to MOST, until each allocation was seen to be given back in one of them:
# 9 were needed on a machine with 4 busy processes per core. Profiled steps are slower, and after
# about 12 of them what tunes itself would plan again.
MOST = 12
TUNES: dict[str, Any] = {"fallback": "error", "replan_after": None}
LATE_S = 0.1  # gloo's threads let go of a collective's tensors a little after its end

Allocation = tuple[int, int]  # bytes, and its number among those of that size in a step


@dataclass
class Memory:
    """What steps allocate on the CPU. living: by address. freed: given back in any step.

    The profiler does not see what a gloo thread gives back, and any of a step's collectives may be
    given back by one: the last to let go of it. So one step does not show what is left.
    """

    living: dict[int, Allocation] = field(default_factory=dict)
    allocated: set[Allocation] = field(default_factory=set)
    freed: set[Allocation] = field(default_factory=set)

    def follow(self, step: Callable[[], None]) -> Counter[int]:
        """Runs a step. How often which size was allocated."""
        sizes: Counter[int] = Counter()
        for size, address in _allocated(step):
            before = self.living.pop(address, None)
            if before is not None:  # the address serves again
                self.freed.add(before)
            if size > 0:
                sizes[size] += 1
                self.living[address] = (size, sizes[size])
                self.allocated.add(self.living[address])
        return sizes

    def left(self) -> list[Allocation]:
        """What no step gave back."""
        return sorted(self.allocated - self.freed)


def _allocated(step: Callable[[], None]) -> list[tuple[int, int]]:
    """Bytes and address of each allocation, in their order; what is given back is negative."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
        time.sleep(LATE_S)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    found = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: float(e["ts"]))
    return [(e["args"]["Bytes"], e["args"]["Addr"]) for e in found]


def steps_of(model: nn.Module, case: Case, ctx: Ctx) -> Callable[[], None]:
    """A training step; the batch is the same each time."""
    optimizer = sgd(model.parameters())
    batch = case.batch(0, ctx.rank, ctx.device)

    def step() -> None:
        case.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def steady(ctx: Ctx, options: dict[str, Any]) -> list[Allocation]:
    """What no steady step gives back."""
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
    before, memory = segments(), Memory()
    with patched(gather_buffers, "_new_buffer", noted):
        seen = [memory.follow(step) for _ in range(STEADY)]
        while anywhere(ctx, memory.left()) and len(seen) < MOST:
            seen.append(memory.follow(step))
    assert segments() == before
    assert made == [], "gather buffers are made once"
    assert all(sizes == seen[0] for sizes in seen)
    return memory.left()


def anywhere(ctx: Ctx, left: list[Allocation]) -> bool:
    """Whether something is left on any rank: all of them go on then."""
    found = torch.tensor(len(left), device=ctx.device)
    dist.all_reduce(found)
    return bool(found.item())


@pytest.mark.parametrize("options", [{"schedule": "fsdp2"}, {}, {"reshard": "auto"}], ids=str)
def test_a_steady_step_allocates_nothing_new(pool: Pool, options: dict[str, Any]) -> None:
    assert pool.run(2, steady, options) == [[], []]


def test_by_inductor() -> None:
    with Pool("inductor") as workers:
        assert workers.run(2, steady, {}, timeout_s=240) == [[], []]
