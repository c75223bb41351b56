"""FSDP2's features, one row each: eager FSDP2 and graphshard, bitwise equal after several steps.

The rows stand in `contract_rows.py`. Their results are the table `docs/fsdp2-contract.md`, which
the last test compares with what this run saw; `make contract` writes it.
"""

import dataclasses
import inspect
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp
from contract_loop import assert_nothing_gathered
from contract_models import GATED, plain
from contract_rows import ROWS, Row
from contract_setups import compile_whole
from parity import assert_equal, count_collectives
from patching import in_place
from pool import Ctx, Pool, capped, device_type
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import graphshard
from bench.figures import compare
from graphshard.capture import dynamo
from graphshard.capture.root_state import handle_of, root_states_under
from graphshard.fsdp2.versions import TORCH

pytestmark = pytest.mark.dist

TABLE = Path(__file__).parents[2] / "docs" / "fsdp2-contract.md"
TABLE_TORCH = (2, 13)


@torch._dynamo.config.patch(recompile_limit=len(ROWS), accumulated_recompile_limit=8 * len(ROWS))
def row_case(ctx: Ctx, name: str) -> dict[str, Any]:
    """Rows whose groups are entered alike share a graph, as they do in a user's process: what
    differs between them is the runtime's, or a guard has to tell them apart."""
    row = next(r for r in ROWS if r.name == name)
    case = row.case

    def make(shard: Any = row.shard) -> nn.Module:
        torch.manual_seed(0)
        return shard(case.build().to(ctx.device), ctx)

    def run(model: nn.Module, first: int, steps: int) -> Any:
        step = iter(range(first * row.micro_steps, 1000))

        def loss(batch: Any) -> Tensor:
            row.before_step(model, next(step))
            return case.loss(wrapped[model], batch)

        return row.train(
            model, case, ctx, steps, run=loss, first_step=first, micro_steps=row.micro_steps
        )

    oracle, model = make(row.whole or row.shard), make()
    wrapped = {net: net if row.wrap is None else row.wrap(net) for net in (oracle, model)}
    row.compile(model)
    expected = run(oracle, 0, 4)
    with warnings.catch_warnings(record=True) as said:
        assert_equal(expected, run(model, 0, 4))
    ours = [str(w.message) for w in said if w.category is graphshard.GraphshardWarning]
    assert bool(ours) == bool(row.falls_back), ours
    assert all(row.falls_back in message for message in ours), ours
    counts = []
    frames = dynamo.frames_seen()
    for net in (oracle, model):
        with count_collectives() as counted:
            run(net, 4, 2)
        counts.append((counted.all_gather, counted.reduce_scatter, counted.all_reduce))
        if row.check is not None:
            row.check(net, net is model)
    with in_place(model):
        assert_equal(run(oracle, 6, 2), run(model, 6, 2))
    assert dynamo.frames_seen() == frames, "something was compiled a second time"
    report = graphshard.explain(model)
    if row.whole is None:
        assert_same_states(oracle, model)
        assert_eager_goes_on(row, run, oracle, model)
    else:
        assert_nothing_gathered(model)
    return {
        "eager": counts[0] if row.whole is None else counts[1],
        "compiled": counts[1],
        "captured": report.captured,
        "groups": len({id(g) for m in fsdp_modules(model) for g in groups_of(m)}),
        "reasons": dict(report.reasons),
        "bytes": bytes_planned_and_gathered(model, oracle) if row.counts_bytes else (0, 0),
    }


def bytes_planned_and_gathered(model: nn.Module, oracle: nn.Module) -> tuple[int, int]:
    """By the all-gathers of one forward: what plans say, and what FSDP2's own make."""
    plans = [done.plan for record in root_states_under(model) for done in record.plans.values()]
    entries = [entry for plan in plans for entry in plan.collective_signature]
    planned = [e for e in entries if e.direction == "forward" and e.kind == "all_gather"]
    groups = [group for module in fsdp_modules(oracle) for group in groups_of(module)]
    return sum(e.size_bytes for e in planned), sum(map(gathered_bytes, groups))


def gathered_bytes(group: Any) -> int:
    """What one group's all-gather makes, as FSDP2 gathers it."""
    group.unshard(async_op=True)
    size = int(group._all_gather_result.all_gather_output.nbytes)
    group.wait_for_unshard()
    group._to_sharded()
    return size


def assert_eager_goes_on(row: Row, run: Any, oracle: nn.Module, model: nn.Module) -> None:
    for net in model.modules():
        net._compiled_call_impl = None
    for net in (oracle, model):
        row.before_step(net, 1)
    assert_equal(run(oracle, 9, 1), run(model, 9, 1))


