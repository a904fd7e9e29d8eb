"""Key schemas: names, types, and errors for parts of another type."""

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


def test_keys_are_the_same_with_and_without_a_schema() -> None:
    row = ("eu", date(2026, 1, 1), 7)

    assert SHOP.encode(row) == SHOP.encode(*row) == keys.encode(row)
    assert SHOP.decode(keys.encode(row)) == row
    assert SHOP.range("eu") == keys.range("eu")
    assert SHOP.encode("eu") == keys.encode("eu")


def test_a_schema_compares_hashes_and_pickles() -> None:
    assert KeySchema(SHOP.columns) == SHOP
    assert pickle.loads(pickle.dumps(SHOP)) == SHOP
    assert hash(KeySchema(list(SHOP.columns.items()))) == hash(SHOP)
    assert KeySchema({"region": "string"}) != SHOP
    assert len(SHOP) == 3
    assert repr(SHOP) == "KeySchema({'region': 'string', 'day': 'date', 'id': 'int32'})"


def test_arrow_schemas_and_key_schemas_convert_to_each_other() -> None:
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


def test_decoded_parts_have_the_types_of_their_columns() -> None:
    schema = KeySchema({"price": "decimal(10,2)", "rate": "float64", "narrow": "float32"})
    key = schema.encode(5, 5, 0.1)

    assert schema.decode(key) == (Decimal("5.00"), 5.0, pa.scalar(0.1, pa.float32()).as_py())
    assert str(schema.decode(key)[0]) == "5.00"


@pytest.mark.parametrize(
    ("kind", "part", "message"),
    [
        ("int8", 128, "128 does not fit into int8"),
        ("uint8", -1, "-1 does not fit into uint8"),
        ("int64", True, "the part is a bool, but the column's type is int64"),
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
            "has a time zone, but timestamp_ntz has none",
        ),
    ],
)
def test_the_error_for_a_part_of_another_type_names_the_column(kind: str, part: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=f"column 'c': .*{message}"):
        KeySchema({"c": kind}).encode(part)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "at least one column"),
        ([("a", "string"), ("a", "int8")], "two columns of one name: a, a"),
        ({"a": "varchar"}, "'varchar'; types are bool, int8"),
        ({"a": "decimal(39,0)"}, "1 to 38 digits"),
    ],
)
def test_an_invalid_schema_raises_invalid_request(columns: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        KeySchema(columns)


def test_a_list_column_cannot_be_part_of_a_key() -> None:
    with pytest.raises(
        InvalidRequest, match="column 'tags' has the type list<item: string>, which cannot be"
    ):
        KeySchema.of(pa.schema([("tags", pa.list_(pa.string()))]))


def test_a_key_with_other_columns_raises_invalid_request_and_a_damaged_key_corrupt_data() -> None:
    with pytest.raises(InvalidRequest, match="the key has 1 parts, but the schema 3"):
        SHOP.decode(keys.encode("eu"))
    with pytest.raises(InvalidRequest, match="column 'id': the part is a str"):
        SHOP.decode(keys.encode("eu", None, "x"))
    with pytest.raises(InvalidRequest, match="column 'id': 4294967296 does not fit"):
        SHOP.decode(keys.encode("eu", None, 2**32))
    with pytest.raises(InvalidRequest, match="column 'f': the key has the int 1, not a float64"):
        KeySchema({"f": "float64"}).decode(keys.encode(1))
    with pytest.raises(InvalidRequest, match=r"column 'f': the key has the float 0\.1, not a float32"):
        KeySchema({"f": "float32"}).decode(keys.encode(0.1))
    with pytest.raises(CorruptData):
        SHOP.decode(b"\xff")
    with pytest.raises(InvalidRequest, match="4 parts for 3 columns: region, day, id"):
        SHOP.encode("eu", None, 1, 2)
