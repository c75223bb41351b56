"""The one change that graphshard makes to a process: Dynamo learns to trace FSDP2's modules."""

from __future__ import annotations

from graphshard.capture import dynamo, fallback


def install() -> None:
    """Let Dynamo trace `fully_shard`ed models for backends of this package; once per process."""
    dynamo.install(fallback.protected, fallback.unplugged)
