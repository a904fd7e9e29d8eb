"""Change data: every committed change of a database, in commit order, read from its WAL and from bulk loads.

The position of a consumer is a WAL id and a sequence number: a consumer uses a WAL file as a whole, and the next one is
its id plus one. Ids are never skipped, so a consumer that falls behind garbage collection gets an error, not a gap. A
consumer with a retention checkpoint (`retention.py`) does not fall behind: the WAL files and the rows of bulk loads are
kept for it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from flagstone.changes.change import (
    Change,
    ChangeBatch,
    WalFile,
    WalFiles,
    change_of,
    changes_of_range,
    without_system,
)
from flagstone.changes.position import as_position, checked_id
from flagstone.changes.retention import ConsumerPosition, RetentionCheckpoint
from flagstone.changes.step import ReadLoad, check_gapless, may_follow_load, plan_step
from flagstone.config.durations import as_duration
from flagstone.errors import InvalidRequest
from flagstone.loads.edit import VisibleLoad, next_load
from flagstone.loads.rows import LoadRows, fetch_load_ssts
from flagstone.metadata.annotations import Position
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.pool import IoPool, shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.remote_options import OptionValue
from flagstone.store.resolve import StoreLike, resolve_database, resolve_wal_store
from flagstone.store.retrying import with_retries
from flagstone.types import WalId

if TYPE_CHECKING:
    from flagstone.runtime.sync import Event

DEFAULT_POLL_S: Final = 1.0
DEFAULT_MAX_POLL_S: Final = 5.0

_SHORTEST_WAIT_S: Final = 0.001
_BACK_OFF: Final = 1.5
_RECHECK_S: Final = 30.0
"""How often a consumer that waits for a file checks whether the file came and went while it slept."""

_HITS_UNTIL_AHEAD: Final = 8
"""After this many files without a wait the consumer is behind, and files are fetched ahead."""

_ABSENT_S: Final = 30.0
"""How often a consumer of a WAL without a manifest reads the manifest again."""


class WalReader:
    """Reads the WAL of the database at `path`, beside its writer.

    Addresses are those of `flagstone.open`; `wal_store` is the store of the WAL if that is another one. Nothing is
    contacted before the first call. Each WAL file costs one request. May be shared between threads, and pickles.

    Without `pin` the reader has no effect on the database: a file that garbage collection removed (by default no
    sooner than five minutes after its rows reached SSTs) raises an error with the id from which reading is still
    possible. With the name of a consumer as `pin`, `follow` starts where that consumer stopped, and no garbage
    collector, SlateDB's included, removes what the consumer has not passed to `commit`, also while the consumer is
    away: for `pin_lifetime`, or until `release`.

    Changes of system rows are left out unless `include_system`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        store: StoreLike | None = None,
        store_options: Mapping[str, OptionValue] | None = None,
        wal_store: StoreLike | None = None,
        pin: str | None = None,
        pin_lifetime: timedelta | str | None = None,
        include_system: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
        pool: IoPool | None = None,
    ) -> None:
        pin_lifetime = None if pin_lifetime is None else as_duration(pin_lifetime, "pin_lifetime")
        found, root = resolve_database(path, store, store_options)
        self._main = with_retries(found, clock=clock, ids=ids)
        self._store = (
            self._main
            if wal_store is None
            else with_retries(resolve_wal_store(wal_store, found, store_options), clock=clock, ids=ids)
        )
        self._paths = DbPaths(root)
        self._clock = clock
        self._ids = ids
        self._pool = pool
        self._retention = (pin, pin_lifetime)
        self._include_system = include_system
        self._connect()

    def _connect(self) -> None:
        self._manifests = ManifestStore(self._main, self._paths, clock=self._clock, ids=self._ids)
        self._wal = WalFiles(self._store, self._paths, self._manifests, pool=self._pool)
        self._consumer: ConsumerPosition | None = None
        name, lifetime = self._retention
        if name is not None:
            held = RetentionCheckpoint(
                self._manifests, self._main, name, lifetime=lifetime, clock=self._clock, ids=self._ids
            )
            self._consumer = ConsumerPosition(held, self._clock)

    def __getstate__(self) -> dict[str, Any]:
        # Without the position: the retention checkpoint is found again by its name.
        made = ("_manifests", "_wal", "_consumer")
        return {name: value for name, value in vars(self).items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._paths.root!r}, store={self._store.url!r})"

    def files(self, start_id: int | None = None) -> list[WalFile]:
        """The WAL files from `start_id` on (None: all), ascending. One listing."""
        return list(self._wal.files(start_id))

    def read(self, wal_id: int) -> ChangeBatch:
        """The changes of one file.

        Raises:
            InvalidRequest: there is no such file; the message says whether it is not written yet or was removed.

        """
        return self._shown(self._wal.read(WalId(wal_id)))

    def batches(self, start_id: int | None = None, *, stop_id: int | None = None) -> Iterator[ChangeBatch]:
        """The files from `start_id` (None: the oldest) up to `stop_id`, exclusive, or to the present end of the WAL.

        Fences, the empty files between two writers, are skipped. The rows of bulk loads are in no file; they come with
        `follow` only.

        Raises:
            InvalidRequest: a file in that range is missing, because garbage collection removed it or it was lost; the
                message says what is left.
            CorruptData: a file is damaged, or has lost its rows.

        """
        start = None if start_id is None else checked_id(start_id)
        yield from map(self._shown, self._wal.batches(start, stop_id=stop_id))

    def changes(self, start_id: int | None = None, *, stop_id: int | None = None) -> Iterator[Change]:
        """The rows of `batches`, one by one."""
        for batch in self.batches(start_id, stop_id=stop_id):
            yield from batch.changes

    def follow(
        self,
        start_id: int | Sequence[int] | None = None,
        *,
        poll_interval_s: float = DEFAULT_POLL_S,
        max_poll_interval_s: float = DEFAULT_MAX_POLL_S,
        timeout_s: float | None = None,
        allow_gaps: bool = False,
        stop: Event | None = None,
    ) -> Iterator[ChangeBatch]:
        """Every change from `start_id` on, without an end: waits for changes to come. Fences are skipped.

        `start_id` is a WAL file, or the `position` of a batch. None starts at the position of the consumer named by
        `pin`, without one at the oldest WAL file. Ends when `stop` is set, or when nothing came for `timeout_s`;
        without either, when the caller stops iterating. Polls after `poll_interval_s`, and less often while nothing
        comes, up to `max_poll_interval_s`. After using a batch, `commit` it, or store its `position`: after a crash,
        start there.

        The rows of a bulk load come at their position among the changes, as batches without a `wal_id`. So does a range
        delete, as one change with `op="delete_range"`, or as two changes of one batch around the keys of system rows.

        Raises:
            InvalidRequest: garbage collection removed what comes next before it was read, or the retention checkpoint
                is gone, or the database changed in a way that cannot be delivered as changes (unless `allow_gaps`).

        """
        follower = self._follower(
            start_id, Pace(poll_interval_s, max_poll_interval_s, timeout_s), allow_gaps=allow_gaps
        )
        while stop is None or not stop.is_set():
            batch, wait_s = follower.take()
            if batch is not None:
                shown = self._shown(batch)
                if shown.changes:
                    yield shown
            elif wait_s is None:
                return
            elif wait_s and stop is None:
                self._clock.sleep(wait_s)
            elif wait_s and stop is not None:
                stop.wait(wait_s)

    @property
    def position(self) -> int | None:
        """The WAL file at which the consumer continues; None when it has not begun, or without `pin`."""
        return (
            None
            if self._consumer is None or self._consumer.position is None
            else self._consumer.position.next_id
        )

    def commit(self, batch: ChangeBatch) -> None:
        """Record that the consumer has used `batch` and all before it: after a crash it starts after the batch.

        Saved to the store every ten seconds and on `close`, so a crash may repeat some batches. A consumer that must
        not see a batch twice stores `position` together with its own results, and starts there.
        """
        self._require_consumer().use(batch.position)

    def close(self) -> None:
        """Save what was committed; the retention checkpoint stays. The reader can be closed twice, and used again."""
        if self._consumer is not None:
            self._consumer.save()

    def release(self) -> None:
        """Remove the retention checkpoint: the WAL is no longer kept for this consumer."""
        self._require_consumer().release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _follower(self, start_id: int | Sequence[int] | None, pace: Pace, *, allow_gaps: bool) -> Follower:
        start = None if start_id is None else as_position(start_id)
        if allow_gaps:
            # Otherwise a gap in the sequence numbers shows that another database has taken the place of this one.
            self._manifests.latest()
        loads = LoadRows(self._main, self._paths, pool=self._pool or shared_pool())
        return Follower(
            self._wal,
            self._manifests,
            loads,
            self._consumer,
            start=start,
            clock=self._clock,
            pace=pace,
            allow_gaps=allow_gaps,
        )

    def _shown(self, batch: ChangeBatch) -> ChangeBatch:
        return batch if self._include_system else without_system(batch)

    def _require_consumer(self) -> ConsumerPosition:
        if self._consumer is None:
            raise InvalidRequest("this reader keeps no position; name its consumer with pin=")
        return self._consumer


