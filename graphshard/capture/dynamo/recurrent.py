"""What calls of `nn.RNN`, `nn.GRU` and `nn.LSTM` are traced as in graphs of this backend.

Dynamo breaks a graph at these modules; while it traces for this backend it does not
(`graphshard.capture.dynamo.entry`), and takes what is here in place of their forward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.capture.dynamo.hooks import compiling_for_graphshard
from graphshard.runtime.recurrent import RECURRENT, RECURRENT_BACKWARD


class _Recurrent(torch.autograd.Function):
    """The op, with its derivative. The first two tensors are the input: with two directions it has
    two gradients, since each direction of torch's kernels reads it on its own."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: tuple[Any, ...],
        num_states: int,
        trained: list[bool],
        records: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.settings, ctx.num_states, ctx.trained = settings, num_states, trained
        first, states, weights = _split(tensors[1:], num_states)
        made: tuple[Tensor, ...] = RECURRENT(first, states, weights, *settings, trained, records)
        ctx.save_for_backward(made[3], *tensors[1:])
        ctx.mark_non_differentiable(made[3])
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        nothing: tuple[None, ...] = (None,) * len(ctx.needs_input_grad)
        given, trained = grads[: 1 + ctx.num_states], ctx.trained
        if all(grad is None for grad in given):
            return nothing
        random_state, *tensors = ctx.saved_tensors
        found = iter(
            RECURRENT_BACKWARD(
                given, random_state, *_split(tensors, ctx.num_states), *ctx.settings, trained
            )
        )
        second = [trained[0] and ctx.settings[-1]]  # bidirectional
        each = [next(found) if own else None for own in [trained[0], *second, *trained[1:]]]
        for place in _unreached(given, *_split(tensors, ctx.num_states), *ctx.settings):
            each[place] = None
        return (*nothing[:4], *each)


