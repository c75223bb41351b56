"""A plan as one HTML file that needs nothing else: `render(plan)`.

The page's Content-Security-Policy admits the style sheet and the script below by their hashes and
nothing else, so that the browser itself refuses any other load. The script draws and selects: the
words of the page and of its cards are put together here; the script adds only the time and the
bytes under the cursor.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import asdict
from typing import Any

from markupsafe import Markup

from graphshard.schedule.measured import Measured
from graphshard.schedule.plan import Plan
from graphshard.view.groups import table_of
from graphshard.view.headline import headline
from graphshard.view.lanes import lane_rows
from graphshard.view.marks import MarkRow, Words, packed
from graphshard.view.memory import MemoryChart, memory_of
from graphshard.view.names import shown
from graphshard.view.residency import residency_rows
from graphshard.view.sheet import Sheet, sheet_of
from graphshard.view.strips import strip_rows
from graphshard.view.templates import asset, template
from graphshard.view.text import ranks_text
from graphshard.view.units import time_text

SCRIPTS = ("picture.js", "place.js", "select.js", "page.js")
# On the axis: a nanosecond, or a ten-thousandth of a pixel where it is not in microseconds.
DIGITS_US, DIGITS_SHARE = 3, 7


def render(plan: Plan, measured: Measured | None = None) -> str:
    """The page. Equal plans give equal pages; names in the plan are data, never markup.

    measured: drawn beside what was predicted, instead of `plan.measured`. Raises ValueError if it
    was measured of another graph.
    """
    plan = shown(plan)
    sheet = sheet_of(plan, measured or plan.measured)
    views = _views(sheet)
    memory = memory_of(sheet)
    css, js = asset("viewer.css"), _script()
    return template("viewer.html.j2").render(
        title=plan.name,
        subtitle=_subtitle(plan),
        csp=_policy(css, js),
        css=Markup(css),
        js=Markup(js),
        headline=headline(sheet),
        timed=sheet.axis.timed,
        has_backward=plan.backward is not None,
        has_rival=bool(memory.rival),
        partial=_partial(sheet),
        kinds=_kinds(views),
        memory=memory,
        strips=views["compare"],
        table=table_of(sheet),
        payload=_payload(sheet, views, memory),
    )


def _script() -> str:
    """The files share one scope, which is not that of the page."""
    return "(() => {\n" + "\n".join(map(asset, SCRIPTS)) + "})();\n"


def _policy(css: str, js: str) -> str:
    return (
        f"default-src 'none'; style-src {_hash(css)}; script-src {_hash(js)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _subtitle(plan: Plan) -> str:
    words = [ranks_text(plan), f"{len(plan.groups):,} groups", f"torch {plan.torch_version}"]
    if plan.priced_on is not None:
        words.insert(1, f"priced on {plan.priced_on.machine}")
    return ", ".join(words)


def _partial(sheet: Sheet) -> str:
    """What the picture leaves out of the step: the optimizer, and all micro-steps but one."""
    estimate = sheet.plan.estimate
    if not sheet.axis.timed:
        return ""
    whole_us, shown_us = estimate.step_time_us, sheet.axis.end
    is_all = abs(whole_us - shown_us) <= 1e-6 * whole_us
    if is_all and estimate.optimizer is None:
        return ""
    what = "forward and backward" if is_all else "one micro-step"
    return (
        f"The pictures show {what}, {time_text(shown_us)} of the step's "
        f"{time_text(estimate.whole_step_us)}."
    )


def _views(sheet: Sheet) -> dict[str, list[MarkRow]]:
    return {
        "lanes": lane_rows(sheet),
        "residency": residency_rows(sheet),
        "compare": strip_rows(sheet),
    }


def _kinds(views: dict[str, list[MarkRow]]) -> list[str]:
    """Of all marks, for the legends."""
    marks = (mark for rows in views.values() for row in rows for mark in row.marks)
    return list(dict.fromkeys(mark.kind for mark in marks))


def _payload(sheet: Sheet, views: dict[str, list[MarkRow]], memory: MemoryChart) -> dict[str, Any]:
    """What the script draws; see the comment at the top of picture.js."""
    digits = DIGITS_US if sheet.axis.timed else DIGITS_SHARE
    words = Words()
    peak = () if memory.peak is None else (memory.peak,)
    rows = {**views, "memory": [MarkRow("", peak)]}
    places = [*sheet.axis.reached, sheet.axis.end]
    return {
        "timed": sheet.axis.timed,
        "end": _end(sheet, views),
        "divider": sheet.axis.divider,
        "reached": [round(place, digits) for place in places],
        "rows": {view: packed(found, words, digits) for view, found in rows.items()},
        "memory": _curves(memory),
        "words": words.texts,
    }


def _end(sheet: Sheet, views: dict[str, list[MarkRow]]) -> float:
    """Where the axis ends: with the longest strip."""
    ends = [mark.end for row in views["compare"] for mark in row.marks]
    return max([sheet.axis.end, *ends]) or 1.0


def _curves(memory: MemoryChart) -> dict[str, Any]:
    return {key: value for key, value in asdict(memory).items() if key != "peak"}
