"""The one place that reads FSDP2's private state; `versions` says what this torch has of it.

Everything else sees thin views whose attributes are read live, so that a setting changed by the
user between two steps takes effect at the next use, as in FSDP2.
"""

from graphshard.fsdp2.group import FsdpGroup, ReducePolicy, fsdp_groups
from graphshard.fsdp2.param import FsdpParam, Slot
from graphshard.fsdp2.state import (
    CastPolicy,
    ShardedModule,
    State,
    cast_inputs,
    cast_policy,
    device_of,
    forward_hooks,
    forward_methods,
    grouped_hook,
    is_idle,
    is_inner,
    is_mid_iteration,
    is_root,
    lazy_init,
    mixed_precision,
    modules_of,
    remove_hooks,
    reset_iteration,
    siblings,
    state_of,
    states_under,
)
from graphshard.fsdp2.unsupported import unsupported

__all__ = [
    "CastPolicy",
    "FsdpGroup",
    "FsdpParam",
    "ReducePolicy",
    "ShardedModule",
    "Slot",
    "State",
    "cast_inputs",
    "cast_policy",
    "device_of",
    "forward_hooks",
    "forward_methods",
    "fsdp_groups",
    "grouped_hook",
    "is_idle",
    "is_inner",
    "is_mid_iteration",
    "is_root",
    "lazy_init",
    "mixed_precision",
    "modules_of",
    "remove_hooks",
    "reset_iteration",
    "siblings",
    "state_of",
    "states_under",
    "unsupported",
]
