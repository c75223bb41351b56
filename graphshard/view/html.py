"""A plan as one HTML file that needs nothing else: `render(plan)`.

The page's Content-Security-Policy admits the style sheet and the script below by their hashes and
nothing else, so that the browser itself refuses any other load. The script only draws: every
word and every number on the page is put together here.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from graphshard.step_plan import Lane, Plan
from graphshard.view.text import (
    bytes_text,
    count_text,
    group_name,
    group_numel,
    group_shapes,
    ranks_text,
    step_text,
)
from graphshard.view.timeline import Bar, Segment, Timeline, timeline

LANE_WORDS = {
    Lane.COMPUTE: "compute",
    Lane.ALL_GATHER: "all-gather",
    Lane.REDUCE_SCATTER: "reduce-scatter",
}
# A number on the axis is rounded to this: a ten-thousandth of a pixel.
AXIS_DIGITS = 7


def render(plan: Plan) -> str:
    """The page. Equal plans give equal pages; names in the plan are data, never markup."""
    rows = timeline(plan)
    css, js = _asset("viewer.css"), _asset("viewer.js")
    env = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return env.from_string(_asset("viewer.html.j2")).render(
        title=plan.name,
        subtitle=f"torch {plan.torch_version}, {ranks_text(plan)}",
        csp=_policy(css, js),
        css=Markup(css),
        js=Markup(js),
        headline=_headline(plan),
        has_backward=plan.backward is not None,
        has_kept=any(bar.kept_from is not None for row in rows.residency for bar in row.bars),
        groups=_group_table(plan),
        payload=_payload(plan, rows),
    )


@cache
def _asset(name: str) -> str:
    return (resources.files("graphshard.view") / "assets" / name).read_text(encoding="utf-8")


def _policy(css: str, js: str) -> str:
    return (
        f"default-src 'none'; style-src {_hash(css)}; script-src {_hash(js)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _headline(plan: Plan) -> list[tuple[str, str]]:
    summary = plan.summary()
    step = "per step" if plan.backward is not None else "per forward"
    return [
        (f"{summary['groups']:,}", "groups"),
        (f"{summary['all_gathers']:,}", f"all-gathers {step}"),
        (f"{summary['reduce_scatters']:,}", f"reduce-scatters {step}"),
        (bytes_text(summary["gathered_peak_bytes"]), "gathered parameters, peak"),
    ]


def _group_table(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "id": group.id,
            "name": group_name(group),
            "params": f"{len(group.params):,}",
            "numel": f"{group_numel(group):,}",
            "shapes": f"{group_shapes(group):,}",
            "bytes": bytes_text(group.gathered_bytes),
            "reshard": "yes" if group.reshard_after_forward else "no",
        }
        for group in plan.groups
    ]


def _payload(plan: Plan, rows: Timeline) -> dict[str, Any]:
    """What viewer.js draws; see the comment at its top."""
    names = {g.id: group_name(g) for g in plan.groups}
    sizes = {g.id: bytes_text(g.gathered_bytes) for g in plan.groups}
    lanes = [
        {
            "name": LANE_WORDS[lane.lane],
            "depth": lane.depth,
            "marks": [_segment_mark(s, rows, names, sizes) for s in lane.segments],
        }
        for lane in rows.lanes
    ]
    residency = [
        {
            "name": names[row.group.id],
            "marks": [_bar_mark(row.group.id, bar, rows, names, sizes) for bar in row.bars],
        }
        for row in rows.residency
    ]
    return {
        "edges": [round(edge, AXIS_DIGITS) for edge in rows.edges],
        "divider": rows.divider,
        "lanes": lanes,
        "residency": residency,
        "bytes": list(rows.gathered_bytes),
        "ticks": _byte_ticks(max(rows.gathered_bytes, default=0)),
        "peak": _peak_mark(plan, rows, names, sizes),
        "steps": [_readout(i, rows, names) for i in range(len(rows.steps))],
    }


def _readout(index: int, rows: Timeline, names: dict[int, str]) -> str:
    text = step_text(rows.steps[index], names)
    alive = bytes_text(rows.gathered_bytes[index])
    return f"step {index}, {rows.direction_of(index)}: {text}; {alive} gathered"


def _mark(title: str, kind: str, first: int, last: int, **more: Any) -> dict[str, Any]:
    """One thing to draw, focus and point at: `card` is shown for it, `aria` is said for it."""
    card: list[tuple[str, str]] = more.pop("card")
    aria = ", ".join([title, *(f"{key} {value}" for key, value in card)])
    return {
        "title": title,
        "kind": kind,
        "first": first,
        "last": last,
        "card": card,
        "aria": aria,
        "group": None,
        "label": "",
        "row": 0,
        "split": None,
        **more,
    }


def _segment_mark(
    segment: Segment, rows: Timeline, names: dict[int, str], sizes: dict[int, str]
) -> dict[str, Any]:
    alive = bytes_text(max(rows.gathered_bytes[segment.first : segment.last + 1]))
    lane = LANE_WORDS[segment.lane]
    if segment.group is None:
        step = rows.steps[segment.first]
        ops = count_text(segment.num_ops, "op")
        card = [
            ("step", str(segment.first)),
            ("ops", f"{step.start} to {step.stop - 1}" if segment.num_ops else "none"),
            ("gathered", alive),
        ]
        title, kind = f"{segment.direction} compute, {ops}", str(segment.direction)
        return _mark(title, kind, segment.first, segment.last, card=card, label=ops)
    name = names[segment.group]
    if segment.kept:
        title, kind = f"{name}: no all-gather, kept from forward", "kept"
        card = [("used from step", str(segment.first))]
    else:
        title = f"{name}: {segment.direction} {lane}"
        kind = "gather" if segment.lane is Lane.ALL_GATHER else "reduce"
        waited = f"step {segment.last}" if segment.awaited else "not within this plan"
        card = [("issued", f"step {segment.first}"), ("waited for", waited)]
    if segment.lane is Lane.ALL_GATHER:
        card.append(("size", sizes[segment.group]))
    card.append(("gathered meanwhile, at most", alive))
    where = {"group": segment.group, "row": segment.row, "label": "" if segment.kept else name}
    return _mark(title, kind, segment.first, segment.last, card=card, **where)


def _bar_mark(
    group: int, bar: Bar, rows: Timeline, names: dict[int, str], sizes: dict[int, str]
) -> dict[str, Any]:
    released = f"step {bar.last}" if bar.released else "not within this plan"
    card = [("gather issued", f"step {bar.first}")]
    if bar.kept_from is not None:
        card.append(("kept after forward", f"from step {bar.kept_from}"))
    card += [("released", released), ("size", sizes[group])]
    title = f"{names[group]}: gathered"
    return _mark(title, "held", bar.first, bar.last, card=card, group=group, split=bar.kept_from)


def _peak_mark(
    plan: Plan, rows: Timeline, names: dict[int, str], sizes: dict[int, str]
) -> dict[str, Any] | None:
    """The first step at the peak, with the groups that make it."""
    at = rows.peak_step
    if at is None:
        return None
    owners = sorted(
        (r.group for r in plan.residency() if r.start <= at <= r.stop),
        key=lambda g: (-next(x.gathered_bytes for x in plan.groups if x.id == g), g),
    )
    peak = bytes_text(rows.gathered_bytes[at])
    card = [("step", f"{at}, {step_text(rows.steps[at], names)}")]
    card += [(names[g], sizes[g]) for g in owners[:8]]
    if len(owners) > 8:
        card.append((f"and {len(owners) - 8} more groups", ""))
    extra = rows.gathered_bytes[at] - sum(g.gathered_bytes for g in plan.groups if g.id in owners)
    if extra > 0:
        card.append(("bucket being copied out", bytes_text(extra)))
    return _mark(f"peak {peak} gathered", "peak", at, at, card=card, label=f"peak {peak}")


def _byte_ticks(peak: int) -> list[tuple[int, str]]:
    """Zero and up to four round numbers of bytes, the last at or above the peak."""
    tick = 1
    while tick * 4 < peak:
        tick *= 2
    return [(0, "0"), *((n * tick, bytes_text(n * tick)) for n in range(1, 5))]
