"""Columns encoded into keys, which sort like tuples, and into values, and decoded again."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import datasource as ds
from pyspark.sql.types import DoubleType, LongType, MapType, StringType, StructField, StructType

import flagstone
from flagstone import InvalidRequest, keys, values
from flagstone.spark import bulk_load
from flagstone.spark.arrow_filter import bind
from flagstone.spark.filters import condition_of
from flagstone.spark.held_state import hold_checkpoint
from flagstone.spark.options import parse_read_options
from flagstone.spark.row_mapping import RowMapping
from flagstone.spark.scan import PushingReader
from flagstone.spark.selection import Wanted, narrow_columns
from flagstone.types import KeyRange
from kit.spark_loads import load, shown

SCHEMA = StructType(
    [
        StructField("region", StringType()),
        StructField("id", LongType()),
        StructField("name", StringType()),
        StructField("price", DoubleType()),
    ]
)
CELLS = {
    "region": ["us", "eu", "eu", None, "eu"],
    "id": [1, 20, 3, 4, -5],
    "name": ["a", "b", None, "d", "e"],
    "price": [1.5, None, 3.0, 4.0, 5.0],
}
TYPES = pa.schema(
    [("region", pa.string()), ("id", pa.int64()), ("name", pa.string()), ("price", pa.float64())]
)
OPTIONS = {"key.columns": "region, id"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "db"
    load(folder, [CELLS], **OPTIONS, **{"value.columns": "name,price"})
    return folder


def reader_of(folder: Path, schema: StructType, **options: str) -> PushingReader:
    return PushingReader(
        hold_checkpoint(parse_read_options({"path": str(folder), **OPTIONS, **options})), schema
    )


def rows_of(reader: PushingReader) -> list[dict[str, Any]]:
    return [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]


def test_rows_are_read_in_the_order_of_their_key_columns(folder: Path) -> None:
    found = rows_of(reader_of(folder, SCHEMA))

    expected = [dict(zip(CELLS, row, strict=True)) for row in zip(*CELLS.values(), strict=True)]
    assert found == sorted(expected, key=lambda row: (row["region"] or "", row["id"]))
    with flagstone.open_reader(folder, mode="latest") as reader:
        stored = reader[keys.encode("eu", 20)]
    assert values.codec("row", TYPES.remove(0).remove(0)).decode(stored) == {"name": "b", "price": None}


def test_filters_on_leading_key_columns_become_a_range(folder: Path) -> None:
    mapping = RowMapping(("region", "id"), ("name", "price"))
    eu, at_three = ds.EqualTo(("region",), "eu"), keys.encode("eu", 3)

    def selected(*filters: ds.Filter) -> Wanted:
        bound = [bind(condition, TYPES) for each in filters if (condition := condition_of(each)) is not None]
        return narrow_columns(Wanted(), mapping, TYPES, [each for each in bound if each is not None])[0]

    def narrowed(*filters: ds.Filter) -> KeyRange:
        return selected(*filters).keys

    assert narrowed(eu) == KeyRange(*keys.range("eu"))
    assert selected(eu, ds.EqualTo(("id",), 3)).points == (at_three,)
    assert selected(eu, ds.In(("id",), (3, 4))).points == (at_three, keys.encode("eu", 4))
    both = selected(ds.In(("region",), ("us", "eu")), ds.GreaterThan(("id",), 3)).ranges
    assert both is not None
    assert [each.stop for each in both] == [keys.range("eu")[1], keys.range("us")[1]]
    assert narrowed(ds.StringStartsWith(("region",), "e")) == KeyRange(b"\x58e", b"\x58f")
    assert narrowed(eu, ds.GreaterThanOrEqual(("id",), 3)) == KeyRange(at_three, keys.range("eu")[1])
    assert narrowed(eu, ds.LessThan(("id",), 3)) == KeyRange(keys.range("eu", None)[1], at_three)
    assert narrowed(ds.GreaterThan(("id",), 3)) == KeyRange()
    assert narrowed(ds.EqualTo(("name",), "x")) == KeyRange()
    assert narrowed(eu, ds.EqualTo(("id",), "no number")) == KeyRange(*keys.range("eu"))
    reader = reader_of(folder, SCHEMA)
    wanted: list[ds.Filter] = [eu, ds.GreaterThan(("id",), -5)]
    assert list(reader.pushFilters(wanted)) == []
    assert [row["id"] for row in rows_of(reader)] == [3, 20]


def test_unsupported_key_and_value_types_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidRequest, match="no column 'region'"):
        reader_of(folder, StructType([SCHEMA["id"], SCHEMA["name"]]))
    with pytest.raises(InvalidRequest, match="in the key and in the value"):
        reader_of(folder, SCHEMA, **{"value.columns": "id,name"})
    with pytest.raises(InvalidRequest, match="formats are row, json"):
        reader_of(folder, SCHEMA, **{"value.format": "xml"})
    with pytest.raises(InvalidRequest, match=r"needs 'key\.columns'"):
        parse_read_options({"path": "x", "value.format": "row"})
    maps = StructType([*SCHEMA.fields[1:], StructField("region", MapType(StringType(), StringType()))])
    with pytest.raises(InvalidRequest, match="region"):
        reader_of(folder, maps)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", ["row", "json"])
def test_a_frame_with_key_and_value_columns_is_written_and_read_back(
    spark: Any, tmp_path: Path, form: Any
) -> None:
    schema = "region string, id long, day date, at timestamp, price decimal(10,2)"
    schema += ", tags array<string>, raw binary, ok boolean"
    rows = [
        (
            f"r{number % 3}",
            number - 10,
            date(2026, 1, 1 + number),
            datetime(2026, 1, 1, number, tzinfo=UTC).replace(tzinfo=None),
            Decimal(number) / 4,
            ["a", str(number)],
            bytes([number]),
            None if number % 2 else True,
        )
        for number in range(20)
    ]
    frame = spark.createDataFrame(rows, schema)
    folder = tmp_path / form

    report = bulk_load(frame, folder, key_columns=["region", "id", "day"], value_format=form, partitions=2)

    assert report is not None
    assert report.rows == 20
    assert len(shown(folder)) == 21  # with the row of the schema
    source = spark.read.format("flagstone").schema(schema).option("value.format", form)
    back = source.option("key.columns", "region,id,day").load(str(folder))
    assert sorted(map(tuple, back.collect())) == sorted(map(tuple, frame.collect()))
    assert back.where("region = 'r1' and id >= 0").count() == frame.where("region = 'r1' and id >= 0").count()
    (
        frame.where("id < 0").write.format("flagstone").mode("append").option("key.columns", "region,id,day")
        .option("value.format", form).save(str(tmp_path / f"{form} plain"))
    )  # fmt: skip
    plain = source.option("key.columns", "region,id,day").load(str(tmp_path / f"{form} plain"))
    assert plain.count() == 10
