"""The reader of JSON into dataclasses: what it takes, and the place that it names."""

from dataclasses import dataclass
from enum import StrEnum

import pytest

from graphshard.files.decode import Amount, Count, DecodeError, decode, parse


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    count: Count
    us: Amount = 0.0
    color: Color | None = None


@dataclass(frozen=True)
class Outer:
    name: str
    inner: tuple[Inner, ...] = ()
    pairs: tuple[tuple[Color, int], ...] = ()
    table: dict[str, float] | None = None
    on: bool = False


def test_it_takes_what_the_types_say():
    data = {
        "name": "n",
        "inner": [{"count": 1, "us": 2, "color": "red"}, {"count": 0}],
        "pairs": [["blue", -3]],
        "table": {"a": 1.5},
        "on": True,
    }
    found = decode(Outer, data)
    inner = (Inner(1, 2, Color.RED), Inner(0))
    assert found == Outer("n", inner, ((Color.BLUE, -3),), {"a": 1.5}, True)
    assert type(found.inner[0].us) is int, "written again, the text is the same"
    assert found.inner[0].color is Color.RED


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "expected an object, found a list of 0"),
        ({}, "entry 'name' is missing"),
        ({"name": 3}, "name: expected text, found 3"),
        ({"name": "", "x": 0}, "unknown entry 'x'"),
        ({"name": "", "\x1b[2J": 0}, r"unknown entry '\\x1b\[2J'"),
        ({"name": "", "on": 1}, "on: expected true or false, found 1"),
        ({"name": "", "inner": {}}, "inner: expected a list, found an object of 0"),
        ({"name": "", "inner": [{"count": 1}, 5]}, r"inner\[1\]: expected an object, found 5"),
        ({"name": "", "inner": [{"count": -1}]}, r"inner\[0\].count: .* from 0 on, found -1"),
        ({"name": "", "inner": [{"count": 1.0}]}, r"inner\[0\].count: expected a whole number"),
        ({"name": "", "inner": [{"count": True}]}, r"inner\[0\].count: .* found True"),
        ({"name": "", "inner": [{"count": 2**63}]}, r"inner\[0\].count: expected a whole"),
        ({"name": "", "inner": [{"count": 10**5000}]}, "found a number of too many digits"),
        ({"name": "", "inner": [{"count": 1, "us": 1e999}]}, r"us: expected a number, found inf"),
        ({"name": "", "inner": [{"count": 1, "us": 10**400}]}, "us: expected a number, found a"),
        ({"name": "", "inner": [{"count": 1, "us": float("nan")}]}, "us: .* found nan"),
        ({"name": "", "inner": [{"count": 1, "us": -0.5}]}, r"us: .* from 0 on, found -0.5"),
        ({"name": "", "inner": [{"count": 1, "color": "x"}]}, "one of red, blue, found 'x'"),
        ({"name": "", "inner": [{"count": 1, "color": []}]}, "one of red, blue, found a list"),
        ({"name": "", "pairs": [["red"]]}, r"pairs\[0\]: expected a list of 2"),
        ({"name": "", "pairs": [["red", None]]}, r"pairs\[0\]\[1\]: .* found None"),
        ({"name": "", "table": {"a": "b"}}, "table.a: expected a number, found 'b'"),
    ],
)
def test_it_names_the_place(data, says):
    with pytest.raises(DecodeError, match=says):
        decode(Outer, data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 10**5, "nested too deeply"),
        ('{"a":' * 10**5, "nested too deeply"),
        ("1" * 5000, "not JSON"),
        (b"\xff", "not JSON"),
        ("", "Expecting value"),
    ],
)
def test_text_that_is_no_json(text, says):
    with pytest.raises(DecodeError, match=says):
        parse(text)
