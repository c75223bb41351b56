"""Why something runs through eager FSDP2, said once."""

from __future__ import annotations

import functools
import warnings

from graphshard.capture import dynamo
from graphshard.errors import GraphshardError, GraphshardWarning
from graphshard.files.information import printable


def describe(error: BaseException) -> str:
    """One line: code and message of ours, type and message of others, and what may help."""
    text = str(error) if isinstance(error, GraphshardError) else f"{type(error).__name__}: {error}"
    setting = dynamo.setting_for(error)
    return text.split("\n", 1)[0] + (f" (try {setting})" if setting else "")


@functools.lru_cache(maxsize=1000)  # then the oldest cause may be told again
def warn_once(message: str) -> None:
    """A GraphshardWarning, once per cause and process."""
    hint = 'options={"fallback": "error"} makes this an error'
    warnings.warn(f"graphshard: {printable(message)}; {hint}", GraphshardWarning, stacklevel=2)


def warn_near_recompile_limit() -> None:
    """Say so before Dynamo stops compiling a frame and runs it in eager mode."""
    done, limit = dynamo.compile_variant()
    if done + 1 >= limit:
        warn_once(
            f"this is variant {done + 1} of one frame and Dynamo's limit is {limit}; further "
            "variants will run through eager FSDP2, unless ranks compile at different steps. "
            "TORCH_LOGS=recompiles says what changes; "
            "torch._dynamo.config.recompile_limit raises the limit"
        )


def warn_beyond_recompile_limit() -> None:
    """Say so where Dynamo's limit does not end compiling."""
    _, limit = dynamo.compile_variant()
    most = dynamo.most_variants()
    warn_once(
        f"Dynamo's limit of {limit} variants of one frame is reached, and ranks compile at "
        "different steps: eager FSDP2 cannot run beside the graphs of other ranks, so up to "
        f"{most} variants are compiled (torch._dynamo.config.accumulated_recompile_limit). "
        "TORCH_LOGS=recompiles says what changes"
    )


def named_groups(fqns: list[str]) -> str:
    """A few of them by name, and how many there are."""
    shown = ", ".join(fqns[:5]) + (", ..." if len(fqns) > 5 else "")
    return f"group {shown}" if len(fqns) == 1 else f"{len(fqns)} groups ({shown})"
