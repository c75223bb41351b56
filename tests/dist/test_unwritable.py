"""Logs, dumps and reports that cannot be written, cache entries that are damaged: a warning on that
rank, and training goes on."""

import contextlib
import json
import os
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from graphshard.errors import GraphshardWarning

pytestmark = pytest.mark.dist

STEPS = 4
REPLAN = 2  # a second plan is announced in the middle


class Net(nn.Module):
    """Two layers; their names may be any text."""

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


def trained(ctx: Ctx, names: tuple[str, str], between: Callable[[], None], **more: Any) -> Any:
    """Losses and parameters after STEPS; `between` runs after the first step."""
    torch.manual_seed(0)
    model = Net(names).to(ctx.device)
    for layer in model.children():
        fully_shard(layer, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    if more:
        model.compile(backend="graphshard", options=more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x = torch.full((4, 8), 0.1 * (step + 1 + ctx.rank), device=ctx.device)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step == 0:
            between()
    return losses, [p.detach().to_local() for p in model.parameters()]  # type: ignore[attr-defined]


@contextlib.contextmanager
def no_room(on: bool) -> Iterator[None]:
    """A disk on which no file can hold anything."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if on:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def same_as_eager(ctx: Ctx, fault: str, given: str) -> list[str]:
    """The warnings of this rank; only rank 1 has the fault."""
    folder, is_bad = Path(given) / f"rank{ctx.rank}", ctx.rank == 1
    folder.mkdir()
    names = ("a\udc80b", "second\x1b[31m") if fault == "surrogate" else ("first", "second")
    where = {"proc": "/proc/none", "long": f"{folder}/{'n' * 300}", "null": f"{folder}/a\0b"}
    target = Path(where.get(fault, f"{folder}/out")) if is_bad else folder / "out"
    if fault == "file" and is_bad:
        target.write_text("")
    gone = fault == "gone" and is_bad

    def between() -> None:
        if gone:
            shutil.rmtree(target)
            target.write_text("a file in its place")

    # The profiler's ranges of eager FSDP2 refuse a lone surrogate.
    oracle = trained(ctx, ("first", "second"), lambda: None)
    with warnings.catch_warnings(record=True) as said, no_room(is_bad and fault == "full"):
        warnings.simplefilter("always")
        found = trained(
            ctx, names, between, compute="aten", fallback="error", replan_after=REPLAN,
            dump_dir=target, report_dir=target,
        )  # fmt: skip
    assert all(map(torch.equal, oracle[0], found[0]))
    assert all(map(torch.equal, oracle[1], found[1]))
    if not is_bad or fault == "surrogate":
        assert len(list(target.rglob("*.plan.json"))) == 1
    return [str(w.message) for w in said if issubclass(w.category, GraphshardWarning)]


@pytest.mark.parametrize("fault", ["proc", "long", "null", "file", "gone", "full", "surrogate"])
def test_training_goes_on(pool: Pool, tmp_path: Path, fault: str) -> None:
    good, bad = pool.run(2, same_as_eager, fault, str(tmp_path))
    assert good == []
    expected = [] if fault == "surrogate" else ["dump_dir", "report_dir"]
    assert [text.split()[2] for text in bad if "the cache" not in text] == expected, bad
    assert all("GS1201" in text for text in bad)


def without_reduces(text: str) -> str:
    """The entry with a plan of which the reductions are gone; its checksum stays."""
    entry = json.loads(text)
    plan = json.loads(entry["text"])
    steps = plan["backward"]["steps"]
    plan["backward"]["steps"] = [s for s in steps if not s["kind"].startswith("reduce")]
    return json.dumps({**entry, "plan": json.dumps(plan)})


DAMAGE: dict[str, Callable[[str], str]] = {
    "reduces": without_reduces,
    "nested": lambda text: "[" * 10**5,
    "name": lambda text: text.replace("first", "other"),
    "cut": lambda text: text[: len(text) // 2],
}


def planned_again(ctx: Ctx, given: str) -> list[list[str]]:
    """The warnings of this rank in a second launch, for each damage; rank 1's file is damaged."""
    folder = Path(given) / f"rank{ctx.rank}"
    before = os.environ["GRAPHSHARD_CACHE_DIR"]
    os.environ["GRAPHSHARD_CACHE_DIR"] = str(folder)
    names, options = ("first", "second"), {"compute": "aten", "fallback": "error"}
    options["schedule"] = "fsdp2"  # searched once
    try:
        oracle = trained(ctx, names, lambda: None)
        trained(ctx, names, lambda: None, **options)
        (file,) = folder.glob("*.plan.json")
        whole, found = file.read_text(), []
        for damage in DAMAGE.values():
            torch._dynamo.reset()
            if ctx.rank == 1:
                assert damage(whole) != whole
                file.write_text(damage(whole))
            dist.barrier()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                again = trained(ctx, names, lambda: None, **options)
            assert all(map(torch.equal, oracle[0] + oracle[1], again[0] + again[1]))
            assert file.read_text() == whole, "replaced"
            found.append([str(w.message) for w in said if w.category is GraphshardWarning])
        return found
    finally:
        os.environ["GRAPHSHARD_CACHE_DIR"] = before


def test_a_damaged_cache_entry_is_planned_again(pool: Pool, tmp_path: Path) -> None:
    good, bad = pool.run(2, planned_again, str(tmp_path))
    assert good == [[]] * len(DAMAGE)
    assert [[text.split(":")[0] for text in said] for said in bad] == [["GS706"]] * len(DAMAGE)
