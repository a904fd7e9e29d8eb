"""A stream into an open database: each micro-batch is one write, together with the progress row of the query."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from math import floor
from typing import TYPE_CHECKING, Any, Final, Literal

import pyarrow as pa

from flagstone.db.writer.database import Db
from flagstone.db.writer.transaction import Transaction
from flagstone.errors import InvalidRequest, TransactionConflict
from flagstone.lsm.system_rows import is_system
from flagstone.schema import GivenColumns, TableWriter, given_columns, plan_evolution
from flagstone.spark.row_mapping import (
    CARRIED,
    RowMapping,
    arrow_schema,
    check_carried,
    check_write_schema,
    deletions,
    stored_names,
)
from flagstone.spark.stored_schema import structured_mapping
from flagstone.spark.stream.stream_progress import (
    PROGRESS_PREFIX,
    QUERY_ID,
    StreamProgress,
    is_written,
    progress_key,
)
from flagstone.write.batch import WriteBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["PROGRESS_PREFIX", "foreach_batch"]

_ATTEMPTS: Final = 10
"""How often a micro-batch is encoded again because another write changed the schema meanwhile."""


def foreach_batch(
    db: Db,
    query: str,
    *,
    mark_prefix: bytes = PROGRESS_PREFIX,
    key: str = "key",
    value: str = "value",
    key_columns: Sequence[str] = (),
    value_columns: Sequence[str] | None = None,
    value_format: Literal["row", "json"] | None = None,
    raw: bool = False,
) -> Callable[[DataFrame, int], None]:
    """A function for `df.writeStream.foreachBatch(...)` that writes a stream into `db`, each micro-batch exactly once.

    Columns are those of a bulk load: key, value, and optionally op, ttl_ms or expires_ms; or with `key_columns`, or
    into a database that stores a schema, structured rows, which must fit the schema. One write holds the rows of
    a micro-batch, the progress row, whose key is `mark_prefix` and the name of the query, and the schema if it changes.
    If Spark repeats a batch after a crash, the progress row shows that it was written. Each batch is collected in this
    process: keep it small with the limits of its source. The last of several rows of one key is kept; merges are folded
    with the operator of the database. A batch without rows writes nothing, unless its columns change the schema.

    Use one name per query, and a new name for a query that starts over with an empty Spark checkpoint. A query that
    finds the progress row of another query fails with `InvalidRequest`.
    """
    if not query:
        raise InvalidRequest("a stream needs a name, under which the database stores its progress")
    progress_row = progress_key(query, mark_prefix)
    given = None
    if key_columns:
        chosen = None if value_columns is None else tuple(value_columns)
        given = RowMapping(tuple(key_columns), chosen, value_format or "row")

    def write(frame: DataFrame, batch_id: int) -> None:
        progress = StreamProgress(batch_id, frame.sparkSession.sparkContext.getLocalProperty(QUERY_ID))
        if is_written(db.get(progress_row), progress, progress_row):
            # Written, but maybe not durable yet: an earlier attempt may have failed while it waited for the WAL.
            db._engine.flush_wal()  # noqa: SLF001 - `flush("wal")` refuses a database without a WAL
            return
        mapping = None
        if not raw:
            mapping = structured_mapping(
                db.schema(),
                frame.schema,
                given,
                key=key,
                value=value,
                value_columns=value_columns,
                value_format=value_format,
            )
        if mapping is None:
            check_write_schema(frame.schema, key=key, value=value)
            batch = WriteBatch()
            for rows in frame.toArrow().to_batches():
                _add(batch, rows.to_pydict(), key, value)
            if len(batch):
                _put(batch, progress_row, progress.encode())
                db.write(batch, await_durable=True)
            return
        stored = db.schema()
        check_carried(frame.schema, () if stored is None else stored_names(stored))
        mapping = mapping.for_writing(frame.schema)
        batches = [rows for rows in frame.toArrow().to_batches() if rows.num_rows]
        given_now = _given(mapping, arrow_schema(frame.schema))
        left = _ATTEMPTS if batches or plan_evolution(stored, given_now).changed else 0
        while left:
            left -= 1
            try:
                with db.transaction() as transaction:
                    encode = _encoder(transaction, given_now)
                    for rows in batches:
                        _add(transaction, encode(rows).to_pydict(), "key", "value")
                    _put(transaction, progress_row, progress.encode())
                    transaction.commit(await_durable=True)
                left = 0
            except TransactionConflict:
                if not left:
                    raise

    return write


def _given(mapping: RowMapping, types: pa.Schema) -> GivenColumns:
    return given_columns(
        types,
        mapping.key_columns,
        value_columns=mapping.value_columns,
        value_format=mapping.value_format,
        nullable=True,
    )


def _encoder(transaction: Transaction, given: GivenColumns) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """From a batch of the frame to one of rows. The transaction stores the schema if the rows need another one."""
    planned = transaction.ensure_schema(given)
    writer = TableWriter(planned.schema, planned.version)

    def encode(batch: pa.RecordBatch) -> pa.RecordBatch:
        encoded = dict(
            zip(("key", "value"), writer.encode_arrow(batch, deleted=deletions(batch)), strict=True)
        )
        encoded |= {name: batch.column(name) for name in CARRIED if name in batch.schema.names}
        return pa.RecordBatch.from_pydict(encoded)

    return encode


def _put(rows: WriteBatch | Transaction, key: bytes, value: bytes) -> None:
    if is_system(key):
        rows.put_system(key, value)
    else:
        rows.put(key, value)


def _add(rows: WriteBatch | Transaction, cells: dict[str, list[Any]], key: str, value: str) -> None:
    count = len(cells[key])
    nothing: list[Any] = [None] * count
    for row_key, row_value, op, ttl_ms, expires_ms in zip(
        cells[key],
        cells[value],
        cells.get("op", nothing),
        cells.get("ttl_ms", nothing),
        cells.get("expires_ms", nothing),
        strict=True,
    ):
        if row_key is None or (row_value is None and (op or "").lower() != "delete"):
            raise InvalidRequest(
                f"a row of the stream has no key or no value: {row_key!r}, {row_value!r}; drop it, or fill it in"
            )
        name = _bytes(row_key)
        ttl = None if ttl_ms is None else timedelta(milliseconds=ttl_ms)
        expires_at = floor(expires_ms.timestamp() * 1000) if isinstance(expires_ms, datetime) else expires_ms
        match None if op is None else op.lower():
            case None | "put":
                rows.put(name, _bytes(row_value), ttl=ttl, expire_at=expires_at)
            case "delete":
                rows.delete(name)
            case "merge":
                rows.merge(name, _bytes(row_value), ttl=ttl, expire_at=expires_at)
            case _:
                raise InvalidRequest(f"column 'op' has {op!r}; it is put, delete or merge")
        if isinstance(rows, Transaction):
            rows.unmark_write(name)  # the newest row counts, also over a write since the transaction began


def _bytes(cell: str | bytes) -> bytes:
    return cell.encode() if isinstance(cell, str) else bytes(cell)
