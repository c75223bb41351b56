"""The modules that a `fuzz_cases.Tree` stands for.

In: a tree. Out: a `Net`, whose modules have the paths that `fuzz_cases.paths` names.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from fuzz_cases import Part, Tree
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Conv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Centred(nn.Module):
    """The mean of a batch, and a running one in a buffer that eval mode uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean.to(x.dtype)
        if self.training:
            mean = x.mean((0, 1))
            with torch.no_grad():
                self.mean.lerp_(mean.float(), 0.1)
        return x - mean + self.bias


class Scaled(nn.Module):
    """A parameter, a buffer that is read and one that counts calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.register_buffer("shift", torch.randn(width))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.weight + self.shift.to(x.dtype)


class Tied(nn.Module):
    """One weight in two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Break(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


class Around(nn.Module):
    """One inner module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Residual(Around):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Twice(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.inner(x)))


class Checkpointed(Around):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Branches(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.ways = nn.ModuleDict(dict(zip("abc", inner, strict=False)))

    def forward(self, x: Tensor) -> Tensor:
        return sum(way(x) for way in self.ways.values())


class Choice(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.ways = nn.ModuleDict(dict(zip("abc", inner, strict=False)))
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.ways["abc"[self.chosen]](x)

    def idle(self) -> list[nn.Module]:
        return [way for name, way in self.ways.items() if name != "abc"[self.chosen]]


_LEAVES: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "norm": nn.LayerNorm,
    "rms": Norm,
    "conv": Conv,
    "scaled": Scaled,
    "tied": Tied,
    "dropout": lambda width: nn.Dropout(0.3),
    "centred": Centred,
    "break": lambda width: Break(),
}
_NESTS: dict[str, Callable[..., nn.Module]] = {
    "sequence": nn.Sequential,
    "residual": Residual,
    "twice": Twice,
    "branches": Branches,
    "choice": Choice,
    "checkpoint": Checkpointed,
    "wrapper": checkpoint_wrapper,
}


def module_of(part: Part, width: int) -> nn.Module:
    if part.kind in _NESTS:
        return _NESTS[part.kind](*(module_of(inner, width) for inner in part.parts))
    if part.kind == "mlp":
        up, down = nn.Linear(width, part.hidden), nn.Linear(part.hidden, width)
        return nn.Sequential(up, nn.GELU(), down)
    return _LEAVES[part.kind](width)


class Net(nn.Module):
    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.embed = nn.Embedding(tree.vocab, tree.width) if tree.vocab else None
        self.body = module_of(tree.body, tree.width)
        self.heads = nn.ModuleList(nn.Linear(tree.width, rows) for rows in tree.heads)
        self.scale = nn.Parameter(torch.randn(tree.width)) if tree.own else None
        self.named = tree.named
        if tree.tied:
            self.heads[0].weight = self.embed.weight

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Any:
        if self.embed is not None:
            x = self.embed(x)
        if extra is not None:
            x = x + F.silu(extra)
        x = self.body(x)
        if self.scale is not None:
            x = x * self.scale
        # AOTAutograd makes tangents contiguous, and a sum over another layout has another last bit.
        outputs = [head(x) for head in self.heads] or [x.contiguous()]
        if len(outputs) == 1:
            return outputs[0]
        if self.named:
            return {f"output {index}": output for index, output in enumerate(outputs)}
        return tuple(outputs)
