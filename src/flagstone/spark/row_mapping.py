"""Columns of DataFrames and rows of a database: schemas, their checks, and columns encoded into keys and values.

`flagstone.keys` encodes the key columns, and a format of `flagstone.values` encodes the other columns. The database
stores the names and types of the columns (`flagstone.schema`). A database from before that has none: its readers name
the columns again, with their types. All checks run before the first task.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
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
from flagstone.schema import (
    SchemaCommit,
    TableReader,
    TableSchema,
    TableWriter,
    key_arrow_schema,
    value_arrow_schema,
)
from flagstone.spark.malformed import MalformedRows, decode_rows
from flagstone.values.row_codec import read_versions

CARRIED: Final = ("op", "ttl_ms", "expires_ms")
"""Columns of a load that control a row and are not part of its key or value."""

METADATA: Final = ("seq", "created_ms", "expires_ms")
"""Columns of a read that come from the row itself, not from its value."""

_BYTES: Final = (BinaryType, StringType)
_WHOLE: Final = (LongType, IntegerType, ShortType)
_RESERVED: Final = frozenset([*CARRIED, *METADATA])
FAIL: Final = MalformedRows("FAILFAST")

Decoder = Callable[[pa.RecordBatch], tuple[pa.RecordBatch, int]]
"""From rows of the database to decoded rows, and the number of malformed rows among them."""


@dataclass(frozen=True, slots=True)
class RowMapping:
    """The columns of the key, in order, and those of the value; None stands for all other columns.

    Keys begin with `prefix`. With `commit` rows are written under a version of the stored schema, and with `table` they
    are read by it.
    """

    key_columns: tuple[str, ...]
    value_columns: tuple[str, ...] | None = None
    value_format: str = "row"
    prefix: bytes = b""
    commit: SchemaCommit | None = None
    table: TableSchema | None = None
    unversioned: bool = False
    """Whether the reader gave the columns, so that rows without a version are read by them."""

    def for_writing(self, schema: StructType) -> RowMapping:
        """The mapping with every column named. Raises `InvalidRequest` for one that is missing or cannot be stored."""
        return self._complete(schema, CARRIED)

    def for_reading(self, schema: StructType, corrupt: str = "") -> RowMapping:
        """The mapping with every column named. Raises `InvalidRequest` for one that is missing or cannot be read.

        `corrupt` is the column for rows that do not decode.
        """
        return self._complete(schema, (*METADATA, corrupt))

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
        complete = replace(self, value_columns=chosen)
        types = arrow_schema(schema)
        keys.KeySchema.of(complete.key_schema(types))
        if chosen:
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
        key, value = self._encode(batch)
        encoded = {
            "key": key,
            "value": value,
            **{name: batch.column(names.index(name)) for name in CARRIED if name in names},
        }
        return pa.RecordBatch.from_arrays(list(encoded.values()), names=list(encoded))

    def _encode(self, batch: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
        if self.commit is not None:
            commit = self.commit
            writer = TableWriter(commit.schema, commit.version, prefix=self.prefix)
            key, value = writer.encode_arrow(batch, deleted=deletions(batch))
            return key, value
        names = batch.schema.names
        key = keys.encode_arrow([batch.column(names.index(name)) for name in self.key_columns])
        if not self.value_columns:
            return key, pa.array([b""], pa.binary()).take(pa.array([0] * batch.num_rows, pa.int64()))
        codec = values.codec(self.value_format, self.value_schema(batch.schema))
        return key, codec.encode_arrow(batch)

    def key_types(self, types: pa.Schema) -> pa.Schema:
        """The types of all key columns: as stored, or as in `types` where the database has no schema."""
        return self.key_schema(types) if self.table is None else key_arrow_schema(self.table.key)

    def raw_columns(self, wanted: Sequence[str], corrupt: str = "") -> tuple[str, ...]:
        """The columns to read from the database for the wanted columns."""
        both = corrupt in wanted  # whether a row is malformed shows only when all of it is decoded
        key = ["key"] if both or any(name in self.key_columns for name in wanted) else []
        value = ["value"] if both or any(name in (self.value_columns or ()) for name in wanted) else []
        return (*key, *value, *(name for name in self.metadata if name in wanted))

    @property
    def metadata(self) -> tuple[str, ...]:
        """The columns that come from the row itself. A stored column of such a name takes the place of it."""
        stored = () if self.table is None else stored_names(self.table)
        return tuple(name for name in METADATA if name not in stored)

    def decode(self, batch: pa.RecordBatch, types: pa.Schema) -> tuple[pa.RecordBatch, int]:
        """The rows of one batch; see `decoder`."""
        return self.decoder(types)(batch)

    def decoder(
        self, types: pa.Schema, malformed: MalformedRows = FAIL, *, given: pa.Schema | None = None
    ) -> Decoder:
        """A function that decodes rows of the database to the columns of `types`, and counts malformed rows.

        `given` has at least these columns, all those that the reader gave: rows without a version have them.
        """
        stored = pa.schema([field for field in types if field.name != malformed.column])
        if self.table is not None:
            if malformed.column in types.names:
                # A row is malformed also if a column is that the reader does not want.
                whole = [*key_arrow_schema(self.table.key), *value_arrow_schema(self.table.current.columns)]
                stored = pa.schema([*stored, *(each for each in whole if each.name not in stored.names)])
            reader = self.reader(stored, given)
            return partial(
                decode_rows,
                types=types,
                options=malformed,
                key=reader.decode_keys,
                value=reader.decode_values,
            )

        def decode(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, int]:
            self._check_versions(batch)
            return decode_rows(
                batch,
                types,
                malformed,
                key=lambda raw: self._decode_keys(raw, stored),
                value=lambda raw: self._decode_values(raw, stored),
            )

        return decode

    def _check_versions(self, batch: pa.RecordBatch) -> None:
        """Raise `InvalidRequest` for rows that name a version of a schema: the database at hand has no schema."""
        if self.value_format != "row" or "value" not in batch.schema.names or not batch.num_rows:
            return
        _, versions = read_versions(batch["value"])
        if max(versions) > 0:
            raise InvalidRequest(
                "rows name a version of a schema that this database does not have: it is a clone of a key range, or a "
                "copy of some rows. Name a database that has the schema with the option 'schema.of', or read bytes "
                "with raw=true"
            )

    def _decode_keys(self, raw: Any, types: pa.Schema) -> dict[str, Any]:
        return dict(zip(self.key_columns, keys.decode_arrow(raw, self.key_schema(types)), strict=True))

    def _decode_values(self, raw: Any, types: pa.Schema) -> dict[str, Any]:
        if not self.value_columns:
            return {}
        rows = values.codec(self.value_format, self.value_schema(types)).decode_arrow(raw)
        return dict(zip(rows.schema.names, rows.columns, strict=True))

    def reader(self, types: pa.Schema, given: pa.Schema | None = None) -> TableReader:
        """The reader of rows of the stored schema for columns with these types; see `decode` for `given`.

        Raises `InvalidRequest` for a column that the schema does not have, or a type that does not hold its values.
        """
        assert self.table is not None, "only rows of a stored schema have such a reader"
        wanted = pa.schema([field for field in types if field.name not in self.metadata])
        named = set(self.value_columns or ())  # a read of key columns alone decodes no value
        all_types = given or types
        whole = self.unversioned and named and named <= set(all_types.names) and self.value_format == "row"
        old = self.value_schema(all_types) if whole else None
        return TableReader(self.table, wanted, prefix=self.prefix, unversioned=old)


def deletions(batch: pa.RecordBatch) -> Any:
    """Which rows of a load delete their key; None if the rows have no operations."""
    if "op" not in batch.schema.names:
        return None
    return pc.equal(pc.utf8_lower(pc.fill_null(batch["op"].cast(pa.string()), "put")), "delete")


def stored_names(table: TableSchema) -> set[str]:
    """The names of all columns that the schema has or had."""
    return {column.name for version in table.versions for column in (*table.key, *version.columns)}


def metadata_fields() -> dict[str, StructField]:
    """The columns that come from the row itself."""
    return {field.name: field for field in read_schema(METADATA)}


def read_schema(columns: Sequence[str]) -> StructType:
    """The schema of a read as bytes. Raises `InvalidRequest` for a column that such a read does not have."""
    fields = {
        "key": StructField("key", BinaryType(), nullable=False),
        "value": StructField("value", BinaryType(), nullable=False),
        "seq": StructField("seq", LongType(), nullable=False),
        "created_ms": StructField("created_ms", LongType()),
        "expires_ms": StructField("expires_ms", LongType()),
    }
    unknown = [name for name in columns if name not in fields]
    if unknown:
        raise InvalidRequest(f"there is no column {unknown[0]!r}; choose from {', '.join(fields)}")
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
    check_carried(schema)


def check_carried(schema: StructType, known: Collection[str] = ()) -> None:
    """Raise `InvalidRequest` if the columns that control rows have other types than these have.

    Spark's names have no case. So a column `OP` is refused, which would be stored in the value, unless it is one of the
    `known` columns.
    """
    given = {field.name: field.dataType for field in schema.fields}
    for name in given:
        if name not in CARRIED and name not in known and name.lower() in CARRIED:
            raise InvalidRequest(
                f"column {name!r} is {name.lower()!r} in another case: rename it to {name.lower()!r}, which controls "
                "the row, or to another name to store it"
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
