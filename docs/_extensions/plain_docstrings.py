"""Docstrings are plain English: an indented block after an empty line is code, without any mark."""

from typing import Any

from sphinx.application import Sphinx


def mark_code(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Puts the mark of reStructuredText before each indented block."""
    marked: list[str] = []
    for number, line in enumerate(lines):
        begins = line[:1] == " " and number and not lines[number - 1]
        inside = any(marked) and next(filter(None, reversed(marked)))[:1] == " "
        marked += ["::", ""] if begins and not inside else []
        marked.append(line)
    lines[:] = marked


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", mark_code)
    return {"parallel_read_safe": True}
