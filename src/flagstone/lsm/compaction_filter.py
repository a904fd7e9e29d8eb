"""Compaction filters: code of the user that drops or rewrites rows during a compaction.

    class DropDrafts:
        def __init__(self, job: CompactionJob) -> None:
            self.purge = job.is_last_run

        def filter(self, row: Row) -> Outcome:
            return Decision.TOMBSTONE if row.value.startswith(b"draft:") else Decision.KEEP

    flagstone.open(…, compaction_filter=DropDrafts)

A filter sees a row when a compaction merges its SST: at any time, perhaps never, perhaps twice. Use it for rows that
may go, not for rows that must go. Its decision should depend on the row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from flagstone.types import Row, RunId, Seq, Ulid


class Decision(Enum):
    """What the compaction does with a row."""

    KEEP = auto()
    """The row stays as it is."""
    TOMBSTONE = auto()
    """The key is deleted as of this row, and no older version reappears. The safe way to remove a row."""
    DROP = auto()
    """The row is removed without a tombstone. If an SST outside this job has an older version, that version becomes
    visible again; only `is_last_run`, or a key that is never overwritten, rules that out."""


@dataclass(frozen=True, slots=True)
class Replace:
    """The row gets another value; its sequence number and times do not change."""

    value: bytes


Outcome = Decision | Replace


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionJob:
    """The compaction job that a filter works for.

    `is_last_run`: no older data of these keys is below the output. `clock_ms` is the time that decides which rows have
    expired. Filters do not see rows newer than `min_seq`, because a snapshot may read them.
    """

    job_id: Ulid
    segment: bytes
    destination: RunId
    is_last_run: bool
    clock_ms: int
    min_seq: Seq


class CompactionFilter(Protocol):
    """Decides about rows in key order. One object serves one key range of one job, in one thread.

    It sees the values that retention keeps and that are not newer than any snapshot; it never sees tombstones. A filter
    may have one more method:

    ``filter_operand(row) -> Outcome``
        The same for merge operands whose base is not known yet. Without it operands are kept.

    If a method raises, the job fails and is tried again later; the message contains the key.
    """

    def filter(self, row: Row) -> Outcome:
        """What the compaction does with the value `row`."""
        ...


CompactionFilterFactory = Callable[[CompactionJob], CompactionFilter | None]
"""Makes the filter for one key range of a job; None filters nothing. Several threads may call it at once.
A class whose constructor takes the job is such a factory."""
