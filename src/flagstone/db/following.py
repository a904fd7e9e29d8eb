"""How a reader keeps up with a database that others write: its manifest, its log, and the pin that keeps both.

Each poll takes the newest manifest, moves the reader's checkpoint to it where there is one, reads the log files
that are new, and publishes tables, memtables and the last sequence number together. A poll that fails changes
nothing that readers see; the next one goes on where it stopped.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from flagstone.db.forking import abandon_in_children, renew_lock
from flagstone.db.pins import Pin, check_readable, same_data
from flagstone.db.views import Views
from flagstone.errors import Closed, FlagstoneError, Unavailable
from flagstone.kernels import memtable as kernel
from flagstone.lsm.segments import SegmentExtractor, check_extractor
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.read.long_keys import LongKeyTable, is_long
from flagstone.read.view import ReadView
from flagstone.runtime.clock import Clock
from flagstone.runtime.pool import IoPool
from flagstone.runtime.service import Supervisor
from flagstone.runtime.sync import Lock
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import MAX_SEQ, EntryTuple, WalId
from flagstone.wal.continuity import WalDamaged, check_no_hole
from flagstone.wal.listing import find_frontier
from flagstone.wal.replay import Replayed, WalTruncated, replay

_log = logging.getLogger("flagstone.db")

_ATTEMPTS: Final = 3
_ROWS_AT_ONCE: Final = 4096
_STOP_TIMEOUT_S: Final = 60.0


class ReaderState(NamedTuple):
    """What a reader shows at one moment: the tables and memtables of `view`, up to `seq`."""

    manifest: Versioned[Manifest]
    view: ReadView
    seq: int


@dataclass(slots=True)
class _Part:
    """A memtable and the sequence numbers in it; without rows, `first_seq` is above `last_seq`."""

    table: kernel.Memtable = field(default_factory=kernel.Memtable)
    first_seq: int = MAX_SEQ
    last_seq: int = 0


class LogTail:
    """The rows of the log that are not in tables yet, in memtables. Each file is read once.

    A memtable is closed at `max_memtable_bytes` and forgotten once its rows are in tables, so what is held is what
    the writer has not flushed: bounded by the writer's own limit. One thread at a time; `tables` are safe to read
    beside it, up to the sequence number published with them.
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
        """Forget everything: the next `follow` begins where the tables end."""
        self._parts: list[_Part] = [_Part()]
        self._long = LongKeyTable()
        self._replayed = Replayed()
        self.last_id: WalId = WalId(0)
        self.last_seq: int = 0

    @property
    def tables(self) -> tuple[Any, ...]:
        """The memtables, newest first."""
        long = (self._long,) if self._long.rows else ()
        return (*long, *(part.table for part in reversed(self._parts)))

    @property
    def size(self) -> int:
        """The bytes its memtables take."""
        return sum(part.table.size() for part in self._parts)

    def trim(self, through_seq: int) -> None:
        """Forget the rows up to `through_seq`: they are in tables, and an operand must not count twice."""
        kept = [part for part in self._parts if part.last_seq > through_seq]
        if kept and kept[0].first_seq <= through_seq:
            kept[0] = _Part(_rows_above(kept[0].table, through_seq), through_seq + 1, kept[0].last_seq)
        self._parts = kept or [_Part()]
        if self._long.rows:
            self._long = LongKeyTable(row for row in self._long.rows if row[1] > through_seq)

    def follow(self, manifest: Manifest, last: WalId | None) -> None:
        """Read the files above the last one read, up to `last` or to where the log ends now.

        Raises:
            WalTruncated: a file is gone, because the manifest is out of date.
            WalDamaged: a file or its content is missing, or the manifest is out of date.

        """
        after = max(self.last_id, manifest.replay_after_wal_id)
        if last is None:
            expected = max(after, manifest.wal_id_last_seen)
            last = find_frontier(self.wal_store, self.paths, after, expected=expected, pool=self.pool)
            if not self.last_id:
                # Once: later files are read as they come, one after the other.
                check_no_hole(self.wal_store, self.paths, last)
        files = replay(
            self.wal_store,
            self.paths,
            after,
            last,
            skip_through_seq=manifest.last_l0_seq,
            writers=manifest.writer_epoch,
            before=self._replayed,
            pool=self.pool,
        )
        for file in files:
            self._add(file.rows)
            self.last_id = file.wal_id

    def _add(self, rows: list[EntryTuple]) -> None:
        if any(map(is_long, rows)):
            self._long = LongKeyTable((*self._long.rows, *filter(is_long, rows)))
            self.last_seq = max(self.last_seq, rows[-1][1])
            rows = [row for row in rows if not is_long(row)]
        if not rows:
            return
        part = self._parts[-1]
        if part.table.size() >= self.max_memtable_bytes:
            part = _Part()
            self._parts.append(part)
        part.last_seq, _ = part.table.insert_rows(rows)
        part.first_seq = min(part.first_seq, *(row[1] for row in rows))
        self.last_seq = max(self.last_seq, part.last_seq)


