"""Losses behind checkpointed blocks compute cheap ops again in backward: drawn ones, bit by bit.

What `compiler/cheap_again.py` assumes is drawn to be false: that what a row of pointwise ops begins
with is smaller, is not written to, is no random number, and is nobody's result; that no checkpoint
stands behind it. CI runs 12 cases; `GRAPHSHARD_LOSSES=500 GRAPHSHARD_LOSSES_SEED=1` runs 500
others.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from drawing import drawing
from hypothesis import given
from hypothesis import strategies as st
from parity import difference
from patching import patched
from pool import Ctx, Pool
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from graphshard.compiler import partition
from graphshard.compiler.cheap_again import repeat_cheap
from graphshard.graph.owners import owner
from graphshard.graph.program import copy_of, output_node
from graphshard.pricing.liveness import tensor_bytes

pytestmark = pytest.mark.dist

CASES = int(os.environ.get("GRAPHSHARD_LOSSES", "12"))
SEED = os.environ.get("GRAPHSHARD_LOSSES_SEED")
TOKENS, WIDE, WORDS = 96, 16, 512
IGNORED = 3

Loss = Callable[["Case", Tensor, Tensor], Tensor]


def entropy(case: "Case", logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        logits, targets, ignore_index=IGNORED, label_smoothing=case.smoothing, reduction=case.reduce
    ).mean()


def chunked(case: "Case", logits: Tensor, targets: Tensor) -> Tensor:
    parts = zip(logits.chunk(3), targets.chunk(3), strict=True)
    return sum((entropy(case, *part) for part in parts), logits.new_zeros(())) / 3


def by_hand(case: "Case", logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits - logits.detach().amax(-1, keepdim=True)
    likely = logits - logits.exp().sum(-1, keepdim=True).log()
    return -likely.gather(-1, targets[:, None]).mean() - case.smoothing * likely.mean()


def with_norm(case: "Case", logits: Tensor, targets: Tensor) -> Tensor:
    return entropy(case, logits, targets) + 1e-2 * logits.logsumexp(-1).square().mean()


def twice(case: "Case", logits: Tensor, targets: Tensor) -> Tensor:
    return entropy(case, logits, targets) + entropy(case, logits * 0.5, targets.flip(0))


def distilled(case: "Case", logits: Tensor, targets: Tensor) -> Tensor:
    teacher = logits.detach().roll(1, 0).softmax(-1)
    return F.kl_div(logits.log_softmax(-1), teacher, reduction="batchmean")


def binary(case: "Case", logits: Tensor, targets: Tensor) -> Tensor:
    hot = F.one_hot(targets, WORDS).to(logits.dtype)
    return F.binary_cross_entropy_with_logits(logits, hot)


def squared(case: "Case", logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.tanh().square() * 2 - logits.sigmoid()).square().mean()


LOSSES: dict[str, Loss] = {
    loss.__name__: loss
    for loss in (entropy, chunked, by_hand, with_norm, twice, distilled, binary, squared)
}


def same(logits: Tensor) -> Tensor:
    return logits


def capped(logits: Tensor) -> Tensor:
    return 5 * torch.tanh(logits / 5)


def masked_in_place(logits: Tensor) -> Tensor:
    return logits.clone().masked_fill_(torch.arange(WORDS) > WORDS - 9, -1e4)


def written(logits: Tensor) -> Tensor:
    """What a row begins with is written to after it was read."""
    wide = logits.float()
    return wide * 3 + wide.mul_(0.5)


def dropped(logits: Tensor) -> Tensor:
    return F.dropout(logits.float() * 2, 0.2)


def normed(logits: Tensor) -> Tensor:
    return F.layer_norm(logits.float(), (WORDS,)).sin()


def again_checkpointed(logits: Tensor) -> Tensor:
    return checkpoint(lambda x: torch.sin(x.float()).cos(), logits, use_reentrant=False)


SHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    shape.__name__: shape
    for shape in (same, capped, masked_in_place, written, dropped, normed, again_checkpointed)
}
DTYPES = (torch.bfloat16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Case:
    """A model and its loss.

    cast: the dtype in which the loss reads the logits, or None. shaped: what is done to the logits.
    inside: the loss is in the model's forward. returned: so are the logits, which another loss
    reads. counted: a buffer behind the blocks counts. lengths: of each step's batch.
    """

    loss: str
    shaped: str = "same"
    dtype: torch.dtype = torch.bfloat16
    cast: torch.dtype | None = torch.float32
    smoothing: float = 0.0
    reduce: str = "mean"
    tied: bool = False
    inside: bool = True
    returned: bool = False
    mixed: bool = False
    counted: bool = False
    blocks: int = 1
    lengths: tuple[int, ...] = (TOKENS,)


cases = st.builds(
    Case,
    loss=st.sampled_from(sorted(LOSSES)),
    shaped=st.sampled_from(["same", *sorted(SHAPED)]),
    dtype=st.sampled_from(DTYPES),
    cast=st.sampled_from([torch.float32, torch.float32, None, torch.float64, torch.bfloat16]),
    smoothing=st.sampled_from([0.0, 0.1]),
    reduce=st.sampled_from(["mean", "sum", "none"]),
    tied=st.booleans(),
    inside=st.sampled_from([True, True, False]),
    returned=st.sampled_from([False, False, True]),
    mixed=st.booleans(),
    counted=st.booleans(),
    blocks=st.sampled_from([1, 2]),
    lengths=st.sampled_from([(TOKENS,), (TOKENS, TOKENS), (TOKENS, 48, 72)]),
)


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDE, WIDE, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, use_reentrant=False)

    def compute(self, x: Tensor) -> Tensor:
        return x + F.silu(self.inner(x))


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        dtype = torch.float32 if case.mixed else case.dtype
        self.case = case
        self.embed = nn.Embedding(WORDS, WIDE, dtype=dtype)
        self.blocks = nn.Sequential(*(Block(dtype) for _ in range(case.blocks)))
        self.head = nn.Linear(WIDE, WORDS, bias=False, dtype=dtype)
        self.register_buffer("calls", torch.ones(()))
        if case.tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor, targets: Tensor) -> Any:
        logits = self.head(self.blocks(self.embed(words)))
        if self.case.counted:
            logits = logits + self.calls.to(logits.dtype)
            self.calls.add_(0.5)
        logits = SHAPED[self.case.shaped](logits)
        if not self.case.inside:
            return logits
        loss = loss_of(self.case, logits, targets)
        return (loss, logits) if self.case.returned else loss


def loss_of(case: Case, logits: Tensor, targets: Tensor) -> Tensor:
    return LOSSES[case.loss](case, logits if case.cast is None else logits.to(case.cast), targets)


def build(case: Case, ctx: Ctx) -> nn.Module:
    torch.manual_seed(0)
    model = Model(case).to(ctx.device)
    policy = MixedPrecisionPolicy(param_dtype=case.dtype) if case.mixed else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=ctx.mesh, mp_policy=policy)
    return fully_shard(model, mesh=ctx.mesh, mp_policy=policy)


def step(model: nn.Module, case: Case, number: int) -> list[Tensor | None]:
    torch.manual_seed(number)  # of data, and of dropout
    length = case.lengths[number]
    words, targets = torch.randint(WORDS, (length,)), torch.randint(WORDS, (length,))
    found = model(words, targets)
    if case.inside:
        loss = found[0] + found[1].float().square().mean() if case.returned else found
    else:
        loss = loss_of(case, found, targets)
    loss.backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return [loss.detach(), *(None if g is None else g.to_local() for g in grads)]


@contextmanager
def repeating(saved_bytes: list[tuple[int, int]]) -> Iterator[None]:
    """Cheap ops are computed again as where compute is compiled, and run one by one.

    saved_bytes: of each graph, without that and with it.
    """

    def with_cheap(original: Any) -> Any:
        def split(
            graph: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any
        ) -> Any:
            told = {"num_fwd_outputs": num_fwd_outputs, **kwargs}
            plain = original(copy_of(graph), inputs, **told)
            repeat_cheap(graph.graph, num_fwd_outputs)
            found = original(graph, inputs, **told)
            saved_bytes.append(tuple(saved_by(two[0], num_fwd_outputs) for two in (plain, found)))
            return found

        return split

    with patched(partition, "default_partition", with_cheap):
        yield


def saved_by(forward: fx.GraphModule, num_outputs: int) -> int:
    outputs: Any = output_node(forward.graph).args[0]
    saved = (node for node in outputs[num_outputs:] if isinstance(node, fx.Node))
    return sum(map(tensor_bytes, {owner(node): None for node in saved}))


def compared(ctx: Ctx, case: Case) -> tuple[str | None, list[tuple[int, int]]]:
    """What differs from eager first, and what each graph saves without it and with it, in bytes."""
    saved_bytes: list[tuple[int, int]] = []
    seen = []
    for compiles in (False, True):
        with repeating(saved_bytes):
            model = build(case, ctx)
            if compiles:
                model.compile(backend="graphshard", options={"fallback": "error"})
            seen.append([step(model, case, number) for number in range(len(case.lengths))])
    for number, (theirs, ours) in enumerate(zip(*seen, strict=True)):
        for place, (want, got) in enumerate(zip(theirs, ours, strict=True)):
            if (found := difference(want, got)) is not None:
                return f"step {number}, result {place}: {found}", saved_bytes
    return None, saved_bytes


def test_drawn_losses_equal_eager_and_save_less(pool: Pool) -> None:
    repeats: list[bool] = []

    @drawing(CASES, SEED)
    @given(cases)
    def compare(case: Case) -> None:
        ((why, saved_bytes),) = pool.run(1, compared, case)
        assert why is None, f"{why}\n{case}"
        assert all(less <= plain for plain, less in saved_bytes), (saved_bytes, case)
        repeats.append(any(less < plain for plain, less in saved_bytes))

    compare()
    assert any(repeats)