def assert_same_states(oracle: nn.Module, model: nn.Module) -> None:
    """Each group is where FSDP2 leaves it; what FSDP2 keeps gathered, the runtime keeps."""
    for ours, theirs in zip(fsdp_modules(model), fsdp_modules(oracle), strict=True):
        name = type(ours).__name__
        for number, (one, other) in enumerate(zip(groups_of(ours), groups_of(theirs), strict=True)):
            assert one._training_state == other._training_state, name
            if one.is_sharded == other.is_sharded:
                continue
            handle = handle_of(ours)
            assert one.is_sharded, name
            assert handle is not None, name
            assert handle.lives[number].kept is not None, name


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def groups_of(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return groups if groups is not None else [g for g in [state._fsdp_param_group] if g]


RESULTS: dict[str, dict[str, Any]] = {}


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.name.replace("`", ""))
def test_row(pool: Pool, row: Row) -> None:
    if row.since > TORCH:
        pytest.skip("not in this torch")
    if row.needs_cuda and device_type() != "cuda":
        pytest.skip("needs CUDA")
    if capped(row.ranks) < row.ranks:
        pytest.skip(f"needs {row.ranks} ranks")
    # A frame that broke is one that Dynamo leaves alone from then on.
    run = partial(pool.run, timeout_s=200, keeps_compiled=not row.falls_back)
    for seen in run(row.ranks, row_case, row.name):
        if row.fewer_gathers:
            assert seen["compiled"] < seen["eager"]
            assert seen["compiled"][1:] == seen["eager"][1:]
        else:
            assert seen["compiled"] == seen["eager"]
        assert seen["captured"] == seen["groups"] - row.outside
        assert seen["bytes"][0] == seen["bytes"][1]
        assert bool(seen["reasons"]) == bool(row.falls_back)
        assert all(row.falls_back in reason for reason in seen["reasons"].values())
    RESULTS[row.name] = seen


# -- the table -----------------------------------------------------------------------------------

HEAD = """\
# FSDP2's features under graphshard

Written by `make contract` from the results of `tests/dist/test_contract.py`, and compared with them
in CI. Each row trains the same model with eager FSDP2 and with graphshard in FSDP2's own order
(`schedule="fsdp2"`, since collectives are counted), on real processes. It asks for losses,
gradients and parameters that are `torch.equal`, for the same state of every group afterwards, and
for an eager step that goes on equally. Collectives are all-gathers, reduce-scatters and all-reduces
of two steps, the same for both unless two triples are given (FSDP2's first).
"""


def table() -> str:
    """Rows that did not run here are as they were written."""
    before = written()
    lines = [HEAD]
    for area in dict.fromkeys(row.area for row in ROWS):
        lines += [f"\n## {area}\n", "| feature | runs | collectives | ranks |", "|---|---|---|---|"]
        lines += [
            _line(row) if row in of_this_torch() else before.get(row.name, _not_run(row))
            for row in ROWS
            if row.area == area
        ]
    return "\n".join(lines) + "\n"


