"""Databases and random conditions for the tests of queries."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from flagstone import keys, values
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL

SCHEMA = pa.schema(
    [
        ("region", pa.string()),
        ("number", pa.int32()),
        ("weight", pa.float64()),
        ("name", pa.string()),
        ("amount", pa.float64()),
        ("seq", pa.uint64()),
    ]
)
KEY_COLUMNS = ["region", "number", "weight"]
REGIONS = (None, "", "a", "ab", "b", "be\u0301", "c\U0010ffff", "d\ud7ff", "\ue000")
NUMBERS = (None, -(2**31), -1, 0, 1, 7, 300, 2**31 - 1)
WEIGHTS = (None, float("-inf"), -1.5, 0.0, 0.1, 2.0, float("inf"), float("nan"))

RAW_KEYS = (b"\0", b"a", b"a\0", b"a\xff", b"ab", b"b", b"b\xff\xff", b"c", b"\xff", b"\xff\xff")

TYPED = {
    "flag": (pa.bool_(), [None, False, True]),
    "small": (pa.float32(), [None, -0.5, 0.1, 0.25, 3.0, float("nan")]),
    "money": (pa.decimal128(8, 2), [None, Decimal("-1.50"), Decimal("0.00"), Decimal("7.25")]),
    "day": (pa.date32(), [None, date(1969, 12, 31), date(2026, 1, 1)]),
    "moment": (
        pa.timestamp("us", tz="UTC"),
        [None, datetime(1970, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 0, 0, 0, 1, tzinfo=UTC)],
    ),
    "local": (pa.timestamp("us"), [None, datetime(1970, 1, 1), datetime(2026, 1, 1)]),
    "token": (pa.binary(), [None, b"", b"\0", b"a", b"a\xff"]),
}


def structured_database() -> Db:
    """Every combination of the key values, in an SST, in a newer SST and in the memtable."""
    db = open_database("structured", store=MemoryStore(), settings=MANUAL)
    rows = [(region, number, weight) for region in REGIONS for number in NUMBERS for weight in WEIGHTS]
    codec = values.codec("row", pa.schema([SCHEMA.field("name"), SCHEMA.field("amount")]))
    for at, row in enumerate(rows):
        name = None if at % 5 == 0 else f"name {at % 7}"
        db.put(keys.encode(*row), codec.encode({"name": name, "amount": at / 4}))
        if at in (len(rows) // 2, 3 * len(rows) // 4):
            db.flush()
    return db


def raw_database() -> Db:
    """Short keys around the edges of prefixes, with deleted ones."""
    db = open_database("raw", store=MemoryStore(), settings=MANUAL)
    for at, key in enumerate(RAW_KEYS):
        db.put(key, b"v%d" % (at % 3))
        db.put(key + b"gone", b"")
        if at == 5:
            db.flush()
    for key in RAW_KEYS:
        db.delete(key + b"gone")
    return db


def one_column_database(name: str) -> tuple[Db, pa.Schema]:
    """A database whose keys are one column of `TYPED`."""
    kind, cells = TYPED[name]
    db = open_database(name, store=MemoryStore(), settings=MANUAL)
    codec = values.codec("json", pa.schema([("place", pa.int64())]))
    for at, cell in enumerate(cells):
        schema = keys.KeySchema({name: keys.KeySchema.of(pa.schema([(name, kind)])).columns[name]})
        db.put(schema.encode(cell), codec.encode({"place": at}))
    return db, pa.schema([(name, kind), ("place", pa.int64())])


def literals(column: str) -> st.SearchStrategy[Any]:
    """Values of a column, some that it has not, and some between those it has."""
    found: dict[str, st.SearchStrategy[Any]] = {
        "region": st.sampled_from([*filter(None, REGIONS), "", "aa", "zz", "\U0010ffff"]),
        "number": st.sampled_from([*filter(lambda n: n is not None, NUMBERS), 2, 299]),
        "weight": st.sampled_from([*filter(lambda w: w is not None, WEIGHTS), -0.0, 1.0]),
        "name": st.sampled_from(["name 1", "name 3", "x"]),
        "amount": st.sampled_from([0.0, 1.25, 50.0]),
        "seq": st.integers(0, 600),
        "key": st.sampled_from([*RAW_KEYS, b"aa", b"bgone", b"d"]),
        "value": st.sampled_from([b"v0", b"v1", b"x"]),
    }
    if column in TYPED:
        return st.sampled_from([cell for cell in TYPED[column][1] if cell is not None])
    return found[column]
