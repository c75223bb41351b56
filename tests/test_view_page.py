"""The page: that it needs nothing but itself, and that what it holds is what the plan says."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from pictures import VIEWS, every_plan, llama, planned
from plans import two_layers

from graphshard.cli import main
from graphshard.view.html import render
from graphshard.view.profiled import measured_of_file

EXTERNAL = re.compile(r"https?:|//[a-z]|@import|url\((?!\"#)", re.IGNORECASE)
LOADING = {"src", "href", "srcset", "data", "poster", "action", "formaction", "background", "style"}
ASSETS = Path(__file__).parents[1] / "graphshard/view/assets"
PLANS = every_plan()


class Page(HTMLParser):
    """What a page holds: tags with attributes, and the text of each script, style and cell."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.texts = {"script": [], "style": [], "td": [], "th": [], "dd": []}
        self.inside = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in self.texts:
            self.inside = tag
            self.texts[tag].append("")

    def handle_endtag(self, tag):
        if tag == self.inside:
            self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.texts[self.inside][-1] += data.strip("\n")

    @property
    def policy(self):
        return next(a["content"] for t, a in self.tags if t == "meta" and "http-equiv" in a)

    @property
    def payload(self):
        return json.loads(self.texts["script"][0])

    def marks(self, view):
        """Rows of (kind, start, end, title, card) of a view."""
        words = self.payload["words"]
        return [
            [_mark(words, *mark) for mark in row["marks"]] for row in self.payload["rows"][view]
        ]


def _mark(words, kind, start, end, row, groups, label, title, *card):
    texts = [words[number] for number in card]
    return words[kind], start, end, words[title], dict(zip(texts[::2], texts[1::2], strict=True))


@pytest.fixture(params=PLANS.values(), ids=PLANS.keys())
def plan(request):
    return request.param


@pytest.fixture
def page(plan):
    return Page(render(plan))


