"""Drawn tensor subclasses with all-gather extensions: what they send, and what they make of it."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import BATCH
from pool import Ctx
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves, tree_map_only

STEP = 1 / 64
WIDTH = 6


@dataclass(frozen=True)
class Recipe:
    """sends: "coarse" (int8), "rest" (bfloat16) and "rows" (float32, one for each row), in the
    order in which they are sent. scaled: by the largest weight of all ranks, which is not sent but
    agreed on. wrapped: compute sees a subclass that holds what arrived, not a plain tensor."""

    sends: tuple[str, ...]
    scaled: bool
    wrapped: bool


@dataclass(frozen=True)
class ExtensionCase:
    """rows: of each weight. second: of the middle block, if it differs. frozen: the weights of
    these blocks. unshards: the user gathers the groups before each forward. evaluates: twice before
    each step."""

    recipe: Recipe
    rows: int = 8
    second: Recipe | None = None
    frozen: tuple[int, ...] = ()
    half: bool = False
    reshard: bool | None = None
    micro_steps: int = 1
    unshards: bool = False
    evaluates: bool = False


def on_inner(kind: type, func: Any, args: Any, kwargs: Any) -> Any:
    """The op on what `kind` stands for."""
    plain_args, plain_kwargs = tree_map_only(kind, kind.value, (args, kwargs or {}))  # type: ignore[attr-defined]
    return func(*plain_args, **plain_kwargs)


class Packed(Tensor):
    """What arrived, as a weight. Only `value` computes with it."""

    def __new__(cls, parts: dict[str, Tensor], shape: Any, dtype: torch.dtype) -> "Packed":
        device = parts["coarse"].device
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, parts: dict[str, Tensor], shape: Any, dtype: torch.dtype) -> None:
        self.part_names = tuple(parts)
        for name, part in parts.items():
            setattr(self, name, part)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.part_names), (tuple(self.shape), self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> "Packed":
        return Packed(inner, *context)

    def value(self) -> Tensor:
        parts = {name: getattr(self, name) for name in self.part_names}
        return unpacked(parts, self.dtype)[: len(self)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.alias.default, aten.as_strided.default):
            size = args[1] if func is aten.as_strided.default else args[0].shape
            parts = {name: getattr(args[0], name) for name in args[0].part_names}
            return Packed(parts, size, args[0].dtype)
        return on_inner(cls, func, args, kwargs)


def unpacked(parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    value = parts["coarse"].to(dtype) * STEP
    if "rest" in parts:
        value = value + parts["rest"].to(dtype)
    if "rows" in parts:
        value = value * parts["rows"].to(dtype)[:, None]
    return value * parts["scale"].to(dtype) if "scale" in parts else value


class Sends(Tensor):
    """A float32 weight that travels as its recipe says."""

    def __new__(cls, inner: Tensor, recipe: Recipe) -> "Sends":
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inner.shape, inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor, recipe: Recipe) -> None:
        self.inner, self.recipe = inner, recipe

    def __tensor_flatten__(self) -> tuple[list[str], Recipe]:
        return ["inner"], self.recipe

    @staticmethod
    def __tensor_unflatten__(inner: Any, recipe: Recipe, size: Any, stride: Any) -> "Sends":
        return Sends(inner["inner"], recipe)

    def value(self) -> Tensor:
        return self.inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        recipe = next(a.recipe for a in tree_leaves(args) if isinstance(a, cls))
        result = on_inner(cls, func, args, kwargs)
        if func._schema.is_mutable:
            return args[0]
        return tree_map_only(Tensor, lambda t: cls(t, recipe), result)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        whole = self.inner.new_zeros(-(-outer_size[0] // mesh.size()), *self.shape[1:])
        whole[: len(self.inner)] = self.inner
        coarse = (whole / STEP).round().clamp(-128, 127).to(torch.int8)
        parts = {
            "coarse": coarse,
            "rest": (whole - coarse * STEP).bfloat16(),
            "rows": 1 + whole.abs().sum(dim=1),
        }
        agreed: dict[str, Tensor] = {}
        if self.recipe.scaled:
            agreed["scale"] = 1 + whole.abs().max()
            dist.all_reduce(agreed["scale"], dist.ReduceOp.MAX, mesh.get_group())
        return tuple(parts[name] for name in self.recipe.sends), (agreed, tuple(outer_size))

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        agreed, size = metadata
        parts = dict(zip(self.recipe.sends, outputs, strict=True)) | agreed
        if self.recipe.wrapped:
            if out is None:
                return Packed(parts, size, param_dtype), outputs
            if agreed:
                out.scale = agreed["scale"]  # type: ignore[attr-defined]
            return None
        value = unpacked(parts, param_dtype)
        if out is None:
            return value, (value,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(value[: len(out)])
        return None


class Block(nn.Module):
    def __init__(self, rows: int, recipe: Recipe) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, rows), nn.Linear(rows, WIDTH)
        self.up.weight = nn.Parameter(Sends(self.up.weight.detach(), recipe))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def build(case: ExtensionCase, ctx: Ctx) -> nn.Module:
    torch.manual_seed(0)
    recipes = case.recipe, case.second or case.recipe, case.recipe
    model = nn.Sequential(*(Block(case.rows, recipe) for recipe in recipes)).to(ctx.device)
    for place in case.frozen:
        model[place].up.weight.requires_grad_(False)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if case.half else MixedPrecisionPolicy()
    for module in (*model, model):
        fully_shard(module, mesh=ctx.mesh, mp_policy=policy, reshard_after_forward=case.reshard)
    return model


def train(model: nn.Module, case: ExtensionCase, ctx: Ctx) -> list[Tensor]:
    seen: list[Tensor] = []
    optim = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for step in range(3):
        for _ in range(2 if case.evaluates else 0):
            with torch.no_grad():
                seen.append(model(torch.ones(BATCH, WIDTH, device=ctx.device)))
        for micro in range(case.micro_steps):
            model.set_requires_gradient_sync(micro == case.micro_steps - 1)  # type: ignore[operator]
            for block in model if case.unshards else ():  # type: ignore[attr-defined]
                block.unshard()
            torch.manual_seed(100 * step + 10 * micro + ctx.rank)
            loss = model(torch.randn(BATCH, WIDTH, device=ctx.device)).float().square().mean()
            loss.backward()
            seen.append(loss.detach())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        seen += [grad.to_local().clone() for grad in grads]
        optim.step()
        optim.zero_grad()
    return seen
