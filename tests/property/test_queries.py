"""Random conditions through PyArrow, DuckDB and Polars: a query gives the rows that a filtered full read gives."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime
from decimal import Decimal
from functools import reduce
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import flagstone
from flagstone.query.dataset import Dataset
from kit.query_tables import (
    KEY_COLUMNS,
    SCHEMA,
    TYPED,
    literals,
    one_column_database,
    raw_database,
    structured_database,
)

DATABASES = ["raw", "structured", *TYPED]


@pytest.fixture(scope="module")
def datasets() -> Iterator[dict[str, tuple[Dataset, pa.Table]]]:
    """For each database its dataset, and its rows as a full scan decodes them."""
    opened, handles = {}, []
    for name in DATABASES:
        if name == "raw":
            db, options = raw_database(), {}
        elif name == "structured":
            db, options = structured_database(), {"schema": SCHEMA, "key_columns": KEY_COLUMNS}
        else:
            db, schema = one_column_database(name)
            options = {"schema": schema, "key_columns": [name], "value_format": "json"}
        dataset = flagstone.dataset(db, **options)
        opened[name] = dataset, dataset.to_table()
        handles += [dataset, db]
    yield opened
    for handle in handles:
        handle.close()


def columns_of(table: pa.Table) -> list[str]:
    return [name for name in table.schema.names if name not in ("created_ms", "expires_ms", "place")]


# -- PyArrow ------------------------------------------------------------------------------------------------


@st.composite
def arrow_leaf(draw: st.DrawFn, table: pa.Table) -> Any:
    name = draw(st.sampled_from(columns_of(table)))
    kind = table.schema.field(name).type
    field, value = pc.field(name), pa.scalar(draw(literals(name)), kind)
    form = draw(st.integers(0, 13))
    if form <= 5:
        comparisons = [pc.equal, pc.not_equal, pc.less, pc.less_equal, pc.greater, pc.greater_equal]
        compare = comparisons[form]
        swapped = draw(st.booleans())
        return compare(pc.scalar(value), field) if swapped else compare(field, pc.scalar(value))
    if form == 6:
        cells = draw(st.lists(literals(name) | st.none(), max_size=4))
        return field.isin(pa.array(cells, kind))
    if form == 7:
        return draw(st.sampled_from([field.is_null(), field.is_valid(), pc.scalar(value=True)]))
    if form == 8:
        return pc.scalar(pa.scalar(draw(st.sampled_from([None, False])), pa.bool_()))
    if form == 9 and (pa.types.is_string(kind) or pa.types.is_binary(kind)):
        text = draw(st.sampled_from(["", "a", "ab", "b", "c\U0010ffff", "d\ud7ff", "name"]))
        return draw(st.sampled_from([pc.starts_with(field, text), pc.match_like(field, f"{text}%")]))
    if form == 10 and name in ("number", "amount"):
        return pc.greater(pc.add(field, 1), 2)
    if form == 11:
        return pc.if_else(field.is_valid(), pc.equal(field, pc.scalar(value)), pa.scalar(None, pa.bool_()))
    if form == 12 and name in ("number", "weight", "amount", "seq", "small"):
        return pc.less(field, pc.scalar(draw(st.sampled_from([1, 0.1, -1.5, 2**40]))))
    between = [draw(literals(name)) for _ in range(2)]
    return (field >= pc.scalar(pa.scalar(between[0], kind))) & (
        field <= pc.scalar(pa.scalar(between[1], kind))
    )


def arrow_conditions(table: pa.Table) -> st.SearchStrategy[Any]:
    return st.recursive(
        arrow_leaf(table),
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a, b: pc.Expression._call("and", [a, b]), inner, inner),
            st.builds(lambda a: ~a, inner),
        ),
        max_leaves=6,
    )


@given(data=st.data())
def test_pyarrow_gives_the_rows_of_a_filtered_full_read(
    datasets: dict[str, tuple[Dataset, pa.Table]], data: st.DataObject
) -> None:
    dataset, full = datasets[data.draw(st.sampled_from(DATABASES))]
    condition = data.draw(arrow_conditions(full))
    try:
        expected = full.filter(condition)
    except pa.ArrowException:
        assume(False)  # PyArrow itself does not compare these values
    columns = data.draw(st.lists(st.sampled_from(full.schema.names), unique=True, min_size=1))
    assert rows_of(dataset.to_table(filter=condition, columns=columns)) == rows_of(expected.select(columns))
    assert dataset.count_rows(filter=condition) == expected.num_rows


def rows_of(table: pa.Table) -> list[str]:
    """The rows as text: NaN equals NaN."""
    return [repr(tuple(row.values())) for row in table.to_pylist()]


# -- Polars -------------------------------------------------------------------------------------------------


@st.composite
def polars_leaf(draw: st.DrawFn, table: pa.Table) -> pl.Expr:
    name = draw(st.sampled_from(columns_of(table)))
    kind = pl.from_arrow(table.schema.empty_table()).schema[name]
    column, value = pl.col(name), pl.lit(draw(literals(name)), dtype=kind)
    form = draw(st.integers(0, 12))
    if form <= 5:
        compare = ["eq", "ne", "lt", "le", "gt", "ge"][form]
        return getattr(value, compare)(column) if draw(st.booleans()) else getattr(column, compare)(value)
    if form == 6:
        cells = draw(st.lists(literals(name) | st.none(), max_size=4))
        return column.is_in(pl.Series(cells, dtype=kind), nulls_equal=draw(st.booleans()))
    if form == 7:
        return draw(st.sampled_from([column.is_null(), column.is_not_null(), column.eq_missing(value)]))
    if form == 8:
        return pl.lit(draw(st.sampled_from([True, False, None])), dtype=pl.Boolean)
    if form == 9 and kind in (pl.String, pl.Binary):
        text = draw(st.sampled_from(["", "a", "ab", "b", "c\U0010ffff", "d\ud7ff", "name"]))
        return column.str.starts_with(text) if kind == pl.String else column.bin.starts_with(text.encode())
    if form == 10 and name in ("number", "amount", "weight", "seq"):
        return column + 1 > draw(st.sampled_from([1, 2.5]))
    low, high = (pl.lit(draw(literals(name)), dtype=kind) for _ in range(2))
    return column.is_between(low, high, closed=draw(st.sampled_from(["both", "left", "right", "none"])))


def polars_conditions(table: pa.Table) -> st.SearchStrategy[pl.Expr]:
    return st.recursive(
        polars_leaf(table),
        lambda inner: st.one_of(
            st.builds(lambda a, b: a & b, inner, inner),
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a: ~a, inner),
        ),
        max_leaves=6,
    )


@given(data=st.data())
def test_polars_gives_the_rows_of_a_filtered_full_read(
    datasets: dict[str, tuple[Dataset, pa.Table]], data: st.DataObject
) -> None:
    dataset, full = datasets[data.draw(st.sampled_from(DATABASES))]
    condition = data.draw(polars_conditions(full))
    columns = data.draw(st.lists(st.sampled_from(full.schema.names), unique=True, min_size=1))
    limit = data.draw(st.none() | st.integers(0, 30))

    def of(frame: pl.LazyFrame) -> pl.DataFrame:
        chosen = frame.filter(condition).select(columns)
        return (chosen if limit is None else chosen.head(limit)).collect()

    everything = pl.from_arrow(full)
    assert isinstance(everything, pl.DataFrame)
    assert of(flagstone.scan_polars(dataset)).equals(of(everything.lazy()))


# -- DuckDB -------------------------------------------------------------------------------------------------


@st.composite
def sql_leaf(draw: st.DrawFn, table: pa.Table) -> str:
    name = draw(st.sampled_from(columns_of(table)))
    kind = table.schema.field(name).type

    def literal() -> str:
        return sql_of(draw(literals(name)), kind)

    form = draw(st.integers(0, 12))
    if form <= 5:
        sides = [name, literal()]
        return f" {['=', '<>', '<', '<=', '>', '>='][form]} ".join(
            reversed(sides) if draw(st.booleans()) else sides
        )
    if form == 6:
        return f"{name} in ({', '.join(literal() for _ in range(draw(st.integers(1, 4))))})"
    if form == 7:
        return draw(
            st.sampled_from(
                [f"{name} is null", f"{name} is not null", f"{name} is distinct from {literal()}"]
            )
        )
    if form == 8:
        return draw(st.sampled_from(["true", "false", "null::boolean"]))
    if form == 9 and pa.types.is_string(kind):
        return draw(
            st.sampled_from([f"{name} like 'a%'", f"starts_with({name}, 'b')", f"upper({name}) = 'A'"])
        )
    if form == 10 and name in ("number", "amount", "weight", "seq"):
        return f"{name}::double + 1 > 2"
    return f"{name} between {literal()} and {literal()}"


def sql_of(value: Any, kind: pa.DataType) -> str:
    match value:
        case bool():
            return str(value).lower()
        case bytes():
            return "'" + "".join(f"\\x{byte:02x}" for byte in value) + "'::blob"
        case str():
            return f"'{value}'"
        case float():
            return f"'{value}'::{'float' if pa.types.is_float32(kind) else 'double'}"
        case datetime():
            return f"'{value.isoformat()}'::{'timestamptz' if value.tzinfo else 'timestamp'}"
        case date():
            return f"'{value.isoformat()}'::date"
        case Decimal():
            return f"'{value}'::decimal(8, 2)"
    return str(value)


def sql_conditions(table: pa.Table) -> st.SearchStrategy[str]:
    return st.recursive(
        sql_leaf(table),
        lambda inner: st.one_of(
            st.builds("({} and {})".format, inner, inner),
            st.builds("({} or {})".format, inner, inner),
            st.builds("(not {})".format, inner),
        ),
        max_leaves=6,
    )


@pytest.fixture(scope="module")
def duck() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'; set threads = 1").fetchall()
        yield connection


@given(data=st.data())
def test_duckdb_gives_the_rows_of_a_filtered_full_read(
    duck: duckdb.DuckDBPyConnection, datasets: dict[str, tuple[Dataset, pa.Table]], data: st.DataObject
) -> None:
    dataset, full = datasets[data.draw(st.sampled_from(DATABASES))]
    condition = data.draw(sql_conditions(full))
    columns = data.draw(st.lists(st.sampled_from(full.schema.names), unique=True, min_size=1))
    found = []
    for source in (dataset, full):
        with duck.cursor() as cursor:
            cursor.register("source", source)
            query = f"select {', '.join(columns)} from source where {condition}"
            found.append(cursor.sql(query).to_arrow_table())
    assert rows_of(found[0]) == rows_of(found[1])


def test_the_databases_have_rows_that_conditions_can_tell_apart(
    datasets: dict[str, tuple[Dataset, pa.Table]],
) -> None:
    assert reduce(lambda most, each: max(most, each[1].num_rows), datasets.values(), 0) > 500
    assert all(full.num_rows >= 3 for _, full in datasets.values())
