"""Files that users give: bytes in, or one error with a code and the path. Standard library only."""

from __future__ import annotations

import gzip
import io
import stat
import zlib
from pathlib import Path

from graphshard.errors import FileError
from graphshard.files.decode import DecodeError, parse
from graphshard.files.information import printable

GIB = 2**30
# Far above any plan or profile; traces of torch.profiler may be long.
MOST_BYTES, MOST_TRACE_BYTES = GIB // 4, 4 * GIB
CHUNK_BYTES = 2**24


def names_file(name: str) -> bool:
    """Whether what stands for a machine is a profile's path: it has a suffix, and no rate with a
    point (h100-12.5gbit)."""
    return Path(name).suffix[1:2].isalpha()


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Raises FileError: GS1203 if it cannot be read, GS1204 for more than `most` bytes."""
    try:
        facts = path.stat()
        if facts.st_size > most:
            raise FileError("GS1204", f"{shown(path)}: more than {most:,} bytes")
        if not stat.S_ISREG(mode := facts.st_mode) and not stat.S_ISFIFO(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "no file"
            raise FileError("GS1203", f"cannot read {shown(path)}: it is {kind}")
        with path.open("rb") as file:
            found = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        if isinstance(error, FileError):
            raise
        raise FileError("GS1203", f"cannot read {shown(path)}: {reason(error)}") from error
    _check_size(path, found, most)
    return found


def read_json(path: Path, most: int = MOST_BYTES) -> object:
    """Raises FileError as `read_bytes`, and GS1204 if it is no JSON."""
    try:
        return parse(read_bytes(path, most))
    except DecodeError as error:
        raise FileError("GS1204", f"{shown(path)}: {error}") from error


def read_packed_json(path: Path) -> object:
    """As `read_json`, of a file that may be gzipped."""
    raw = read_bytes(path, MOST_TRACE_BYTES)
    try:
        return parse(_unpacked(path, raw) if raw[:2] == b"\x1f\x8b" else raw)
    except DecodeError as error:
        raise FileError("GS1204", f"{shown(path)}: {error}") from error


def _unpacked(path: Path, raw: bytes) -> bytes:
    """No more than MOST_TRACE_BYTES, whatever the file would unpack to."""
    found = bytearray()
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
            while chunk := file.read(CHUNK_BYTES):
                found += chunk
                _check_size(path, found, MOST_TRACE_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise FileError("GS1204", f"{shown(path)}: damaged gzip: {error}") from error
    return bytes(found)


def _check_size(path: Path, found: bytes | bytearray, most: int) -> None:
    if len(found) > most:
        raise FileError("GS1204", f"{shown(path)}: more than {most:,} bytes")


def shown(path: Path) -> str:
    return printable(str(path))


def reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return printable(text)
