"""No garbage collection while graphs are made: the one place that turns it off."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Nearly all objects of a compilation live until its end: to look for garbage again and again
    meanwhile took a third of the time of a deep model."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
