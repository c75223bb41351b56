"""Every error and warning that graphshard raises.

GraphshardError
|-- OptionsError         (also ValueError)   bad `options=` or `mode=`
|-- CaptureError         the graph cannot be taken apart
|   `-- UnsupportedModel a documented limit: runs through FSDP2 instead
|-- VerifyError          a pass broke a rule: graphshard's own bug
|-- CostError            (also ValueError)   a preset, a profile or a calibration cannot be used
|-- RuntimeStateError    a collective or a buffer was used out of order
|-- CollectiveFailed     (also RuntimeError) a collective failed, or was not done in time
|-- OfflineError         (also ValueError)   what is to be planned offline cannot be built
|   `-- UserCodeError                       the user's own file or function fails
|-- MeasureError         (also ValueError)   nothing was measured, or it does not fit the plan
|-- MigrateError         (also ValueError)   an argument of FSDP1 without equivalent in FSDP2
|-- IntegrationError     (also ImportError)  a framework is missing, or too old
|-- DoctorError          (also ValueError)   the doctor cannot start the command
|-- FileError            (also ValueError)   a file cannot be read, or does not hold what it should
|-- DivergedRanks        the ranks would run, or run, different graphs
`-- PlanError            (also ValueError)   what is to be planned contradicts itself
    `-- InfeasibleBudget no schedule fits the memory budget

GraphshardWarning        (UserWarning)       a part runs through eager FSDP2
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class GraphshardError(Exception):
    """Base class. `code` is stable (GS...) and has an entry in docs/errors.md."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[GraphshardError], tuple[Any, ...]]:
        return type(self), (self.code, self.message)


class OptionsError(GraphshardError, ValueError):
    """`options=` has an unknown key or a value out of range."""


class CaptureError(GraphshardError):
    """The captured graph does not have the shape that graphshard relies on."""


class UnsupportedModel(CaptureError):
    """A feature that graphshard leaves to eager FSDP2."""


class VerifyError(GraphshardError):
    """A rule of `graphshard.graph.verify` does not hold after a pass."""


class IntegrationError(GraphshardError, ImportError):
    """A framework that `graphshard.integrations` is for is missing, or too old."""


class CostError(GraphshardError, ValueError):
    """A preset, a cost profile or the setting of a calibration cannot be used."""


class RuntimeStateError(GraphshardError):
    """A gather or a reduction was used outside its life time."""


class CollectiveFailed(GraphshardError, RuntimeError):
    """A collective failed, or its process group's time limit passed. What the process group raised
    is its cause."""


class OfflineError(GraphshardError, ValueError):
    """A model that is to be planned offline cannot be found, built or sharded."""


class UserCodeError(OfflineError):
    """The user's own file or function fails; the text says in which line, and how."""


class MeasureError(GraphshardError, ValueError):
    """Nothing was measured, or what was measured or is to be compared does not fit the plan."""


class MigrateError(GraphshardError, ValueError):
    """FSDP1's words were used where FSDP2 has no equivalent, or other ones."""


class DoctorError(GraphshardError, ValueError):
    """The command that `graphshard doctor` is to examine cannot be started."""


class FileError(GraphshardError, ValueError):
    """A file cannot be read or written, or holds something else; the text says where and what."""


class DivergedRanks(GraphshardError):
    """Ranks of one mesh do not run the same. Each of them that can still tell says so alike."""


class StoreLost(DivergedRanks):
    """The job's store is gone, or does not answer."""


class PlanError(GraphshardError, ValueError):
    """The planner was given a problem or a schedule that contradicts itself."""


class InfeasibleBudget(PlanError):
    """No schedule fits the budget; the text says what would.

    shortage: the facts, a `graphshard.schedule.shortage.Shortage`.
    """

    def __init__(self, shortage: Any) -> None:
        # Views write sentences; here is only where users read them.
        text = import_module("graphshard.view.shortage").shortage_text(shortage)
        super().__init__("GS601", text)
        self.shortage = shortage

    def __reduce__(self) -> tuple[type[GraphshardError], tuple[Any, ...]]:
        return type(self), (self.shortage,)


class GraphshardWarning(UserWarning):
    """Part of the model runs through eager FSDP2; the text says what, where and why."""


@contextmanager
def cleaning_up(first: BaseException) -> Iterator[None]:
    """Inside, what `first` left is put in order. What fails there becomes a note of `first`, which
    goes on to say what went wrong."""
    try:
        yield
    except Exception as later:
        text = str(later).split("\n", 1)[0]
        first.add_note(f"graphshard: cleaning up failed, too: {type(later).__name__}: {text}")
