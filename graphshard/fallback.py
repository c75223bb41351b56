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
    Port,
    Record,
    all_records,
    port_of,
    prepare,
    records_under,
    unfinished_records,
)
from graphshard.errors import (
    CaptureError,
    GraphshardError,
    GraphshardWarning,
    UnsupportedModel,
)
from graphshard.options import Options
from graphshard.runtime.agree import IDLE, mark

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


def protected(compiled: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """What users call instead of the function that torch.compile made.

    Validates the model as FSDP2 would before anything is traced, looks after the groups that ran
    outside the graphs, and after an exception puts every group that was in the middle of its
    forward back into the SHARDED state.
    """
    keeper = Keeper(dynamo.wrapped_module(compiled), options)

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        watch = keeper.before()
        try:
            result = compiled(*args, **kwargs)
        except BaseException:
            keeper.failed()
            raise
        if watch is not None:
            keeper.after(watch)
        return result

    return dynamo.invisible(call)


class Keeper:
    """What is done around the calls of one compiled function. Dynamo looks into none of it."""

    def __init__(self, module: nn.Module | None, options: Options) -> None:
        self._module = module
        self._options = options
        self._frames = -1

    @dynamo.hidden
    def before(self) -> Watch | None:
        """Validate before the first call; watch a call that may compile something."""
        if self._frames < 0:
            _prepare(self._module, self._options)
        changed = self._frames != dynamo.frames_seen()
        return Watch(self._module, self._options) if changed else None

    @dynamo.hidden
    def after(self, watch: Watch) -> None:
        watch.report()
        _mark_idle(self._module)
        self._frames = dynamo.frames_seen()

    @dynamo.hidden
    def failed(self) -> None:
        recover(self._module)
        _mark_idle(self._module)


def _mark_idle(module: nn.Module | None) -> None:
    """The call is over: a rank that waits for this one goes on waiting."""
    for record in all_records() if module is None else records_under(module):
        mark(record.ballots, IDLE)


def _prepare(module: nn.Module | None, options: Options) -> None:
    if module is None:
        return
    dynamo.substitute_grouped_hooks(fsdp2.states_under(module))
    if not isinstance(module, fsdp2.ShardedModule):
        return
    state = fsdp2.state_of(module)
    fsdp2.lazy_init(state)  # raises what FSDP2 raises
    prepare(state)
    for record in records_under(module):
        for fqn, reason in record.reasons.items():
            message = f"group {fqn} runs through eager FSDP2 because {reason}"
            if options.fallback == "error":
                raise UnsupportedModel("GS210", message)
            warn_once(message)


class Watch:
    """Finds the groups that one call ran outside the graphs, says why, and helps the rest.

    A graph break inside a loop over blocks leaves all of them outside. From the next call on,
    each of their modules is compiled on its own, so that only those that cannot be captured stay
    with eager FSDP2.
    """

    def __init__(self, module: nn.Module | None, options: Options) -> None:
        self._module = module
        self._options = options
        self._breaks = len(dynamo.graph_breaks())
        known = all_records() if module is None else records_under(module)
        self._traces = {record: record.traces for record in known}
        self._forwards = {g.number: g.counters.forwards for r in known for g in r.groups}

    def report(self) -> None:
        """Note a reason for each group that stayed outside, and warn once per reason.

        Raises CaptureError instead with `fallback="error"`.
        """
        for record in self._records():
            inside = [p for p in self._ports(record) if self._ran_inside(p)]
            outside = [p for p in self._ports(record) if p not in inside]
            for port in inside:
                record.outside.pop(port.fqn, None)
            reason = self._reason(bool(inside))
            if reason is None or not outside:
                continue
            names = _names([p.fqn for p in outside])
            message = f"{names} did not run inside a graph because {reason}"
            if self._options.fallback == "error":
                raise CaptureError("GS211", message)
            warn_once(message)
            for port in outside:
                record.outside[port.fqn] = reason
                if self._new_breaks():
                    self._compile_apart(port)

    def _records(self) -> list[Record]:
        """The roots that this call was about: those of the module, or those that it traced."""
        if self._module is not None:
            return records_under(self._module)
        return [r for r in all_records() if r.traces > self._traces.get(r, 0)]

    def _ports(self, record: Record) -> list[Port]:
        """Ports with a group that could be captured and that this call was about."""
        ports = [p for p in record.ports if p.live is not None and not p.eager]
        if self._module is None:
            return ports
        under = {port_of(m) for m in self._module.modules()}
        return [p for p in ports if p in under]

    def _ran_inside(self, port: Port) -> bool:
        live = port.live
        return live is not None and live.counters.forwards > self._forwards.get(live.number, 0)

    def _reason(self, inside: bool) -> str | None:
        breaks = self._new_breaks()
        if not breaks:
            return None if inside else "Dynamo did not compile the call (its recompile limit?)"
        reason = f"the graph breaks at {breaks[0].where}"
        return reason if breaks[0].at_eager_group else f"{reason}: {breaks[0].reason}"

    def _new_breaks(self) -> list[dynamo.GraphBreak]:
        return dynamo.graph_breaks()[self._breaks :]

    def _compile_apart(self, port: Port) -> None:
        """Compile the port's modules on their own, or give that up if it was done before."""
        own = self._options
        given: dict[str, object] = {"fallback": "warn", "compute": own.compute}
        given |= {"dump_dir": own.dump_dir, **dict(own.inductor)}
        for module in fsdp2.modules_of(port.state):
            if port.apart and module is self._module:
                module._compiled_call_impl = None
            elif module._compiled_call_impl is None and module is not self._module:
                port.apart = True
                module.compile(backend="graphshard", options=given)


def _names(fqns: list[str]) -> str:
    shown = ", ".join(fqns[:5]) + (", ..." if len(fqns) > 5 else "")
    return f"group {shown}" if len(fqns) == 1 else f"{len(fqns)} groups ({shown})"


def recover(module: nn.Module | None) -> None:
    """All groups SHARDED, nothing gathered, nothing in flight, after an exception in a forward."""
    known = records_under(module) if module is not None else []
    for record in dict.fromkeys([*known, *unfinished_records()]):
        _reset(record)


def _reset(record: Record) -> None:
    fsdp2.reset_iteration(record.states)
    for port in record.ports:
        port.restore()
