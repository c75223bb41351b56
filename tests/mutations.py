"""Damage to files, from a seed: of JSON by its structure, of any file by its bytes."""

import gzip
import json
import random
from collections.abc import Callable
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 99, 0.5, -0.5, 1e308, -1e308, 1e999, -1e999, float("nan"),
    2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400,
    "", "x", "0", "forward", "backward", "compute", "gather_issue", "layers.0", "\x1b[31m", "[red]",
    "\ud800", "a\nb", "<script>", "x" * 3000, "\u202e", "cpu", "../../x",
    [], {}, [[]], [0], [1, 1], ["x"], {"x": 1}, [None], [[1, 2], [3]],
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in `value`, from the outside in."""
    found, left = [], [value]
    while left:
        inner = left.pop()
        keys = range(len(inner)) if isinstance(inner, list) else list(inner)
        for key in keys:
            found.append((inner, key))
            if isinstance(inner[key], dict | list):
                left.append(inner[key])
    return found


def pick(draw: random.Random, value: Any) -> tuple[Any, Any]:
    """A place; each name of a key as likely as any other, however often it occurs."""
    by_name: dict[Any, list[tuple[Any, Any]]] = {}
    for inner, key in places(value):
        by_name.setdefault(key if isinstance(key, str) else "[]", []).append((inner, key))
    return draw.choice(by_name[draw.choice(list(by_name))])


def number(draw: random.Random, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return draw.choice(ODD)
    near = (value + 1, value - 1, -value, value * 2, value / 2, value * 1000, str(value), [value])
    return draw.choice((*near, *ODD))


def changed(draw: random.Random, data: Any) -> Any:
    """One change of the structure of `data`, in place."""
    if not isinstance(data, dict | list) or not data:
        return draw.choice(ODD)
    inner, key = pick(draw, data)
    kind = draw.choice(("set", "set", "number", "drop", "add", "nest", "list", "list", "copy"))
    if kind == "list":
        lists = [c[k] for c, k in places(data) if isinstance(c[k], list) and c[k]]
        if lists:
            rows(draw, draw.choice(lists))
        return data
    if kind == "set":
        inner[key] = draw.choice(ODD)
    elif kind == "number":
        inner[key] = number(draw, inner[key])
    elif kind == "drop":
        del inner[key]
    elif kind == "add" and isinstance(inner, dict):
        inner[draw.choice(("x", "", "schema", "id", "\x1b[31m"))] = draw.choice(ODD)
    elif kind == "nest":
        inner[key] = nested(draw, inner[key])
    elif kind == "copy":
        other, place = pick(draw, data)
        inner[key] = json.loads(json.dumps(other[place]))
    return data


def rows(draw: random.Random, found: list[Any]) -> None:
    """Drop, double, move or swap elements."""
    i, j = draw.randrange(len(found)), draw.randrange(len(found))
    kind = draw.choice(("drop", "double", "move", "swap", "clear", "reverse"))
    if kind == "drop":
        del found[i]
    elif kind == "double":
        found.insert(j, found[i])
    elif kind == "move":
        found.insert(j, found.pop(i))
    elif kind == "swap":
        found[i], found[j] = found[j], found[i]
    elif kind == "clear":
        found.clear()
    else:
        found.reverse()


def nested(draw: random.Random, value: Any) -> Any:
    for _ in range(draw.choice((1, 3, 60, 300))):
        value = [value] if draw.random() < 0.5 else {"x": value}
    return value


def damaged(draw: random.Random, raw: bytes) -> bytes:
    """One change of the bytes of a file."""
    kind = draw.choice(("cut", "cut", "flip", "fill", "deep", "empty", "gzip", "cut gzip", "bomb"))
    place = draw.randrange(max(1, len(raw)))
    if kind == "cut":
        return raw[:place]
    if kind == "flip":
        made = bytearray(raw)
        for _ in range(draw.choice((1, 2, 10))):
            made[draw.randrange(len(made))] = draw.randrange(256)
        return bytes(made)
    if kind == "fill":
        return raw[:place] + draw.randbytes(draw.choice((1, 8, 100))) + raw[place:]
    if kind == "deep":
        return raw[:place] + draw.choice((b"[", b'{"a":')) * 20_000 + raw[place:]
    if kind == "empty":
        return draw.choice(
            (b"", b" ", b"\0", b"null", b"[]", b"{}", b"\xff\xfe", b"\xef\xbb\xbf{}")
        )
    packed = gzip.compress(raw, 1)
    if kind == "gzip":
        return packed
    if kind == "bomb":
        return gzip.compress(b"[" + b" " * 10**7, 1)
    return damaged_bytes(draw, packed)


def damaged_bytes(draw: random.Random, raw: bytes) -> bytes:
    place = draw.randrange(len(raw))
    return draw.choice((raw[:place], raw[:place] + draw.randbytes(4) + raw[place + 4 :]))


def mutated(draw: random.Random, raw: bytes, mend: Callable[[Any], Any] = lambda d: d) -> bytes:
    """`raw`, which is JSON, with one to three changes. mend: is given the changed data."""
    if draw.random() < 0.15:
        return damaged(draw, raw)
    data = json.loads(raw)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        data = changed(draw, data)
    return json.dumps(mend(data)).encode()
