"""Tables on the store: opened without a request, fetched in few, uploaded whole.

Everything here may block, except `open`, `drop` and `plan_requests`. A fetch changes nothing but memory, so a
crash leaves nothing behind; an upload that is cut off leaves no object or a whole one nobody refers to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from flagstone.errors import Unavailable
from flagstone.format.sst import BlockIndex
from flagstone.format.sst_info import SsTableInfo
from flagstone.kernels import probe as probe_kernel
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.pool import IoPool, shared_pool
from flagstone.runtime.sync import Event, Lock
from flagstone.sst.builder import EncodedSst
from flagstone.sst.cache import SstCache
from flagstone.sst.read_counts import ReadCounts
from flagstone.sst.reader import FILTERS, META, Sst, SstMeta
from flagstone.store.caching import read_checked
from flagstone.store.paths import DbPaths
from flagstone.store.port import MAX_FETCH_BYTES, ObjectMissing, ObjectStore
from flagstone.types import Ulid

Need = probe_kernel.Need

MAX_GAP_BYTES: Final = 64 * 1024
"""Blocks with less than this between them come in one request: the gap costs about a millisecond, a request ten."""

SMALL_TABLE_BYTES: Final = 32 * 1024
"""A table up to this size is fetched whole with its index: another request would cost more than the bytes."""

_FOOTER_GUESS_BYTES: Final = 1024
"""Enough for the record at the end of most files."""

_FRESH_TABLES: Final = 16
"""Of how many uploaded tables that nobody has read yet index and filters are remembered."""

Pinned = dict[tuple[Sst, int], Any]
"""What was fetched for one read, in the form `kernels.probe.find` takes it."""


class SstGone(Unavailable):
    """The object of a table is missing.

    Garbage collection removes tables that no manifest and no checkpoint refers to, so the reader's view is
    older than that: the engine catches this, takes a newer view and reads again. If the newest manifest
    still refers to the table, it is lost; then the engine says `CorruptData`. Where nobody catches it, the
    caller sees an `Unavailable`: the next read may succeed.
    """

    def __init__(self, table_id: Ulid, path: str) -> None:
        super().__init__(f"the table at {path} is gone: this view is too old; read again with a newer one")
        self.table_id = table_id
        self.path = path

    def __reduce__(self) -> tuple[type[SstGone], tuple[Ulid, str]]:
        return (type(self), (self.table_id, self.path))


FLIGHT_PATIENCE_S: Final = 30.0
"""How long a reader waits for what another one has asked for, before it asks for itself."""


class _Flight:
    """A request that somebody has begun; `pieces` is None when it failed."""

    __slots__ = ("landed", "pieces")

    def __init__(self) -> None:
        self.landed = Event()
        self.pieces: Pinned | None = None


class SstStore:
    """Opens, fetches and uploads the tables of one database. Safe to use from many threads."""

    def __init__(
        self,
        store: ObjectStore,
        paths: DbPaths,
        *,
        cache: SstCache | None = None,
        pool: IoPool | None = None,
        metrics: Metrics | None = None,
        small_table_bytes: int = SMALL_TABLE_BYTES,
    ) -> None:
        registry = metrics or Metrics()
        self._small_table_bytes = small_table_bytes
        self._store = store
        self._paths = paths
        self.cache: Final = cache or SstCache(metrics=registry)
        self.pool: Final = pool or shared_pool()
        self._counts = ReadCounts(registry)
        self._lock = Lock()
        self._tables: dict[Ulid, Sst] = {}
        self._fresh: dict[Ulid, bytes] = {}
        self._flights: dict[tuple[Sst, int], _Flight] = {}

    def open(
        self, table_id: Ulid, info: SsTableInfo, *, format_version: int = 2, owner: str | None = None
    ) -> Sst:
        """The table of that id: always the same object until it is dropped. Asks the store nothing.

        `owner` is the path of the database it was borrowed from; None for our own.
        """
        with self._lock:
            table = self._tables.get(table_id)
            if table is None:
                paths = self._paths if owner is None else DbPaths(owner)
                table = Sst(
                    table_id,
                    paths.table(table_id),
                    info,
                    format_version=format_version,
                    fetched_whole=info.estimated_size <= self._small_table_bytes,
                )
                self._tables[table_id] = table
            return table

    def drop(self, table_ids: Iterable[Ulid]) -> None:
        """Forget tables that left the manifest. Reads that still use them go on, without the cache's help."""
        with self._lock:
            dropped = [table for table_id in table_ids if (table := self._tables.pop(table_id, None))]
            for table in dropped:
                self._fresh.pop(table.id, None)
        for table in dropped:
            self._counts.collect(table)
            self.cache.drop(table)

    def report(self) -> None:
        """Bring the read counters up to date. Hits are counted in the tables, where counting costs nothing."""
        with self._lock:
            tables = list(self._tables.values())
        for table in tables:
            self._counts.collect(table)

    def upload(self, table_id: Ulid, encoded: EncodedSst) -> None:
        """Store a table under its id. Repeating it after a doubtful answer is harmless: the bytes are the same.

        Its index and filters, all of it if it is small, are kept for the first read: what was just written need not be
        fetched.
        """
        self._store.put(self._paths.table(table_id), encoded.data)
        if self.cache.capacity_bytes:
            info = encoded.info
            small = info.estimated_size <= self._small_table_bytes
            start = 0 if small else info.filter_offset if info.filter_len else info.index_offset
            with self._lock:
                self._fresh[table_id] = bytes(encoded.data[start:])
                if len(self._fresh) > _FRESH_TABLES:
                    del self._fresh[next(iter(self._fresh))]

    def fetch(self, needs: Sequence[Need], *, admit: bool = True) -> Pinned:
        """Everything the needs name, in few requests that overlap. With `admit`, blocks go into the cache, too.

        Raises:
            SstGone: an object was deleted.
            CorruptData: bytes are not what they should be.
            Unavailable: the store did not answer.

        """
        requests = plan_requests(needs)
        fetched: Pinned = {}
        for part in self.pool.map_ordered(lambda need: self.fetch_request(need, admit=admit), requests):
            fetched.update(part)
        return fetched

    def fetch_request(self, need: Need, *, admit: bool = True) -> Pinned:
        """One of `plan_requests`. What somebody else is already fetching is waited for and not asked again."""
        table: Sst = need.sst
        fetched: Pinned = {}
        mine: list[int] = []
        others: dict[int, _Flight] = {}
        own = _Flight()
        with self._lock:
            for number in need.numbers or (META,):
                held = _held(table, number)
                if held is not None:
                    fetched[table, number] = held
                elif (flight := self._flights.get((table, number))) is not None:
                    others[number] = flight
                else:
                    mine.append(number)
                    self._flights[table, number] = own
        if mine:
            try:
                own.pieces = self._load(table, need.index, sorted(mine), admit=admit)
                fetched.update(own.pieces)
            finally:
                # Even after a failure, or those who wait for us would wait for ever.
                with self._lock:
                    for number in mine:
                        self._flights.pop((table, number), None)
                own.landed.set()
        # Only after our own part is done: two readers that wait for each other must both come to an end.
        failed = []
        for number, flight in others.items():
            landed = flight.landed.wait(FLIGHT_PATIENCE_S)
            if landed and flight.pieces is not None:
                fetched[table, number] = flight.pieces[table, number]
                continue
            failed.append(number)
            if not landed:
                # An interrupt may have struck the thread whose request it was before it could say so.
                with self._lock:
                    if self._flights.get((table, number)) is flight:
                        del self._flights[table, number]
        if failed:
            # The failure was told to the one whose request it was. We ask for ourselves.
            fetched.update(self._load(table, need.index, failed, admit=admit))
        return fetched

    def _load(self, table: Sst, index: BlockIndex | None, numbers: list[int], *, admit: bool) -> Pinned:
        try:
            if numbers == [META]:
                return self._load_meta(table, admit=admit)
            assert index is not None, "a need for blocks carries the index"
            return self._load_blocks(table, index, numbers, admit=admit)
        except ObjectMissing:
            raise SstGone(table.id, table.path) from None

    def _load_meta(self, table: Sst, *, admit: bool) -> Pinned:
        start, stop = table.meta_range
        self._counts.meta_missed(table)
        with self._lock:
            fresh = self._fresh.pop(table.id, None)

        def decode(stored: bytes) -> tuple[SstMeta, list[bytes]]:
            meta = table.decode_meta(stored)
            if not table.has_footer(stored, start):
                compare_footer(self._store, table)
            every = range(len(meta.index)) if table.fetched_whole else range(0)
            return meta, table.decode_blocks(stored, meta.index, every, 0)

        if fresh is None:
            meta, raws = read_checked(self._store, table.path, start, stop, decode)
        else:
            meta, raws = decode(fresh)
        self.cache.admit_meta(table, meta)
        fetched: Pinned = {(table, META): meta.pinned, (table, FILTERS): meta.filters}
        fetched.update(self._admitted(table, meta.index, range(len(raws)), raws, admit=admit))
        return fetched

    def _load_blocks(self, table: Sst, index: BlockIndex, numbers: list[int], *, admit: bool) -> Pinned:
        start, stop = index.offsets[numbers[0]], index.stops[numbers[-1]]
        self._counts.blocks_missed(len(numbers))
        raws = read_checked(
            self._store,
            table.path,
            start,
            stop,
            lambda stored: table.decode_blocks(stored, index, numbers, start),
        )
        return self._admitted(table, index, numbers, raws, admit=admit)

    def _admitted(
        self, table: Sst, index: BlockIndex, numbers: Sequence[int], raws: list[bytes], *, admit: bool
    ) -> Pinned:
        if admit:
            for number, raw in zip(numbers, raws, strict=True):
                self.cache.admit_block(table, number, raw, count=len(index))
        return {(table, number): raw for number, raw in zip(numbers, raws, strict=True)}


