"""Loads of every size and shape, read back by Spark's tasks, by our own readers and by the official wheel."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from flagstone import Admin, keys, values
from flagstone.spark import bulk_load
from flagstone.spark.held_state import hold_checkpoint
from flagstone.spark.options import parse_read_options
from flagstone.spark.row_mapping import read_schema
from flagstone.spark.scan import FlagstoneReader
from kit.spark_loads import Cells, load, pairs, shown

LIMIT = 65_535
"""Bytes of the longest key."""


def read_back(folder: Path, types: pa.Schema | None = None, **options: str) -> list[dict[str, Any]]:
    """All rows, read by tasks from pickled readers."""
    held = hold_checkpoint(parse_read_options({"path": str(folder), **options}))
    schema = read_schema(held.options.columns) if types is None else from_arrow_schema(types)
    reader = pickle.loads(pickle.dumps(FlagstoneReader(held, schema)))
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def assert_all_readers_see(wheel: Any, folder: Path, rows: dict[bytes, bytes], **options: str) -> None:
    assert {row["key"]: row["value"] for row in read_back(folder, **options)} == rows
    assert shown(folder) == rows
    assert wheel.scan(str(folder.parent), folder.name) == rows
    assert not Admin(folder).verify().findings


def test_frames_of_no_row_and_of_one_row_are_loaded(tmp_path: Path, wheel: Any) -> None:
    folder = tmp_path / "db"

    assert load(folder, [], []).rows == 0
    assert_all_readers_see(wheel, folder, {})
    assert load(folder, [], [pairs({b"k": b""})], []).rows == 1
    assert_all_readers_see(wheel, folder, {b"k": b""}, partitions="5")


def test_a_frame_in_which_half_of_the_rows_have_one_key_is_loaded(tmp_path: Path, wheel: Any) -> None:
    folder, hot = tmp_path / "db", b"k02500"
    rows = {b"k%05d" % number: b"%d" % number for number in range(5000)}

    def task(wanted: list[bytes]) -> Iterator[Cells]:
        for at in range(0, len(wanted), 700):
            part = wanted[at : at + 700]
            yield {
                "key": part,
                "value": [
                    b"%d" % (at + offset) if key == hot else rows[key] for offset, key in enumerate(part)
                ],
            }

    ordered = sorted(rows)
    low, high = [key for key in ordered if key < hot], [key for key in ordered if key > hot]
    report = load(folder, task(low), task([hot] * 5000), task(high), sorted="true", max_sst_size="20000")

    assert report.rows == 5000
    assert_all_readers_see(wheel, folder, rows | {hot: b"4999"}, partitions="4")


@pytest.mark.slow
def test_a_load_of_a_thousand_tasks_with_few_rows_is_committed(tmp_path: Path, wheel: Any) -> None:
    folder = tmp_path / "db"
    rows = {b"k%03d" % number: b"v" for number in range(0, 1000, 100)}
    tasks: list[list[Cells]] = [
        [pairs({b"k%03d" % number: b"v"})] if number % 100 == 0 else [] for number in range(1000)
    ]

    assert load(folder, *tasks).tables == 10
    assert_all_readers_see(wheel, folder, rows, partitions="3")


@pytest.mark.slow
def test_the_longest_keys_and_values_of_ten_megabytes_are_loaded(tmp_path: Path, wheel: Any) -> None:
    folder = tmp_path / "db"
    rows = {
        b"a" * LIMIT: b"first of the long",
        b"a" * (LIMIT - 1) + b"b": b"differs in its last byte",
        b"large": bytes(range(256)) * 40_000,
        b"larger": b"v" * 10_485_760,
        b"\xff" * LIMIT: b"",
    }

    report = load(folder, [pairs(rows)], max_sst_size="1000000", compression_codec="Zstd")

    assert report.rows == 5
    assert_all_readers_see(wheel, folder, rows, partitions="8")
    few = read_back(folder, keys=f"large,hex:{'ff' * LIMIT},none")
    assert {row["key"] for row in few} == {b"large", b"\xff" * LIMIT}


KEY_COLUMNS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "byte": (pa.int8(), [-128, 127, 0, None]),
    "short": (pa.int16(), [-1, 2, 300, None]),
    "whole": (pa.int32(), [7, -7, 2**31 - 1, None]),
    "long": (pa.int64(), [-(2**63), 2**63 - 1, 0, None]),
    "single": (pa.float32(), [1.5, -2.25, float("inf"), None]),
    "double": (pa.float64(), [-0.5, 1e300, float("-inf"), None]),
    "text": (pa.string(), ["", "a\0b", "ä€𝄞", None]),
    "bytes": (pa.binary(), [b"", b"\0\xff", b"x", None]),
    "flag": (pa.bool_(), [True, False, True, None]),
    "day": (pa.date32(), [date(1, 1, 1), date(2026, 2, 28), date(9999, 12, 31), None]),
    "at": (
        pa.timestamp("us", tz="UTC"),
        [
            datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
            datetime(2026, 1, 1, tzinfo=UTC),
            datetime(1, 1, 1, tzinfo=UTC),
            None,
        ],
    ),
    "price": (pa.decimal128(38, 6), [Decimal("-0.000001"), Decimal("1e31"), Decimal(0), None]),
}


def test_every_type_as_key_column_and_two_hundred_value_columns_are_loaded(
    tmp_path: Path, wheel: Any
) -> None:
    folder = tmp_path / "db"
    wide = {f"c{number}": [number, None, -number, number * 2**40] for number in range(200)}
    types = pa.schema(
        [
            *((name, kind) for name, (kind, _) in KEY_COLUMNS.items()),
            *((name, pa.int64()) for name in wide),
        ]
    )
    cells = {name: pa.array(column, kind) for name, (kind, column) in KEY_COLUMNS.items()}
    cells |= {name: pa.array(column, pa.int64()) for name, column in wide.items()}
    options = {"key.columns": ",".join(KEY_COLUMNS)}

    report = load(folder, [cells], **options, **{"value.columns": ",".join(wide)})

    assert report.rows == 4
    rows = [
        dict(zip(cells, row, strict=True))
        for row in zip(*(each.to_pylist() for each in cells.values()), strict=True)
    ]
    named = {keys.encode(*(row[name] for name in KEY_COLUMNS)): row for row in rows}
    assert read_back(folder, types, **options) == [named[key] for key in sorted(named)]
    codec = values.codec("row", pa.schema([(name, pa.int64()) for name in wide]))
    seen = wheel.scan(str(tmp_path), "db")
    assert {key: codec.decode(value) for key, value in seen.items()} == {
        key: {name: row[name] for name in wide} for key, row in named.items()
    }


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
def test_skewed_wide_and_mostly_empty_frames_are_loaded_by_spark(
    spark: Any, tmp_path: Path, wheel: Any
) -> None:
    skewed = spark.range(20_000).selectExpr(
        "if(id % 2 = 0, 'hot', concat('k', lpad(cast(id as string), 6, '0'))) as key",
        "cast(id as string) as value",
        "id as at",
    )

    bulk_load(skewed, tmp_path / "skewed", partitions=4, order_by="at", max_sst_size=50_000)

    expected = {b"k%06d" % number: b"%d" % number for number in range(1, 20_000, 2)} | {b"hot": b"19998"}
    assert_all_readers_see(wheel, tmp_path / "skewed", expected, partitions="3")

    sparse = spark.range(5).selectExpr("cast(id as string) as key", "'v' as value").repartition(20)
    sparse.write.format("flagstone").mode("append").save(str(tmp_path / "sparse"))
    assert shown(tmp_path / "sparse") == {b"%d" % number: b"v" for number in range(5)}

    columns = {
        f"c{at}": [None if row % (at + 2) == 0 else row * at for row in range(50)] for at in range(200)
    }
    rows = pa.table({"id": list(range(50)), **columns})
    bulk_load(spark.createDataFrame(rows), tmp_path / "wide", key_columns=["id"])
    reading = (
        spark.read.format("flagstone").schema(from_arrow_schema(rows.schema)).option("key.columns", "id")
    )
    assert reading.load(str(tmp_path / "wide")).toArrow().to_pylist() == rows.to_pylist()
