"""`nn.RNN`, `nn.GRU` and `nn.LSTM` in the graph: drawn ones against eager FSDP2, bit by bit."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from between_steps import assert_sharded
from drawing import drawing
from hypothesis import example, given
from hypothesis import strategies as st
from pool import Ctx, Pool
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.fsdp2.versions import TORCH

pytestmark = pytest.mark.dist

CASES = int(os.environ.get("GRAPHSHARD_FUZZ_RECURRENT", "10"))
SEED = os.environ.get("GRAPHSHARD_FUZZ_SEED")
OPTIONS = {"compute": "aten", "fallback": "error"}
WIDTH, HIDDEN, ROWS = 6, 5, 3
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


@dataclass(frozen=True)
class RecurrentCase:
    """uses: which results are in the loss. given: the first states are another block's last ones.
    apart: each recurrent module is a group of its own. single: no batch. overridden: a subclass
    calls torch's forward. frozen: weights of the first block. lengths: of each step. turns: which
    parameters are frozen from this step on, or not any more."""

    kind: str = "lstm"
    settings: tuple[tuple[str, Any], ...] = ()
    uses: tuple[str, ...] = ("output",)
    given: bool = False
    apart: bool = False
    single: bool = False
    half: bool = False
    overridden: bool = False
    frozen: bool = False
    checkpointed: bool = False
    evaluates: bool = False
    micro_steps: int = 1
    lengths: tuple[int, ...] = (4, 4)
    turns: tuple[str, ...] = ()


# Each direction gives a gradient of its own to an input that is used elsewhere, too.
BOTH_WAYS = RecurrentCase(
    settings=(("num_layers", 2), ("bidirectional", True), ("batch_first", False)),
    lengths=(4, 7, 4, 9),
)
# After one step in time nothing has read what is projected: its weight has no gradient.
NOT_PROJECTED = RecurrentCase(
    settings=(("num_layers", 2), ("bidirectional", True), ("batch_first", False), ("proj_size", 2)),
    uses=("cell",),
    lengths=(1, 3, 1),
)


@st.composite
def cases(draw: st.DrawFn) -> RecurrentCase:
    kind = draw(st.sampled_from(["lstm", "lstm", "gru", "rnn"]))
    own = {
        "num_layers": draw(st.integers(1, 2)),
        "bias": draw(st.booleans()),
        "bidirectional": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
    }
    if own["num_layers"] > 1:
        own["dropout"] = draw(st.sampled_from([0.0, 0.4]))
    if kind == "lstm":
        own["proj_size"] = draw(st.sampled_from([0, 0, 2]))
    if kind == "rnn":
        own["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
    names = ["output", "hidden", "cell"] if kind == "lstm" else ["output", "hidden"]
    uses = st.lists(st.sampled_from(names), min_size=1, unique=True).map(tuple)
    flags = ["given", "apart", "single", "overridden", "frozen", "checkpointed"]
    # From torch 2.15 on, eager FSDP2 adds what each step in time gives to a bfloat16 weight in the
    # reduction's dtype (a declared difference).
    flags += ["half"] if TORCH < (2, 15) else []
    return RecurrentCase(
        kind,
        tuple(own.items()),
        draw(uses),
        **{flag: draw(st.sampled_from([False, False, True])) for flag in flags},
        evaluates=draw(st.booleans()),
        micro_steps=draw(st.sampled_from([1, 2])),
        lengths=draw(st.sampled_from([(4, 4), (4, 7, 4, 9), (1, 3), (4, 4, 4)])),
        turns=draw(st.sampled_from([0, 0, 1]).flatmap(_turns)),
    )


def _turns(some: int) -> st.SearchStrategy[tuple[str, ...]]:
    names = st.sampled_from(["", "blocks.0.cell", "blocks.1.cell.weight_hh_l0", "blocks.0"])
    return st.lists(names, min_size=2 * some, max_size=4 * some).map(tuple)


def turn(model: nn.Module, prefix: str) -> None:
    """What was frozen is not, and the other way round, of the parameters with this prefix."""
    for name, param in model.named_parameters():
        if prefix and name.startswith(prefix):
            param.requires_grad_(not param.requires_grad)


def overriding(kind: Any) -> Any:
    class Own(kind):  # type: ignore[misc]
        def forward(self, x: Tensor, hx: Any = None) -> Any:
            self.flatten_parameters()
            output, last = super().forward(x / 2, hx)
            return output + 1, last

    return Own


class Block(nn.Module):
    """A recurrent module and a projection of all that it gives."""

    def __init__(self, case: RecurrentCase) -> None:
        super().__init__()
        kind = overriding(KINDS[case.kind]) if case.overridden else KINDS[case.kind]
        settings = dict(case.settings)
        self.case, self.cell = case, kind(WIDTH, HIDDEN, **settings)
        width = (settings.get("proj_size") or HIDDEN) * (2 if settings["bidirectional"] else 1)
        self.back = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        output, last = self.cell(x, state)
        states = dict(
            zip(("hidden", "cell"), last if self.case.kind == "lstm" else [last], strict=False)
        )
        x = x + self.back(output if "output" in self.case.uses else output.detach())
        for name in self.case.uses:
            x = x if name == "output" else x + states[name].mean()
        return x, last if self.case.given else None


class Stack(nn.Module):
    def __init__(self, case: RecurrentCase) -> None:
        super().__init__()
        self.case = case
        self.blocks = nn.ModuleList(Block(case) for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for block in self.blocks:
            if self.case.checkpointed:
                x, state = checkpoint(block, x, state, use_reentrant=False)
            else:
                x, state = block(x, state)
        return self.head(x)


def build(case: RecurrentCase, ctx: Ctx) -> nn.Module:
    torch.manual_seed(0)
    model = Stack(case).to(ctx.device)
    if case.frozen:
        model.blocks[0].cell.requires_grad_(False)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if case.half else MixedPrecisionPolicy()
    cells = [block.cell for block in model.blocks] if case.apart else []
    for module in (*cells, *model.blocks, model):
        fully_shard(module, mesh=ctx.mesh, mp_policy=policy)
    return model


def batch(case: RecurrentCase, length: int, seed: int, device: torch.device) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    size = (ROWS, length) if dict(case.settings)["batch_first"] else (length, ROWS)
    return torch.randn(*((length,) if case.single else size), WIDTH, generator=g).to(device)


@contextmanager
def kernels() -> Iterator[None]:
    """Without AVX-512, oneDNN takes an LSTM in bfloat16 and then has no kernel for it, in eager
    mode, too. torch's own kernels run it there."""
    lacks = not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    torch._C._set_mkldnn_enabled(not lacks)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


