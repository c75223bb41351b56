"""What one row of the contract is: an FSDP2 feature, and how to set it up on any model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import contract_setups as do
from contract_models import GATED, plain
from models import Case
from parity import train
from pool import Ctx
from torch import nn


@dataclass(frozen=True)
class Row:
    """One feature.

    covers: the FSDP2 names that the row is about (`FSDPModule.*` methods, parameters of
    `fully_shard` and of the policies). since: the torch version that brought them. outside: how
    many groups run through eager FSDP2. falls_back: part of the reason that graphshard gives for
    it; empty if the user left them out. fewer_gathers: graphshard gathers less often than FSDP2.
    counts_bytes: what it plans to gather is compared, in bytes, with what FSDP2 gathers.
    whole: for what eager FSDP2 does wrong: shards nothing, or in a way that it does right; that is
    what graphshard is compared with (compared_with).
    """

    area: str
    name: str
    shard: Callable[[nn.Module, Ctx], nn.Module] = plain
    before_step: Callable[[nn.Module, int], None] = do.nothing
    covers: tuple[str, ...] = ()
    case: Case = GATED
    ranks: int = 2
    micro_steps: int = 1
    since: tuple[int, int] = (2, 11)
    wrap: Callable[[nn.Module], nn.Module] | None = None
    compile: Callable[[nn.Module], None] = do.compile_whole
    train: Callable[..., Any] = train
    check: Callable[[nn.Module, bool], None] | None = None
    outside: int = 0
    falls_back: str = ""
    fewer_gathers: bool = False
    counts_bytes: bool = False
    needs_cuda: bool = False
    whole: Callable[[nn.Module, Ctx], nn.Module] | None = None
    compared_with: str = "the model without FSDP2"


def method(*names: str) -> tuple[str, ...]:
    return tuple(f"FSDPModule.{name}" for name in names)
