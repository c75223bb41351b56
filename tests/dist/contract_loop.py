"""Training loops whose steps a row of the contract writes itself.

In: a body, `body(loop, step)`, that runs one step and calls `loop.finish`. Out: a `train` for
`Row`. What the body notes is compared bit by bit, as losses, gradients and parameters are.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from models import Batch, Case
from parity import Trace, assert_same_plans, local, reseed
from pool import Ctx
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.capture.root_state import root_states_under

Parameters = Any
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@dataclass
class Loop:
    """One training run. `optim` may be replaced when parameters are."""

    model: nn.Module
    case: Case
    ctx: Ctx
    run: Callable[[Batch], Tensor]
    make_optim: Callable[[Parameters], torch.optim.Optimizer]
    optim: torch.optim.Optimizer = field(init=False)
    trace: Trace = field(default_factory=Trace)

    def __post_init__(self) -> None:
        self.renew_optim()

    def renew_optim(self) -> None:
        self.optim = self.make_optim(self.model.parameters())

    def batch(self, step: int) -> Batch:
        return self.case.batch(step, self.ctx.rank, self.ctx.device)

    def loss(self, step: int) -> Tensor:
        """One forward; steps of 100 and more are batches that no training step uses."""
        reseed(self.ctx, step)
        return self.run(self.batch(step))

    def note(self, name: str, value: Tensor | None) -> None:
        value = value.full_tensor() if isinstance(value, DTensor) else value
        self.trace.buffers[f"step {len(self.trace.losses)} {name}"] = local(value)

    def finish(self, loss: Tensor) -> None:
        """Note loss and gradients, and let the optimizer step."""
        self.trace.losses.append(loss.detach().clone())
        self.trace.grads.append({n: local(p.grad) for n, p in self.model.named_parameters()})
        self.optim.step()
        self.optim.zero_grad()

    def advance(self, step: int) -> None:
        """The usual step."""
        loss = self.loss(step)
        loss.backward()
        self.finish(loss)


Body = Callable[[Loop, int], None]


def train_by(body: Body, make_optim: Callable[[Parameters], Any] = sgd) -> Callable[..., Trace]:
    def train(
        model: nn.Module,
        case: Case,
        ctx: Ctx,
        steps: int,
        run: Any = None,
        first_step: int = 0,
        micro_steps: int = 1,
    ) -> Trace:
        assert micro_steps == 1
        loop = Loop(model, case, ctx, run, make_optim)
        for step in range(first_step, first_step + steps):
            body(loop, step)
        assert_same_plans(model, ctx)
        loop.trace.params.update((n, local(p)) for n, p in model.named_parameters())
        return loop.trace

    return train


def is_compiled(model: nn.Module) -> bool:
    """Its next call runs compiled (`model.compile`)."""
    return model._compiled_call_impl is not None


def assert_nothing_gathered(model: nn.Module) -> None:
    """Every parameter is a sharded DTensor, and graphshard holds none of them whole."""
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor), f"{name} is a {type(param).__name__}"
    for record in root_states_under(model):
        for live in record.groups:
            assert live.fsdp.is_sharded, live.fqn
            assert live.kept is None, live.fqn
            assert live.prefetched is None, live.fqn
