"""Docstrings are plain English. What they mean is marked here for the site: an indented block after
an empty line is code, and "name: text. other, names: text." of parameters and fields is a list.
"""

import inspect
import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sphinx.application import Sphinx

# Of one or more names, at the beginning of a sentence.
NAMED = re.compile(r"(?:(?<=[.;] )|^)(\w+(?:, \w+)*): ")


def mark(app: Sphinx, what: str, name: str, obj: Any, options: object, lines: list[str]) -> None:
    """Marks `lines` in place, paragraph by paragraph."""
    names = _names(obj)
    blocks = [list(group) for full, group in groupby(lines, key=bool) if full]
    marked: list[str] = []
    for block in blocks:
        if block[0][0] == " ":
            inside = any(marked) and marked[-2][:1] == " "
            marked += [*([] if inside else ["::", ""]), *block, ""]
        else:
            marked += [*_listed(" ".join(block), names), ""]
    lines[:] = marked


def _names(obj: Any) -> set[str]:
    """Of the parameters of a function, the fields of a class."""
    try:
        return set(inspect.signature(obj).parameters)
    except (TypeError, ValueError):
        return set()


def _listed(text: str, names: set[str]) -> Iterator[str]:
    """`text` with an item for each name that it explains."""
    found = [m for m in NAMED.finditer(text) if names.issuperset(m[1].split(", "))]
    yield text[: found[0].start() if found else None].rstrip()
    for match, following in zip(found, [*found[1:], None], strict=False):
        own = text[match.end() : following.start() if following else None].rstrip()
        yield ""
        yield f"- **{match[1]}**: {own}"


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", mark)
    return {"parallel_read_safe": True}
