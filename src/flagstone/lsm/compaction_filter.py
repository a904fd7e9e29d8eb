"""Compaction filters: rows dropped or rewritten by the user's own rule while SSTs are merged anyway.

    class DropDrafts:
        def __init__(self, job: CompactionJob) -> None:
            self.purge = job.is_last_run

        def filter(self, row: Row) -> Outcome:
            return Decision.TOMBSTONE if row.value.startswith(b"draft:") else Decision.KEEP

    flagstone.open(…, compaction_filter=DropDrafts)

A filter sees a row when compaction happens to pass by: at some time, perhaps never, perhaps twice. It is for data
that may go, not for data that must; and what it decides should follow from the row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from flagstone.types import Row, RunId, Seq, Ulid


class Decision(Enum):
    """What becomes of a row."""

    KEEP = auto()
    """It stays as it is."""
    TOMBSTONE = auto()
    """The key is deleted as of this row: nothing older comes back. The safe way to remove a row."""
    DROP = auto()
    """The row vanishes without a trace. An older version that lies in an SST outside this job, if there is one,
    becomes visible again; only `is_last_run` and a key that is never overwritten rule that out."""


@dataclass(frozen=True, slots=True)
class Replace:
    """The row stays, with another value; its sequence number and times do not change."""

    value: bytes


Outcome = Decision | Replace


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionJob:
    """What a filter may want to know of the job it works for.

    `is_last_run`: no older data of these keys lies below the output. `clock_ms` is the time rows expire by.
    Rows newer than `min_seq` may be wanted by a snapshot and are not shown to filters.
    """

    job_id: Ulid
    segment: bytes
    destination: RunId
    is_last_run: bool
    clock_ms: int
    min_seq: Seq


class CompactionFilter(Protocol):
    """Decides about rows in key order. One object serves one key range of one job, in one thread.

    It is asked about values that retention has kept and that are not newer than any snapshot; never about
    tombstones. One more method is used when a filter has it:

    ``filter_operand(row) -> Outcome``
        The same for merge operands that have met no base yet. Without it operands are kept.

    A method that raises fails the job, which is tried again later; the message carries the key.
    """

    def filter(self, row: Row) -> Outcome:
        """What becomes of the value `row`."""
        ...


CompactionFilterFactory = Callable[[CompactionJob], CompactionFilter | None]
"""Makes the filter for one key range of a job, possibly in several threads at once; None filters nothing.
A class whose constructor takes the job is such a factory."""