def test_page_refers_to_nothing_outside_itself(page):
    for tag, attributes in page.tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        # The policy would also refuse inline style attributes and handlers.
        assert not [a for a in attributes if a in LOADING or a.startswith("on")], (tag, attributes)
    assert not EXTERNAL.search(page.texts["style"][0])
    script = page.texts["script"][1].replace('"http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?:|import|fetch\(|XMLHttp|WebSocket|innerHTML|eval\(", script)


def test_page_policy_admits_its_own_style_and_script_only(plan):
    text = render(plan)
    page = Page(text)

    def hashed(tag):
        (found,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = hashlib.sha256(found.encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    assert [t for t, _ in page.tags].count("style") == 1
    assert [a.get("type") for t, a in page.tags if t == "script"] == ["application/json", None]
    assert page.policy == (
        f"default-src 'none'; style-src {hashed('style')}; "
        f"script-src {hashed('script')}; base-uri 'none'; form-action 'none'"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(scheme):
    """Contrast of at least 4.5, as WCAG 2 has it, of all text and what it is written on."""
    found = {"black": "#000", "white": "#fff", **_colours(scheme)}
    pairs = [
        (text, ground) for text in ("ink", "quiet") for ground in ("paper", "ground", "button")
    ]
    pairs += [(way, ground) for way in ("better", "worse") for ground in ("paper", "ground")]
    pairs += [("black", fill) for fill in ("backward", "gather", "reduce")]
    for text, ground in [*pairs, ("white", "forward")]:
        light, dark = sorted(map(_luminance, (found[text], found[ground])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, ground)


def _colours(scheme):
    css = (ASSETS / "viewer.css").read_text()
    light, dark, *_ = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    blocks = light if scheme == "light" else light + dark
    return dict(re.findall(r"--(\w+): (#\w+);", blocks))


def _luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * c for c in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_page_says_what_its_axis_is():
    assert "program\norder (not time)" in render(two_layers())
    assert "Times are predicted" in render(PLANS["llama"])
    assert "program\norder" not in render(PLANS["llama"])


def test_page_escapes_names():
    text = render(PLANS["hostile"])
    assert "<img" not in text
    assert text.count("<script") == 2
    payload = Page(text).payload
    assert payload["rows"]["residency"][0]["name"] == "</script><script>x()</script>"


def test_page_has_a_row_for_every_group(plan, page):
    rows = [a["data-group"] for tag, a in page.tags if tag == "tr" and "data-group" in a]
    assert rows == [str(g.id) for g in plan.groups]
    assert set(page.texts["th"]) >= {g.fqn or "(root)" for g in plan.groups}


def test_every_mark_lies_on_the_axis_and_has_words(page):
    payload = page.payload
    for view in VIEWS:
        for row in page.marks(view):
            for _, start, end, title, card in row:
                assert -1e-6 <= start <= end <= payload["end"] + 1e-3
                assert title
                assert all(key and value for key, value in card.items()), card
    assert all(a <= b for a, b in pairwise(payload["reached"]))


@pytest.mark.parametrize("name", [name for name, plan in PLANS.items() if plan.forecasts])
def test_lanes_do_not_overlap(name):
    for row in Page(render(PLANS[name])).marks("lanes"):
        for (_, _, end, *_), (_, start, *_) in pairwise(row):
            assert start >= end - 2e-3


def test_no_card_shows_raw_microseconds_or_bytes(page):
    raw = re.compile(r"\d,\d{3}(\.\d+)? (us|bytes)")
    assert not [text for text in page.payload["words"] if raw.search(text)]


def test_equal_plans_give_equal_pages(plan):
    assert render(plan) == render(plan)


def test_headline_shows_fsdp2_and_what_was_measured():
    plan = PLANS["llama"]
    values = Page(render(plan)).texts["dd"]
    beside = [v for v in values if v.startswith(("FSDP2", "measured", "budget"))]
    assert [v.split()[0] for v in beside] == ["FSDP2", "measured"] * 2 + ["FSDP2", "budget"]
    assert "budget 40.0 GiB" in beside


def test_a_plan_of_130_groups_stays_small():
    text = render(planned(llama(130, budget_bytes=150 * 2**30), "130 groups"))
    assert len(text.encode()) < 1.5e6


# -- measured times from a file ------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    """PLAN without and MEASURED with measured times."""
    whole = PLANS["llama"]
    bare = planned(llama(budget_bytes=40 * 2**30), "bare")
    paths = tmp_path / "plan.json", tmp_path / "measured.json"
    for path, found in zip(paths, (bare, whole), strict=True):
        path.write_text(found.to_json(), encoding="utf-8")
    return paths


def test_view_draws_what_another_file_measured(files, tmp_path, capsys):
    out = tmp_path / "out.html"
    bare, with_times = files
    assert measured_of_file(PLANS["llama"], with_times) == PLANS["llama"].measured
    assert main(["view", str(bare), "--measured", str(with_times), "-o", str(out)]) == 0
    courses = [row["course"] for row in Page(out.read_text()).payload["rows"]["lanes"]]
    assert list(dict.fromkeys(courses)) == [
        "graphshard, predicted", "FSDP2, predicted", "graphshard, measured",
    ]  # fmt: skip
    assert capsys.readouterr().out == f"{out}\n"


@pytest.mark.parametrize("case", ["not measured", "missing", "not a plan", "another graph"])
def test_view_refuses_what_was_not_measured(case, files, tmp_path, capsys):
    bare, with_times = files
    other, text = bare, "is a plan that was not measured"
    if case == "missing":
        other, text = tmp_path / "none.json", "No such file"
    elif case == "not a plan":
        other, text = tmp_path / "bad.json", "GS804: no trace"
        other.write_text("{}")
    elif case == "another graph":
        bare.write_text(planned(llama(33), "longer").to_json())
        other, text = with_times, "these are not times of this graph"
    assert main(["view", str(bare), "--measured", str(other)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert text in err
