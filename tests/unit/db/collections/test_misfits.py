"""Values that would lose something on their way in, and stored rows that no longer fit the type of their collection."""

from __future__ import annotations

import enum
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime
from typing import Any, NewType, NotRequired, Tuple, TypedDict  # noqa: UP035 - the old form of a type is accepted, too
from uuid import UUID

import pyarrow as pa
import pytest

import flagstone
from flagstone import InvalidRequest, keys
from flagstone.db.writer.database import Db
from flagstone.store.memory import MemoryStore
from kit.databases import QUIET

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


UserId = NewType("UserId", int)


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Grey(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    tags: list[str] = field(default_factory=list)


@dataclass
class Place(Point):
    name: str = ""


@dataclass
class Box:
    corner: Point
    more: dict[str, int] = field(default_factory=dict)


@dataclass
class Positive:
    x: int

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x is negative")


@dataclass
class Node:
    next: Node | None = None


class Partial(TypedDict):
    a: int
    b: NotRequired[str]


class Loose(TypedDict, total=False):
    a: int


@pytest.fixture
def db() -> Iterator[Db]:
    with flagstone.open("db", store=MemoryStore(), settings=QUIET) as db:
        yield db


@pytest.mark.parametrize(
    ("declared", "value", "text"),
    [
        (int, 1.5, "1.5 is not a whole number"),
        (list[int], [1, 2.5], "2.5 is not a whole number"),
        (pa.schema([("a", pa.int32())]), {"a": 1.5}, "1.5 is not a whole number"),
        (Point, Point(1.5), "'x'"),  # type: ignore[arg-type]
        (date, NOON, "use its date()"),
        (datetime, datetime(2026, 1, 31), "has no time zone"),
        (list[str], "abc", "is a list, not a str"),
        (list[int], [1, None], "an element is None"),
        (dict[str, int], {"a": None}, "a value is None"),
        (dict[str, int], [("a", 1)], "is a dict, not a list"),
        (UUID, "no uuid", "badly formed"),
        (UUID, 5, "is a UUID, not a int"),
        (Color, "green", "'green' is not a valid Color"),
        ({"a": int}, {"a": 1, "b": 2}, "there is no field 'b'; there are a"),
        (Partial, {"a": 1, "c": 2}, "there is no field 'c'; there are a, b"),
        (Point, Place(1, name="x"), "there is no field 'name'; there are x, tags"),
        (Box, Box(5), "field 'corner': a value of this collection is a Point, not int"),  # type: ignore[arg-type]
        (Box, Box(Place(1)), "there is no field 'name'"),
    ],
)
def test_what_a_column_cannot_hold_is_refused_and_nothing_is_written(
    db: Db, declared: Any, value: Any, text: str
) -> None:
    rows = db.collection("c", key=str, value=declared)
    with pytest.raises(InvalidRequest) as refused:
        rows["a"] = value
    assert text in str(refused.value)
    assert list(rows) == []


def test_a_uuid_in_a_key_has_one_spelling_and_other_text_is_refused(db: Db) -> None:
    """A text that is no UUID would make every later loop over the keys fail."""
    rows = db.collection("c", key=(UUID, int), value=bytes)
    some = UUID("12345678-1234-5678-1234-56781234ABCD")
    rows[str(some).upper(), 1] = b"v"
    assert list(rows) == [(some, 1)]
    assert rows[some, 1] == b"v"
    assert [key for key, _ in rows.scan(f"{{{some}}}")] == [(some, 1)]
    with pytest.raises(InvalidRequest, match="column 'key1': 'garbage' is not a UUID"):
        rows["garbage", 1] = b"v"
    with pytest.raises(InvalidRequest, match="3 parts for 2 columns"):
        list(rows.scan(some, 1, 2))


def test_a_type_that_contains_itself_or_is_not_known_is_refused(db: Db) -> None:
    with pytest.raises(InvalidRequest, match=r"field 'Node\.next' has the type Node, which contains itself"):
        db.collection("c", key=str, value=Node)
    with pytest.raises(InvalidRequest, match="'Missing' is not defined"):
        db.collection("c", key=str, value=make_dataclass("Odd", [("a", "Missing")]))


def test_a_typed_dictionary_may_lack_items(db: Db) -> None:
    rows = db.collection("c", key=str, value=Partial)
    rows.update({"x": {"a": 1}, "y": {"a": 1, "b": "q"}})
    assert list(rows.values()) == [{"a": 1}, {"a": 1, "b": "q"}]
    loose = db.collection("d", key=str, value=Loose)
    loose["x"] = {}
    assert loose["x"] == {}
    with pytest.raises(InvalidRequest, match="'a' is None"):
        rows["z"] = {"b": "q"}  # type: ignore[typeddict-item]


def test_a_new_type_is_the_type_behind_it(db: Db) -> None:
    rows = db.collection("c", key=(UserId, str), value={"friend": UserId})
    rows[UserId(1), "a"] = {"friend": UserId(2)}
    assert dict(rows.items()) == {(1, "a"): {"friend": 2}}


def test_any_mapping_is_a_value_and_the_old_form_of_a_tuple_a_key(db: Db) -> None:
    rows = db.collection("c", key=Tuple[str, int], value={"a": int})  # noqa: UP006
    rows["x", 1] = UserDict({"a": 3})
    assert dict(rows.items()) == {("x", 1): {"a": 3}}


def test_models_of_pydantic_with_aliases_come_back_and_extra_fields_are_refused(db: Db) -> None:
    pydantic = pytest.importorskip("pydantic")
    plain: Any = pydantic.create_model("M", a=(int, pydantic.Field(alias="A")), b=(int, 2))
    rows = db.collection("c", key=str, value=plain)
    rows["x"] = plain(A=1)
    assert rows["x"] == plain(A=1)
    config = pydantic.ConfigDict(extra="allow")
    open_model: Any = pydantic.create_model("O", __config__=config, a=(int, 1))
    others = db.collection("d", key=str, value=open_model)
    others["x"] = open_model(a=2)
    with pytest.raises(InvalidRequest, match="there is no field 'z'"):
        others["y"] = open_model(a=2, z=3)


def test_defaults_of_msgspec_structs_count_for_older_rows(db: Db) -> None:
    msgspec = pytest.importorskip("msgspec")
    first = msgspec.defstruct("S", [("a", int)])
    then = msgspec.defstruct(
        "S", [("a", int), ("b", str, "q"), ("c", list[int], msgspec.field(default_factory=list))]
    )
    db.collection("c", key=str, value=first)["x"] = first(1)
    assert db.collection("c", key=str, value=then)["x"] == then(1, "q", [])


@pytest.mark.parametrize(
    ("first", "value", "then", "text"),
    [
        (Color, Color.BLUE, Grey, "'blue' is not a valid Grey"),
        (str, "no uuid", UUID, "badly formed"),
        (Point, Point(-1), Positive, "x is negative"),
        (int | None, None, int, "is null, and its type is not optional"),
    ],
)
def test_a_stored_row_that_does_not_fit_is_refused_with_its_key_and_stays(
    db: Db, first: Any, value: Any, then: Any, text: str
) -> None:
    db.collection("c", key=str, value=first)["a"] = value
    with pytest.raises(InvalidRequest) as refused:
        db.collection("c", key=str, value=then)["a"]
    assert text in str(refused.value)
    assert "the key 'a' of the collection 'c'" in "".join(refused.value.__notes__)
    assert db.collection("c", key=str, value=first)["a"] == value


def test_a_wrong_declaration_leaves_rows_without_columns_to_their_own_program(db: Db) -> None:
    """A schema would keep the program that wrote them as JSON from declaring its collection."""
    rows = db.collection("c", key=str, value="json")
    rows["a"] = {"n": 1}
    with pytest.raises(InvalidRequest, match="has values without columns"):
        db.collection("c", key=str, value=Point)
    assert db.schema(keys.encode("c")) is None
    assert db.collection("c", key=str, value="json")["a"] == {"n": 1}


def test_views_compare_as_sets_without_a_length(db: Db) -> None:
    rows = db.collection("c", key=str, value="json")
    assert not rows.keys()
    assert not rows.items()
    assert not rows.values()
    rows.update({"a": {"n": 1}}, b={"n": 2})
    assert rows.keys() == {"a", "b"}
    assert rows.keys() <= {"a", "b", "c"}
    assert not rows.keys() < {"a", "b"}
    assert rows.keys() > {"a"}
    assert rows.items() == {"a": {"n": 1}, "b": {"n": 2}}.items()
    assert rows.items() < {"a": {"n": 1}, "b": {"n": 2}, "c": 3}.items()
    assert not rows.items() >= {"a": {"n": 3}}.items()
    assert list(reversed(rows.keys())) == ["b", "a"]
    assert rows.keys()
    assert rows.values()


def test_what_is_no_handle_and_slices_are_refused(db: Db) -> None:
    rows = db.collection("c", key=str, value="json")
    with pytest.raises(InvalidRequest, match="not within None"):
        rows.within(None)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"no slices: use scan\(\)"):
        rows["a":"b"]  # type: ignore[misc,index]
