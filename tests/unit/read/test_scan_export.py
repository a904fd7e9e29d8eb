"""Scans as Arrow, pandas and Polars data."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone import aio
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.errors import Closed, InvalidRequest
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL

PAIRS = [(b"k%03d" % number, b"v%d" % number) for number in range(300)]


@pytest.fixture(scope="module")
def db() -> Iterator[Db]:
    with open_database("db", store=MemoryStore(), settings=MANUAL) as opened:
        for number, (key, value) in enumerate(PAIRS):
            opened.put(key, value)
            if number in (100, 200):
                opened.flush()
        yield opened


def pairs_of(table: pa.Table) -> list[tuple[bytes, bytes]]:
    return list(zip(table["key"].to_pylist(), table["value"].to_pylist(), strict=True))


def test_a_scan_becomes_a_table_and_a_frame(db: Db) -> None:
    assert pairs_of(db.scan().to_arrow()) == PAIRS
    assert db.scan(prefix=b"k00").to_polars().rows() == PAIRS[:10]
    assert list(db.scan(limit=2).to_pandas().itertuples(index=False, name=None)) == PAIRS[:2]


def test_a_scan_is_arrow_data_for_other_libraries(db: Db) -> None:
    assert pa.table(db.scan(b"k100")).num_rows == 200
    assert pl.DataFrame(db.scan(b"k290")).rows() == PAIRS[290:]
    rows = db.scan()  # noqa: F841 - DuckDB finds it by its name
    assert duckdb.sql("select count(*), max(key) from rows").fetchall() == [(300, b"k299")]


@given(
    reverse=st.booleans(),
    limit=st.none() | st.integers(0, 320),
    taken=st.none() | st.integers(0, 320),
    whole=st.booleans(),
)
def test_an_export_has_the_rows_that_iteration_has_not_taken(
    db: Db, reverse: bool, limit: int | None, taken: int | None, whole: bool
) -> None:
    expected = list(db.scan(reverse=reverse, limit=limit).rows())
    scan = db.scan(reverse=reverse, limit=limit)
    if taken is not None:
        rows = scan.rows() if whole else iter(scan)
        expected = expected[sum(1 for _, _ in zip(range(taken), rows, strict=False)) :]
    every = whole or taken is None
    table = scan.to_arrow(("key", "value", "seq", "created_ms", "expires_ms") if every else ("key", "value"))
    assert [tuple(row.values()) for row in table.to_pylist()] == [
        tuple(row) if every else row[:2] for row in expected
    ]


def test_a_scan_that_was_not_begun_gives_the_same_rows_again(db: Db) -> None:
    scan = db.scan(limit=9)
    assert scan.to_arrow() == scan.to_arrow()
    assert list(scan) == PAIRS[:9]


def test_exporting_what_is_left_closes_the_scan(db: Db) -> None:
    scan = db.scan()
    next(scan)
    scan.to_arrow()
    with pytest.raises(Closed, match="start another one"):
        scan.to_arrow()


def test_columns_that_a_started_scan_has_not_kept_are_refused(db: Db) -> None:
    scan = db.scan()
    next(scan)
    with pytest.raises(InvalidRequest, match="begun as pairs"):
        scan.to_arrow(("key", "seq"))
    with pytest.raises(InvalidRequest, match="choose from key"):
        db.scan().to_arrow(("price",))


def test_an_async_scan_becomes_a_table_and_a_frame() -> None:
    async def rows() -> tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]], int]:
        async with aio.open("memory://export/db", settings=MANUAL) as db:
            for key, value in PAIRS:
                await db.put(key, value)
            begun = db.scan()
            first = await anext(begun)
            table = await begun.to_arrow()
            frame = await db.scan(limit=3).to_polars()
            return [first, *pairs_of(table)], frame.rows(), len(await db.scan().to_pandas())

    table, frame, count = asyncio.run(rows())
    assert (table, frame, count) == (PAIRS, PAIRS[:3], 300)
