"""Launches of bench/compile_time.py to tables: seconds, what was compiled, phases, targets.

In: pairs of a cold and a warm launch, by round, way and number of blocks. Out: rows, comparisons
with the targets, text. A launch that took too long counts as its limit: a ratio to it is at least
the true one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.compile_launch import Measured
from bench.interval import Comparison, compare, sign_interval, verdict
from bench.ways import Way

PEER = "simple_fsdp"
GROWTH, PER_BLOCK_S, OF_PEER = 2.0, 0.4, 1 / 3  # targets: at most


@dataclass(frozen=True, slots=True)
class Launch:
    """measured: None if it took too long. wall_s: of the whole process."""

    measured: Measured | None
    wall_s: float
    compiler_runs: int
    limit_s: float

    @property
    def first_s(self) -> float:
        return self.limit_s if self.measured is None else self.measured.steps[0].seconds

    def text(self) -> str:
        return f"{'> ' if self.measured is None else ''}{self.first_s:.1f}"


@dataclass(frozen=True, slots=True)
class Pair:
    cold: Launch
    warm: Launch


Rounds = list[dict[str, dict[int, Pair]]]


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over launches. late: of how many cold launches only the limit is known.

    first_s, warm_s: to the first step; wall_s: of the whole cold process. misses: of Inductor's
    cache. lengths_s, length_graphs: of the steps of other lengths, and graphs captured in them.
    phases_s adds up to first_s, up to medians.
    """

    way: str
    title: str
    num_blocks: int
    launches: int
    late: int
    first_s: float
    wall_s: float
    warm_s: float
    graphs: int
    breaks: int
    misses: int
    compiler_runs: int
    warm_misses: int
    warm_compiler_runs: int
    lengths_s: tuple[float, ...]
    length_graphs: tuple[int, ...]
    phases_s: dict[str, float]


def phases_s(measured: Measured) -> dict[str, float]:
    """The first step in parts that do not overlap, from Dynamo's timers, which do.

    A part can be below zero where Inductor compiles in several threads at a time.
    """
    known = measured.phases_s.get
    compiled = known("_compile.compile_inner", 0.0)
    guards = known("build_guards", 0.0)
    aot = known("create_aot_dispatcher_function", 0.0)
    backward = known("backward._backward_impl", 0.0)  # some compile in the first backward
    joint = known("aot_trace_joint_graph", 0.0) + known("aot_collect_metadata", 0.0)
    inductor = known("compile_fx_inner", 0.0)
    return {
        "Dynamo": compiled - guards - aot,
        "guards": guards,
        "joint trace": joint,
        "after trace": aot + backward - joint - inductor,
        "Inductor": inductor,
        "other": measured.steps[0].seconds - compiled - backward,
    }


def pairs_of(rounds: Rounds, way: str) -> dict[int, list[Pair]]:
    """By number of blocks, in the order of the rounds."""
    sizes = {n: None for each in rounds for n in each.get(way, {})}
    return {n: [each[way][n] for each in rounds if n in each.get(way, {})] for n in sizes}


def make_rows(ways: Sequence[Way], rounds: Rounds) -> list[Row]:
    return [
        make_row(way, num_blocks, pairs)
        for way in ways
        for num_blocks, pairs in pairs_of(rounds, way.name).items()
    ]


def make_row(way: Way, num_blocks: int, pairs: Sequence[Pair]) -> Row:
    cold = [pair.cold.measured for pair in pairs if pair.cold.measured is not None]
    warm = [pair.warm.measured for pair in pairs if pair.warm.measured is not None]

    def most(values: list[int]) -> int:
        return max(values, default=0)

    parts = [phases_s(measured) for measured in cold]
    others = range(1, len(cold[0].steps)) if cold else range(0)
    return Row(
        way.name, way.title, num_blocks, len(pairs), len(pairs) - len(cold),
        first_s=median(pair.cold.first_s for pair in pairs),
        wall_s=median(pair.cold.wall_s for pair in pairs),
        warm_s=median(pair.warm.first_s for pair in pairs),
        graphs=most([m.steps[0].graphs for m in cold]),
        breaks=most([m.breaks for m in cold]),
        misses=most([m.steps[0].misses for m in cold]),
        compiler_runs=most([pair.cold.compiler_runs for pair in pairs]),
        warm_misses=most([sum(step.misses for step in m.steps) for m in warm]),
        warm_compiler_runs=most([pair.warm.compiler_runs for pair in pairs if warm]),
        lengths_s=tuple(median(m.steps[i].seconds for m in cold) for i in others),
        length_graphs=tuple(most([m.steps[i].graphs for m in cold]) for i in others),
        phases_s={name: median(p[name] for p in parts) for name in parts[0]} if parts else {},
    )  # fmt: skip


