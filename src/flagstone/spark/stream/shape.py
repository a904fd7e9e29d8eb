"""The columns of a change stream: bytes as they are stored, or ordinary columns made of key and value.

A stream of ordinary columns has `op`, the columns of the key, those of the value, and any of `seq`, `created_ms`,
`expires_ms` and `wal_id`. A delete has no value, so the columns of the value are null there. Which columns make key and
value is a `RowMapping`, as for reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from flagstone.db.reader.reader import open_reader
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.schema import TableSchema
from flagstone.spark.address import open_manifests
from flagstone.spark.row_mapping import RowMapping, arrow_schema, stored_names
from flagstone.spark.stored_schema import find_schema, plan_read, read_types
from flagstone.spark.stream.options import StreamOptions
from flagstone.spark.stream.partitions import NO_VERSIONS, Versions

CHANGE_SCHEMA: Final = StructType(
    [
        StructField("op", StringType(), nullable=False),
        StructField("key", BinaryType(), nullable=False),
        StructField("value", BinaryType()),
        StructField("seq", LongType(), nullable=False),
        StructField("created_ms", LongType()),
        StructField("expires_ms", LongType()),
        StructField("wal_id", LongType()),
    ]
)
"""The columns of a stream for which the user gives none."""

ABOUT: Final = ("op", "seq", "created_ms", "expires_ms", "wal_id")
"""Columns that describe a change, and are part of neither key nor value."""

BEFORE: Final = "before"
"""The column with the former value of a key; of ordinary columns, the prefix `before_` and the name of the column."""

OVERWRITE: Final = "overwrite"
"""The operation of the row that stands for the end of everything before it."""

_FORMER: Final = StructField(BEFORE, BinaryType())

BATCH_ROWS: Final = 16_384
"""The largest batch for Spark: its columns stay in the caches of a processor."""


class StoredTable(NamedTuple):
    """The stored schema that rules the rows of a stream, None without one, and the prefix of their keys.

    A retired schema rules no rows of the present state, but perhaps changes that were not delivered yet.
    """

    table: TableSchema | None = None
    prefix: bytes = b""

    @property
    def live(self) -> TableSchema | None:
        """The schema of the present state."""
        return None if self.table is None or self.table.retired else self.table

    @property
    def version(self) -> int | None:
        """The newest version of the present state."""
        return None if self.live is None else self.live.current.number

    def at(self, number: int) -> StoredTable | None:
        """The schema with that version; None if none is kept."""
        found = None if self.table is None else self.table.at(number)
        return None if found is None else StoredTable(found, self.prefix)


NO_TABLE: Final = StoredTable()


def fetch_table(options: StreamOptions) -> StoredTable:
    """The newest stored schema of the rows that the stream delivers."""
    address = options.address
    if options.read.raw or open_manifests(address).latest() is None:
        return StoredTable()
    with open_reader(address.path, **address.arguments, mode="latest") as reader:
        found = StoredTable(*find_schema(reader, options.read.prefix))
        if found.table is not None:
            return found
        return StoredTable(reader._stored_schema())  # noqa: SLF001 - of changes before an overwrite with bytes


@dataclass(frozen=True, slots=True)
class StreamShape:
    """How a change becomes a row of the stream. Without a `row_mapping` key and value stay bytes."""

    schema: StructType
    options: StreamOptions
    row_mapping: RowMapping | None = None
    former: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    """Columns that the stored schema lacks: they are null."""

    stored: StoredTable = NO_TABLE

    @classmethod
    def of(cls, schema: StructType, options: StreamOptions, stored: StoredTable = NO_TABLE) -> StreamShape:
        """The shape of a stream with that schema, for changes of the newest stored schema that has all its columns.

        Raises `InvalidRequest` for a column that no change has.
        """
        former = () if stored.table is None else reversed(stored.table.former)
        tables = [StoredTable(stored.live, stored.prefix)]
        tables += [StoredTable(stored.table)] if stored.table is not None and stored.live is None else []
        numbers = [each.current.number for each in former]
        tables += [found for number in numbers if (found := stored.at(number)) is not None]
        problem: InvalidRequest | None = None
        for each in tables:
            try:
                return replace(cls._of(schema, options, each), stored=stored)
            except InvalidRequest as error:
                problem = problem or error
        assert problem is not None, "there is at least one table"
        raise problem

    @classmethod
    def _of(cls, schema: StructType, options: StreamOptions, stored: StoredTable) -> StreamShape:
        former = tuple(name for name in schema.names if options.before and name.startswith(f"{BEFORE}_"))
        rows = StructType([field for field in schema if field.name not in (*ABOUT, *former, BEFORE)])
        mapping = plan_read(options.read, rows, *stored) if rows.fields else None
        if mapping is None:
            _check_raw(schema, before=options.before)
            return cls(schema, options)
        _check_types(schema, ABOUT)
        for name in former:
            of = name.removeprefix(f"{BEFORE}_")
            if of not in (mapping.value_columns or ()) or schema[name].dataType != schema[of].dataType:
                raise InvalidRequest(
                    f"column {name!r} must have the type of a column {of!r} of the value, which it shows before the "
                    "change; add that column, or change the type"
                )
        nullable = [*(mapping.value_columns or ()), *former]
        if options.on_overwrite == "marker":
            nullable += [name for name in mapping.key_columns if name in schema.names]
        for name in nullable:
            if not schema[name].nullable:
                raise InvalidRequest(
                    f"column {name!r} must be nullable: not every change has it, such as a delete, which has no value; "
                    "give the stream a schema in which it is"
                )
        return cls(schema, options, mapping, former)

    @property
    def _table(self) -> TableSchema | None:
        return None if self.row_mapping is None else self.row_mapping.table

    def at(self, number: int | None) -> StreamShape:
        """The shape for changes of the stored schema that has the version `number`; None if that is not known.

        Columns of the value that an older schema lacks are null, if it has the key of the stream's own.

        Raises:
            InvalidRequest: the columns of the stream cannot hold such changes, or their schema is not kept.

        """
        own = self._table
        if number is None or own is None or (own.find(number) is not None and not own.retired):
            return self
        stored, found = self._stored_at(number)
        if found is None:
            raise InvalidRequest(_GONE if number else _NOW_BYTES)
        try:
            return replace(self._of(self.schema, self.options, found), stored=stored)
        except InvalidRequest as error:
            if number > own.current.number or not _same_key(found.table, own):
                raise _misfit(found, error) from error
            problem = error
        known = stored_names(found.table) if found.table is not None else set()
        named = {
            name: name.removeprefix(f"{BEFORE}_") if name in self.former else name
            for name in self.schema.names
        }
        absent = tuple(name for name, of in named.items() if name not in (*ABOUT, BEFORE) and of not in known)
        try:
            left = StructType([field for field in self.schema if field.name not in absent])
            shape = self._of(left, self.options, found)
        except InvalidRequest:
            raise _misfit(found, problem) from problem
        if shape.row_mapping is None:
            raise _misfit(found, problem) from problem
        return replace(shape, schema=self.schema, absent=absent, stored=stored)

    def has_key_of(self, number: int) -> bool:
        """Whether changes of the schema with that version have the same key columns as the stream's own."""
        _, found = self._stored_at(number)
        return found is not None and self._table is not None and _same_key(found.table, self._table)

    def _stored_at(self, number: int) -> tuple[StoredTable, StoredTable | None]:
        """The newest stored schemas, and the one with that version, 0 for that of the present state."""
        found = self.stored.at(number) if number else None
        if found is not None:
            return self.stored, found
        stored = fetch_table(self.options)
        if number:
            return stored, stored.at(number)
        return stored, None if stored.live is None else stored

    def shaped(
        self, changes: Iterable[pa.RecordBatch], versions: Versions = NO_VERSIONS
    ) -> Iterator[pa.RecordBatch]:
        """Batches of changes (`flagstone.changes.columns`) as batches of the stream.

        Raises:
            InvalidRequest: a change does not fit the columns: it is a merge, or its version of the stored schema has
                columns that those of the stream cannot hold.

        """
        types = arrow_schema(self.schema)
        shape = self.at(versions.now)
        before = shape
        if versions.before != versions.now and self._table is not None and versions.before is not None:
            if not shape.has_key_of(versions.before):
                raise InvalidRequest(_OTHER_KEY)
            before = self.at(versions.before) if self.former else shape
        for batch in changes:
            if not batch.num_rows:
                continue
            try:
                columns = shape.columns_of(batch, types, before)
            except (CorruptData, InvalidRequest):
                # The schema may have changed since the query began: rows name versions that this shape does not know.
                stored = fetch_table(self.options)
                if stored.table is None or shape.row_mapping is None or stored.table == shape.stored.table:
                    raise
                newest = StreamShape.of(self.schema, self.options, stored)
                shape = newest.at(versions.now)
                before = newest.at(versions.before) if self.former and before is not shape else shape
                columns = shape.columns_of(batch, types, before)
            arrays = [_cast(columns[field.name], field) for field in types]
            made = pa.RecordBatch.from_arrays(arrays, schema=types)
            for start in range(0, made.num_rows, BATCH_ROWS):
                yield made.slice(start, BATCH_ROWS)

    def columns_of(self, batch: pa.RecordBatch, types: pa.Schema, before: StreamShape) -> dict[str, Any]:
        """The columns of the stream, and perhaps more, for a batch of changes; `before` decodes former values."""
        columns = _named(batch)
        columns.setdefault(BEFORE, pa.nulls(batch.num_rows, pa.binary()))
        if self.row_mapping is None:
            return columns
        about = {name: columns[name] for name in ABOUT}
        if pc.index(batch["op"], OVERWRITE).as_py() >= 0:  # a batch of its own: no key, no value
            return about | {
                field.name: pa.nulls(batch.num_rows, field.type) for field in types if field.name not in about
            }
        _refuse_merges(batch)
        rows = decode_rows(self.row_mapping, batch["key"], batch["value"], self._wanted(types))
        nothing = {*self.absent, *before.absent}
        rows |= {
            name: pa.nulls(batch.num_rows, types.field(name).type) for name in nothing if name not in rows
        }
        if before.former and before.row_mapping is not None:
            named = before.row_mapping.value_columns or ()
            values = pa.schema([field for field in before._wanted(types) if field.name in named])
            was = decode_rows(before.row_mapping, batch["key"], columns[BEFORE], values)
            rows |= {name: was[name.removeprefix(f"{BEFORE}_")] for name in before.former}
        return about | rows

    def _wanted(self, types: pa.Schema) -> pa.Schema:
        """The columns that are made of key and value."""
        return pa.schema([each for each in types if each.name not in (*ABOUT, *self.former, *self.absent)])


