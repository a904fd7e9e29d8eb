"""Spark's types for the columns of the data source, and their Arrow form. Checks run before any task does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from flagstone.errors import InvalidRequest
from flagstone.read.arrow import COLUMNS

_BYTES: Final = (BinaryType, StringType)
_WHOLE: Final = (LongType, IntegerType, ShortType)
_OPTIONAL: Final = ("op", "ttl_ms", "expires_ms")


def read_schema(columns: Sequence[str]) -> StructType:
    """What a read shows when nobody says otherwise."""
    fields = {
        "key": StructField("key", BinaryType(), nullable=False),
        "value": StructField("value", BinaryType(), nullable=False),
        "seq": StructField("seq", LongType(), nullable=False),
        "created_ms": StructField("created_ms", LongType()),
        "expires_ms": StructField("expires_ms", LongType()),
    }
    return StructType([fields[name] for name in columns])


def check_read_schema(schema: StructType) -> tuple[str, ...]:
    """The columns of a schema that a user gave. Raises `InvalidRequest` for names and types that cannot be had."""
    for field in schema.fields:
        if field.name not in COLUMNS:
            raise InvalidRequest(
                f"there is no column {field.name!r} to read; choose from {', '.join(COLUMNS)}"
            )
        wanted: tuple[type[DataType], ...] = _BYTES if field.name in ("key", "value") else (LongType,)
        if not isinstance(field.dataType, wanted):
            raise InvalidRequest(
                f"column {field.name!r} is {_names(wanted)}, not {field.dataType.simpleString()}"
            )
    if not schema.fields:
        raise InvalidRequest(f"a read needs a column; choose from {', '.join(COLUMNS)}")
    return tuple(schema.fieldNames())


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema that Spark expects of the batches, to the letter."""
    return to_arrow_schema(schema, timezone="UTC")


def check_write_schema(schema: StructType, *, key: str, value: str) -> None:
    """Raise `InvalidRequest` unless rows of that schema can be written."""
    given = {field.name: field.dataType for field in schema.fields}
    for name in (key, value):
        if name not in given:
            raise InvalidRequest(
                f"rows need a column {name!r}; there are {', '.join(given) or 'none'}. Rename one, or say which with "
                "key_column and value_column"
            )
        if not isinstance(given[name], _BYTES):
            raise InvalidRequest(
                f"column {name!r} is {given[name].simpleString()}; it must be {_names(_BYTES)}: cast it, or encode it"
            )
    extra = [name for name in given if name not in (key, value, *_OPTIONAL)]
    if extra:
        raise InvalidRequest(
            f"columns {', '.join(map(repr, extra))} have no place in a row; it has {key}, {value}, and if you like "
            f"{', '.join(_OPTIONAL)}. Drop them, or encode them into the value"
        )
    if "op" in given and not isinstance(given["op"], StringType):
        raise InvalidRequest(
            f"column 'op' is {given['op'].simpleString()}; it must be string: put, delete or merge"
        )
    for name in ("ttl_ms", "expires_ms"):
        if name in given and not isinstance(given[name], _WHOLE):
            raise InvalidRequest(
                f"column {name!r} is {given[name].simpleString()}; it must be a whole number"
            )
    if "ttl_ms" in given and "expires_ms" in given:
        raise InvalidRequest("there are columns 'ttl_ms' and 'expires_ms'; keep one of them")


def _names(types: Sequence[type[DataType]]) -> str:
    return " or ".join(kind.typeName() for kind in types)
