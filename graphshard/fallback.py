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
from graphshard.capture.ports import (
    Record,
    all_records,
    prepare,
    records_under,
    unfinished_records,
)
from graphshard.errors import GraphshardError, GraphshardWarning
from graphshard.runtime.live import LiveGroup

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

    Validates the model as FSDP2 would before anything is traced, says which groups ran outside
    the graphs, and after an exception puts every group that was in the middle of its forward
    back into the SHARDED state.
    """
    module = dynamo.wrapped_module(compiled)
    frames_before = -1

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal frames_before
        if frames_before < 0:
            _prepare(module)
        watch = Watch(module) if frames_before != dynamo.frames_seen() else None
        try:
            result = compiled(*args, **kwargs)
        except BaseException:
            recover(module)
            raise
        if watch is not None:
            watch.report()
            frames_before = dynamo.frames_seen()
        return result

    return call


class Watch:
    """Finds the groups that one call ran outside the graphs, and why."""

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._breaks = len(dynamo.graph_breaks())
        self._before = {live.number: live.counters.forwards for live in self._groups()}

    def _records(self) -> list[Record]:
        return all_records() if self._module is None else records_under(self._module)

    def _groups(self) -> list[LiveGroup]:
        return [live for record in self._records() for live in record.groups]

    def report(self) -> None:
        """Note a reason for each group that stayed outside, and warn once per reason."""
        breaks = dynamo.graph_breaks()[self._breaks :]
        if not breaks:
            return
        reason = f"the graph breaks at {breaks[0].where}"
        if not breaks[0].at_eager_group:
            reason += f": {breaks[0].reason}"
        for record in self._records():
            outside = [g.fqn for g in record.groups if self._stayed_outside(g, record)]
            if len(outside) == len(record.groups) and self._module is None:
                continue  # a model that this function does not call
            for fqn in outside:
                record.outside[fqn] = reason
            if outside:
                warn_once(f"{_names(outside)} ran through eager FSDP2 because {reason}")

    def _stayed_outside(self, live: LiveGroup, record: Record) -> bool:
        ran = live.counters.forwards > self._before.get(live.number, 0)
        return not ran and live.fqn not in record.reasons


def _names(fqns: list[str]) -> str:
    shown = ", ".join(fqns[:5]) + (", ..." if len(fqns) > 5 else "")
    return f"group {shown}" if len(fqns) == 1 else f"{len(fqns)} groups ({shown})"


def _prepare(module: nn.Module | None) -> None:
    if module is None:
        return
    dynamo.substitute_grouped_hooks(fsdp2.states_under(module))
    if isinstance(module, fsdp2.ShardedModule):
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
