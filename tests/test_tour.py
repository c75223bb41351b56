"""A newcomer who types what docs/tour.md says gets what it shows.

As the how-to pages (`howto.py`), but for blocks without a language, which install.
"""

import re

import pytest
from howto import ROOT, headings, prepared, typed

BLOCK = re.compile(r"```(python|shell|text)\n(.*?)```", re.DOTALL)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tour(tmp_path):
    environment = prepared(tmp_path)
    found = BLOCK.findall((ROOT / "docs/tour.md").read_text())
    assert {kind for kind, _ in found} == {"python", "shell", "text"}
    printed = ""
    for kind, text in found:
        if kind == "python":
            (tmp_path / text.split("\n", 1)[0].removeprefix("# ")).write_text(text)
        elif kind == "shell":
            printed = typed(text, tmp_path, environment, "tour.md")
        else:
            missing = [line for line in headings(text) if line not in headings(printed)]
            assert missing == [], printed
    for name in ("llama3_70b.plan.json", "llama3_70b.html", "train.html", "train.trace.json"):
        assert (tmp_path / name).stat().st_size > 0
