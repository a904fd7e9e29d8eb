"""The columns of a read: which of them come from keys, values and the rows themselves, and which are decoded. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.types import BinaryType, StructField, StructType

from flagstone.errors import InvalidRequest
from flagstone.read.arrow import COLUMNS
from flagstone.schema import TableSchema
from flagstone.spark.arrow_filter import Bound
from flagstone.spark.malformed import MalformedRows
from flagstone.spark.options import ReadOptions
from flagstone.spark.row_mapping import (
    FAIL,
    Decoder,
    RowMapping,
    arrow_schema,
    check_read_schema,
    read_schema,
)
from flagstone.spark.selection import Wanted, narrow_bytes, narrow_columns
from flagstone.spark.stored_schema import dropped_types, plan_read, read_types


@dataclass(frozen=True, slots=True)
class RowShape:
    """All columns that a read has, with their Arrow types in `types`, and the `output` columns that it returns."""

    types: pa.Schema
    output: tuple[str, ...]
    mapping: RowMapping | None
    malformed: MalformedRows = FAIL

    @classmethod
    def of(
        cls,
        options: ReadOptions,
        schema: StructType,
        table: TableSchema | None = None,
        prefix: bytes = b"",
    ) -> RowShape:
        """The shape of a read with that schema, of rows under `prefix` that have the stored schema `table`, if any.

        Raises `InvalidRequest` if a column is missing or has another type.
        """
        output = tuple(schema.fieldNames())
        stored = schema
        if table is None and options.stored_schema is not None:
            stored = parse_schema(options.stored_schema)
        if plan_read(options, stored, table, prefix) is None:
            check_read_schema(schema)
            # Columns that the schema leaves out may be in a condition.
            every = StructType(
                [schema[name] if name in output else read_schema((name,))[name] for name in COLUMNS]
            )
            return cls(arrow_schema(every), output, None)
        if table is not None:
            tested = dropped_types(table, (each.column for each in options.where))
            stored = _joined(schema, [*read_types(table).fields, *tested.fields])
        mapping = plan_read(options, stored, table, prefix)
        assert mapping is not None, "more columns do not make it a read of bytes"
        corrupt = StructField(options.malformed.column, BinaryType())
        every = _joined(stored, [*read_schema(mapping.metadata).fields, corrupt])
        for field in schema.fields:
            if field.name not in every.fieldNames():
                raise InvalidRequest(
                    f"there is no column {field.name!r} to read; choose from {', '.join(every.fieldNames())}"
                )
            if field.dataType != every[field.name].dataType and field.name != corrupt.name:
                raise InvalidRequest(
                    f"column {field.name!r} is {every[field.name].dataType.simpleString()} in the stored schema, not "
                    f"{field.dataType.simpleString()}"
                )
        return cls(arrow_schema(every), output, mapping, options.malformed)

    def narrow(self, wanted: Wanted, conditions: Sequence[Bound]) -> tuple[Wanted, tuple[Bound, ...]]:
        """The keys that can pass the conditions, and the conditions that the rows of these keys must still pass."""
        if self.mapping is not None:
            narrowed, _ = narrow_columns(wanted, self.mapping, self.types, conditions)
            # A malformed key may lie in the selection: its columns are null, and null passes no condition.
            return narrowed, tuple(conditions)
        rest = []
        for each in conditions:
            found = narrow_bytes(wanted, each)
            if found is None:
                rest.append(each)
            else:
                wanted = found
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
        if self.mapping is None:
            return needed
        return self.mapping.raw_columns(needed, self.malformed.column) or ("key",)

    def decoder(self, conditions: Sequence[Bound]) -> Decoder:
        """What decodes rows with the `raw_columns` to at least the needed columns. Make it once for all batches."""
        if self.mapping is None:
            return lambda batch: (batch, 0)
        names = self.needed(conditions)
        if self.mapping.table is None:
            # The columns of a value that names no version are decoded together.
            read = self.raw_columns(conditions)
            own = [
                *(self.mapping.key_columns if "key" in read else ()),
                *((self.mapping.value_columns or ()) if "value" in read else ()),
            ]
            names = tuple(dict.fromkeys((*names, *own)))
        types = pa.schema([self.types.field(name) for name in names])
        return self.mapping.decoder(types, self.malformed, given=self.types)


def _joined(schema: StructType, others: Iterable[StructField]) -> StructType:
    """The columns of the schema, and the others that it does not have."""
    return StructType([*schema.fields, *(each for each in others if each.name not in schema.fieldNames())])


def parse_schema(text: str) -> StructType:
    """A schema as the JSON that `StructType.json()` writes."""
    try:
        return StructType.fromJson(json.loads(text))
    except (PySparkException, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidRequest(f"option 'stored_schema' is no schema in JSON: {error}") from None
