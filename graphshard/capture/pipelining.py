"""What `torch.distributed.pipelining` takes for a stage, and for half of its backward.

A stage is told from other modules by its class, FSDPModule, on which the schedule then sets what
FSDP2 does after each micro-batch. The wrapper that `torch.compile(stage)` makes is none, and each
micro-batch would reduce and reshard: the module in it is taken for the stage, compiled in place.

Zero-bubble schedules ask for the gradients of a stage's inputs first, and for those of its weights
later. They look for the weights in autograd's graph. The weights of a compiled stage are not there,
and its backward is one graph: all of it runs where the inputs' gradients are asked for, and nothing
is left for later. Without this the gradients of the weights would be lost.

Assumed, for sums to the last bit of eager FSDP2: a schedule runs the second parts of a stage in the
order of its first parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.pipelining import stage

from graphshard import fsdp2
from graphshard.capture import dynamo
from graphshard.runtime.calls import reaches_call


def install() -> None:
    """Once per process."""
    base = stage._PipelineStageBase
    base.__init__ = _in_place(base.__init__)  # type: ignore[method-assign]
    stage.stage_backward_input = _in_one(stage.stage_backward_input)  # type: ignore[attr-defined]


def _in_place(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def take_module(self: Any, submodule: nn.Module, *args: Any, **kwargs: Any) -> None:
        inner = dynamo.inside_of(submodule)
        if isinstance(inner, fsdp2.ShardedModule):
            dynamo.compile_as(inner, submodule)
            submodule = inner
        init(self, submodule, *args, **kwargs)

    return take_module


def _in_one(split: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(split)
    def stage_backward_input(
        stage_outputs_or_loss: Sequence[Any],
        output_grads: Sequence[Any] | None,
        input_values: list[Any],
        weights: Any,
    ) -> Any:
        if not reaches_call(stage_outputs_or_loss):
            return split(stage_outputs_or_loss, output_grads, input_values, weights)
        outputs = tuple(stage_outputs_or_loss)
        grads = (None,) * len(outputs) if output_grads is None else tuple(output_grads)
        return stage.stage_backward(outputs, grads, input_values), []  # type: ignore[attr-defined]

    return stage_backward_input
