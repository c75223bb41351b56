"""Rows of the contract about a model's life: initialisation, state dicts, checkpoints, and going
from compiled to eager and to other rank counts.
"""

import copy
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contract_loop import Loop, is_compiled, train_by
from contract_models import CHAIN, cross_entropy, mesh_of, plain
from contract_row import Row
from contract_setups import STRICT, compile_whole
from models import Batch
from parity import local
from pool import Ctx
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from graphshard.capture.root_state import root_states_under

adam = partial(torch.optim.Adam, lr=1e-2)

# -- initialisation ------------------------------------------------------------------------------


def on_meta(model: nn.Module, ctx: Ctx) -> nn.Module:
    """Sharded before there is any memory."""
    with torch.device("meta"):
        return plain(CHAIN.build(), ctx)


def from_meta(model: nn.Module, ctx: Ctx) -> nn.Module:
    """And filled before it is compiled."""
    model = on_meta(model, ctx)
    fill(model, ctx.device, seed=0)
    return model


def fill(model: nn.Module, device: torch.device, seed: int) -> None:
    model.to_empty(device=device)
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def filled_again(loop: Loop, step: int) -> None:
    if step == 0 or step % 2:
        fill(loop.model, loop.ctx.device, seed=step)
        loop.renew_optim()
    loop.advance(step)


# -- state dicts ---------------------------------------------------------------------------------


def other_values(model: nn.Module) -> dict[str, Tensor]:
    """DTensors that are laid out as the model's are."""
    return {name: value.detach() * 0.5 for name, value in model.state_dict().items()}


def loaded_first(model: nn.Module, ctx: Ctx, assign: bool) -> nn.Module:
    plain(model, ctx)
    model.load_state_dict(other_values(model), assign=assign)
    return model


def loaded_again(loop: Loop, step: int, assign: bool) -> None:
    if step % 2:
        loop.model.load_state_dict(other_values(loop.model), assign=assign)
        loop.renew_optim()
    loop.advance(step)


def layout(state: dict[str, Any]) -> list[Any]:
    return [(name, value.shape, value.placements, value.dtype) for name, value in state.items()]


def remembered(model: nn.Module, ctx: Ctx) -> nn.Module:
    """Notes its keys before it is compiled."""
    plain(model, ctx)
    model.keys_then = layout(model.state_dict())
    return model


def same_keys(loop: Loop, step: int) -> None:
    for _ in range(2):
        assert layout(loop.model.state_dict()) == loop.model.keys_then
        assert layout(get_model_state_dict(loop.model)) == loop.model.keys_then
        loop.advance(step)


def compile_wrapped(model: nn.Module) -> None:
    """The wrapper that `torch.compile(model)` makes, which is no submodule of the model."""
    wrapper = torch.compile(model, backend="graphshard", fullgraph=True, options=STRICT)
    model.wrapper = (wrapper,)


