"""Keys from and to Arrow columns: the inputs that are accepted, and every error."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from flagstone import keys
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.keys import KeySchema

BATCH = pa.record_batch({"region": ["eu", "us", None], "id": pa.array([1, None, -3], pa.int32())})


def test_a_batch_a_table_and_a_list_of_columns_give_the_same_keys() -> None:
    expected = [keys.encode("eu", 1), keys.encode("us", None), keys.encode(None, -3)]
    table = pa.Table.from_batches([BATCH.slice(0, 1), BATCH.slice(1)])

    assert keys.encode_arrow(BATCH).to_pylist() == expected
    assert keys.encode_arrow(table).to_pylist() == expected
    assert keys.encode_arrow(BATCH.columns).to_pylist() == expected
    assert keys.encode_arrow(table.columns).to_pylist() == expected


def test_decode_arrow_accepts_a_key_schema_and_an_arrow_schema() -> None:
    encoded = keys.encode_arrow(BATCH)
    chunked = pa.chunked_array([encoded.slice(0, 2), encoded.slice(2)])

    assert keys.decode_arrow(encoded, BATCH.schema) == BATCH.columns
    assert keys.decode_arrow(chunked, KeySchema.of(BATCH.schema)) == BATCH.columns
    assert keys.decode_arrow(encoded.cast(pa.large_binary()), BATCH.schema) == BATCH.columns


def test_equal_numbers_of_different_widths_have_equal_keys() -> None:
    numbers = [1, -2, 100, None]
    kinds = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]

    assert len({tuple(keys.encode_arrow([pa.array(numbers, kind)]).to_pylist()) for kind in kinds}) == 1
    narrow = keys.encode_arrow([pa.array([0.5, -1.5], pa.float32())])
    assert narrow == keys.encode_arrow([pa.array([0.5, -1.5], pa.float64())])
    one = keys.encode_arrow([pa.array([Decimal("1.5")], pa.decimal128(5, 1))])
    assert one == keys.encode_arrow([pa.array([Decimal("1.500")], pa.decimal128(38, 3))])


def test_dictionary_large_and_view_columns_have_the_keys_of_plain_columns() -> None:
    words = pa.array(["b", None, "a"])
    for column in (words.dictionary_encode(), words.cast(pa.large_string()), words.cast(pa.string_view())):
        assert keys.encode_arrow([column]) == keys.encode_arrow([words])
    days = pa.array([date(2026, 1, 2)])
    assert keys.encode_arrow([days.cast(pa.date64())]) == keys.encode_arrow([days])
    assert keys.encode_arrow([pa.nulls(2)]).to_pylist() == [b"\x05", b"\x05"]
    assert keys.encode_arrow([pa.array([], pa.int8())]).to_pylist() == []


def test_dates_and_times_outside_pythons_years_are_decoded() -> None:
    days = pa.array([2**31 - 1, -(2**31)], pa.int32()).cast(pa.date32())
    times = pa.array([2**63 - 1, -(2**63)], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    batch = pa.record_batch({"day": days, "at": times})

    assert keys.decode_arrow(keys.encode_arrow(batch), batch.schema) == batch.columns


def test_the_time_zone_comes_from_the_schema_and_is_not_in_the_key() -> None:
    at = pa.array([datetime(2026, 1, 1)], pa.timestamp("us")).cast(pa.timestamp("us", tz="UTC"))
    there = pa.schema([("at", pa.timestamp("ms", tz="Europe/Berlin"))])

    (column,) = keys.decode_arrow(keys.encode_arrow([at]), there)

    assert column.type == there.field("at").type
    assert column.cast(at.type) == at


def test_columns_that_cannot_be_encoded_raise_an_error_with_their_name() -> None:
    with pytest.raises(
        InvalidRequest, match=r"column 'columns\[0\]' has the type list<.*cannot be part of a key"
    ):
        keys.encode_arrow([pa.array([[1]])])
    with pytest.raises(InvalidRequest, match="column 'at' cannot be part of a key: Casting from timestamp"):
        keys.encode_arrow(pa.record_batch({"at": pa.array([1], pa.timestamp("ns"))}))
    with pytest.raises(InvalidRequest, match="equal lengths, not 1, 2"):
        keys.encode_arrow([pa.array([1]), pa.array([1, 2])])
    with pytest.raises(InvalidRequest, match="at least one column"):
        keys.encode_arrow([])
    with pytest.raises(InvalidRequest, match="not a int"):
        keys.encode_arrow(5)
    with pytest.raises(InvalidRequest, match="1 to 38 digits"):
        keys.encode_arrow([pa.array([Decimal(1)], pa.decimal256(40, 0))])


def test_the_error_for_a_key_that_is_too_long_names_its_row_and_column() -> None:
    batch = pa.record_batch({"id": [1, 2], "text": ["short", "x" * 65_534]})

    with pytest.raises(
        InvalidRequest, match=r"row 1: the key has 65538 bytes.* column 'text' alone has 65536"
    ):
        keys.encode_arrow(batch)


def test_a_key_of_the_maximum_length_is_encoded_and_decoded() -> None:
    batch = pa.record_batch({"text": ["x" * 65_533]})

    assert keys.decode_arrow(keys.encode_arrow(batch), batch.schema) == batch.columns


@pytest.mark.parametrize(
    ("key", "schema", "message"),
    [
        (keys.encode("eu"), {"a": "int8"}, "column 'a': the part is a str, but the column's type is int8"),
        (keys.encode(300), {"a": "int8"}, "300 does not fit into int8"),
        (keys.encode(-1), {"a": "uint8"}, "-1 does not fit into uint8"),
        (keys.encode(2**63), {"a": "int64"}, "does not fit into int64"),
        (keys.encode(1), {"a": "bool"}, "is a int"),
        (keys.encode(0.1), {"a": "float32"}, "float 0.1, not a float32"),
        (keys.encode(1), {"a": "float64"}, "has the int 1, not a float64"),
        (keys.encode(Decimal("1.25")), {"a": "decimal(5,1)"}, "does not fit"),
        (keys.encode(Decimal("12345")), {"a": "decimal(5,1)"}, "does not fit"),
        (keys.encode(date(2026, 1, 1)), {"a": "timestamp"}, "is a date"),
        (keys.encode("eu"), {"a": "binary"}, "is a str"),
        (keys.encode("eu"), {"a": "string", "b": "int8"}, "the key has 1 parts, but the schema 2"),
        (keys.encode("eu", 1), {"a": "string"}, "the key has 2 parts, but the schema 1"),
    ],
)
def test_a_key_with_other_columns_raises_invalid_request(
    key: bytes, schema: dict[str, str], message: str
) -> None:
    good = KeySchema(schema).encode([None] * len(schema))

    with pytest.raises(InvalidRequest, match=message) as caught:
        keys.decode_arrow(pa.array([good, key], pa.binary()), KeySchema(schema))

    assert caught.value.__notes__ == ["in key 1 of 2"]


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (b"\x2b\x01", "int64"),
        (b"\x2b\x00\x01", "int64"),
        (b"\x38\x00", "float64"),
        (b"\x42\x80\x01\x0b", "decimal(9,0)"),
        (b"\x58eu", "string"),
        (b"\x58\x01", "string"),
        (b"\x58\xff\x00", "string"),
        (b"\x48", "date"),
        (b"\x00", "bool"),
    ],
)
def test_a_damaged_key_raises_corrupt_data_with_its_offset(raw: bytes, kind: str) -> None:
    with pytest.raises(CorruptData) as caught:
        keys.decode_arrow(pa.array([b"\x05", raw], pa.binary()), KeySchema({"a": kind}))

    assert caught.value.offset == 0


def test_decoding_a_column_with_nulls_or_of_another_type_raises_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="1 of the keys are null"):
        keys.decode_arrow(pa.array([None], pa.binary()), BATCH.schema)
    with pytest.raises(InvalidRequest, match="keys are binary, not string"):
        keys.decode_arrow(pa.array(["x"]), BATCH.schema)
    with pytest.raises(
        InvalidRequest, match=r"column 'at' has a value that does not fit into timestamp\[ms\]"
    ):
        keys.decode_arrow(
            keys.encode_arrow([pa.array([1], pa.timestamp("us"))]), pa.schema([("at", pa.timestamp("ms"))])
        )
