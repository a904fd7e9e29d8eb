"""Change data: every committed change of a database, in commit order, read from its log and from bulk loads.

The position of a consumer is a WAL id and a sequence number: a file is used as a whole, and the next one is its id plus
one. Ids are never skipped, so a consumer that falls behind garbage collection gets an error, not a gap. With a pin
(`pins.py`) it does not fall behind: the log is kept for it, and so are the rows of loads.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from flagstone.config.durations import as_duration
from flagstone.errors import InvalidRequest
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.pool import IoPool, shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing
from flagstone.store.remote_options import OptionValue
from flagstone.store.resolve import StoreLike, resolve_database, resolve_wal_store
from flagstone.store.retrying import patient
from flagstone.types import WalId
from flagstone.wal.changes import UNKNOWN_SEQ, Change, ChangeBatch, Position, change_of
from flagstone.wal.continuity import check_step
from flagstone.wal.encoding import decode_wal
from flagstone.wal.fetching import fetch_in_order
from flagstone.wal.load_finding import LoadFinder
from flagstone.wal.load_marks import ToldLoad
from flagstone.wal.load_rows import LoadRows, fetch_load_tables
from flagstone.wal.pins import LogPin
from flagstone.wal.positions import PinnedPosition
from flagstone.wal.turns import Pace, Turns

if TYPE_CHECKING:
    from flagstone.runtime.sync import Event

DEFAULT_POLL_S: Final = 1.0
DEFAULT_MAX_POLL_S: Final = 5.0


class WalFile(NamedTuple):
    """A file of the log as a listing shows it; an empty one is a fence."""

    wal_id: WalId
    size: int
    last_modified_ms: int


class WalReader:
    """Reads the log of the database at `path`, beside its writer.

    Addresses are those of `flagstone.open`; `wal_store` is where the log lives when it has a store of its own.
    Nothing is contacted before the first call. Each file costs one request. May be shared between threads, and
    pickles.

    Without `pin` the reader has no effect on the database: a file that garbage collection removed (by default no
    sooner than five minutes after its rows reached the tables) is refused with the id from which reading is still
    possible. With the name of a consumer as `pin`, `follow` begins where that consumer stopped, and no collector,
    SlateDB's included, removes what it has not been told about with `commit`, also while the consumer is away:
    for `pin_lifetime`, or until `release`.
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
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
        pool: IoPool | None = None,
    ) -> None:
        pin_lifetime = None if pin_lifetime is None else as_duration(pin_lifetime, "pin_lifetime")
        found, root = resolve_database(path, store, store_options)
        main = patient(found, clock=clock, ids=ids)
        self._store = (
            main
            if wal_store is None
            else patient(resolve_wal_store(wal_store, found, store_options), clock=clock, ids=ids)
        )
        self._paths = DbPaths(root)
        self._clock = clock
        self._pool = pool
        self._origin = (main, ids, pin, pin_lifetime)
        self._connect()

    def _connect(self) -> None:
        main, ids, pin, lifetime = self._origin
        self._main = main
        self._manifests = ManifestStore(main, self._paths, clock=self._clock, ids=ids)
        self._pin: PinnedPosition | None = None
        if pin is not None:
            held = LogPin(self._manifests, main, pin, lifetime=lifetime, clock=self._clock, ids=ids)
            self._pin = PinnedPosition(held, self._clock)

    def __getstate__(self) -> dict[str, Any]:
        # The position is not taken along: the pin is found again by its name.
        made = ("_main", "_manifests", "_pin")
        return {name: value for name, value in vars(self).items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._paths.root!r}, store={self._store.url!r})"

    def files(self, start_id: int | None = None) -> list[WalFile]:
        """The files of the log from `start_id` on (None: all there are), ascending. One listing."""
        return list(self._list(start_id))

    def read(self, wal_id: int) -> ChangeBatch:
        """The changes of one file.

        Raises:
            InvalidRequest: there is no such file; the message says whether it is yet to come or was removed.

        """
        batch = self._load(WalId(wal_id))
        if batch is None:
            self._check_not_removed(WalId(wal_id))
            raise InvalidRequest(f"the log of {self._paths.root} has not reached file {wal_id} yet")
        return batch

    def batches(self, start_id: int | None = None, *, stop_id: int | None = None) -> Iterator[ChangeBatch]:
        """The files from `start_id` (None: the oldest there is) up to `stop_id`, exclusive, or to the end there is now.

        Fences, the empty files that tell one writer from the next, are passed over. What is in no file, the rows of
        bulk loads, comes with `follow` only.

        Raises:
            InvalidRequest: a file in that range is missing, because garbage collection removed it or it was lost; the
                message says what is left.
            CorruptData: a file is damaged, or has lost its rows.

        """
        start = None if start_id is None else _checked(start_id)
        present = [file.wal_id for file in self._list(start) if stop_id is None or file.wal_id < stop_id]
        if not present:
            return
        first = present[0] if start is None else start
        # What follows without a hole; `_check_not_removed` judges the hole once it is reached.
        wanted = [wal_id for position, wal_id in enumerate(present) if wal_id == first + position]
        if not wanted:
            self._check_not_removed(first)
            return
        seen_seq, empty = UNKNOWN_SEQ, list[WalId]()
        for wal_id, stored in fetch_in_order(
            self._store, self._paths, wanted, pool=self._pool or shared_pool()
        ):
            if stored is None:
                self._check_not_removed(wal_id)
                return
            batch = self._decode(wal_id, stored)
            if not stored:
                empty.append(wal_id)
            if batch.changes:
                self._check_step(seen_seq, batch, empty)
                seen_seq, empty = batch.changes[-1].seq, []
                yield batch
        if len(wanted) < len(present):
            self._check_not_removed(WalId(wanted[-1] + 1))

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
        """Every change from `start_id` on, for ever: waits for those yet to come. Fences are passed over.

        `start_id` is a file, or the `position` of a batch. None begins where the pin stands, without one with the
        oldest file there is. Ends when `stop` is set, or when nothing came for `timeout_s`; without either, when the
        caller stops iterating. What comes next is looked for after `poll_interval_s`, and less and less often while
        nothing comes, up to `max_poll_interval_s`. Once a batch was used, `commit` it, or store its `position`: after
        a crash, begin there.

        The rows of a bulk load come at their place, as batches without a `wal_id`.

        Raises:
            InvalidRequest: garbage collection removed what comes next before it was read, or the pin is gone, or
                something happened to the database that cannot be told as changes (unless `allow_gaps`).

        """
        turns = self._turns(
            start_id, Pace(poll_interval_s, max_poll_interval_s, timeout_s), allow_gaps=allow_gaps
        )
        while stop is None or not stop.is_set():
            batch, wait_s = turns.take()
            if batch is not None:
                yield batch
            elif wait_s is None:
                return
            elif wait_s and stop is None:
                self._clock.sleep(wait_s)
            elif wait_s and stop is not None:
                stop.wait(wait_s)

    @property
    def position(self) -> int | None:
        """The file at which the pinned consumer goes on; None when it has not begun, or nothing is pinned."""
        return None if self._pin is None or self._pin.position is None else self._pin.position.next_id

    def commit(self, batch: ChangeBatch) -> None:
        """The pinned consumer has used `batch` and all before it: after a crash it begins behind it.

        Told to the store every ten seconds and on `close`, so a crash may bring some batches again. Who must not
        see them twice stores `position` together with what it made of the batch, and begins there.
        """
        self._pinned().use(batch.position)

    def close(self) -> None:
        """Tell the store what was committed; the pin stays. Closing twice is fine, and so is going on."""
        if self._pin is not None:
            self._pin.save()

    def release(self) -> None:
        """Give the pin up: the log is not kept for this consumer any more."""
        self._pinned().release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _turns(self, start_id: int | Sequence[int] | None, pace: Pace, *, allow_gaps: bool) -> Turns:
        start = None if start_id is None else _position(start_id)
        if allow_gaps:
            # Otherwise a gap in the sequence numbers tells that another database has taken the place of this one.
            self._manifests.latest()
        return Turns(
            begin=lambda: self._begin(start),
            load=self._load,
            ahead=self.batches,
            loads=LoadFinder(self._manifests, self._clock).find,
            rows=self._load_rows,
            check=self._check_missing,
            tend=lambda: None if self._pin is None else self._pin.tend(),
            clock=self._clock,
            pace=pace,
            allow_gaps=allow_gaps,
        )

    def _begin(self, start: Position | None) -> Position:
        if self._pin is not None:
            return self._pin.begin(start, self._oldest)
        return start or Position(self._oldest())

    def _load_rows(self, load: ToldLoad, at: Position) -> Iterator[ChangeBatch]:
        rows = LoadRows(self._main, self._paths, pool=self._pool or shared_pool())
        used = at.loaded if at.after_seq == load.place.seq else 0
        return rows.batches(load, fetch_load_tables(self._manifests, load), at.next_id, skip=used)

    def _pinned(self) -> PinnedPosition:
        if self._pin is None:
            raise InvalidRequest("this reader keeps no position; name its consumer with pin=")
        return self._pin

    def _oldest(self) -> WalId:
        first = next(self._list(None), None)
        return WalId(1) if first is None else first.wal_id

    def _list(self, start_id: int | None) -> Iterator[WalFile]:
        after = self._paths.wal(WalId(start_id - 1)) if start_id else None
        for meta in self._store.list(self._paths.wal_folder, after=after):
            wal_id = self._paths.parse_wal(meta.path)
            if wal_id is not None:
                yield WalFile(wal_id, meta.size, meta.last_modified_ms)

    def _load(self, wal_id: WalId) -> ChangeBatch | None:
        try:
            stored = self._store.get(self._paths.wal(wal_id)).data
        except ObjectMissing:
            return None
        return self._decode(wal_id, stored)

    def _decode(self, wal_id: WalId, stored: bytes) -> ChangeBatch:
        if not stored:
            # A fence: another writer begins here, or another database at the same path, which ends this reader.
            self._manifests.latest()
        changes = [change_of(row, wal_id) for row in decode_wal(stored, self._paths.wal(wal_id))]
        last_seq = changes[-1].seq if changes else UNKNOWN_SEQ
        return ChangeBatch(wal_id, changes, Position(WalId(wal_id + 1), last_seq))

    def _check_missing(self, wal_id: WalId, seen_seq: int) -> None:
        """Raise if waiting for `wal_id` is in vain: it is gone, or rows came into the database without the log."""
        # Before the listing: what the manifest knows of is on the store by then.
        latest = self._manifests.latest() if seen_seq > 0 else None
        self._check_not_removed(wal_id)
        # A file is on the store before its rows are in tables: without the file, no row above the last one seen.
        if latest is None or not seen_seq < latest.value.last_l0_seq or self._load(wal_id) is not None:
            return
        raise InvalidRequest(
            f"the tables of {self._paths.root} have rows up to sequence number {latest.value.last_l0_seq}, its log "
            f"only up to {seen_seq}: the others came from a writer without a log, or by a bulk load that replaced "
            "everything or was not kept for this consumer; copy the database once more"
        )

    def _check_step(self, seen_seq: int, batch: ChangeBatch, empty: Sequence[WalId]) -> None:
        """Raise if an empty file before `batch` has lost rows that came after `seen_seq`."""
        first_seq = batch.changes[0].seq
        if seen_seq < 0 or first_seq <= seen_seq + 1 or not empty or batch.wal_id is None:
            return
        latest = self._manifests.latest()
        # Numbers that tables have may be those of a bulk load.
        if latest is not None and latest.value.last_l0_seq < first_seq - 1:
            check_step(
                self._store,
                self._paths,
                empty,
                seen_seq=seen_seq,
                first_seq=first_seq,
                end=batch.wal_id,
                writers=latest.value.writer_epoch,
            )

    def _check_not_removed(self, wal_id: WalId) -> None:
        """Raise if `wal_id` is missing although the log goes on behind it."""
        left = next(self._list(wal_id + 1), None)
        # Asked again after the listing: both files may have been created since the first look.
        if left is None or self._load(wal_id) is not None:
            return
        raise InvalidRequest(
            f"file {wal_id} of the log of {self._paths.root} is missing: it was removed by garbage collection before "
            f"it was read, or it was lost, which `verify` tells; changes can be read from {left.wal_id} on, and what "
            "garbage collection removed is in the tables: copy the database once more before going on from there"
        )


def _position(given: int | Sequence[int]) -> Position:
    """The position that a caller has stored, perhaps as a list, or the begin of a file."""
    try:
        position = Position(WalId(given)) if isinstance(given, int) else Position(*given)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequest(
            f"{given!r} is no position: take one from a batch, or the number of a file"
        ) from None
    _checked(position.next_id)
    return position


def _checked(wal_id: int) -> WalId:
    if wal_id < 1:
        raise InvalidRequest(f"WAL ids start at 1; {wal_id} is none")
    return WalId(wal_id)
