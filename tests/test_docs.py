"""Examples in the documentation print what the page says."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

import graphshard
from graphshard.options import _PARSERS
from graphshard.schedule.plan import SCHEMA_VERSION

DOCS = Path(__file__).parents[1] / "docs"
# A block of Python, and the output that the page shows for it.
EXAMPLE = re.compile(r"```python\n(.*?)```\n\nIt prints:\n\n```text\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("name", ["how-it-decides.md"])
def test_examples_print_what_the_page_says(name):
    found = EXAMPLE.findall((DOCS / name).read_text())
    assert found
    for code, expected in found:
        out = StringIO()
        with redirect_stdout(out):
            exec(compile(code, name, "exec"), {"__name__": "example"})
        assert out.getvalue() == expected


def test_every_option_has_a_row():
    page = (DOCS / "reference/options.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {name for name in named if name.islower()} == set(_PARSERS)


def test_the_plan_file_has_the_schema_that_the_page_says():
    page = (DOCS / "reference/plan-file.md").read_text()
    assert f"format's number, at present {SCHEMA_VERSION}." in page


def test_every_public_name_is_in_the_reference():
    named = set(re.findall(r"\w+", (DOCS / "reference/api.md").read_text()))
    assert set(graphshard.__all__) - {"__version__"} - named == set()
