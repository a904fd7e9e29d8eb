"""The stored schema and Spark: which columns a load writes, which columns a read shows.

A load compares its columns with the stored schema before the first task, and once more in its commit, which also
writes the schema (`settle_schema`). A read finds the schema at its checkpoint, so it fits the rows that it reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType, StructType

from flagstone.clones.origin import load_origin
from flagstone.db.reader.reader import open_reader
from flagstone.db.reader.schemas import read_schemas
from flagstone.errors import InvalidRequest
from flagstone.read.arrow import COLUMNS
from flagstone.schema import (
    SchemaCommit,
    TableSchema,
    given_columns,
    key_arrow_schema,
    schema_key,
    value_arrow_schema,
)
from flagstone.spark.address import DatabaseAddress, open_manifests, open_store
from flagstone.spark.row_mapping import (
    CARRIED,
    METADATA,
    RowMapping,
    arrow_schema,
    check_carried,
    check_write_schema,
    metadata_fields,
    read_schema,
    stored_names,
)

if TYPE_CHECKING:
    from flagstone.db.reader.reader import DbReader
    from flagstone.spark.options import ReadOptions, WriteOptions

_log = logging.getLogger("flagstone.spark")


def fetch_schema(address: DatabaseAddress, prefix: bytes = b"") -> TableSchema | None:
    """The newest stored schema; None without one, or without a database."""
    found = _fetch_stored(address, prefix)
    return None if found is None or found.retired else found


def _fetch_stored(address: DatabaseAddress, prefix: bytes) -> TableSchema | None:
    """The newest stored schema, also one that is retired."""
    if open_manifests(address).latest() is None:
        return None
    with open_reader(address.path, **address.arguments, mode="latest") as reader:
        return reader._stored_schema(prefix)  # noqa: SLF001 - only commits care for retired schemas


def find_schema(reader: DbReader, prefix: bytes | None) -> tuple[TableSchema | None, bytes]:
    """The schema of the rows under `prefix`, and the prefix that it rules: that of the whole database if need be."""
    if prefix:
        own = reader.schema(prefix)
        if own is not None:
            return own, prefix
    return reader.schema(), b""


def plan_write(options: WriteOptions, schema: StructType, *, replaces_all: bool = False) -> WriteOptions:
    """The options with every column of the rows named and checked against the stored schema.

    Rows with the columns of the stored key are structured, also if the options name no key columns.

    Raises:
        InvalidRequest: the rows cannot be written, or do not fit the stored schema; the message says what differs.

    """
    if options.schema_commit is None:  # otherwise the rows are encoded already
        planned = plan_load(options, schema, value_format=options.value_format, replaces_all=replaces_all)
        if planned.row_mapping is not None:
            return planned
    check_write_schema(schema, key=options.key_column, value=options.value_column)
    return options


def plan_load(
    options: WriteOptions,
    schema: StructType,
    *,
    order_by: Sequence[str] = (),
    value_columns: Sequence[str] | None = None,
    value_format: str | None = None,
    replaces_all: bool = False,
) -> WriteOptions:
    """`plan_write` for `bulk_load`, whose frame may have columns that only order its rows."""
    if options.raw and options.row_mapping is not None:
        raise InvalidRequest("raw is for bytes and key columns are for structured rows; keep one of them")
    if replaces_all and options.key_prefix:
        raise InvalidRequest(
            f"mode 'overwrite' replaces all rows of the database, not only those under {options.key_prefix!r}: delete "
            "these with Db.delete_prefix and load with mode 'append', or leave 'key.prefix' out"
        )
    row = None if options.raw else _fetch_stored(options.address, options.key_prefix)
    stored = None if row is None or row.retired else row
    row_mapping = structured_mapping(
        stored,
        schema,
        options.row_mapping,
        key=options.key_column,
        value=options.value_column,
        value_columns=value_columns,
        value_format=value_format,
        replaces_all=replaces_all,
    )
    if row_mapping is None:
        if options.key_prefix:
            raise InvalidRequest("option 'key.prefix' is for structured rows; name their key columns")
        return options
    kept = (*row_mapping.key_columns, *CARRIED, *(row_mapping.value_columns or ()))
    names = [name for name in schema.fieldNames() if name not in order_by or name in kept]
    return _plan_structured(
        options,
        row_mapping,
        StructType([schema[name] for name in names]),
        row,
        replaces_all=replaces_all,
    )


def structured_mapping(
    stored: TableSchema | None,
    schema: StructType,
    given: RowMapping | None,
    *,
    key: str = "key",
    value: str = "value",
    value_columns: Sequence[str] | None = None,
    value_format: str | None = None,
    replaces_all: bool = False,
) -> RowMapping | None:
    """The mapping of rows with that schema: the given one, or that of the stored schema; None for rows as bytes.

    Raises:
        InvalidRequest: the database holds structured rows, and these are none.

    """
    if given is not None:
        return given if stored is None or value_format else replace(given, value_format=stored.value_format)
    if stored is None:
        return None
    names = schema.fieldNames()
    if all(name in names for name in stored.key_names):
        chosen = None if value_columns is None else tuple(value_columns)
        return RowMapping(stored.key_names, chosen, value_format or stored.value_format)
    if replaces_all and {key, value} <= set(names):
        return None
    raise InvalidRequest(
        f"the database holds structured rows with the key columns {', '.join(stored.key_names)}, and these rows have "
        f"{', '.join(names)}: give rows with the columns of the schema, or set raw=true to write bytes"
    )


def _plan_structured(
    options: WriteOptions,
    row_mapping: RowMapping,
    schema: StructType,
    stored: TableSchema | None,
    *,
    replaces_all: bool,
) -> WriteOptions:
    check_carried(schema, () if stored is None or stored.retired else stored_names(stored))
    row_mapping = replace(row_mapping.for_writing(schema), prefix=options.key_prefix)
    if _can_store(options.address, options.key_prefix):
        given = given_columns(
            arrow_schema(schema),
            row_mapping.key_columns,
            value_columns=row_mapping.value_columns,
            value_format=row_mapping.value_format,
            nullable=True,
        )
        before = None if stored is None else stored.encode()
        planned = SchemaCommit.plan(before, given, prefix=options.key_prefix, replaces_all=replaces_all)
        row_mapping = replace(row_mapping, commit=planned)
    return replace(options, row_mapping=row_mapping)


Condition = tuple[bytes, bytes | None]
"""A key and the value that it must have when a load is added; None if there must be no row."""


def settle_schema(address: DatabaseAddress, planned: SchemaCommit) -> tuple[bytes | None, Condition]:
    """The schema row that the commit of a load must write, if any, and the one on which the load relies.

    Raises:
        SchemaChanged: another commit has changed the schema since the load was planned.

    """
    stored = _fetch_stored(address, planned.prefix)
    now = None if stored is None else stored.encode()
    row = planned.settle(now)
    if row is not None:
        _log.info("schema version=%d prefix=%r", planned.version.number, planned.prefix)
    return row, (planned.key, now)


def retired_schemas(
    address: DatabaseAddress, planned: SchemaCommit | None
) -> list[tuple[bytes, bytes, bytes]]:
    """The schema rows besides that of the load which a load that replaces all rows must write: key, row now, next row.

    Their rows go, but their numbers must never be used again.
    """
    with open_reader(address.path, **address.arguments, mode="latest") as reader:
        stored = read_schemas(reader, retired=True)
    return [
        (schema_key(prefix), table.encode(), replace(table, retired=True).encode())
        for prefix, table in sorted(stored.items())
        if planned is None or prefix != planned.prefix
    ]


def read_types(table: TableSchema, *, columns: Sequence[str] | None = None) -> StructType:
    """The Spark schema of a read: of `columns`, by default of the key columns and the current value columns."""
    fields = {field.name: field for field in key_arrow_schema(table.key)}
    older = (column for version in table.versions for column in version.columns)
    fields |= {
        field.name: field for field in value_arrow_schema({each.name: each for each in older}.values())
    }
    chosen = [column.name for column in table.columns] if columns is None else columns
    spare = metadata_fields()
    found = StructType()
    for name in chosen:
        if name in fields:
            found.add(_spark_field(fields[name]))
        elif name in spare:
            found.add(spare[name])
        else:
            known = ", ".join([*(column.name for column in table.columns), *METADATA])
            hint = "; raw=true reads keys and values as bytes" if name in COLUMNS else ""
            raise InvalidRequest(f"the database has no column {name!r}; it has {known}{hint}")
    return found


def dropped_types(table: TableSchema, named: Iterable[str]) -> StructType:
    """The Spark schema of the dropped columns among the `named` ones; Spark's names have no case."""
    wanted = {name.lower() for name in named}
    shown = {column.name for column in table.columns}
    return read_types(
        table,
        columns=sorted(each for each in stored_names(table) if each.lower() in wanted and each not in shown),
    )


