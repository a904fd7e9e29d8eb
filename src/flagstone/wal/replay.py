"""What the log says beyond the tables: its rows, file by file, in the order they were committed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flagstone.errors import CorruptData, Unavailable
from flagstone.kernels import block_reader
from flagstone.runtime.pool import IoPool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import EntryTuple, WalId
from flagstone.wal.continuity import check_step
from flagstone.wal.encoding import decode_wal
from flagstone.wal.fetching import DEFAULT_BYTES_IN_FLIGHT, DEFAULT_PARALLELISM, fetch_in_order


class WalTruncated(Unavailable):
    """A file of the log vanished while it was being replayed: read the manifest again and start over.

    Files are removed only after their rows are in tables, so the manifest that asked for this one is out of date.
    If a fresh manifest asks for it too, the log has a hole, and `verify` names it.
    """


class ReplayedFile(NamedTuple):
    """The rows of one WAL file that are not in the tables yet; `size` is that of the stored file."""

    wal_id: WalId
    rows: list[EntryTuple]
    size: int


class Replayed:
    """How far a WAL was replayed: the last sequence number, its file, and the empty files since."""

    def __init__(self) -> None:
        self.last_seq: int = -1
        self.last_id: WalId = WalId(0)
        self.empty: list[WalId] = []


def replay(
    wal_store: ObjectStore,
    paths: DbPaths,
    after: WalId,
    last: WalId,
    *,
    skip_through_seq: int = 0,
    writers: int | None = None,
    before: Replayed | None = None,
    pool: IoPool | None = None,
    parallelism: int = DEFAULT_PARALLELISM,
    max_bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
) -> Iterator[ReplayedFile]:
    """Every file above `after` up to and including `last`, in order; fences come as files without rows.

    Rows up to `skip_through_seq` are left out: the log usually overlaps the tables by a file. `writers` is how many
    have claimed the database and may have left a fence up to `last`; with it, numbers that an emptied file has lost are
    noticed. `before` is what was replayed up to `after`, and is brought up to date file by file. Reads only, so
    a crash halfway changes nothing. Memory is bounded by `max_bytes_in_flight` for what is read ahead, plus the
    rows of the file in hand.

    Raises:
        WalTruncated: a file has vanished. A writer must first look whether it was replaced.
        WalDamaged: sequence numbers are missing. It may be that the manifest is out of date.
        CorruptData: a file is damaged, or begins before the one in front of it ended; names the object.

    """
    wal_ids = (WalId(wal_id) for wal_id in range(after + 1, last + 1))
    fetched = fetch_in_order(
        wal_store,
        paths,
        wal_ids,
        pool=pool,
        parallelism=parallelism,
        max_bytes_in_flight=max_bytes_in_flight,
    )
    done = before or Replayed()
    for wal_id, stored in fetched:
        path = paths.wal(wal_id)
        if stored is None:
            raise WalTruncated(
                f"{path} has vanished from {wal_store.url}, but the log is to be replayed up to {last}; read the "
                "manifest again and start over, and if the file is still missing, verify the database"
            )
        rows = decode_wal(stored, path)
        if not stored:
            done.empty.append(wal_id)
        if rows:
            first, newest = block_reader.seq_range(rows)
            if first <= done.last_seq:
                raise CorruptData(
                    f"out-of-order sequence numbers across WAL files: {first} after {done.last_seq} in file "
                    f"{done.last_id}",
                    object=path,
                )
            if done.empty and writers is not None:
                check_step(
                    wal_store,
                    paths,
                    done.empty,
                    seen_seq=max(done.last_seq, skip_through_seq),
                    first_seq=first,
                    end=last,
                    writers=writers,
                )
            done.last_seq, done.last_id, done.empty = newest, wal_id, []
            if first <= skip_through_seq:
                rows = [row for row in rows if row[1] > skip_through_seq]
        yield ReplayedFile(wal_id, rows, len(stored))