class Following:
    """What the faces of a reader share: the published state, and the polls that renew it.

    `max_seq` is the sequence number at which a reader of a former state stops.
    """

    def __init__(
        self,
        store: ObjectStore,
        pin: Pin,
        views: Views,
        tail: LogTail | None,
        *,
        paths: DbPaths,
        extractor: SegmentExtractor | None,
        clock: Clock,
        poll_interval_s: float | None,
        max_seq: int | None = None,
    ) -> None:
        self.views = views
        self._max_seq = max_seq
        self._url = store.url
        self._pin = pin
        self._tail = tail
        self._paths = paths
        self._extractor = extractor
        self._poll_interval_s = poll_interval_s
        self._turn = Lock()
        self._state: ReaderState | None = None
        self._refusal: Closed | None = None
        self._poll_error: Unavailable | None = None
        self._closing = False
        self._supervisor = Supervisor(clock=clock)
        abandon_in_children(self)

    def start(self) -> None:
        """Take the first state, and begin to poll. When that fails nothing is left behind."""
        try:
            self.poll()
        except BaseException:
            self._pin.release()
            raise
        if self._poll_interval_s is not None:
            self._supervisor.on_failure(self._on_failure)
            self._supervisor.start(_Poll(self, self._poll_interval_s))

    @property
    def state(self) -> ReaderState:
        """What is shown now. Raises `Closed` when the reader was closed, or can no longer follow."""
        if self._refusal is not None:
            raise Closed(str(self._refusal), reason=self._refusal.reason)
        assert self._state is not None, "a reader is handed out after its first poll"
        return self._state

    @property
    def closed(self) -> bool:
        return self._refusal is not None

    def poll(self) -> None:
        """Show what is on the store now.

        Raises:
            Unavailable: the store did not answer; what was shown before still is.
            InvalidRequest: there is no database, or it is still being cloned, or the checkpoint is gone.
            Closed: the database was destroyed.

        """
        with self._turn:
            if self._refusal is not None:
                raise Closed(str(self._refusal), reason=self._refusal.reason)
            before = self._state
            if before is not None:
                # Shown in the meantime is a view the pin does not count: then it counts only those of others.
                self._state = before._replace(view=before.view.with_memtables(before.view.memtables))
                del before
            try:
                self._follow()
            except Closed as closed:
                # The database was destroyed, or another one is at its path: this reader shows nothing of it.
                self._refusal = closed
                raise
            finally:
                if self._state is not None:
                    self._state = self._state._replace(view=self._pin.lend(self._state.view))

    def _follow(self) -> None:
        for attempt in range(_ATTEMPTS):
            latest = self._pin.advance()
            check_readable(latest.value)
            try:
                self._state = self._moved_to(latest)
            except (WalTruncated, WalDamaged):
                if self._tail is not None:
                    self._tail.restart()
                if attempt == _ATTEMPTS - 1:
                    raise
            else:
                self._poll_error = None
                return

    def note_outage(self, error: Unavailable) -> None:
        """A poll found the store unavailable: told in the log and in `status`, and tried again."""
        self._poll_error = error
        _log.warning(
            "cannot follow the database, showing what was known path=%s error=%s", self._paths.root, error
        )

    def status(self) -> dict[str, Any]:
        """Where the reader stands, as plain values."""
        state, tail, error = self._state, self._tail, self._poll_error
        assert state is not None, "a reader is handed out after its first poll"
        manifest = state.manifest.value
        refusal = self._refusal
        return {
            "path": self._paths.root,
            "store": self._url,
            "state": "open" if refusal is None else "closed" if refusal.reason == "clean" else "failed",
            "mode": self._pin.mode,
            **self._pin.status(),
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
        """Stop polling and give the checkpoint back. Closing twice is fine."""
        if self._closing:
            return
        self._closing = True
        if self._refusal is None:
            self._refusal = Closed("the reader was closed; open another one")
        self._supervisor.stop(_STOP_TIMEOUT_S)
        with self._turn:
            self._pin.release()

    def abandon_in_child(self, reason: Closed) -> None:
        """In a forked child, which has none of the threads: every call raises `Closed`, and the pin is the parent's."""
        renew_lock(self._turn)
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
            tail.follow(manifest, self._pin.log_end(manifest))
            memtables, seq = tail.tables, max(manifest.last_l0_seq, tail.last_seq)
        tables = before.view if before is not None and unchanged else self.views.prepare(manifest)
        seq = seq if self._max_seq is None else min(seq, self._max_seq)
        return ReaderState(latest, tables.with_memtables(memtables), seq)

    def _on_failure(self, error: FlagstoneError) -> None:
        if self._refusal is None:
            self._refusal = Closed(f"the reader cannot follow its database: {error}", reason="failed")


class _Poll:
    """The background service of a reader."""

    name = "reader-poll"

    def __init__(self, following: Following, interval_s: float) -> None:
        self._following = following
        self._interval_s = interval_s
        self._just_opened = True

    def run_once(self) -> float | None:
        """Look once. A store that does not answer is asked again at the next turn."""
        if self._just_opened:
            self._just_opened = False
            return self._interval_s
        try:
            self._following.poll()
        except Unavailable as error:
            self._following.note_outage(error)
        except Closed:
            return None
        return self._interval_s


def _went_back(before: Manifest, now: Manifest) -> bool:
    """Whether an older state was restored: what was read of the log may not belong to it."""
    return now.last_l0_seq < before.last_l0_seq or now.replay_after_wal_id < before.replay_after_wal_id


def _rows_above(table: Any, seq: int) -> Any:
    """A memtable with the rows of `table` above `seq`."""
    kept: Any = kernel.Memtable()
    cursor = table.scan(None, None, MAX_SEQ, False)
    key: bytes | None = None
    while rows := cursor.next_rows(_ROWS_AT_ONCE):
        for row in rows:
            if row[0] != key:
                key = row[0]
                for version in reversed(table.versions(key, MAX_SEQ)):
                    if version[1] > seq:
                        kept.insert(*version)
    return kept
