"""Programs made by hand: small fx graphs with marks, and a compact text to compare them by."""

import operator

import torch
from torch import fx
from torch.fx.node import map_arg

from graphshard.compiler.planning import run_passes
from graphshard.graph.marks import REDUCE_GRAD, UNSHARD
from graphshard.graph.program import Program, compute_nodes, is_unshard, set_anchor_group
from graphshard.pricing.liveness import memories, summed
from graphshard.schedule.plan import GroupInfo, ParamInfo

aten = torch.ops.aten
META = torch.device("meta")


class Sketch(fx.Graph):
    """A graph under construction. Every node gets a value, as AOTAutograd gives it one."""

    def input(self, name: str, *size: int) -> fx.Node:
        return self._with_value(self.placeholder(name), torch.empty(size or (4, 4), device=META))

    def anchor(self, group: int, name: str | None = None) -> fx.Node:
        """The input that names group `group`."""
        node = self.placeholder(name or f"a{group}")
        set_anchor_group(node, group)
        return self._with_value(node, torch.empty((), device=META))

    def op(self, target, *args, name=None, **kwargs) -> fx.Node:
        name = name or target.__name__.split(".")[0]
        node = self.create_node("call_function", target, args, kwargs, name=name)
        values = map_arg((args, kwargs), lambda n: n.meta["val"])
        return self._with_value(node, target(*values[0], **values[1]))

    def unshard(self, anchor: fx.Node, index: int = 0, name: str = "w") -> fx.Node:
        return self.op(UNSHARD, anchor, [4, 4], torch.float32, META, index, name=name)

    def reduce(self, grad: fx.Node, anchor: fx.Node, index: int = 0, name: str = "token"):
        return self.op(REDUCE_GRAD, grad, anchor, index, name=name)

    def relus(self, node: fx.Node, count: int) -> fx.Node:
        for _ in range(count):
            node = self.op(aten.relu.default, node)
        return node

    def done(self, *outputs) -> fx.GraphModule:
        self.output(outputs)
        return fx.GraphModule(torch.nn.Module(), self)

    def _with_value(self, node, value) -> fx.Node:
        node.meta["val"] = value
        return node


def group(id: int, *names: str, fqn: str | None = None, reshard: bool = True) -> GroupInfo:
    """A group of float32 parameters of 16 elements on two ranks."""
    fqn = f"layers.{id}" if fqn is None else fqn
    names = names or ("weight",)
    params = tuple(ParamInfo(f"{fqn}.{n}", (4, 4), "float32", True, 64) for n in names)
    return GroupInfo(id, fqn, params, 2, reshard, sum(p.gathered_bytes for p in params))


def program(*groups: GroupInfo, outputs: int = 1, **graphs: fx.GraphModule) -> Program:
    return Program("toy", groups or (group(0),), outputs, **graphs)


def layers(count: int = 2, reshard: bool = True) -> Program:
    """`x @ w.t()` then `relu`, `count` times, after the partition: marks in both directions."""
    forward, backward = Sketch(), Sketch()
    for graph in (forward, backward):
        graph.placeholder("run")
    x = forward.input("x")
    anchors = [forward.anchor(i) for i in range(count)]
    weights = [forward.unshard(a, name=f"w{i}") for i, a in enumerate(anchors)]
    saved = []
    for weight in weights:
        saved.append(x)
        turned = forward.op(aten.t.default, weight)
        x = forward.op(aten.relu.default, forward.op(aten.mm.default, x, turned))

    inputs = [backward.input(f"x{i}") for i in range(count)]
    again = [backward.anchor(i) for i in range(count)]
    grad = backward.input("tangents_1")
    weights = [backward.unshard(a, name=f"w{i}") for i, a in enumerate(again)]
    tokens = []
    for i in reversed(range(count)):
        turned = backward.op(aten.t.default, grad)
        weight_grad = backward.op(aten.mm.default, turned, inputs[i], name=f"dw{i}")
        tokens.insert(0, backward.reduce(weight_grad, again[i], name=f"token{i}"))
        grad = backward.op(aten.mm.default, grad, weights[i], name=f"dx{i}")
    return program(
        *(group(i, reshard=reshard) for i in range(count)),
        forward=forward.done(x, *saved, *anchors),
        backward=backward.done(grad, *tokens),
    )


