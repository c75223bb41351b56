"""Log calls of a model that print nothing: Dynamo passes over them, where it would break the graph.

Assumed: what is off when a forward is traced stays off. If the level is lowered afterwards, calls
in what is compiled already stay silent. A call that is on breaks the graph as in plain
torch.compile.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch._dynamo import config

_LEVELS: dict[Callable[..., Any], int] = {
    logging.Logger.debug: logging.DEBUG,
    logging.Logger.info: logging.INFO,
    logging.Logger.warning: logging.WARNING,
    logging.Logger.error: logging.ERROR,
    logging.Logger.exception: logging.ERROR,
    logging.Logger.critical: logging.CRITICAL,
}


class _Silent(set[Callable[..., Any]]):
    """What the user lets Dynamo ignore, and methods of loggers that are off, as Dynamo asks."""

    def __contains__(self, method: object) -> bool:
        return super().__contains__(method) or _is_off(method)


def _is_off(method: object) -> bool:
    logger = getattr(method, "__self__", None)
    level = _LEVELS.get(getattr(method, "__func__", None))  # type: ignore[arg-type]
    return level is not None and logger is not None and not logger.isEnabledFor(level)


def without_silent_logs() -> Any:
    """A context in which Dynamo ignores them."""
    ignored = config.ignore_logging_functions
    return config.patch(ignore_logging_functions=_Silent(ignored))
