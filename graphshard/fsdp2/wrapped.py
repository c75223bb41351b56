"""What is done around FSDP2's own methods of one group, whenever FSDP2 calls them itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_common

from graphshard.fsdp2.group import FsdpGroup


def when_resharded(group: FsdpGroup, then: Callable[[], None]) -> None:
    """Call `then` whenever FSDP2 reshards the group, at the user's `reshard()` for example."""
    reshard = group.raw.reshard

    def call() -> None:
        reshard()
        if group.is_sharded:
            then()

    group.raw.reshard = call


def gather_for_training(group: FsdpGroup) -> None:
    """From now on what FSDP2 itself gathers can be trained with, also under inference_mode.

    FSDP2 makes its tensors at its first gather. A model that was trained compiled may come to
    that under inference_mode, and later training would raise.
    """
    wait = group.raw.wait_for_unshard

    def call() -> None:
        if not torch.is_inference_mode_enabled():
            wait()
            return
        with torch.inference_mode(False), torch.no_grad():
            wait()

    group.raw.wait_for_unshard = call


def around_unshard(
    group: FsdpGroup,
    issuing: Callable[[], AbstractContextManager[None]],
    waiting: Callable[[], AbstractContextManager[None]],
) -> None:
    """Enter `issuing` whenever FSDP2 itself issues an all-gather of the group, and `waiting` when
    it waits for one."""
    raw = group.raw
    unshard, wait = raw.unshard, raw.wait_for_unshard

    def call(*args: Any, **kwargs: Any) -> None:
        in_backward = raw._training_state == _fsdp_common.TrainingState.PRE_BACKWARD
        skips = in_backward and not raw.unshard_in_backward
        issues = group.is_sharded and not skips and group.world_size > 1
        with issuing() if issues else nullcontext():
            unshard(*args, **kwargs)

    def call_wait() -> None:
        with waiting():
            wait()

    raw.unshard, raw.wait_for_unshard = call, call_wait