class Pace(NamedTuple):
    """How long to wait for a file at first and at most, and after how long without one to give up."""

    poll_s: float
    max_poll_s: float
    timeout_s: float | None


class Follower:
    """One `follow`: each `take` brings the next batch, or how long to wait for it. For one thread at a time.

    WAL files are requested by their id. A consumer that is behind gets them fetched ahead, several at a time. Bulk
    loads are looked up where sequence numbers are missing, and at the end of the WAL; so waiting costs two small
    requests per poll, for the next file and the next manifest, and no listing.
    """

    def __init__(
        self,
        wal: WalFiles,
        manifests: ManifestStore,
        loads: LoadRows,
        consumer: ConsumerPosition | None,
        *,
        start: Position | None,
        clock: Clock,
        pace: Pace,
        allow_gaps: bool,
    ) -> None:
        self._wal = wal
        self._manifests = manifests
        self._loads = loads
        self._consumer = consumer
        self._start = start
        self._allow_gaps = allow_gaps
        self._clock = clock
        self._pace = pace
        self._wait_s = pace.poll_s
        self._at: Position | None = None
        self._began_id = WalId(0)
        self._fetched: Iterator[ChangeBatch] | None = None
        self._reading: tuple[VisibleLoad, Iterator[ChangeBatch]] | None = None
        self._held: ChangeBatch | None = None
        self._rows_end = WalId(0)
        self._hits = 0
        self._progress_at = self._checked_at = clock.monotonic()
        self._known: Versioned[Manifest] | None = None
        self._absent_until = -math.inf

    def take(self) -> tuple[ChangeBatch | None, float | None]:
        """The next batch; or None and how many seconds to wait before the next call, None at the end."""
        if self._at is None:
            self._at = self._begin()
            self._began_id = self._rows_end = self._at.next_id
            self._fetched = self._wal.batches(self._at.next_id)
        if self._reading is not None:
            return self._take_from_load(self._at, *self._reading)
        batch = self._next_file(self._at)
        return self._wait(self._at) if batch is None else self._take_from_file(self._at, batch)

    def _begin(self) -> Position:
        if self._consumer is not None:
            return self._consumer.begin(self._start, self._wal)
        return self._start or Position(self._wal.oldest())

    def _next_file(self, at: Position) -> ChangeBatch | None:
        batch, self._held = self._held, None
        if batch is None and self._fetched is not None:
            batch = next(self._fetched, None)
            if batch is None:
                self._fetched = None
        if batch is None:
            batch = self._wal.find(at.next_id)
            if batch is not None:
                self._hits += 1
                if self._hits >= _HITS_UNTIL_AHEAD:
                    self._hits, self._fetched = 0, self._wal.batches(batch.next_id)
        return batch

    def _take_from_file(self, at: Position, batch: ChangeBatch) -> tuple[ChangeBatch | None, float]:
        self._note_progress()
        changes = batch.changes
        if changes and changes[0].seq <= at.after_seq:
            # The consumer has these from its copy of the database.
            changes = [change for change in changes if change.seq > at.after_seq]
        if not changes:
            self._at = at._replace(next_id=batch.next_id)
            return None, 0
        first_seq = changes[0].seq
        load = None
        if may_follow_load(at, first_seq):
            # Read after the file was found: a load that came before it is in the manifest.
            load = self._find_load(at, first_seq)
            if load is None and self._go_back(at, batch):
                return None, 0
        step = plan_step(at, load, stop=batch.next_id, first_seq=first_seq, allow_gaps=self._allow_gaps)
        if isinstance(step, ReadLoad):
            self._begin_load(step.load, at)
            self._held = batch
            return None, 0
        self._at = Position(batch.next_id, changes[-1].seq)
        self._rows_end = batch.next_id
        return ChangeBatch(batch.wal_id, changes, self._at), 0

    def _go_back(self, at: Position, batch: ChangeBatch) -> bool:
        """Sequence numbers are missing before `batch`: go back to a file before it that was empty and has rows now.

        Returns whether there is one. Raises `CorruptData` if one has certainly lost its rows.
        """
        empty = [WalId(wal_id) for wal_id in range(self._rows_end, batch.next_id - 1)]
        self._rows_end = batch.next_id
        for late in self._wal.find_late(at.after_seq, batch, empty):
            self._at, self._fetched = at._replace(next_id=WalId(late.next_id - 1)), None
            return True
        if not self._allow_gaps:
            self._wal.check_lost(at.after_seq, batch, empty)
        return False

    def _take_from_load(
        self, at: Position, load: VisibleLoad, batches: Iterator[ChangeBatch]
    ) -> tuple[ChangeBatch | None, float]:
        self._note_progress()
        batch = next(batches, None)
        if batch is None:
            self._reading = None
            self._at = Position(at.next_id, load.seq)
            self._rows_end = at.next_id
        return batch, 0

    def _wait(self, at: Position) -> tuple[None, float | None]:
        step = plan_step(at, self._find_load(at, None), stop=at.next_id, allow_gaps=self._allow_gaps)
        if isinstance(step, ReadLoad):
            self._begin_load(step.load, at)
            return None, 0
        self._hits = 0
        now, timeout_s = self._clock.monotonic(), self._pace.timeout_s
        left_s = None if timeout_s is None else self._progress_at + timeout_s - now
        ends = left_s is not None and left_s < _SHORTEST_WAIT_S
        if now - self._checked_at >= _RECHECK_S:
            self._check_missing(at)
            self._checked_at = now
        elif ends:
            # A file that is missing while others follow must not look like the end of the WAL.
            self._wal.check_not_removed(at.next_id)
        if self._consumer is not None:
            self._consumer.tend()
        longest_s = max(self._pace.poll_s, self._pace.max_poll_s)
        wait_s, self._wait_s = self._wait_s, min(self._wait_s * _BACK_OFF, longest_s)
        if left_s is None:
            return None, wait_s
        # Not 0: a remainder below the resolution of the clock would never end.
        return None, None if ends else min(wait_s, left_s)

    def _note_progress(self) -> None:
        self._wait_s = self._pace.poll_s
        self._progress_at = self._checked_at = self._clock.monotonic()

    def _check_missing(self, at: Position) -> None:
        """Raise if the next file will never come: it was removed, or rows came into the database without the WAL."""
        # Before the listing: the WAL files that the manifest counts are on the store by then.
        latest = None if self._allow_gaps or at.after_seq <= 0 else self._manifests.latest()
        self._wal.check_not_removed(at.next_id)
        if latest is None or at.after_seq >= latest.value.last_l0_seq:
            return
        # A load that came after the last look for one has sequence numbers that are not in the WAL; it is next.
        if _load_below(latest.value, at, None) is not None:
            self._known = latest
            return
        # A file is on the store before its rows are in SSTs: without the file, no row above the last one seen.
        if self._wal.find(at.next_id) is None:
            check_gapless(at.after_seq, latest.value.last_l0_seq + 1)

    # -- bulk loads ---------------------------------------------------------------------------------------

    def _begin_load(self, load: VisibleLoad, at: Position) -> None:
        if load.deleted is not None:
            deleted = changes_of_range(load)
            self._reading = load, iter((ChangeBatch(None, deleted, Position(at.next_id, load.seq)),))
            return
        ssts = [] if load.replaces else fetch_load_ssts(self._manifests, load)
        self._reading = load, self._read_load(load, ssts, at)

    def _read_load(self, load: VisibleLoad, ssts: list[SsTable], at: Position) -> Iterator[ChangeBatch]:
        """The load as changes, piece by piece, without the rows that the consumer has used.

        The position of the consumer stays before the load, with a count of rows, until the last batch was used.
        """
        skip, used = at.loaded if at.after_seq == load.position.seq else 0, 0
        held: list[Change] = []
        for sst in ssts:
            for rows in self._loads.pieces(load, sst):
                fresh = rows[max(skip - used, 0) :]
                used += len(rows)
                if not fresh:
                    continue
                if held:
                    yield ChangeBatch(None, held, Position(at.next_id, load.position.seq, used - len(fresh)))
                held = [change_of(row, None) for row in fresh]
        if held:
            yield ChangeBatch(None, held, Position(at.next_id, load.seq))

    def _find_load(self, at: Position, below: int | None) -> VisibleLoad | None:
        """The first load that the consumer has not passed, with a sequence number less than `below`.

        With `below`, a sequence number that is in the WAL, the answer is final: what came before that row was in the
        manifest before it. Without it, a load may be found a minute later than possible (`ManifestStore.poll`).
        """
        # While there were only empty files, the consumer has passed nothing since it began.
        position = at if at.after_seq >= 0 else at._replace(next_id=self._began_id)
        # The SSTs have that row or a later one: this manifest has all loads before it.
        if below is not None and self._known is not None and self._known.value.last_l0_seq >= below:
            return _load_below(self._known.value, position, below)
        found = _load_below(self._read_manifest(final=False), position, below)
        if found is None and below is not None:
            found = _load_below(self._read_manifest(final=True), position, below)
        return found

    def _read_manifest(self, *, final: bool) -> Manifest | None:
        now = self._clock.monotonic()
        if now < self._absent_until:
            return None
        self._known = self._manifests.latest() if final or self._known is None else self._manifests.poll()
        if self._known is None:
            self._absent_until = now + _ABSENT_S
            return None
        return self._known.value


def _load_below(manifest: Manifest | None, position: Position, below: int | None) -> VisibleLoad | None:
    load = None if manifest is None else next_load(manifest, position)
    return load if load is None or below is None or load.seq < below else None
