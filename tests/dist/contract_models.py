"""Small models, and ways to shard and to train, that single rows of the contract need."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from models import (
    BATCH,
    DEPTH,
    DIM,
    LENGTH,
    VOCAB,
    Batch,
    Case,
    Llama,
    RMSNorm,
    shard_blocks,
    text_batch,
)
from models import token_loss as cross_entropy
from parity import Trace, local, reseed
from pool import Ctx, device_type
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as tp


def plain(model: nn.Module, ctx: Ctx, **kwargs: Any) -> nn.Module:
    return shard_blocks(("blocks",), model, kwargs.pop("mesh", ctx.mesh), **kwargs)


ON_GPU = device_type() == "cuda"


def mesh_of(ctx: Ctx, shape: tuple[int, ...], *names: str) -> DeviceMesh:
    """The same object for the same request: FSDP2 compares meshes of parameters by identity."""
    return _mesh(ctx.device.type, shape, names)


@cache
def _mesh(device: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=names)


# -- what most rows train ------------------------------------------------------------------------


class GatedBlock(nn.Module):
    """A block of `Llama` without its attention."""

    def __init__(self) -> None:
        super().__init__()
        hidden = 3 * DIM - 1  # 95 rows
        self.norm1 = RMSNorm(DIM)
        self.gate, self.up = nn.Linear(DIM, hidden, bias=False), nn.Linear(DIM, hidden, bias=False)
        self.down = nn.Linear(hidden, DIM, bias=False)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        h = self.norm1(x) + shift
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Gated(nn.Module):
    """Rows are about groups, whatever their blocks compute: these are soon compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(GatedBlock() for _ in range(DEPTH))
        self.norm = RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("shift", torch.linspace(-1, 1, 4 * LENGTH)[:, None], persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        shift = self.shift[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, shift)
        return self.head(self.norm(x))


GATED = Case("gated", Gated, plain, text_batch, cross_entropy)


# -- several devices per replica -----------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Mlps(nn.Module):
    """Embedding, three MLP blocks, norm and head; every dimension is even."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * VOCAB, DIM)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch_per_pair(step: int, rank: int, device: torch.device) -> Batch:
    """Ranks 0 and 1 are one replica, 2 and 3 another."""
    return text_batch(step, rank // 2, device)


def loss_of_local(model: nn.Module, batch: Batch) -> Tensor:
    tokens, target = batch
    output = model(tokens)
    output = output.to_local() if isinstance(output, DTensor) else output
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


MLPS = Case("mlps", Mlps, plain, batch_per_pair, loss_of_local)


def tensor_parallel(
    model: nn.Module,
    ctx: Ctx,
    *,
    local_output: bool = True,
    shape: tuple[int, int] = (2, 2),
    **kwargs: Any,
) -> nn.Module:
    """Columns, then rows, inside each block; FSDP2 over the other dim of the mesh."""
    mesh = mesh_of(ctx, shape, "dp", "tp")
    head = tp.ColwiseParallel(output_layouts=Replicate(), use_local_output=local_output)
    tp.parallelize_module(model, mesh["tp"], {"head": head})
    for block in model.blocks:
        plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
        tp.parallelize_module(block, mesh["tp"], plan)
    return plain(model, ctx, mesh=mesh["dp"], **kwargs)


def sequence_parallel(
    model: nn.Module, ctx: Ctx, *, data: tuple[int, ...] = (2,), **kwargs: Any
) -> nn.Module:
    """Norms on a part of the sequence each: their gradients are partial over the tp ranks. data:
    the mesh's dims for FSDP2, with replicas first."""
    dims = ("replicate", "shard")[-len(data) :]
    mesh = mesh_of(ctx, (*data, 2), *dims, "tp")
    rows = tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    head = tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    plan = {"embed": rows, "norm": tp.SequenceParallel(), "head": head}
    tp.parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        plan = {
            "norm": tp.SequenceParallel(),
            "up": tp.ColwiseParallel(input_layouts=Shard(1)),
            "down": tp.RowwiseParallel(output_layouts=Shard(1)),
        }
        tp.parallelize_module(block, mesh["tp"], plan)
    return plain(model, ctx, mesh=mesh[dims], **kwargs)


class Tower(nn.Module):
    """MLP blocks on a DTensor input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def distributed_batch(step: int, rank: int, device: torch.device) -> Batch:
    g = torch.Generator().manual_seed(step)
    return (torch.randn(2 * BATCH * LENGTH, DIM, generator=g).to(device),)


def loss_on_mesh(model: nn.Module, batch: Batch) -> Tensor:
    mesh, placements = model.inputs  # type: ignore[misc]
    output = model(distribute_tensor(batch[0], mesh, placements))
    return output.float().square().mean().full_tensor()


TOWER = Case("tower", Tower, plain, distributed_batch, loss_on_mesh)


def on_full_mesh(
    model: nn.Module,
    ctx: Ctx,
    *,
    names: tuple[str, ...],
    inputs: tuple[Any, ...],
    shard: Any = None,
    replicate: Any = None,
) -> nn.Module:
    """`dp_mesh_dims`: parameters are DTensors on a mesh of all dims, split over "tp" if present."""
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = mesh_of(ctx, (2, 2) if len(names) == 2 else (ctx.world_size,), *names)
    for name, module in model.named_modules():
        for key, param in list(module.named_parameters(recurse=False)):
            placements: list[Any] = [Replicate()] * mesh.ndim
            if "tp" in names and name.endswith("up"):
                placements[1] = Shard(0)
            if "tp" in names and name.endswith("down") and key == "weight":
                placements[1] = Shard(1)
            split = distribute_tensor(param.data, mesh, placements)
            module.register_parameter(key, nn.Parameter(split))
    dims = DataParallelMeshDims(shard=shard, replicate=replicate)
    plain(model, ctx, mesh=mesh, dp_mesh_dims=dims)
    model.inputs = (mesh, inputs)
    return model


# -- parameters ----------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """One of each of torch's recurrent modules, each with a projection of both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        kinds = (nn.LSTM, nn.GRU, nn.RNN)
        # On a GPU dropout between layers stays eager: cuDNN's random numbers are not torch's.
        both = {"bidirectional": True, "batch_first": True, "dropout": 0.1 * (not ON_GPU)}
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"cell": kind(DIM, DIM, 2, **both)}) for kind in kinds
        )
        self.head = nn.Linear(2 * DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            output, _ = block["cell"](x)
            x = x + output[..., :DIM]
        return self.head(output)


def shard_cells(model: nn.Module, ctx: Ctx) -> nn.Module:
    for block in model.blocks:
        fully_shard(block["cell"], mesh=ctx.mesh)
    return fully_shard(model, mesh=ctx.mesh)


RECURRENT = Case("recurrent", Recurrent, plain, text_batch, cross_entropy)


class Adapter(nn.Module):
    """LoRA: a frozen linear layer and a trainable product of two thin ones."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def lora() -> nn.Module:
    model = Llama()
    model.requires_grad_(False)
    for block in model.blocks:
        block.gate, block.down = Adapter(block.gate), Adapter(block.down)
        block.attention.q = Adapter(block.attention.q)
    return model


class Branches(nn.Module):
    """Blocks that may be left out, and a block that may run twice, as attributes say."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Mlp() for _ in range(3))
        self.first, self.second = nn.Linear(DIM, VOCAB), nn.Linear(DIM, VOCAB)
        self.skipped, self.twice, self.both = -1, -1, False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            if index == self.skipped:
                continue
            x = block(x)
            if index == self.twice:
                x = block(x)
        y = self.first(x)
        return y + self.second(x) if self.both else y


BRANCHES = Case("branches", Branches, plain, text_batch, cross_entropy)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (scale,) = ctx.saved_tensors
        return grad * scale, None


class Scaled(nn.Module):
    """Its scale requires grad, and the function that uses it gives it none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Mlp(), nn.Parameter(torch.linspace(0.5, 1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return _Scaled.apply(self.inner(x), self.scale)  # type: ignore[no-any-return, no-untyped-call]


def scaled() -> nn.Module:
    model = Branches()
    model.blocks = nn.ModuleList(Scaled() for _ in range(3))
    return model


def heads_together(model: nn.Module, ctx: Ctx) -> nn.Module:
    fully_shard([model.first, model.second], mesh=ctx.mesh)
    return plain(model, ctx)


def call(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


class Chain(nn.Module):
    """Embedding, MLP blocks and head, not all even. visit: how a block is called."""

    def __init__(self, visit: Any = call, wrap: Any = None, depth: int = 2) -> None:
        super().__init__()
        self.visit = visit
        self.embed = nn.Embedding(VOCAB, DIM)
        blocks = [Mlp() for _ in range(depth)]
        self.blocks = nn.ModuleList(b if wrap is None else wrap(b) for b in blocks)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.visit(block, x)
        return self.head(x)


CHAIN = Case("chain", Chain, plain, text_batch, cross_entropy)


class Breaking(nn.Module):
    """A graph break in one block, or between blocks."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(
            BreakingMlp() if where == "inside" and i == 1 else Mlp() for i in range(3)
        )
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            if self.where == "between":
                torch._dynamo.graph_break()
        return self.head(x)


class BreakingMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        torch._dynamo.graph_break()
        return x + self.down(F.gelu(y))


def breaking(where: str) -> Case:
    return Case(f"break {where}", partial(Breaking, where), plain, text_batch, cross_entropy)


# -- batches and training ------------------------------------------------------------------------


def ragged(step: int, rank: int, device: torch.device) -> Batch:
    """A length that differs by step and by rank."""
    tokens, target = text_batch(step, rank, device)
    length = 6 + (2 * step + 3 * rank) % 5
    return tokens[:, :length], target[:, :length]


RAGGED = replace(GATED, batch=ragged, ragged=True)


def train_scaled(
    model: nn.Module,
    case: Case,
    ctx: Ctx,
    steps: int,
    run: Any = None,
    first_step: int = 0,
    micro_steps: int = 1,
) -> Trace:
    """With a GradScaler whose first scale overflows float16, so that it skips a step."""
    scaler = torch.amp.GradScaler(ctx.device.type, init_scale=2.0**22, growth_interval=2)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = Trace()
    for step in range(first_step, first_step + steps):
        reseed(ctx, step)
        loss = run(case.batch(step, ctx.rank, ctx.device))
        scaler.scale(loss).backward()
        trace.losses.append(loss.detach().clone())
        grads = {n: local(p.grad) for n, p in model.named_parameters()}
        # What is not a number compares unequal to itself: any one value stands for it.
        trace.grads.append({n: g.nan_to_num(nan=-1.0) for n, g in grads.items()})
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
    trace.params.update((n, local(p)) for n, p in model.named_parameters())
    trace.buffers["scale"] = torch.tensor(scaler.get_scale())
    return trace
