"""The progress row of a query that writes into a database: the id of its last micro-batch.

The same commit writes the progress row and the rows of the batch: the database has both or neither. Spark repeats a
batch, with the same id, when it does not know whether the batch was written. The progress row shows whether it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.lsm.system_rows import STREAM_PREFIX

PROGRESS_PREFIX: Final = STREAM_PREFIX
"""The default key prefix of progress rows, which makes them system rows. Under another prefix reads show them."""

QUERY_ID: Final = "sql.streaming.queryId"
"""The property with the id of the query in Spark's tasks. Spark stores the id in the checkpoint of the query."""


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """The last micro-batch of a query; stored as `17` or `17 ID`.

    `query_id` comes from Spark. A query that starts over with an empty Spark checkpoint gets another id, and numbers
    its batches from 0 again.
    """

    batch_id: int
    query_id: str | None = None

    def encode(self) -> bytes:
        return f"{self.batch_id} {self.query_id or ''}".rstrip().encode()

    @classmethod
    def decode(cls, stored: bytes, key: bytes) -> StreamProgress:
        batch_id, _, query_id = stored.partition(b" ")
        if not batch_id.isdigit():
            raise CorruptData(
                f"the row {key!r} holds {stored!r}, not the number of a micro-batch: it was not written by a stream. "
                "Delete it only if no query continues from it"
            )
        return cls(int(batch_id), query_id.decode() or None)


def progress_key(query: str, prefix: bytes = PROGRESS_PREFIX) -> bytes:
    """The key of the progress row of a query."""
    return prefix + query.encode()


def is_written(stored: bytes | None, progress: StreamProgress, key: bytes) -> bool:
    """Whether the progress row `key` with the value `stored` shows that the batch was written before. Pure.

    Raises:
        InvalidRequest: the row belongs to another query with the same name.
        CorruptData: the row is not a progress row.

    """
    if stored is None:
        return False
    last = StreamProgress.decode(stored, key)
    if None not in (last.query_id, progress.query_id) and last.query_id != progress.query_id:
        # Batches of the new query would count as written, and their rows would be lost without an error.
        raise InvalidRequest(
            f"the database has batch {last.batch_id} of another query under the same name ({key!r}): Spark's id of "
            f"that query is {last.query_id}, of this one {progress.query_id}. Give each query its own name, and a new "
            "name to a query that starts over with an empty Spark checkpoint"
        )
    return last.batch_id >= progress.batch_id
