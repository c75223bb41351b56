"""What a launch found out, on disk for the next one: texts under keys, with checksums.

A file is trusted if its checksum is right and whoever reads it can use it. Any other is named in
one warning, and replaced when the text is made again. Files are written whole, so that launches may
share a folder; the ones that were not used for longest go when the folder holds more than
MOST_BYTES. Nothing here ends a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from graphshard.errors import FileError, GraphshardWarning, PlanError
from graphshard.files.decode import DecodeError, decode
from graphshard.files.information import informing, write_whole
from graphshard.files.reading import read_json, reason, shown

# A plan of 100 groups takes about 1 MiB.
MOST_BYTES = 2**28
# Only a launch that was killed while it wrote leaves a part behind.
PART_SUFFIX, PART_AGE_S = ".part", 3600.0

T = TypeVar("T")


class Kind(Enum):
    """What a text is; its file's name ends with it."""

    PLAN = ".plan.json"
    COSTS = ".costs.json"


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """What a file holds: `text`, and the SHA-256 of it."""

    key: str
    sha256: str
    text: str


def cache_dir() -> Path:
    """`GRAPHSHARD_CACHE_DIR`, or ~/.cache/graphshard."""
    given = os.environ.get("GRAPHSHARD_CACHE_DIR")
    return Path(given) if given else Path("~/.cache/graphshard").expanduser()


def load(key: str, kind: Kind, use: Callable[[str], T]) -> T | None:
    """What `use` makes of the text under `key`; None if there is none that can be used.

    use: raises DecodeError, FileError or PlanError for a text that is of no use. A file with such a
    one, or a damaged one, is named in a GraphshardWarning (GS706).
    """
    path = None
    try:
        path = _path(key, kind)
        if not path.exists():
            return None
        found = use(_text_of(key, path))
    except (OSError, RuntimeError, DecodeError, FileError, PlanError) as error:
        why = reason(error).removeprefix(f"GS1204: {shown(path)}: ") if path else reason(error)
        text = f"GS706: {path or cache_dir} is ignored, and made again: {why}"
        warnings.warn(text, GraphshardWarning, stacklevel=3)
        return None
    with contextlib.suppress(OSError):  # a folder of someone else's: then it is not kept for longer
        os.utime(path)
    return found


def _text_of(key: str, path: Path) -> str:
    found: CacheEntry = decode(CacheEntry, read_json(path))
    if found.key != key:
        raise DecodeError("it is the file of another key")
    if _checksum(found.text) != found.sha256:
        raise DecodeError("its checksum is wrong")
    return found.text


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def save(key: str, kind: Kind, text: str) -> None:
    """Write `text` under `key`: a reader sees the whole file or none."""
    with informing("the cache", os.environ.get("GRAPHSHARD_CACHE_DIR", "~/.cache/graphshard")):
        path = _path(key, kind)
        if path.is_dir():  # in the place of a file: not ours to delete
            return
        write_whole(path, json.dumps(asdict(CacheEntry(key, _checksum(text), text))))
        _evict(path)


def _evict(newest: Path) -> None:
    """The files that were not used for longest go until what is left is within MOST_BYTES."""
    left = MOST_BYTES
    for used_s, size, path in sorted(_files(newest.parent), reverse=True):
        left -= size
        is_part = path.name.endswith(PART_SUFFIX)
        is_old = time.time() - used_s > PART_AGE_S
        if path != newest and (is_old if is_part else left < 0):
            path.unlink(missing_ok=True)


def _files(folder: Path) -> Iterator[tuple[float, int, Path]]:
    """When each file of the cache was last used, and its size; other files are not looked at."""
    suffixes = (*(kind.value for kind in Kind), PART_SUFFIX)
    for found in os.scandir(folder):
        if found.name.endswith(suffixes) and found.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):  # another launch evicts too
                facts = found.stat()
                yield facts.st_mtime, facts.st_size, Path(found.path)


def _path(key: str, kind: Kind) -> Path:
    return cache_dir() / f"{key[:32]}{kind.value}"
