"""`export`: one moment of a database as files that everybody reads, written by Spark's own writers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import UUID

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Observation
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import BinaryType

from flagstone.config.durations import as_duration, format_duration
from flagstone.db.admin import Admin
from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.spark.causes import find_cause
from flagstone.spark.export_plan import (
    TEXT_FORMATS,
    WRITER_DEFAULTS,
    BytesAs,
    check_apart,
    check_structured,
    check_writing,
    plan_encodings,
    plan_schema,
)
from flagstone.spark.options import key_text, parse_read_options
from flagstone.spark.places import shared_place
from flagstone.spark.progress import database_name, described, log_done, per_second
from flagstone.spark.reading import PinnedRead, pin
from flagstone.spark.sessions import register

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

DEFAULT_LIFETIME: Final = timedelta(days=1)
"""An export that takes longer loses its tables to garbage collection. It releases its checkpoint when it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """A finished export. `bytes` are those of the keys and values that were read; 0 with columns of your own.

    `encodings` says of every column of bytes how it was written: binary, utf8, hex or base64.
    """

    target: str
    format: str
    rows: int
    bytes: int
    seconds: float
    encodings: Mapping[str, str]

    @property
    def rows_per_s(self) -> float:
        """How many rows were written per second."""
        return per_second(self.rows, self.seconds)


def export(
    spark: SparkSession,
    url: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: str = "parquet",  # noqa: A002 - Spark's name for it
    mode: Literal["error", "append", "overwrite"] = "error",
    columns: Sequence[str] = ("key", "value"),
    key_as: BytesAs | None = None,
    value_as: BytesAs | None = None,
    key_columns: Sequence[str] = (),
    value_columns: Sequence[str] | None = None,
    value_format: Literal["row", "json"] = "row",
    schema: StructType | str | None = None,
    start: bytes | None = None,
    stop: bytes | None = None,
    prefix: bytes | None = None,
    checkpoint: UUID | str | None = None,
    as_of: int | datetime | None = None,
    partitions: int | None = None,
    include_expired: bool = False,
    merge_operator: str | None = None,
    lifetime: timedelta | str = DEFAULT_LIFETIME,
    store: str | None = None,
    store_options: Mapping[str, Any] | None = None,
    wal_store: str | None = None,
    options: Mapping[str, str] | None = None,
) -> ExportReport:
    """Write one moment of the database, all of it or a range of keys, as files at `target`, which Spark reaches.

    `format` is parquet, orc, json or csv; avro and delta where Spark has them. `options` are those of Spark's writer.
    `columns` are some of key, value, seq, created_ms and expires_ms. Bytes stay bytes in binary formats and become
    base64 in json and csv, unless `key_as` and `value_as` say `utf8` (an error where they are no text), `hex` or
    `base64`. With `key_columns` and `schema` rows have the ordinary columns they were loaded from (see docs/keys.md).

    The moment is that of the call, of a `checkpoint`, or `as_of`; a checkpoint holds it, for `lifetime` at most, and is
    released at the end. `partitions` is the number of tasks, and so of files. Rows are in key order in each file.

    After an error or a crash `target` is as Spark's writer leaves it: without `_SUCCESS`, and with mode "overwrite"
    without what was there before. The database is not changed in any case.

    Raises:
        InvalidRequest: an argument is wrong, there is no such database, or something is at `target` already.
        Unavailable: the store did not answer.

    """
    where = os.fspath(target)
    held_for = as_duration(lifetime, "lifetime", minimum=timedelta(seconds=1))
    place = shared_place(url, store=store, store_options=store_options, wal_store=wal_store)
    check_writing(format, mode)
    check_apart(place, where)
    structured = bool(key_columns) or schema is not None
    if structured:
        check_structured(key_columns, schema, columns, (key_as, value_as))
        shown: StructType | str | None = schema
        encodings: dict[str, str] = {}
    else:
        encodings = plan_encodings(format, columns, key_as=key_as, value_as=value_as)
        shown = plan_schema(columns, encodings)
    wanted: dict[str, Any] = {
        "path": place.path,
        "store": place.store,
        "wal_store": place.wal_store,
        "columns": None if structured else ",".join(columns),
        "key.columns": ",".join(key_columns) or None,
        "value.columns": None if value_columns is None else ",".join(value_columns),
        "value.format": value_format if key_columns else None,
        "start": None if start is None else key_text(start),
        "stop": None if stop is None else key_text(stop),
        "prefix": None if prefix is None else key_text(prefix),
        "checkpoint": checkpoint,
        "as_of": as_of.isoformat() if isinstance(as_of, datetime) else as_of,
        "partitions": partitions,
        "include_expired": include_expired,
        "merge_operator": merge_operator,
        "checkpoint_lifetime": format_duration(held_for),
        **{f"store.{name}": given for name, given in place.store_options.items()},
    }
    texts = {
        name: str(given).lower() if isinstance(given, bool) else str(given)
        for name, given in wanted.items()
        if given is not None
    }
    started = SYSTEM_CLOCK.monotonic()
    pinned = pin(parse_read_options(texts))
    try:
        frame = _frame(spark, pinned, texts, shown)
        if structured and format in TEXT_FORMATS:
            encodings = {
                field.name: "base64" for field in frame.schema if isinstance(field.dataType, BinaryType)
            }
        sizes = [name for name in ("key", "value") if name in frame.columns and not key_columns]
        with described(spark, f"export {database_name(place)} to {format}"):
            rows, size = _write(
                frame,
                where,
                format=format,
                mode=mode,
                encodings=encodings,
                sizes=sizes,
                options={**WRITER_DEFAULTS.get(format, {}), **(options or {})},
            )
    finally:
        if checkpoint is None:
            _release(pinned)
    report = ExportReport(
        target=where,
        format=format,
        rows=rows,
        bytes=size,
        seconds=SYSTEM_CLOCK.monotonic() - started,
        encodings=encodings,
    )
    log_done(
        "exported",
        database=database_name(place),
        format=format,
        rows=report.rows,
        bytes=report.bytes,
        seconds=report.seconds,
    )
    return report


