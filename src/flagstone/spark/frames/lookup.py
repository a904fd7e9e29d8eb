"""`lookup`: join a DataFrame with a database by key, reading only the blocks that have one of its keys.

A join of Spark reads the whole database. A lookup sorts the keys of the frame, and each task answers its range of them
from indexes, filters and the touched blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from flagstone import keys
from flagstone.errors import InvalidRequest
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.spark.address import open_store
from flagstone.spark.error_translation import in_task
from flagstone.spark.frames.checkpoints import keep_while_used
from flagstone.spark.frames.plan import ReadArguments, plan_read
from flagstone.spark.held_state import CheckpointRead, Renewal, explained
from flagstone.spark.job_control import parallelism
from flagstone.spark.row_mapping import RowMapping, arrow_schema
from flagstone.spark.sorted_lookup import SortedLookup, TooManyValues

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

How = Literal["left", "inner"]

_ROWS_AT_ONCE: Final = 65_536
_SMALL_BYTES: Final = 16 * 1024 * 1024
"""A frame that Spark estimates smaller than this is not sorted: a shuffle would cost more than blocks read twice."""

_PARTITION_BYTES: Final = 64 * 1024 * 1024

_NOT_FOR_LOOKUPS: Final = ("where", "start", "stop", "prefix", "keys", "partitions", "partition_bytes")


def lookup(
    frame: DataFrame,
    url: str | os.PathLike[str],
    *,
    on: str | Sequence[str],
    how: How = "left",
    presorted: bool | None = None,
    **arguments: Unpack[ReadArguments],
) -> DataFrame:
    """The rows of `frame`, each with the row of the database that has its key, in no particular order.

    `on` is the column with the key, as bytes or text; with `key_columns` and `schema`, the columns that correspond to
    them, in their order. The result gets the column `value`, or the value columns, or those of them in `columns`. With
    `how="left"` they are null for a key that is not there, or null; with "inner" such rows are left out. A key may
    occur any number of times.

    Spark sorts the keys, unless it knows that the frame is small, or `presorted` says that rows with near keys are in
    one partition already. Sorting evaluates the frame twice. Everything else is as for `read`.

    Raises:
        InvalidRequest: an argument is wrong, a column is missing, or has another type than the key.
        Unavailable: the store did not answer.

    """
    if frame.isStreaming:
        raise InvalidRequest(
            "Spark cannot sort a stream: call lookup in foreachBatch, or mapInArrow with lookup_batches"
        )
    work = lookup_batches(url, frame.schema, on=on, how=how, spark=frame.sparkSession, **arguments)
    sorted_frame = frame if _is_sorted(frame, presorted) else _sorted(frame, work.on)
    result = sorted_frame.mapInArrow(work, work.schema)
    if arguments.get("checkpoint") is None:
        keep_while_used(frame.sparkSession, result, work.held)
    return result


def lookup_batches(
    url: str | os.PathLike[str],
    rows: StructType,
    *,
    on: str | Sequence[str],
    how: How = "left",
    spark: SparkSession | None = None,
    **arguments: Unpack[ReadArguments],
) -> LookupTask:
    """The function that `lookup` applies to batches with the schema `rows`, for `mapInArrow` of a frame or stream.

    `work = lookup_batches(url, frame.schema, on="key"); frame.mapInArrow(work, work.schema)`. It shows one moment, the
    one of this call. Tasks renew its checkpoint while they run; if none runs for longer than `lifetime`, give a longer
    one, snapshot "latest", or a `checkpoint` of your own.
    """
    schema = rows
    if how not in ("left", "inner"):
        raise InvalidRequest(f"how is {how!r}; a lookup is 'left' or 'inner'")
    for name in _NOT_FOR_LOOKUPS:
        if arguments.get(name) is not None:
            raise InvalidRequest(
                f"a lookup has no {name}: its keys come from the frame; filter the frame, or the result"
            )
    named = (on,) if isinstance(on, str) else tuple(on)
    chosen = arguments.get("columns")
    given: Any = {name: value for name, value in arguments.items() if name != "columns"}
    raw: Any = {**given, "columns": ["value"]}
    plan = plan_read(url, given, spark=spark, named=chosen or ())
    mapping = plan.shape.mapping
    available: Sequence[str]
    if mapping is not None:
        types = plan.shape.types
        available = mapping.value_columns or ()
        wanted = tuple(available) if chosen is None else tuple(chosen)
        added = [plan.every[name] for name in wanted if name in available]
    else:
        plan = plan_read(url, raw, spark=spark)
        types, available = pa.schema([("key", pa.binary())]), ("value",)
        wanted = ("value",) if chosen is None else tuple(chosen)
        added = [StructField("value", plan.schema["value"].dataType)] if "value" in wanted else []
    for name in wanted:
        if name not in available or wanted.count(name) > 1:
            raise InvalidRequest(
                f"a lookup cannot add {name!r}; choose from {', '.join(available)}, each once"
            )
    check_keys(schema, named, types, mapping)
    taken = {name.lower() for name in schema.fieldNames()}  # Spark's names have no case
    clash = [field.name for field in added if field.name.lower() in taken]
    if clash:
        raise InvalidRequest(
            f"the frame has a column {clash[0]!r} already; rename it, or leave it out of columns="
        )
    nullable = [StructField(field.name, field.dataType, nullable=True) for field in added]
    output = StructType([*schema.fields, *nullable])
    held = plan.hold()
    if spark is None and plan.options.checkpoint is None:
        held = replace(held, renewed=True)
    return LookupTask(held, mapping, types, named, wanted, output, inner=how == "inner")


def check_keys(schema: StructType, on: Sequence[str], types: pa.Schema, mapping: RowMapping | None) -> None:
    """Raise `InvalidRequest` if the columns `on` of a frame cannot be keys of the database."""
    for name in on:
        if name not in schema.fieldNames():
            raise InvalidRequest(
                f"there is no column {name!r} to look up; there are {', '.join(schema.fieldNames())}"
            )
    if mapping is None:
        if len(on) != 1 or not isinstance(schema[on[0]].dataType, BinaryType | StringType):
            given_types = ", ".join(f"{name} {schema[name].dataType.simpleString()}" for name in on)
            raise InvalidRequest(
                f"a key is one column of bytes or text, not {given_types}; cast it, or give key_columns and schema of "
                "the database"
            )
        return
    if len(on) != len(mapping.key_columns):
        raise InvalidRequest(
            f"a key has the columns {', '.join(mapping.key_columns)}, and on= has {len(on)}: {', '.join(on)}"
        )
    given = arrow_schema(StructType([schema[name] for name in on]))
    for name, key_column, field in zip(on, mapping.key_columns, given, strict=True):
        wanted = types.field(key_column).type
        widens = (
            pa.types.is_integer(wanted)
            and pa.types.is_integer(field.type)
            and field.type.bit_width <= wanted.bit_width
        )
        if field.type != wanted and not widens:
            raise InvalidRequest(
                f"column {name!r} is {field.type}, and the key column {key_column!r} {wanted}: cast it"
            )


@dataclass(frozen=True)
class LookupTask:
    """Adds to each row of some batches the columns of the row with its key. A task calls it; it pickles.

    `schema` has the columns of the result.
    """

    held: CheckpointRead
    mapping: RowMapping | None
    types: pa.Schema
    on: tuple[str, ...]
    wanted: tuple[str, ...]
    schema: StructType
    inner: bool

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        options = self.held.options
        with in_task(), explained(self.held), self.held.open() as reader:
            store, paths = open_store(options.address)
            found = SortedLookup(
                reader,
                store,
                paths,
                now_ms=SYSTEM_CLOCK.now_ms(),
                include_expired=options.include_expired,
            )
            renewal = Renewal(self.held, reader.status().get("checkpoint_expires_s"))
            for batch in joined_batches(batches, _ROWS_AT_ONCE):
                renewal.step()
                yield from self.answer(batch, found.find)

    def answer(self, batch: pa.RecordBatch, find: Callable[[pa.Array], pa.Array]) -> Iterator[pa.RecordBatch]:
        """The batch with the new columns; in several parts if the values are large."""
        if not batch.num_rows:
            return
        encoded = self.keys_of(batch).dictionary_encode()
        order = pc.sort_indices(encoded.dictionary)
        try:
            answers = find(encoded.dictionary.take(order))
        except TooManyValues:
            half = batch.num_rows // 2
            # With one key left the values fit: a batch of copies of it is answered by references to one value.
            yield from self.answer(batch.slice(0, half), find)
            yield from self.answer(batch.slice(half), find)
            return
        rank = pc.sort_indices(order).cast(pa.int64())
        rows = rank.take(encoded.indices)
        added = self._decoded(answers)
        if self.inner:
            present = pc.is_valid(answers).take(rows)
            batch, rows = batch.filter(present), rows.filter(present)
        columns = [*batch.columns, *(column.take(rows) for column in added)]
        schema = arrow_schema(self.schema)
        yield pa.RecordBatch.from_arrays(
            [
                column if column.type == field.type else column.cast(field.type)
                for column, field in zip(columns, schema, strict=True)
            ],
            schema=schema,
        )

    def keys_of(self, batch: pa.RecordBatch) -> pa.Array:
        """The key of each row; null if one of its columns is null, because null equals nothing."""
        columns = [batch.column(name) for name in self.on]
        if self.mapping is None:
            return columns[0].cast(pa.binary())
        present = reduce(pc.and_, map(pc.is_valid, columns))
        typed = [
            column.cast(self.types.field(name).type)
            for column, name in zip(columns, self.mapping.key_columns, strict=True)
        ]
        if present.true_count == len(present):
            return self._under_prefix(keys.encode_arrow(typed))
        made = self._under_prefix(keys.encode_arrow([column.filter(present) for column in typed]))
        places = pc.subtract(pc.cumulative_sum(present.cast(pa.int64())), 1)
        return made.take(pc.if_else(present, places, None))

    def _decoded(self, answers: pa.Array) -> list[pa.Array]:
        if self.mapping is None:
            return [answers for _ in self.wanted]
        names = self.wanted if self.mapping.table is not None else self.mapping.value_columns or ()
        types = pa.schema([self.types.field(name) for name in names])
        raw = pa.RecordBatch.from_arrays([answers.cast(pa.binary())], names=["value"])
        rows, _ = self.mapping.decode(raw, types)
        return [rows.column(name) for name in self.wanted]

    def _under_prefix(self, made: pa.Array) -> pa.Array:
        prefix = b"" if self.mapping is None else self.mapping.prefix
        return pc.binary_join_element_wise(prefix, made, b"") if prefix else made


def joined_batches(batches: Iterator[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of at least that many, but for the last."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.num_rows
        if size >= rows:
            yield pa.concat_batches(held)
            held, size = [], 0
    if held:
        yield pa.concat_batches(held)


def _is_sorted(frame: DataFrame, presorted: bool | None) -> bool:
    """Whether the frame is looked up as it is."""
    if presorted is not None:
        return presorted
    size = _estimated_bytes(frame)
    return size is not None and size <= _SMALL_BYTES


def _estimated_bytes(frame: Any) -> int | None:
    """How large Spark thinks the frame is; None with Spark Connect, which does not say."""
    try:
        return int(frame._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())  # noqa: SLF001
    except Exception:  # noqa: BLE001 - Spark Connect, or a plan without statistics
        return None


def _sorted(frame: DataFrame, on: Sequence[str]) -> DataFrame:
    size = _estimated_bytes(frame) or 0
    count = 2 * parallelism(frame.sparkSession)
    if size < 1 << 50:  # Spark's estimate for an unknown size is far above
        count = max(count, -(-size // _PARTITION_BYTES))
    columns = [F.col("`" + name.replace("`", "``") + "`") for name in on]
    return frame.repartitionByRange(count, *columns).sortWithinPartitions(*columns)
