"""graphshard: torch.compile for models sharded with PyTorch FSDP2.

    model.compile(backend="graphshard")

Importing this package is cheap and changes nothing: names are loaded when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from graphshard._version import __version__

if TYPE_CHECKING:
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        UnshardHandle,
        fully_shard,
        register_fsdp_forward_method,
    )

    from graphshard import migrate
    from graphshard.errors import (
        CaptureError,
        DivergedRanks,
        GraphshardError,
        GraphshardWarning,
        InfeasibleBudget,
        MeasureError,
        MigrateError,
        OfflineError,
        OptionsError,
        RuntimeStateError,
        UnsupportedModel,
        VerifyError,
    )
    from graphshard.offline.api import plan
    from graphshard.report.explain import Measurement, Report, explain, measurements, plans
    from graphshard.report.metrics import metrics
    from graphshard.report.profiling import profile
    from graphshard.schedule.plan import Plan, load_plan
    from graphshard.schedule.summary import Summary

_FSDP = (
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "register_fsdp_forward_method",
)
_ERRORS = (
    "CaptureError",
    "DivergedRanks",
    "GraphshardError",
    "GraphshardWarning",
    "InfeasibleBudget",
    "OfflineError",
    "MeasureError",
    "MigrateError",
    "OptionsError",
    "RuntimeStateError",
    "UnsupportedModel",
    "VerifyError",
)
_HOME = {
    **dict.fromkeys(_FSDP, "torch.distributed.fsdp"),
    **dict.fromkeys(_ERRORS, "graphshard.errors"),
    "Measurement": "graphshard.report.explain",
    "Plan": "graphshard.schedule.plan",
    "plan": "graphshard.offline.api",
    "Report": "graphshard.report.explain",
    "explain": "graphshard.report.explain",
    # PyTorch's function, with a better error for arguments of FSDP1.
    "fully_shard": "graphshard.migrate.fully_shard",
    "load_plan": "graphshard.schedule.plan",
    "measurements": "graphshard.report.explain",
    "metrics": "graphshard.report.metrics",
    "plans": "graphshard.report.explain",
    "profile": "graphshard.report.profiling",
    "Summary": "graphshard.schedule.summary",
}

__all__ = [
    "CPUOffloadPolicy",
    "CaptureError",
    "DivergedRanks",
    "FSDPModule",
    "GraphshardError",
    "GraphshardWarning",
    "InfeasibleBudget",
    "MeasureError",
    "Measurement",
    "MigrateError",
    "MixedPrecisionPolicy",
    "OfflineError",
    "OffloadPolicy",
    "OptionsError",
    "Plan",
    "Report",
    "RuntimeStateError",
    "Summary",
    "UnshardHandle",
    "UnsupportedModel",
    "VerifyError",
    "__version__",
    "explain",
    "fully_shard",
    "load_plan",
    "measurements",
    "metrics",
    "migrate",
    "plan",
    "plans",
    "profile",
    "register_fsdp_forward_method",
]


def __getattr__(name: str) -> Any:
    if name == "migrate":
        return import_module("graphshard.migrate")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
