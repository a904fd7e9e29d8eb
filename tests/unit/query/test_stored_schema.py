"""Datasets of databases that store the schema of their rows."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import flagstone
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.errors import InvalidRequest
from flagstone.schema import TableWriter, given_columns
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL

ORDERS = pa.table(
    {
        "region": ["eu", "eu", "us", "us"],
        "number": pa.array([1, 2, 1, 7], pa.int32()),
        "price": [1.5, None, 3.0, 4.5],
        "note": ["a", "b", None, "d"],
    }
)


def write(db: Db, rows: pa.Table, key: list[str], prefix: bytes = b"") -> None:
    evolution = db.ensure_schema(given_columns(rows.schema, key), prefix=prefix)
    keys, values = TableWriter(evolution.schema, evolution.version, prefix=prefix).encode_arrow(
        rows.combine_chunks().to_batches()[0]
    )
    db.write_arrow(pa.table({"key": keys, "value": values}))


@pytest.fixture
def db() -> Iterator[Db]:
    with open_database("orders", store=MemoryStore(), settings=MANUAL) as opened:
        yield opened


def test_the_columns_are_those_of_the_stored_schema(db: Db) -> None:
    write(db, ORDERS, ["region", "number"])
    with flagstone.dataset(db) as orders:
        assert orders.schema.names == ["region", "number", "price", "note"]
        assert orders.to_table().equals(ORDERS.cast(orders.schema))
        assert orders.count_rows() == 4
        assert orders.count_rows(filter=pc.field("price") > 2) == 2
        assert orders.to_table(columns=["note"]).to_pydict() == {"note": ["a", "b", None, "d"]}
        with duckdb.connect() as connection:
            connection.register("orders", orders)
            found = connection.sql(
                "select sum(price) from orders where region = 'us' and number between 1 and 5"
            )
            assert found.fetchall() == [(3.0,)]
        lazy = flagstone.scan_polars(orders)
        assert lazy.filter(pl.col("region") == "eu", pl.col("number") == 2).collect().rows() == [
            ("eu", 2, None, "b")
        ]


def test_conditions_on_the_stored_key_select_ranges(db: Db) -> None:
    write(db, ORDERS, ["region", "number"], prefix=b"orders/")
    with flagstone.dataset(db, prefix=b"orders/") as orders:
        from flagstone.query.arrow_expressions import read_expression

        one = (pc.field("region") == "eu") & (pc.field("number") == 2)
        (keys,) = orders.rows.ranges(read_expression(one).condition)
        assert keys.start is not None
        assert keys.start.startswith(b"orders/")
        assert keys.stop == keys.start + b"\0"
        assert orders.to_table(filter=one)["note"].to_pylist() == ["b"]
        assert orders.to_table(filter=pc.field("region") > "eu")["number"].to_pylist() == [1, 7]


def test_each_prefix_has_its_own_columns(db: Db) -> None:
    write(db, ORDERS, ["region", "number"], prefix=b"orders/")
    write(db, pa.table({"id": [1, 2], "name": ["Ada", "Alan"]}), ["id"], prefix=b"users/")
    with flagstone.dataset(db, prefix=b"users/") as users, flagstone.dataset(db, prefix=b"orders/") as orders:
        assert users.to_table().to_pylist() == [{"id": 1, "name": "Ada"}, {"id": 2, "name": "Alan"}]
        assert orders.count_rows() == 4
    with flagstone.dataset(db) as everything:
        assert everything.schema.names[0] == "key"
        assert everything.count_rows() == 6


def test_rows_of_several_versions_have_the_newest_columns(db: Db) -> None:
    write(db, ORDERS, ["region", "number"])
    newer = pa.table(
        {"region": ["zz"], "number": pa.array([1], pa.int32()), "price": [1.0], "note": ["z"], "paid": [True]}
    )
    write(db, newer, ["region", "number"])
    with flagstone.dataset(db) as orders:
        assert orders.schema.names == ["region", "number", "price", "note", "paid"]
        assert orders.to_table()["paid"].to_pylist() == [None, None, None, None, True]
        assert orders.count_rows(filter=pc.field("paid")) == 1


def test_a_schema_chooses_columns_and_raw_gives_bytes(db: Db) -> None:
    write(db, ORDERS, ["region", "number"])
    chosen = pa.schema([("note", pa.string()), ("number", pa.int64()), ("seq", pa.uint64())])
    with flagstone.dataset(db, schema=chosen) as orders:
        assert orders.to_table(filter=pc.field("number") >= 2).to_pydict()["note"] == ["b", "d"]
        assert set(orders.to_table()["seq"].to_pylist()) == {db.get_row(next(iter(db.scan()))[0]).seq}  # type: ignore[union-attr]
        assert orders.count_rows() == 4
    with flagstone.dataset(db, raw=True) as raw:
        assert raw.to_table(columns=["key"])["key"].to_pylist() == [key for key, _ in db.scan()]
    with pytest.raises(InvalidRequest, match="color"):
        flagstone.dataset(db, schema={"color": pa.string()})


def test_system_rows_are_hidden_from_scans_and_points(db: Db) -> None:
    write(db, ORDERS, ["region", "number"])
    system = next(key for key, _ in db.scan(include_system=True) if key.startswith(b"\0flagstone/"))
    with flagstone.dataset(db, raw=True) as raw:
        assert raw.count_rows() == 4
        assert raw.count_rows(filter=pc.field("key") == system) == 0
        assert raw.count_rows(filter=pc.field("key") <= system) == 0
