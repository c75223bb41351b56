"""A newcomer who types what docs/tour.md says gets what it shows.

Every `shell` block runs, in order, in one folder; a `python` block is a file, named by its first
line. A screen that is a figure (bench/figures.py) is what its command prints, to the last digit. Of
another one, which has what was measured, the lines at the left margin have to be there.
"""

import re

import pytest
from howto import ROOT, headings

from bench.figures import Shell, figures_of, quoted

BLOCK = re.compile(r"```(python|shell|text)\n(.*?)```", re.DOTALL)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tour(tmp_path):
    page = (ROOT / "docs/tour.md").read_text()
    found = BLOCK.findall(page)
    assert {kind for kind, _ in found} == {"python", "shell", "text"}
    figures = {figure.body: figure for figure in figures_of(page) if figure.kind == "figure"}
    assert len(figures) > 3
    shell, command, printed = Shell(tmp_path, limit_s=200), "", ""
    for kind, text in found:
        if kind == "python":
            (tmp_path / text.split("\n", 1)[0].removeprefix("# ")).write_text(text)
        elif kind == "shell":
            *before, command = text.splitlines()
            printed = "".join(map(shell.run, [*before, command]))
        elif (figure := figures.pop(f"```{kind}\n{text}```\n", None)) is not None:
            # One that is shortened is a pipe that begins with the command.
            output = printed if figure.command == command else shell.run(figure.command)
            assert quoted(figure, output) == figure.body, "make docs-figures"
        else:
            missing = [line for line in headings(text) if line not in headings(printed)]
            assert missing == [], printed
    assert figures == {}
    for name in ("llama3_70b.plan.json", "llama3_70b.html", "train.html", "train.trace.json"):
        assert (tmp_path / name).stat().st_size > 0
