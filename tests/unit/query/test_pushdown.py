"""How many bytes a query reads: conditions on keys select key ranges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import flagstone
from flagstone import keys, values
from flagstone.db.open import open_database
from flagstone.query.dataset import Dataset
from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from kit.databases import MANUAL

ROWS = 100_000
SSTS = 5
"""A range reads the index of every SST that it touches: 0.9 % of the SST with rows of this size, and no filter."""

VALUE = b"0123456789abcdef" * 12
KEY = pc.field("key")


class Stored(NamedTuple):
    store: CountingStore
    total: int


@pytest.fixture(scope="module")
def raw() -> Stored:
    """20 MB in five SSTs."""
    return stored(numbered_rows(ROWS, VALUE))


@pytest.fixture(scope="module")
def large_rows() -> Stored:
    """20 MB in five SSTs, with rows of one kilobyte."""
    return stored(numbered_rows(ROWS // 5, VALUE * 5 + VALUE[:40]))


@pytest.fixture(scope="module")
def sorted_run() -> Stored:
    """20 MB in one sorted run of four SSTs."""
    return stored(numbered_rows(ROWS, VALUE), compact=True)


def numbered_rows(count: int, value: bytes) -> pa.Table:
    return pa.table({"key": [b"row%08d" % at for at in range(count)], "value": [value] * count})


@pytest.fixture(scope="module")
def structured() -> Stored:
    """Orders by region, day and number."""
    columns = {
        "region": [f"r{at // 10_000}" for at in range(ROWS)],
        "day": pa.array([at // 100 % 100 for at in range(ROWS)], pa.int32()),
        "number": [at % 100 for at in range(ROWS)],
        "note": [VALUE.decode()] * ROWS,
    }
    batch = pa.record_batch(columns)
    codec = values.codec("row", pa.schema([batch.schema.field("note")]))
    return stored(pa.table({"key": keys.encode_arrow(batch.columns[:3]), "value": codec.encode_arrow(batch)}))


ORDERS = pa.schema(
    [("region", pa.string()), ("day", pa.int32()), ("number", pa.int64()), ("note", pa.string())]
)


def stored(rows: pa.Table, *, compact: bool = False) -> Stored:
    store = CountingStore(MemoryStore(), component="test")
    with open_database("db", store=store, settings=MANUAL) as db:
        for at in range(0, len(rows), len(rows) // SSTS):
            db.write_arrow(rows.slice(at, len(rows) // SSTS))
            db.flush()  # with all rows in the WAL already, a reader has nothing to replay
    if compact:
        flagstone.Admin("db", store=store).compact(full=True)
    before = read_bytes(store)
    with flagstone.dataset("db", store=store) as dataset:
        assert dataset.to_table(columns=["value"]).num_rows == len(rows)
    return Stored(store, read_bytes(store) - before)


def read_bytes(store: CountingStore) -> int:
    return int(store.totals()["bytes_read"])


def open_raw(found: Stored) -> Dataset:
    return flagstone.dataset("db", store=found.store)


def in_duckdb(condition: str) -> Callable[[Dataset], int]:
    def count(dataset: Dataset) -> int:
        with duckdb.connect() as connection:
            connection.register("ds", dataset)
            return connection.sql(f"select value from ds where {condition}").to_arrow_table().num_rows

    return count


def in_polars(condition: pl.Expr) -> Callable[[Dataset], int]:
    return lambda dataset: flagstone.scan_polars(dataset).filter(condition).select("value").collect().height


def in_pyarrow(condition: Any) -> Callable[[Dataset], int]:
    return lambda dataset: dataset.to_table(filter=condition, columns=["value"]).num_rows


@pytest.mark.parametrize(
    "query",
    [
        in_duckdb("key between 'row00050000' and 'row00050999'"),
        in_duckdb("key >= 'row00050000' and key < 'row00051000' and seq > 0"),
        in_polars(pl.col("key").is_between(b"row00050000", b"row00050999")),
        in_polars((pl.col("key") >= b"row00050000") & (pl.col("key") < b"row00051000") & (pl.col("seq") > 0)),
        in_polars(pl.col("key").bin.starts_with(b"row00050")),
        in_pyarrow((KEY >= b"row00050000") & (KEY < b"row00051000")),
        in_pyarrow(pc.starts_with(KEY, "row00050")),
        in_pyarrow(pc.match_like(KEY.cast(pa.string()), "row00050%") & pc.starts_with(KEY, "row00050")),
        in_pyarrow(~((KEY < b"row00050000") | (KEY >= b"row00051000"))),
    ],
)
def test_a_range_of_one_percent_reads_at_most_one_point_two_percent(
    raw: Stored, query: Callable[[Dataset], int]
) -> None:
    before = read_bytes(raw.store)
    with open_raw(raw) as dataset:
        assert query(dataset) == 1000
    read = read_bytes(raw.store) - before
    assert read <= 0.012 * raw.total, f"{read:,} of {raw.total:,} bytes"


@pytest.mark.parametrize(
    "query",
    [
        in_duckdb("key between 'row00010000' and 'row00010199'"),
        in_polars(pl.col("key").is_between(b"row00010000", b"row00010199")),
    ],
)
def test_a_range_of_one_percent_of_large_rows_reads_little_more(
    large_rows: Stored, query: Callable[[Dataset], int]
) -> None:
    before = read_bytes(large_rows.store)
    with open_raw(large_rows) as dataset:
        assert query(dataset) == 200
    read = read_bytes(large_rows.store) - before
    assert read <= 0.0126 * large_rows.total, f"{read:,} of {large_rows.total:,} bytes"


@pytest.mark.parametrize("engine", ["duckdb", "polars"])
def test_a_range_of_one_percent_in_two_ssts_of_a_run_reads_at_most_one_and_a_half_percent(
    sorted_run: Stored, engine: str
) -> None:
    manifest = flagstone.Admin("db", store=sorted_run.store).manifest().value
    (run,) = manifest.tree.runs
    assert len(run.views) > 2
    border = manifest.sst(run.views[1]).info.first_entry
    assert border is not None
    at = int(border[3:])
    low, high = b"row%08d" % (at - 500), b"row%08d" % (at + 499)
    query = (
        in_duckdb(f"key between '{low.decode()}' and '{high.decode()}'")
        if engine == "duckdb"
        else in_polars(pl.col("key").is_between(low, high))
    )
    before = read_bytes(sorted_run.store)
    with open_raw(sorted_run) as dataset:
        assert query(dataset) == 1000
    read = read_bytes(sorted_run.store) - before
    assert read <= 0.0147 * sorted_run.total, f"{read:,} of {sorted_run.total:,} bytes"


@pytest.mark.parametrize(
    "query",
    [
        in_duckdb("key = 'row00050000'"),
        in_duckdb("key in ('row00000007'::blob, 'row00050000'::blob, 'row00099999'::blob, 'missing'::blob)"),
        in_polars(pl.col("key") == b"row00050000"),
        in_polars(pl.col("key").is_in([b"row00000007", b"row00050000", b"row00099999", b"missing"])),
        in_pyarrow(KEY.isin([b"row00000007", b"row00050000", b"row00099999", b"missing"])),
    ],
)
def test_single_keys_read_single_blocks(raw: Stored, query: Callable[[Dataset], int]) -> None:
    before = read_bytes(raw.store)
    with open_raw(raw) as dataset:
        assert query(dataset) in (1, 3)
    assert read_bytes(raw.store) - before <= 0.0175 * raw.total  # indexes and filters only


@pytest.mark.parametrize(
    ("condition", "rows"),
    [
        ("region = 'r3' and day between 10 and 19", 1000),
        ("region in ('r1', 'r8') and day in (5, 6, 7)", 600),
        ("(region = 'r1' and day = 5) or (region = 'r2' and day = 6 and number < 50)", 150),
        ("region = 'r9' and day = 99 and number = 99", 1),
    ],
)
def test_conditions_on_leading_key_columns_select_ranges(
    structured: Stored, condition: str, rows: int
) -> None:
    before = read_bytes(structured.store)
    with flagstone.dataset(
        "db", store=structured.store, schema=ORDERS, key_columns=["region", "day", "number"]
    ) as dataset:
        with duckdb.connect() as connection:
            connection.register("ds", dataset)
            found = connection.sql(f"select note from ds where {condition}").to_arrow_table()
        assert found.num_rows == rows
    assert read_bytes(structured.store) - before <= 0.0125 * structured.total


def test_a_condition_on_a_later_column_reads_everything(structured: Stored) -> None:
    before = read_bytes(structured.store)
    with flagstone.dataset(
        "db", store=structured.store, schema=ORDERS, key_columns=["region", "day", "number"]
    ) as dataset:
        assert dataset.count_rows(filter=pc.field("number") == 7) == ROWS // 100
    assert read_bytes(structured.store) - before > 0.9 * structured.total