def plan_read(
    options: ReadOptions, schema: StructType, table: TableSchema | None, prefix: bytes
) -> RowMapping | None:
    """How rows become the columns of `schema`; None for a read as bytes.

    Raises:
        InvalidRequest: the options or the schema do not fit the stored schema; the message says what differs.

    """
    given, corrupt = options.row_mapping, options.malformed.column
    names = [name for name in schema.fieldNames() if name != corrupt]
    if options.raw or (given is None and (table is None or is_raw(names, table))):
        return None
    if table is None:
        return None if given is None else given.for_reading(schema, corrupt)
    if given is not None and given.key_columns != table.key_names:
        raise InvalidRequest(
            f"the key columns are {', '.join(table.key_names)}, in this order, and the read names "
            f"{', '.join(given.key_columns)}: leave 'key.columns' out"
        )
    found = RowMapping(
        table.key_names,
        tuple(name for name in names if name not in table.key_names and name in stored_names(table)),
        table.value_format,
        prefix=prefix,
        table=table,
        unversioned=given is not None,
    )
    types = [field for field in arrow_schema(schema) if field.name != corrupt]
    found.reader(pa.schema(types))  # raises the errors
    return found


def plan_types(options: ReadOptions, table: TableSchema | None) -> StructType:
    """The schema of a read for which the user gives none. Raises `InvalidRequest` if it needs one."""
    if table is None or options.raw:
        if options.row_mapping is not None:
            raise InvalidRequest(
                "a read with 'key.columns' needs the types of all columns, because the database stores no schema: add "
                ".schema('region string, id long')"
            )
        return read_schema(options.columns)
    if options.given is not None and is_raw(options.given, table):
        return plan_types(replace(options, raw=True), None)
    types = read_types(table, columns=options.given)
    if options.malformed.named and options.malformed.column not in types.fieldNames():
        types.add(options.malformed.column, BinaryType())
    return types


