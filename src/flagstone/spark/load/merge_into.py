"""`merge_into`: one load whose operations depend on the rows that the database has.

A merge holds a checkpoint, looks up the key of every row at that one state, decides what to write, and loads it with
one commit. The load is newer than everything before it. A crash before the commit leaves the database unchanged, and a
checkpoint that expires.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import BinaryType, BooleanType, StructField, StructType

from flagstone import keys
from flagstone.config import ReaderSettings
from flagstone.config.durations import as_duration
from flagstone.db.reader.reader import open_reader
from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.schema import TableSchema, key_arrow_schema
from flagstone.spark.address import shared_address
from flagstone.spark.error_translation import find_cause, in_task
from flagstone.spark.held_state import CheckpointRead, hold_checkpoint
from flagstone.spark.job_control import described, log_done
from flagstone.spark.load.bulk_load import bulk_load, sort_by_key
from flagstone.spark.load.plan import LoadReport
from flagstone.spark.options import ReadOptions, key_bytes
from flagstone.spark.row_mapping import RowMapping, arrow_schema
from flagstone.spark.sessions import register
from flagstone.spark.stored_schema import plan_read, structured_mapping
from flagstone.spark.stream.shape import BEFORE, decode_rows

if TYPE_CHECKING:
    from pyspark.sql import Column

KEY: Final = "_flagstone_key"
_FOUND: Final = "_flagstone_found"
LIFETIME: Final = timedelta(days=1)
_CACHE_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """A finished merge. `load` is None if nothing was to be written, or if the driver runs on another machine.

    `seq` is the sequence number of the state that the rows were compared with. `changes` are the written rows with `op`
    and the former values, if they were asked for; they are kept in Spark's cache until `changes.unpersist()`.
    """

    load: LoadReport | None
    inserted: int
    updated: int
    deleted: int
    seq: int
    seconds: float
    changes: DataFrame | None = None


@dataclass(frozen=True, slots=True)
class _Columns:
    """Which columns of the frame are the key and the value, and how those of the database are decoded.

    Without `written` rows are bytes, in the columns `key` and `value`. `stored` decodes the columns of the value that
    the database knows; None if it knows none.
    """

    key: str
    value: str
    written: RowMapping | None = None
    stored: RowMapping | None = None

    @classmethod
    def of(
        cls,
        schema: StructType,
        held: CheckpointRead,
        given: RowMapping | None,
        *,
        key: str,
        value: str,
        value_columns: Sequence[str] | None,
    ) -> _Columns:
        """Raises `InvalidRequest` for a column that is missing or cannot be stored."""
        if "op" in (name.lower() for name in schema.names):
            raise InvalidRequest(
                "the frame has a column 'op'; the merge decides the operation: drop or rename it"
            )
        table, prefix = table_under(held), held.options.prefix or b""
        found = structured_mapping(table, schema, given, key=key, value=value, value_columns=value_columns)
        if found is None:
            if prefix:
                raise InvalidRequest("option 'key.prefix' is for structured rows; name their key columns")
            for name in (key, value):
                if name not in schema.names:
                    raise InvalidRequest(f"there is no column {name!r}; there are {', '.join(schema.names)}")
            return cls(key, value)
        written = found.for_writing(schema)
        names = [*written.key_columns, *(written.value_columns or ())]
        if table is not None:
            known = {column.name for version in table.versions for column in (*table.key, *version.columns)}
            names = [name for name in names if name in known]
        rows = StructType([schema[name] for name in names])
        read = replace(held.options, row_mapping=given)
        return cls(key, value, written, plan_read(read, rows, table, prefix))

    def former(self, schema: StructType) -> list[StructField]:
        """The columns with the former values."""
        if self.written is None:
            return [StructField(BEFORE, BinaryType())]
        return [
            StructField(f"{BEFORE}_{name}", schema[name].dataType)
            for name in self.written.value_columns or ()
        ]

    def decoded(self, key: pa.Array, value: pa.Array, types: pa.Schema) -> list[Any]:
        """The columns of `former`; null for those that the database does not have yet."""
        if self.written is None:
            return [value]
        known = () if self.stored is None else self.stored.value_columns or ()
        rows = (
            {}
            if self.stored is None
            else decode_rows(self.stored, key, value, pa.schema([types.field(name) for name in known]))
        )
        return [
            rows.get(name, pa.nulls(len(value), types.field(name).type))
            for name in self.written.value_columns or ()
        ]


def merge_into(
    df: DataFrame,
    url: str | os.PathLike[str],
    *,
    key: str = "key",
    value: str = "value",
    key_columns: Sequence[str] = (),
    value_columns: Sequence[str] | None = None,
    value_format: Literal["row", "json"] | None = None,
    when_matched: Literal["update", "delete"] | None = "update",
    condition: str | Column | None = None,
    delete_when: str | Column | None = None,
    when_not_matched: Literal["insert"] | None = "insert",
    before_images: bool = False,
    store: str | None = None,
    store_options: Mapping[str, Any] | None = None,
    wal_store: str | None = None,
    merge_operator: str | None = None,
    lifetime: timedelta | str = LIFETIME,
    duplicates: Literal["last", "error"] = "error",
    **options: Any,
) -> MergeReport:
    """Update, delete or insert the rows of `df` by whether the database has their keys, with one commit.

    Columns are those of `bulk_load`, without `op`; a structured database knows its `key_columns`. A row whose key is in
    the database is matched: it replaces the row (`when_matched="update"`), deletes it ("delete"), or is left out
    (None). A matched row for which `delete_when` is true deletes; one for which `condition` is not true is left out. A
    row that is not matched is inserted, or left out with `when_not_matched=None`. Both conditions are SQL or a
    `Column`, and see the columns of `df` and the former values: `before` (bytes), or for rows of ordinary columns one
    column `before_NAME` for each column of the value.

    All rows are compared with one state of the database: what is durable when this function is called. The load is
    newer than every write before its commit: the last write wins. If another process writes a key between the call and
    the commit, and the merge writes the same key, the row of the merge replaces the other one. Keys that the merge does
    not write are not touched. If that matters, let no other process write these keys meanwhile.

    Two rows of one key are an error, unless `duplicates="last"`. `lifetime` is how long the checkpoint may be needed.
    With `before_images`, the report has the written rows with the former values. The other options are those of
    `bulk_load`.

    Raises:
        InvalidRequest: columns, types, conditions or options are wrong, there is no database, or a key occurs twice.
        Closed, Unavailable: as `bulk_load`; nothing is written.

    """
    kept_for = as_duration(lifetime, "lifetime", minimum=timedelta(seconds=1))
    if when_matched not in ("update", "delete", None):
        raise InvalidRequest(f"when_matched is 'update', 'delete' or None, not {when_matched!r}")
    if when_not_matched not in ("insert", None):
        raise InvalidRequest(f"when_not_matched is 'insert' or None, not {when_not_matched!r}")
    clash = [name for name in df.columns if name in (KEY, _FOUND) or name.startswith(BEFORE)]
    if clash:
        raise InvalidRequest(f"column {clash[0]!r} has a name that the merge uses itself; rename it")
    chosen = None if value_columns is None else tuple(value_columns)
    given = RowMapping(tuple(key_columns), chosen, value_format or "row") if key_columns else None
    address = shared_address(url, store=store, store_options=store_options, wal_store=wal_store)
    spark, started = df.sparkSession, SYSTEM_CLOCK.monotonic()
    register(spark)
    read = ReadOptions(
        address, lifetime=kept_for, merge_operator=merge_operator, prefix=key_prefix_of(options)
    )
    held = hold_checkpoint(read, owned=True)
    rows = None
    try:
        columns = _Columns.of(df.schema, held, given, key=key, value=value, value_columns=chosen)
        with held.open() as reader:
            seq = reader.status()["last_seq"]
        decided = _decided(
            _matched(df, columns, held, once=duplicates == "last"),
            when_matched=when_matched,
            condition=condition,
            delete_when=delete_when,
            when_not_matched=when_not_matched,
        )
        rows = decided.persist()
        counts = _counts(rows, f"merge into {address.name}")
        report = None
        if counts:
            written = rows.select(*df.columns, "op")
            report = bulk_load(
                written,
                url,
                store=store,
                store_options=store_options,
                wal_store=wal_store,
                key=key,
                value=value,
                key_columns=() if columns.written is None else columns.written.key_columns,
                value_columns=value_columns,
                value_format=value_format,
                duplicates=duplicates,
                presorted=True,
                **options,
            )
        changes = rows.drop(KEY, _FOUND) if before_images else None
    except BaseException:
        release(held, rows)
        raise
    release(held, None if before_images else rows)
    merged = MergeReport(
        load=report,
        inserted=counts.get(("put", False), 0),
        updated=counts.get(("put", True), 0),
        deleted=counts.get(("delete", True), 0),
        seq=seq,
        seconds=SYSTEM_CLOCK.monotonic() - started,
        changes=changes,
    )
    log_done(
        "merged",
        database=address.name,
        inserted=merged.inserted,
        updated=merged.updated,
        deleted=merged.deleted,
        bytes=0 if report is None else report.bytes,
        seconds=merged.seconds,
    )
    return merged


def _counts(rows: DataFrame, doing: str) -> dict[tuple[str, bool], int]:
    """How many rows there are of each operation, with or without a former row. Fills Spark's cache with the rows."""
    try:
        with described(rows.sparkSession, doing):
            counted = rows.groupBy("op", _FOUND).count().collect()
    except PySparkException as error:
        cause = find_cause(str(error))
        if cause is None:
            raise
        raise cause from error
    return {(row["op"], row[_FOUND]): row["count"] for row in counted}


