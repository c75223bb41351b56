"""From JSON to frozen dataclasses: every value is checked against its field's type, once, here.

In: what `json.loads` gave, and a type: a dataclass, an enum, bool, int, float, str, a tuple, a dict
with text as keys, one of these or None, `Annotated` with a `Least`; or several dataclasses, each
with a field `what` of a `Literal` of its own. Out: the value, or DecodeError
that says where and what: "forward.steps[12].group: expected a whole number from 0 on, found 'x'".
Numbers stay the numbers that they are, so that writing the value again gives the same text.
Standard library only.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

Reader = Callable[[Any], Any]

# No number of bytes, elements or microseconds comes near; sums and products stay within a float.
MOST = 2**63
SHOWN = 60


@dataclass(frozen=True, slots=True)
class Least:
    """The smallest number that a field takes."""

    value: int


Count = Annotated[int, Least(0)]
Positive = Annotated[int, Least(1)]
Amount = Annotated[float, Least(0)]


class DecodeError(ValueError):
    """`path`: keys and places from the outside in; `text`: what is wrong there."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.path: list[str | int] = []

    def __str__(self) -> str:
        place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.path)
        return f"{place.removeprefix('.')}: {self.text}" if self.path else self.text


def parse(text: str | bytes) -> object:
    """What JSON `text` holds. Raises DecodeError, also for one that is nested too deeply."""
    try:
        found: object = json.loads(text if isinstance(text, str) else str(text, "utf-8"))
        return found
    except RecursionError:
        raise DecodeError("not JSON that can be read: nested too deeply") from None
    except ValueError as error:  # not UTF-8 either, or a number of thousands of digits
        raise DecodeError(f"not JSON: {error}") from error


def decode(kind: Any, data: object) -> Any:
    """`data` as `kind`. Raises DecodeError."""
    return _reader(kind)(data)


# By type alone: a type reads the same for the whole process.
@functools.cache
def _reader(kind: Any) -> Reader:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _at_least(args[0], args[1].value)
    if origin in (Union, types.UnionType):
        inner = [a for a in args if a is not type(None)]
        read = _one_of(inner) if inner[1:] else _reader(inner[0])
        if len(inner) == len(args):
            return read
        return lambda data: None if data is None else read(data)
    if origin is tuple:
        return _list(args[0]) if args[-1] is Ellipsis else _row(args)
    if origin is dict:
        return _object(args[1])
    if origin is Literal:
        return _literal(args)
    if is_dataclass(kind):
        return _dataclass(kind)
    if issubclass(kind, Enum):
        return _enum(kind)
    return _SCALARS[kind]


def _dataclass(kind: Any) -> Reader:
    hints = get_type_hints(kind, include_extras=True)
    own = {f.name: _reader(hints[f.name]) for f in fields(kind)}
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]

    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise _expected("an object", data)
        for name in data.keys() - own.keys():
            raise DecodeError(f"unknown entry {_shown(name)}")
        for name in needed:
            if name not in data:
                raise DecodeError(f"entry {name!r} is missing")
        return kind(**{name: _inside(own[name], found, name) for name, found in data.items()})

    return read


def _one_of(kinds: list[Any]) -> Reader:
    """Dataclasses that say in `what` which one they are."""
    readers = {get_args(get_type_hints(kind)["what"])[0]: _reader(kind) for kind in kinds}
    read_what = _literal(tuple(readers))

    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise _expected("an object", data)
        return readers[_inside(read_what, data.get("what"), "what")](data)

    return read


def _literal(known: tuple[str, ...]) -> Reader:
    def read(data: Any) -> Any:
        if type(data) is not str or data not in known:
            raise _expected(f"one of {', '.join(known)}", data)
        return data

    return read


def _inside(read: Reader, data: Any, place: str | int) -> Any:
    try:
        return read(data)
    except DecodeError as error:
        error.path.insert(0, place)
        raise


def _list(inner: Any) -> Reader:
    read_item = _reader(inner)

    def read(data: Any) -> Any:
        if type(data) is not list:
            raise _expected("a list", data)
        return tuple([_inside(read_item, item, place) for place, item in enumerate(data)])

    return read


def _row(inner: tuple[Any, ...]) -> Reader:
    readers = [_reader(kind) for kind in inner]

    def read(data: Any) -> Any:
        if type(data) is not list or len(data) != len(readers):
            raise _expected(f"a list of {len(readers)}", data)
        pairs = enumerate(zip(readers, data, strict=True))
        return tuple([_inside(read_item, item, place) for place, (read_item, item) in pairs])

    return read


def _object(inner: Any) -> Reader:
    read_item = _reader(inner)

    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise _expected("an object", data)
        return {key: _inside(read_item, item, key) for key, item in data.items()}

    return read


def _enum(kind: Any) -> Reader:
    members = {member.value: member for member in kind}

    def read(data: Any) -> Any:
        if type(data) is not str or data not in members:
            raise _expected(f"one of {', '.join(members)}", data)
        return members[data]

    return read


def _int(data: Any) -> Any:
    if type(data) is not int or not -MOST < data < MOST:
        raise _expected("a whole number", data)
    return data


def _float(data: Any) -> Any:
    if type(data) not in (int, float) or not -MOST < data < MOST:  # nor is NaN between any two
        raise _expected("a number", data)
    return data


def _at_least(kind: Any, least: int) -> Reader:
    read_number, what = _reader(kind), "whole number" if kind is int else "number"

    def read(data: Any) -> Any:
        if read_number(data) < least:
            raise _expected(f"a {what} from {least} on", data)
        return data

    return read


def _bool(data: Any) -> Any:
    if type(data) is not bool:
        raise _expected("true or false", data)
    return data


def _str(data: Any) -> Any:
    if type(data) is not str:
        raise _expected("text", data)
    return data


_SCALARS: dict[Any, Reader] = {bool: _bool, int: _int, float: _float, str: _str}


def _expected(what: str, data: object) -> DecodeError:
    return DecodeError(f"expected {what}, found {_shown(data)}")


def _shown(data: object) -> str:
    """Short, and nothing that a terminal obeys."""
    if isinstance(data, dict | list):
        return f"{'an object' if isinstance(data, dict) else 'a list'} of {len(data)}"
    if isinstance(data, int) and abs(data) >= 10**SHOWN:
        return "a number of too many digits"
    text = ascii(data)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
