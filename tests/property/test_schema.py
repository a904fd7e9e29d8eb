"""Rows of many versions of a schema, written and read in any order, against plain dictionaries."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from flagstone.errors import InvalidRequest
from flagstone.schema import Column, GivenColumns, TableReader, TableSchema, TableWriter, plan_evolution

KEY = (Column("id", "int64"),)
NAMES = ("a", "b", "c", "d")
TYPES = ("int8", "int16", "int32", "int64", "float32", "float64", "string", "decimal(10,2)")
ARROW = {"int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(), "float32": pa.float32(),
         "float64": pa.float64(), "string": pa.string(), "decimal(10,2)": pa.decimal128(10, 2)}  # fmt: skip

columns = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(TYPES)), unique_by=lambda pair: pair[0], max_size=4
)
steps = st.lists(st.tuples(columns, st.lists(st.integers(-100, 100) | st.none(), max_size=3)), max_size=12)


def cell(kind: str, number: int | None) -> Any:
    if number is None:
        return None
    if kind == "string":
        return f"text {number}"
    return (
        pa.scalar(number, pa.int64())
        .cast(ARROW[kind] if kind != "decimal(10,2)" else pa.decimal128(21, 2))
        .as_py()
    )


@settings(max_examples=100)
@given(steps=steps, form=st.sampled_from(["row", "json"]), wanted=st.sets(st.sampled_from(NAMES)))
def test_every_row_is_read_as_it_was_written_whatever_came_after(
    steps: list[Any], form: str, wanted: set[str]
) -> None:
    schema: TableSchema | None = None
    model: list[dict[str, Any]] = []
    keys: list[bytes] = []
    values: list[bytes] = []
    for given_columns, numbers in steps:
        rows = GivenColumns(KEY, tuple(Column(name, kind) for name, kind in given_columns), form)
        try:
            planned = plan_evolution(schema, rows)
        except InvalidRequest:
            continue
        schema = TableSchema.decode(planned.schema.encode())
        cells = [
            {"id": len(model) + at, **{name: cell(kind, number) for name, kind in given_columns}}
            for at, number in enumerate(numbers)
        ]
        types = pa.schema([("id", pa.int64()), *((name, ARROW[kind]) for name, kind in given_columns)])
        batch = pa.RecordBatch.from_pylist(cells, schema=types)
        key, value = TableWriter(schema, planned.version).encode_arrow(batch)
        keys += key.to_pylist()
        values += value.to_pylist()
        model += cells
    if schema is None:
        return
    latest = {name: schema.latest_column(name) for name in NAMES}
    chosen = pa.schema(
        [(name, ARROW[str(found.type)]) for name, found in latest.items() if found and name in wanted]
    )
    for types in (None, chosen):
        reader = TableReader(schema, types)
        names = reader.wanted.names
        expected = [{name: row.get(name) for name in names} for row in model]
        columns_read = reader.decode_keys(pa.array(keys, pa.binary()))
        columns_read |= reader.decode_values(pa.array(values, pa.binary()))
        got = [
            dict(zip(names, row, strict=True))
            for row in zip(*(columns_read[name].to_pylist() for name in names), strict=True)
        ]
        assert not names or got == expected
        assert [reader.decode(*pair) for pair in zip(keys, values, strict=True)] == expected
