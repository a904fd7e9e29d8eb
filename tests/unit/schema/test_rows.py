from __future__ import annotations

import pickle
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from flagstone import keys, values
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.schema import (
    Column,
    GivenColumns,
    TableReader,
    TableSchema,
    TableWriter,
    given_columns,
    plan_evolution,
)

FIELDS = pa.schema(
    [
        ("region", pa.string()),
        ("id", pa.int64()),
        ("qty", pa.int32()),
        ("price", pa.decimal128(10, 2)),
        ("tags", pa.list_(pa.struct([("a", pa.int8()), ("b", pa.large_string())]))),
    ]
)
ROWS = [
    {"region": "eu", "id": 1, "qty": 5, "price": Decimal("1.20"), "tags": [{"a": 1, "b": "x"}]},
    {"region": None, "id": -2, "qty": None, "price": None, "tags": None},
    {"region": "", "id": 2**40, "qty": -7, "price": Decimal("-99.99"), "tags": []},
]


def evolve(before: TableSchema | None, types: Any, form: str = "row") -> TableSchema:
    return plan_evolution(before, given_columns(types, ["region", "id"], value_format=form)).schema


def batch(rows: list[dict[str, Any]], types: Any = FIELDS) -> Any:
    return pa.Table.from_pylist(rows, schema=types).combine_chunks().to_batches()[0]


def decoded(reader: TableReader, key: Any, value: Any) -> list[dict[str, Any]]:
    found = reader.decode_keys(key) | reader.decode_values(value)
    return pa.RecordBatch.from_arrays(
        [found[name] for name in reader.wanted.names], names=reader.wanted.names
    ).to_pylist()


@pytest.mark.parametrize("form", ["row", "json"])
@pytest.mark.parametrize("prefix", [b"", b"orders/"])
def test_rows_survive_their_bytes(form: str, prefix: bytes) -> None:
    schema = evolve(None, FIELDS, form)

    key, value = TableWriter(schema, prefix=prefix).encode_arrow(batch(ROWS))

    reader = pickle.loads(pickle.dumps(TableReader(schema, prefix=prefix)))
    assert decoded(reader, key, value) == ROWS
    one = [reader.decode(k, v) for k, v in zip(key.to_pylist(), value.to_pylist(), strict=True)]
    assert one == ROWS


@pytest.mark.parametrize("form", ["row", "json"])
def test_single_rows_have_the_bytes_of_columns(form: str) -> None:
    writer = pickle.loads(pickle.dumps(TableWriter(evolve(None, FIELDS, form), prefix=b"p")))

    key, value = writer.encode_arrow(batch(ROWS))

    assert [writer.encode(row) for row in ROWS] == list(zip(key.to_pylist(), value.to_pylist(), strict=True))


def test_each_row_names_its_version() -> None:
    schema = evolve(None, pa.schema([("region", pa.string()), ("id", pa.int64()), ("n", pa.int32())]))

    _, value = TableWriter(schema).encode_arrow(batch([{"region": "", "id": 1, "n": -2}], pa.schema(
        [("region", pa.string()), ("id", pa.int64()), ("n", pa.int32())]
    )))  # fmt: skip

    assert value[0].as_py() == bytes.fromhex("02 01 01 00 fe ff ff ff")


def test_columns_of_a_batch_may_be_in_any_order() -> None:
    schema = evolve(None, FIELDS)
    turned = batch(ROWS).select(["tags", "id", "price", "region", "qty"])

    assert TableWriter(schema).encode_arrow(turned) == TableWriter(schema).encode_arrow(batch(ROWS))


@pytest.mark.parametrize("form", ["row", "json"])
def test_rows_of_several_versions_are_read_as_the_current_columns(form: str) -> None:
    first = evolve(None, FIELDS, form)
    wide = FIELDS.set(2, pa.field("qty", pa.int64())).append(pa.field("note", pa.string()))
    second = evolve(first, wide, form)
    third = evolve(second, pa.schema([field for field in wide if field.name != "price"]), form)
    one = TableWriter(first).encode_arrow(batch(ROWS))
    row = {"region": "us", "id": 9, "qty": 2**50, "note": "n", "tags": None}
    two = TableWriter(second).encode_arrow(batch([{**row, "price": Decimal("3.00")}], wide))
    last = TableWriter(third).encode_arrow(batch([row], wide))
    key = pa.concat_arrays([one[0], two[0], one[0], last[0]])
    value = pa.concat_arrays([one[1], two[1], one[1], last[1]])

    reader = TableReader(third)
    old = [
        {"region": each["region"], "id": each["id"], "qty": each["qty"], "tags": each["tags"], "note": None}
        for each in ROWS
    ]
    shown = {**row, "tags": None}
    assert decoded(reader, key, value) == [*old, shown, *old, shown]
    assert [reader.decode(k, v) for k, v in zip(key.to_pylist(), value.to_pylist(), strict=True)] == [
        *old,
        shown,
        *old,
        shown,
    ]


def test_a_dropped_column_can_still_be_read_by_its_name() -> None:
    first = evolve(None, FIELDS)
    second = evolve(first, pa.schema([field for field in FIELDS if field.name != "price"]))
    _, value = TableWriter(first).encode_arrow(batch(ROWS))
    _, later = TableWriter(second).encode_arrow(batch(ROWS))

    reader = TableReader(second, pa.schema([FIELDS.field("price")]))
    found = reader.decode_values(pa.concat_arrays([later, value]))["price"].to_pylist()
    assert found == [None, None, None, Decimal("1.20"), None, Decimal("-99.99")]