_ADVICE: Final = (
    "start over with a new copy (an empty checkpointLocation and starting=snapshot), or set raw=true"
)
_GONE: Final = (
    "an overwrite or a restore has replaced the stored schema, and the one of the changes that come next is not kept "
    f"any more: {_ADVICE}"
)
_NOW_BYTES: Final = (
    "the database stores no schema since an overwrite, and the stream has the columns of the former one: "
    f"{_ADVICE}"
)
_OTHER_KEY: Final = (
    "an overwrite or a restore has changed the key columns, so deletes of former rows look like deletes of new ones: "
    f"{_ADVICE}"
)


def _misfit(stored: StoredTable, error: InvalidRequest) -> InvalidRequest:
    """The error for changes that the columns of the stream cannot hold."""
    assert stored.table is not None, "without a schema every change fits"
    names = ", ".join(column.name for column in stored.table.columns)
    return InvalidRequest(
        f"an overwrite or a restore has replaced the stored schema, and the changes that come next do not fit the "
        f"columns of the stream: {error}. Their columns are {names}: start the query with .schema(...) of these, or "
        "without one if they are the present ones, to deliver them; or start over with a new copy (an empty "
        "checkpointLocation and starting=snapshot)"
    )


def _same_key(one: TableSchema | None, other: TableSchema) -> bool:
    kinds = [(column.name, column.type) for column in other.key]
    return one is not None and [(column.name, column.type) for column in one.key] == kinds


