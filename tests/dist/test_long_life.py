"""Many models in one process, and one model for long: nothing grows.

GRAPHSHARD_LONG=1 runs the long form (50 models; 3,000 steps by Inductor) and prints its numbers.
"""

import gc
import os
import threading
import weakref
from dataclasses import astuple, dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import Ctx, Pool, collect_all
from students import WIDTH, in_place, sharded, steps_of, wrapped

import graphshard
from graphshard.capture import group_spec
from graphshard.capture.dynamo import frames
from graphshard.capture.root_state import all_root_states
from graphshard.fsdp2 import layouts
from graphshard.runtime import leftovers, live
from graphshard.runtime.job_store import job_store

pytestmark = pytest.mark.dist

LONG = bool(os.environ.get("GRAPHSHARD_LONG"))
MODELS = 50 if LONG else 12
STEPS = 3000 if LONG else 200
RECORDED = 2100  # collectives; the flight recorder remembers 2,000
RSS_SLACK_KIB = 40_000
VARIANTS = 6  # then each way to compile has been taken


@dataclass(frozen=True)
class Held:
    """What this process holds, and the job's store."""

    rss_kib: int
    descriptors: int
    threads: int
    store_keys: int
    tensors: int
    records: int
    groups: int
    specs: int
    frames: int
    layouts: int
    left: int


def held() -> Held:
    gc.collect()
    dist.barrier()  # keys that the other rank is about to delete
    status = Path("/proc/self/status").read_text()
    (rss,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
    found = Held(
        int(rss),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
        dist.distributed_c10d._get_default_store().num_keys(),
        sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()),
        len(all_root_states()),
        len(live._LIVE),
        len(group_spec._SPECS),
        len(frames._FRAMES),
        len(layouts._LAYOUTS),
        len(leftovers._LEFT),
    )
    dist.barrier()
    return found


def many(ctx: Ctx, count: int, resets: bool) -> list[Held]:
    """What is held after each of `count` models, made, trained and dropped, and at the end."""
    seen: list[Held] = []
    gone = []
    forget()
    for number in range(count):
        model = sharded(ctx)
        call = (in_place, wrapped)[number % 2](model, verify="every" if number % 3 else "compile")
        steps_of(call, model, ctx, 2)
        (plan,) = graphshard.plans(model)
        assert {g.fqn for g in plan.groups} == {"(root)", "blocks.0", "blocks.1"}
        report = graphshard.explain(model)
        assert (report.graphs, report.captured, report.present) == (2, 3, 3)
        assert not report.reasons
        gone.append(weakref.ref(model))
        del model, call
        if resets:
            torch._dynamo.reset()
        if number == 0:
            forget()
        seen.append(held())
    assert not any(model() is not None for model in gone)
    forget()
    return [*seen, held()]


def forget() -> None:
    """All ranks drop what they remember of dropped models, and take away what they left of them.

    c10d's flight recorder remembers code objects that issued collectives, until it has seen others.
    """
    collect_all()
    for _ in range(RECORDED):
        dist.all_reduce(torch.zeros(1))
    store = job_store(dist.distributed_c10d._get_default_store(), 60)
    for _ in range(2):  # to say that this rank has dropped them, and to hear it of the others
        gc.collect()
        leftovers.take_away(store)
        dist.barrier()


def assert_flat(seen: list[Held]) -> None:
    """After a warm-up nothing grows but memory, by the allocator's leave a little."""
    *rows, after = seen
    before = rows[len(rows) // 2]
    assert rows[-1].rss_kib - before.rss_kib < RSS_SLACK_KIB
    assert after.descriptors <= before.descriptors
    assert after.threads <= before.threads
    assert after.store_keys <= rows[0].store_keys
    most = max(row.tensors for row in rows[:VARIANTS])
    assert after.tensors <= most
    assert rows[-1].tensors <= most
    assert (after.records, after.groups) == (0, 0)
    assert after.specs <= max(row.specs for row in rows[:VARIANTS])
    assert (after.frames, after.layouts) == (before.frames, before.layouts)
    # A rank that is late, or garbage that is collected late, leaves one more for a while.
    assert max(row.left for row in rows) < len(rows) // 2
    assert after.left == 0


def tell(title: str, seen: list[Held]) -> None:
    if LONG:
        print(f"\n{title}", *(seen[i] for i in (0, len(seen) // 2, -2, -1)), sep="\n  ")


@pytest.mark.parametrize("resets", [False, True], ids=["shared", "reset"])
def test_many_models_in_one_process(pool: Pool, resets: bool) -> None:
    for seen in pool.run(2, many, MODELS, resets, timeout_s=1500 if LONG else 240):
        tell(f"{MODELS} models, resets={resets}", seen)
        assert_flat(seen)


def for_long(ctx: Ctx, compute: str) -> list[Held]:
    """What is held every tenth of STEPS steps of one model."""
    model = in_place(sharded(ctx), compute=compute, verify="every")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seen = []
    for step in range(STEPS):
        model(torch.full((4, WIDTH), step / STEPS)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % (STEPS // 10) == STEPS // 10 - 1:
            seen.append(held())
    assert graphshard.explain(model).graphs == 2
    return seen


def test_one_model_for_long(pool: Pool) -> None:
    compute = "inductor" if LONG else "aten"
    for seen in pool.run(2, for_long, compute, timeout_s=1500 if LONG else 240):
        tell(f"{STEPS} steps, {compute}", seen)
        first, last = seen[len(seen) // 2], seen[-1]
        assert last.rss_kib - first.rss_kib < 20_000
        assert astuple(last)[1:] == astuple(first)[1:]
