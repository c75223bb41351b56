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
from graphshard.view.answer import answer_sentences
from graphshard.view.captured import captured_text, outside_of
from graphshard.view.courses import course_rows, shows_all
from graphshard.view.groups import table_of
from graphshard.view.headline import headline, limit_of
from graphshard.view.lanes import lane_rows
from graphshard.view.legend import CATEGORIES, WORDS, lane_terms, residency_terms
from graphshard.view.marks import MarkRow, Words, packed
from graphshard.view.memory import MemoryChart, memory_of
from graphshard.view.misses import misses
from graphshard.view.names import shown
from graphshard.view.outlook import prospects
from graphshard.view.residency import residency_rows
from graphshard.view.sheet import Sheet, sheet_of
from graphshard.view.templates import asset, template
from graphshard.view.text import ROOT, ranks_text
from graphshard.view.units import time_text
from graphshard.view.waits import longest_waits, waited_text
from graphshard.view.waterfall import waterfall

SCRIPTS = (
    "picture.js",
    "draw.js",
    "cells.js",
    "place.js",
    "select.js",
    "minimap.js",
    "span.js",
    "share.js",
    "table.js",
    "page.js",
)
# On the axis: a nanosecond, or a ten-thousandth of a pixel where it is not in microseconds.
DIGITS_US, DIGITS_SHARE = 3, 7


def render(plan: Plan, measured: Measured | None = None) -> str:
    """The page. Equal plans give equal pages; names in the plan are data, never markup.

    measured: drawn beside what was predicted, instead of `plan.measured`. Raises ValueError if it
    was measured of another graph.
    """
    plan = shown(plan)
    sheet = sheet_of(plan, measured or plan.measured)
    own = lane_rows(sheet)
    views = {"lanes": [*own, *course_rows(sheet)], "residency": residency_rows(sheet)}
    memory, missed = memory_of(sheet), misses(sheet)
    css, js = asset("viewer.css"), _script()
    return template("viewer.html.j2").render(
        title=plan.name,
        subtitle=_subtitle(plan),
        csp=_policy(css, js),
        css=Markup(css),
        js=Markup(js),
        answer=answer_sentences(plan, sheet.measured, missed),
        captured=captured_text(plan),
        outside=outside_of(plan),
        headline=headline(sheet),
        timed=sheet.axis.timed,
        has_rival=bool(memory.rival),
        partial=_partial(sheet),
        terms=_terms(sheet, views),
        memory=memory,
        limit=limit_of(plan.estimate).name.rstrip(",") if plan.estimate else "",
        bars=waterfall(plan),
        waits=longest_waits(sheet, own),
        waited=waited_text(plan),
        prospects=prospects(plan),
        misses=missed,
        table=table_of(sheet),
        has_root=ROOT in sheet.names.values(),
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
    """What the pictures leave out of the step: all micro-steps but one."""
    estimate = sheet.plan.estimate
    if not sheet.axis.timed or shows_all(sheet.plan):
        return ""
    return (
        f"The pictures show one micro-step, {time_text(sheet.axis.end)} of the step's "
        f"{time_text(estimate.whole_step_us)}."
    )


def _terms(sheet: Sheet, views: dict[str, list[MarkRow]]) -> dict[str, Any]:
    """For the legends, by picture."""
    kinds = {
        view: {mark.kind for row in rows for mark in row.marks} for view, rows in views.items()
    }
    return {
        "lanes": lane_terms(kinds["lanes"], timed=sheet.axis.timed),
        "residency": residency_terms(kinds["residency"]),
        "categories": CATEGORIES,
        "words": WORDS,
    }


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
    """Where the axis ends: with the longest course."""
    ends = [mark.end for row in views["lanes"] for mark in row.marks]
    return max([sheet.axis.end, *ends]) or 1.0


def _curves(memory: MemoryChart) -> dict[str, Any]:
    return {key: value for key, value in asdict(memory).items() if key != "peak"}
