"""Typed collections: what is stored, what comes back, what is refused."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flagstone
from flagstone import InvalidRequest, TransactionConflict, WriteBatch, aio, keys
from flagstone.db.writer.database import Db
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL, QUIET

SOME_ID = UUID("12345678-1234-5678-1234-567812345678")
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


class State(enum.Enum):
    OPEN = "open"
    PAID = "paid"


@dataclass
class Line:
    article: str
    pieces: int


@dataclass
class Order:
    customer: str
    total: float
    lines: list[Line] = field(default_factory=list)
    placed: datetime | None = None
    state: State = State.OPEN
    kind: Literal["web", "shop"] = "web"
    token: UUID | None = None
    price: Annotated[Decimal, pa.decimal128(10, 2)] = Decimal("0.00")
    marks: dict[str, int] = field(default_factory=dict)


FULL = Order(
    "alice",
    9.5,
    [Line("pen", 2), Line("ink", 1)],
    NOON,
    State.PAID,
    "shop",
    SOME_ID,
    Decimal("12.50"),
    {"a": 1},
)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def db(store: MemoryStore) -> Iterator[Db]:
    with flagstone.open("db", store=store, settings=QUIET) as db:
        yield db


@pytest.fixture
def orders(db: Db) -> Any:
    return db.collection("orders", key=(str, int), value=Order)


def test_a_collection_is_a_mapping_of_objects_in_key_order(orders: Any) -> None:
    assert isinstance(orders, MutableMapping)
    orders["us", 1] = Order("carol", 3.0)
    orders["eu", 10] = FULL
    orders["eu", 9] = Order("bob", 1.0)

    assert orders["eu", 10] == FULL
    assert list(orders) == [("eu", 9), ("eu", 10), ("us", 1)]
    assert list(reversed(orders)) == [("us", 1), ("eu", 10), ("eu", 9)]
    assert ("eu", 9) in orders
    assert ("eu", 11) not in orders
    assert orders.get(("eu", 11)) is None
    assert orders.get(("eu", 11), 5) == 5
    assert orders.multi_get([("us", 1), ("x", 0)]) == [Order("carol", 3.0), None]
    assert dict(orders.items())["eu", 9] == Order("bob", 1.0)
    assert [order.customer for order in orders.values()] == ["bob", "alice", "carol"]
    with pytest.raises(KeyError):
        orders["eu", 11]
    with pytest.raises(TypeError, match=r"count\(\)"):
        len(orders)
    assert (orders.count(), orders.count("eu"), orders.approximate_len("us")) == (3, 2, 1)


def test_a_scan_takes_leading_parts_and_bounds_of_the_next(orders: Any) -> None:
    orders.update(
        {(region, number): Order(region, number) for region in ("eu", "europe") for number in range(5)}
    )
    assert [key for key, _ in orders.scan("eu")] == [("eu", number) for number in range(5)]
    assert [key for key, _ in orders.scan("eu", start=1, stop=3)] == [("eu", 1), ("eu", 2)]
    assert [key for key, _ in orders.scan("eu", start=3)] == [("eu", 3), ("eu", 4)]
    assert [key for key, _ in orders.scan(stop="europe")] == [("eu", number) for number in range(5)]
    assert [key for key, _ in orders.scan(start=("eu", 4), stop=("europe", 1))] == [("eu", 4), ("europe", 0)]
    assert [key for key, _ in orders.scan("eu", reverse=True, limit=1)] == [("eu", 4)]
    assert list(orders.scan("eu", start=3, stop=1)) == []
    assert list(orders.scan("asia")) == []


def test_the_keys_are_those_of_flagstone_keys_and_collections_do_not_mix(db: Db, orders: Any) -> None:
    orders["eu", 1] = FULL
    db.collection("order", key=str, value=bytes)["s"] = b"other"
    assert list(db) == [keys.encode("order", "s"), keys.encode("orders", "eu", 1)]
    assert list(orders) == [("eu", 1)]
    assert db.schema(keys.encode("order")) is None
    assert db.schema(keys.encode("orders")) is not None


def test_a_collection_changes_like_a_dictionary(db: Db, orders: Any) -> None:
    orders["eu", 1] = FULL
    assert orders.setdefault(("eu", 1), Order("x", 0)) == FULL
    assert orders.setdefault(("eu", 2), Order("x", 0)) == Order("x", 0)
    assert orders.pop(("eu", 2)) == Order("x", 0)
    assert orders.pop(("eu", 2), None) is None
    with pytest.raises(KeyError):
        orders.pop(("eu", 2))
    assert orders.popitem() == (("eu", 1), FULL)
    db[b"zz"] = b"beside"
    db[b"A"] = b"beside"
    orders.update((("eu", number), FULL) for number in range(1500))
    del orders["eu", 0]
    assert orders.count() == 1499
    orders.clear()
    assert (list(orders), list(db)) == ([], [b"A", b"zz"])


@pytest.mark.parametrize(
    ("declared", "key", "stored"),
    [
        (str, "a", keys.encode("c", "a")),
        (int, -5, keys.encode("c", -5)),
        (bytes, b"\0", keys.encode("c", b"\0")),
        (float, 1.5, keys.encode("c", 1.5)),
        (bool, True, keys.encode("c", True)),
        (date, date(2026, 1, 31), keys.encode("c", date(2026, 1, 31))),
        (datetime, NOON, keys.encode("c", NOON)),
        (UUID, SOME_ID, keys.encode("c", str(SOME_ID))),
        ("decimal(10,2)", Decimal("1.50"), keys.encode("c", Decimal("1.5"))),
        ((str, int), ("a", 1), keys.encode("c", "a", 1)),
        (tuple[str, int], ("a", 1), keys.encode("c", "a", 1)),
        ({"region": str, "id": UUID}, ("a", SOME_ID), keys.encode("c", "a", str(SOME_ID))),
    ],
    ids=repr,
)
def test_keys_of_every_kind_come_back_as_they_were(db: Db, declared: Any, key: Any, stored: bytes) -> None:
    rows = db.collection("c", key=declared, value=bytes)
    rows[key] = b"v"
    assert list(db) == [stored]
    assert list(rows) == [key]
    assert type(next(iter(rows))) is type(key)
    assert rows[key] == b"v"


def test_numpy_scalars_are_parts_of_keys_and_values(db: Db) -> None:
    numpy = pytest.importorskip("numpy")
    rows = db.collection("c", key=(numpy.int32, str), value={"x": numpy.float32, "n": int})
    rows[numpy.int32(7), numpy.str_("a")] = {"x": numpy.float32(1.5), "n": 3}
    assert dict(rows.items()) == {(7, "a"): {"x": 1.5, "n": 3}}
    assert rows[7, "a"]["x"] == 1.5
    with pytest.raises(InvalidRequest, match="int32"):
        rows[2**40, "a"] = {"x": 1.0, "n": 1}
    plain = db.collection("d", key=int, value=bytes)
    plain[numpy.int64(3)] = b"v"
    assert list(plain) == [3]


class Plain(TypedDict):
    name: str
    size: int


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        (bytes, b"\0\xff"),
        ("json", {"a": [1, None, "ü"]}),
        (str, "ü"),
        (int, -(2**63)),
        (float, 0.1),
        (bool, False),
        (date, date(1, 1, 1)),
        (datetime, NOON),
        (timedelta, timedelta(days=3, microseconds=1)),
        (UUID, SOME_ID),
        (State, State.PAID),
        (list[int], [1, 2]),
        (dict[str, float], {"a": 1.0}),
        (set[str], {"a", "b"}),
        (Order, FULL),
        (Plain, {"name": "x", "size": 3}),
        ({"name": str, "size": int | None}, {"name": "x", "size": None}),
        (pa.schema([("a", pa.int16()), ("b", pa.list_(pa.string()))]), {"a": 3, "b": ["x"]}),
    ],
    ids=lambda each: type(each).__name__,  # a set has no fixed order, and workers compare the names of tests
)
def test_values_of_every_kind_come_back_as_they_were(db: Db, declared: Any, value: Any) -> None:
    rows = db.collection("c", key=int, value=declared)
    rows[1] = value
    db.flush()
    assert rows[1] == value
    assert type(rows[1]) is type(value)
    assert list(rows.values()) == [value]


@pytest.mark.parametrize("declared", ["json", int | None], ids=["json", "optional"])
def test_none_is_a_value_where_the_type_has_it(db: Db, declared: Any) -> None:
    rows = db.collection("c", key=str, value=declared)
    by_kind = rows.index("by_kind", lambda value: value is None)
    rows["a"] = None
    assert (rows["a"], rows.get("a", 5), "a" in rows) == (None, None, True)
    assert rows.setdefault("a", 3) is None
    assert list(by_kind.scan(True)) == [("a", None)]
    assert rows.check_indexes() == []
    assert rows.pop("a", 7) is None
    assert rows.pop("a", 7) == 7
    with pytest.raises(KeyError):
        rows["a"]


def test_pydantic_models_are_values(db: Db) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Inner(pydantic.BaseModel):
        n: int

    class Model(pydantic.BaseModel):
        name: str
        inner: Inner
        many: list[Inner] = pydantic.Field(default_factory=list)
        note: str | None = None

    Inner.__module__ = Model.__module__ = __name__
    globals().update(Inner=Inner)
    rows = db.collection("c", key=str, value=Model)
    model = Model(name="x", inner=Inner(n=1), many=[Inner(n=2)])
    rows["a"] = model
    assert rows["a"] == model
    assert isinstance(rows["a"].inner, Inner)


def test_msgspec_structs_are_values(db: Db) -> None:
    msgspec = pytest.importorskip("msgspec")
    struct = msgspec.defstruct("Point", [("x", int), ("y", int)])
    rows = db.collection("c", key=str, value=struct)
    rows["a"] = struct(1, 2)
    assert rows["a"] == struct(1, 2)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda db: db.collection("c", key=list, value=bytes), "a part of a key cannot be <class 'list'>"),
        (lambda db: db.collection("c", key=Decimal, value=bytes), "'decimal"),
        (lambda db: db.collection("c", key=(), value=bytes), "at least one part"),
        (lambda db: db.collection("", key=str, value=bytes), "name of a collection"),
        (lambda db: db.collection("c", key=str, value="xml"), "'json'"),
        (lambda db: db.collection("c", key=str, value=Decimal), "Annotated"),
        (lambda db: db.collection("c", key=str, value=object), "has no column type"),
        (lambda db: db.collection("c", key=str, value={"a": Any}), "field 'a'"),
        (lambda db: db.collection("c", key=str, value={"key": str}), "name the parts of the key"),
        (lambda db: db.collection("c", key=(str, int), value=bytes).get("a"), "is a tuple (key1: string"),
        (lambda db: db.collection("c", key=(str, int), value=bytes).get(("a",)), "has 1 part"),
        (lambda db: db.collection("c", key=(str, int), value=bytes).get(("a", "b")), "column 'key2'"),
        (lambda db: db.collection("c", key=str, value=bytes).put("a", "b"), "is bytes, not str"),
        (lambda db: db.collection("c", key=str, value="json").put("a", object()), "no JSON document"),
        (
            lambda db: db.collection("c", key=str, value=Order).put("a", {"customer": "x"}),
            "is a Order, not dict",
        ),
        (lambda db: db.collection("c", key=str, value=Order).put("a", Order(None, 1)), "'customer' is None"),
        (lambda db: db.collection("c", key=str, value=Order).put("a", Order("a", "b")), "total"),
        (lambda db: db.collection("c", key=str, value=str).put("a", None), "delete the key"),
        (lambda db: db.snapshot().collection("c", key=str, value=str).put("a", "b"), "read"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_written(db: Db, use: Any, text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        use(db)
    assert text in str(refused.value)
    assert list(db) == []


# -- transactions, batches, readers -------------------------------------------------------------------------


def test_a_collection_works_within_transactions_batches_and_snapshots(db: Db, orders: Any) -> None:
    with db.transaction() as tx:
        inside = orders.within(tx)
        assert inside.put(("eu", 1), FULL) is None
        assert list(inside) == [("eu", 1)]
        assert list(orders) == []
    with db.batch() as batch:
        orders.within(batch)["eu", 2] = FULL
        del orders.within(batch)["eu", 1]
        with pytest.raises(InvalidRequest, match="batch is only written"):
            orders.within(batch).get(("eu", 2))
    with db.snapshot() as before:
        orders["eu", 3] = FULL
        assert list(orders.within(before)) == [("eu", 2)]
        with pytest.raises(InvalidRequest, match="only read"):
            orders.within(before).put(("eu", 4), FULL)
    assert list(orders) == [("eu", 2), ("eu", 3)]
    db.run(lambda tx: orders.within(tx).pop(("eu", 2)))
    assert list(orders) == [("eu", 3)]


def test_concurrent_transactions_on_one_row_conflict(db: Db, orders: Any) -> None:
    orders["eu", 1] = FULL
    one, other = db.transaction(), db.transaction()
    orders.within(one)["eu", 1] = Order("x", 1)
    orders.within(other)["eu", 1] = Order("y", 1)
    one.commit()
    with pytest.raises(TransactionConflict):
        other.commit()


def test_a_write_can_be_awaited_and_expires(db: Db, orders: Any) -> None:
    handle = orders.put(("eu", 1), FULL, ttl="1h", await_durable=True)
    assert handle.done()
    row = db.get_row(keys.encode("orders", "eu", 1))
    assert row is not None
    assert row.expires_ms is not None


def test_readers_decode_what_another_process_wrote(db: Db, orders: Any, store: MemoryStore) -> None:
    db.flush("wal")
    with flagstone.open_reader("db", store=store) as reader:
        seen = reader.collection("orders", key=(str, int), value=Order)
        assert list(seen) == []
        orders.put(("eu", 1), FULL, await_durable=True)
        reader.refresh()
        assert seen["eu", 1] == FULL
        with pytest.raises(InvalidRequest, match="only read"):
            seen["eu", 2] = FULL


def test_a_reader_of_a_database_without_the_collection_finds_nothing(db: Db, store: MemoryStore) -> None:
    db.flush("wal")
    with flagstone.open_reader("db", store=store) as reader:
        seen = reader.collection("orders", key=str, value=Order)
        assert seen.get("a") is None
        db.collection("orders", key=str, value=Order).put("a", FULL, await_durable=True)
        reader.refresh()
        assert seen["a"] == FULL


# -- the schema ---------------------------------------------------------------------------------------------


@dataclass
class Old:
    name: str
    size: int


@dataclass
class New:
    name: str
    size: int
    note: str | None = None
    weight: float = 1.5


def test_new_optional_fields_read_old_rows_and_old_programs_keep_writing(db: Db) -> None:
    old = db.collection("c", key=int, value=Old)
    old[1] = Old("a", 1)
    new = db.collection("c", key=int, value=New)
    assert new[1] == New("a", 1, None, 1.5)
    new[2] = New("b", 2, "x", 3.0)
    assert old[2] == Old("b", 2)
    again = db.collection("c", key=int, value=Old)
    again[3] = Old("c", 3)
    assert new[3] == New("c", 3)
    schema = db.schema(keys.encode("c"))
    assert schema is not None
    assert [version.number for version in schema.versions] == [1, 2]


@dataclass
class Renamed:
    title: str
    size: int


@dataclass
class Retyped:
    name: str
    size: str


@pytest.mark.parametrize(
    ("key", "kind", "text"),
    [
        (int, Renamed, "'name', which the database has and which is never null"),
        (int, Retyped, "column 'size' is stored as int64"),
        (str, Old, "key column 'key' is stored as int64"),
        (int, bytes, "has values with columns"),
        (int, "json", "has values with columns"),
    ],
)
def test_types_that_do_not_fit_the_stored_schema_are_refused(db: Db, key: Any, kind: Any, text: str) -> None:
    rows = db.collection("c", key=int, value=Old)
    rows[1] = Old("a", 1)
    with pytest.raises(InvalidRequest) as refused:
        db.collection("c", key=key, value=kind)
    assert text in str(refused.value)
    assert rows[1] == Old("a", 1)


def test_unnamed_parts_and_plain_numbers_take_the_stored_names_and_widths(db: Db) -> None:
    from flagstone.schema import Column, GivenColumns

    given = GivenColumns(
        (Column("region", "string"), Column("id", "int32")),
        (Column("name", "string"), Column("size", "int32")),
    )
    db.ensure_schema(given, prefix=keys.encode("c"))
    rows = db.collection("c", key=(str, int), value=Old)
    rows["eu", 1] = Old("a", 2**40)
    assert rows["eu", 1] == Old("a", 2**40)
    schema = db.schema(keys.encode("c"))
    assert schema is not None
    assert [(column.name, column.type) for column in schema.key] == [("region", "string"), ("id", "int32")]


def test_a_collection_survives_reopening(tmp_path: Path) -> None:
    with flagstone.open(tmp_path / "db") as db:
        db.collection("orders", key=UUID, value=Order)[SOME_ID] = FULL
    with flagstone.open(tmp_path / "db") as db:
        assert dict(db.collection("orders", key=UUID, value=Order).items()) == {SOME_ID: FULL}


def test_arrow_reads_the_rows_with_the_stored_schema(db: Db, orders: Any) -> None:
    from flagstone.schema import TableReader

    orders["eu", 1] = FULL
    prefix = keys.encode("orders")
    schema = db.schema(prefix)
    assert schema is not None
    ((key, value),) = db.items()
    row = TableReader(schema, prefix=prefix).decode(key, value)
    assert (row["key1"], row["customer"], row["lines"][0]["article"], row["token"]) == (
        "eu",
        "alice",
        "pen",
        str(SOME_ID),
    )


@given(
    st.dictionaries(
        st.tuples(st.text(max_size=3), st.integers(-(2**63), 2**63 - 1)), st.floats(allow_nan=False)
    )
)
def test_random_rows_come_back_in_the_order_of_their_tuples(rows: dict[tuple[str, int], float]) -> None:
    with flagstone.open("db", store=MemoryStore(), settings=MANUAL) as db:
        stored = db.collection("c", key=(str, int), value=float)
        stored.update(rows)
        assert list(stored.items()) == sorted(rows.items(), key=lambda row: (row[0][0].encode(), row[0][1]))


def test_notebooks_and_reprs_show_a_collection(db: Db, orders: Any) -> None:
    orders["<eu>", 1] = FULL
    assert "&lt;eu&gt;" in orders._repr_html_()
    assert repr(orders).startswith("Collection('orders', key=(key1: string, key2: int64), Db(")


def test_a_batch_of_a_user_takes_several_collections(db: Db, orders: Any) -> None:
    counts = db.collection("counts", key=str, value=int)
    batch = WriteBatch()
    orders.within(batch)["eu", 1] = FULL
    counts.within(batch)["eu"] = 1
    db.write(batch)
    assert (orders.count(), counts["eu"]) == (1, 1)


def test_the_async_form_awaits_the_same_methods(store: MemoryStore) -> None:
    async def main() -> None:
        async with aio.open("db", store=store, settings=QUIET) as db:
            orders = await db.collection("orders", key=(str, int), value=Order)
            await orders.put(("eu", 1), FULL, await_durable=True)
            await orders.update({("eu", 2): FULL})
            assert await orders.get(("eu", 1)) == FULL
            assert await orders.multi_get([("eu", 2), ("eu", 3)]) == [FULL, None]
            assert [key async for key, _ in orders.scan("eu", start=2)] == [("eu", 2)]
            assert [key async for key in orders] == [("eu", 1), ("eu", 2)]
            assert await orders.count() == 2
            by = await orders.index("by_customer", lambda order: order.customer)
            assert [key async for key, _ in by.scan("alice")] == [("eu", 1), ("eu", 2)]
            async with db.transaction() as tx:
                inside = orders.within(tx)
                assert await inside.pop(("eu", 1)) == FULL
                await inside.put(("eu", 3), Order("bob", 1.0))
            assert [key async for key, _ in by.scan("alice")] == [("eu", 2)]
            assert await by.get("bob") == Order("bob", 1.0)
            await orders.delete(("eu", 2))
            await orders.clear()
            assert await orders.count() == 0
            assert await orders.check_indexes() == []
            names = await db.collection("names", key=str, value=int)
            await names.update({"a": 1}, b=2)
            assert [pair async for pair in names.items()] == [("a", 1), ("b", 2)]

    asyncio.run(main())
