"""What a read from Python returns: its arguments, checked, and divided between the tasks that read and Spark.

Conditions that Arrow answers as Spark does are applied where rows are decoded. If there are others, Spark applies the
whole condition again to what is left.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict
from uuid import UUID

from pyspark.errors import PySparkException
from pyspark.sql.types import StructType

from flagstone.config.durations import as_duration
from flagstone.errors import InvalidRequest
from flagstone.read.arrow import COLUMNS
from flagstone.schema import TableSchema
from flagstone.spark.address import shared_address
from flagstone.spark.arrow_filter import bind
from flagstone.spark.column_conditions import conditions_of
from flagstone.spark.condition_text import encode
from flagstone.spark.hadoop_options import session_options
from flagstone.spark.held_state import CheckpointRead, hold_checkpoint
from flagstone.spark.job_control import parallelism
from flagstone.spark.options import ReadOptions, option_texts, parse_read_options
from flagstone.spark.row_mapping import read_schema
from flagstone.spark.row_shape import RowShape
from flagstone.spark.stored_schema import dropped_types, read_types
from flagstone.store.remote_options import OptionValue, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column

FRAME_LIFETIME: Final = timedelta(minutes=5)
"""Of the checkpoint of a frame, which the driver's process renews."""


class ReadArguments(TypedDict, total=False):
    """The keyword arguments of all reads from Python.

    `where` is a condition, as SQL text or `Column`, or several of them. `columns` are those to return. `start`, `stop`,
    `prefix` and `keys` select keys as bytes. Rows have the columns of the stored schema, unless `raw`. Where the
    database stores none, `key_columns` names those of the key, and `schema` has the types of all columns that were
    loaded. `mode` says what becomes of rows that do not decode. `as_of` or `checkpoint` name a former state. With
    `snapshot="latest"` a read needs no write access and keeps nothing. `lifetime` is how long the checkpoint outlives
    this process.
    """

    where: str | Column | Sequence[str | Column] | None
    columns: Sequence[str] | None
    start: bytes | None
    stop: bytes | None
    prefix: bytes | None
    keys: Sequence[bytes] | None
    raw: bool
    mode: Literal["PERMISSIVE", "DROPMALFORMED", "FAILFAST"]
    key_columns: Sequence[str]
    value_columns: Sequence[str] | None
    value_format: Literal["row", "json"]
    schema: StructType | str | None
    as_of: int | datetime | None
    checkpoint: UUID | str | None
    snapshot: Literal["checkpoint", "latest"]
    partitions: int | None
    partition_bytes: int | None
    include_expired: bool
    merge_operator: str | None
    lifetime: timedelta | str
    store: str | None
    store_options: Mapping[str, OptionValue] | None
    wal_store: str | None


_KNOWN: Final = frozenset(ReadArguments.__annotations__)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """A read whose arguments are checked. Its tasks return the columns of `schema`; the caller gets those of `output`.

    If not `complete`, Spark has to apply `where` as well.
    """

    options: ReadOptions
    shape: RowShape
    every: StructType
    texts: dict[str, str] = field(repr=False)  # credentials may be among them
    schema: StructType
    output: tuple[str, ...]
    where: Any
    complete: bool

    def hold(self) -> CheckpointRead:
        """The state to read, with a checkpoint of its own if it needs one."""
        return hold_checkpoint(self.options, owned=True)

    def source_options(self, held: CheckpointRead) -> dict[str, str]:
        """The options of the data source that show the same state."""
        own = option_texts({"where": encode(self.options.where) if self.options.where else None})
        return {**self.texts, **own, **option_texts(held.option_values)}