def compare_footer(store: ObjectStore, table: Sst) -> None:
    """Read the record at the end of a file. Raises `CorruptData` when it is not the one the table was opened with."""
    length: int | None = _FOOTER_GUESS_BYTES
    while length is not None:
        tail = store.get_tail(table.path, length)
        length = table.check_footer(tail.data, tail.meta.size)


def plan_requests(needs: Iterable[Need]) -> list[Need]:
    """The same needs, each the work of one request: none twice, neighbouring blocks together."""
    by_table: dict[Sst, tuple[BlockIndex | None, set[int]]] = {}
    for need in needs:
        index, numbers = by_table.get(need.sst, (None, set()))
        numbers.update(need.numbers or (META,))
        by_table[need.sst] = (index or need.index, numbers)
    requests = []
    for table, (index, numbers) in by_table.items():
        if META in numbers:
            numbers.discard(META)
            requests.append(Need(table, None, []))
        if index is not None:
            requests += [Need(table, index, span) for span in _spans(index, sorted(numbers))]
    return requests


def _spans(index: BlockIndex, numbers: list[int]) -> Iterable[list[int]]:
    """The ascending numbers, cut where the gap is wide or a request would grow too large."""
    span: list[int] = []
    for number in numbers:
        if span and (
            index.offsets[number] - index.stops[span[-1]] > MAX_GAP_BYTES
            or index.stops[number] - index.offsets[span[0]] > MAX_FETCH_BYTES
        ):
            yield span
            span = []
        span.append(number)
    if span:
        yield span


def _held(table: Sst, number: int) -> Any:
    if number != META:
        return table.held_block(number)
    meta: SstMeta | None = table.meta
    return None if meta is None else meta.pinned
