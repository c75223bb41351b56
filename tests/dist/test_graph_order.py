"""Graph breaks between the blocks of a model: each graph's first all-gather is issued while the
graph before it still computes."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from contract_models import mesh_of
from drawing import drawing
from hypothesis import given
from hypothesis import strategies as st
from patching import patched
from pool import Ctx, Pool, capped
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import graphshard
from graphshard.capture.root_state import root_states_under
from graphshard.runtime import gather, run
from graphshard.runtime.graph_order import GraphOrder, Turn
from graphshard.runtime.reduce import Reduction

pytestmark = [pytest.mark.dist, pytest.mark.filterwarnings("ignore:graphshard. group")]

COUNT = int(os.environ.get("GRAPHSHARD_ORDERS", "3"))
SEED = os.environ.get("GRAPHSHARD_ORDERS_SEED")


class Interrupted(Exception):
    """By the user's own code, in the middle of a forward."""


def interrupt(gradient: Tensor) -> None:
    raise Interrupted


class Cut(nn.Module):
    """Blocks in the order of `visits`, each `times` times; Dynamo stops after each of them, at
    `between`."""

    def __init__(self, blocks: int = 4, width: int = 8) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(blocks))
        self.blocks = nn.ModuleList(layers)
        self.visits = list(range(blocks))
        self.times = 1
        self.actions: dict[int, str] = {}

    def forward(self, x: Tensor) -> Tensor:
        for place, index in enumerate(self.visits):
            for _ in range(self.times):
                x = x + self.blocks[index](x)
            self.between(place, x)
        return x

    @torch._dynamo.disable
    def between(self, place: int, x: Tensor) -> None:
        action = self.actions.get(place)
        if action == "raise in backward" and x.requires_grad:
            x.register_hook(interrupt)
        following: Any = self.blocks[self.visits[min(place + 1, len(self.visits) - 1)]]
        if action == "raise":
            raise Interrupted
        if action == "write":
            with torch.no_grad():
                for param in following.parameters():
                    param.mul_(0.75)
        if action == "hidden write":
            for param in following.parameters():
                param.to_local().data.mul_(0.5)
            following.reshard()
        if action == "unshard":
            following.unshard()


def cut(ctx: Ctx, *, compiles: bool, nests: bool = False, **kwargs: Any) -> Any:
    """nests: each block has a group of its own in it."""
    torch.manual_seed(0)
    model = Cut()
    for block in model.blocks if nests else ():
        block.append(nn.Linear(8, 8))
    for block in model.to(ctx.device).blocks:
        if nests:
            fully_shard(block[0], mesh=ctx.mesh, **kwargs)
        fully_shard(block, mesh=ctx.mesh, **kwargs)
    fully_shard(model, mesh=ctx.mesh, **kwargs)
    if compiles:
        model.compile(backend="graphshard")
    return model


def order_of(model: nn.Module) -> GraphOrder:
    (root,) = (root for state in root_states_under(model) for root in state.roots)
    assert root.order is not None
    return root.order


# -- what is issued when ---------------------------------------------------------------------------


@contextmanager
def events(into: list[str]) -> Iterator[None]:
    """Groups that are gathered, groups whose gradients are there ("+ ..."), and where runs end."""

    def sending(original: Any) -> Any:
        def send(loads: Any, group: Any) -> Any:
            into.append("+".join(load.live.fqn for load in loads))
            return original(loads, group)

        return send

    def ending(original: Any) -> Any:
        def ended(*args: Any, is_backward: bool) -> None:
            into.append("end")
            original(*args, is_backward=is_backward)

        return ended

    def completing(original: Any) -> Any:
        def assign(self: Reduction, output: Any) -> None:
            original(self, output)
            into.append(f"+ {self.live.fqn}")

        return assign

    with (
        patched(gather, "send", sending),
        patched(run, "ended", ending),
        patched(Reduction, "assign", completing),
    ):
        yield


