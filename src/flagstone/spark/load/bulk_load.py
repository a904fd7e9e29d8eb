"""`bulk_load`: a DataFrame, in whatever order, into a database with one commit."""

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
from flagstone.spark.load.plan import LoadReport, read_receipt
from flagstone.spark.options import option_texts, parse_write_options
from flagstone.spark.row_mapping import CARRIED, RowMapping, check_write_schema
from flagstone.spark.sessions import register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SHOWN_WITHIN_S: Final = 10.0
_LOOK_S: Final = 0.01


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
    value_format: Literal["row", "json"] = "row",
    mode: Literal["append", "overwrite"] = "append",
    partitions: int | None = None,
    order_by: str | Sequence[str] = (),
    duplicates: Literal["last", "error"] = "last",
    presorted: bool = False,
    **options: Any,
) -> LoadReport | None:
    """Load all rows of `df` with one commit: either every row becomes visible or none, later than all before.

    Columns are `key` and `value` (binary, or string as UTF-8), and if you like `op` (put, delete, merge), and `ttl_ms`
    or `expires_ms`. Of several rows of one key the last in the order of the columns `order_by` is loaded, without them
    any one; with duplicates="error" the load fails. `presorted` skips partitioning and sorting by key; tasks check the
    order. `partitions` is the number of tasks; without it Spark sizes them. Other options are those of docs/spark.md.

    With `key_columns` rows are ordinary ones: these columns make the key, `value_columns` (by default all others but
    `op`, `ttl_ms` and `expires_ms`) the value, in `value_format`. See docs/keys.md for what becomes of them.

    `target` is the address of the database, or the database itself, open in this process. It is created if there is
    none. A writer of ours that has it open, here or elsewhere, takes the rows in and goes on; one of SlateDB's is
    fenced and must be opened again afterwards. After an error or a crash nothing is visible, and nothing is left that
    garbage collection does not remove. `df` is evaluated twice, for its key ranges and for its rows: cache a dear one.

    Returns what was loaded; None when the driver runs on another machine (Spark Connect), where nothing comes back.

    Raises:
        InvalidRequest: columns, types, nulls, order or options are wrong.
        Closed: SlateDB opened the database for writing meanwhile.

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
        raise InvalidRequest("with key_columns, rows have no `key` and `value` of their own; leave those out")
    texts = option_texts(wanted)
    parse_write_options({**texts, "path": url})
    missing = [name for name in extra if name not in df.columns]
    if missing:
        raise InvalidRequest(f"order_by names {missing[0]!r}; there are {', '.join(df.columns)}")
    if key_columns:
        row_mapping = RowMapping(
            tuple(key_columns), None if value_columns is None else tuple(value_columns), value_format
        )
        if value_columns is None:
            rows_schema = df.drop(*(name for name in extra if name not in (*key_columns, *CARRIED))).schema
        else:
            rows_schema = df.schema
        df = _encoded(df, row_mapping.for_writing(rows_schema), extra)
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
            told = find_cause(str(error))
            if told is None:
                raise
            raise told from error
        report = read_receipt(receipt)
    if report is None:
        return None
    if isinstance(target, Db):
        _await_shown(target, report)
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
    """Where the rows go, as executors can be told."""
    if not isinstance(target, Db):
        return os.fspath(target), store
    status = target.status()
    if status["store"].startswith("memory://"):
        raise InvalidRequest(
            "the database is in the memory of this process, where executors cannot write; use a folder or a bucket"
        )
    return status["path"], store or status["store"]


def _await_shown(db: Db, report: LoadReport) -> None:
    """The load is in the manifest; wait for the moment until the writer in this process shows it to its readers."""
    deadline = SYSTEM_CLOCK.monotonic() + _SHOWN_WITHIN_S
    while report.tables and db.status()["committed_seq"] < report.seq and SYSTEM_CLOCK.monotonic() < deadline:
        SYSTEM_CLOCK.sleep(_LOOK_S)


def _encoded(df: DataFrame, row_mapping: RowMapping, extra: Sequence[str]) -> DataFrame:
    """The frame with `key` and `value` made of its columns; those that a load needs besides stay."""
    besides = [name for name in dict.fromkeys((*CARRIED, *extra)) if name in df.columns]
    clash = [name for name in besides if name in ("key", "value")]
    if clash:
        raise InvalidRequest(
            f"order_by names {clash[0]!r}, which the encoded row needs for itself; rename that column"
        )
    fields = [
        StructField("key", BinaryType(), nullable=False),
        StructField("value", BinaryType(), nullable=False),
    ]
    schema = StructType([*fields, *(df.schema[name] for name in besides)])

    def encode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            made = row_mapping.encode(batch)
            columns = {name: batch.column(name) for name in besides}
            columns |= {"key": made.column("key"), "value": made.column("value")}
            yield pa.RecordBatch.from_arrays(
                [columns[field.name] for field in schema], names=schema.fieldNames()
            )

    return df.mapInArrow(encode, schema)


PART_BYTES: Final = 64 * 1024 * 1024
"""What Spark aims at when it puts parts of a shuffle together."""

_SMALLEST_PART: Final = 1024 * 1024
_KEEP_SIZE: Final = frozenset(
    {
        "InMemoryRelation", "LocalRelation", "LogicalRelation", "Project", "Range", "Repartition",
        "RepartitionByExpression", "Sort", "Union",
    }
)  # fmt: skip
"""Steps of a plan that know how much they give. What filters, joins or groups can only guess."""


def sort_by_key(rows: DataFrame, key: str, order_by: Sequence[str], partitions: int | None) -> DataFrame:
    """The rows in ranges of keys, each sorted by key and then by the columns `order_by`.

    Spark cuts a shuffle into 200 parts as long as it does not know its size, and puts them together afterwards. For a
    load that needs but a few that is a fifth of the work: where the size is known before, so is the number.
    """
    wanted = partitions or known_partitions(rows)
    ranged = rows.repartitionByRange(wanted, key) if wanted else rows.repartitionByRange(key)
    return ranged.sortWithinPartitions(key, *order_by)


def known_partitions(rows: DataFrame) -> int | None:
    """How many parts of the usual size the rows make; None when that is not known, or no fewer than Spark's own."""
    frame: Any = getattr(rows, "_jdf", None)  # there is none behind Spark Connect: the plan is elsewhere
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
    """As many parts as make each about `PART_BYTES`, or more where cores would idle; None from `most` on. Pure."""
    parts = max(-(-size // PART_BYTES), min(cores, -(-size // _SMALLEST_PART)), 1)
    return parts if parts < most else None


def _keeps_size(plan: Any) -> bool:
    if plan.nodeName() not in _KEEP_SIZE:
        return False
    children = plan.children()
    return all(_keeps_size(children.apply(at)) for at in range(children.size()))
