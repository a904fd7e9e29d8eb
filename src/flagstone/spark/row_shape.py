"""The columns of a read: which of them come from keys, values and the rows themselves, and which are decoded. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from flagstone.errors import InvalidRequest
from flagstone.read.arrow import COLUMNS
from flagstone.spark.arrow_filter import Bound
from flagstone.spark.options import ReadOptions
from flagstone.spark.row_mapping import METADATA, RowMapping, arrow_schema, check_read_schema, read_schema
from flagstone.spark.selection import Wanted, narrow_bytes, narrow_columns


@dataclass(frozen=True, slots=True)
class RowShape:
    """All columns that a read has, with their Arrow types in `types`, and the `output` columns that it returns."""

    types: pa.Schema
    output: tuple[str, ...]
    mapping: RowMapping | None

    @classmethod
    def of(cls, options: ReadOptions, schema: StructType) -> RowShape:
        """The shape of a read with that schema. Raises `InvalidRequest` if a column is missing or has another type."""
        output = tuple(schema.fieldNames())
        if options.row_mapping is None:
            check_read_schema(schema)
            # Columns that the schema leaves out may be in a condition.
            every = StructType(
                [schema[name] if name in output else read_schema((name,))[name] for name in COLUMNS]
            )
            return cls(arrow_schema(every), output, None)
        stored = schema if options.stored_schema is None else parse_schema(options.stored_schema)
        mapping = options.row_mapping.for_reading(stored)
        metadata = read_schema([name for name in METADATA if name not in stored.fieldNames()])
        every = StructType([*stored.fields, *metadata.fields])
        for field in schema.fields:
            if field.name not in every.fieldNames():
                raise InvalidRequest(
                    f"there is no column {field.name!r} to read; choose from {', '.join(every.fieldNames())}"
                )
            if field.dataType != every[field.name].dataType:
                raise InvalidRequest(
                    f"column {field.name!r} is {every[field.name].dataType.simpleString()} in the stored schema, not "
                    f"{field.dataType.simpleString()}"
                )
        return cls(arrow_schema(every), output, mapping)

    def narrow(self, wanted: Wanted, conditions: Sequence[Bound]) -> tuple[Wanted, tuple[Bound, ...]]:
        """The keys that can pass the conditions, and the conditions that the rows of these keys must still pass."""
        if self.mapping is not None:
            return narrow_columns(wanted, self.mapping, self.types, conditions)
        rest = []
        for each in conditions:
            narrowed = narrow_bytes(wanted, each)
            if narrowed is None:
                rest.append(each)
            else:
                wanted = narrowed
        return wanted, tuple(rest)

    def needed(self, conditions: Sequence[Bound]) -> tuple[str, ...]:
        """The columns to return or to test, each once."""
        return tuple(dict.fromkeys((*self.output, *(each.condition.column for each in conditions))))

    def needed_types(self, conditions: Sequence[Bound]) -> pa.Schema:
        """These columns with their types."""
        return pa.schema([self.types.field(name) for name in self.needed(conditions)])

    def raw_columns(self, conditions: Sequence[Bound]) -> tuple[str, ...]:
        """The columns to read from the database."""
        needed = self.needed(conditions)
        return needed if self.mapping is None else self.mapping.raw_columns(needed) or ("key",)

    def decode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the database as the columns that can be decoded from what was read."""
        if self.mapping is None:
            return batch
        names = batch.schema.names
        has_key, has_value = "key" in names, "value" in names
        columns = [
            *(self.mapping.key_columns if has_key else ()),
            *((self.mapping.value_columns or ()) if has_value else ()),
            *(name for name in METADATA if name in names),
        ]
        return self.mapping.decode(batch, pa.schema([self.types.field(name) for name in columns]))


def parse_schema(text: str) -> StructType:
    """A schema as the JSON that `StructType.json()` writes."""
    try:
        return StructType.fromJson(json.loads(text))
    except (PySparkException, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"option 'stored_schema' is no schema in JSON: {error}") from None