def order_of_events(ctx: Ctx, forward_only: bool) -> tuple[list[str], int, int]:
    model = cut(ctx, compiles=True)
    seen: list[str] = []
    for step in range(6):
        seen.clear()
        torch.manual_seed(step)
        with events(seen), torch.no_grad() if forward_only else nullcontext():
            loss = model(torch.randn(2, 8)).square().sum()
        if not forward_only:
            with events(seen):
                loss.backward()
    assert " runs of graphs begin with an all-gather" in str(graphshard.explain(model))
    return seen, order_of(model).num_ahead, graphshard.explain(model).ahead


def test_collectives_go_on_while_another_graph_computes(pool: Pool) -> None:
    zero, one, two, three = (f"blocks.{i}" for i in range(4))
    ahead = [zero, one, "end", two, "end", three, "end", "end"]
    # The input has no gradient: backward does not read the first block.
    back = [three, two, "end", one, f"+ {three}", "end", f"+ {two}", "end"]
    back += [f"+ {one}", f"+ {zero}", "end"]
    for seen, num_ahead, expected in pool.run(2, order_of_events, True):
        assert (seen, expected) == (ahead, 3)
        assert num_ahead == 3 * 3  # in the last steps; before, the order was not known
    for seen, num_ahead, expected in pool.run(2, order_of_events, False):
        assert (seen, expected) == (ahead + back, 5)
        assert num_ahead == 3 * 5


# -- whatever happens in between -------------------------------------------------------------------

ACTIONS = ("write", "hidden write", "unshard", "raise")
ENDS = ("backward", "backward", "twice", "input", "evaluate", "accumulate", "fails")


@dataclass(frozen=True)
class Step:
    """visits: blocks in the order of their calls. actions: after which call what happens. end: what
    follows the forward. listed: the second block is to be prefetched by the first. kept: blocks
    stay gathered after forward. eager: a block is called outside of the model first. times: one
    graph calls its block. frozen: blocks of which the first layer has no gradient, 4 of all."""

    visits: tuple[int, ...]
    actions: tuple[tuple[int, str], ...] = ()
    end: str = "backward"
    listed: bool = False
    kept: bool = False
    eager: bool = False
    times: int = 1
    frozen: int | None = None


def once_each(step: Step) -> Step:
    """Twice in each of two graphs is (a + b) + (c + d); eager has ((a + b) + c) + d."""
    visits = step.visits if step.times == 1 else tuple(dict.fromkeys(step.visits))
    return replace(step, visits=visits)


drawn_steps = st.builds(
    Step,
    visits=st.lists(st.integers(0, 3), min_size=2, max_size=4).map(tuple),
    actions=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from(ACTIONS)), max_size=2, unique_by=lambda a: a[0]
    ).map(tuple),
    end=st.sampled_from(ENDS),
    listed=st.sampled_from((False, False, False, True)),
    kept=st.sampled_from((False, False, False, True)),
    eager=st.sampled_from((False, False, False, True)),
    times=st.sampled_from((1, 1, 1, 2, 3)),
    frozen=st.sampled_from((None, None, None, 0, 1, 2, 4)),
).map(once_each)
# What repeats is expected; what comes then is not.
drawn_runs = st.lists(
    st.tuples(drawn_steps, st.sampled_from((4, 3, 1))), min_size=2, max_size=4
).map(lambda pairs: comparable(step for step, times in pairs for _ in range(times)))


def comparable(steps: Iterable[Step]) -> tuple[Step, ...]:
    """What earlier micro-steps left does not outlive a backward that fails; eager takes no such
    step, so none comes between micro-steps."""
    found: list[Step] = []
    for step in steps:
        after = bool(found) and found[-1].end == "accumulate"
        found.append(replace(step, end="backward") if after and step.end == "fails" else step)
    return tuple(found)


def freeze(block: Any, is_frozen: bool) -> None:
    """Of its shard, as a gathered parameter keeps it only until it is resharded."""
    if next(block.parameters()).requires_grad is is_frozen:
        for module in block.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        next(block.parameters()).requires_grad_(not is_frozen)


