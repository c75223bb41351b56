"""What README.md and docs/ quote is what the code and the results of today say.

docs/tour.md has a test of its own, which runs its commands anyway.
"""

import re
import shutil

import pytest

from bench.figures import ROOT, Figure, Shell, bodies_of, figures_of, filled, pages, quoted
from bench.pictures import DRAWINGS, PLAN_FILE, PLANNED, SCENES, draw, label_of, page_of, stale

README = ROOT / "README.md"
SCREEN = Figure("figure", "echo 1", "```text\n1 ms\n```\n")
OTHERS = [
    path
    for path in pages()
    if path not in (README, ROOT / "docs/tour.md")
    and any(figure.kind == "figure" for figure in figures_of(path.read_text()))
]


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    return Shell(tmp_path_factory.mktemp("readme"), limit_s=250)


@pytest.fixture(scope="module")
def readme(shell):
    """Its figures of today; the plan of the pictures is among them."""
    return bodies_of(README.read_text(), shell, recorded=False, say=print)


def test_the_readme_is_of_today(readme):
    page = README.read_text()
    assert PLANNED in readme
    assert filled(page, readme) == page, "make docs-figures"


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_a_page_is_of_today(path, tmp_path):
    page = path.read_text()
    bodies = bodies_of(page, Shell(tmp_path, limit_s=250), recorded=False, say=print)
    assert filled(page, bodies) == page, "make docs-figures"


def test_the_pictures_are_of_todays_page(readme, shell):
    assert stale(page_of(shell.folder / PLAN_FILE)) == [], "make docs-figures"
    assert "](viewer-light.png)" in (ROOT / "docs/viewer.md").read_text()
    assert PLANNED in (ROOT / "docs/viewer.md").read_text()


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.stem)
def test_a_drawing_is_of_todays_results(path):
    assert path.read_text() == DRAWINGS[path](), "make docs-figures"


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")
def test_a_picture_says_what_it_was_drawn_of(readme, shell, tmp_path):
    page, name = page_of(shell.folder / PLAN_FILE), "viewer-narrow.png"
    draw(page, [name], tmp_path)
    png = (tmp_path / name).read_bytes()
    assert png.startswith(b"\x89PNG")
    assert len(png) > 50_000
    assert name not in stale(page, tmp_path)
    assert label_of(png) is not None
    others = [other for other in SCENES if other != name]
    assert stale(page, tmp_path) == others
    assert stale(f"{page} ", tmp_path) == list(SCENES)


def test_a_changed_number_is_found(tmp_path):
    page = f"before\n<!-- figure: {SCREEN.command} -->\n{SCREEN.body}<!-- end -->\nafter\n"
    assert figures_of(page) == [SCREEN]
    bodies = bodies_of(page, Shell(tmp_path), recorded=False, say=print)
    assert bodies == {"echo 1": "```text\n1\n```\n"}
    today = filled(page, bodies)
    assert today == page.replace("1 ms", "1")
    assert today != page
    assert filled(today, bodies) == today


def test_what_the_clock_says_of_a_command_is_left_out():
    printed = (
        "capture   9 nodes, 2 groups      3.1 s\npasses    every check      0.6 s\n"
        "step time   1.5 s   1.2 s\nplan      simulated       12.0 s\n\n103 s in all\nwrote x\n"
    )
    assert quoted(SCREEN, printed) == (
        "```text\ncapture   9 nodes, 2 groups\npasses    every check\n"
        "step time   1.5 s   1.2 s\nplan      simulated\n\nwrote x\n```\n"
    )
    before_words = "capture      8.3 s  33 groups\nplan        12.1 s  simulated\n"
    assert quoted(SCREEN, before_words) == (
        "```text\ncapture             33 groups\nplan                simulated\n```\n"
    )
    assert quoted(Figure("figure", "", "| a |\n"), "| b |\n") == "| b |\n"


def test_what_depends_on_the_clock_is_not_made_anew(tmp_path):
    page = "<!-- recorded: date +%N -->\n```text\n1\n```\n<!-- end -->\n"
    assert bodies_of(page, Shell(tmp_path), recorded=False, say=print) == {}
    assert bodies_of(page, Shell(tmp_path / "other"), recorded=True, say=print).keys() == {
        "date +%N"
    }


def test_the_readme_is_short_and_its_links_lead_somewhere():
    text = README.read_text()
    assert len(text.splitlines()) <= 120
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!http)([^)]+)\)", text)]
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []
