"""The end of a backward, as FSDP2's own final callback treats it.

A group may stand gathered since the user's `unshard()` or since an eager forward that FSDP2 could
not complete. One that took no part in this backward may hold gradients of an earlier micro-step
without sync, or have to reduce zeros because other ranks used it
(`set_reduce_scatter_unused_params`). One that backward did not need, such as a first layer, was not
gathered in it, and `set_reshard_after_backward(False)` may ask for it all the same; or forward left
it gathered because the user asked for that.
"""

from __future__ import annotations

from functools import partial

from graphshard.fsdp2.state import end_backward, finishes_itself
from graphshard.runtime.arrived import merge_unreduced
from graphshard.runtime.calls import current_task, when_done
from graphshard.runtime.gather import issue, take_prefetched
from graphshard.runtime.gather_buffers import give_back
from graphshard.runtime.live import LiveGroup, Root
from graphshard.runtime.reduce import Reduction


def finish_later(live: LiveGroup) -> None:
    """The gradients of `live` came; when this engine run ends, see to the rest of its root."""
    task = live.reduced_in = current_task()
    root = live.root
    if root is not None and root.finishing != task and task >= 0:
        root.finishing = task
        when_done(partial(_finish, root, task))


def _finish(root: Root, task: int) -> None:
    """Where FSDP2's own final callback is queued, that reshards: the engine run of a reentrant
    checkpoint ends inside the one that still needs what FSDP2's hooks have gathered."""
    state = root.groups[0].fsdp.state
    ends_here = not finishes_itself(state)
    if ends_here:
        end_backward(state)
    if root.order is not None:
        root.order.end_backward(task)
    for live in root.groups:
        fsdp = live.fsdp
        if ends_here and not fsdp.is_sharded and fsdp.reshard_after_backward:
            fsdp.reshard()
        if live.reduced_in == task and fsdp.stays_after_backward and live.kept is None:
            _gather(live)
        elif live.reduced_in == task and fsdp.reshard_after_backward:
            _let_go(live)
        if live.reduced_in == task or not fsdp.reduces or not live.was_gathered:
            continue
        grads = merge_unreduced(fsdp, {}, live.places)
        if grads:
            Reduction(live, grads).complete()
    root.arrive_on_host()


def _let_go(live: LiveGroup) -> None:
    """What is gathered, unless a plan or an evaluation holds it for the next forward."""
    kept = live.kept
    if kept is None or kept.to_check:
        return
    live.let_go()
    for buffer in kept.buffers:
        give_back(live, buffer)


def _gather(live: LiveGroup) -> None:
    """As FSDP2 does before the backward of every group; the next forward finds it."""
    gather = take_prefetched(live, live.dtypes)
    issue([(gather, live.places)])
    gather.wait(live.places)
    gather.release(keep=True)