def plan_read(
    url: str | os.PathLike[str], arguments: ReadArguments, *, spark: Any = None, named: Sequence[str] = ()
) -> ReadPlan:
    """Check the arguments of a read. `spark` has the number of tasks, and settings of Hadoop for S3.

    Dropped columns are there if `columns`, `where` or `named` name them.

    Reads the stored schema, and writes nothing.

    Raises:
        InvalidRequest: an argument is unknown or wrong; the error names it.

    """
    given: dict[str, Any] = dict(arguments)
    for name in given:
        if name not in _KNOWN:
            raise InvalidRequest(f"a read has no argument {name!r}{nearest(name, _KNOWN)}")
    address = shared_address(
        url,
        store=given.get("store"),
        store_options={
            **session_options(spark, given.get("store") or os.fspath(url)),
            **(given.get("store_options") or {}),
        },
        wal_store=given.get("wal_store"),
    )
    key_columns, columns = given.get("key_columns") or (), given.get("columns")
    if isinstance(columns, str) or isinstance(key_columns, str):
        raise InvalidRequest("columns and key_columns are lists of names, not one text")
    typed = None if given.get("schema") is None else struct_of(given["schema"])
    if key_columns and typed is None:
        raise InvalidRequest(
            "key_columns need schema=, the names and types of all columns that were loaded; leave them out if the "
            "database stores its schema"
        )
    keys = given.get("keys")
    texts = option_texts(
        {
            "path": address.path,
            "store": address.store,
            "wal_store": address.wal_store,
            "key.columns": list(key_columns) or None,
            "value.columns": given.get("value_columns"),
            "value.format": given.get("value_format") if key_columns else None,
            "stored_schema": typed.json() if typed is not None and key_columns else None,
            "raw": given.get("raw"),
            "mode": given.get("mode"),
            "start": given.get("start"),
            "stop": given.get("stop"),
            "prefix": given.get("prefix"),
            "keys": None if keys is None else ",".join(f"hex:{bytes(key).hex()}" for key in keys),
            "checkpoint": given.get("checkpoint"),
            "as_of": given.get("as_of"),
            "snapshot": given.get("snapshot"),
            "partitions": given.get("partitions"),
            "partition_bytes": given.get("partition_bytes"),
            "parallelism": None if spark is None else parallelism(spark),
            "include_expired": given.get("include_expired"),
            "merge_operator": given.get("merge_operator"),
            "checkpoint_lifetime": as_duration(
                given.get("lifetime", FRAME_LIFETIME), "lifetime", minimum=timedelta(seconds=1)
            ),
            **{f"store.{name}": value for name, value in address.store_options.items()},
        }
    )
    options = parse_read_options(texts)
    parsed = conditions_of(given.get("where"))
    table, prefix = stored_table(options)
    asked = (*(columns or ()), *parsed.names, *named)
    if table is not None:
        typed = with_stored(typed, read_types(table))
    mapped = bool(key_columns) or table is not None
    dropped = StructType() if table is None else dropped_types(table, asked)
    every = _columns(with_stored(typed, dropped), mapped=mapped)
    output = tuple(columns) if columns is not None else _default_columns(typed, mapped=mapped)
    unknown = [name for name in output if name not in every.fieldNames()]
    if unknown or not output:
        raise InvalidRequest(
            f"columns {list(output)} are not available; choose from {', '.join(every.fieldNames())}"
        )
    shape = RowShape.of(options, every, table, prefix)
    fitting = tuple(each for each in parsed.conditions if bind(each, shape.types) is not None)
    complete = parsed.complete and len(fitting) == len(parsed.conditions)
    needed = list(output)
    if not complete:
        lowered = {name.lower() for name in parsed.names}
        more = [name for name in every.fieldNames() if "*" in lowered or name.lower() in lowered]
        needed += [name for name in more if name not in output]
    return ReadPlan(
        replace(options, where=fitting),
        shape,
        every,
        texts,
        StructType([every[name] for name in needed]),
        output,
        given.get("where"),
        complete,
    )


def stored_table(options: ReadOptions) -> tuple[TableSchema | None, bytes]:
    """The stored schema of the state to read, and the prefix that it rules; None without one, or for bytes."""
    if options.raw:
        return None, b""
    state = options if options.checkpoint else replace(options, snapshot="latest")
    held = hold_checkpoint(state)
    return held.table, held.table_prefix


def with_stored(typed: StructType | None, stored: StructType) -> StructType:
    """The columns of the stored schema, with the types that the caller wants for some of them."""
    if typed is None:
        return stored
    return StructType(
        [*typed.fields, *(each for each in stored.fields if each.name not in typed.fieldNames())]
    )


def struct_of(schema: StructType | str) -> StructType:
    """The schema, also from text such as `id long, name string`, which needs a running session."""
    if isinstance(schema, StructType):
        return schema
    if not isinstance(schema, str):
        raise InvalidRequest(f"schema is a StructType or a text like 'id long, name string', not {schema!r}")
    try:
        return StructType.fromDDL(schema)
    except PySparkException as error:
        raise InvalidRequest(f"schema {schema!r} is not understood: {error}") from error


def _columns(typed: StructType | None, *, mapped: bool) -> StructType:
    """All columns that a read could return."""
    own = [] if typed is None else list(typed.fields)
    names = [field.name for field in own]
    default = COLUMNS[2:] if mapped else COLUMNS
    return StructType([*own, *(field for field in read_schema(default).fields if field.name not in names)])


def _default_columns(typed: StructType | None, *, mapped: bool) -> tuple[str, ...]:
    if typed is not None:
        return tuple(typed.fieldNames())
    return () if mapped else ("key", "value")
