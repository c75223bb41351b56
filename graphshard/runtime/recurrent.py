"""`nn.RNN`, `nn.GRU` and `nn.LSTM` as one op each way, which runs torch's own kernels.

AOTAutograd takes torch's ops apart, step by step in time: graphs that grow with the length, and
sums in another order than those of the kernels (oneDNN, cuDNN). So a graph of this backend has
`recurrent`, which runs what the module runs, and `recurrent_backward`, which runs it once more and
then torch's own backward of it. What is kept from forward to backward are the arguments; and with
dropout the random state, so that the second run drops the same.

Assumed: torch draws dropout from the device's default generator. cuDNN does not, so with dropout
between layers a module on a GPU is not captured (`graphshard.capture.dynamo.recurrent`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, _SetExcludeDispatchKeyGuard
from torch.autograd.graph import Node

_LIBRARY = torch.library.Library("graphshard", "FRAGMENT")
_ARGUMENTS = (
    "Tensor input, Tensor[] states, Tensor[] weights, str mode, bool has_biases, int num_layers, "
    "float dropout_p, bool training, bool bidirectional, bool[] trained"
)
# The results: output, last hidden state, last cell state (empty without one), random state before.
_LIBRARY.define(
    f"recurrent({_ARGUMENTS}, bool records) -> (Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.nondeterministic_seeded,),
)
_LIBRARY.define(
    f"recurrent_backward(Tensor?[] grads, Tensor random_state, {_ARGUMENTS}) -> Tensor[]"
)
_RUN: dict[str, Callable[..., Any]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}
CPU_STATE_BYTES = torch.get_rng_state().numel()


def _recurrent(
    input: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    mode: str,
    has_biases: bool,
    num_layers: int,
    dropout_p: float,
    training: bool,
    bidirectional: bool,
    trained: list[bool],
    records: bool,
) -> tuple[Tensor, ...]:
    """The module on an input [length, rows, width].

    trained: which of (input, *states, *weights) require grad; products are computed otherwise
    where a factor does, backward or not. records: torch records a backward, which kernels may be
    chosen by too.
    """
    settings = (mode, has_biases, num_layers, dropout_p, training, bidirectional)
    before = torch.get_rng_state() if dropout_p else input.new_empty(0, dtype=torch.uint8)
    with torch.set_grad_enabled(records), _as_called_by_a_user():
        first, *others = _leaves((input, *states, *weights), trained)
        output, hidden, *cell = (t.detach() for t in _run(first, others, *settings))
    last = cell[0].contiguous() if cell else input.new_empty(0)
    return output.contiguous(), hidden.contiguous(), last, before


def _recurrent_backward(
    grads: list[Tensor | None],
    random_state: Tensor,
    input: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    mode: str,
    has_biases: bool,
    num_layers: int,
    dropout_p: float,
    training: bool,
    bidirectional: bool,
    trained: list[bool],
) -> list[Tensor]:
    """Gradients of those of (input, *states, *weights) that require grad; with two directions two
    of the input, in the order in which autograd adds them to what else the input is used for."""
    settings = (mode, has_biases, num_layers, dropout_p, training, bidirectional)
    with torch.enable_grad(), _as_called_by_a_user(), _random_state(random_state):
        first, *others = leaves = _leaves((input, *states, *weights), trained)
        used = first.view_as(first)
        made = _run(used, others, *settings)
        pairs = [(o, g) for o, g in zip(made, grads, strict=False) if g is not None]
        outputs, given = zip(*pairs, strict=True)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        splits = bidirectional and first.requires_grad
        shares = _shares(outputs, used.grad_fn) if splits and used.grad_fn is not None else []
        found = torch.autograd.grad(outputs, wanted, given, allow_unused=True)
    each = [
        torch.zeros_like(leaf) if grad is None else grad.contiguous()
        for grad, leaf in zip(found, wanted, strict=True)
    ]
    if not splits:
        return each
    second = sum(shares[1:], start=torch.zeros_like(first))
    return [shares[0].contiguous() if shares else each[0], second.contiguous(), *each[1:]]


def _shares(outputs: Sequence[Tensor], node: Node) -> list[Tensor]:
    """What the nodes that read `node`'s result give back to it in the backward that runs next, in
    the order in which they do."""
    shares: list[Tensor] = []
    ahead = [output.grad_fn for output in outputs]
    seen = set(ahead)
    while ahead:
        reader = ahead.pop()
        below = [] if reader is None else reader.next_functions
        for place, (made, _) in enumerate(below):
            if made is node and reader is not None:
                reader.register_hook(lambda grads, _, place=place: shares.append(grads[place]))
            elif made not in seen:
                seen.add(made)
                ahead.append(made)
    return shares


def _leaves(tensors: Sequence[Tensor], trained: Sequence[bool]) -> list[Tensor]:
    return [t.detach().requires_grad_(own) for t, own in zip(tensors, trained, strict=True)]


def _run(input: Tensor, others: list[Tensor], mode: str, *settings: Any) -> tuple[Tensor, ...]:
    """others: states, then weights."""
    num_states = 2 if mode == "LSTM" else 1
    states, weights = others[:num_states], others[num_states:]
    hx = states if mode == "LSTM" else states[0]
    made: tuple[Tensor, ...] = _RUN[mode](input, hx, weights, *settings, batch_first=False)
    return made


@contextmanager
def _as_called_by_a_user() -> Iterator[None]:
    """Inside, autograd sees what is called. Below a dispatch mode it would not, and kernels would
    be chosen otherwise. Torch itself has one in a graph's first call (`check_custom_op_aliasing`).
    """
    with ExitStack() as entered:
        for key in (DispatchKey.AutogradFunctionality, DispatchKey.ADInplaceOrView):
            entered.enter_context(_SetExcludeDispatchKeyGuard(key, False))
        yield


@contextmanager
def _random_state(state: Tensor) -> Iterator[None]:
    """Inside, random numbers are those that follow `state`; none are drawn where it is empty."""
    if not state.numel():
        yield
        return
    now = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.set_rng_state(now)


def _recurrent_fake(
    input: Tensor, states: list[Tensor], weights: list[Tensor], mode: str, *settings: Any
) -> tuple[Tensor, ...]:
    dropout_p, bidirectional = settings[2], settings[4]
    length, rows, _ = input.shape
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    cell = states[1].new_empty(states[1].shape) if len(states) == 2 else input.new_empty(0)
    before = input.new_empty(0, dtype=torch.uint8)
    if dropout_p:
        before = torch.empty(CPU_STATE_BYTES, dtype=torch.uint8, device="cpu")
    return (
        input.new_empty(length, rows, width),
        states[0].new_empty(states[0].shape),
        cell,
        before,
    )


def _recurrent_backward_fake(
    grads: list[Tensor | None],
    random_state: Tensor,
    input: Tensor,
    states: list[Tensor],
    weights: list[Tensor],
    *settings: Any,
) -> list[Tensor]:
    bidirectional, trained = settings[-2:]
    pairs = zip((input, *states, *weights), trained, strict=True)
    wanted = [tensor for tensor, own in pairs if own]
    if bidirectional and trained[0]:
        wanted.insert(0, input)
    return [tensor.new_empty(tensor.shape) for tensor in wanted]


for _name, _kernel, _fake in (
    ("recurrent", _recurrent, _recurrent_fake),
    ("recurrent_backward", _recurrent_backward, _recurrent_backward_fake),
):
    torch.library.register_fake(f"graphshard::{_name}", _fake, lib=_LIBRARY)
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _kernel, _key)

RECURRENT = torch.ops.graphshard.recurrent.default
RECURRENT_BACKWARD = torch.ops.graphshard.recurrent_backward.default
