"""Captures a training step of a fake model as a joint graph: what a run would capture, and no more.

Nothing is compiled and nothing runs: Dynamo and AOTAutograd are left as soon as the joint graph is
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from graphshard.capture.dynamo import input_example
from graphshard.capture.install import install
from graphshard.capture.repeated.expand import expanded
from graphshard.capture.repeated.trace import RepeatedBlock, traced_by_blocks
from graphshard.codegen.lowering import lowering_of
from graphshard.compiler.partition import JointGraph, find_groups, joint_graph_of
from graphshard.errors import CaptureError, GraphshardError
from graphshard.offline.world import Fake, InputDim
from graphshard.options import Options

_aten = torch.ops.aten
_LOSSES = (
    *(_aten._log_softmax.default, _aten._log_softmax_backward_data.default),
    *(_aten.nll_loss_forward.default, _aten.nll_loss_backward.default),
)


@dataclass(frozen=True, slots=True)
class Captured:
    """A joint graph of a whole step. num_nodes: of the joint graph as it was captured.

    symbols: names of the symbols that the graph has for sizes of inputs.
    """

    joint_graph: JointGraph
    num_nodes: int
    symbols: dict[InputDim, str]


class _Done(Exception):
    """Carries what was captured out of the compiler."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured


def capture(
    fake: Fake,
    name: str,
    varying: Sequence[InputDim] = (),
    *,
    fused: bool = False,
    by_blocks: bool = True,
) -> Captured:
    """The forward and backward of one call of the model.

    varying: sizes that should become symbols, if the model allows it. fused: for prices of fused
    compute. by_blocks: what repeats is traced once, as in a run. Raises CaptureError (GS910) if the
    call cannot be captured as one graph.
    """
    leaves = fake.leaves
    for place in varying:
        torch._dynamo.maybe_mark_dynamic(leaves[place.leaf], place.dim)

    def only_capture(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        found, symbols = find_groups(gm), _symbols(gm, leaves)
        lowering = lowering_of(Options(compute="aten"), trains=True)
        if fused:
            lowering = replace(lowering, decompositions=_taken_apart())

        def trace(gm: fx.GraphModule, blocks: Sequence[RepeatedBlock]) -> Any:
            def stop(joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kw: Any) -> Any:
                joint = expanded(joint, blocks)
                count = len(joint.graph.nodes)
                joint_graph = joint_graph_of(name, joint, inputs, num_fwd_outputs, found, kw)
                raise _Done(Captured(joint_graph, count, symbols))

            compiler = aot_autograd(
                fw_compiler=_never,
                bw_compiler=_never,
                partition_fn=stop,
                decompositions=lowering.decompositions,
            )
            return compiler(gm, example_inputs)

        config = torch._functorch.config.patch(donated_buffer=False, enable_autograd_cache=False)
        with config, lowering.tracing():
            return traced_by_blocks(gm, lowering, trace) if by_blocks else trace(gm, ())

    only_capture.is_graphshard_backend = True  # type: ignore[attr-defined]
    install()
    torch._dynamo.reset()
    given: Any = Options(fallback="error")
    compiled = torch.compile(fake.model, backend=only_capture, fullgraph=True, options=given)
    try:
        with fake.mode:
            compiled(*fake.args, **fake.kwargs)
    except Exception as error:
        return _captured(error)
    finally:
        torch._dynamo.reset()
    raise CaptureError("GS910", "the model ran without being captured")


def _taken_apart() -> dict[Any, Callable[..., Any]]:
    """Of what Inductor takes apart, what it never stores the results of. Fused compute is priced
    from whole ops otherwise: the prices were compared with real runs so."""
    from graphshard.codegen import inductor  # takes a second to import

    known = inductor.decompositions({})
    return {op: known[op] for op in _LOSSES}


def _symbols(gm: fx.GraphModule, leaves: Sequence[Tensor]) -> dict[InputDim, str]:
    """The symbols that stand for one size of one input each."""
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    found = {}
    for placeholder in gm.graph.find_nodes(op="placeholder"):
        leaf = numbers.get(id(input_example(placeholder)))
        if leaf is None:
            continue
        for dim, size in enumerate(placeholder.meta["example_value"].shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found[InputDim(leaf, dim)] = str(size.node.expr)
    return found


def _never(gm: fx.GraphModule, inputs: Any) -> Any:
    raise CaptureError("GS910", "there is nothing to train: no output of the model has a gradient")


def _captured(error: Exception) -> Captured:
    """What `error` carries, or an error that says why there is none."""
    chain: list[BaseException] = [error]
    while (inner := getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__) is not None:
        chain.append(inner)
    for found in chain:
        if isinstance(found, _Done):
            return found.captured
        if isinstance(found, GraphshardError):
            raise found
    first = str(error).strip().split("\n\n", 1)[0]
    raise CaptureError("GS910", f"the step cannot be captured as one graph: {first}") from error
