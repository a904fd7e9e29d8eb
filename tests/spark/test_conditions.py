"""Conditions of `where`: what the parser understands, what Arrow answers, and which keys are read."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from flagstone import InvalidRequest, keys
from flagstone.spark.arrow_filter import apply, split
from flagstone.spark.condition_text import decode, encode, parse_option
from flagstone.spark.conditions import (
    Comparison,
    NullTest,
    OneOf,
    StartsWith,
    parse,
    require_complete,
)
from flagstone.spark.held_state import hold_checkpoint
from flagstone.spark.options import parse_read_options
from flagstone.spark.row_mapping import RowMapping, arrow_schema
from flagstone.spark.scan import FlagstoneReader
from flagstone.spark.selection import Wanted, merged_ranges, narrow_columns
from flagstone.types import KeyRange
from kit.spark_loads import load


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1", [Comparison("a", "=", 1)]),
        ("1 < a", [Comparison("a", ">", 1)]),
        ("a between -2 and 1.5", [Comparison("a", ">=", -2), Comparison("a", "<=", Decimal("1.5"))]),
        ("((a <> 2D) AND (`b c` == true))", [Comparison("a", "!=", 2.0), Comparison("b c", "=", True)]),
        ("key in ('x', X'79')", [OneOf("key", ("x", b"y"))]),
        ("key like 'ab%' and startswith(key, 'c')", [StartsWith("key", "ab"), StartsWith("key", "c")]),
        ("a is not null and b is null", [NullTest("a", True), NullTest("b", False)]),
        ("a <=> 3L", [Comparison("a", "=", 3)]),
        ("key >= cast('x' as binary)", [Comparison("key", ">=", b"x")]),
        ("d = date '2026-01-02'", [Comparison("d", "=", date(2026, 1, 2))]),
        (
            "t > timestamp '2026-01-02T03:04:05+00:00'",
            [Comparison("t", ">", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))],
        ),
    ],
)
def test_a_conjunction_of_comparisons_with_literals_is_understood(text: str, expected: list[Any]) -> None:
    parsed = parse(text)

    assert (list(parsed.conditions), parsed.complete) == (expected, True)
    assert require_complete(text) == parse_option(text) == tuple(expected)
    assert parse_option(encode(expected)) == tuple(expected)
    assert decode(encode(expected)) == tuple(expected)


@pytest.mark.parametrize(
    "text",
    [
        "a = 1 or b = 2",
        "a = 'it''s'",
        r"a = 'x\n'",
        'a = "x"',
        "a = b",
        "a = null",
        "a.b = 1",
        "not a = 1",
        "a not in (1)",
        "a like '%x'",
        "a like 'x_y%'",
        "a = 1F",
        "t > timestamp '2026-01-02 03:04:05'",
        "upper(a) = 'X'",
        "a + 1 = 2",
        "case when a then b end",
        "a = 1 and",
        "a = 1)",
        "",
    ],
)
def test_everything_else_is_left_to_spark(text: str) -> None:
    parsed = parse(text)

    assert (parsed.conditions, parsed.complete) == ((), False)
    with pytest.raises(InvalidRequest, match=r"flagstone.spark.read"):
        require_complete(text)


def test_the_understood_part_of_a_conjunction_is_used_unless_a_comment_could_hide_it() -> None:
    parsed = parse("a = 1 and upper(b) = 'X' and (c = 2 or d = 3)")

    assert (parsed.conditions, parsed.complete) == ((Comparison("a", "=", 1),), False)
    assert {"a", "b", "c", "d"} <= parsed.names
    assert parse("a = 1 -- and b = 2").conditions == ()
    assert parse("a = 1 /* and */ and b = 2").conditions == ()


TYPES = pa.schema(
    [
        ("text", pa.string()),
        ("raw", pa.binary()),
        ("whole", pa.int32()),
        ("real", pa.float64()),
        ("amount", pa.decimal128(10, 2)),
        ("flag", pa.bool_()),
        ("day", pa.date32()),
    ]
)


def test_arrow_gives_the_answers_of_spark_to_nan_null_and_decimals() -> None:
    cells: list[Any] = [
        ["a", b"a", 1, 1.0, Decimal("1.50"), True, date(2026, 1, 1)],
        ["b", b"\xff", 2, math.nan, Decimal("2.00"), False, date(2026, 1, 2)],
        [None] * 7,
    ]
    batch = pa.RecordBatch.from_arrays(
        [pa.array([row[at] for row in cells], field.type) for at, field in enumerate(TYPES)], schema=TYPES
    )

    def passing(text: str) -> list[int]:
        bound, complete = split(parse(text).conditions, TYPES)
        assert complete, text
        return [row if row is not None else 0 for row in apply(batch, bound)["whole"].to_pylist()]

    assert passing("real > 5D") == [2]  # NaN is above all numbers
    assert passing("real <= 5D") == [1]
    assert passing("raw > 'a'") == [2]
    assert passing("amount >= 1.505") == [2]
    assert passing("amount < 2") == [1]
    assert passing("whole <> 1") == [2]
    assert passing("flag = false") == [2]
    assert passing("TEXT in ('b', 'c')") == [2]
    assert passing("startswith(raw, X'ff')") == [2]
    assert passing("day > date '2026-01-01' and text = 'b'") == [2]
    assert passing("text is null") == [0]


@pytest.mark.parametrize(
    "text",
    [
        "text = 1",
        "whole = 'a'",
        "whole = 1.5",
        "whole = 99999999999999999999",
        "amount in (1.5)",
        "day = '2026-01-01'",
        "flag > true",
        "nothing = 1",
        "text = X'ff'",
    ],
)
def test_a_literal_that_spark_would_cast_is_left_to_spark(text: str) -> None:
    assert split(parse(text).conditions, TYPES) == ((), False)


PARTS = StructType(
    [
        StructField("region", StringType()),
        StructField("id", LongType()),
        StructField("amount", DecimalType(10, 2)),
        StructField("day", DateType()),
        StructField("flag", BooleanType()),
        StructField("price", DoubleType()),
    ]
)
_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "region": st.sampled_from(["", "e", "eu", "eu\0", "eu\x01", "us", "ü", "\U0010ffff"]),
    "id": st.integers(-3, 300),
    "price": st.sampled_from([0.0, -0.0, 1.5, -2.0, math.inf]),
    "amount": st.decimals(-5, 5, places=2),
}


@st.composite
def _conditions(draw: st.DrawFn) -> Any:
    name = draw(st.sampled_from(sorted(_VALUES)))
    value = draw(_VALUES[name])
    form = draw(st.integers(0, 2))
    if form == 0 and name in ("region", "id"):
        return OneOf(name, (value, draw(_VALUES[name])))
    if form == 1 and name == "region":
        return StartsWith(name, value)
    return Comparison(name, draw(st.sampled_from(["=", "!=", "<", "<=", ">", ">="])), value)


@given(
    st.lists(_conditions(), max_size=4),
    st.lists(
        st.tuples(*(st.none() | _VALUES[name] for name in ("region", "id", "price", "amount"))), max_size=8
    ),
)
def test_selected_keys_and_the_other_conditions_give_exactly_the_rows_that_pass(
    conditions: list[Any], rows: list[Any]
) -> None:
    names = ("region", "id", "price", "amount")
    types = arrow_schema(StructType([PARTS[name] for name in names]))
    bound, _ = split(conditions, types)
    arrays = [pa.array([row[at] for row in rows], field.type) for at, field in enumerate(types)]
    batch = pa.RecordBatch.from_arrays(arrays, schema=types)

    wanted, rest = narrow_columns(Wanted(), RowMapping(names, ()), types, bound)

    passing = apply(batch, bound).to_pylist()
    for row in batch.to_pylist():
        key = keys.encode(*(row[name] for name in names))
        points, inside = wanted.points, any(key in part for part in wanted.parts)
        selected = inside if points is None else key in points
        alone = apply(pa.RecordBatch.from_pylist([row], schema=types), rest).num_rows
        assert (selected and alone == 1) is (row in passing)


def test_ranges_are_merged_if_they_touch() -> None:
    merged = merged_ranges(
        [KeyRange(b"c", b"d"), KeyRange(b"a", b"b"), KeyRange(b"b", b"c"), KeyRange(b"x", None)]
    )

    assert merged == [KeyRange(b"a", b"d"), KeyRange(b"x", None)]
    assert Wanted(KeyRange(b"b", b"y")).inside(merged).ranges == (KeyRange(b"b", b"d"), KeyRange(b"x", b"y"))
    assert Wanted(points=(b"a", b"e", b"z")).inside(merged).points == (b"a", b"z")


SCHEMA = StructType(
    [StructField("region", StringType()), StructField("id", LongType()), StructField("price", DoubleType())]
)
REGIONS = ("asia", "eu", "us")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conditions") / "db"
    mapping = RowMapping(("region", "id")).for_writing(SCHEMA)
    rows = [(region, number, number / 2) for region in REGIONS for number in range(3000)]
    cells = {name: [row[at] for row in rows] for at, name in enumerate(("region", "id", "price"))}
    encoded = mapping.encode(pa.RecordBatch.from_pydict(cells, schema=arrow_schema(SCHEMA)))
    load(folder, [{name: encoded[name].to_pylist() for name in ("key", "value")}])
    return folder


def read(folder: Path, schema: StructType = SCHEMA, **options: str) -> list[dict[str, Any]]:
    chosen = {"path": str(folder), "key.columns": "region,id", "stored_schema": SCHEMA.json(), **options}
    reader = FlagstoneReader(hold_checkpoint(parse_read_options(chosen)), schema)
    return [row for part in reader.plan() for batch in reader.read(part) for row in batch.to_pylist()]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("region in ('us', 'eu') and id < 2", [("eu", 0), ("eu", 1), ("us", 0), ("us", 1)]),
        ("region = 'eu' and id = 7", [("eu", 7)]),
        ("region like 'a%' and price = 1499.5D", [("asia", 2999)]),
        ("price = 1D and id >= 2", [("asia", 2), ("eu", 2), ("us", 2)]),
        ("region in ('us', 'eu') and id in (1, 5000)", [("eu", 1), ("us", 1)]),
        ("region = 'eu' and region = 'us'", []),
    ],
)
@pytest.mark.parametrize("partitions", ["1", "5"])
def test_where_returns_exactly_the_rows_that_pass(
    folder: Path, where: str, expected: list[Any], partitions: str
) -> None:
    found = read(folder, where=where, partitions=partitions)

    assert [(row["region"], row["id"]) for row in found] == expected
    assert all(row["price"] == row["id"] / 2 for row in found)


def test_a_read_returns_some_columns_and_filters_by_others(folder: Path) -> None:
    only_price = StructType([SCHEMA["price"]])

    assert read(folder, only_price, where="region = 'eu' and id between 3 and 4") == [
        {"price": 1.5},
        {"price": 2.0},
    ]
    with pytest.raises(InvalidRequest, match="no column 'name'"):
        read(folder, StructType([StructField("name", StringType())]))
    with pytest.raises(InvalidRequest, match="'price' is double in the stored schema"):
        read(folder, StructType([StructField("price", LongType())]))


def test_a_task_ends_after_its_limit(folder: Path) -> None:
    assert len(read(folder, task_limit="7", partitions="1")) == 7
    assert len(read(folder, task_limit="7", partitions="1", where="price >= 10D")) == 7


@pytest.mark.parametrize("where", ["region = 5", "nothing = 1", "id = 'x'", "a or b"])
def test_a_condition_that_does_not_fit_is_refused(folder: Path, where: str) -> None:
    with pytest.raises(InvalidRequest, match="where"):
        read(folder, where=where)


def test_conditions_on_rows_read_as_text_compare_text(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    load(folder, [{"key": [b"a", b"b", b"c"], "value": [b"x", "é".encode(), b"z"]}])
    text = StructType([StructField("value", StringType()), StructField("key", StringType())])
    options = parse_read_options(
        {"path": str(folder), "where": "value > 'y' and key <> 'c' and value like 'é%'"}
    )
    reader = FlagstoneReader(hold_checkpoint(options), text)

    found = [row for part in reader.plan() for batch in reader.read(part) for row in batch.to_pylist()]
    assert found == [{"value": "é", "key": "b"}]


def test_conditions_on_values_and_numbers_of_raw_rows_are_applied(folder: Path) -> None:
    options = parse_read_options(
        {"path": str(folder), "columns": "key", "where": "seq > 0 and value = X'00'"}
    )
    from flagstone.spark.row_mapping import read_schema

    reader = FlagstoneReader(hold_checkpoint(options), read_schema(("key",)))
    assert sum(batch.num_rows for part in reader.plan() for batch in reader.read(part)) == 0
    options = parse_read_options({"path": str(folder), "columns": "key", "where": "seq >= 0"})
    reader = FlagstoneReader(hold_checkpoint(options), read_schema(("key",)))
    assert sum(batch.num_rows for part in reader.plan() for batch in reader.read(part)) == 9000


@pytest.mark.parametrize(
    "text", ["[", "[1]", '[["compare", "a", "~", {"int": "1"}]]', '[["in", "a", [{"int": "x"}]]]', "[[]]"]
)
def test_a_text_that_holds_no_conditions_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="condition in SQL"):
        parse_option(text)