def comparisons(ways: Sequence[Way], rounds: Rounds) -> list[Comparison]:
    """The targets of graphshard's ways, on cold launches; the other ways' growth, for scale."""
    found: list[Comparison] = []
    for way in ways:
        sizes = [n for each in rounds for n in each.get(way.name, {})]
        few, many = min(sizes, default=0), max(sizes, default=0)
        if few == many:
            continue
        found += growth(way.name, few, many, rounds)
        if way.compiler == "graphshard" and any(PEER in each for each in rounds):
            pairs = cold_s(rounds, (way.name, many), (PEER, many))
            found.append(compare(f"{way.name}, {many} blocks", PEER, OF_PEER, pairs))
    return found


def growth(way: str, few: int, many: int, rounds: Rounds) -> list[Comparison]:
    pairs = cold_s(rounds, (way, many), (way, few))
    each = [((large - small) / (many - few), 1.0) for large, small in pairs]
    return [
        compare(f"{way}, {many} blocks", f"{few} blocks", GROWTH, pairs),
        compare(f"{way}, a block beyond {few}", "1 s", PER_BLOCK_S, each),
    ]


def cold_s(
    rounds: Rounds, ours: tuple[str, int], theirs: tuple[str, int]
) -> list[tuple[float, float]]:
    """Seconds to the first step of two (way, number of blocks), of each round that has both."""

    def first_s(each: Mapping[str, Mapping[int, Pair]], of: tuple[str, int]) -> float:
        return each[of[0]][of[1]].cold.first_s

    return [
        (first_s(each, ours), first_s(each, theirs))
        for each in rounds
        if all(num_blocks in each.get(way, {}) for way, num_blocks in (ours, theirs))
    ]


# -- text ----------------------------------------------------------------------------------------

HEADER = (
    f"{'blocks':>6}  {'way':<27}{'first s':>9}{'process':>9}{'warm s':>8}{'graphs':>8}"
    f"{'compiled':>10}{'C++':>5}{'warm':>9}{'2nd length':>14}{'3rd length':>14}"
)
FOOTER = """
first: from torch.compile to the end of the first backward, empty caches; process: the whole of it;
warm s: first, in a second process with the same caches. compiled: graphs that Inductor compiled in
the first step; C++: runs of the compiler in the process; warm: both, in all of the second process.
2nd, 3rd length: seconds of a step of another sequence length, and graphs captured anew.
joint trace: AOTAutograd's; after trace: partition, graphshard's passes and plan; other: running,
imports. Medians of launches; intervals: paired, order statistics, sign-based, {coverage:.1f} %."""


def render(ways: Sequence[Way], rounds: Rounds) -> str:
    rows = sorted(make_rows(ways, rounds), key=lambda row: row.num_blocks)  # stable
    lines = [HEADER, *(line_of(row) for row in rows), "", *phase_lines(rows), ""]
    lines += [verdict(comparison) for comparison in comparisons(ways, rounds)]
    lines += [nothing_anew(row) for row in rows if row.way.startswith("graphshard")]
    late = [row for row in rows if row.late]
    lines += [f"{row.title}, {row.num_blocks} blocks: {row.late} launches took too long; "
              "the true ratios to it are below those shown" for row in late]  # fmt: skip
    coverage = 100 * sign_interval([0.0] * len(rounds)).coverage
    return "\n".join([*lines, FOOTER.format(coverage=coverage)])


def line_of(row: Row) -> str:
    more = "> " if row.late else ""
    lengths = [
        f"{seconds:.2f} ({graphs})"
        for seconds, graphs in zip(row.lengths_s, row.length_graphs, strict=True)
    ]
    anew = f"{row.warm_misses}, {row.warm_compiler_runs}"
    return (
        f"{row.num_blocks:>6}  {row.title:<27}{more + format(row.first_s, '.2f'):>9}"
        f"{row.wall_s:>9.2f}{row.warm_s:>8.2f}{row.graphs:>8}{row.misses:>10}"
        f"{row.compiler_runs:>5}{anew:>9}" + "".join(f"{text:>14}" for text in lengths)
    )


def phase_lines(rows: Sequence[Row]) -> list[str]:
    known = [row for row in rows if row.phases_s]
    if not known:
        return []
    names = "".join(f"{name:>13}" for name in known[0].phases_s)
    return [f"{'blocks':>6}  {'cold first step, s':<27}{names}"] + [
        f"{row.num_blocks:>6}  {row.title:<27}"
        + "".join(f"{seconds:>13.2f}" for seconds in row.phases_s.values())
        for row in known
    ]


def nothing_anew(row: Row) -> str:
    anew = row.warm_misses + row.warm_compiler_runs
    return (
        f"{row.way}, {row.num_blocks} blocks: a second launch compiles nothing: "
        f"{'MISSED' if anew or row.late == row.launches else 'met'}"
    )
