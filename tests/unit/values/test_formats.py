"""The two value formats: their bytes, the errors for invalid input, and the errors for damage."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest

from flagstone import values
from flagstone.errors import CorruptData, InvalidRequest

SCHEMA = pa.schema(
    [("id", pa.int32()), ("name", pa.string()), ("price", pa.decimal128(10, 2)), ("ok", pa.bool_())]
)
ROW = {"id": -2, "name": "flag", "price": Decimal("1.20"), "ok": True}
NOTHING = dict.fromkeys(SCHEMA.names)
ROWS = values.codec("row", SCHEMA)
JSON = values.codec("json", SCHEMA)


def nested(kind: Any, value: Any) -> bytes:
    """The bytes of one column in a row, after version, count and bitmap."""
    raw = values.codec("row", pa.schema([("c", kind)])).encode({"c": value})
    assert raw[:3] == b"\x01\x01\x00"
    return raw[3:]


def test_a_row_has_the_bytes_of_the_specification() -> None:
    # version, 4 columns, no nulls; int32; length and text; decimal of up to 18 digits; boolean
    assert ROWS.encode(ROW).hex(" ") == "01 04 00 fe ff ff ff 04 66 6c 61 67 78 00 00 00 00 00 00 00 01"
    assert ROWS.encode({"name": ""}).hex(" ") == "01 04 0d 00"
    assert ROWS.encode({}).hex(" ") == "01 04 0f"


@pytest.mark.parametrize(
    ("kind", "value", "spelt"),
    [
        (pa.int8(), -1, "ff"),
        (pa.uint64(), 2**64 - 1, "ff ff ff ff ff ff ff ff"),
        (pa.float64(), -0.0, "00 00 00 00 00 00 00 80"),
        (pa.float32(), 1.5, "00 00 c0 3f"),
        (pa.decimal128(9, 2), Decimal("-0.01"), "ff ff ff ff"),
        (pa.decimal128(18, 2), Decimal("2.56"), "00 01 00 00 00 00 00 00"),
        (pa.decimal128(19, 0), Decimal(-1), "ff " * 16),
        (pa.date32(), date(1970, 1, 2), "01 00 00 00"),
        (pa.timestamp("us", tz="UTC"), datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), "40 42 0f 00 00 00 00 00"),
        (pa.timestamp("s"), datetime(1970, 1, 1, 0, 0, 1), "01 00 00 00 00 00 00 00"),
        (pa.binary(), b"\x00" * 200, "c8 01 " + "00 " * 200),
        (pa.binary(2), b"ab", "61 62"),
        # length, 2 fields, the second is null, 5
        (pa.struct([("x", pa.int8()), ("y", pa.string())]), {"x": 5, "y": None}, "03 02 02 05"),
        # length, 3 elements, the second is null, 1, 3
        (pa.list_(pa.int8()), [1, None, 3], "04 03 02 01 03"),
        (pa.list_(pa.string()), ["a", ""], "05 02 00 01 61 00"),
        (pa.list_(pa.list_(pa.int8())), [[], None, [7]], "08 03 02 01 00 03 01 00 07"),
        # a list of structs of key and value
        (pa.map_(pa.int8(), pa.int8()), [(1, 2)], "07 01 00 04 02 00 01 02"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_each_type_has_the_bytes_of_the_specification(kind: Any, value: Any, spelt: str) -> None:
    codec = values.codec("row", pa.schema([("c", kind)]))
    raw = b"\x01\x01\x00" + bytes.fromhex(spelt)

    assert nested(kind, value) == raw[3:]
    assert codec.decode(raw) == {"c": value}


def test_json_writes_decimals_times_and_binaries_as_text() -> None:
    schema = pa.schema(
        [
            ("n", pa.int64()),
            ("f", pa.float64()),
            ("price", pa.decimal128(10, 2)),
            ("day", pa.date32()),
            ("at", pa.timestamp("us", tz="Europe/Berlin")),
            ("local", pa.timestamp("ms")),
            ("raw", pa.binary()),
            ("tags", pa.list_(pa.string())),
            ("inner", pa.struct([("x", pa.bool_())])),
            ("map", pa.map_(pa.int8(), pa.string())),
            ("none", pa.string()),
        ]
    )
    codec = values.codec("json", schema)
    written = codec.encode(
        {
            "n": 2**62,
            "f": float("-inf"),
            "price": Decimal("1.20"),
            "day": date(2026, 1, 2),
            "at": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
            "local": datetime(2026, 1, 2, 3, 4, 5),
            "raw": b"\x00\xff",
            "tags": ["é", None],
            "inner": {"x": True},
            "map": [(1, "a")],
        }
    )

    assert json.loads(written) == {
        "n": 4611686018427387904,
        "f": "-Infinity",
        "price": "1.20",
        "day": "2026-01-02",
        "at": "2026-01-02T03:04:05.000006Z",
        "local": "2026-01-02T03:04:05.000",
        "raw": "AP8=",
        "tags": ["é", None],
        "inner": {"x": True},
        "map": [[1, "a"]],
        "none": None,
    }
    assert codec.encode(codec.decode(written)) == written


def test_json_accepts_blanks_short_fractions_numbers_for_decimals_and_unknown_members() -> None:
    schema = pa.schema(
        [("at", pa.timestamp("us", tz="UTC")), ("price", pa.decimal128(10, 2)), ("f", pa.float64())]
    )
    codec = values.codec("json", schema)

    found = codec.decode(b' {"at":"2026-01-02 03:04:05.5Z","price":1.2,"f":3,"more":[1]}\n')

    assert found == {
        "at": datetime(2026, 1, 2, 3, 4, 5, 500_000, tzinfo=UTC),
        "price": Decimal("1.20"),
        "f": 3.0,
    }


@pytest.mark.parametrize("name", values.FORMATS)
def test_times_outside_pythons_years_are_encoded_and_decoded(name: str) -> None:
    batch = pa.record_batch(
        {
            "day": pa.array([2**31 - 1, -(2**31), 0], pa.int32()).cast(pa.date32()),
            "at": pa.array([2**63 - 1, -(2**63), 1], pa.int64()).cast(pa.timestamp("us", tz="UTC")),
            "fine": pa.array([2**63 - 1, -(2**63), 1], pa.int64()).cast(pa.timestamp("ns")),
        }
    )
    codec = values.codec(name, batch.schema)

    written = codec.encode_arrow(batch)

    assert codec.decode_arrow(written) == batch
    with pytest.raises(
        InvalidRequest, match=r"Python cannot represent the value of a column: .*: use decode_arrow"
    ):
        codec.decode(written[0].as_py())


@pytest.mark.parametrize("codec", [ROWS, JSON], ids=repr)
def test_a_codec_accepts_rows_batches_tables_and_chunked_arrays(codec: Any) -> None:
    batch = pa.RecordBatch.from_pylist([ROW, NOTHING], schema=SCHEMA)
    table = pa.Table.from_batches([batch.slice(0, 1), batch.slice(1)])
    written = codec.encode_arrow(batch)
    more = batch.append_column("more", pa.array([1, 2])).select(["more", "ok", "price", "name", "id"])

    assert codec.encode_arrow(table) == codec.encode_arrow(more) == written
    assert written.to_pylist() == [codec.encode(ROW), codec.encode({})]
    assert codec.decode(codec.encode(ROW)) == ROW
    assert codec.decode_arrow(pa.chunked_array([written.slice(1), written])).to_pylist() == [
        NOTHING,
        ROW,
        NOTHING,
    ]
    assert codec.decode_arrow(pa.array([None, codec.encode(ROW)], pa.binary())).to_pylist() == [NOTHING, ROW]
    assert codec.decode_arrow(written.cast(pa.large_binary())) == batch
    again = pickle.loads(pickle.dumps(codec))
    assert again == codec
    assert hash(again) == hash(codec)


def test_an_unknown_format_raises_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match=r"no value format 'arrow'.*use 'row'.; formats are row, json"):
        values.codec("arrow", SCHEMA)
    with pytest.raises(InvalidRequest, match="no value format 'avro'; formats are row, json"):
        values.codec("avro", SCHEMA)


@pytest.mark.parametrize("name", values.FORMATS)
def test_a_schema_that_the_format_cannot_store_raises_invalid_request(name: str) -> None:
    with pytest.raises(InvalidRequest, match="at least one column"):
        values.codec(name, pa.schema([]))
    with pytest.raises(InvalidRequest, match="two columns of one name: a, a"):
        values.codec(name, pa.schema([("a", pa.int8()), ("a", pa.int8())]))
    inner = pa.struct([("x", pa.dictionary(pa.int8(), pa.string()))])
    with pytest.raises(InvalidRequest, match=r"column 'a\[\]\.x' has the type dictionary<.*cast it"):
        values.codec(name, pa.schema([("a", pa.list_(inner))]))


@pytest.mark.parametrize("codec", [ROWS, JSON], ids=repr)
def test_rows_with_other_columns_raise_invalid_request(codec: Any) -> None:
    with pytest.raises(InvalidRequest, match="rows lack the columns name, price, ok; they have id"):
        codec.encode_arrow(pa.record_batch({"id": pa.array([1], pa.int32())}))
    wrong = pa.RecordBatch.from_pylist([ROW], schema=SCHEMA.set(0, pa.field("id", pa.int64())))
    with pytest.raises(InvalidRequest, match="column 'id' has the type int64; in the schema it is int32"):
        codec.encode_arrow(wrong)
    with pytest.raises(InvalidRequest, match="there is no column nam; columns are id, name"):
        codec.encode({"nam": "x"})
    with pytest.raises(InvalidRequest, match="column 'id' has the type int32"):
        codec.encode({"id": "x"})
    with pytest.raises(InvalidRequest, match="a value is bytes, not str"):
        codec.decode("x")
    with pytest.raises(InvalidRequest, match="values are binary, not string"):
        codec.decode_arrow(pa.array(["x"]))


@pytest.mark.parametrize(
    ("spelt", "offset", "message"),
    [
        ("", 0, "not a row of version 1"),
        ("02 04 00", 0, "not a row of version 1"),
        ("01", 0, "not a row of version 1"),
        ("01 04", 0, "not a row of version 1"),
        ("01 80 00", 0, "not a row of version 1"),
        ("01 04 00 01 00", 3, "column 'id' is cut off"),
        ("01 04 00 01 00 00 00", 7, "column 'name' is cut off"),
        ("01 04 00 01 00 00 00 05 61", 7, "column 'name' is cut off"),
        ("01 04 00 01 00 00 00 ff", 7, "column 'name' is cut off"),
        ("01 04 0d 02 61 ff", 4, "column 'name' is not UTF-8"),
        ("01 04 0f 00", 3, "there are bytes after the last column of the row"),
    ],
)
def test_a_damaged_row_raises_corrupt_data_with_its_offset(spelt: str, offset: int, message: str) -> None:
    good = ROWS.encode(ROW)

    with pytest.raises(CorruptData, match=f"value 1: .*{message}") as caught:
        ROWS.decode_arrow(pa.array([good, bytes.fromhex(spelt), good], pa.binary()))

    assert caught.value.offset == offset


@pytest.mark.parametrize(
    ("kind", "spelt", "message"),
    [
        (pa.list_(pa.int8()), "01 05", "column 'c' has no room for its nulls"),
        (pa.list_(pa.int8()), "03 02 00 01", "column 'c' is cut off"),
        (pa.list_(pa.int8()), "04 01 00 01 01", "there are bytes after the last element of c"),
        (pa.list_(pa.string()), "03 01 00 05", r"column 'c' is cut off"),
        (pa.list_(pa.string()), "04 01 00 01 ff", r"column 'c\[\]' is not UTF-8"),
        (pa.struct([("x", pa.int16())]), "03 01 00 01", r"column 'c\.x' is cut off"),
        (pa.null(), "00", "column 'c' is not null"),
    ],
)
def test_the_error_for_damage_inside_a_column_names_its_path(kind: Any, spelt: str, message: str) -> None:
    codec = values.codec("row", pa.schema([("c", kind)]))

    with pytest.raises(CorruptData, match=f"value 0: {message}"):
        codec.decode(b"\x01\x01\x00" + bytes.fromhex(spelt))


@pytest.mark.parametrize(
    ("kind", "spelt"),
    [
        (pa.decimal128(4, 2), "10 27 00 00"),
        (pa.time64("us"), "ff " * 8),
        (pa.map_(pa.int8(), pa.int8()), "06 01 00 03 02 01 02"),
        (pa.map_(pa.int8(), pa.int8()), "02 01 01"),
    ],
)
def test_an_item_that_is_invalid_for_its_type_raises_corrupt_data(kind: Any, spelt: str) -> None:
    codec = values.codec("row", pa.schema([("c", kind)]))

    with pytest.raises(CorruptData, match="column 'c' is"):
        codec.decode(b"\x01\x01\x00" + bytes.fromhex(spelt))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "value 0 is not JSON"),
        (b'{"id":', "value 0 is not JSON"),
        (b"\xff\xfe\xff", "value 0 is not JSON"),
        (b"[1]", "value 0 is JSON, but not an object"),
        (b'{"id":' + b"1" * 5000 + b"}", "value 0 is not JSON"),
        (b"[" * 100_000, "value 0 is not JSON"),
    ],
)
def test_a_value_that_is_not_a_json_object_raises_corrupt_data(text: bytes, message: str) -> None:
    with pytest.raises(CorruptData, match=message):
        JSON.decode(text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.int8(), "300"),
        (pa.int8(), "1.0"),
        (pa.int8(), "true"),
        (pa.bool_(), "1"),
        (pa.string(), "1"),
        (pa.float64(), '"1.5"'),
        (pa.binary(), '"a"'),
        (pa.binary(), '"!AAA"'),
        (pa.binary(2), '"AAAA"'),
        (pa.decimal128(4, 2), '"1.234"'),
        (pa.decimal128(4, 2), '"NaN"'),
        (pa.decimal128(4, 2), '"x"'),
        (pa.date32(), '"2026-13-01"'),
        (pa.timestamp("us"), '"2026-01-01T00:00:00Z"'),
        (pa.timestamp("us", tz="UTC"), '"2026-01-01T00:00:00"'),
        (pa.timestamp("us", tz="UTC"), '"2026-01-01T00:00:00+02:00"'),
        (pa.timestamp("ms"), '"2026-01-01T00:00:00.0001"'),
        (pa.list_(pa.int8()), "1"),
        (pa.map_(pa.int8(), pa.int8()), "[[1]]"),
        (pa.map_(pa.int8(), pa.int8()), "[[null,1]]"),
        (pa.struct([("x", pa.int8())]), "[]"),
    ],
    ids=str,
)
def test_the_error_for_a_member_of_another_type_names_value_and_column(kind: Any, text: str) -> None:
    codec = values.codec("json", pa.schema([("c", kind)]))
    rows = [b'{"c":null}', b'{"c":' + text.encode() + b"}"]

    with pytest.raises(InvalidRequest, match="value 1: column 'c' is not a"):
        codec.decode_arrow(pa.array(rows, pa.binary()))


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (pa.int32(), 1.5, "not a whole number"),
        (pa.int32(), Decimal("1.5"), "not a whole number"),
        (pa.float32(), 1e300, "too large"),
        (pa.struct([("a", pa.int32())]), {"a": 1.5}, "not a whole number"),
        (pa.map_(pa.string(), pa.int32()), {"a": 1.5}, "not a whole number"),
        (pa.map_(pa.string(), pa.int32()), [("a", 1.5)], "not a whole number"),
        (pa.list_(pa.string()), "abc", "is a text, and not a list"),
        (pa.date32(), datetime(2026, 1, 31, 12), "use its date()"),
        (pa.timestamp("us", "UTC"), datetime(2026, 1, 31, 12), "has no time zone"),
        (pa.timestamp("us"), datetime(2026, 1, 31, 12, tzinfo=UTC), "has a time zone"),
        (pa.timestamp("s", "UTC"), datetime(2026, 1, 31, 12, 0, 0, 5, tzinfo=UTC), "more precise"),
        (pa.duration("ms"), timedelta(microseconds=5), "more precise"),
        (pa.time32("s"), time(1, 2, 3, 5), "more precise"),
        (pa.date32(), 5, "has no unit"),
        (pa.duration("us"), 5, "has no unit"),
        (pa.timestamp("us", "UTC"), pd.Timestamp(5, unit="ns", tz="UTC"), "more precise"),
        (pa.duration("us"), pd.Timedelta(5, unit="ns"), "more precise"),
        (pa.float64(), True, "is no number"),
        (pa.string(), b"x", "decode it"),
        (pa.binary(), "x", "encode it"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", values.FORMATS)
def test_a_part_that_a_column_cannot_hold_is_refused(name: str, kind: Any, value: Any, text: str) -> None:
    """Arrow would store a part of it, or take it for something else."""
    codec = values.codec(name, pa.schema([("c", kind)]))
    with pytest.raises(InvalidRequest) as refused:
        codec.encode({"c": value})
    assert "column 'c'" in str(refused.value)
    assert text in str(refused.value)
    with pytest.raises(InvalidRequest):
        values.codec(name, pa.schema([("c", pa.list_(kind))])).encode({"c": [value]})
