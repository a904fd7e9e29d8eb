"""A stream into an open database: each micro-batch is one write, together with the mark that it was written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flagstone.db.writer.database import Db
from flagstone.errors import InvalidRequest
from flagstone.spark.row_mapping import check_write_schema
from flagstone.spark.stream.stream_progress import MARK_PREFIX, QUERY_ID, Mark, is_written, mark_key
from flagstone.write.batch import WriteBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["MARK_PREFIX", "foreach_batch"]


def foreach_batch(
    db: Db, query: str, *, mark_prefix: bytes = MARK_PREFIX, key: str = "key", value: str = "value"
) -> Callable[[DataFrame, int], None]:
    """What `df.writeStream.foreachBatch(...)` takes to write a stream into `db`, every micro-batch exactly once.

    Rows are those of a bulk load: key, value, and if you like op, ttl_ms or expires_ms. The rows of a micro-batch and
    the mark, a row under `mark_prefix` and the name of the query, are one write: after a crash, or when Spark repeats
    a batch, the mark says that it is there. A batch is collected in this process, so keep it small with the limits of
    its source. Of several rows of one key the last counts; merges are folded with the operator of the database. A batch
    without rows writes nothing.

    Use one name per query, and another one when it begins anew with an empty Spark checkpoint; a query that finds the
    mark of another one fails with `InvalidRequest`.
    """
    if not query:
        raise InvalidRequest(
            "a stream needs a name, under which the database remembers what was written of it"
        )
    row = mark_key(query, mark_prefix)

    def write(frame: DataFrame, batch_id: int) -> None:
        check_write_schema(frame.schema, key=key, value=value)
        mark = Mark(batch_id, frame.sparkSession.sparkContext.getLocalProperty(QUERY_ID))
        if is_written(db.get(row), mark, row):
            # Written, but maybe not yet durable: an earlier attempt may have failed while it waited for that.
            db._engine.flush_wal()  # noqa: SLF001 - `flush("wal")` refuses a database without a WAL
            return
        batch = WriteBatch()
        for rows in frame.toArrow().to_batches():
            _add(batch, rows.to_pydict(), key, value)
        if len(batch):
            batch.put(row, mark.encode())
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
        if row_key is None or (row_value is None and op != "delete"):
            raise InvalidRequest(
                f"a row of the stream lacks its key or its value: {row_key!r}, {row_value!r}"
            )
        name = _bytes(row_key)
        match op:
            case None | "put":
                batch.put(name, _bytes(row_value), ttl=ttl_ms, expire_at=expires_ms)
            case "delete":
                batch.delete(name)
            case "merge":
                batch.merge(name, _bytes(row_value), ttl=ttl_ms, expire_at=expires_ms)
            case _:
                raise InvalidRequest(f"column 'op' has {op!r}; it is put, delete or merge")


def _bytes(cell: str | bytes) -> bytes:
    return cell.encode() if isinstance(cell, str) else bytes(cell)
