"""What one call ran outside the graphs, and why."""

from __future__ import annotations

from torch import nn

from graphshard.capture import dynamo
from graphshard.capture.fallback.causes import named_groups, warn_once
from graphshard.capture.root_state import (
    CaptureHandle,
    RootState,
    all_root_states,
    handle_of,
    root_states_under,
)
from graphshard.errors import CaptureError
from graphshard.options import Options
from graphshard.runtime.calls import current_task

_AT_LIMIT = "Dynamo's recompile limit is reached"
_NO_BREAK = "Dynamo did not compile the call (its recompile limit?)"


class CallWatch:
    """Finds the groups that one call ran outside the graphs, says why, and helps the rest.

    A graph break inside a loop over blocks leaves all of them outside. In a later call each of
    their modules is compiled on its own, so that only those that cannot be captured stay with
    eager FSDP2.

    recomputes: the call is a part of a backward. plain: it runs without Dynamo. compiles: perhaps,
    so that there is something to report. at_limit: Dynamo compiles no more; that is yet to be said.
    """

    def __init__(
        self,
        module: nn.Module | None,
        options: Options,
        *,
        plain: bool,
        compiles: bool,
        at_limit: bool,
    ) -> None:
        self._module = module
        self._options = options
        self._breaks = dynamo.num_graph_breaks()
        self._plain = plain
        self.at_limit = at_limit
        self.compiles = compiles
        self.recomputes = current_task() >= 0
        self._known = all_root_states() if module is None else root_states_under(module)
        handles = [handle for root_state in self._known for handle in root_state.handles]
        self._entered = {handle: top for handle in handles if (top := handle.entered["top"])}
        self._traces: dict[RootState, int] = {}
        self._forwards: dict[int, int] = {}
        if compiles:  # only then is there a report; a backward may call hundreds of modules again
            self._traces = {root_state: root_state.traces for root_state in self._known}
            lives = [live for handle in handles for live in handle.lives]
            self._forwards = {live.number: live.counters.forwards for live in lives}

    def report(self) -> list[CaptureHandle]:
        """Note a reason for each group that stayed outside, and warn once per reason.

        Returns those of which the modules may run in graphs of their own. Raises CaptureError
        instead with `fallback="error"`.
        """
        apart: list[CaptureHandle] = []
        for root_state in self._records():
            inside = [p for p in self._ports(root_state) if self._ran_inside(p)]
            outside = [p for p in self._ports(root_state) if p not in inside]
            for handle in inside:
                for fqn in handle.fqns:
                    root_state.outside.pop(fqn, None)
            reason = self._reason(bool(inside))
            if reason is None or not outside:
                continue
            names = named_groups([fqn for p in outside for fqn in p.fqns])
            message = f"{names} did not run inside a graph because {reason}"
            if self._options.fallback == "error":
                raise CaptureError("GS211", message)
            if not _is_known(root_state, outside, reason):
                warn_once(message)
                for handle in outside:
                    root_state.outside |= dict.fromkeys(handle.fqns, reason)
            self.at_limit = False  # this was said
            if self._plain or self._new_breaks():
                apart += outside
            elif reason == _AT_LIMIT:
                apart += [handle for handle in outside if not handle.apart]
        return apart

    def unwind(self) -> None:
        """Undo what this call left half done in a backward that may go on.

        If the backward fails too, the next forward of the root begins with a clean state.
        """
        for root_state in self._known:
            for handle in root_state.handles:
                handle.leave(self._entered.get(handle, ()))
            root_state.interrupt(current_task())

    def _records(self) -> list[RootState]:
        """The roots that this call was about: those of the module, or those that it traced."""
        if self._module is not None:
            return root_states_under(self._module)
        return [r for r in all_root_states() if r.traces > self._traces.get(r, 0)]

    def _ports(self, root_state: RootState) -> list[CaptureHandle]:
        """Ports with a group that could be captured and that this call was about."""
        handles = [p for p in root_state.handles if p.lives and not p.eager]
        if self._module is None:
            return handles
        under = {handle_of(m) for m in self._module.modules()}
        return [p for p in handles if p in under]

    def _ran_inside(self, handle: CaptureHandle) -> bool:
        known = self._forwards
        return any(live.counters.forwards > known.get(live.number, 0) for live in handle.lives)

    def _reason(self, inside: bool) -> str | None:
        if self._plain:
            return "the module around it runs as it is"
        breaks = self._new_breaks()
        if not breaks and inside:
            return None
        if breaks[0].at_limit if breaks else self.at_limit:
            return _AT_LIMIT
        if not breaks:
            return _NO_BREAK
        first = breaks[0]
        reason = f"the graph breaks at {first.where}"
        if not first.at_eager_group:
            reason += f": {first.reason}"
        return reason + (f" (try {first.setting})" if first.setting else "")

    def _new_breaks(self) -> list[dynamo.GraphBreak]:
        return dynamo.graph_breaks(self._breaks)


def _is_known(root_state: RootState, outside: list[CaptureHandle], reason: str) -> bool:
    """The same was said of all these groups. A block that runs the code of another one, in which
    the graph breaks, has no break of its own."""
    known = {root_state.outside.get(fqn) for handle in outside for fqn in handle.fqns}
    return None not in known and (reason == _NO_BREAK or known == {reason})
