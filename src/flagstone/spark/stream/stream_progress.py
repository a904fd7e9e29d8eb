"""What a database remembers of the streams that are written into it: of every query its last micro-batch.

That is a row of the database, written together with the rows of the batch: either both are there or neither. Spark
repeats a batch, under the same number, whenever it is not certain that it was written; the mark makes it certain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from flagstone.errors import CorruptData, InvalidRequest

MARK_PREFIX: Final = b"\x00flagstone/stream/"
"""Where the marks are, unless the caller says otherwise: before all keys that people read."""

QUERY_ID: Final = "sql.streaming.queryId"
"""The property under which Spark tells its tasks the id of their query. It is kept with the query's checkpoint."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The last micro-batch of a query, as text `17` or `17 ID`.

    `query_id` is Spark's: a query that begins anew, with an empty Spark checkpoint, has another one, and counts its
    batches from 0 again.
    """

    batch_id: int
    query_id: str | None = None

    def encode(self) -> bytes:
        return f"{self.batch_id} {self.query_id or ''}".rstrip().encode()

    @classmethod
    def decode(cls, stored: bytes, key: bytes) -> Mark:
        number, _, query_id = stored.partition(b" ")
        if not number.isdigit():
            raise CorruptData(
                f"the row {key!r} holds {stored!r}, not the number of a micro-batch: something else than a stream "
                "wrote it. Delete it only if no query goes on from there"
            )
        return cls(int(number), query_id.decode() or None)


def mark_key(query: str, prefix: bytes = MARK_PREFIX) -> bytes:
    """The row of a query."""
    return prefix + query.encode()


def is_written(stored: bytes | None, mark: Mark, key: bytes) -> bool:
    """Whether the row `key`, of which the database has `stored`, says that the batch of `mark` is there already. Pure.

    Raises:
        InvalidRequest: the row is that of another query with the same name.

    """
    if stored is None:
        return False
    last = Mark.decode(stored, key)
    if None not in (last.query_id, mark.query_id) and last.query_id != mark.query_id:
        # It would be taken for batches that were written, and rows would be lost without a word.
        raise InvalidRequest(
            f"the database remembers batch {last.batch_id} of another query under the same name ({key!r}): that is "
            f"{last.query_id} for Spark, and this is {mark.query_id}. Give the query a name of its own, also when it "
            "begins anew with an empty Spark checkpoint"
        )
    return last.batch_id >= mark.batch_id