@kernels()
def train(model: nn.Module, case: RecurrentCase, ctx: Ctx) -> list[Tensor]:
    seen: list[Tensor] = []
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, length in enumerate(case.lengths):
        turn(model, dict(enumerate(case.turns)).get(step, ""))
        if case.evaluates:
            model.eval()
            with torch.no_grad():
                seen.append(model(batch(case, length, step, ctx.device)))
            model.train()
        for micro in range(case.micro_steps):
            model.set_requires_gradient_sync(micro == case.micro_steps - 1)  # type: ignore[operator]
            seed = 100 * step + 10 * micro + ctx.rank
            torch.manual_seed(seed)  # of dropout
            loss = model(batch(case, length, seed, ctx.device)).float().square().mean()
            loss.backward()
            seen += [loss.detach(), torch.rand(1)]  # as many random numbers were drawn
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        seen += [grad.to_local().clone() for grad in grads]
        optim.step()
        optim.zero_grad()
    return seen


def equals_eager(ctx: Ctx, case: RecurrentCase) -> tuple[bool, bool]:
    oracle, model = build(case, ctx), build(case, ctx)
    model.compile(backend="graphshard", options=OPTIONS)
    wanted, found = train(oracle, case, ctx), train(model, case, ctx)
    same = len(wanted) == len(found) and all(map(torch.equal, wanted, found))
    report = graphshard.explain(model)
    return same, report.captured == report.present


