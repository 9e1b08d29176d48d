"""Records as plain data: what is written is read again, and the first wrong field is named."""

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from builders.inside import decode, encode

from safeload import FormatError

pytestmark = [pytest.mark.inner, pytest.mark.any_python, pytest.mark.no_core]


class Row(NamedTuple):
    """A list."""

    path: str
    size: int
    first: int = 0


@dataclass(frozen=True)
class Inner:
    """An object inside another one."""

    name: str

    def __post_init__(self):
        if self.name == "bad":
            raise ValueError("name must be good")


@dataclass(frozen=True, kw_only=True)
class Record:
    """One field of each kind."""

    version: str = "1.2"
    rows: tuple[Row, ...]
    weight: float
    flag: bool = False
    pair: tuple[str, str] | None = None
    inner: Inner | None = None
    config: Row | dict[str, Any] | None = None
    names: list[str] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)


MINIMAL = {"version": "1.2", "rows": [], "weight": 1}


def test_records_are_read_as_they_were_written():
    record = Record(
        rows=(Row("a", 1, 2), Row("b", 3)),
        weight=0.5,
        flag=True,
        pair=("x", "y"),
        inner=Inner("z"),
        config=Row("c", 4),
        names=["n"],
        texts={"k": "v"},
    )
    plain = json.loads(json.dumps(encode(record)))
    assert plain["rows"] == [["a", 1, 2], ["b", 3, 0]]
    assert decode(Record, plain, "invalid record") == record
    assert decode(Record, {**plain, "config": {"a": [1]}}, "invalid record").config == {"a": [1]}


def test_empty_optional_fields_are_left_out():
    record = Record(rows=(), weight=1)
    assert encode(record) == MINIMAL
    assert decode(Record, MINIMAL, "invalid record") == record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": "x"}, "weight must be a number, got 'x'"),
        ({"weight": True}, "weight must be a number, got True"),
        ({"weight": 1 << 2000}, "weight must be a number, got "),
        ({"flag": 1}, "flag must be true or false, got 1"),
        ({"flag": None}, "flag must be true or false, got None"),
        ({"rows": {}}, "rows must be a list, got {}"),
        ({"rows": [["a"]]}, r"rows\[0\] must be \[path, size, first\], got \['a'\]"),
        ({"rows": [["a", 1, 2, 3]]}, r"rows\[0\] must be \[path, size, first\], got"),
        ({"rows": [["a", True]]}, r"rows\[0\].size must be an integer, got True"),
        ({"pair": ["x"]}, r"pair must have 2 items, got \['x'\]"),
        ({"pair": ["x", 7]}, r"pair\[1\] must be a string, got 7"),
        ({"inner": 3}, "inner must be an object or null, got 3"),
        ({"inner": {}}, "inner.name is missing"),
        ({"inner": {"name": "bad"}}, "inner: name must be good"),
        ({"inner": {"name": "x", "y": 1}}, "unknown field 'inner.y'"),
        ({"config": 7}, r"config must be \[path, size, first\], an object or null, got 7"),
        ({"names": ["a", 1]}, r"names\[1\] must be a string, got 1"),
        ({"texts": {"a": 1}}, r"texts\['a'\] must be a string, got 1"),
        ({"texts": {1: "a"}}, "texts must have strings as keys, got 1"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_a_wrong_field_is_named(change, message):
    with pytest.raises(FormatError, match=f"^invalid record: {message}"):
        decode(Record, {**MINIMAL, **change}, "invalid record")


@pytest.mark.parametrize("plain", [None, 7, "x", [], [MINIMAL]])
def test_only_an_object_is_a_record(plain):
    with pytest.raises(FormatError, match=r"^invalid record: must be an object, got "):
        decode(Record, plain, "invalid record")


def test_a_missing_field_is_named():
    with pytest.raises(FormatError, match=r"^invalid record: weight is missing$"):
        decode(Record, {"rows": []}, "invalid record")


def test_fields_of_later_releases_can_be_ignored():
    assert decode(Record, {**MINIMAL, "later": 1}, "invalid record", extra=True) == Record(rows=(), weight=1)
