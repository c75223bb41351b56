"""Options that stand in no script: in the environment, or in a file of the project.

A framework hands on a backend's name and nothing else, so this is how its users set the rest.
`GRAPHSHARD_OPTIONS` holds JSON, or `key=value,key=value`. The file is the one that
`GRAPHSHARD_CONFIG` names, else the nearest `graphshard.toml`, or `pyproject.toml` with a table
`[tool.graphshard]`, from the working directory upwards. Standard library only; what the options
mean is `graphshard.options`' to know.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from graphshard.errors import FileError, OptionsError
from graphshard.files.decode import DecodeError, parse
from graphshard.files.information import printable
from graphshard.files.reading import read_bytes, shown

OPTIONS = "GRAPHSHARD_OPTIONS"
CONFIG = "GRAPHSHARD_CONFIG"
# Variables of one option each.
VARIABLES = {"GRAPHSHARD_COMPUTE": "compute", "GRAPHSHARD_DUMP_DIR": "dump_dir"}

MOST_BYTES = 2**20
PROJECT = "pyproject.toml"
_WORDS = {"True": True, "False": False, "None": None}


class Source(IntEnum):
    """Where an option may be given, the strongest first."""

    CODE = 0
    ENVIRONMENT = 1
    FILE = 2


@dataclass(frozen=True, slots=True)
class Origin:
    """place: the variable, or the path of the file; "" in code."""

    source: Source
    place: str = ""

    def __str__(self) -> str:
        return printable(self.place) or "code"

    def path(self, written: str | Path) -> Path:
        """A path that was written there: in a file it is relative to the file's folder."""
        return Path(self.place).parent / written if self.source is Source.FILE else Path(written)


IN_CODE = Origin(Source.CODE)


@dataclass(frozen=True, slots=True)
class Given:
    """The value of one option, as it was written."""

    value: object
    origin: Origin

    def __str__(self) -> str:
        return f"{printable(repr(self.value))} from {self.origin}"


def configured() -> dict[str, Given]:
    """What environment and file give for this process, by the option's name.

    Raises OptionsError (GS106) for what cannot be read.
    """
    return _of_file() | _of_environment()


def _of_environment() -> dict[str, Given]:
    found = {
        key: Given(text, Origin(Source.ENVIRONMENT, name))
        for name, key in VARIABLES.items()
        if (text := os.environ.get(name))
    }
    origin = Origin(Source.ENVIRONMENT, OPTIONS)
    text = os.environ.get(OPTIONS, "").strip()
    return found | {key: Given(value, origin) for key, value in _parsed(text).items()}


def _parsed(text: str) -> dict[str, object]:
    if text.startswith("{"):
        try:
            return dict(parse(text))  # type: ignore[call-overload, no-any-return]
        except DecodeError as error:
            raise OptionsError("GS106", f"{OPTIONS}: {error}") from error
    values: dict[str, object] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not key or not equals:
            raise OptionsError(
                "GS106",
                f"{OPTIONS}: {pair!r} is no key=value; write key=value,key=value, or "
                "JSON where a value has a comma",
            )
        values[key] = _value(value)
    return values


def _value(text: str) -> object:
    """`text` as JSON or a word of Python's if it is that, else as it is: 20, true, 70GiB."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return parse(text)
    except DecodeError:
        return text


def _of_file() -> dict[str, Given]:
    named = os.environ.get(CONFIG)
    path = Path(named) if named else _nearest()
    if path is None:
        return {}
    table = _table_of(path)
    origin = Origin(Source.FILE, str(path))
    return {key: Given(value, origin) for key, value in _flat(table)}


def _nearest() -> Path | None:
    try:
        folder = Path.cwd()
    except OSError:  # the working directory was removed: there is nothing to look in
        return None
    for place in (folder, *folder.parents):
        for path in (place / "graphshard.toml", place / PROJECT):
            if os.path.isfile(path) and (path.name != PROJECT or _is_ours(path)):
                return path
    return None


def _is_ours(project: Path) -> bool:
    """It has a table for graphshard. What cannot be read is not known to have one."""
    try:
        text = read_bytes(project, MOST_BYTES)
    except FileError:
        return False
    try:
        return _table_in(tomllib.loads(text.decode())) is not None
    except (ValueError, RecursionError):  # no TOML, which is ours to say if the table is there
        return b"[tool.graphshard" in text


def _table_of(path: Path) -> Mapping[str, Any]:
    try:
        content = tomllib.loads(_content(path).decode())
    except (ValueError, RecursionError) as error:
        raise OptionsError("GS106", f"{shown(path)} is no TOML: {error}") from error
    table = _table_in(content) if path.name == PROJECT else content
    if table is None:
        raise OptionsError("GS106", f"{shown(path)} has no table [tool.graphshard]")
    return table


def _table_in(project: Mapping[str, Any]) -> Mapping[str, Any] | None:
    tool = project.get("tool")
    table = tool.get("graphshard") if isinstance(tool, dict) else None
    return table if isinstance(table, dict) else None


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path, MOST_BYTES)
    except FileError as error:
        raise OptionsError("GS106", f"options: {error.message}") from error


def _flat(table: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """TOML makes tables of dotted keys such as Inductor's `triton.cudagraphs`."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
