"""`SstStore`: opens, fetches and uploads SSTs.

Everything here may block, except `open` and `drop`. A fetch changes only memory, so a crash leaves
nothing behind. A crash during an upload leaves parts without a name, or a complete SST that no manifest refers to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from flagstone.errors import Unavailable
from flagstone.format.filter import Filters
from flagstone.format.sst import BlockIndex, open_stats
from flagstone.format.sst_info import SsTableInfo, SstStats
from flagstone.runtime import metric_names
from flagstone.runtime.budget import MemoryBudget
from flagstone.runtime.grants import MemoryPart
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.operations import Operation
from flagstone.runtime.pool import IoPool, shared_pool
from flagstone.runtime.sync import Event, Lock
from flagstone.sst.builder import BuiltSst
from flagstone.sst.cache import SstCache
from flagstone.sst.output import SstOutput
from flagstone.sst.reader import FILTERS, INDEX, META, Sst, SstMeta
from flagstone.sst.requests import Need, plan_requests
from flagstone.store.caching import read_checked
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import Ulid

SMALL_SST_BYTES: Final = 32 * 1024
"""An SST up to this size is fetched whole with its index: another request costs more than the bytes."""

_FOOTER_GUESS_BYTES: Final = 1024
"""The length of most footers, or more."""

DEFAULT_READ_AHEAD_BUDGET: Final = 128 * 1024 * 1024
"""Four scans at full speed, each with the default of `read_ahead_bytes`."""

_FRESH_SSTS: Final = 16
"""Index and filters of this many uploaded SSTs are kept for their first read."""

_FRESH_BYTES: Final = 64 * 1024 * 1024
"""And at most so much of them."""

Pinned = dict[tuple[Sst, int], Any]
"""What was fetched for one read, in the form that `kernels.probe.find` takes."""


class SstGone(Unavailable):
    """The object of an SST is missing.

    Garbage collection deletes SSTs that no manifest and no checkpoint refers to. The read uses a view older than that:
    the engine catches this error, takes a newer view and reads again. If the newest manifest still refers to the SST,
    the SST is lost, and the engine raises `CorruptData`. Any other caller gets this `Unavailable`, because the next
    read may succeed.
    """

    def __init__(self, sst_id: Ulid, path: str) -> None:
        super().__init__(f"the SST at {path} is gone: this view is too old; read again with a newer one")
        self.sst_id = sst_id
        self.path = path

    def __reduce__(self) -> tuple[type[SstGone], tuple[Ulid, str]]:
        return (type(self), (self.sst_id, self.path))


class ReadCounts:
    """Cache and filter counters of reads, under SlateDB's names.

    Each SST counts its hits without a lock, and a report of the metrics collects them. Misses are counted with each
    request. With interpreted kernels two threads that count at once may lose a count.
    """

    def __init__(self, metrics: Metrics) -> None:
        kinds = ("filter", "index", "data_block")
        hits, misses = (
            [
                metrics.counter(metric_names.DB_CACHE_ACCESS_COUNT, entry_kind=kind, result=result)
                for kind in kinds
            ]
            for result in ("hit", "miss")
        )
        self._filter_hits, self._index_hits, self._block_hits = hits
        self._filter_misses, self._index_misses, self._block_misses = misses
        self._positives, self._negatives, self._false_positives = (
            metrics.counter(name, kind="point")
            for name in (
                metric_names.DB_SST_FILTER_POSITIVE_COUNT,
                metric_names.DB_SST_FILTER_NEGATIVE_COUNT,
                metric_names.DB_SST_FILTER_FALSE_POSITIVE_COUNT,
            )
        )

    def parts_missed(self, sst: Sst, parts: Sequence[int]) -> None:
        """A request fetches the index or the filters of an SST, or both."""
        if INDEX in parts:
            self._index_misses.add()
        if FILTERS in parts and sst.info.filter_len:
            self._filter_misses.add()

    def blocks_missed(self, count: int) -> None:
        """A request fetches `count` blocks."""
        self._block_misses.add(count)

    def collect(self, sst: Sst) -> None:
        """Add what an SST has counted since the last call."""
        positives, negatives, false_positives, index_hits, block_hits = sst.take_counts()
        self._positives.add(positives)
        self._negatives.add(negatives)
        self._false_positives.add(false_positives)
        self._filter_hits.add(positives + negatives)
        self._index_hits.add(index_hits)
        self._block_hits.add(block_hits)


FLIGHT_PATIENCE_S: Final = 30.0
"""How long a read waits for a request of another read before it makes its own."""


class _Flight:
    """A request under way; `pieces` stays None if it fails."""

    __slots__ = ("landed", "pieces")

    def __init__(self) -> None:
        self.landed = Event()
        self.pieces: Pinned | None = None


class SstStore:
    """Opens, fetches and uploads the SSTs of one database. Safe to use from many threads.

    With `memory` its scans share the read-ahead of all databases of that budget, otherwise they have one of their own.
    """

    def __init__(
        self,
        store: ObjectStore,
        paths: DbPaths,
        *,
        cache: SstCache | None = None,
        pool: IoPool | None = None,
        metrics: Metrics | None = None,
        small_sst_bytes: int = SMALL_SST_BYTES,
        memory: MemoryBudget | None = None,
    ) -> None:
        registry = metrics or Metrics()
        self._small_sst_bytes = small_sst_bytes
        self._store = store
        self._paths = paths
        self.cache: Final = cache or SstCache(metrics=registry)
        self.pool: Final = pool or shared_pool()
        self.read_ahead: Final = (
            MemoryPart(DEFAULT_READ_AHEAD_BUDGET) if memory is None else memory.read_ahead
        )
        """The memory for what scans fetch before they need it."""
        self._counts = ReadCounts(registry)
        self.reading: Final = {
            op: Operation(registry.histogram(metric_names.DB_OPERATION_SECONDS, op=op), op)
            for op in ("get", "multi_get", "scan")
        }
        """Reads that wait for the store."""
        self._lock = Lock()
        self._ssts: dict[Ulid, Sst] = {}
        self._lenders: dict[str, DbPaths] = {}
        self._fresh: dict[Ulid, bytes] = {}
        self._fresh_grant = (MemoryPart(_FRESH_BYTES) if memory is None else memory.fresh).open()
        self._flights: dict[tuple[Sst, int], _Flight] = {}

    def open(
        self,
        sst_id: Ulid,
        info: SsTableInfo,
        format_version: int = 2,
        owner: str | None = None,
        *,
        record_checked: bool = False,
    ) -> Sst:
        """The open SST with that id: the same Python object until it is dropped. Makes no request.

        `owner` is the path of the lender of a borrowed SST; None for an SST of this database. `record_checked` says
        that `info` comes from a manifest with a checksum.
        """
        with self._lock:
            sst = self._ssts.get(sst_id)
            if sst is None:
                paths = self._paths if owner is None else self._paths_of(owner)
                small = info.estimated_size <= self._small_sst_bytes
                sst = self._ssts[sst_id] = Sst(
                    sst_id, paths, info, format_version, small, record_checked=record_checked
                )
            return sst

    def _paths_of(self, lender: str) -> DbPaths:
        if lender not in self._lenders:
            self._lenders[lender] = DbPaths(lender)
        return self._lenders[lender]

    def drop(self, sst_ids: Iterable[Ulid]) -> None:
        """Forget SSTs that left the manifest. Reads that still use them continue, without the cache."""
        with self._lock:
            dropped = [sst for sst_id in sst_ids if (sst := self._ssts.pop(sst_id, None))]
            for sst in dropped:
                self._pop_fresh(sst.id)
        for sst in dropped:
            self._counts.collect(sst)
            self.cache.drop(sst)

    def close(self) -> None:
        """Release the memory of all SSTs: other databases may share the cache. Reads under way continue."""
        with self._lock:
            opened = list(self._ssts)
            self._fresh.clear()
            self._fresh_grant.size = 0
        self.drop(opened)

    def report(self) -> None:
        """Update the read counters with the hits that the SSTs have counted."""
        with self._lock:
            ssts = list(self._ssts.values())
        for sst in ssts:
            self._counts.collect(sst)

    def output(self, new_id: Callable[[], Ulid]) -> SstOutput:
        """Uploads SSTs while they are built.

        Index and filters, or the whole SST if it is small, are kept in memory for its first read.
        """
        return SstOutput(self._store, self._paths, new_id, committed=self._keep_fresh)

    def _keep_fresh(self, sst_id: Ulid, built: BuiltSst, whole: bytes | None) -> None:
        if self.cache.capacity_bytes:
            small = built.info.estimated_size <= self._small_sst_bytes
            # The store takes a small SST in one request, so that its bytes are still there.
            kept = whole if small else built.tail
            if kept is not None:
                with self._lock:
                    if len(self._fresh) == _FRESH_SSTS:
                        self._pop_fresh(next(iter(self._fresh)))
                    if self._fresh_grant.grow(len(kept)):
                        self._fresh[sst_id] = kept

    def _pop_fresh(self, sst_id: Ulid) -> bytes | None:
        """Give out what is kept of an uploaded SST. The caller holds the lock."""
        kept = self._fresh.pop(sst_id, None)
        if kept is not None:
            self._fresh_grant.size = sum(map(len, self._fresh.values()))
        return kept

    def fetch(self, needs: Sequence[Need], *, admit: bool = True) -> Pinned:
        """Everything the needs name, in few concurrent requests. With `admit` the blocks go into the cache, too.

        Raises:
            SstGone: an object was deleted.
            CorruptData: an object is damaged.
            Unavailable: the store did not answer.

        """
        requests = plan_requests(needs)
        fetched: Pinned = {}
        for part in self.pool.map_ordered(lambda need: self.fetch_request(need, admit=admit), requests):
            fetched.update(part)
        return fetched

    def fetch_request(self, need: Need, *, admit: bool = True) -> Pinned:
        """Make one request of `plan_requests`. Parts that another read is fetching are awaited, not fetched again."""
        sst: Sst = need.sst
        fetched: Pinned = {}
        mine: list[int] = []
        others: dict[int, _Flight] = {}
        own = _Flight()
        with self._lock:
            for number in self._parts(sst, need.numbers):
                held = _held(sst, number)
                if held is not None:
                    fetched[sst, number] = held
                elif (flight := self._flights.get((sst, number))) is not None:
                    others[number] = flight
                else:
                    mine.append(number)
                    self._flights[sst, number] = own
        if mine:
            try:
                own.pieces = self._load(sst, need.index, sorted(mine), admit=admit)
                fetched.update(own.pieces)
            finally:
                # After a failure, too: other reads wait for this event.
                with self._lock:
                    for number in mine:
                        self._flights.pop((sst, number), None)
                own.landed.set()
        # Only after the own request has ended: two reads that wait for each other must not block forever.
        failed = []
        for number, flight in others.items():
            landed = flight.landed.wait(FLIGHT_PATIENCE_S)
            if landed and flight.pieces is not None:
                fetched[sst, number] = flight.pieces[sst, number]
                continue
            failed.append(number)
            if not landed:
                # An interrupt may have ended the thread of that request before it could set the event.
                with self._lock:
                    if self._flights.get((sst, number)) is flight:
                        del self._flights[sst, number]
        if failed:
            # The other read has raised its error. This read makes a request of its own.
            fetched.update(self._load(sst, need.index, sorted(failed), admit=admit))
        if not need.numbers:
            fetched[sst, META] = SstMeta(fetched[sst, INDEX], fetched.get((sst, FILTERS))).pinned
        return fetched

    def _parts(self, sst: Sst, numbers: Sequence[int]) -> Sequence[int]:
        """What to fetch for a need with these numbers. The caller holds the lock.

        The index comes with the filters where they cost nothing: in an SST that is fetched whole, and in the bytes that
        are kept of an upload.
        """
        if not numbers or (numbers[0] == INDEX and (sst.fetched_whole or sst.id in self._fresh)):
            return (INDEX, FILTERS) if sst.info.filter_len else (INDEX,)
        return numbers

    def fetch_stats(self, sst: Sst) -> SstStats | None:
        """The statistics of an SST, in one request; None if it has none. They are not cached.

        Raises as `fetch` does.
        """
        info = sst.info
        if not info.stats_len:
            return None
        start, stop = info.stats_offset, info.stats_offset + info.stats_len
        try:
            return read_checked(
                self._store, sst.path, start, stop, lambda stored: open_stats(stored, info, sst.path)
            )
        except ObjectMissing:
            raise SstGone(sst.id, sst.path) from None

    def _load(self, sst: Sst, index: BlockIndex | None, numbers: list[int], *, admit: bool) -> Pinned:
        try:
            if numbers[0] < 0:
                return self._load_parts(sst, numbers, admit=admit)
            assert index is not None, "a need for blocks carries the index"
            return self._load_blocks(sst, index, numbers, admit=admit)
        except ObjectMissing:
            raise SstGone(sst.id, sst.path) from None

    def _load_parts(self, sst: Sst, parts: Sequence[int], *, admit: bool) -> Pinned:
        """Fetch the index, the filters, or both in one request."""
        self._counts.parts_missed(sst, parts)
        fresh = None
        if INDEX in parts:
            with self._lock:
                fresh = self._pop_fresh(sst.id)
        if fresh is not None or sst.fetched_whole or len(parts) == 2:
            start, stop = sst.meta_range
        else:
            start, stop = sst.index_range if INDEX in parts else sst.filter_range

        def decode(stored: bytes) -> tuple[BlockIndex | None, Filters | None, list[bytes]]:
            filters = sst.decode_filters(stored, start) if FILTERS in parts else None
            if INDEX not in parts:
                return None, filters, []
            index = sst.decode_index(stored, start)
            if stop == sst.footer_range[1] and not sst.has_footer(stored, start):
                compare_footer(self._store, sst)
            every = range(len(index)) if sst.fetched_whole else range(0)
            return index, filters, sst.decode_blocks(stored, index, every, 0)

        if fresh is None:
            index, filters, raws = read_checked(self._store, sst.path, start, stop, decode)
        else:
            index, filters, raws = decode(fresh)
        self.cache.admit_parts(sst, index, filters)
        brought = {INDEX: index, FILTERS: filters}
        fetched: Pinned = {(sst, part): brought[part] for part in parts}
        if index is not None:
            fetched.update(self._admitted(sst, index, range(len(raws)), raws, admit=admit))
        return fetched

    def _load_blocks(self, sst: Sst, index: BlockIndex, numbers: list[int], *, admit: bool) -> Pinned:
        start, stop = index.offsets[numbers[0]], index.stops[numbers[-1]]
        self._counts.blocks_missed(len(numbers))
        raws = read_checked(
            self._store,
            sst.path,
            start,
            stop,
            lambda stored: sst.decode_blocks(stored, index, numbers, start),
        )
        return self._admitted(sst, index, numbers, raws, admit=admit)

    def _admitted(
        self, sst: Sst, index: BlockIndex, numbers: Sequence[int], raws: list[bytes], *, admit: bool
    ) -> Pinned:
        if admit:
            for number, raw in zip(numbers, raws, strict=True):
                self.cache.admit_block(sst, number, raw, count=len(index))
        return {(sst, number): raw for number, raw in zip(numbers, raws, strict=True)}


def compare_footer(store: ObjectStore, sst: Sst) -> None:
    """Read the footer of an SST. Raises `CorruptData` if it differs from the record that the SST was opened with."""
    length: int | None = _FOOTER_GUESS_BYTES
    while length is not None:
        tail = store.get_tail(sst.path, length)
        length = sst.check_footer(tail.data, tail.meta.size)


def _held(sst: Sst, number: int) -> Any:
    if number >= 0:
        return sst.held_block(number)
    return sst.use_index() if number == INDEX else sst.filters
