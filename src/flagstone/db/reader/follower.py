"""How a reader follows a database that another process writes: its manifest, its WAL, and the reader checkpoint.

Each poll takes the newest manifest, moves the reader checkpoint to it if there is one, reads the new WAL files, and
publishes SSTs, memtables and the last sequence number together. A poll that fails changes nothing that reads see; the
next poll continues where it stopped.

The WAL may go on after rows that are in no WAL file: those of a bulk load, of a writer without a WAL, or of a restored
checkpoint. A manifest that has them exists before the WAL goes on. So after a step in the sequence numbers of the WAL
the poll reads the manifest again before it publishes anything.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from flagstone.config import ReaderSettings
from flagstone.db.exit import abandon_in_children, renew_lock
from flagstone.db.reader.reader_checkpoint import ReaderCheckpoint, check_readable, same_data
from flagstone.errors import Closed, FlagstoneError, Unavailable
from flagstone.kernels import memtable as kernel
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.segments import SegmentExtractor, check_extractor
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.parallel_wal import allowed_hole, settled_end
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.read.view import LongKeyMemtable, ReadView, ViewBuilder, is_long
from flagstone.runtime.budget import MemoryBudget, ReaderAccount
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.pool import IoPool
from flagstone.runtime.service import Supervisor
from flagstone.runtime.sync import Lock
from flagstone.sst.store import SstStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import MAX_SEQ, EntryTuple, WalId
from flagstone.wal.frontier import WalDamaged, check_no_hole, find_frontier
from flagstone.wal.replay import Replayed, WalTruncated, replay
from flagstone.write.key_check import KeyRanges

_log = logging.getLogger("flagstone.db")

_ATTEMPTS: Final = 3
_ROWS_AT_ONCE: Final = 4096
_STOP_TIMEOUT_S: Final = 60.0


class ReaderState(NamedTuple):
    """What a reader shows at one moment: the SSTs and memtables of `view`, up to `seq`."""

    manifest: Versioned[Manifest]
    view: ReadView
    seq: int


@dataclass(slots=True)
class _Part:
    """A memtable and the sequence numbers in it; without rows, `first_seq` is above `last_seq`."""

    memtable: kernel.Memtable = field(default_factory=kernel.Memtable)
    first_seq: int = MAX_SEQ
    last_seq: int = 0


class WalTail:
    """The rows of the WAL that are not in SSTs yet, in memtables. Each WAL file is read once.

    A memtable is closed at `max_memtable_bytes` and dropped once its rows are in SSTs, so it holds what the writer has
    not flushed: the writer's own limit bounds it. One thread at a time may call it; other threads may read
    `memtables` meanwhile, up to the sequence number published with them.
    """

    def __init__(
        self, wal_store: ObjectStore, paths: DbPaths, *, max_memtable_bytes: int, pool: IoPool
    ) -> None:
        self.wal_store = wal_store
        self.paths = paths
        self.max_memtable_bytes = max_memtable_bytes
        self.pool = pool
        self.restart()

    def restart(self) -> None:
        """Drop everything: the next `follow` begins where the SSTs end."""
        self._parts: list[_Part] = [_Part()]
        self._long = LongKeyMemtable()
        self._replayed = Replayed()
        self.last_id: WalId = WalId(0)
        self.last_seq: int = 0

    @property
    def step_id(self) -> WalId:
        """The last file before which sequence numbers are missing: only a manifest read after it has their rows."""
        return self._replayed.step_id

    @property
    def memtables(self) -> tuple[Any, ...]:
        """The memtables, newest first."""
        long = (self._long,) if self._long.rows else ()
        return (*long, *(part.memtable for part in reversed(self._parts)))

    @property
    def size(self) -> int:
        """The bytes of its memtables."""
        return sum(part.memtable.size() for part in self._parts)

    def trim(self, through_seq: int) -> None:
        """Drop the rows up to `through_seq`: they are in SSTs, and a merge operand must not count twice."""
        kept = [part for part in self._parts if part.last_seq > through_seq]
        if kept and kept[0].first_seq <= through_seq:
            kept[0] = _Part(_rows_above(kept[0].memtable, through_seq), through_seq + 1, kept[0].last_seq)
        self._parts = kept or [_Part()]
        if self._long.rows:
            self._long = LongKeyMemtable(row for row in self._long.rows if row[1] > through_seq)

    def follow(self, manifest: Manifest, last: WalId | None) -> None:
        """Read the files after the last one read, up to `last` or to the current end of the WAL.

        Raises:
            WalTruncated: a file is gone, because the manifest is out of date.
            WalDamaged: a file or its content is missing, or the manifest is out of date.

        """
        after = max(self.last_id, manifest.replay_after_wal_id)
        if last is None:
            last = find_frontier(self.wal_store, self.paths, manifest, after=after, pool=self.pool)
            if not self.last_id:
                # Once: later files are read one after the other as they appear.
                check_no_hole(self.wal_store, self.paths, last, allowed=allowed_hole(manifest))
        files = replay(
            self.wal_store,
            self.paths,
            after,
            last,
            skip_through_seq=manifest.last_l0_seq,
            writers=manifest.writer_epoch,
            settled=settled_end(manifest),
            before=self._replayed,
            pool=self.pool,
        )
        for file in files:
            self._add(file.rows)
            self.last_id = file.wal_id

    def _add(self, rows: list[EntryTuple]) -> None:
        if any(map(is_long, rows)):
            self._long = LongKeyMemtable((*self._long.rows, *filter(is_long, rows)))
            self.last_seq = max(self.last_seq, rows[-1][1])
            rows = [row for row in rows if not is_long(row)]
        if not rows:
            return
        part = self._parts[-1]
        if part.memtable.size() >= self.max_memtable_bytes:
            part = _Part()
            self._parts.append(part)
        part.last_seq, _ = part.memtable.insert_rows(rows)
        part.first_seq = min(part.first_seq, *(row[1] for row in rows))
        self.last_seq = max(self.last_seq, part.last_seq)


class Follower:
    """The state that a reader shows, and the polls that renew it.

    `max_seq` is the last sequence number that a reader of a former state shows.
    """

    def __init__(
        self,
        store: ObjectStore,
        checkpoint: ReaderCheckpoint,
        views: ViewBuilder,
        tail: WalTail | None,
        *,
        paths: DbPaths,
        extractor: SegmentExtractor | None,
        clock: Clock,
        poll_interval_s: float | None,
        max_seq: int | None = None,
        memory: MemoryBudget | None = None,
    ) -> None:
        self.views = views
        self._max_seq = max_seq
        self._url = store.url
        self._checkpoint = checkpoint
        self._tail = tail
        self._paths = paths
        self._extractor = extractor
        self._poll_interval_s = poll_interval_s
        self._polling = Lock()
        self._state: ReaderState | None = None
        self._refusal: Closed | None = None
        self._poll_error: Unavailable | None = None
        self._closing = False
        self._supervisor = Supervisor(clock=clock)
        self._memory: ReaderAccount | None = None if memory is None else memory.open_reader()
        abandon_in_children(self)

    def start(self) -> None:
        """Read the first state and start to poll. If that fails, no checkpoint is left behind."""
        try:
            self.refresh()
        except BaseException:
            self._release_memory()
            self._checkpoint.release()
            raise
        if self._poll_interval_s is not None:
            self._supervisor.on_failure(self._on_failure)
            self._supervisor.start(_Poll(self, self._poll_interval_s))

    @property
    def state(self) -> ReaderState:
        """What the reader shows now. Raises `Closed` if it was closed, or can no longer follow."""
        if self._refusal is not None:
            raise Closed(str(self._refusal), reason=self._refusal.reason)
        assert self._state is not None, "callers get a reader after its first poll"
        return self._state

    @property
    def view(self) -> ReadView:
        """What reads see now."""
        return self.state.view

    @property
    def retained_seq(self) -> int:
        """The smallest sequence number whose versions are all kept."""
        return self.state.manifest.value.recent_snapshot_min_seq

    @property
    def closed(self) -> bool:
        return self._refusal is not None

    def refresh(self) -> None:
        """Show what is on the store now.

        Raises:
            Unavailable: the store did not answer; the reader still shows the former state.
            InvalidRequest: there is no database, it is a clone that is not complete, or the checkpoint is gone.
            Closed: the database was destroyed.

        """
        with self._polling:
            if self._refusal is not None:
                raise Closed(str(self._refusal), reason=self._refusal.reason)
            before = self._state
            if before is not None:
                # During the poll the reader shows a view that the checkpoint does not track, so that the tracked views
                # are those that reads hold.
                self._state = before._replace(view=before.view.with_memtables(before.view.memtables))
                del before
            try:
                self._follow()
            except Closed as closed:
                # The database was destroyed, or replaced by another one at its path: this reader shows nothing more.
                self._refusal = closed
                raise
            finally:
                if self._state is not None:
                    self._state = self._state._replace(view=self._checkpoint.track(self._state.view))
                if self._memory is not None and self._tail is not None:
                    self._memory.hold(self._tail.size)

    def _follow(self) -> None:
        for attempt in range(_ATTEMPTS):
            read_id = WalId(0) if self._tail is None else self._tail.last_id
            latest = self._checkpoint.advance()
            check_readable(latest.value)
            try:
                moved = self._moved_to(latest)
            except (WalTruncated, WalDamaged):
                if self._tail is not None:
                    self._tail.restart()
                if attempt == _ATTEMPTS - 1:
                    raise
                continue
            # A fixed end of the WAL comes from the manifest, which then has all rows before it.
            fixed = self._checkpoint.wal_end(latest.value) is not None
            if self._tail is None or fixed or self._tail.step_id <= read_id:
                self._state, self._poll_error = moved, None
                return
        raise Unavailable(
            f"{self._paths.root!r} was loaded or restored again during each of {_ATTEMPTS} polls; try again"
        )

    def note_outage(self, error: Unavailable) -> None:
        """A poll found the store unavailable: log it and show it in `status`; the next poll tries again."""
        self._poll_error = error
        _log.warning(
            "cannot follow the database, showing the last known state path=%s error=%s",
            self._paths.root,
            error,
        )

    @property
    def poll_failing(self) -> bool:
        """Whether the last poll failed; reads from memory still work."""
        return self._poll_error is not None

    def status(self) -> dict[str, Any]:
        """What the reader shows, as plain values."""
        state, tail, error = self._state, self._tail, self._poll_error
        assert state is not None, "callers get a reader after its first poll"
        manifest = state.manifest.value
        refusal = self._refusal
        return {
            "path": self._paths.root,
            "store": self._url,
            "state": "open" if refusal is None else "closed" if refusal.reason == "clean" else "failed",
            "mode": self._checkpoint.mode,
            **self._checkpoint.status(),
            "manifest_id": state.manifest.id,
            "last_seq": state.seq,
            "last_l0_seq": manifest.last_l0_seq,
            "last_wal_id": None if tail is None else tail.last_id,
            "memtable_bytes": 0 if tail is None else tail.size,
            "l0_tables": sum(len(tree.l0) for tree in manifest.trees),
            "sorted_runs": sum(len(tree.runs) for tree in manifest.trees),
            "poll_error": None if error is None else str(error),
        }

    def close(self) -> None:
        """Stop polling and delete the reader's own checkpoints. Closing twice is fine."""
        if self._closing:
            return
        self._closing = True
        if self._refusal is None:
            self._refusal = Closed("the reader was closed; open another one")
        self._supervisor.stop(_STOP_TIMEOUT_S)
        with self._polling:
            self._release_memory()
            self._checkpoint.release()

    def _release_memory(self) -> None:
        """Drop the rows and the blocks. Reads under way keep what they use."""
        if self._tail is not None:
            self._tail.restart()
        if self._state is not None:
            self._state = self._state._replace(view=self._state.view.with_memtables(()))
        self.views.ssts.close()
        if self._memory is not None:
            self._memory.close()

    def abandon_in_child(self, reason: Closed) -> None:
        """Make every call raise `Closed` in a forked child, which has no threads. The parent owns the checkpoint."""
        renew_lock(self._polling)
        self._closing, self._refusal = True, reason

    def _moved_to(self, latest: Versioned[Manifest]) -> ReaderState:
        before, manifest, tail = self._state, latest.value, self._tail
        unchanged = before is not None and same_data(before.manifest.value, manifest)
        if not unchanged:
            prefixes = [segment.prefix for segment in manifest.segments]
            if self._extractor is not None:
                check_extractor(
                    self._extractor, stored_name=manifest.segment_extractor_name, prefixes=prefixes
                )
        if tail is None:
            memtables, seq = (), int(manifest.last_l0_seq)
        else:
            if before is not None and _went_back(before.manifest.value, manifest):
                tail.restart()
            elif not unchanged:
                tail.trim(manifest.last_l0_seq)
            tail.follow(manifest, self._checkpoint.wal_end(manifest))
            memtables, seq = tail.memtables, max(manifest.last_l0_seq, tail.last_seq)
        view = before.view if before is not None and unchanged else self.views.build(manifest)
        seq = seq if self._max_seq is None else min(seq, self._max_seq)
        return ReaderState(latest, view.with_memtables(memtables), seq)

    def _on_failure(self, error: FlagstoneError) -> None:
        if self._refusal is None:
            self._refusal = Closed(f"the reader cannot follow its database: {error}", reason="failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderParts:
    """The stores, caches and settings of a reader, before it is decided which manifest it shows."""

    store: ObjectStore
    paths: DbPaths
    manifests: ManifestStore
    ssts: SstStore
    tail: WalTail
    memory: MemoryBudget | None
    metrics: Metrics
    settings: ReaderSettings
    clock: Clock
    ids: Ids
    merge_operator: MergeOperator | None
    extractor: SegmentExtractor | None
    key_ranges: KeyRanges | None

    def follow(
        self,
        checkpoint: ReaderCheckpoint,
        tail: WalTail | None,
        *,
        max_seq: int | None = None,
        polls: bool = True,
    ) -> Follower:
        """A follower of what `checkpoint` shows, not started yet."""
        interval_s = self.settings.manifest_poll_interval.total_seconds()
        return Follower(
            self.store,
            checkpoint,
            ViewBuilder(self.ssts),
            tail,
            paths=self.paths,
            extractor=self.extractor,
            clock=self.clock,
            poll_interval_s=interval_s if polls else None,
            max_seq=max_seq,
            memory=self.memory,
        )


class _Poll:
    """The background service of a reader."""

    name = "reader-poll"

    def __init__(self, follower: Follower, interval_s: float) -> None:
        self._follower = follower
        self._interval_s = interval_s
        self._just_opened = True

    def run_once(self) -> float | None:
        """Poll once. If the store does not answer, the next poll tries again."""
        if self._just_opened:
            self._just_opened = False
            return self._interval_s
        try:
            self._follower.refresh()
        except Unavailable as error:
            self._follower.note_outage(error)
        except Closed:
            return None
        return self._interval_s


def _went_back(before: Manifest, now: Manifest) -> bool:
    """Whether an older state was restored: the WAL rows read so far may not belong to it."""
    return now.last_l0_seq < before.last_l0_seq or now.replay_after_wal_id < before.replay_after_wal_id


def _rows_above(memtable: Any, seq: int) -> Any:
    """A memtable with the rows of `memtable` above `seq`."""
    kept: Any = kernel.Memtable()
    cursor = memtable.scan(None, None, MAX_SEQ, False)
    key: bytes | None = None
    while rows := cursor.next_rows(_ROWS_AT_ONCE):
        for row in rows:
            if row[0] != key:
                key = row[0]
                versions = memtable.versions(key, MAX_SEQ)
                # Not `insert`, which is for writes: it takes ascending sequence numbers only.
                kept.insert_rows([version for version in reversed(versions) if version[1] > seq])
    return kept
