"""What is done around each call of a compiled function."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from graphshard import fsdp2
from graphshard.capture import dynamo
from graphshard.capture.fallback.causes import (
    named_groups,
    warn_beyond_recompile_limit,
    warn_once,
)
from graphshard.capture.fallback.promote import Request, wait_for_root, wait_no_longer
from graphshard.capture.fallback.together import open_roots
from graphshard.capture.fallback.watch import CallWatch
from graphshard.capture.root_state import (
    CaptureHandle,
    RootState,
    all_root_states,
    handle_of,
    prepare,
    root_states_under,
    unfinished_records,
)
from graphshard.errors import CollectiveFailed, DivergedRanks, UnsupportedModel, cleaning_up
from graphshard.options import Options
from graphshard.runtime.agree import IDLE, mark
from graphshard.runtime.calls import PendingGraph, current_task, pending_graphs
from graphshard.runtime.company import keep_step
from graphshard.runtime.graph_order import GraphOrder
from graphshard.runtime.waiting import CLEAN_UP_S

logger = logging.getLogger(__name__)


def protected(
    compiled: Callable[..., Any],
    options: Options,
    frames: dynamo.Frames,
    *,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """What users call instead of the function that torch.compile made, with `dynamic` as given.

    Validates the model as FSDP2 would before anything is traced, looks after the groups that ran
    outside the graphs, and after an exception puts every group that was in the middle of its
    forward back into the SHARDED state. frames: what compiles it.

    Within a backward a call recomputes activations, and its end by an exception is no failure:
    PyTorch's checkpoint ends each recomputation so. FSDP2's state belongs to the backward then,
    and only what this call itself left half done is undone.
    """
    module = dynamo.wrapped_module(compiled)
    keeper = Keeper(module, options, frames.try_again)
    asked = weakref.ref(keeper)  # Dynamo may hold `frames` for longer than the model lives
    frames.goes_on = lambda: (kept := asked()) is not None and kept.goes_on()
    if module is not None:
        wait_for_root(module, Request(options, dynamic, dynamo.is_in_place(compiled)))

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        watch = keeper.before()
        run = keeper.plain or compiled
        try:
            result = run(*args, **kwargs)
            if watch is not None:
                keeper.after(watch, result)
        except BaseException as error:
            keeper.failed(watch, error)
            raise
        keeper.close()
        return result

    return dynamo.invisible(call)


class Keeper:
    """What is done around the calls of one compiled function. Dynamo looks into none of it.

    A forward and the recomputation in its backward have to run the same code. So what was found
    out in one call (`_later`) changes the next one that comes when no graph of earlier calls
    (`_graphs`) waits for its backward.

    plain: runs instead of the compiled function, if the module has to be eager as a whole.
    _at_limit: Dynamo compiles no more of it, and the modules inside do not run on their own yet.
    """

    def __init__(
        self, module: nn.Module | None, options: Options, try_again: Callable[[bool], None]
    ) -> None:
        self._module = module
        self._options = options
        self._try_again = try_again
        self._frames = -1
        self.plain: Callable[..., Any] | None = None
        self._gone = self._at_limit = False
        self._later: list[CaptureHandle] = []
        self._graphs: list[PendingGraph] = []
        self._orders: list[GraphOrder] = []

    @dynamo.hidden
    def before(self) -> CallWatch | None:
        """Validate before the first call; watch a call that may compile something, one that
        recomputes, and all until `_later` is done."""
        if self._frames < 0:
            if self._module is not None:
                wait_no_longer(self._module)
            _prepare(self._module, self._options)
            self.plain = _plain_call(self._module)
        recomputes = current_task() >= 0
        if not recomputes:
            self._after_backward()
        changed = (self._at_limit or self._frames != dynamo.frames_seen()) and not self._gone
        watch = None
        if changed or recomputes or self._later:
            plain = self.plain is not None
            watch = CallWatch(
                self._module,
                self._options,
                plain=plain,
                compiles=changed,
                at_limit=self._at_limit,
            )
        self._open(looks_again=changed)
        return watch

    def _open(self, *, looks_again: bool) -> None:
        if looks_again and self._module is not None:
            roots = (root for found in root_states_under(self._module) for root in found.roots)
            self._orders = [root.order for root in roots if root.order is not None]
        for order in self._orders:
            order.open()

    @dynamo.hidden
    def close(self) -> None:
        """The call is over, well or not."""
        for order in self._orders:
            order.close()

    def _after_backward(self) -> None:
        """See to what had to wait until no backward runs."""
        handle = None if self._module is None else handle_of(self._module)
        if handle is not None and handle.root_state.is_interrupted and fsdp2.is_root(handle.state):
            lost = RuntimeError("a backward was interrupted")
            recover(self._module, lost)
            for note in getattr(lost, "__notes__", ()):
                logger.warning("after %s: %s", lost, note)
        if self._later and not self._is_pending():
            for later in self._later:
                self._apart(later)
            self._later = []

    def _apart(self, handle: CaptureHandle) -> None:
        """Compile its modules on their own; one that was before goes back to eager."""
        for module in fsdp2.modules_of(handle.state):
            if handle.apart and module is self._module:
                module._compiled_call_impl = None
                self.plain, self._gone = module._call_impl, True  # for the call that begins now
            elif module._compiled_call_impl is None and module is not self._module:
                handle.apart = True
                module.compile(backend="graphshard", options=_options_apart(self._options))

    def _is_pending(self) -> bool:
        self._graphs = [graph for graph in self._graphs if graph.is_pending]
        lives = [live for handle in self._later for live in handle.lives]
        return bool(self._graphs) or any(call.is_pending for live in lives for call in live.calls)

    def goes_on(self) -> bool:
        """Dynamo's limit is reached, and the other ranks may run graphs in this forward, beside
        which eager FSDP2 cannot run: they do not compile when this one does."""
        known = all_root_states() if self._module is None else root_states_under(self._module)
        if all(keep_step(root_state.ballots) for root_state in known):
            self._at_limit = True
            return False
        warn_beyond_recompile_limit()
        return True

    @dynamo.hidden
    def after(self, watch: CallWatch, result: Any) -> None:
        self._try_again(False)
        if watch.compiles:
            self._later += [handle for handle in watch.report() if handle not in self._later]
            self._at_limit = self._at_limit and watch.at_limit
        if self._later and not watch.recomputes:
            self._graphs += pending_graphs(result)
        _mark_idle(self._module)
        self._frames = dynamo.frames_seen()

    @dynamo.hidden
    def failed(self, watch: CallWatch | None, error: BaseException) -> None:
        recomputes = watch is not None and watch.recomputes
        self._try_again(not recomputes)
        if watch is not None and recomputes:
            watch.unwind()
        else:
            recover(self._module, error)
        with cleaning_up(error):
            _mark_idle(self._module)
        with cleaning_up(error):
            self.close()


def _mark_idle(module: nn.Module | None) -> None:
    """The call is over: a rank that waits for this one goes on waiting."""
    for root_state in all_root_states() if module is None else root_states_under(module):
        mark(root_state.ballots, IDLE)


def _plain_call(module: nn.Module | None) -> Callable[..., Any] | None:
    """What a call of `module` runs if Dynamo must not look into it, else None."""
    if module is None:
        return None
    return next((r.plain[module] for r in root_states_under(module) if module in r.plain), None)


def _prepare(module: nn.Module | None, options: Options) -> None:
    if module is None:
        return
    dynamo.substitute_grouped_hooks(fsdp2.states_under(module))
    if not isinstance(module, fsdp2.ShardedModule):
        return
    state = fsdp2.state_of(module)
    fsdp2.lazy_init(state)  # raises what FSDP2 raises
    prepare(state)
    open_roots(root_states_under(module), options)
    for root_state in root_states_under(module):
        for reason in dict.fromkeys(root_state.reasons.values()):
            fqns = [fqn for fqn, why in root_state.reasons.items() if why == reason]
            runs = "runs" if len(fqns) == 1 else "run"
            message = f"{named_groups(fqns)} {runs} through eager FSDP2 because {reason}"
            if options.fallback == "error":
                raise UnsupportedModel("GS210", message)
            warn_once(message)


def _options_apart(options: Options) -> Options:
    """Of modules that are compiled on their own, within a model compiled with `options`."""
    return replace(
        options,
        fallback="warn",
        schedule="fsdp2",
        memory_budget=None,
        reshard="fsdp2",
        machine=None,
        micro_steps=1,
        report_dir=None,
        promote=False,
    )


def recover(module: nn.Module | None, error: BaseException) -> None:
    """All groups SHARDED, nothing gathered, nothing in flight, after `error` in a forward.

    What fails here is noted on `error`.
    """
    known = root_states_under(module) if module is not None else []
    for root_state in dict.fromkeys([*known, *unfinished_records()]):
        _reset(root_state, error)


def _reset(root_state: RootState, error: BaseException) -> None:
    waits = not isinstance(error, (CollectiveFailed, DivergedRanks))
    with cleaning_up(error):
        fsdp2.reset_iteration(root_state.states, waits=waits)
    for handle in root_state.handles:
        with cleaning_up(error):
            handle.restore(limit_s=CLEAN_UP_S if waits else 0)
