"""FSDP2 takes over where graphshard cannot go: one warning per cause, and a clean state after
any exception."""

from graphshard.capture.fallback.beside import leave_what_is_read
from graphshard.capture.fallback.calls import protected
from graphshard.capture.fallback.causes import describe, warn_near_recompile_limit, warn_once
from graphshard.capture.fallback.disabled import unplugged
from graphshard.capture.fallback.promote import install
from graphshard.capture.fallback.together import open_roots, part_ways

__all__ = [
    "describe",
    "install",
    "leave_what_is_read",
    "open_roots",
    "part_ways",
    "protected",
    "unplugged",
    "warn_near_recompile_limit",
    "warn_once",
]