def saving(*, shared: bool = False, gaps: bool = False, views: bool = False) -> Program:
    """Layer 0 makes `h`, which forward reads and backward too. shared: its transpose is saved as
    well. gaps: it is a part of what an op made. views: what is saved is a view that forward makes
    last, and of which backward makes one first."""
    forward, backward = Sketch(), Sketch()
    for graph in (forward, backward):
        graph.placeholder("run")
    x = forward.input("x")
    h = forward.op(aten.relu.default, x, name="whole" if gaps else "h")
    if gaps:
        h = forward.op(aten.slice.Tensor, h, 1, 0, 2, name="h")
    t = forward.op(aten.t.default, h, name="t")
    y = forward.op(aten.mm.default, t, x, name="y")
    if views:
        y = forward.op(aten.relu.default, y, name="last")
        h = forward.op(aten.t.default, forward.op(aten.t.default, h, name="back"), name="shown")
    saved = (h, t) if shared else (h,)
    inputs = [backward.input(n.name, *n.meta["val"].shape) for n in saved]
    grad = backward.input("tangents_1", *y.meta["val"].shape)
    if views:
        inputs = [backward.op(aten.t.default, inputs[0], name="early")]
    first = backward.op(aten.relu.default, grad, name="first")
    out = [backward.op(aten.add.Tensor, n, 1, name=f"d{n.name}") for n in inputs]
    return program(forward=forward.done(y, *saved), backward=backward.done(first, *out))


def two_calls() -> Program:
    """Module 0 runs twice, module 1 once."""
    graph = Sketch()
    x, a0, a1 = graph.input("x"), graph.anchor(0), graph.anchor(1)
    y = graph.op(aten.mm.default, x, graph.unshard(a0))
    y = graph.op(aten.mm.default, y, graph.unshard(a1))
    y = graph.op(aten.mm.default, y, graph.unshard(a0))
    return program(group(0), group(1), forward=graph.done(y))


def cast(graph: Sketch, node: fx.Node, dtype: torch.dtype = torch.bfloat16) -> fx.Node:
    return graph.op(aten._to_copy.default, node, dtype=dtype)


def split_in_two(graph: Sketch, weight: fx.Node) -> fx.Node:
    """`a * b` for `a, b = weight.split(2)`: one op that returns two views."""
    split = graph.op(aten.split.Tensor, weight, 2)
    first, second = (graph.op(operator.getitem, split, i, name="part") for i in range(2))
    return graph.op(aten.mul.Tensor, first, second)


def text(graph: fx.Graph) -> str:
    """One line a node, inputs left out."""
    return "\n".join(_line(node) for node in graph.nodes if node.op != "placeholder")


def _line(node: fx.Node) -> str:
    args = list(node.args)
    if node.op == "output":
        return f"return {_arg(args[0])}"
    if node.op == "call_method":
        named = [f"{key}={_arg(value)}" for key, value in node.kwargs.items()]
        return f"{node.name} = {args[0]}.{node.target}({', '.join([*map(_arg, args[1:]), *named])})"
    if node.target is operator.getitem:
        return f"{node.name} = {args[0]}[{args[1]}]"
    if is_unshard(node):
        args = [args[0], args[2], args[4]]
    return f"{node.name} = {node.target.__name__.split('.')[0]}({_join(args)})"


def _join(args) -> str:
    return ", ".join(map(_arg, args))


def _arg(arg) -> str:
    if isinstance(arg, list | tuple):
        return f"({_join(arg)})"
    return str(arg).removeprefix("torch.")


def texts(made: Program) -> list[str]:
    return [text(module.graph) for module in made.graphs]


def after(made: Program, *passes) -> Program:
    """`made` after `passes`, each followed by the verifier."""
    return run_passes(made, passes)


def live_bytes(graph, **how):
    """Bytes alive during each compute op. how: as of `memories`."""
    return summed(memories(graph, **how), len(compute_nodes(graph)))