def loss_of_wrapper(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(as_called(model), batch)


def as_called(model: nn.Module) -> nn.Module:
    return getattr(model, "wrapper", (model,))[0]


def stripped_keys(loop: Loop, step: int) -> None:
    """The helpers know of no wrapper, whichever way a state goes."""
    net = as_called(loop.model)
    if net is not loop.model:
        assert all(name.startswith("_orig_mod.") for name in net.state_dict())
    state = get_model_state_dict(net)
    assert layout(state) == layout(loop.model.state_dict())
    halved = {name: value.detach() * 0.5 for name, value in state.items()}
    set_model_state_dict(net, halved)
    moments = get_optimizer_state_dict(net, loop.optim)
    assert list(moments["state"]) == list(state)
    set_optimizer_state_dict(net, loop.optim, moments)
    loop.advance(step)


# -- back to where a step began ------------------------------------------------------------------

Take = Callable[[Loop], Callable[[], None]]


def rewound(loop: Loop, step: int, take: Take) -> None:
    """A step, back to what was taken before it, and the same step again."""
    if step % 4 != 1:
        loop.advance(step)
        return
    give_back = take(loop)
    loop.advance(step)
    after = [local(p) for p in loop.model.parameters()]
    give_back()
    assert not torch.equal(after[0], local(next(loop.model.parameters())))
    loop.advance(step)
    assert torch.equal(*loop.trace.losses[-2:])
    for expected, param in zip(after, loop.model.parameters(), strict=True):
        assert torch.equal(expected, local(param))


def take_sharded(loop: Loop) -> Callable[[], None]:
    state = copy.deepcopy(get_state_dict(loop.model, loop.optim))

    def give_back() -> None:
        names = ("model_state_dict", "optim_state_dict")
        set_state_dict(loop.model, loop.optim, **dict(zip(names, state, strict=True)))

    return give_back


def take_full(loop: Loop, *, cpu_offload: bool = False, broadcast: bool = False) -> Any:
    """broadcast: only rank 0 has something to give."""
    model, optim, is_source = loop.model, loop.optim, loop.ctx.rank == 0
    taking = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    weights = copy.deepcopy(get_model_state_dict(model, options=taking))
    moments = copy.deepcopy(get_optimizer_state_dict(model, optim, options=taking))
    assert not any(isinstance(value, DTensor) for value in weights.values())
    if cpu_offload:  # the helpers leave it to rank 0
        assert bool(weights) == bool(moments) == is_source
    if broadcast and not is_source:
        weights, moments = {}, {}
    giving = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)

    def give_back() -> None:
        set_model_state_dict(model, weights, options=giving)
        set_optimizer_state_dict(model, optim, moments, options=giving)

    return give_back


@contextmanager
def shared_folder(ctx: Ctx) -> Iterator[str]:
    made = [tempfile.mkdtemp(prefix="graphshard-dcp-") if ctx.rank == 0 else ""]
    dist.broadcast_object_list(made)
    try:
        yield made[0]
        dist.barrier()
    finally:
        if ctx.rank == 0:
            shutil.rmtree(made[0])


def carry_over(ctx: Ctx, source: Any, target: Any) -> None:
    """Model and optimizer through a checkpoint of DCP; each a pair."""
    with shared_folder(ctx) as folder:
        weights, moments = get_state_dict(*source)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder)
        weights, moments = get_state_dict(*target)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=folder)
        set_state_dict(*target, model_state_dict=weights, optim_state_dict=moments)


def checkpointed(loop: Loop, step: int) -> None:
    """A fresh eager model resumes from the compiled one's checkpoint, and the other way round."""
    if step % 4 != 1:
        loop.advance(step)
        return
    torch.manual_seed(1)
    twin = plain(loop.case.build().to(loop.ctx.device), loop.ctx)
    twin_optim = adam(twin.parameters())
    ours, theirs = (loop.model, loop.optim), (twin, twin_optim)
    loop.advance(step)
    carry_over(loop.ctx, ours, theirs)
    loss = loop.case.loss(twin, loop.batch(100 + step))
    loss.backward()
    twin_optim.step()
    loop.note("loss of the eager model", loss)
    carry_over(loop.ctx, theirs, ours)
    loop.advance(step)


def take_checkpoint(loop: Loop) -> Callable[[], None]:
    """Through the file system, into the same model."""
    folder = [tempfile.mkdtemp(prefix="graphshard-dcp-") if loop.ctx.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    weights, moments = get_state_dict(loop.model, loop.optim)
    dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder[0])

    def give_back() -> None:
        weights, moments = get_state_dict(loop.model, loop.optim)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=folder[0])
        set_state_dict(loop.model, loop.optim, model_state_dict=weights, optim_state_dict=moments)
        dist.barrier()
        if loop.ctx.rank == 0:
            shutil.rmtree(folder[0])

    return give_back


# -- other forms and other rank counts -----------------------------------------------------------