def take(model: Any, step: Step, x: Tensor) -> list[Tensor | None]:
    """What a user sees of one step: results, gradients."""
    model.visits, model.times = list(step.visits), step.times
    for number, block in enumerate(model.blocks):
        freeze(block, step.frozen in (number, len(model.blocks)))
    # What stays gathered is what autograd saved: eager refuses to have it written to. And what it
    # has gathered ahead because of a list, it does not gather again.
    writes = {"write", "hidden write"} if step.kept or step.listed else set()
    model.actions = {at: what for at, what in step.actions if what not in writes}
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]] if step.listed else [])
    for block in model.blocks:
        block.set_reshard_after_forward(not step.kept)
    model.set_requires_gradient_sync(step.end != "accumulate")
    seen: list[Tensor | None] = []
    if step.eager:
        seen.append(model.blocks[2]._call_impl(x).detach())
        model.blocks[2].reshard()
    try:
        with torch.no_grad() if step.end == "evaluate" else nullcontext():
            loss = model(x).square().mean()
    except Interrupted:
        return seen
    seen.append(loss.detach().clone())
    if step.end == "input":
        seen += torch.autograd.grad(loss, [x])
    elif step.end == "twice":
        loss.backward(retain_graph=True)
        loss.backward()
    elif step.end != "evaluate":
        loss.backward()
    grads = [p.grad for p in model.parameters()]
    return seen + [None if g is None else g.to_local().clone() for g in grads]


def fail(model: Any, step: Step, x: Tensor) -> None:
    """A backward that ends at a block. Eager FSDP2 does not bear that: it takes no such step."""
    failing = replace(step, actions=((0, "raise in backward"),), eager=False, end="backward")
    with contextlib.suppress(Interrupted):
        take(model, failing, x)
    model.zero_grad()


def same_as_eager(ctx: Ctx, steps: tuple[Step, ...], nests: bool = False) -> tuple[int, int]:
    if ctx.world_size == 4:
        ctx = replace(ctx, mesh=mesh_of(ctx, (2, 2), "replicate", "shard"))
    models = [cut(ctx, compiles=compiles, nests=nests) for compiles in (False, True)]
    optims = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    # FSDP2 wants to see the root first.
    for number, step in enumerate((Step((0, 1, 2, 3)), *steps, Step((0, 1)))):
        seen = []
        for model, optim in zip(models, optims, strict=True):
            torch.manual_seed(number)
            x = torch.randn(2, 8, device=ctx.device, requires_grad=True)
            if step.end == "fails":
                if model is models[1]:
                    fail(model, step, x)
                seen.append([])
                continue
            seen.append(take(model, step, x))
            if step.end not in ("accumulate", "input"):
                optim.step()
                optim.zero_grad()
        for ours, theirs in zip(*seen, strict=True):
            assert (ours is None) == (theirs is None), (number, step)
            assert ours is None or theirs is None or torch.equal(ours, theirs), (number, step)
    for block in models[1].blocks:
        (group,) = graphshard.fsdp2.fsdp_groups(block._get_fsdp_state())
        assert group.is_sharded
    order = order_of(models[1])
    assert not order._put_off
    assert not order._all_reduces
    return order.num_ahead, order.num_put_off


USUAL = Step((0, 1, 2))
CASES = {
    "steady": (USUAL,) * 5,
    "written to": (replace(USUAL, actions=((0, "write"),)),) * 5,
    "written to unseen": (*(USUAL,) * 4, *(replace(USUAL, actions=((0, "hidden write"),)),) * 2),
    "unsharded": (*(USUAL,) * 4, replace(USUAL, actions=((1, "unshard"),)), USUAL),
    "unsharded, and gathered ahead": (replace(USUAL, actions=((0, "unshard"),), end="evaluate"),)
    * 5,
    "another comes": (*(USUAL,) * 4, Step((0, 3, 2)), Step((2, 1)), USUAL),
    "none comes": (*(USUAL,) * 4, Step((0,)), USUAL, replace(USUAL, end="input"), USUAL),
    "interrupted": (*(USUAL,) * 4, replace(USUAL, actions=((0, "raise"),)), USUAL),
    "failed": (*(USUAL,) * 4, replace(USUAL, end="fails"), USUAL),
    "the same again": (Step((1, 1, 1)),) * 5,
    "evaluations": (replace(USUAL, end="evaluate"),) * 5 + (USUAL,) * 2,
    "micro-steps": (replace(USUAL, end="accumulate"), USUAL) * 4,
}


