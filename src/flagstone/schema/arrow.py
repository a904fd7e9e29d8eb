"""Columns of a stored schema as Arrow fields, and Arrow fields as columns. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import pyarrow as pa

from flagstone.errors import InvalidRequest
from flagstone.keys.columnar import arrow_schema
from flagstone.keys.schema import KeySchema, arrow_type_name
from flagstone.schema.evolution import GivenColumns, loosened
from flagstone.schema.table_schema import Column, ColumnType
from flagstone.values import codec, is_list

_NAMES: Final = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "date64": pa.date64(),
    "interval": pa.month_day_nano_interval(),
    **{f"time32[{unit}]": pa.time32(unit) for unit in ("s", "ms")},
    **{f"time64[{unit}]": pa.time64(unit) for unit in ("us", "ns")},
    **{f"duration[{unit}]": pa.duration(unit) for unit in ("s", "ms", "us", "ns")},
    **{f"timestamp_ntz[{unit}]": pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")},
    **{f"timestamp[{unit}]": pa.timestamp(unit, "UTC") for unit in ("s", "ms", "us", "ns")},
}
_OF_ARROW: Final = {kind: name for name, kind in _NAMES.items()}
_SAME: Final = {
    pa.large_string(): "string",
    pa.string_view(): "string",
    pa.large_binary(): "binary",
    pa.binary_view(): "binary",
}
"""Arrow types with the same values and the same bytes in a row as another one."""

_DECIMAL: Final = re.compile(r"decimal\((\d+),(-?\d+)\)")
_FIXED: Final = re.compile(r"fixed\[(\d+)\]")
_DECIMAL128_DIGITS: Final = 38


def arrow_type(kind: ColumnType) -> Any:
    """The Arrow type of a value column. Raises `InvalidRequest` for a type that this release does not know."""
    if isinstance(kind, str):
        return _NAMES.get(kind) or _parametric(kind)
    match kind:
        case ("list", element):
            return pa.list_(arrow_type(element))
        case ("map", key, item):
            return pa.map_(arrow_type(key), arrow_type(item))
        case ("struct", *fields):
            return pa.struct(
                [pa.field(name, arrow_type(inner), nullable) for name, inner, nullable in fields]
            )
    raise InvalidRequest(f"there is no column type {kind!r}")


def column_type(name: str, kind: Any) -> ColumnType:
    """The type of a value column with that Arrow type. Raises `InvalidRequest` if rows cannot hold it."""
    known = _OF_ARROW.get(kind) or _SAME.get(kind)
    if known is not None:
        return known
    if pa.types.is_timestamp(kind):
        return f"timestamp[{kind.unit}]"  # with a zone: a moment, whatever the zone is
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    if pa.types.is_fixed_size_binary(kind):
        return f"fixed[{kind.byte_width}]"
    if pa.types.is_map(kind):
        return "map", column_type(name, kind.key_type), column_type(name, kind.item_type)
    if is_list(kind):
        return "list", column_type(name, kind.value_type)
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        inner = ((each.name, column_type(f"{name}.{each.name}", each.type), each.nullable) for each in fields)
        return "struct", *inner
    raise InvalidRequest(f"column {name!r} has the type {kind}, which a row cannot hold: cast it")


def given_columns(
    types: Any,
    key_columns: Sequence[str],
    *,
    value_columns: Sequence[str] | None = None,
    value_format: str = "row",
    nullable: bool = False,
) -> GivenColumns:
    """The columns of rows with an Arrow schema; `value_columns` are by default all that are not in the key.

    With `nullable` every column and every field of a struct is taken as nullable, whatever the Arrow schema says.

    Raises:
        InvalidRequest: a column is missing, is in the key and in the value, or has a type that cannot be stored.

    """
    names = types.names
    chosen = [name for name in names if name not in key_columns] if value_columns is None else value_columns
    for name in (*key_columns, *chosen):
        if name not in names:
            raise InvalidRequest(f"there is no column {name!r}; there are {', '.join(names)}")
    twice = [name for name in chosen if name in key_columns]
    if twice:
        raise InvalidRequest(
            f"column {twice[0]!r} is in the key and in the value; remove it from one of them"
        )
    values = [types.field(name) for name in chosen]
    if values:
        codec(value_format, pa.schema(values))  # refuses types and names that the format cannot hold
    key = [types.field(name) for name in key_columns]
    return GivenColumns(
        _columns(key, lambda field: arrow_type_name(field.name, field.type), nullable=nullable),
        _columns(values, lambda field: _value_type(field, nullable=nullable), nullable=nullable),
        value_format,
    )


def key_arrow_schema(key: Sequence[Column]) -> Any:
    """The Arrow schema of key columns."""
    plain = arrow_schema(KeySchema([(column.name, str(column.type)) for column in key]))
    fields = zip(plain, key, strict=True)
    return pa.schema([field.with_nullable(column.nullable) for field, column in fields])


def value_arrow_schema(columns: Iterable[Column]) -> Any:
    """The Arrow schema of value columns."""
    return pa.schema([pa.field(each.name, arrow_type(each.type), each.nullable) for each in columns])


def _value_type(field: Any, *, nullable: bool) -> ColumnType:
    found = column_type(field.name, field.type)
    return loosened(found) if nullable else found


def _columns(
    fields: list[Any], name_of: Callable[[Any], ColumnType], *, nullable: bool
) -> tuple[Column, ...]:
    return tuple(Column(field.name, name_of(field), nullable or field.nullable) for field in fields)


def _parametric(text: str) -> Any:
    decimal = _DECIMAL.fullmatch(text)
    try:
        if decimal is not None:
            digits, scale = int(decimal[1]), int(decimal[2])
            make = pa.decimal128 if digits <= _DECIMAL128_DIGITS else pa.decimal256
            return make(digits, scale)
        fixed = _FIXED.fullmatch(text)
        if fixed is not None:
            return pa.binary(int(fixed[1]))
    except (ValueError, pa.ArrowException):
        pass
    raise InvalidRequest(f"there is no column type {text!r}: upgrade Flagstone if a newer release wrote it")
