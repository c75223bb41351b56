"""What is written for the user's information never ends training.

The one way in which a run writes what it does not need itself: logs, torch's structured trace,
`dump_dir`, `report_dir`, the cache. Inside `informing` whatever fails (a folder that cannot be
written to, a full disk, a name that no encoding knows) becomes one GraphshardWarning (GS1201) per
cause, and the run goes on; `write_whole` leaves a whole file or none. Standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import unicodedata
import warnings
from collections.abc import Iterator
from pathlib import Path

from graphshard.errors import GraphshardWarning


@contextlib.contextmanager
def informing(what: str, where: Path | str) -> Iterator[None]:
    """Only for what nothing that runs depends on. what, where: for the warning, such as "dump_dir"
    and the folder. Exceptions that are no errors (an interrupt) pass."""
    try:
        yield
    except Exception as error:
        _warn(what, str(where), _cause(error))


def write_whole(path: Path, text: str) -> None:
    """`path` holds `text`, or what it held before; folders are made. Raises OSError.

    A lone surrogate, which UTF-8 has no bytes for, is written as its escape.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")
    try:
        with open(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.chmod(part, 0o666 & ~_umask())  # mkstemp lets nobody else read
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


@functools.cache
def _umask() -> int:
    """Read once: it can be read only by setting it, for a moment, for all threads."""
    found = os.umask(0o022)
    os.umask(found)
    return found


def _cause(error: Exception) -> str:
    """Without the name of the file, which differs from graph to graph."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{type(error).__name__}: {printable(text[:300])}"


# Cached, so that each cause is said once per process.
@functools.cache
def _warn(what: str, where: str, cause: str) -> None:
    text = f"graphshard: GS1201: {what} is not written to {printable(where)}: {cause}"
    warnings.warn(f"{text}; what runs is not changed by it", GraphshardWarning, stacklevel=4)


def printable(text: str, keep: str = "") -> str:
    r"""`text` with escapes in place of what a terminal would obey or cannot show: "\x1b[31m".

    keep: characters that stay, such as a line break.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def _escape(character: str) -> str:
    if unicodedata.category(character) == "Zs":  # a no-break space harms nobody
        return character
    return ascii(character)[1:-1]