@pytest.mark.parametrize("name", CASES)
def test_as_eager(pool: Pool, name: str) -> None:
    for num_ahead, num_put_off in pool.run(2, same_as_eager, CASES[name]):
        # What computes now is not gathered a second time beside itself.
        assert (num_ahead > 0) is (name != "the same again")
        assert (num_put_off > 0) is (name != "unsharded, and gathered ahead")


@pytest.mark.skipif(capped(4) < 4, reason="needs 4 ranks")
@pytest.mark.parametrize("name", ["steady", "none comes", "failed", "micro-steps"])
def test_as_eager_over_replicas(pool: Pool, name: str) -> None:
    """All-reduces go on until backward ends."""
    for _, num_put_off in pool.run(4, same_as_eager, CASES[name]):
        assert num_put_off > 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_drawn(pool: Pool, ranks: int) -> None:
    """`GRAPHSHARD_ORDERS=100 GRAPHSHARD_ORDERS_SEED=1` draws more than CI's 3. Four ranks are two
    replicas."""

    @drawing(COUNT, SEED)
    @given(drawn_runs, st.booleans())
    def draw(steps: tuple[Step, ...], nests: bool) -> None:
        pool.run(capped(ranks), same_as_eager, steps, nests)

    draw()


def two_groups_each(ctx: Ctx, *, compiles: bool) -> Any:
    """Of the reductions of a graph, the next one waits for the last."""
    torch.manual_seed(0)
    model = Cut()
    model.blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4)
    )
    for block in model.to(ctx.device).blocks:
        for layer in block[::2]:
            fully_shard(layer, mesh=ctx.mesh)
    fully_shard(model, mesh=ctx.mesh)
    if compiles:
        model.compile(backend="graphshard")
    return model


def stepped_in_backward(ctx: Ctx, waits: bool) -> int:
    """Hooks take gradients of all replicas as soon as these are there: no graph leaves any.

    waits: for its reductions, as a graph does for those that it waits for in time.
    """
    ctx = replace(ctx, mesh=mesh_of(ctx, (2, 2), "replicate", "shard"))
    models = [two_groups_each(ctx, compiles=compiles) for compiles in (False, True)]
    left: list[int] = []
    for model in models:
        for param in model.parameters():
            optim = torch.optim.SGD([param], lr=1e-2)

            def step(_: Tensor, optim: Any = optim, model: Any = model) -> None:
                optim.step()
                optim.zero_grad()
                if model is models[1]:
                    left.append(sum(map(len, order_of(model)._all_reduces.values())))

            param.register_post_accumulate_grad_hook(step)
    in_time = patched(Turn, "puts_off", lambda _: lambda *args: False)
    with in_time if waits else nullcontext():
        train_both(ctx, models)
    ours, theirs = ([p.to_local() for p in model.parameters()] for model in models)
    assert all(map(torch.equal, ours, theirs))
    assert not any(left)
    return len(left)


def train_both(ctx: Ctx, models: list[Any]) -> None:
    for number in range(6):
        for model in models:
            torch.manual_seed(number)
            model(torch.randn(2, 8, device=ctx.device)).square().mean().backward()


@pytest.mark.skipif(capped(4) < 4, reason="needs 4 ranks")
@pytest.mark.parametrize("waits", [False, True])
def test_what_hooks_read_is_not_left_to_the_end(pool: Pool, waits: bool) -> None:
    for num_hooks in pool.run(4, stepped_in_backward, waits):
        assert num_hooks == 6 * 16