def key_prefix_of(options: Mapping[str, Any]) -> bytes | None:
    """The option `key.prefix` of a load."""
    given = options.get("key.prefix")
    return key_bytes(given) if isinstance(given, str) else given


def table_under(held: CheckpointRead) -> TableSchema | None:
    """The stored schema of exactly the prefix that a load writes to: that of the whole database is another one."""
    return held.table if held.table_prefix == (held.options.prefix or b"") else None


def with_keys(
    df: DataFrame, key: str, key_columns: Sequence[str], table: TableSchema | None, prefix: bytes = b""
) -> DataFrame:
    """The frame with the keys of its rows, as the database has them; those of structured rows with the prefix."""
    missing = [name for name in (key_columns or [key]) if name not in df.columns]
    if missing:
        raise InvalidRequest(f"there is no column {missing[0]!r}; there are {', '.join(df.columns)}")
    if not key_columns:
        return df.withColumn(KEY, F.col(key).cast("binary"))
    arrow = arrow_schema(df.schema) if table is None else key_arrow_schema(table.key)
    types = pa.schema([arrow.field(name) for name in key_columns])
    keys.KeySchema.of(types)

    def encode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            parts = [batch.column(field.name).cast(field.type) for field in types]
            made = keys.encode_arrow(parts)
            under = pc.binary_join_element_wise(prefix, made, b"") if prefix else made
            yield batch.append_column(KEY, under)

    return df.mapInArrow(encode, StructType([*df.schema, StructField(KEY, BinaryType())]))


