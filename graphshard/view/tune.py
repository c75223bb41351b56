"""What `graphshard tune` prints and draws: settings, and what each decision gains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graphshard.schedule.setting import (
    Checkpointing,
    Decision,
    Grouping,
    MeshShape,
    NoTensor,
    Obstacle,
    Resharding,
    Scheduling,
    Setting,
    TensorObstacle,
)
from graphshard.view.front import Panel, Series, Spot
from graphshard.view.text import bytes_text
from graphshard.view.units import time_text

NOW, BEST = "now", "best"
COLUMNS = (
    *("GPUs", "mesh", "groups", "reshard", "recompute", "batch", "micro-steps"),
    *("tokens/s", "step", "exposed", "peak"),
)
GROUPS = {
    Grouping.AS_IS: "as they are",
    Grouping.BLOCKS: "each block",
    Grouping.APART: "blocks, ends apart",
    Grouping.PAIRS: "2 blocks each",
    Grouping.QUADS: "4 blocks each",
    Grouping.WHOLE: "one",
}
RESHARDS = {
    Resharding.AS_IS: "as it is",
    Resharding.OPEN: "planned",
    Resharding.ALWAYS: "always",
    Resharding.NEVER: "never",
    Resharding.NODE: "to the node",
}
CHECKPOINTS = {
    Checkpointing.AS_IS: "as it is",
    Checkpointing.NONE: "nothing",
    Checkpointing.AUTO: "planned",
    Checkpointing.FULL: "each block",
}
SCHEDULES = {Scheduling.PLANNED: "planned", Scheduling.FSDP2: "FSDP2's"}
DECISIONS = {
    Decision.TENSOR: "tensor parallel",
    Decision.MESH: "mesh",
    Decision.GROUPING: "groups",
    Decision.RESHARD: "reshard",
    Decision.CHECKPOINTING: "recompute",
    Decision.BATCH: "batch",
    Decision.SCHEDULING: "schedule",
}
KEPT = {
    Obstacle.REPLICATES: "a module is sharded by `replicate`",
    Obstacle.MESHES: "one call spreads parameters over several meshes",
    Obstacle.SUBCLASSES: "parameters are tensor subclasses, or have all-gather extensions",
    Obstacle.METHODS: "`register_fsdp_forward_method` was used",
    Obstacle.ROOTS: "several sharded modules are outermost",
    Obstacle.CAPTURE: "with other groups it is not one graph",
}
# Of what `NoTensor.what` names.
NO_TENSOR = {
    TensorObstacle.STYLE: "torch has no style {what!r}",
    TensorObstacle.NAME: "the plan's {what!r} names no module",
    TensorObstacle.TIED: "{what} would no longer be shared",
    TensorObstacle.UNEVEN: "{what} does not divide evenly",
    TensorObstacle.UNLIKE: "blocks of {what} would no longer be alike",
    TensorObstacle.CAPTURE: "with it the step cannot be captured",
}
# Of the picture: time is that of so many tokens on one GPU.
TOKENS = 1_000


@dataclass(frozen=True, slots=True)
class TuneRow:
    """One setting. tokens_per_s: of all GPUs. usd_per_million: of tokens, None without a price.
    least_bytes: what it needs, where it does not fit; then it has no times."""

    setting: Setting
    tokens_per_s: float = 0.0
    step_us: float = 0.0
    exposed_us: float = 0.0
    peak_bytes: int = 0
    usd_per_million: float | None = None
    least_bytes: int = 0

    @property
    def fits(self) -> bool:
        return self.step_us > 0


@dataclass(frozen=True, slots=True)
class GainRow:
    """The best setting with one decision taken back."""

    decision: Decision
    without: TuneRow


@dataclass(frozen=True, slots=True)
class Tuned:
    """For one number of GPUs. now: what the model does by itself. front: the best first. nearest:
    the setting that needs least memory, where nothing fits. num_planned: of num_settings. left: of
    what was not planned, how much faster than the best the most promising can be at most."""

    world_size: int
    now: TuneRow | None
    front: tuple[TuneRow, ...]
    gains: tuple[GainRow, ...]
    num_settings: int
    num_planned: int
    left: float
    nearest: TuneRow | None = None
    code_path: str | None = None


def tune_text(
    name: str,
    where: str,
    every: Sequence[Tuned],
    took_s: float,
    picture: str | None = None,
    kept: Obstacle | None = None,
    no_tensor: Sequence[NoTensor] = (),
) -> str:
    """The screen. where: the machine, in words. kept: why the model keeps its calls, if it does.
    no_tensor: what is left out of the tensor parallel that it has a plan for."""
    lines = [f"{name}  {where}, no weights, no GPU used", ""]
    lines += _table(every)
    for tuned in every:
        lines += ["", *_about(tuned)]
    if kept is not None:
        lines += ["", f"Its fully_shard calls stay as they are: {KEPT[kept]}."]
    lines += ["", *map(_left_out, no_tensor)] if no_tensor else []
    lines += ["", f"{took_s:.0f} s in all"]
    written = [tuned.code_path for tuned in every if tuned.code_path is not None]
    lines += [f"wrote {path}" for path in (*written, *([picture] if picture else []))]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _left_out(found: NoTensor) -> str:
    degrees = " and ".join(f"{degree:,}" for degree in found.degrees)
    over = f" over {degrees} ranks" if degrees else ""
    why = NO_TENSOR[found.why].format(what=found.what)
    return f"Tensor parallel{over} is not searched: {why}."


def _table(every: Sequence[Tuned]) -> Iterator[str]:
    has_price = any(row.usd_per_million is not None for tuned in every for row in tuned.front)
    heads = [*COLUMNS, *(["$/M tokens"] if has_price else []), ""]
    rows = [heads]
    for tuned in every:
        if tuned.now is not None:
            rows.append(_cells(tuned.now, NOW, has_price))
        for place, row in enumerate(tuned.front):
            rows.append(_cells(row, "" if place else BEST, has_price))
        if tuned.nearest is not None:
            rows.append(_cells(tuned.nearest, "", has_price))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for line in rows:
        yield "  ".join(
            cell.ljust(width) if place in (1, 2, 3, 4, len(line) - 1) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )


def _cells(row: TuneRow, mark: str, has_price: bool) -> list[str]:
    setting, sizes = row.setting, dict(row.setting.sizes)
    cells = [
        f"{setting.world_size:,}",
        mesh_text(setting),
        GROUPS[setting.grouping],
        RESHARDS[setting.reshard],
        CHECKPOINTS[setting.checkpointing],
        f"{sizes['batch']} x {sizes['seq']:,}",
        _steps_text(setting),
    ]
    if not row.fits:
        cells += ["does not fit", "", "", f"> {bytes_text(row.least_bytes)}"]
    else:
        cells += [f"{row.tokens_per_s:,.0f}", time_text(row.step_us), time_text(row.exposed_us)]
        cells.append(bytes_text(row.peak_bytes))
    if has_price:
        cells.append("" if row.usd_per_million is None else f"{row.usd_per_million:.4f}")
    return [*cells, mark]


def _steps_text(setting: Setting) -> str:
    return f"{setting.micro_steps}{'' if setting.sync_each else ', sync last'}"


def mesh_text(setting: Setting) -> str:
    shape: MeshShape | None = setting.mesh
    if shape is None:
        return "as it is"
    data = f"FSDP {shape.shards}"
    if shape.replicas > 1:
        data = f"HSDP {shape.replicas} x {shape.shards}"
    return data if shape.tensor == 1 else f"{data} x TP {shape.tensor}"


def _about(tuned: Tuned) -> Iterator[str]:
    head = f"{tuned.world_size:,} GPUs: "
    if not tuned.front:
        yield f"{head}none of {tuned.num_settings:,} settings fits"
        return
    best = tuned.front[0]
    of_them = f"{tuned.num_settings:,} settings, {tuned.num_planned:,} planned"
    limit = f"; another one is at most {tuned.left:.1%} faster" if tuned.left else ""
    yield f"{head}{of_them}{limit}"
    if tuned.now is not None and tuned.now.fits:
        yield f"{'  now -> best':<42}{_gained(tuned.now, best)}"
    for gain in tuned.gains:
        own, other = _words(gain.decision, best), _words(gain.decision, gain.without)
        text = f"  {DECISIONS[gain.decision]}: {own}, not {other}"
        yield f"{text:<42}  {_gained(gain.without, best)}".rstrip()


def _gained(before: TuneRow, after: TuneRow) -> str:
    if not before.fits:
        return f"that does not fit: {bytes_text(before.least_bytes)}"
    change = after.tokens_per_s / before.tokens_per_s - 1
    size = after.peak_bytes - before.peak_bytes
    sign = "-" if size < 0 else "+"
    more = f"  {sign}{bytes_text(abs(size))}" if size else ""
    return f"{change:+7.1%} tokens/s{more}"


def _words(decision: Decision, row: TuneRow) -> str:
    setting = row.setting
    if decision is Decision.BATCH:
        sizes = dict(setting.sizes)
        steps = f" x {_steps_text(setting)}" if setting.micro_steps > 1 else ""
        return f"{sizes['batch']} x {sizes['seq']:,}{steps}"
    words: dict[Decision, str] = {
        Decision.TENSOR: f"{setting.tensor:,}",
        Decision.MESH: mesh_text(setting),
        Decision.GROUPING: GROUPS[setting.grouping],
        Decision.RESHARD: RESHARDS[setting.reshard],
        Decision.CHECKPOINTING: CHECKPOINTS[setting.checkpointing],
        Decision.SCHEDULING: SCHEDULES[setting.scheduling],
    }
    return words[decision]


def panels_of(name: str, where: str, every: Sequence[Tuned]) -> list[Panel]:
    """Time of TOKENS tokens on one GPU against memory, a panel for each number of GPUs."""
    found = []
    for tuned in every:
        series = [Series("best settings", tuple(map(_spot, tuned.front)))]
        if tuned.now is not None and tuned.now.fits:
            series.append(Series("now", (_spot(tuned.now),)))
        if tuned.front:
            title = f"{name}, {tuned.world_size:,} x {where}"
            found.append(Panel(title, tuple(series), f"{TOKENS:,} tokens of one GPU"))
    return found


def _spot(row: TuneRow) -> Spot:
    return Spot(row.peak_bytes, TOKENS * row.setting.world_size / row.tokens_per_s * 1e6)
