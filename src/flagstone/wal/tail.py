"""Change data: every committed change of a database, in commit order, read from its log.

The position of a consumer is a WAL id: a file is used as a whole, and the next one is its id plus one. Ids are
never skipped, so a consumer that falls behind garbage collection gets an error, not a gap.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from flagstone.errors import InvalidRequest
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.pool import IoPool, shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing
from flagstone.store.remote_options import OptionValue
from flagstone.store.resolve import StoreLike, resolve_database, resolve_wal_store
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, WalId
from flagstone.wal.encoding import decode_wal
from flagstone.wal.fetching import fetch_in_order

if TYPE_CHECKING:
    from flagstone.runtime.sync import Event

Operation = Literal["put", "delete", "merge"]

DEFAULT_POLL_S: Final = 1.0
_RECHECK_S: Final = 30.0
"""How often a consumer that waits for a file looks whether that file came and went while it slept."""

_OPERATIONS: Final[dict[int, Operation]] = {VALUE: "put", TOMBSTONE: "delete", MERGE: "merge"}


class Change(NamedTuple):
    """One changed row. `value` is the operand of a merge and None for a delete; times are milliseconds."""

    op: Operation
    key: bytes
    value: bytes | None
    seq: int
    created_ms: int | None
    expires_ms: int | None
    wal_id: WalId


class ChangeBatch(NamedTuple):
    """The changes of one WAL file, in commit order; a fence has none. All or nothing of it was committed."""

    wal_id: WalId
    changes: list[Change]

    @property
    def next_id(self) -> WalId:
        """Where to go on after these changes were used: what a consumer stores."""
        return WalId(self.wal_id + 1)


class WalFile(NamedTuple):
    """A file of the log as a listing shows it; ten bytes or fewer are a fence."""

    wal_id: WalId
    size: int
    last_modified_ms: int


class WalReader:
    """Reads the log of the database at `path`, beside its writer and without any effect on it.

    Addresses are those of `flagstone.open`; `wal_store` is where the log lives when it has a store of its own.
    Nothing is contacted before the first call. Each file costs one request. Nothing pins the log: a file that
    garbage collection removed (by default no sooner than five minutes after its rows reached the tables) is
    refused with the id from which reading is still possible. May be shared between threads, and pickles.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        store: StoreLike | None = None,
        store_options: Mapping[str, OptionValue] | None = None,
        wal_store: StoreLike | None = None,
        clock: Clock = SYSTEM_CLOCK,
        pool: IoPool | None = None,
    ) -> None:
        main, root = resolve_database(path, store, store_options)
        self._store = resolve_wal_store(wal_store, main, store_options)
        self._paths = DbPaths(root)
        self._clock = clock
        self._pool = pool

    def __repr__(self) -> str:
        return f"WalReader({self._paths.root!r}, store={self._store.url!r})"

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

        Raises:
            InvalidRequest: garbage collection has removed a file in that range; the message says what is left.

        """
        start = None if start_id is None else _checked(start_id)
        present = [file.wal_id for file in self._list(start) if stop_id is None or file.wal_id < stop_id]
        if not present:
            return
        first = present[0] if start is None else start
        # Only what follows without a gap is the log: behind a gap there is damage, or the files are in the making.
        wanted = [wal_id for position, wal_id in enumerate(present) if wal_id == first + position]
        if not wanted:
            self._check_not_removed(first)
            return
        for wal_id, stored in fetch_in_order(
            self._store, self._paths, wanted, pool=self._pool or shared_pool()
        ):
            if stored is None:
                self._check_not_removed(wal_id)
                return
            yield self._decode(wal_id, stored)

    def changes(self, start_id: int | None = None, *, stop_id: int | None = None) -> Iterator[Change]:
        """The rows of `batches`, one by one."""
        for batch in self.batches(start_id, stop_id=stop_id):
            yield from batch.changes

    def follow(
        self,
        start_id: int | None = None,
        *,
        poll_interval_s: float = DEFAULT_POLL_S,
        stop: Event | None = None,
    ) -> Iterator[ChangeBatch]:
        """Every file from `start_id` (None: the oldest there is) on, for ever: waits for those yet to come.

        Ends when `stop` is set; without one, when the caller stops iterating. A file is seen at most
        `poll_interval_s` after it was created. Store `next_id` once a batch was used: after a crash, start there.

        Raises:
            InvalidRequest: garbage collection removed the next file before it was read.

        """
        following = WalId(1) if start_id is None else _checked(start_id)
        for batch in self.batches(start_id):
            yield batch
            following = batch.next_id
            if stop is not None and stop.is_set():
                return
        checked_at = self._clock.monotonic()
        while stop is None or not stop.is_set():
            found = self._load(following)
            if found is not None:
                yield found
                following = found.next_id
                checked_at = self._clock.monotonic()
                continue
            if self._clock.monotonic() - checked_at >= _RECHECK_S:
                self._check_not_removed(following)
                checked_at = self._clock.monotonic()
            if stop is None:
                self._clock.sleep(poll_interval_s)
            else:
                stop.wait(poll_interval_s)

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
        rows = decode_wal(stored, self._paths.wal(wal_id))
        return ChangeBatch(wal_id, [_change(row, wal_id) for row in rows])

    def _check_not_removed(self, wal_id: WalId) -> None:
        """Raise if `wal_id` is missing although the log goes on behind it."""
        left = next(self._list(wal_id + 1), None)
        # Asked again after the listing: both files may have been created since the first look.
        if left is None or self._load(wal_id) is not None:
            return
        raise InvalidRequest(
            f"file {wal_id} of the log of {self._paths.root} was removed by garbage collection before it was read; "
            f"changes can be read from {left.wal_id} on, and what was missed is in the tables: copy the database "
            "once more before going on from there"
        )


def _change(row: EntryTuple, wal_id: WalId) -> Change:
    key, seq, kind, value, created_ms, expires_ms = row
    return Change(
        _OPERATIONS[kind], key, None if kind == TOMBSTONE else value, seq, created_ms, expires_ms, wal_id
    )


def _checked(wal_id: int) -> WalId:
    if wal_id < 1:
        raise InvalidRequest(f"WAL ids start at 1; {wal_id} is none")
    return WalId(wal_id)
