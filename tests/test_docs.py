"""Examples in the documentation print what the page says."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

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
