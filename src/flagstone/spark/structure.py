"""Ordinary columns as keys and values: `flagstone.keys` for the key's, one of `flagstone.values`' formats for the rest.

Nothing about it is stored in the database. Who reads rows back names the columns again, with their types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from flagstone import keys, values
from flagstone.errors import InvalidRequest
from flagstone.spark.schema import arrow_schema
from flagstone.types import KeyRange

CARRIED: Final = ("op", "ttl_ms", "expires_ms")
"""Columns of a load that say what happens to a row, and are no part of it."""

METADATA: Final = ("seq", "created_ms", "expires_ms")
"""Columns of a read that no value holds."""

_RESERVED: Final = frozenset([*CARRIED, *METADATA])


@dataclass(frozen=True, slots=True)
class Structure:
    """Which columns make the key, in their order, and which the value; None: all others."""

    key_columns: tuple[str, ...]
    value_columns: tuple[str, ...] | None = None
    value_format: str = "row"

    def for_writing(self, schema: StructType) -> Structure:
        """The same with every column named. Raises `InvalidRequest` for one that is missing or cannot be stored."""
        return self._complete(schema, CARRIED)

    def for_reading(self, schema: StructType) -> Structure:
        """The same with every column named. Raises `InvalidRequest` for one that is missing or cannot be read."""
        return self._complete(schema, METADATA)

    def _complete(self, schema: StructType, besides: Sequence[str]) -> Structure:
        names = schema.fieldNames()
        chosen = self.value_columns
        if chosen is None:
            chosen = tuple(name for name in names if name not in self.key_columns and name not in besides)
        for name in (*self.key_columns, *chosen):
            if name not in names:
                raise InvalidRequest(f"there is no column {name!r}; there are {', '.join(names)}")
        twice = [name for name in chosen if name in self.key_columns]
        if twice:
            raise InvalidRequest(
                f"column {twice[0]!r} is part of the key; it cannot be part of the value, too"
            )
        taken = [name for name in (*self.key_columns, *chosen) if name in _RESERVED]
        if taken:
            others = ", ".join(sorted(_RESERVED - {taken[0]}))
            raise InvalidRequest(
                f"column {taken[0]!r} has a meaning of its own, like {others}: rename it to have it in a key or a value"
            )
        complete = Structure(self.key_columns, chosen, self.value_format)
        types = arrow_schema(schema)
        keys.KeySchema.of(complete.key_schema(types))
        values.codec(self.value_format, complete.value_schema(types))
        return complete

    def key_schema(self, types: pa.Schema) -> pa.Schema:
        """The columns of the key, out of those of a batch."""
        return pa.schema([types.field(name) for name in self.key_columns])

    def value_schema(self, types: pa.Schema) -> pa.Schema:
        """The columns of the value, out of those of a batch."""
        return pa.schema([types.field(name) for name in self.value_columns or ()])

    def encode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with `key` and `value` instead of the columns they are made of."""
        names = batch.schema.names
        codec = values.codec(self.value_format, self.value_schema(batch.schema))
        encoded = {
            "key": keys.encode_arrow([batch.column(names.index(name)) for name in self.key_columns]),
            "value": codec.encode_arrow(batch),
            **{name: batch.column(names.index(name)) for name in CARRIED if name in names},
        }
        return pa.RecordBatch.from_arrays(list(encoded.values()), names=list(encoded))

    def raw_columns(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """What must be read of the database to show these columns."""
        key = ["key"] if any(name in self.key_columns for name in wanted) else []
        value = ["value"] if any(name in (self.value_columns or ()) for name in wanted) else []
        return (*key, *value, *(name for name in METADATA if name in wanted))

    def decode(self, batch: pa.RecordBatch, types: pa.Schema) -> pa.RecordBatch:
        """The rows of the database as the columns of `types`."""
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


def narrow_range(structure: Structure, types: pa.Schema, filters: Sequence[Filter]) -> KeyRange:
    """Where the rows lie that pass the filters on key columns: equal ones first, then one that is compared.

    Rows outside of the range pass none; inside of it some may not, either: the filters must still be applied.
    """
    schema = keys.KeySchema.of(structure.key_schema(types))
    equal: Mapping[str, Any] = {
        each.attribute[0]: each.value
        for each in filters
        if isinstance(each, EqualTo) and len(each.attribute) == 1 and each.value is not None
    }
    parts: list[Any] = []
    for name in structure.key_columns:
        if name not in equal:
            break
        parts.append(equal[name])
    try:
        found = KeyRange(*schema.range(*parts)) if parts else KeyRange()
        if len(parts) == len(structure.key_columns):
            return found
        for each in filters:
            if getattr(each, "attribute", None) != (structure.key_columns[len(parts)],):
                continue
            found = found.intersect(_compared(schema, parts, each))
    except InvalidRequest:
        return KeyRange()  # a literal that no key has: Spark shall judge
    return found


def _compared(schema: keys.KeySchema, parts: Sequence[Any], condition: Filter) -> KeyRange:
    value = getattr(condition, "value", None)
    if value is None:
        return KeyRange()
    at, behind = schema.range(*parts, value)
    match condition:
        case GreaterThanOrEqual():
            return KeyRange(at, None)
        case GreaterThan():
            return KeyRange(behind, None)
        case LessThan():
            return KeyRange(None, at)
        case LessThanOrEqual():
            return KeyRange(None, behind)
    return KeyRange()
