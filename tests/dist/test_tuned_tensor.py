"""The code that `graphshard tune` writes for tensor parallel, on real ranks.

Four ranks, two groups of two. Eager FSDP2 with the same code is the oracle, bit by bit; the
collectives that it issues for the model are those that were captured and priced without any ranks.
"""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from models import Case
from offline_models import tokens
from parity import adamw, assert_equal, train
from pool import Ctx, Pool, capped
from tensor_models import BY_SEQUENCE, DIM, IN_WORDS, planned
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from graphshard.compiler.partition import cut_in_two
from graphshard.cost.comm import Collective, CollectiveKind
from graphshard.graph.collectives import FUNCTIONAL
from graphshard.offline.api import machine_of
from graphshard.offline.capture import capture
from graphshard.offline.target import Sizes, made_of
from graphshard.offline.world import Made, faked, pretended
from graphshard.pricing.flops import graph_work
from graphshard.schedule.setting import (
    Checkpointing,
    Grouping,
    MeshShape,
    Resharding,
    Setting,
)
from graphshard.tune.code import code_of
from graphshard.tune.pricing import Pricer
from graphshard.tune.subject import Machines, Subject

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(capped(4) < 4, reason="needs 4 ranks"),
]

RANKS, TENSOR, BATCH, SEQ, VOCABULARY = 4, 2, 2, 32, 512
SIZES: Sizes = (("batch", BATCH), ("seq", SEQ))
PLANS: dict[str, Any] = {"words": IN_WORDS, "sequence": BY_SEQUENCE}
DEPTHS = {"words": 3, "sequence": 2}  # three blocks alike are traced once for all


def net(plan: str) -> nn.Module:
    return planned(PLANS[plan], DEPTHS[plan])


def subject_of(plan: str) -> Subject:
    def build(sizes: Sizes) -> Made:
        return made_of("net", (net(plan), (tokens(**dict(sizes)),)))

    subject = Subject("net", build, Machines(machine_of("cpu"), RANKS, False), (RANKS,), (SIZES,))
    subject.prepare()
    assert subject.degrees(RANKS) == (1, TENSOR)
    return subject


def setting(reshard: Resharding) -> Setting:
    return Setting(
        RANKS, MeshShape(1, RANKS // TENSOR, TENSOR), Grouping.BLOCKS, reshard,
        Checkpointing.AUTO, SIZES, budget_bytes=2**33,
    )  # fmt: skip


def ahead(subject: Subject) -> Counter[Collective]:
    """The model's own collectives in the step that was captured without ranks."""
    shape = MeshShape(1, RANKS // TENSOR, TENSOR)
    with pretended(RANKS):
        joint = capture(faked(partial(subject.sharded, SIZES, shape)), "net").joint_graph
    placed = cut_in_two(joint, recompute=False, fused=False).parts.placed
    assert placed.forward is not None
    assert placed.backward is not None
    works = [w for gm in (placed.forward, placed.backward) for w in graph_work(gm.graph)]
    return Counter(work.collective for work in works if work.collective is not None)


class Seen(TorchDispatchMode):
    """Functional collectives that are really issued. Ranks of other groups than the first are
    counted as if they were of that one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Collective] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = {
            FUNCTIONAL.all_reduce: CollectiveKind.ALL_REDUCE,
            FUNCTIONAL.all_gather_into_tensor: CollectiveKind.ALL_GATHER,
            FUNCTIONAL.reduce_scatter_tensor: CollectiveKind.REDUCE_SCATTER,
        }.get(func.overloadpacket)
        if kind is not None:
            whole = args[0] if kind is CollectiveKind.REDUCE_SCATTER else result
            count = _resolve_process_group(args[-1]).size()
            size_bytes = whole.numel() * whole.itemsize
            self.found[Collective(kind, tuple(range(count)), size_bytes)] += 1
        return result


def batch(step: int, rank: int, device: torch.device) -> tuple[Tensor, ...]:
    """A group of tensor parallel has one."""
    g = torch.Generator().manual_seed(100 * step + rank // TENSOR)
    return (torch.randint(VOCABULARY, (BATCH, SEQ), generator=g).to(device),)


def trained(ctx: Ctx, plan: str, code: str) -> tuple[Counter[Collective], list[int], list[int]]:
    """What eager issues in a step; the numbers of shards of weights that were trained alike."""
    names: dict[str, Any] = {}
    exec(compile(code, "tuned", "exec"), names)

    def shard(model: nn.Module, mesh: Any) -> nn.Module:
        return names["shard"](model, ctx.device.type)

    case = Case("net", partial(net, plan), shard, batch, lambda model, own: model(*own))
    torch.manual_seed(0)
    first = case.build()
    models = []
    for _ in range(2):
        model = case.build().to(ctx.device)
        model.load_state_dict(first.state_dict())
        models.append(shard(model, None))
    oracle, model = models
    options = {**names["OPTIONS"], "fallback": "error"}
    model.compile(backend="graphshard", fullgraph=True, options=options)
    expected = train(oracle, case, ctx, 3, optimizer=adamw)
    assert_equal(expected, train(model, case, ctx, 3, optimizer=adamw))
    with Seen() as seen:
        case.loss(oracle, case.batch(3, ctx.rank, ctx.device)).backward()
    weights = dict(oracle.named_parameters())
    whole, local = weights["blocks.0.up.weight"].shape, weights["blocks.0.up.weight"].to_local()
    return seen.found, list(whole), list(local.shape)


@pytest.mark.parametrize("plan", PLANS)
def test_the_code_trains_as_eager_does_and_issues_what_was_priced(pool: Pool, plan: str) -> None:
    subject = subject_of(plan)
    captured = ahead(subject)
    pricer = Pricer(subject)
    for reshard in (Resharding.OPEN, Resharding.NEVER):
        wanted = setting(reshard)
        assert pricer.price(wanted).plan is not None
        code = code_of(subject, subject.bare(), wanted)
        for seen, whole, local in pool.run(RANKS, trained, plan, code):
            assert local == [whole[0] // RANKS, whole[1]]
            assert seen & captured == captured
            assert_gradients(seen - captured, plan)


def assert_gradients(more: Counter[Collective], plan: str) -> None:
    """Vectors of DIM whose gradients are partial, where each rank has a part of the sequence: FSDP2
    adds the shards up over the other ranks, which no graph has."""
    if plan == "words":
        assert not more
    for one in more:
        size_bytes = DIM * 4 // (RANKS // TENSOR)
        assert (one.kind, one.size_bytes) == (CollectiveKind.ALL_REDUCE, size_bytes)