def now_and_then_eager(loop: Loop, step: int) -> None:
    eager = step % 3 == 1
    before = captured_forwards(loop.model)
    with torch.compiler.set_stance("force_eager" if eager else "default"):
        loop.advance(step)
    ran_captured = captured_forwards(loop.model) > before
    assert ran_captured == (is_compiled(loop.model) and not eager)


def captured_forwards(model: nn.Module) -> int:
    return sum(live.counters.forwards for r in root_states_under(model) for live in r.groups)


def with_pairs(model: nn.Module, ctx: Ctx) -> nn.Module:
    """A second model, sharded over two ranks, twice: ranks 2 and 3 do what 0 and 1 do."""
    plain(model, ctx)
    torch.manual_seed(1)
    pair = CHAIN.build().to(ctx.device)
    plain(pair, ctx, mesh=mesh_of(ctx, (2, 2), "copies", "pair")["pair"])
    model.pair = (pair, adam(pair.parameters()))
    return model


def compile_both(model: nn.Module) -> None:
    compile_whole(model)
    compile_whole(model.pair[0])


def resharded(loop: Loop, step: int) -> None:
    """A step on two ranks, one on four, each from the other's checkpoint."""
    if step % 4 != 1:
        loop.advance(step)
        return
    ctx, (pair, optim) = loop.ctx, loop.model.pair
    loss = loop.case.loss(pair, loop.case.batch(step, ctx.rank % 2, ctx.device))
    loss.backward()
    optim.step()
    optim.zero_grad()
    loop.note("loss on two ranks", loss)
    carry_over(ctx, loop.model.pair, (loop.model, loop.optim))
    theirs = [p.full_tensor() for p in pair.parameters()]
    for ours, value in zip(loop.model.parameters(), theirs, strict=True):
        assert torch.equal(ours.full_tensor(), value)
    loop.advance(step)
    carry_over(ctx, (loop.model, loop.optim), loop.model.pair)


AREA = "Life cycle"


def _row(name: str, body: Any, shard: Any = plain, **kwargs: Any) -> Row:
    make = kwargs.pop("make", adam)
    return Row(AREA, name, shard, case=CHAIN, train=train_by(body, make), **kwargs)


def _rewinding(name: str, take: Take) -> Row:
    return _row(name, partial(rewound, take=take))


ROWS = (
    _row("meta device, `to_empty`, `reset_parameters`", Loop.advance, from_meta),
    _row("compiled on meta; `to_empty` then, and again between steps", filled_again, on_meta),
    _row(
        "`load_state_dict` with DTensors, before compiling and between steps",
        partial(loaded_again, assign=False),
        partial(loaded_first, assign=False),
    ),
    _row(
        "`load_state_dict(assign=True)`, before compiling and between steps",
        partial(loaded_again, assign=True),
        partial(loaded_first, assign=True),
    ),
    _row("keys, shapes and placements of `model.compile`", same_keys, remembered),
    replace(
        _row("`torch.compile(model)`: the helpers strip `_orig_mod.`", stripped_keys),
        case=replace(CHAIN, loss=loss_of_wrapper),
        compile=compile_wrapped,
    ),
    _rewinding("`get_state_dict`, `set_state_dict`", take_sharded),
    _rewinding("`full_state_dict`: model and optimizer", take_full),
    _rewinding(
        "`full_state_dict`, `cpu_offload`, `broadcast_from_rank0`: model and optimizer",
        partial(take_full, cpu_offload=True, broadcast=True),
    ),
    _rewinding("DCP `save` and `load`", take_checkpoint),
    _row("DCP: compiled -> eager -> compiled", checkpointed),
    _row("compiled, eager, compiled (`torch.compiler.set_stance`)", now_and_then_eager),
    _row("DCP: 2 -> 4 -> 2 ranks", resharded, with_pairs, compile=compile_both, ranks=4),
)
