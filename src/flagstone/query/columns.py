"""The columns of a database as a table, and their rows at one moment, by key ranges.

Without key columns a table has the columns of the rows: `key`, `value`, `seq`, `created_ms` and `expires_ms`. With key
columns, `flagstone.keys` decodes the key and a format of `flagstone.values` decodes the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Protocol, TypeAlias

import pyarrow as pa

from flagstone import keys, values
from flagstone.db.read_methods import Reads
from flagstone.errors import InvalidRequest
from flagstone.format.columns import SCHEMA
from flagstone.kernels.columns import binaries, numbers
from flagstone.lsm.system_rows import is_system
from flagstone.query.conditions import Condition, KeySpace, RawKeys, TupleKeys, is_single_key, key_ranges
from flagstone.read.arrow import COLUMNS
from flagstone.schema import TableReader, TableSchema
from flagstone.types import KeyRange

METADATA: Final = ("seq", "created_ms", "expires_ms")
_POINTS_AT_ONCE: Final = 1024
_TEXT: Final = (pa.string(), pa.large_string(), pa.string_view())
_BYTES: Final = (pa.binary(), pa.large_binary(), pa.binary_view(), *_TEXT)

Columns: TypeAlias = Any | Mapping[str, Any] | Iterable[tuple[str, Any]]
"""An Arrow schema, or names and Arrow types."""


class Mapper(Protocol):
    """How rows of the database become rows of the table."""

    schema: pa.Schema
    space: KeySpace

    def raw_columns(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """The columns to read from the database for these columns; at least one."""
        ...

    def decode(self, batch: pa.RecordBatch, wanted: Sequence[str]) -> pa.RecordBatch:
        """The wanted columns of rows with the columns `raw_columns(wanted)`."""
        ...


def stored_mapper(table: TableSchema, schema: Columns | None, prefix: bytes) -> Mapper:
    """The mapping for the rows under `prefix`, whose schema the database has; `schema` chooses columns and types.

    Raises `InvalidRequest` if the rows cannot be read with it.
    """
    return _StoredRows(table, None if schema is None else pa.schema(schema), prefix)


def mapper(schema: Columns | None, key_columns: Sequence[str] | None, value_format: str) -> Mapper:
    """The mapping for a schema. Raises `InvalidRequest` if a column is missing or cannot be decoded."""
    given = None if schema is None else pa.schema(schema)
    if key_columns is None:
        return _RawRows(given)
    if given is None:
        raise InvalidRequest("key_columns name columns of a schema; give schema=, too")
    if isinstance(key_columns, str):
        raise InvalidRequest(f"key_columns is a list of names, such as [{key_columns!r}]")
    return _DecodedRows(given, tuple(key_columns), value_format)


class _RawRows:
    """Rows as they are stored; `key` and `value` may be read as text."""

    def __init__(self, schema: pa.Schema | None) -> None:
        self.space: KeySpace = RawKeys()
        default = pa.schema([SCHEMA.field(name) for name in COLUMNS])
        self.schema: pa.Schema = default if schema is None else schema
        for field in self.schema:
            if field.name not in COLUMNS:
                raise InvalidRequest(
                    f"there is no column {field.name!r} to read; choose from {', '.join(COLUMNS)}, or name the "
                    "key_columns of the schema"
                )
            allowed = _BYTES if field.name in ("key", "value") else (default.field(field.name).type,)
            if field.type not in allowed:
                raise InvalidRequest(
                    f"column {field.name!r} is {' or '.join(map(str, allowed))}, not {field.type}"
                )

    def raw_columns(self, wanted: Sequence[str]) -> tuple[str, ...]:
        return tuple(wanted) or ("key",)

    def decode(self, batch: pa.RecordBatch, wanted: Sequence[str]) -> pa.RecordBatch:
        fields = [self.schema.field(name) for name in wanted or ("key",) if name in self.schema.names]
        return pa.RecordBatch.from_arrays(
            [_cast(batch.column(field.name), field) for field in fields], schema=pa.schema(fields)
        )


class _StoredRows:
    """Rows of a stored schema, each with the version that wrote it."""

    def __init__(self, table: TableSchema, schema: pa.Schema | None, prefix: bytes) -> None:
        self._table = table
        self._prefix = prefix
        metadata = [field for field in schema or () if field.name in METADATA]
        wanted = None if schema is None else pa.schema([field for field in schema if field not in metadata])
        self.schema: pa.Schema = (
            TableReader(table, wanted, prefix=prefix).wanted if schema is None else schema
        )
        self._readers: dict[tuple[str, ...], TableReader] = {}
        columns = [(column.name, str(column.type)) for column in table.key]
        self.space: KeySpace = TupleKeys(keys.KeySchema(columns), prefix)
        self._reader(self.schema.names)  # refuses what rows of this schema cannot be read as

    def raw_columns(self, wanted: Sequence[str]) -> tuple[str, ...]:
        names = self._table.key_names
        valued = any(name not in names and name not in METADATA for name in wanted)
        needed = [*(["value"] if valued else []), *(name for name in METADATA if name in wanted)]
        keyed = not needed or any(name in names for name in wanted)
        return (*(["key"] if keyed else []), *needed)

    def decode(self, batch: pa.RecordBatch, wanted: Sequence[str]) -> pa.RecordBatch:
        chosen = wanted or [name for name in self.schema.names if name in self._table.key_names][:1]
        names, reader = batch.schema.names, self._reader(chosen)
        found: dict[str, Any] = {name: batch.column(name) for name in METADATA if name in names}
        if "key" in names:
            found |= reader.decode_keys(batch.column("key"))
        if "value" in names:
            found |= reader.decode_values(batch.column("value"))
        fields = [self.schema.field(name) for name in chosen]
        if not fields:  # a count of rows of which no key column is wanted
            return batch.select(names[:1])
        return pa.RecordBatch.from_arrays(
            [_cast(found[field.name], field) for field in fields], schema=pa.schema(fields)
        )

    def _reader(self, wanted: Sequence[str]) -> TableReader:
        chosen = tuple(name for name in wanted if name not in METADATA)
        known = self._readers.get(chosen)
        if known is None:
            types = pa.schema([self.schema.field(name) for name in chosen])
            known = self._readers[chosen] = TableReader(self._table, types, prefix=self._prefix)
        return known


class _DecodedRows:
    """Rows with the columns of a tuple key and of a structured value."""

    def __init__(self, schema: pa.Schema, key_columns: tuple[str, ...], value_format: str) -> None:
        for name in key_columns:
            if name not in schema.names:
                raise InvalidRequest(f"there is no key column {name!r}; there are {', '.join(schema.names)}")
        others = [name for name in schema.names if name not in key_columns]
        self.schema: pa.Schema = schema
        self._key_names = key_columns
        self._keys = pa.schema([schema.field(name) for name in key_columns])
        self._values = pa.schema([schema.field(name) for name in others if name not in METADATA])
        self.space: KeySpace = TupleKeys(keys.KeySchema.of(self._keys))
        self._codec = values.codec(value_format, self._values) if len(self._values) else None

    def raw_columns(self, wanted: Sequence[str]) -> tuple[str, ...]:
        needed = ["value"] if any(name in self._values.names for name in wanted) else []
        needed += [name for name in METADATA if name in wanted]
        keyed = not needed or any(name in self._key_names for name in wanted)
        return (*(["key"] if keyed else []), *needed)

    def decode(self, batch: pa.RecordBatch, wanted: Sequence[str]) -> pa.RecordBatch:
        names = batch.schema.names
        found: dict[str, Any] = {name: batch.column(name) for name in METADATA if name in names}
        if "key" in names:
            decoded = keys.decode_arrow(batch.column("key"), self._keys)
            found |= dict(zip(self._key_names, decoded, strict=True))
        if "value" in names and self._codec is not None:
            row = self._codec.decode_arrow(batch.column("value"))
            found |= dict(zip(row.schema.names, row.columns, strict=True))
        fields = [self.schema.field(name) for name in wanted or self._key_names[:1]]
        return pa.RecordBatch.from_arrays(
            [_cast(found[field.name], field) for field in fields], schema=pa.schema(fields)
        )


def _cast(column: Any, field: pa.Field) -> Any:
    if column.type == field.type:
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowInvalid as error:
        raise InvalidRequest(
            f"column {field.name!r} does not fit {field.type}: {error}; read it as binary"
        ) from None


class TableRows:
    """The rows of a table at one moment. Any thread may use it."""

    def __init__(
        self, reads: Reads, mapped: Mapper, keys: KeyRange, *, include_expired: bool = False
    ) -> None:
        self.mapper: Mapper = mapped
        self._reads = reads
        self._keys = keys
        self._include_expired = include_expired

    @property
    def schema(self) -> pa.Schema:
        return self.mapper.schema

    def ranges(self, condition: Condition) -> list[KeyRange]:
        """The key ranges that a query with this condition reads."""
        found = key_ranges(condition, self.mapper.space, self._keys)
        # Scans hide system rows, and a read of one key does not.
        return [each for each in found if not (is_single_key(each) and is_system(each.start or b""))]

    def scan(self, condition: Condition, columns: Sequence[str]) -> pa.RecordBatchReader:
        """The rows of these ranges, by key, as batches with some columns, in the order of `columns`.

        Without columns there is the first one, so that rows can be counted. Reading the batches blocks, and raises what
        reads raise.
        """
        unknown = [name for name in columns if name not in self.schema.names]
        if unknown:
            raise InvalidRequest(
                f"there is no column {unknown[0]!r}; there are {', '.join(self.schema.names)}"
            )
        raw = self.mapper.raw_columns(columns)
        empty = pa.RecordBatch.from_arrays(
            [pa.nulls(0, SCHEMA.field(name).type) for name in raw], schema=_schema_of(raw)
        )
        found = (self.mapper.decode(batch, columns) for batch in self._raw(self.ranges(condition), raw))
        return pa.RecordBatchReader.from_batches(self.mapper.decode(empty, columns).schema, found)

    def _raw(self, ranges: Sequence[KeyRange], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for single, group in groupby(ranges, is_single_key):
            if not single:
                for each in group:
                    yield from self._reads.scan_arrow(
                        each.start, each.stop, columns=columns, include_expired=self._include_expired
                    )
                continue
            points = [each.start for each in group if each.start]
            for at in range(0, len(points), _POINTS_AT_ONCE):
                yield self._points(points[at : at + _POINTS_AT_ONCE], columns)

    def _points(self, points: Sequence[bytes], columns: Sequence[str]) -> pa.RecordBatch:
        """The rows of single keys. Bloom filters skip the SSTs without them."""
        cells: dict[str, list[Any]]
        if set(columns) <= {"key", "value"}:
            read = self._reads.multi_get(points, include_expired=self._include_expired)
            found = [(key, value) for key, value in zip(points, read, strict=True) if value is not None]
            cells = {"key": [key for key, _ in found], "value": [value for _, value in found]}
        else:
            rows = [self._reads.get_row(key, include_expired=self._include_expired) for key in points]
            cells = {name: [getattr(row, name) for row in rows if row is not None] for name in columns}
        schema = _schema_of(columns)
        arrays = [
            binaries(cells[field.name], field.type)
            if pa.types.is_binary(field.type)
            else numbers(cells[field.name], field.type)
            for field in schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _schema_of(columns: Sequence[str]) -> pa.Schema:
    return pa.schema([SCHEMA.field(name) for name in columns])