def default_schema(options: StreamOptions, stored: StoredTable = NO_TABLE) -> StructType:
    """The schema of a stream for which the user gives none. Raises `InvalidRequest` where it must be given."""
    table = stored.live
    if table is None or options.read.raw:
        if options.read.row_mapping is not None:
            raise InvalidRequest(
                "a stream with 'key.columns' needs the types of all columns, because the database stores no schema: "
                "add .schema('op string, region string, id long, price double, seq long')"
            )
        return StructType([*CHANGE_SCHEMA, _FORMER]) if options.before else CHANGE_SCHEMA
    rows = read_types(table)
    former = [
        StructField(f"{BEFORE}_{field.name}", field.dataType)
        for field in rows
        if options.before and field.name not in table.key_names
    ]
    about = [CHANGE_SCHEMA[name] for name in ABOUT]
    return StructType([about[0], *rows, *former, *about[1:]])


def decode_rows(mapping: RowMapping, key: pa.Array, value: pa.Array, types: pa.Schema) -> dict[str, Any]:
    """The columns `types` of keys and values; those of the value are null where the value is null."""
    key_types = pa.schema([field for field in types if field.name in mapping.key_columns])
    cells = ({"key": key} if len(key_types) else {}) | (
        {"value": value} if len(types) > len(key_types) else {}
    )
    if "value" not in cells or not value.null_count:
        return _decoded(mapping, cells, types)
    present = value.is_valid()
    absent_at, present_at = pc.indices_nonzero(pc.invert(present)), pc.indices_nonzero(present)
    found = _decoded(mapping, {name: cell.take(present_at) for name, cell in cells.items()}, types)
    keys = _decoded(mapping, {"key": key.take(absent_at)}, key_types) if len(key_types) else {}
    # Where each row is among the rows with a value, followed by those without one.
    place = pc.array_sort_indices(pa.concat_arrays([present_at, absent_at]))
    missing = len(absent_at)
    return {
        name: pa.concat_arrays([column, keys.get(name, pa.nulls(missing, column.type))]).take(place)
        for name, column in found.items()
    }


