"""What one CUDA device takes for the ops of language models, beside what the cost model says.

    python bench/rates.py --json OUT.json

Matrix products of Llama's linears (forward, both of backward), causal attention by head size, ops
that only move memory, one by one and fused by Inductor. Each runs for `--least-s` seconds, so that
clocks are those of a long step. "model" is the device's preset. A table on stdout, progress on
stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, product
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # Python puts bench/ there, whose modules have common names

from bench import rounds  # noqa: E402
from graphshard.cost.presets import preset_for  # noqa: E402
from graphshard.cost.roofline import Attention, Kernel, OpWork, Processor, op_us  # noqa: E402

TOKENS = (2048, 8192, 16384)
# Inputs x outputs of Llama's linears: 1 B; 8 B (attention, its keys, MLP, head); 70 B.
LINEARS = (
    (2048, 2048), (2048, 5632), (5632, 2048),
    (4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096), (4096, 128256),
    (8192, 8192), (8192, 28672), (28672, 8192),
)  # fmt: skip
HEADS, HEAD_DIMS, LENGTHS = 32, (64, 128), (2048, 8192)
SIZES = (2**24, 2**28)  # elements of a tensor
MOST_FLOPS = 5e12  # of a product: larger ones run at the rate of those


@dataclass(frozen=True, slots=True)
class Op:
    """kind: what is compared. run: issues one. work: what the cost model hears of it."""

    kind: str
    shape: str
    run: Callable[[], object]
    work: OpWork


@dataclass(frozen=True, slots=True)
class Rate:
    """us: the median, of one. flops and bytes: as the cost model counts them."""

    kind: str
    shape: str
    us: float
    model_us: float
    flops: float
    bytes: float


def ops(device: torch.device) -> Iterator[Op]:
    """Each is made when asked for, since all together do not fit."""
    for dtype in (torch.bfloat16, torch.float32):
        yield from products(device, dtype)
    yield from attentions(device)
    yield from moves(device)


def products(device: torch.device, dtype: torch.dtype) -> Iterator[Op]:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    name = str(dtype).removeprefix("torch.")
    tokens = TOKENS if dtype is torch.bfloat16 else TOKENS[1:2]
    for rows, (inputs, outputs) in product(tokens, LINEARS):
        flops = 2.0 * rows * inputs * outputs
        if flops > (MOST_FLOPS if dtype is torch.bfloat16 else MOST_FLOPS / 20):
            continue
        elements = rows * inputs + inputs * outputs + rows * outputs
        work = OpWork(flops, elements * dtype.itemsize, name)
        x, weight, grad = random(rows, inputs), random(outputs, inputs), random(rows, outputs)
        shape = f"{rows} x {inputs} x {outputs}"
        yield Op(f"product, {name}", shape, lambda x=x, w=weight: x @ w.T, work)
        yield Op(f"gradient of x, {name}", shape, lambda g=grad, w=weight: g @ w, work)
        yield Op(f"gradient of w, {name}", shape, lambda g=grad, x=x: g.T @ x, work)


def attentions(device: torch.device) -> Iterator[Op]:
    for dim, length in product(HEAD_DIMS, LENGTHS):
        size = (1, HEADS, length, dim)
        q, k, v, grad = (
            torch.randn(size, device=device, dtype=torch.bfloat16, requires_grad=index < 3)
            for index in range(4)
        )
        flops = 4.0 * HEADS * length * length * dim
        read = 2.0 * q.numel()

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()

        def backward(
            out: Tensor = out, leaves: tuple[Tensor, ...] = (q, k, v), grad: Tensor = grad
        ) -> object:
            return torch.autograd.grad(out, leaves, grad, retain_graph=True)

        shape = f"{HEADS} heads of {dim}, {length} tokens"
        kind = Attention(dim, length)
        work = OpWork(flops, 4 * read, "bfloat16", attention=kind)
        yield Op("attention", shape, forward, work)
        kind = Attention(dim, length, backward=True)
        work = OpWork(2.5 * flops, 8 * read, "bfloat16", attention=kind)
        yield Op("attention, backward", shape, backward, work)


def moves(device: torch.device) -> Iterator[Op]:
    """Ops that only move memory."""
    for size in SIZES:
        a, b = (torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2))
        rows = a.view(-1, 4096)
        weight = torch.ones(4096, device=device, dtype=torch.bfloat16)
        fused = torch.compile(lambda a, b: F.silu(a) * b)

        def parts(a: Tensor = a, b: Tensor = b) -> Tensor:
            return F.silu(a) * b

        def norm(rows: Tensor = rows, weight: Tensor = weight) -> Tensor:
            return F.rms_norm(rows, (4096,), weight)

        shape = f"{size:,} of bfloat16"
        yield Op("copy", shape, lambda a=a: a.clone(), OpWork(0, 4.0 * size))
        yield Op("a + b", shape, lambda a=a, b=b: a + b, OpWork(0, 6.0 * size))
        yield Op("silu(a) * b", shape, parts, OpWork(0, 10.0 * size, launches=2))
        yield Op(
            "silu(a) * b, fused",
            shape,
            lambda a=a, b=b, f=fused: f(a, b),
            OpWork(0, 6.0 * size, kernel=Kernel.FUSED),
        )
        yield Op("rms_norm", shape, norm, OpWork(0, 4.0 * size, kernel=Kernel.NORM))
        cast = OpWork(0, 6.0 * size, kernel=Kernel.CAST)
        yield Op("to float32", shape, lambda a=a: a.float(), cast)


def measured(op: Op, processor: Processor, least_s: float) -> Rate:
    op.run()  # compiles, and chooses a kernel
    timer = Timer("run()", globals={"run": op.run})
    us = timer.blocked_autorange(min_run_time=least_s).median * 1e6
    work = op.work
    return Rate(op.kind, op.shape, us, op_us(processor, work), work.flops, work.bytes)


def render(rates: list[Rate]) -> str:
    lines = [f"{'':<26}{'shape':<32}{'us':>10}{'model us':>10}{'model/us':>10}{'rate':>16}"]
    for rate in rates:
        speed = f"{rate.bytes / rate.us / 1e3:,.0f} GB/s"
        if rate.flops:
            speed = f"{rate.flops / rate.us / 1e6:,.0f} TFLOP/s"
        lines.append(
            f"{rate.kind:<26}{rate.shape:<32}{rate.us:>10.1f}{rate.model_us:>10.1f}"
            f"{rate.model_us / rate.us:>10.2f}{speed:>16}"
        )
    lines.append("")
    for kind, found in groupby(sorted(rates, key=lambda r: r.kind), key=lambda r: r.kind):
        ratios = [rate.model_us / rate.us for rate in found]
        lines.append(f"{kind:<26}model/us: median {median(ratios):.2f} of {len(ratios)}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Rates of ops on one CUDA device.")
    parser.add_argument("--least-s", type=float, default=0.2, help="each op runs for so long")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        rounds.say("error: no CUDA device")
        return 1
    device, name = torch.device("cuda"), torch.cuda.get_device_name()
    processor = preset_for(name).processor
    rates = []
    for op in ops(device):
        rates.append(measured(op, processor, args.least_s))
        rounds.say(f"{op.kind}, {op.shape}: {rates[-1].us:.1f} us")
    if args.json:
        found = {"device": name, "rates": [asdict(rate) for rate in rates]}
        rounds.write(args.json, {**rounds.header("rates.py"), **found})
    print(render(rates))
    return 0


if __name__ == "__main__":
    sys.exit(main())