def test_drawn_modules(pool: Pool) -> None:
    @drawing(CASES, SEED)
    @given(cases())
    @example(BOTH_WAYS)
    @example(NOT_PROJECTED)
    def compare(case: RecurrentCase) -> None:
        assert pool.run(2, equals_eager, case) == [(True, True)] * 2

    compare()


class Tagger(nn.Module):
    """A recurrent module in a group of its own, run as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(HIDDEN, 2)
        self.cell = nn.LSTM(WIDTH, HIDDEN, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.how == "packed":
            output = padded(self.cell(pack_padded_sequence(x, LENGTHS))[0])
        elif self.how == "autocast":
            with torch.autocast(x.device.type, torch.bfloat16):
                output = self.cell(x)[0].float()
        else:
            output = self.cell(x)[0]
        return self.head(output)


@torch.compiler.disable  # torch 2.11 cannot trace it
def padded(packed: PackedSequence) -> Tensor:
    return pad_packed_sequence(packed)[0]


LENGTHS = torch.tensor([4, 2, 1])
PLAIN = RecurrentCase(settings=(("batch_first", False),), lengths=(4, 4, 4))


def tagger(how: str, ctx: Ctx) -> nn.Module:
    torch.manual_seed(0)
    model = Tagger(how).to(ctx.device)
    for module in (model.inner, model.cell, model):
        fully_shard(module, mesh=ctx.mesh)
    return model


def left_to_eager(ctx: Ctx, how: str) -> tuple[bool, set[str]]:
    oracle, model = tagger(how, ctx), tagger(how, ctx)
    model.compile(backend="graphshard", options={"compute": "aten"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", graphshard.GraphshardWarning)
        wanted, found = train(oracle, PLAIN, ctx), train(model, PLAIN, ctx)
    return all(map(torch.equal, wanted, found)), set(graphshard.explain(model).reasons)


@pytest.mark.parametrize("how", ["packed", "autocast"])
def test_what_the_op_lacks_runs_through_eager_fsdp2(pool: Pool, how: str) -> None:
    for same, outside in pool.run(2, left_to_eager, how):
        assert same
        assert "cell" in outside


def refused(ctx: Ctx) -> None:
    """The module's own error, as in eager mode."""
    model = tagger("plain", ctx)
    model.compile(backend="graphshard", options={"compute": "aten"})
    with pytest.raises(ValueError, match="LSTM: Expected input to be 2D or 3D, got 4D"):
        model(torch.randn(2, 2, 2, WIDTH, device=ctx.device))
    assert_sharded(model)


@pytest.mark.filterwarnings("ignore::graphshard.GraphshardWarning")
def test_what_the_module_refuses_it_refuses_here(pool: Pool) -> None:
    pool.run(2, refused)


def by_inductor(ctx: Ctx) -> None:
    oracle, model = tagger("plain", ctx), tagger("plain", ctx)
    model.compile(backend="graphshard", options={"fallback": "error"})
    for wanted, found in zip(train(oracle, PLAIN, ctx), train(model, PLAIN, ctx), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert graphshard.explain(model).captured == 3


def test_inductor_calls_the_same_op(pool: Pool) -> None:
    pool.run(2, by_inductor)


@pytest.mark.parametrize("kind", KINDS)
def test_other_backends_still_break_at_recurrent_modules(kind: str) -> None:
    """And with torch's own setting for it they trace what they traced."""
    torch._dynamo.lookup_backend("graphshard")  # installs what graphshard changes
    module, x = KINDS[kind](WIDTH, HIDDEN), torch.randn(4, ROWS, WIDTH)
    seen: list[str] = []

    def backend(gm: torch.fx.GraphModule, inputs: object) -> object:
        seen.extend(str(node.target) for node in gm.graph.nodes)
        return gm

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="RNN, GRU, or LSTM"):
        torch.compile(lambda x: module(x), backend=backend, fullgraph=True)(x)
    with torch._dynamo.config.patch(allow_rnn=True):
        output, _ = torch.compile(lambda x: module(x), backend=backend, fullgraph=True)(x)
    assert torch.equal(output, module(x)[0])
    assert any(kind in target for target in seen)
    assert not any("recurrent" in target for target in seen)
