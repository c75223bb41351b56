"""FSDP2 takes over where graphshard cannot go: one warning per cause, and a clean state after
any exception."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from graphshard import dynamo, fsdp2
from graphshard.capture.ports import Record, prepare, records_under, unfinished_records
from graphshard.errors import GraphshardError, GraphshardWarning

logger = logging.getLogger(__name__)


def describe(error: BaseException) -> str:
    """One line: code and message of ours, type and message of others."""
    text = str(error) if isinstance(error, GraphshardError) else f"{type(error).__name__}: {error}"
    return text.split("\n", 1)[0]


@functools.cache
def warn_once(message: str) -> None:
    """A GraphshardWarning, once per cause and process."""
    hint = 'options={"fallback": "error"} makes this an error'
    warnings.warn(f"graphshard: {message}; {hint}", GraphshardWarning, stacklevel=2)


def warn_near_recompile_limit() -> None:
    """Say so before Dynamo stops compiling a frame and runs it in eager mode."""
    done, limit = dynamo.compile_variant()
    if done + 1 >= limit:
        warn_once(
            f"this is variant {done + 1} of one frame and Dynamo's limit is {limit}; further "
            "variants will run through eager FSDP2. TORCH_LOGS=recompiles says what changes; "
            "torch._dynamo.config.recompile_limit raises the limit"
        )


def protected(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What users call instead of the function that torch.compile made.

    Validates the model as FSDP2 would before anything is traced, and after an exception puts
    every group that was in the middle of its forward back into the SHARDED state.
    """
    module = dynamo.wrapped_module(compiled)
    ready = False

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal ready
        if not ready:
            _prepare(module)
            ready = True
        try:
            return compiled(*args, **kwargs)
        except BaseException:
            recover(module)
            raise

    return call


def _prepare(module: nn.Module | None) -> None:
    if module is None:
        return
    dynamo.substitute_grouped_hooks(fsdp2.states_under(module))
    if isinstance(module, fsdp2.FSDPModule):
        state = fsdp2.state_of(module)
        fsdp2.lazy_init(state)  # raises what FSDP2 raises
        prepare(state)
        for record in records_under(module):
            for fqn, reason in record.reasons.items():
                warn_once(f"group {fqn} runs through eager FSDP2 because {reason}")


def recover(module: nn.Module | None) -> None:
    """All groups SHARDED, nothing gathered, nothing in flight, after an exception in a forward."""
    known = records_under(module) if module is not None else []
    for record in dict.fromkeys([*known, *unfinished_records()]):
        _reset(record)


def _reset(record: Record) -> None:
    fsdp2.reset_iteration(record.states)
    for port in record.ports:
        port.restore()
