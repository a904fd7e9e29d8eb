"""`bulk_load`: load a DataFrame, in any order, into a database with one commit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812 - its customary name
from pyspark.sql.types import BinaryType, StructField, StructType

from flagstone.db.writer.database import Db
from flagstone.errors import InvalidRequest
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.error_translation import find_cause
from flagstone.spark.job_control import described, log_done
from flagstone.spark.load.plan import LoadReport, read_report
from flagstone.spark.options import option_texts, parse_write_options
from flagstone.spark.row_mapping import CARRIED, RowMapping, check_write_schema
from flagstone.spark.sessions import register
from flagstone.spark.stored_schema import plan_load

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_SHOWN_WITHIN_S: Final = 10.0
_POLL_S: Final = 0.01


def bulk_load(
    df: DataFrame,
    target: str | os.PathLike[str] | Db,
    *,
    store: str | None = None,
    store_options: Mapping[str, Any] | None = None,
    wal_store: str | None = None,
    key: str = "key",
    value: str = "value",
    key_columns: Sequence[str] = (),
    value_columns: Sequence[str] | None = None,
    value_format: Literal["row", "json"] | None = None,
    mode: Literal["append", "overwrite"] = "append",
    partitions: int | None = None,
    order_by: str | Sequence[str] = (),
    duplicates: Literal["last", "error"] = "last",
    presorted: bool = False,
    **options: Any,
) -> LoadReport | None:
    """Load all rows of `df` with one commit: all rows become visible or none, newer than every earlier row.

    Columns are `key` and `value` (binary, or string as UTF-8), and optionally `op` (put, delete, merge) and `ttl_ms` or
    `expires_ms`. Of several rows of one key the last in the order of the columns `order_by` is loaded, and without
    `order_by` any one of them; with duplicates="error" the load fails. `presorted` skips partitioning and sorting by
    key; tasks check the order. `partitions` is the number of tasks; without it Spark chooses one. docs/spark.md
    describes the other options.

    With `key_columns`, these columns are encoded into the key, and `value_columns` (by default all others but `op`,
    `ttl_ms` and `expires_ms`) into the value, in `value_format`, by default "row". docs/keys.md describes the encoding.
    The same commit stores the schema (docs/schema.md). If the database has one, the columns are compared with it by
    name, and `key_columns` may be left out. `raw=True` loads `key` and `value` as bytes all the same.

    `target` is the address of the database, or the database itself, open in this process. If it does not exist, the
    load creates it. A Flagstone writer that has the database open, in any process, adopts the load and continues. A
    SlateDB writer is fenced and must be opened again afterwards. After an error or a crash no row is visible, and
    garbage collection deletes what is left. Spark evaluates `df` twice, for its key ranges and for its rows: cache it
    if that is expensive.

    Returns None if the driver runs on another machine (Spark Connect): the report stays there.

    Raises:
        InvalidRequest: columns, types, nulls, order or options are wrong.
        Closed: SlateDB opened the database for writing during the load.
        TransactionConflict: another process changed the schema during the load.

    """
    url, store = _address(target, store)
    extra = [order_by] if isinstance(order_by, str) else list(order_by)
    if mode not in ("append", "overwrite"):
        raise InvalidRequest(f"mode is 'append' or 'overwrite', not {mode!r}")
    wanted = {
        "store": store,
        "wal_store": wal_store,
        "key_column": key,
        "value_column": value,
        "duplicates": duplicates,
        "sorted": True,
        **options,
        **{f"store.{name}": given for name, given in (store_options or {}).items()},
    }
    if key_columns and (key, value) != ("key", "value"):
        raise InvalidRequest(
            "key_columns replace the columns of `key` and `value`; leave those arguments out"
        )
    texts = option_texts(wanted)
    options_of_load = parse_write_options({**texts, "path": url})
    missing = [name for name in extra if name not in df.columns]
    if missing:
        raise InvalidRequest(
            f"order_by names {missing[0]!r}, which is no column; there are {', '.join(df.columns)}"
        )
    # A client of Spark Connect may not reach the store: there the server compares rows as bytes with the schema.
    planned = options_of_load
    if getattr(df, "_jdf", None) is not None or key_columns or not {key, value} <= set(df.columns):
        chosen = None if value_columns is None else tuple(value_columns)
        given = RowMapping(tuple(key_columns), chosen, value_format or "row") if key_columns else None
        planned = plan_load(
            replace(options_of_load, row_mapping=given),
            df.schema,
            order_by=extra,
            value_columns=value_columns,
            value_format=value_format,
            replaces_all=mode == "overwrite",
        )
        if planned.row_mapping is None:
            texts["raw"] = "true"
    if planned.row_mapping is not None:
        df = _encoded(df, planned.row_mapping, extra)
        if planned.planned_schema is not None:
            texts["schema.commit"] = planned.planned_schema.to_text()
    kept = df.drop(*(name for name in extra if name not in (key, value, *CARRIED)))
    check_write_schema(kept.schema, key=key, value=value)
    rows = df.withColumn(key, F.col(key).cast("binary"))
    if not presorted:
        rows = sort_by_key(rows, key, extra, partitions)
    rows = rows.select(*kept.columns)
    register(df.sparkSession)
    name, started = DatabaseAddress(url).name, SYSTEM_CLOCK.monotonic()
    with tempfile.TemporaryDirectory(prefix="flagstone-load-") as folder:
        receipt = Path(folder) / "receipt.json"
        writer = rows.write.format("flagstone").mode(mode).options(**texts).option("receipt", str(receipt))
        try:
            with described(df.sparkSession, f"load {name}"):
                writer.save(url)
        except PySparkException as error:
            cause = find_cause(str(error))
            if cause is None:
                raise
            raise cause from error
        report = read_report(receipt)
    if report is None:
        return None
    if isinstance(target, Db):
        _await_visible(target, report)
    report = replace(report, seconds=SYSTEM_CLOCK.monotonic() - started)
    log_done(
        "loaded",
        database=name,
        tables=report.tables,
        seq=report.seq,
        rows=report.rows,
        bytes=report.bytes,
        seconds=report.seconds,
    )
    return report


def _address(target: str | os.PathLike[str] | Db, store: str | None) -> tuple[str, str | None]:
    """The path and the store of the target, as executors can use them."""
    if not isinstance(target, Db):
        return os.fspath(target), store
    status = target.status()
    if status["store"].startswith("memory://"):
        raise InvalidRequest(
            "the database is in the memory of this process, where executors cannot write; use a folder or a bucket"
        )
    return status["path"], store or status["store"]


def _await_visible(db: Db, report: LoadReport) -> None:
    """Wait until the writer in this process shows the load, which is in the manifest, to its own readers."""
    deadline = SYSTEM_CLOCK.monotonic() + _SHOWN_WITHIN_S
    while report.tables and db.status()["committed_seq"] < report.seq and SYSTEM_CLOCK.monotonic() < deadline:
        SYSTEM_CLOCK.sleep(_POLL_S)


def _encoded(df: DataFrame, row_mapping: RowMapping, extra: Sequence[str]) -> DataFrame:
    """The frame with its columns encoded into `key` and `value`; `op`, `ttl_ms`, `expires_ms` and `extra` stay."""
    besides = [name for name in dict.fromkeys((*CARRIED, *extra)) if name in df.columns]
    clash = [name for name in besides if name in ("key", "value")]
    if clash:
        raise InvalidRequest(
            f"order_by names {clash[0]!r}, which the encoded rows use themselves; rename that column"
        )
    fields = [
        StructField("key", BinaryType(), nullable=False),
        StructField("value", BinaryType(), nullable=False),
    ]
    schema = StructType([*fields, *(df.schema[name] for name in besides)])

    def encode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for plain in batches:
            batch = pa.RecordBatch.from_arrays(plain.columns, names=names)
            made = row_mapping.encode(batch)
            columns = {name: batch.column(name) for name in besides}
            columns |= {"key": made.column("key"), "value": made.column("value")}
            yield pa.RecordBatch.from_arrays(
                [columns[field.name] for field in schema], names=schema.fieldNames()
            )

    # Spark would take a dot in a name for a field of a struct.
    names = df.columns
    return df.toDF(*(f"c{at}" for at in range(len(names)))).mapInArrow(encode, schema)


PART_BYTES: Final = 64 * 1024 * 1024
"""The size to which Spark coalesces the partitions of a shuffle."""

_SMALLEST_PART: Final = 1024 * 1024
_KEEP_SIZE: Final = frozenset(
    {
        "InMemoryRelation", "LocalRelation", "LogicalRelation", "Project", "Range", "Repartition",
        "RepartitionByExpression", "Sort", "Union",
    }
)  # fmt: skip
"""Steps of a plan with a known output size. The size after a filter, join or group is a guess."""


def sort_by_key(rows: DataFrame, key: str, order_by: Sequence[str], partitions: int | None) -> DataFrame:
    """The rows partitioned by key range, each partition sorted by key and then by the columns `order_by`.

    Spark splits a shuffle into 200 partitions if it does not know the size, and coalesces them afterwards. For a small
    load that is a fifth of the work, so this function computes the number of partitions if the size is known.
    """
    wanted = partitions or known_partitions(rows)
    ranged = rows.repartitionByRange(wanted, key) if wanted else rows.repartitionByRange(key)
    return ranged.sortWithinPartitions(key, *(column_of(name) for name in order_by))


def column_of(name: str) -> Column:
    """The column with that name, which may have dots."""
    return F.col("`" + name.replace("`", "``") + "`")


def known_partitions(rows: DataFrame) -> int | None:
    """The number of partitions for the rows; None if their size is unknown, or if Spark's default is not larger."""
    frame: Any = getattr(rows, "_jdf", None)  # Spark Connect has none: the plan is on the server
    if frame is None:
        return None
    plan = frame.queryExecution().optimizedPlan()
    if not _keeps_size(plan):
        return None
    spark = rows.sparkSession
    return plan_parts(
        int(str(plan.stats().sizeInBytes())),
        cores=spark.sparkContext.defaultParallelism,
        most=int(spark.conf.get("spark.sql.shuffle.partitions") or 0),
    )


def plan_parts(size: int, *, cores: int, most: int) -> int | None:
    """Partitions of about `PART_BYTES`, or smaller ones to use all cores; None for `most` or more. Pure."""
    parts = max(-(-size // PART_BYTES), min(cores, -(-size // _SMALLEST_PART)), 1)
    return parts if parts < most else None


def _keeps_size(plan: Any) -> bool:
    if plan.nodeName() not in _KEEP_SIZE:
        return False
    children = plan.children()
    return all(_keeps_size(children.apply(at)) for at in range(children.size()))
