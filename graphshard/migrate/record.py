"""What a migrated module remembers of FSDP1, in an attribute of the module itself.

The record is replaced, never changed. It says nothing that FSDP2 knows already.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    StateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.api import StateDictSettings

_NAME = "_graphshard_fsdp1"


@dataclass(frozen=True, slots=True)
class StateDicts:
    """How `state_dict` gives parameters; whole ones by default, as in FSDP1."""

    kind: StateDictType = StateDictType.FULL_STATE_DICT
    model: StateDictConfig = field(default_factory=FullStateDictConfig)
    optimizer: OptimStateDictConfig = field(default_factory=FullOptimStateDictConfig)

    @property
    def settings(self) -> StateDictSettings:
        return StateDictSettings(self.kind, self.model, self.optimizer)


@dataclass(frozen=True, slots=True)
class Migrated:
    """casts_inside: whether inputs are cast once this is inside another sharded module.

    keeps: gathered until backward, and in `no_sync` after it too. code: for the module that was
    given to FullyShardedDataParallel, the lines that it stands for; other modules have None.
    """

    casts_inside: bool | None = None
    keeps: bool = False
    code: str | None = None
    state_dicts: StateDicts = field(default_factory=StateDicts)


def record_of(module: nn.Module) -> Migrated | None:
    found = module.__dict__.get(_NAME)
    assert found is None or isinstance(found, Migrated)
    return found


def remember(module: nn.Module, record: Migrated) -> None:
    setattr(module, _NAME, record)


def recorded(root: nn.Module) -> list[tuple[nn.Module, Migrated]]:
    """The migrated modules in `root`, parents first, with their records."""
    found = ((module, record_of(module)) for module in root.modules())
    return [(module, record) for module, record in found if record is not None]
