"""Rows of the contract about parameters that are tensor subclasses with all-gather extensions."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from contract_loop import Loop, train_by
from contract_models import CHAIN, MLPS, plain
from contract_row import Row
from contract_setups import compile_or_warn
from models import text_batch
from pool import Ctx
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

AREA = "Tensor subclasses"
SCALE = 1 / 64


@dataclass
class Casts:
    """What the extensions of one parameter sent and got."""

    sent: list[torch.dtype] = field(default_factory=list)
    received: list[torch.dtype] = field(default_factory=list)


class Int8Cast(Tensor):
    """A float32 weight that travels as int8, in steps of SCALE."""

    inner: Tensor
    casts: Casts

    @staticmethod
    def __new__(cls, inner: Tensor, casts: Casts) -> "Int8Cast":
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inner.shape, inner.stride(), inner.storage_offset(),
            dtype=inner.dtype, device=inner.device,
        )  # fmt: skip

    def __init__(self, inner: Tensor, casts: Casts) -> None:
        self.inner, self.casts = inner, casts

    def __tensor_flatten__(self) -> tuple[list[str], Casts]:
        return ["inner"], self.casts

    @staticmethod
    def __tensor_unflatten__(inner: Any, casts: Casts, size: Any, stride: Any) -> "Int8Cast":
        return Int8Cast(inner["inner"], casts)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        """Ops run on what is inside; their results stay of this kind."""
        casts = next(a.casts for a in tree_leaves(args) if isinstance(a, cls))
        plain_args, plain_kwargs = tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        result = func(*plain_args, **plain_kwargs)
        if func._schema.is_mutable:
            return args[0]
        return tree_map_only(Tensor, lambda t: cls(t, casts), result)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Casts]:
        rows = -(-outer_size[0] // mesh.size())  # as many as any rank has
        sent = self.inner.new_zeros(rows, *self.shape[1:], dtype=torch.int8)
        sent[: len(self.inner)] = (self.inner / SCALE).round().clamp(-128, 127)
        self.casts.sent.append(sent.dtype)
        return (sent,), self.casts

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Casts,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        (received,) = all_gather_outputs
        metadata.received.append(received.dtype)
        value = received.to(param_dtype) * SCALE
        if out is None:
            return value, (value,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(value[: len(out)])
        return None


def sharded_int8(model: nn.Module, ctx: Ctx) -> nn.Module:
    """A weight of each block, and the embedding in the root."""
    for module in (*(block.up for block in model.blocks), model.embed):
        module.weight = nn.Parameter(Int8Cast(module.weight.detach(), Casts()))
    return plain(model, ctx)


def casts_were_called(model: nn.Module, compiled: bool) -> None:
    for name, param in model.named_parameters():
        inner = param.to_local()
        if isinstance(inner, Int8Cast):
            assert inner.casts.sent, name
            assert set(inner.casts.sent) == set(inner.casts.received) == {torch.int8}, name
            assert len(inner.casts.sent) == len(inner.casts.received), name


def sharded_float8(model: nn.Module, ctx: Ctx) -> nn.Module:
    """torchao's float8 training, emulated where the device has no float8 products."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulate = ctx.device.type != "cuda"
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=emulate)
    convert_to_float8_training(model, config=config)
    return plain(model, ctx)


ROWS = (
    Row(
        AREA,
        "torchao: `Float8LinearConfig(enable_fsdp_float8_all_gather=True)`",
        sharded_float8,
        case=replace(MLPS, batch=text_batch),
        compile=compile_or_warn,
        outside=4,
        falls_back="it holds a tensor subclass with all-gather extensions",
        needs_package="torchao",
    ),
    Row(
        AREA,
        "`fsdp_pre_all_gather`, `fsdp_post_all_gather`: int8 on the wire",
        sharded_int8,
        case=CHAIN,
        compile=compile_or_warn,
        train=train_by(Loop.advance, partial(torch.optim.SGD, lr=0.1, foreach=False)),
        check=casts_were_called,
        outside=3,
        falls_back="it holds a tensor subclass with all-gather extensions",
    ),
)
