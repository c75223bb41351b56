"""Rows of the contract about parameters that are tensor subclasses with all-gather extensions."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from contract_loop import Loop, train_by
from contract_models import CHAIN, MLPS, plain, tensor_parallel
from contract_row import Row
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


# -- torchao -------------------------------------------------------------------------------------


def to_float8(model: nn.Module, ctx: Ctx, config: Any, left_out: tuple[str, ...]) -> None:
    """torchao's float8 training, emulated where the device has no float8 products."""
    from torchao.float8 import convert_to_float8_training

    emulated = replace(config, emulate=ctx.device.type != "cuda")
    convert_to_float8_training(
        model, config=emulated, module_filter_fn=lambda _, name: name not in left_out
    )


def sharded_float8(model: nn.Module, ctx: Ctx) -> nn.Module:
    """All but one, so that weights of both kinds travel together; sizes have to be even."""
    from torchao.float8 import Float8LinearConfig

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    to_float8(model, ctx, config, ("blocks.0.up", "head"))
    return plain(model, ctx)


def sharded_rowwise(model: nn.Module, ctx: Ctx) -> nn.Module:
    from torchao.float8 import Float8LinearConfig

    to_float8(model, ctx, Float8LinearConfig.from_recipe_name("rowwise"), ())
    return plain(model, ctx)


def advance_with_scales(loop: Loop, step: int) -> None:
    """After each step the scales of the next gathers, in one all-reduce, as torchtitan does it."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    loop.advance(step)
    precompute_float8_dynamic_scale_for_fsdp(loop.model)


def float8_tensor_parallel(model: nn.Module, ctx: Ctx) -> nn.Module:
    """DTensors of float8 weights: columns, then rows, inside each block."""
    from torchao.float8 import Float8LinearConfig

    to_float8(model, ctx, Float8LinearConfig(enable_fsdp_float8_all_gather=True), ("head",))
    return tensor_parallel(model, ctx)


class LoraLinear(nn.Module):
    """A frozen base of 4 bits per weight, and what is trained beside it."""

    def __init__(self, base: nn.Linear) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        super().__init__()
        columns, rows = base.in_features, base.out_features
        self.weight = nn.Parameter(to_nf4(base.weight.detach(), 32, 16), requires_grad=False)
        self.down = nn.Linear(columns, 4, bias=False, device=base.weight.device)
        self.up = nn.Linear(4, rows, bias=False, device=base.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return linear_nf4(x, self.weight) + self.up(self.down(x))


def sharded_qlora(model: nn.Module, ctx: Ctx) -> nn.Module:
    for block in model.blocks:
        block.up, block.down = LoraLinear(block.up), LoraLinear(block.down)
    return plain(model, ctx)


def sharded_quantized(model: nn.Module, ctx: Ctx) -> nn.Module:
    """torchao's training of int8 weights, with a scale for each row."""
    from torchao import quantize_
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training

    quantize_(model.blocks, int8_weight_only_quantized_training())
    return plain(model, ctx)


one_by_one = partial(torch.optim.SGD, lr=0.1, foreach=False)
MLPS_CASE = replace(MLPS, batch=text_batch)
wired = partial(Row, counts_bytes=True)
ROWS = (
    wired(
        AREA,
        "torchao: `Float8LinearConfig(enable_fsdp_float8_all_gather=True)`",
        sharded_float8,
        case=MLPS_CASE,
    ),
    wired(
        AREA,
        "torchao: the same with `precompute_float8_dynamic_scale_for_fsdp`",
        sharded_float8,
        case=MLPS_CASE,
        train=train_by(advance_with_scales),
    ),
    wired(AREA, "torchao: float8, recipe `rowwise`", sharded_rowwise, case=MLPS_CASE),
    wired(
        AREA,
        "torchao: float8 on a mesh with tensor parallel",
        float8_tensor_parallel,
        case=MLPS,
        ranks=4,
    ),
    wired(AREA, "torchao: QLoRA, a frozen `NF4Tensor` beside LoRA", sharded_qlora, case=MLPS_CASE),
    wired(
        AREA,
        "torchao: `int8_weight_only_quantized_training`",
        sharded_quantized,
        case=MLPS_CASE,
        train=train_by(Loop.advance, one_by_one),
    ),
    wired(
        AREA,
        "`fsdp_pre_all_gather`, `fsdp_post_all_gather`: int8 on the wire",
        sharded_int8,
        case=CHAIN,
        train=train_by(Loop.advance, one_by_one),
        check=casts_were_called,
    ),
)
