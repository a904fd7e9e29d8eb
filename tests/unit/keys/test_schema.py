"""What a schema adds to keys: names, types, and the refusal of parts that would end up under another type."""

from __future__ import annotations

import pickle
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from flagstone import keys
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.keys import KeySchema

SHOP = KeySchema({"region": "string", "day": "date", "id": "int32"})


def test_a_schema_gives_the_bytes_that_no_schema_gives() -> None:
    row = ("eu", date(2026, 1, 1), 7)

    assert SHOP.encode(row) == SHOP.encode(*row) == keys.encode(row)
    assert SHOP.decode(keys.encode(row)) == row
    assert SHOP.range("eu") == keys.range("eu")
    assert SHOP.encode("eu") == keys.encode("eu")


def test_a_schema_is_plain_data() -> None:
    assert KeySchema(SHOP.columns) == SHOP
    assert pickle.loads(pickle.dumps(SHOP)) == SHOP
    assert hash(KeySchema(list(SHOP.columns.items()))) == hash(SHOP)
    assert KeySchema({"region": "string"}) != SHOP
    assert len(SHOP) == 3
    assert repr(SHOP) == "KeySchema({'region': 'string', 'day': 'date', 'id': 'int32'})"


def test_arrow_schemas_and_key_schemas_describe_each_other() -> None:
    arrow = pa.schema(
        [
            ("a", pa.large_string()),
            ("b", pa.dictionary(pa.int8(), pa.string())),
            ("c", pa.binary(4)),
            ("d", pa.timestamp("ns", tz="Europe/Berlin")),
            ("e", pa.timestamp("s")),
            ("f", pa.decimal256(12, 3)),
            ("g", pa.date64()),
            ("h", pa.float32()),
            ("i", pa.uint16()),
            ("j", pa.bool_()),
        ]
    )
    schema = KeySchema.of(arrow)

    assert list(schema.columns.values()) == [
        "string",
        "string",
        "binary",
        "timestamp",
        "timestamp_ntz",
        "decimal(12,3)",
        "date",
        "float32",
        "uint16",
        "bool",
    ]
    assert KeySchema.of(keys.arrow_schema(schema)) == schema


def test_parts_take_the_form_of_their_columns() -> None:
    schema = KeySchema({"price": "decimal(10,2)", "rate": "float64", "narrow": "float32"})
    key = schema.encode(5, 5, 0.1)

    assert schema.decode(key) == (Decimal("5.00"), 5.0, pa.scalar(0.1, pa.float32()).as_py())
    assert str(schema.decode(key)[0]) == "5.00"


@pytest.mark.parametrize(
    ("kind", "part", "message"),
    [
        ("int8", 128, "128 does not fit into int8"),
        ("uint8", -1, "-1 does not fit into uint8"),
        ("int64", True, "is a bool, and the column's type is int64"),
        ("int64", 1.0, "is a float"),
        ("bool", 1, "is a int"),
        ("string", b"x", "is a bytes"),
        ("binary", "x", "is a str"),
        ("float32", 1e300, "does not fit into float32"),
        ("decimal(4,2)", Decimal("100"), r"100 does not fit into decimal\(4,2\)"),
        ("decimal(4,2)", Decimal("0.001"), "does not fit"),
        ("decimal(4,2)", Decimal("Infinity"), "does not fit"),
        ("date", datetime(2026, 1, 1), "is a datetime"),
        ("timestamp", date(2026, 1, 1), "is a date"),
        ("timestamp", datetime(2026, 1, 1), "has no time zone; a timestamp needs one"),
        (
            "timestamp_ntz",
            datetime(2026, 1, 1, tzinfo=UTC),
            "has a time zone, which timestamp_ntz is without",
        ),
    ],
)
def test_a_part_of_another_type_is_refused_by_the_name_of_its_column(
    kind: str, part: Any, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"column 'c': .*{message}"):
        KeySchema({"c": kind}).encode(part)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "at least one column"),
        ([("a", "string"), ("a", "int8")], "once, not a, a"),
        ({"a": "varchar"}, "'varchar'; types are bool, int8"),
        ({"a": "decimal(39,0)"}, "1 to 38 digits"),
    ],
)
def test_a_schema_that_is_none_is_refused(columns: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        KeySchema(columns)


def test_a_type_without_order_cannot_be_part_of_a_key() -> None:
    with pytest.raises(InvalidRequest, match="column 'tags' is of type list<item: string>, which cannot be"):
        KeySchema.of(pa.schema([("tags", pa.list_(pa.string()))]))


def test_keys_of_other_columns_are_told_from_damaged_keys() -> None:
    with pytest.raises(InvalidRequest, match="the key has 1 parts, and the schema 3"):
        SHOP.decode(keys.encode("eu"))
    with pytest.raises(InvalidRequest, match="column 'id': is a str"):
        SHOP.decode(keys.encode("eu", None, "x"))
    with pytest.raises(InvalidRequest, match="column 'id': 4294967296 does not fit"):
        SHOP.decode(keys.encode("eu", None, 2**32))
    with pytest.raises(InvalidRequest, match="column 'f': the key holds the int 1, not a float64"):
        KeySchema({"f": "float64"}).decode(keys.encode(1))
    with pytest.raises(InvalidRequest, match=r"column 'f': the key holds the float 0\.1, not a float32"):
        KeySchema({"f": "float32"}).decode(keys.encode(0.1))
    with pytest.raises(CorruptData):
        SHOP.decode(b"\xff")
    with pytest.raises(InvalidRequest, match="4 parts for 3 columns: region, day, id"):
        SHOP.encode("eu", None, 1, 2)