def _frame(
    spark: SparkSession, pinned: PinnedRead, texts: Mapping[str, str], schema: StructType | str | None
) -> DataFrame:
    """What the checkpoint holds. Reading it takes no other."""
    register(spark)
    as_of = pinned.options.as_of
    moment = {"checkpoint": pinned.checkpoint, **({} if as_of is None else {"as_of": str(as_of)})}
    reader = spark.read.format("flagstone").options(**{**texts, **moment})
    try:
        return (reader if schema is None else reader.schema(schema)).load()
    except PySparkException as error:
        raise _told(error) from error


def _write(
    frame: DataFrame,
    target: str,
    *,
    format: str,  # noqa: A002
    mode: str,
    encodings: Mapping[str, str],
    sizes: Sequence[str],
    options: Mapping[str, str],
) -> tuple[int, int]:
    """Write all rows; how many there were, and how many bytes of the columns `sizes`. Counted as they pass by."""
    seen = Observation()
    size = sum((F.octet_length(name) for name in sizes), start=F.lit(0))
    observed = frame.observe(seen, F.count(F.lit(1)).alias("rows"), F.sum(size).alias("bytes"))
    written = observed.select(*(_encoded(name, encodings.get(name)) for name in frame.columns))
    try:
        written.write.format(format).mode(mode).options(**options).save(target)
    except PySparkException as error:
        raise _told(error) from error
    counts = seen.get
    return int(counts["rows"]), int(counts["bytes"] or 0)


def _encoded(name: str, encoding: str | None) -> Column:
    column = F.col(f"`{name}`")
    if encoding == "hex":
        return F.lower(F.hex(column)).alias(name)
    if encoding == "base64":
        return F.translate(F.base64(column), "\r\n", "").alias(name)  # Spark breaks it into lines
    return column


def _told(error: PySparkException) -> Exception:
    """Our own error in Spark's; Spark's refusal of what was asked for as one of ours; anything else as it is."""
    own = find_cause(str(error))
    if own is not None:
        return own
    refused = isinstance(error, AnalysisException)
    return InvalidRequest(f"Spark cannot do this: {str(error).splitlines()[0]}") if refused else error


def _release(pinned: PinnedRead) -> None:
    place = pinned.options.place
    # It expires by itself; what the export says is more important.
    with suppress(FlagstoneError):
        Admin(place.path, **place.arguments).delete_checkpoint(pinned.checkpoint)