@pytest.mark.parametrize("name", FIELDS.names)
def test_a_reader_gets_only_the_column_it_wants(name: str) -> None:
    schema = evolve(None, FIELDS)
    key, value = TableWriter(schema).encode_arrow(batch(ROWS))

    reader = TableReader(schema, pa.schema([FIELDS.field(name)]))

    assert (reader.wants_key, reader.wants_value) == (name in ("region", "id"), name not in ("region", "id"))
    assert decoded(reader, key, value) == [{name: row[name]} for row in ROWS]


def test_a_reader_may_ask_for_wider_numbers() -> None:
    schema = evolve(None, FIELDS)
    _, value = TableWriter(schema).encode_arrow(batch(ROWS))

    wide = TableReader(schema, pa.schema([("qty", pa.int64())])).decode_values(value)["qty"]

    assert wide.type == pa.int64()
    assert wide.to_pylist() == [5, None, -7]


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (pa.field("qty", pa.int16()), "'qty' is stored as int32 and cannot be read as int16"),
        (pa.field("qty", pa.float32()), "cannot be read as float32"),
        (pa.field("price", pa.decimal128(10, 3)), r"cannot be read as decimal\(10,3\)"),
        (pa.field("id", pa.int32()), "'id' is stored as int64"),
        (pa.field("region", pa.binary()), "cannot be read as binary"),
        (pa.field("nothing", pa.int32()), "no column 'nothing'; it has region, id, qty, price, tags"),
    ],
)
def test_a_reader_cannot_ask_for_other_columns_or_types(field: Any, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        TableReader(evolve(None, FIELDS), pa.schema([field]))


def test_rows_of_an_unknown_version_are_damage_with_the_number_of_the_row() -> None:
    first = evolve(None, FIELDS)
    second = evolve(first, FIELDS.append(pa.field("note", pa.string())))
    _, value = TableWriter(first).encode_arrow(batch(ROWS))
    _, later = TableWriter(second).encode_arrow(batch(ROWS, FIELDS))

    with pytest.raises(CorruptData, match="value 4: it names version 2"):
        TableReader(first).decode_values(pa.concat_arrays([value, value.slice(0, 1), later]))


def test_a_cut_off_row_among_other_versions_is_named_by_its_number() -> None:
    first = evolve(None, FIELDS)
    second = evolve(first, FIELDS.append(pa.field("note", pa.string())))
    _, value = TableWriter(first).encode_arrow(batch(ROWS))
    _, later = TableWriter(second).encode_arrow(batch(ROWS, FIELDS))
    cut = pa.array([later[0].as_py()[:-1]], pa.binary())

    with pytest.raises(CorruptData, match="value 3"):
        TableReader(second).decode_values(pa.concat_arrays([value, cut, value]))


def test_rows_without_a_version_are_read_only_with_given_columns() -> None:
    schema = evolve(None, FIELDS)
    types = pa.schema(list(FIELDS)[2:])
    old = values.codec("row", types).encode_arrow(batch(ROWS))

    with pytest.raises(InvalidRequest, match="names no version"):
        TableReader(schema).decode_values(old)
    found = TableReader(schema, types, unversioned=types).decode_values(old)
    assert found["qty"].to_pylist() == [5, None, -7]


def test_tables_whose_columns_are_all_in_the_key_have_empty_values_and_may_grow() -> None:
    keys_only = pa.schema([("region", pa.string()), ("id", pa.int64())])
    schema = evolve(None, keys_only)
    rows = [{"region": "eu", "id": 1}, {"region": "us", "id": 2}]
    key, value = TableWriter(schema).encode_arrow(batch(rows, keys_only))

    assert value.to_pylist() == [b"", b""]
    assert key[0].as_py() == keys.encode("eu", 1)
    assert TableWriter(schema).encode(rows[0]) == (keys.encode("eu", 1), b"")
    assert decoded(TableReader(schema), key, value) == rows
    grown = evolve(schema, keys_only.append(pa.field("n", pa.int8())))
    assert decoded(TableReader(grown), key, value) == [{**row, "n": None} for row in rows]
    with pytest.raises(CorruptData, match="empty"):
        TableReader(evolve(None, FIELDS)).decode_values(value)


def test_a_column_that_never_is_null_refuses_nulls() -> None:
    given = GivenColumns((Column("id", "int64"),), (Column("n", "int8", nullable=False),))
    writer = TableWriter(plan_evolution(None, given).schema)
    types = pa.schema([("id", pa.int64()), ("n", pa.int8())])

    with pytest.raises(InvalidRequest, match="'n' has nulls"):
        writer.encode_arrow(batch([{"id": 1, "n": None}], types))
    with pytest.raises(InvalidRequest, match="'n' is null"):
        writer.encode({"id": 1})
    with pytest.raises(InvalidRequest, match="lack the column 'n'"):
        writer.encode_arrow(batch([{"id": 1}], pa.schema([("id", pa.int64())])))


def test_keys_outside_the_prefix_are_refused() -> None:
    schema = evolve(None, FIELDS)
    key, _ = TableWriter(schema, prefix=b"a/").encode_arrow(batch(ROWS))

    with pytest.raises(InvalidRequest, match="does not begin with b'b/'"):
        TableReader(schema, prefix=b"b/").decode_keys(key)