def _decoded(mapping: RowMapping, cells: dict[str, pa.Array], types: pa.Schema) -> dict[str, Any]:
    batch = pa.RecordBatch.from_arrays(list(cells.values()), names=list(cells))
    decoded, _ = mapping.decode(batch, types)
    return _named(decoded)


def _named(batch: pa.RecordBatch) -> dict[str, Any]:
    return dict(zip(batch.schema.names, batch.columns, strict=True))


def _cast(column: Any, field: pa.Field) -> Any:
    if column.type == field.type:
        return column
    try:
        return column.cast(field.type)
    except pa.ArrowInvalid as error:
        raise InvalidRequest(
            f"a change does not fit the schema of the stream, in column {field.name!r}: {error}; stream keys and "
            "values as binary"
        ) from None


def _refuse_merges(batch: pa.RecordBatch) -> None:
    merges = pc.equal(batch["op"], "merge")
    if merges.true_count:
        at = pc.index(merges, value=True).as_py()
        raise InvalidRequest(
            f"the change with the sequence number {batch['seq'][at].as_py()} is a merge: its operand is no row, so it "
            "has no columns. Stream bytes, without 'key.columns', and apply the operator yourself"
        )


def _check_raw(schema: StructType, *, before: bool) -> None:
    names = [*CHANGE_SCHEMA.fieldNames(), *([BEFORE] if before else [])]
    for field in schema:
        if field.name not in names:
            raise InvalidRequest(
                f"a stream of changes has no column {field.name!r}; choose from {', '.join(names)}, or make columns of "
                "key and value with the option 'key.columns'"
            )
    _check_types(schema, names)
    if not schema.fields:
        raise InvalidRequest(f"a stream needs a column; choose from {', '.join(names)}")


def _check_types(schema: StructType, names: Sequence[str]) -> None:
    for field in schema:
        if field.name not in names:
            continue
        wanted = _FORMER if field.name == BEFORE else CHANGE_SCHEMA[field.name]
        text = field.name in ("key", "value", BEFORE) and isinstance(field.dataType, StringType)
        if field.dataType != wanted.dataType and not text:
            raise InvalidRequest(
                f"column {field.name!r} of a stream of changes is {wanted.dataType.simpleString()}, not "
                f"{field.dataType.simpleString()}"
            )
        if wanted.nullable and not field.nullable:
            raise InvalidRequest(f"column {field.name!r} must be nullable: not every change has it")
