"""Structured rows of a stored schema as keys and values, and back: Arrow columns, or one row at a time. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from flagstone import keys, values
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.keys.schema import arrow_type_name
from flagstone.schema.arrow import column_type, key_arrow_schema, value_arrow_schema
from flagstone.schema.evolution import loosened, plan_projection
from flagstone.schema.table_schema import Column, SchemaVersion, TableSchema, type_text
from flagstone.values.row_codec import UNVERSIONED, VERSIONED, RowCodec, read_versions

_NULL: Final = -2
_EMPTY: Final = -1
_OTHER_LAYOUT: Final = -3
_SEVERAL: Final = -4
_ROW_NUMBER: Final = re.compile(r"\Avalue (\d+)")


class TableWriter:
    """Encodes rows of one version of a schema. Keys begin with `prefix`. It pickles, and any thread may use it."""

    def __init__(
        self, schema: TableSchema, version: SchemaVersion | None = None, *, prefix: bytes = b""
    ) -> None:
        self.schema: TableSchema = schema
        self.version: SchemaVersion = version or schema.current
        self.prefix: bytes = prefix
        self._key = keys.KeySchema([(column.name, str(column.type)) for column in schema.key])
        self._codec = self._codec_of(value_arrow_schema(self.version.columns))

    def __reduce__(self) -> tuple[Any, ...]:
        return _writer, (self.schema, self.version, self.prefix)

    def encode_arrow(self, batch: Any, *, deleted: Any = None) -> tuple[Any, Any]:
        """A column of keys and one of values, from a record batch with the columns of the version in any order.

        A nullable column may be missing: it is null. Other columns are ignored. In rows that `deleted`, a column of
        booleans, marks as deletions, all value columns may be null.

        Raises:
            InvalidRequest: a column is missing, has another type than the version, or has a null where none may be.

        """
        key = [_checked(batch, column, key=True) for column in self.schema.key]
        encoded = keys.encode_arrow(key)
        if self.prefix:
            encoded = pc.binary_join_element_wise(pa.scalar(self.prefix), encoded, pa.scalar(b""))
        if not self.version.columns:
            return encoded, pa.array([b""], pa.binary()).take(pa.array([0] * batch.num_rows, pa.int64()))
        columns = [_checked(batch, column, deleted=deleted) for column in self.version.columns]
        # With the types of the batch: other names inside a list, or larger offsets, give the same bytes.
        types = pa.schema(
            [(column.name, array.type) for column, array in zip(self.version.columns, columns, strict=True)]
        )
        codec = (
            self._codec if self._codec is not None and self._codec.schema == types else self._codec_of(types)
        )
        assert codec is not None, "the version has columns"
        return encoded, codec.encode_arrow(pa.RecordBatch.from_arrays(columns, schema=types))

    def encode(self, row: Mapping[str, Any]) -> tuple[bytes, bytes]:
        """The key and the value of one row. Raises `InvalidRequest` as `encode_arrow` does."""
        parts = [row.get(name) for name in self._key.names]
        for column, part in zip(self.schema.key, parts, strict=True):
            if part is None and not column.nullable:
                raise InvalidRequest(f"column {column.name!r} is null, and the schema says that it never is")
        rest = {name: part for name, part in row.items() if name not in self._key.names}
        for column in self.version.columns:
            if not column.nullable and rest.get(column.name) is None:
                raise InvalidRequest(f"column {column.name!r} is null, and the schema says that it never is")
        if self._codec is None:
            if rest:
                raise InvalidRequest(
                    f"there is no column {', '.join(rest)}; columns are {', '.join(self._key.names)}"
                )
            return self.prefix + self._key.encode(parts), b""
        return self.prefix + self._key.encode(parts), self._codec.encode(rest)

    def _codec_of(self, types: Any) -> values.ValueCodec | None:
        if not len(types):
            return None
        if self.schema.value_format == RowCodec.format:
            return RowCodec(types, self.version.number)
        return values.codec(self.schema.value_format, types)


class TableReader:
    """Decodes rows of any version of a schema, and of former schemas that fit, to the columns that a reader wants.

    `wanted` is an Arrow schema, by default the key columns and those of the current version. A column that the version
    of a row lacks is null. `unversioned` are the value columns of rows from before the schema was stored, in their
    order; without it such rows are refused. It pickles, and any thread may use it.

    Raises:
        InvalidRequest: the schema has no such column, or its values do not fit the wanted type.

    """

    def __init__(
        self,
        schema: TableSchema,
        wanted: Any = None,
        *,
        prefix: bytes = b"",
        unversioned: Any = None,
    ) -> None:
        self.schema: TableSchema = schema
        self.prefix: bytes = prefix
        self._given = wanted, unversioned
        key_types = key_arrow_schema(schema.key)
        if wanted is None:
            wanted = pa.schema([*key_types, *value_arrow_schema(schema.current.columns)])
        self.wanted: Any = wanted
        names = schema.key_names
        self._values = pa.schema([field for field in wanted if field.name not in names])
        plan_projection(
            schema, [Column(field.name, column_type(field.name, field.type)) for field in self._values]
        )
        plan_projection(schema, [_key_column(field) for field in wanted if field.name in names])
        # The kind of a number is part of a key: keys are decoded as stored, and then cast.
        self._key_types = key_types
        self._key = keys.KeySchema.of(key_types)
        self._unversioned = unversioned
        self._by_version: dict[int, _Version] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _reader, (self.schema, *self._given, self.prefix)

    @property
    def wants_key(self) -> bool:
        """Whether a wanted column is part of the key."""
        return any(name in self.schema.key_names for name in self.wanted.names)

    @property
    def wants_value(self) -> bool:
        """Whether a wanted column is part of the value."""
        return bool(len(self._values))

    def decode_keys(self, encoded: Any) -> dict[str, Any]:
        """The wanted key columns of an array of keys.

        Raises:
            CorruptData: a key is damaged.
            InvalidRequest: a key has other columns, or does not begin with the prefix.

        """
        array = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
        if self.prefix:
            ours = pc.starts_with(array, self.prefix)
            if ours.false_count:
                raise InvalidRequest(
                    f"a key does not begin with {self.prefix!r}: read the keys with that prefix only"
                )
            # Not `binary_slice`: PyArrow 26 fails on keys that end within it.
            array = pc.binary_replace_slice(array, 0, len(self.prefix), b"")
        columns = keys.decode_arrow(array, self._key_types)
        found = zip(self._key_types.names, columns, strict=True)
        return {
            name: _cast(column, self.wanted.field(name).type)
            for name, column in found
            if name in self.wanted.names
        }

    def decode_values(self, encoded: Any) -> dict[str, Any]:
        """The wanted value columns of an array of values; a null value is a row of nulls.

        Raises:
            CorruptData: a value is damaged, or names a version that the schema does not have.
            InvalidRequest: a value has no version, and the reader does not know its columns.

        """
        array = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
        if not len(self._values):
            return {}
        if self.schema.value_format != RowCodec.format:
            return self._decode_named(array)
        return dict(zip(self._values.names, self._decode_rows(array), strict=True))

    def decode(self, key: bytes, value: bytes) -> dict[str, Any]:
        """The wanted columns of one row. Raises as `decode_keys` and `decode_values` do."""
        if not key.startswith(self.prefix):
            raise InvalidRequest(f"the key {key[:40]!r} does not begin with {self.prefix!r}")
        parts = dict(zip(self._key.names, self._key.decode(key[len(self.prefix) :]), strict=True))
        found = self.decode_value(value)
        return {name: parts[name] if name in parts else found[name] for name in self.wanted.names}

    def decode_value(self, value: bytes) -> dict[str, Any]:
        """The wanted value columns of one value."""
        if not len(self._values):
            return {}
        if self.schema.value_format != RowCodec.format:
            return (
                values.codec(self.schema.value_format, self._values).decode(value)
                if value
                else self._no_row()
            )
        return self._version(_version_of(value)).decode_one(value)

    def _no_row(self) -> dict[str, Any]:
        self._check_empty()
        return dict.fromkeys(self._values.names)

    def _check_empty(self) -> None:
        if all(version.columns for version in self.schema.versions):
            raise CorruptData("value 0: it is empty, but rows of this schema have columns", offset=0)

    def _decode_named(self, array: Any) -> dict[str, Any]:
        """Values whose format has the names of the columns."""
        empty = pc.equal(pc.binary_length(array), 0)
        if empty.true_count:
            self._check_empty()
            array = pc.if_else(empty, pa.scalar(None, array.type), array)
        codec = values.codec(self.schema.value_format, self._values)
        return dict(zip(self._values.names, codec.decode_arrow(array).columns, strict=True))

    def _decode_rows(self, array: Any) -> list[Any]:
        first = _version_of(array[0].as_py() or b"") if len(array) else _EMPTY
        if first > 0:
            # The fast path: as a rule all rows have the version of the first. Decoding checks that in passing.
            with suppress(CorruptData):
                return self._version(first).decode(array)
        same, versions = read_versions(array)
        return (
            self._decode_several(array, versions) if same == _SEVERAL else self._version(same).decode(array)
        )

    def _decode_several(self, array: Any, versions: memoryview) -> list[Any]:
        numbers = pa.array(pa.Array.from_buffers(pa.int64(), len(array), [None, pa.py_buffer(versions)]))
        parts, places = [], []
        for number in pc.unique(numbers).to_pylist():
            rows = pc.indices_nonzero(pc.equal(numbers, number))
            try:
                parts.append(self._version(number).decode(array.take(rows)))
            except CorruptData as error:
                raise _at_row(error, rows) from None
            places.append(rows)
        order = pc.sort_indices(pa.concat_arrays(places))
        joined = [pa.concat_arrays(list(column)) for column in zip(*parts, strict=True)]
        return [column.take(order) for column in joined]

    def _version(self, number: int) -> _Version:
        known = self._by_version.get(number)
        if known is None:
            known = self._by_version[number] = self._find_version(number)
        return known

    def _find_version(self, number: int) -> _Version:
        if number == _NULL:
            return _Version(self._values, None)
        if number == _EMPTY:
            self._check_empty()
            return _Version(self._values, None)
        if number == _OTHER_LAYOUT:
            raise CorruptData("value 0: it is not a row: it has another format, or is damaged", offset=0)
        if number == 0:
            if self._unversioned is None:
                raise InvalidRequest(
                    "a row names no version of the schema: it was written before the schema was stored, or with "
                    "flagstone.values alone; name its columns with their types to read it, or read the values as bytes"
                )
            return _Version(self._values, RowCodec(self._unversioned))
        stored = self.schema.find(number) or self._former_version(number)
        if stored is None:
            has = ", ".join(str(version.number) for version in self.schema.versions[-5:])
            raise CorruptData(
                f"value 0: it names version {number} of the schema, and the newest stored versions are {has}",
                offset=0,
            )
        if not stored.columns:
            raise CorruptData(
                f"value 0: version {number} has no columns, but the value is not empty", offset=0
            )
        return _Version(self._values, RowCodec(self._types_of(stored), number))

    def _former_version(self, number: int) -> SchemaVersion | None:
        """The version of a former schema, whose rows a consumer of changes may read late; None if none is kept."""
        former = self.schema.at(number)
        if former is None:
            return None
        if (former.key, former.value_format) != (self.schema.key, self.schema.value_format):
            raise InvalidRequest(
                f"a row names version {number}, which belongs to a schema that an overwrite or a restore has replaced, "
                f"with the key columns {', '.join(former.key_names)}: read it with schema.at({number})"
            )
        known = [field for field in self._values if former.latest_column(field.name) is not None]
        plan_projection(former, [Column(field.name, column_type(field.name, field.type)) for field in known])
        return former.find(number)

    def _types_of(self, stored: SchemaVersion) -> Any:
        """The types in which the columns of a version are decoded: the wanted ones where those have the same bytes."""
        fields = []
        for field, column in zip(value_arrow_schema(stored.columns), stored.columns, strict=True):
            at = self._values.get_field_index(column.name)
            wanted = None if at < 0 else self._values.field(at)
            same = wanted is not None and column_type(column.name, wanted.type) == column.type
            fields.append(pa.field(column.name, wanted.type) if same and wanted is not None else field)
        return pa.schema(fields)


class _Version:
    """How values of one version become the wanted columns. Without a codec all columns are null."""

    def __init__(self, wanted: Any, codec: RowCodec | None) -> None:
        self._wanted = wanted
        self._codec = codec
        held = () if codec is None else codec.schema.names
        self._names = [name for name in held if name in wanted.names]

    def decode(self, array: Any) -> list[Any]:
        found: dict[str, Any] = {}
        if self._codec is not None:
            found = dict(zip(self._names, self._codec.decode_columns(array, self._names), strict=True))
        return [
            _cast(found[field.name], field.type) if field.name in found else pa.nulls(len(array), field.type)
            for field in self._wanted
        ]

    def decode_one(self, value: bytes) -> dict[str, Any]:
        found = {} if self._codec is None else self._codec.decode(value)
        return {name: found.get(name) for name in self._wanted.names}


def _checked(batch: Any, column: Column, *, key: bool = False, deleted: Any = None) -> Any:
    """The column of a batch. Raises `InvalidRequest` if it is missing, of another type, or has forbidden nulls."""
    names = batch.schema.names
    if column.name not in names:
        if column.nullable and not key:
            return pa.nulls(batch.num_rows, value_arrow_schema([column]).field(0).type)
        raise InvalidRequest(f"the rows lack the column {column.name!r}; they have {', '.join(names)}")
    array = batch.column(names.index(column.name))
    array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    given = arrow_type_name(column.name, array.type) if key else column_type(column.name, array.type)
    if given != column.type and loosened(given) != column.type:
        raise InvalidRequest(
            f"column {column.name!r} has the type {type_text(given)}; in the schema it is {type_text(column.type)}"
        )
    if array.null_count and not column.nullable:
        missing = pc.is_null(array) if deleted is None else pc.and_not(pc.is_null(array), deleted)
        if not missing.true_count:
            return array
        raise InvalidRequest(f"column {column.name!r} has nulls, and the schema says that it never has")
    return array


def _key_column(field: Any) -> Column:
    return Column(field.name, arrow_type_name(field.name, field.type))


def _version_of(value: bytes) -> int:
    if not value:
        return _EMPTY
    if value[0] == UNVERSIONED:
        return 0
    if value[0] != VERSIONED:
        return _OTHER_LAYOUT
    if 0 < (value[1] if len(value) > 1 else 0) < 0x80:
        return value[1]
    same, _ = read_versions(pa.array([value], pa.binary()))
    return same


def _at_row(error: CorruptData, rows: Any) -> CorruptData:
    """The error with the number of the row among all rows."""
    problem = _ROW_NUMBER.sub(lambda found: f"value {rows[int(found[1])].as_py()}", error.problem)
    return CorruptData(problem, object=error.object, offset=error.offset)


def _cast(column: Any, kind: Any) -> Any:
    if column.type == kind:
        return column
    try:
        return column.cast(kind)
    except pa.ArrowInvalid as problem:
        raise InvalidRequest(f"a value does not fit into {kind}: {problem}") from None


def _writer(schema: TableSchema, version: SchemaVersion, prefix: bytes) -> TableWriter:
    return TableWriter(schema, version, prefix=prefix)


def _reader(schema: TableSchema, wanted: Any, unversioned: Any, prefix: bytes) -> TableReader:
    return TableReader(schema, wanted, prefix=prefix, unversioned=unversioned)
