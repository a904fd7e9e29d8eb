"""Columns of DataFrames and rows of a database: schemas, their checks, and columns encoded into keys and values.

`flagstone.keys` encodes the key columns, and a format of `flagstone.values` encodes the other columns. The database
does not store the mapping: a reader names the columns again, with their types. All checks run before the first task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

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
    TimestampType,
)

from flagstone import keys, values
from flagstone.errors import InvalidRequest
from flagstone.read.arrow import COLUMNS

CARRIED: Final = ("op", "ttl_ms", "expires_ms")
"""Columns of a load that control a row and are not part of its key or value."""

METADATA: Final = ("seq", "created_ms", "expires_ms")
"""Columns of a read that come from the row itself, not from its value."""

_BYTES: Final = (BinaryType, StringType)
_WHOLE: Final = (LongType, IntegerType, ShortType)
_RESERVED: Final = frozenset([*CARRIED, *METADATA])


@dataclass(frozen=True, slots=True)
class RowMapping:
    """The columns of the key, in order, and those of the value; None stands for all other columns."""

    key_columns: tuple[str, ...]
    value_columns: tuple[str, ...] | None = None
    value_format: str = "row"

    def for_writing(self, schema: StructType) -> RowMapping:
        """The mapping with every column named. Raises `InvalidRequest` for one that is missing or cannot be stored."""
        return self._complete(schema, CARRIED)

    def for_reading(self, schema: StructType) -> RowMapping:
        """The mapping with every column named. Raises `InvalidRequest` for one that is missing or cannot be read."""
        return self._complete(schema, METADATA)

    def _complete(self, schema: StructType, excluded: Sequence[str]) -> RowMapping:
        names = schema.fieldNames()
        chosen = self.value_columns
        if chosen is None:
            chosen = tuple(name for name in names if name not in self.key_columns and name not in excluded)
        for name in (*self.key_columns, *chosen):
            if name not in names:
                raise InvalidRequest(f"there is no column {name!r}; there are {', '.join(names)}")
        twice = [name for name in chosen if name in self.key_columns]
        if twice:
            raise InvalidRequest(
                f"column {twice[0]!r} is in the key and in the value; remove it from one of them"
            )
        taken = [name for name in (*self.key_columns, *chosen) if name in _RESERVED]
        if taken:
            others = ", ".join(sorted(_RESERVED - {taken[0]}))
            raise InvalidRequest(
                f"column {taken[0]!r} is reserved, like {others}; rename it to use it in a key or a value"
            )
        complete = RowMapping(self.key_columns, chosen, self.value_format)
        types = arrow_schema(schema)
        keys.KeySchema.of(complete.key_schema(types))
        values.codec(self.value_format, complete.value_schema(types))
        return complete

    def key_schema(self, types: pa.Schema) -> pa.Schema:
        """The fields of the key columns."""
        return pa.schema([types.field(name) for name in self.key_columns])

    def value_schema(self, types: pa.Schema) -> pa.Schema:
        """The fields of the value columns."""
        return pa.schema([types.field(name) for name in self.value_columns or ()])

    def encode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with `key` and `value` in place of the mapped columns."""
        names = batch.schema.names
        codec = values.codec(self.value_format, self.value_schema(batch.schema))
        encoded = {
            "key": keys.encode_arrow([batch.column(names.index(name)) for name in self.key_columns]),
            "value": codec.encode_arrow(batch),
            **{name: batch.column(names.index(name)) for name in CARRIED if name in names},
        }
        return pa.RecordBatch.from_arrays(list(encoded.values()), names=list(encoded))

    def raw_columns(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """The columns to read from the database for the wanted columns."""
        key = ["key"] if any(name in self.key_columns for name in wanted) else []
        value = ["value"] if any(name in (self.value_columns or ()) for name in wanted) else []
        return (*key, *value, *(name for name in METADATA if name in wanted))

    def decode(self, batch: pa.RecordBatch, types: pa.Schema) -> pa.RecordBatch:
        """Rows of the database decoded to the columns of `types`."""
        names = batch.schema.names
        columns: dict[str, Any] = {
            name: batch.column(names.index(name)) for name in METADATA if name in names
        }
        if "key" in names:
            decoded = keys.decode_arrow(batch.column(names.index("key")), self.key_schema(types))
            columns |= dict(zip(self.key_columns, decoded, strict=True))
        if "value" in names:
            rows = values.codec(self.value_format, self.value_schema(types)).decode_arrow(
                batch.column(names.index("value"))
            )
            columns |= dict(zip(rows.schema.names, rows.columns, strict=True))
        return pa.RecordBatch.from_arrays([columns[field.name] for field in types], names=types.names)


def read_schema(columns: Sequence[str]) -> StructType:
    """The schema of a read for which the user gives none."""
    fields = {
        "key": StructField("key", BinaryType(), nullable=False),
        "value": StructField("value", BinaryType(), nullable=False),
        "seq": StructField("seq", LongType(), nullable=False),
        "created_ms": StructField("created_ms", LongType()),
        "expires_ms": StructField("expires_ms", LongType()),
    }
    return StructType([fields[name] for name in columns])


def check_read_schema(schema: StructType) -> tuple[str, ...]:
    """The columns of a user's schema. Raises `InvalidRequest` for a name or a type that a read does not have."""
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
    """The exact Arrow schema that Spark expects of the batches."""
    return to_arrow_schema(schema, timezone="UTC")


def check_write_schema(schema: StructType, *, key: str, value: str) -> None:
    """Raise `InvalidRequest` if rows of that schema cannot be written."""
    given = {field.name: field.dataType for field in schema.fields}
    for name in (key, value):
        if name not in given:
            raise InvalidRequest(
                f"rows need a column {name!r}; there are {', '.join(given) or 'none'}. Rename one, or set "
                "key_column or value_column"
            )
        if not isinstance(given[name], _BYTES):
            raise InvalidRequest(
                f"column {name!r} is {given[name].simpleString()}; it must be {_names(_BYTES)}: cast it, or encode it"
            )
    extra = [name for name in given if name not in (key, value, *CARRIED)]
    if extra:
        raise InvalidRequest(
            f"unexpected columns {', '.join(map(repr, extra))}; a row has {key}, {value} and optionally "
            f"{', '.join(CARRIED)}. Drop the columns, or encode them into the value"
        )
    if "op" in given and not isinstance(given["op"], StringType):
        raise InvalidRequest(
            f"column 'op' is {given['op'].simpleString()}; it must be string: put, delete or merge"
        )
    for name in ("ttl_ms", "expires_ms"):
        allowed = (*_WHOLE, TimestampType) if name == "expires_ms" else _WHOLE
        if name in given and not isinstance(given[name], allowed):
            raise InvalidRequest(
                f"column {name!r} is {given[name].simpleString()}; it must be a whole number"
                f"{' or a timestamp' if TimestampType in allowed else ''}"
            )
    if "ttl_ms" in given and "expires_ms" in given:
        raise InvalidRequest("there are columns 'ttl_ms' and 'expires_ms'; keep one of them")


def _names(types: Sequence[type[DataType]]) -> str:
    return " or ".join(kind.typeName() for kind in types)
