"""A stream into an open database: each micro-batch is one write, together with the progress row of the query."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from math import floor
from typing import TYPE_CHECKING, Any

from flagstone.db.writer.database import Db
from flagstone.errors import InvalidRequest
from flagstone.spark.row_mapping import check_write_schema
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


def foreach_batch(
    db: Db, query: str, *, mark_prefix: bytes = PROGRESS_PREFIX, key: str = "key", value: str = "value"
) -> Callable[[DataFrame, int], None]:
    """A function for `df.writeStream.foreachBatch(...)` that writes a stream into `db`, each micro-batch exactly once.

    Columns are those of a bulk load: key, value, and optionally op, ttl_ms or expires_ms. One write holds the rows of a
    micro-batch and the progress row, whose key is `mark_prefix` and the name of the query. If Spark repeats a batch
    after a crash, the progress row shows that it was written. Each batch is collected in this process: keep it small
    with the limits of its source. The last of several rows of one key is kept; merges are folded with the operator of
    the database. A batch without rows writes nothing.

    Use one name per query, and a new name for a query that starts over with an empty Spark checkpoint. A query that
    finds the progress row of another query fails with `InvalidRequest`.
    """
    if not query:
        raise InvalidRequest("a stream needs a name, under which the database stores its progress")
    progress_row = progress_key(query, mark_prefix)

    def write(frame: DataFrame, batch_id: int) -> None:
        check_write_schema(frame.schema, key=key, value=value)
        progress = StreamProgress(batch_id, frame.sparkSession.sparkContext.getLocalProperty(QUERY_ID))
        if is_written(db.get(progress_row), progress, progress_row):
            # Written, but maybe not durable yet: an earlier attempt may have failed while it waited for the WAL.
            db._engine.flush_wal()  # noqa: SLF001 - `flush("wal")` refuses a database without a WAL
            return
        batch = WriteBatch()
        for rows in frame.toArrow().to_batches():
            _add(batch, rows.to_pydict(), key, value)
        if len(batch):
            batch.put(progress_row, progress.encode())
            db.write(batch, await_durable=True)

    return write


def _add(batch: WriteBatch, cells: dict[str, list[Any]], key: str, value: str) -> None:
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
        expires_at = floor(expires_ms.timestamp() * 1000) if isinstance(expires_ms, datetime) else expires_ms
        match None if op is None else op.lower():
            case None | "put":
                batch.put(name, _bytes(row_value), ttl=ttl_ms, expire_at=expires_at)
            case "delete":
                batch.delete(name)
            case "merge":
                batch.merge(name, _bytes(row_value), ttl=ttl_ms, expire_at=expires_at)
            case _:
                raise InvalidRequest(f"column 'op' has {op!r}; it is put, delete or merge")


def _bytes(cell: str | bytes) -> bytes:
    return cell.encode() if isinstance(cell, str) else bytes(cell)
