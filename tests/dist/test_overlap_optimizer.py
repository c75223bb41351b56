"""`options={"overlap_optimizer": True}`: what a forward begins with is gathered when the optimizer
has changed it, once, and the training stays equal to eager FSDP2's to the last bit.

Cases keep what they compile: with the same options the next one runs it with a model of its own.
"""

from typing import Any

import pytest
import torch
from models import of_depth
from parity import assert_equal, sgd, train, twin
from pool import Ctx, Pool
from torch import nn

from graphshard.capture.root_state import handle_of
from graphshard.runtime.live import LiveGroup

pytestmark = pytest.mark.dist
CASE = of_depth("llama", 2)
OPTIONS = {"compute": "aten", "fallback": "error", "overlap_optimizer": True}


def lives_of(model: nn.Module) -> list[LiveGroup]:
    handle = handle_of(model)
    assert handle is not None
    return handle.root_state.groups


def gathers(model: nn.Module) -> int:
    return sum(live.counters.all_gathers for live in lives_of(model))


def under_way(model: nn.Module) -> int:
    """Collectives that were issued ahead and not used yet."""
    ahead = [live.prefetched for live in lives_of(model) if live.prefetched is not None]
    return len({id(carrier) for gather in ahead for _, carrier in gather._under_way})


def sent_ahead(model: nn.Module) -> list[str]:
    """Groups of which a gather is under way while nothing runs."""
    return [live.fqn for live in lives_of(model) if live.prefetched is not None]


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    model.compile(backend="graphshard", options={**OPTIONS, **options})
    return model


def whole_run(ctx: Ctx, options: dict[str, Any]) -> list[int]:
    """How many more gathers the model has issued after steps, and after steps of two micro-steps;
    one is under way then."""
    oracle, model = twin(CASE, ctx)
    _, without = twin(CASE, ctx)
    compiled(model, **options)
    compiled(without, **options, overlap_optimizer=False)
    found = []
    for micro_steps in (1, 2):
        how = {"optimizer": sgd, "micro_steps": micro_steps, "first_step": 3 * (micro_steps - 1)}
        expected = train(oracle, CASE, ctx, 3, **how)
        assert_equal(expected, train(model, CASE, ctx, 3, **how))
        assert sent_ahead(model), "after the last optimizer step the next opening is under way"
        train(without, CASE, ctx, 3, **how)
        assert not sent_ahead(without)
        found.append(gathers(model) - gathers(without) - under_way(model))
    return found


@pytest.mark.parametrize("options", [{"schedule": "fsdp2"}, {}, {"reshard": "auto"}], ids=str)
def test_trains_equally_and_gathers_no_more(pool: Pool, options: dict[str, Any]) -> None:
    assert pool.run(2, whole_run, options, keeps_compiled=True) == [[0, 0]] * 2


def in_backward(ctx: Ctx, overlaps: bool) -> tuple[list[Any], list[int], int]:
    """One optimizer per parameter, stepped by the hook that FSDP2's users know."""
    _, model = twin(CASE, ctx)
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)

        def hook(p: nn.Parameter, optimizer: Any = optimizer) -> None:
            optimizer.step()
            p.grad = None

        param.register_post_accumulate_grad_hook(hook)
    compiled(model, overlap_optimizer=overlaps, schedule="fsdp2")
    ahead, losses = [], []
    for step in range(3):
        loss = CASE.loss(model, CASE.batch(step, ctx.rank, ctx.device))
        loss.backward()
        losses.append(loss.detach().clone())
        ahead.append(len(sent_ahead(model)))
    return losses, ahead, gathers(model)


def both_in_backward(ctx: Ctx) -> None:
    plain, none_ahead, count = in_backward(ctx, overlaps=False)
    losses, ahead, count_ahead = in_backward(ctx, overlaps=True)
    assert all(map(torch.equal, plain, losses))
    assert none_ahead == [0, 0, 0]
    assert all(ahead)
    assert count_ahead == count + 1, "the opening of the step that does not come"


def test_optimizer_in_backward(pool: Pool) -> None:
    pool.run(2, both_in_backward, keeps_compiled=True)


def changed_afterwards(ctx: Ctx) -> None:
    """Whatever the program does between two steps, the next forward sees it."""
    oracle, model = twin(CASE, ctx)
    compiled(model)
    seen: list[list[torch.Tensor]] = []
    for net in (oracle, model):
        optimizer = sgd(net.parameters())
        other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        losses: list[torch.Tensor] = []
        for step in range(4):
            loss = CASE.loss(net, CASE.batch(step, ctx.rank, ctx.device))
            loss.backward()
            other.step()
            if net is model:
                assert not sent_ahead(net), "its optimizer has not stepped yet"
            optimizer.step()
            if step == 1:
                with torch.no_grad():
                    for param in net.parameters():
                        param.mul_(0.5)
            if step == 2:
                with torch.no_grad():
                    losses.append(CASE.loss(net, CASE.batch(9, ctx.rank, ctx.device)))
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        seen.append(losses)
    assert all(map(torch.equal, *seen))


def test_a_change_after_the_step_is_seen(pool: Pool) -> None:
    pool.run(2, changed_afterwards, keeps_compiled=True)


def test_it_is_a_switch() -> None:
    from graphshard import OptionsError
    from graphshard.options import parse_options

    assert not parse_options({}).overlap_optimizer
    with pytest.raises(OptionsError, match="overlap_optimizer='yes'; give True or False"):
        parse_options({"overlap_optimizer": "yes"})
