"""Files that users ask for: text out, or one error with a code and the path. Standard library
only."""

from __future__ import annotations

from pathlib import Path

from graphshard.errors import FileError
from graphshard.files.reading import reason, shown


def save_text(path: Path, text: str) -> None:
    """A lone surrogate, which UTF-8 has no bytes for, is written as its escape. Raises FileError
    (GS1203)."""
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise FileError("GS1203", f"cannot write {shown(path)}: {reason(error)}") from error