def written() -> dict[str, str]:
    """The table's lines by feature."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    return {line[2:].split(" | ")[0]: line for line in lines}


def of_this_torch() -> list[Row]:
    """The rows whose results stand in the table as this torch has them: those that came later than
    the table's torch are a later one's. What needs CUDA never stands there."""
    return [
        row
        for row in ROWS
        if row.since <= TORCH
        and (row.since <= TABLE_TORCH) == (TORCH == TABLE_TORCH)
        and not row.needs_cuda
    ]


def _not_run(row: Row) -> str:
    needs = "CUDA" if row.needs_cuda else f"torch {_dotted(row.since)}"
    return f"| {row.name} | not run here: needs {needs} | | |"


def _line(row: Row) -> str:
    seen = RESULTS[row.name]
    triples = dict.fromkeys(", ".join(map(str, seen[who])) for who in ("eager", "compiled"))
    counts = "; ".join(triples)
    runs = "in the graph" if row.since <= TABLE_TORCH else f"in the graph (torch {_dotted(TORCH)})"
    if row.counts_bytes:
        runs = f"{runs}, {seen['bytes'][0]:,} bytes in the all-gathers of a forward"
    if row.whole is not None:
        runs = f"{runs}, equal to {row.compared_with}; eager FSDP2 is wrong here"
    if row.outside:
        inside, groups = seen["captured"], seen["groups"]
        why = f"because {row.falls_back}" if row.falls_back else "as they were left uncompiled"
        eager = f"through eager FSDP2, {why}"
        runs = f"{runs}: {inside} of {groups} groups; the others {eager}" if inside else eager
    return f"| {row.name} | {runs} | {counts} | {row.ranks} |"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def test_the_table_is_that_of_this_run() -> None:
    wanted = [row.name for row in of_this_torch()]
    if not wanted or not RESULTS.keys() >= set(wanted):
        pytest.skip(f"the table is made with torch {_dotted(TABLE_TORCH)} or newer, and all rows")
    compare(TABLE, table())


def public_names() -> Iterator[str]:
    """What FSDP2 offers in this torch."""
    yield from (f"FSDPModule.{n}" for n in dir(FSDPModule) if not n.startswith("_"))
    yield from (f"fully_shard.{p}" for p in _parameters(fsdp.fully_shard))
    for policy in (fsdp.MixedPrecisionPolicy, fsdp.CPUOffloadPolicy):
        yield from (f"{policy.__name__}.{f.name}" for f in dataclasses.fields(policy))
    if hasattr(fsdp, "DataParallelMeshDims"):
        dims = dataclasses.fields(fsdp.DataParallelMeshDims)
        yield from (f"DataParallelMeshDims.{f.name}" for f in dims)


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_every_public_name_has_a_row() -> None:
    covered = {name for row in ROWS for name in row.covers}
    assert sorted(set(public_names()) - covered) == []


# -- what a table cannot say ---------------------------------------------------------------------


def gather_order(ctx: Ctx, lists: dict[int, list[int]]) -> list[str]:
    """FQNs in the order in which forward issues all-gathers and first waits for them."""
    from graphshard.runtime import gather

    torch.manual_seed(0)
    model = plain(GATED.build().to(ctx.device), ctx)
    for index, targets in lists.items():
        blocks = [model.blocks[t] for t in targets]
        model.blocks[index].set_modules_to_forward_prefetch(blocks)
    compile_whole(model)
    seen: list[str] = []
    sent, wait = gather.Gather.sent, gather.Gather.wait

    def logged_sent(self: Any, *load: Any) -> None:
        seen.append(f"+{self._live.fqn}")
        sent(self, *load)

    def logged_wait(self: Any, indices: Any) -> Any:
        seen.append(f"={self._live.fqn}")
        return wait(self, indices)

    gather.Gather.sent, gather.Gather.wait = logged_sent, logged_wait
    try:
        GATED.loss(model, GATED.batch(0, ctx.rank, ctx.device))
    finally:
        gather.Gather.sent, gather.Gather.wait = sent, wait
    return [entry.replace("blocks.", "").replace("(root)", "r") for entry in seen]


def test_gathers_are_issued_as_the_prefetch_lists_say(pool: Pool) -> None:
    default = ["+r", "=r", "+0", "=0", "+1", "=1", "+2", "=2", "+3", "=3"]
    two_ahead = ["+r", "=r", "+0", "=0", "+1", "+2", "=1", "=2", "+3", "=3"]
    for order in pool.run(2, gather_order, {}):
        assert order == default
    for order in pool.run(2, gather_order, {0: [1, 2]}):
        assert order == two_ahead
    for order in pool.run(2, gather_order, {0: [3]}):
        assert order == ["+r", "=r", "+0", "=0", "+3", "+1", "=1", "+2", "=2", "=3"]


def packed_gradients(ctx: Ctx, cap: int) -> int:
    """The most reduce-scatter inputs that one backward holds at once."""
    from graphshard.runtime import run

    torch.manual_seed(0)
    model = plain(GATED.build().to(ctx.device), ctx)
    model.set_reduce_scatter_max_input_buffers(cap)
    compile_whole(model)
    seen = [0]
    track = run.Run.track

    def counted(self: Any, work: Any) -> None:
        track(self, work)
        held = [w for w in self._in_flight if getattr(w, "holds_input", False)]
        seen.append(len(held))

    run.Run.track = counted
    try:
        GATED.loss(model, GATED.batch(0, ctx.rank, ctx.device)).backward()
    finally:
        run.Run.track = track
    return max(seen)


@pytest.mark.skipif(TORCH < (2, 13), reason="not in this torch")
def test_the_cap_of_reduce_scatter_inputs_is_kept(pool: Pool) -> None:
    assert pool.run(2, packed_gradients, 2) == [2, 2]
    assert pool.run(2, packed_gradients, 3) == [3, 3]
    first, second = pool.run(2, packed_gradients, 1)  # left at FSDP2's default: ours to plan
    assert first == second > 3
