"""Changes as consumers see them, and the WAL files they are read from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from flagstone.errors import InvalidRequest
from flagstone.loads.edit import VisibleLoad
from flagstone.lsm.system_rows import is_system
from flagstone.metadata.annotations import UNKNOWN_SEQ, Position
from flagstone.metadata.manifest import NO_WAL, Manifest
from flagstone.metadata.parallel_wal import allowed_hole, settled_end
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.pool import IoPool, shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, WalId
from flagstone.wal.frontier import check_step
from flagstone.wal.replay import FetchedWal, WalRows, decode_wal, fetch_in_order, open_wal

Operation = Literal["put", "delete", "merge", "delete_range"]

_OPERATIONS: Final[dict[int, Operation]] = {VALUE: "put", TOMBSTONE: "delete", MERGE: "merge"}


class Change(NamedTuple):
    """One changed row. `value` is the operand of a merge and None for a delete; times are milliseconds.

    `wal_id` is the WAL file of the row; None for a row of a bulk load.

    With `op="delete_range"` all keys from `key` up to `value`, exclusive, were deleted: `key` is b"" for the first key,
    `value` is None if the range has no end.
    """

    op: Operation
    key: bytes
    value: bytes | None
    seq: int
    created_ms: int | None
    expires_ms: int | None
    wal_id: WalId | None


class ChangeBatch(NamedTuple):
    """The changes of one WAL file, in commit order: all of them were committed, or none. Or, without a `wal_id`, rows
    of a bulk load in key order; the next batch may bring more rows of the same load. Or a range delete alone.

    `position` is where to continue after these changes: what a consumer stores.
    """

    wal_id: WalId | None
    changes: list[Change]
    position: Position

    @property
    def next_id(self) -> WalId:
        """The WAL file that comes next."""
        return self.position.next_id


def without_system(batch: ChangeBatch) -> ChangeBatch:
    """The batch without the changes of system rows. Its position counts them, so no sequence number seems missing."""
    if not any(is_system(change.key) for change in batch.changes):
        return batch
    return batch._replace(changes=[change for change in batch.changes if not is_system(change.key)])


class WalFile(NamedTuple):
    """A WAL file as a listing shows it; an empty one is a fence."""

    wal_id: WalId
    size: int
    last_modified_ms: int


def change_of(row: EntryTuple, wal_id: WalId | None) -> Change:
    """A stored row as a change."""
    key, seq, kind, value, created_ms, expires_ms = row
    return Change(
        _OPERATIONS[kind], key, None if kind == TOMBSTONE else value, seq, created_ms, expires_ms, wal_id
    )


def changes_of_range(load: VisibleLoad) -> list[Change]:
    """A range delete as changes: one, or two if the keys of system rows are inside its range, which it keeps."""
    return [
        Change("delete_range", keys.start or b"", keys.stop, load.seq, load.created_ms, None, None)
        for keys in load.deleted_ranges
    ]


def find_oldest(files: Iterable[WalFile], manifest: Manifest | None = None) -> WalId | None:
    """The oldest of these files from which on changes can be read; None without files. Pure.

    Garbage collection leaves three kinds of files before a gap. By default it keeps fences; a request that arrives late
    creates a removed file again, which is then younger than the one after the gap; and the checkpoints in `manifest`
    hold files that the newest state needs no more. Such files are skipped. Any other file before a gap is not: reading
    it ends in an error that names what is missing.
    """
    first: WalId | None = None
    expected = -1
    rows_since_ms: float = math.inf
    held_to = manifest.replay_after_wal_id if manifest is not None and manifest.checkpoints else NO_WAL
    for file in files:
        if file.wal_id != expected:
            if rows_since_ms <= file.last_modified_ms and file.wal_id > held_to + 1:
                break
            first, rows_since_ms = file.wal_id, math.inf
        if file.size:
            rows_since_ms = min(rows_since_ms, file.last_modified_ms)
        expected = file.wal_id + 1
    return first


class WalFiles:
    """The WAL files of one database, read beside its writer. May be shared between threads."""

    def __init__(
        self, store: ObjectStore, paths: DbPaths, manifests: ManifestStore, *, pool: IoPool | None = None
    ) -> None:
        self._store = store
        self.paths = paths
        self._manifests = manifests
        self._pool = pool

    def files(self, start_id: int | None = None) -> Iterator[WalFile]:
        """The WAL files from `start_id` on (None: all), ascending. One listing."""
        after = self.paths.wal(WalId(start_id - 1)) if start_id else None
        for meta in self._store.list(self.paths.wal_folder, after=after):
            wal_id = self.paths.parse_wal(meta.path)
            if wal_id is not None:
                yield WalFile(wal_id, meta.size, meta.last_modified_ms)

    def oldest(self) -> WalId:
        """The oldest WAL file from which on changes can be read; 1 when there is none."""
        return self._find_oldest(list(self.files())) or WalId(1)

    def fetch(self, wal_ids: Iterable[WalId]) -> Iterator[FetchedWal]:
        """The bytes of these files in order, fetched ahead; None for a file that does not exist."""
        return fetch_in_order(self._store, self.paths, wal_ids, pool=self._pool or shared_pool())

    def find(self, wal_id: WalId) -> ChangeBatch | None:
        """The changes of one file; None when it does not exist."""
        stored = self._find_stored(wal_id)
        return None if stored is None else self._decode(wal_id, stored)

    def find_rows(self, wal_id: WalId) -> WalRows | None:
        """The rows of one file, still encoded; None when it does not exist."""
        stored = self._find_stored(wal_id)
        return None if stored is None else open_wal(stored, self.paths.wal(wal_id))

    def _find_stored(self, wal_id: WalId) -> bytes | None:
        try:
            stored = self._store.get(self.paths.wal(wal_id)).data
        except ObjectMissing:
            return None
        return None if self._is_unsettled(wal_id, stored) else stored

    def read(self, wal_id: WalId) -> ChangeBatch:
        """The changes of one file.

        Raises:
            InvalidRequest: there is no such file; the message says whether it is not written yet or was removed.

        """
        batch = self.find(wal_id)
        if batch is None:
            self.check_not_removed(wal_id)
            raise InvalidRequest(f"the WAL of {self.paths.root} has not reached file {wal_id} yet")
        return batch

    def batches(self, start: WalId | None = None, *, stop_id: int | None = None) -> Iterator[ChangeBatch]:
        """The files from `start` up to `stop_id`; see `WalReader.batches`."""
        files = [file for file in self.files(start) if stop_id is None or file.wal_id < stop_id]
        first = self._find_oldest(files) if start is None else start
        present = [file.wal_id for file in files if first is not None and file.wal_id >= first]
        if not present or first is None:
            return
        # The files before the first hole; `check_not_removed` judges the hole when it is reached.
        wanted = [wal_id for offset, wal_id in enumerate(present) if wal_id == first + offset]
        if not wanted:
            self.check_not_removed(first)
            return
        seen_seq, empty = UNKNOWN_SEQ, list[WalId]()
        for wal_id, stored in self.fetch(wanted):
            if stored is None:
                self.check_not_removed(wal_id)
                return
            if self._is_unsettled(wal_id, stored):
                return
            batch = self._decode(wal_id, stored)
            if not stored:
                empty.append(wal_id)
            if batch.changes:
                for late in self.find_late(seen_seq, batch, empty):
                    yield late
                    seen_seq = late.changes[-1].seq
                self.check_lost(seen_seq, batch, empty)
                seen_seq, empty = batch.changes[-1].seq, []
                yield batch
        if len(wanted) < len(present):
            self.check_not_removed(WalId(wanted[-1] + 1))

    def check_not_removed(self, wal_id: WalId) -> None:
        """Raise `InvalidRequest` if `wal_id` is missing although there are later files."""
        left = next(self.files(wal_id + 1), None)
        # Look again after the listing: both files may have been created since the first read. The fence of a takeover
        # that is not complete is not read yet, but it is there.
        if left is None or self._is_there(wal_id):
            return
        latest = self._manifests.latest()
        if latest is not None and left.wal_id - wal_id <= allowed_hole(latest.value):
            return  # a writer with several files under way has not created this one yet
        raise InvalidRequest(
            f"file {wal_id} of the WAL of {self.paths.root} is missing: it was removed by garbage collection before "
            f"it was read, or it was lost, which `verify` shows; changes can be read from {left.wal_id} on, and what "
            "garbage collection removed is in SSTs: copy the database once more before continuing from there"
        )

    def _is_there(self, wal_id: WalId) -> bool:
        try:
            self._store.head(self.paths.wal(wal_id))
        except ObjectMissing:
            return False
        return True

    def _find_oldest(self, files: Sequence[WalFile]) -> WalId | None:
        if not files or files[-1].wal_id - files[0].wal_id < len(files):
            return find_oldest(files)  # without a gap the manifest does not matter
        # Read after the listing: the manifest covers what a garbage collector had removed by then.
        latest = self._manifests.latest()
        return find_oldest(files, None if latest is None else latest.value)

    def _is_unsettled(self, wal_id: WalId, stored: bytes) -> bool:
        """Whether the file is a fence of a takeover that is not complete: the files after it may not count."""
        if stored:
            return False
        # Another writer begins here, or another database at the same path, which ends this reader.
        latest = self._manifests.latest()
        settled = None if latest is None else settled_end(latest.value)
        return settled is not None and wal_id > settled

    def _decode(self, wal_id: WalId, stored: bytes) -> ChangeBatch:
        changes = [change_of(row, wal_id) for row in decode_wal(stored, self.paths.wal(wal_id))]
        last_seq = changes[-1].seq if changes else UNKNOWN_SEQ
        return ChangeBatch(wal_id, changes, Position(WalId(wal_id + 1), last_seq))

    def find_late(self, seen_seq: int, batch: ChangeBatch, empty: Sequence[WalId]) -> Iterator[ChangeBatch]:
        """Those of the `empty` files before `batch` that have rows now, if sequence numbers are missing before it.

        A file may have been empty for a moment only, as damage that the storage has repaired.
        """
        if 0 <= seen_seq < batch.changes[0].seq - 1:
            for wal_id in empty:
                late = self.find(wal_id)
                if late is not None and late.changes:
                    yield late

    def check_lost(self, seen_seq: int, batch: ChangeBatch, empty: Sequence[WalId]) -> None:
        """Raise `CorruptData` if one of the `empty` files before `batch` has lost rows that came after `seen_seq`."""
        first_seq = batch.changes[0].seq
        if seen_seq < 0 or first_seq <= seen_seq + 1 or not empty or batch.wal_id is None:
            return
        latest = self._manifests.latest()
        # Sequence numbers up to `last_l0_seq` may be those of a bulk load, or of a writer without a WAL.
        if latest is not None and latest.value.last_l0_seq < first_seq - 1:
            check_step(
                self._store,
                self.paths,
                empty,
                seen_seq=seen_seq,
                first_seq=first_seq,
                end=batch.wal_id,
                writers=latest.value.writer_epoch,
            )