def _unreached(
    grads: Sequence[Tensor | None],
    first: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    mode: str,
    has_biases: bool,
    num_layers: int,
    *_: Any,
) -> list[int]:
    """The places of weights, counted from the end, that eager mode gives no gradient, not even
    zeros: the projections of an LSTM's last layer, where neither its results nor a next step in
    time read them. cuDNN gives all weights theirs."""
    cells = states[0].shape[0]
    each = len(weights) // cells
    projects = each == (5 if has_biases else 3)
    is_read = first.device.type != "cpu" or len(first) > 1 or any(g is not None for g in grads[:2])
    return [] if is_read or not projects else [-1 - n * each for n in range(cells // num_layers)]


def _split(
    tensors: Sequence[Tensor], num_states: int
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:
    return tensors[0], tensors[1 : 1 + num_states], tensors[1 + num_states :]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def recurrent(
    settings: tuple[Any, ...], first: Tensor, states: list[Tensor], weights: list[Tensor]
) -> tuple[Tensor, ...]:
    """Output and last states of the module. first: [length, rows, width]. settings: the op's."""
    tensors = (first, *states, *weights)
    trained = [tensor.requires_grad for tensor in tensors]
    records = torch.is_grad_enabled()
    made = _Recurrent.apply(settings, len(states), trained, records, first, *tensors)  # type: ignore[no-untyped-call]
    return made[: 1 + len(states)]  # type: ignore[no-any-return]


def _forward(self: Any, input: Tensor, hx: Any = None) -> Any:
    """The module's forward; its weights are read by name, where `enter_group` puts them."""
    is_batched = input.dim() == 3
    first = input if is_batched else input.unsqueeze(0 if self.batch_first else 1)
    states = _states(self, first, hx, is_batched)
    weights = [getattr(self, name) for name in self._flat_weights_names]
    drops = self.training and self.num_layers > 1
    settings = (
        self.mode,
        self.bias,
        self.num_layers,
        self.dropout if drops else 0.0,
        self.training,
        self.bidirectional,
    )
    first = first.transpose(0, 1) if self.batch_first else first
    output, *last = recurrent(settings, first, states, weights)
    output = output.transpose(0, 1) if self.batch_first else output
    if not is_batched:
        output = output.squeeze(0 if self.batch_first else 1)
        last = [state.squeeze(1) for state in last]
    return output, tuple(last) if self.mode == "LSTM" else last[0]


def _sizes(self: Any, first: Tensor) -> list[tuple[int, ...]]:
    """Of the states: hidden, then cell."""
    count = self.num_layers * (2 if self.bidirectional else 1)
    rows = first.size(0) if self.batch_first else first.size(1)
    hidden = (count, rows, self.proj_size or self.hidden_size)
    return [hidden, (count, rows, self.hidden_size)] if self.mode == "LSTM" else [hidden]


def _states(self: Any, first: Tensor, hx: Any, is_batched: bool) -> list[Tensor]:
    if hx is None:
        sizes = _sizes(self, first)
        return [torch.zeros(size, dtype=first.dtype, device=first.device) for size in sizes]
    given = list(hx) if self.mode == "LSTM" else [hx]
    return given if is_batched else [state.unsqueeze(1) for state in given]


def _fits(self: Any, input: Any, hx: Any) -> bool:
    """False for what the module refuses, which then says so itself, and for what the op lacks:
    packed sequences, autocast, and cuDNN's dropout, which has random states of its own."""
    if not isinstance(input, Tensor) or input.dim() not in (2, 3):
        return False
    if torch.is_autocast_enabled(input.device.type):
        return False
    if self.training and self.dropout and self.num_layers > 1 and input.device.type != "cpu":
        return False
    weight = getattr(self, self._flat_weights_names[0])
    if input.size(-1) != self.input_size or input.dtype != weight.dtype:
        return False
    if hx is None:
        return True
    is_batched = input.dim() == 3
    first = input if is_batched else input.unsqueeze(0 if self.batch_first else 1)
    given = list(hx) if self.mode == "LSTM" else [hx]
    sizes = _sizes(self, first)
    if len(given) != len(sizes) or any(state.dim() != input.dim() for state in given):
        return False
    states = _states(self, first, hx, is_batched)
    return all(tuple(s.shape) == size for s, size in zip(states, sizes, strict=True))


def _copied(original: Any) -> Any:
    """The same function, which no substitute has taken the place of."""
    return FunctionType(original.__code__, original.__globals__, argdefs=original.__defaults__)


_disabled = functools.partial(
    torch._dynamo.disable, recursive=True, reason="graphshard leaves it as it is"
)
# Globals of this module: Dynamo guards what a function reads by the way to it, and knows the way
# to torch's function only.
_PLAIN_LSTM = _copied(nn.LSTM.forward)
_PLAIN_GRU = _copied(nn.GRU.forward)
_PLAIN_RNN = _copied(nn.RNN.forward)
_EAGER_LSTM, _EAGER_GRU, _EAGER_RNN = map(_disabled, (_PLAIN_LSTM, _PLAIN_GRU, _PLAIN_RNN))


def _lstm(self: Any, input: Any, hx: Any = None) -> Any:
    if not compiling_for_graphshard():
        return _PLAIN_LSTM(self, input, hx)
    return _forward(self, input, hx) if _fits(self, input, hx) else _EAGER_LSTM(self, input, hx)


def _gru(self: Any, input: Any, hx: Any = None) -> Any:
    if not compiling_for_graphshard():
        return _PLAIN_GRU(self, input, hx)
    return _forward(self, input, hx) if _fits(self, input, hx) else _EAGER_GRU(self, input, hx)


def _rnn(self: Any, input: Any, hx: Any = None) -> Any:
    if not compiling_for_graphshard():
        return _PLAIN_RNN(self, input, hx)
    return _forward(self, input, hx) if _fits(self, input, hx) else _EAGER_RNN(self, input, hx)


def substitute_recurrent() -> None:
    """Register the substitutes, once per process; other backends trace what torch has."""
    for kind, substitute in ((nn.LSTM, _lstm), (nn.GRU, _gru), (nn.RNN, _rnn)):
        kind.forward._torchdynamo_inline = substitute  # type: ignore[union-attr]
