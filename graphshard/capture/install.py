"""What graphshard changes in a process: Dynamo learns to trace FSDP2's modules, what a root runs at
its first call, and what a pipeline takes for a compiled stage and for half of its backward."""

from __future__ import annotations

import warnings

from graphshard.capture import dynamo, fallback, pipelining
from graphshard.errors import GraphshardWarning
from graphshard.fsdp2 import versions


def install() -> None:
    """Let Dynamo trace `fully_shard`ed models for backends of this package; once per process."""
    if (why := versions.untested()) is not None:
        text = f"graphshard: {why}; compare a few steps with eager FSDP2 before you rely on it"
        warnings.warn(text, GraphshardWarning, stacklevel=2)
    dynamo.install(fallback.protected, fallback.unplugged)
    fallback.install()
    pipelining.install()