def is_raw(names: Sequence[str], table: TableSchema) -> bool:
    """Whether the columns that a reader names are those of a read as bytes, and none is a column of the schema."""
    return not stored_names(table).intersection(names) and bool({"key", "value"}.intersection(names))


def _can_store(address: DatabaseAddress, prefix: bytes) -> bool:
    """Whether the database accepts the schema row: a clone of a key range may not."""
    origin = load_origin(*open_store(address))
    writable = None if origin is None else origin.writable
    return writable is None or any(schema_key(prefix) in keys for keys in writable)


def _spark_field(field: Any) -> Any:
    try:
        return from_arrow_schema(pa.schema([_plain(field)])).fields[0]
    except PySparkException as error:
        raise InvalidRequest(
            f"Spark has no type for column {field.name!r}, which is stored as {field.type}: leave it out with the "
            f"option 'columns', or give a schema with another type ({error})"
        ) from None


def _plain(field: Any) -> Any:
    """The field with a type that Spark knows and that holds the same values."""
    wider = {
        pa.uint8(): pa.int16(),
        pa.uint16(): pa.int32(),
        pa.uint32(): pa.int64(),
        pa.uint64(): pa.decimal128(20, 0),
        pa.float16(): pa.float32(),
    }
    kind = field.type
    if pa.types.is_timestamp(kind):
        kind = pa.timestamp("us", kind.tz)
    elif pa.types.is_fixed_size_binary(kind):
        kind = pa.binary()
    return pa.field(field.name, wider.get(kind, kind), nullable=True)