def _matched(df: DataFrame, columns: _Columns, held: CheckpointRead, *, once: bool) -> DataFrame:
    """The rows in key order, with the former values and whether the database has the key; `once`: one row per key."""
    key_columns = () if columns.written is None else columns.written.key_columns
    keyed = with_keys(df, columns.key, key_columns, table_under(held), held.options.prefix or b"")
    ordered = sort_by_key(keyed.dropDuplicates([KEY]) if once else keyed, KEY, (), None)
    former = columns.former(df.schema)
    schema = StructType([*ordered.schema, *former, StructField(_FOUND, BooleanType())])
    types = arrow_schema(df.schema)

    def look_up(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        address = held.options.address
        with (
            in_task(),
            open_reader(
                address.path,
                **address.arguments,
                checkpoint=held.checkpoint,
                merge_operator=held.options.load_merge_operator(),
                settings=ReaderSettings(block_cache_bytes=_CACHE_BYTES),
            ) as reader,
        ):
            for batch in batches:
                key = batch[KEY]
                if key.null_count:
                    raise InvalidRequest(f"{key.null_count} rows have no key: a column of the key is null")
                value = pa.array(reader.multi_get(key.to_pylist()), pa.binary())
                arrays = [*batch.columns, *columns.decoded(key, value, types), value.is_valid()]
                yield pa.RecordBatch.from_arrays(arrays, names=schema.names)

    return ordered.mapInArrow(look_up, schema)


def _decided(
    rows: DataFrame,
    *,
    when_matched: str | None,
    condition: str | Column | None,
    delete_when: str | Column | None,
    when_not_matched: str | None,
) -> DataFrame:
    """The rows that are written, with their operation."""
    found, nothing = F.col(_FOUND), F.lit(None).cast("string")
    matched = {"update": F.lit("put"), "delete": F.lit("delete"), None: nothing}[when_matched]
    if condition is not None:
        matched = F.when(_column(condition), matched)
    if delete_when is not None:
        matched = F.when(_column(delete_when), F.lit("delete")).otherwise(matched)
    missing = F.lit("put") if when_not_matched == "insert" else nothing
    return rows.withColumn("op", F.when(found, matched).otherwise(missing)).where("op is not null")


def _column(condition: str | Column) -> Column:
    return F.expr(condition) if isinstance(condition, str) else condition


def release(held: CheckpointRead, rows: DataFrame | None) -> None:
    """Delete the checkpoint, and drop the rows from Spark's cache. A checkpoint that stays expires."""
    if rows is not None:
        rows.unpersist()
    assert held.checkpoint is not None, "a merge reads at a checkpoint"
    with suppress(FlagstoneError):
        held.options.address.admin().delete_checkpoint(held.checkpoint)
