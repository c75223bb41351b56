"""The end of a backward: groups that took no part in it, as FSDP2's own final callback treats them.

A group that this step did not use may stand gathered since the user's `unshard()`, hold gradients
of an earlier micro-step without sync, or have to reduce zeros because other ranks used it
(`set_reduce_scatter_unused_params`).
"""

from __future__ import annotations

from functools import partial

from graphshard.fsdp2.state import finishes_itself
from graphshard.runtime.calls import current_task, when_done
from graphshard.runtime.live import LiveGroup, Root
from graphshard.runtime.reduce import Reduction, merge_unreduced


def finish_later(live: LiveGroup) -> None:
    """The gradients of `live` came; when this engine run ends, see to the rest of its root."""
    task = live.reduced_in = current_task()
    root = live.root
    if root is not None and root.finishing != task and task >= 0:
        root.finishing = task
        when_done(partial(_finish, root, task))


def _finish(root: Root, task: int) -> None:
    for live in root.groups.values():
        if live.reduced_in == task:
            continue
        _reshard_unused(live)
        if not live.fsdp.reduces or not live.was_gathered:
            continue
        grads = merge_unreduced(live.fsdp, {}, live.places)
        if grads:
            Reduction(live, grads).wait()


def _reshard_unused(live: LiveGroup) -> None:
    """Unless FSDP2 itself will: a reentrant checkpoint's engine run ends inside the one that still
    needs what FSDP2's hooks have gathered."""
    fsdp = live.fsdp
    if fsdp.is_sharded or not fsdp.reshard_after_backward or finishes_itself(fsdp.state):
        return
    fsdp.reshard()
