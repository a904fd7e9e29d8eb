"""What a consumer of changes reads next: WAL files, a bulk load, or nothing yet. Pure.

`WalReader.follow` and Spark's change stream decide by `plan_step`. A load is placed by its sequence number where the
rows of the next WAL file are known, and by its WAL file where they are not. A gap in the sequence numbers that no load
fills is an error, because a copy of the database would lack the rows of the gap.
"""

from __future__ import annotations

from typing import NamedTuple

from flagstone.errors import InvalidRequest
from flagstone.loads.edit import VisibleLoad
from flagstone.metadata.annotations import Position
from flagstone.types import WalId


class ChangesMissing(InvalidRequest):
    """The changes at a position cannot be delivered: rows were replaced, or came without the WAL."""


class ReadLoad(NamedTuple):
    """The bulk load comes next."""

    load: VisibleLoad


class ReadFiles(NamedTuple):
    """The WAL files from the position up to, not including, `stop` come next."""

    stop: WalId


def may_follow_load(at: Position, first_seq: int) -> bool:
    """Whether a bulk load may stand between the position and a row with that sequence number."""
    return first_seq > at.after_seq + 1


def plan_step(
    at: Position,
    load: VisibleLoad | None,
    *,
    stop: WalId,
    first_seq: int | None = None,
    allow_gaps: bool = False,
) -> ReadLoad | ReadFiles | None:
    """What comes next at a position; None when nothing is there yet.

    `load` is the first load that the consumer has not passed, in a manifest that was read after the WAL files were
    found: a load that came before one of these files is in it. `stop` is the end of the files that follow the position
    without a hole; `at.next_id` when there are none. `first_seq` is the first new sequence number in the next file,
    where the caller has read it.

    Raises:
        ChangesMissing: there is a gap, or the load replaced everything, unless `allow_gaps`.

    """
    if load is not None and (
        load.position.wal_id < at.next_id if first_seq is None else load.seq < first_seq
    ):
        if not allow_gaps:
            check_deliverable(load, at.after_seq)
        return ReadLoad(load)
    if stop <= at.next_id:
        return None
    if first_seq is not None:
        if not allow_gaps:
            check_gapless(at.after_seq, first_seq)
    elif load is not None:
        stop = min(stop, WalId(load.position.wal_id + 1))
    return ReadFiles(stop)


def check_deliverable(load: VisibleLoad, after_seq: int) -> None:
    """Raise unless the load can come next for a consumer that has everything up to `after_seq`."""
    if load.replaces:
        raise ChangesMissing(
            f"a bulk load with the sequence number {load.seq} has replaced everything that was in the database, which "
            "cannot be delivered as changes; start over with a copy of the database"
        )
    check_gapless(after_seq, load.position.seq + 1)


def check_gapless(seen_seq: int, first_seq: int) -> None:
    """Raise if sequence numbers between the two are missing: their rows are not in the WAL."""
    if 0 < seen_seq < first_seq - 1:
        raise ChangesMissing(
            f"sequence numbers {seen_seq + 1} to {first_seq - 1} are not in the WAL: rows came from a writer without a "
            "WAL, or by a bulk load that replaced everything or was not kept for this consumer, or an older state was "
            "restored; start over with a copy of the database (where writers choose sequence numbers themselves, "
            "follow with allow_gaps)"
        )
