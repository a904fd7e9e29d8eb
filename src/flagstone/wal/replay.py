"""Reading WAL files: the rows of one file, many files fetched ahead, and the replay of what SSTs do not have yet.

A WAL file is an SST with rows in commit order. An empty file is a fence: it takes an id away from a writer that was
replaced. Releases before 0.14 wrote an SST without a block instead. `VOID` takes an id away from a writer with several
files under way. A file that is cut short, to however few bytes, is damage.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import accumulate, chain, islice, pairwise
from typing import Final, NamedTuple, Self

from flagstone.errors import CorruptData, Unavailable
from flagstone.format.plain_wal import find_plain_blocks
from flagstone.format.sst import FORMAT_V2, decode_sst
from flagstone.format.sst_info import SstType
from flagstone.kernels import block_reader
from flagstone.kernels import memtable as kernel
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.pool import Future, IoPool
from flagstone.store.paths import DbPaths
from flagstone.store.port import NEARBY, ObjectMissing, ObjectStore
from flagstone.types import MAX_KEY_BYTES, EntryTuple, WalId
from flagstone.wal.frontier import VOID, check_step


class WalRows:
    """The rows of a WAL file in commit order, checked and still encoded.

    `first_seq` and `last_seq` are the smallest and the largest sequence number, 0 without rows.
    """

    __slots__ = ("_bounds", "_chunk", "_longest_key", "_rows", "count", "first_seq", "last_seq")

    def __init__(self, chunk: bytes, bounds: array[int]) -> None:
        """From blocks of format version 2 in a chunk. Raises `CorruptData` with an offset inside a block."""
        self._chunk = chunk
        self._bounds = bounds
        self._rows: list[EntryTuple] | None = None
        self.count: int
        self.first_seq: int
        self.last_seq: int
        self.count, self.first_seq, self.last_seq, self._longest_key = block_reader.check_rows(chunk, bounds)

    @classmethod
    def from_rows(cls, rows: list[EntryTuple]) -> Self:
        """From at least one row that was decoded before."""
        made = cls(b"", _NO_BLOCKS)
        made._rows = rows
        made.count = len(rows)
        made.first_seq, made.last_seq = block_reader.seq_range(rows)
        made._longest_key = max(len(row[0]) for row in rows)
        return made

    @property
    def has_long_key(self) -> bool:
        """Whether a key is too long for a memtable."""
        return self._longest_key > MAX_KEY_BYTES

    def decode(self) -> list[EntryTuple]:
        """The rows as entry tuples."""
        if self._rows is not None:
            return self._rows
        edges = iter(self._bounds)
        return [
            row
            for start, stop in zip(edges, edges, strict=True)
            for row in block_reader.decode_rows(self._chunk[start:stop])
        ]

    @property
    def size(self) -> int:
        """About how many bytes the rows have."""
        return len(self._chunk)

    def blocks(self) -> list[bytes] | None:
        """The blocks of the rows, of format version 2; None if the file has an older format."""
        if self._rows is not None:
            return None
        edges = iter(self._bounds)
        return [self._chunk[start:stop] for start, stop in zip(edges, edges, strict=True)]

    def insert_into(self, memtable: kernel.Memtable, after_seq: int) -> tuple[int, int | None]:
        """Add the rows above `after_seq` to a memtable, as a rule without a Python object for each.

        Returns the largest sequence number and the latest creation among them.
        """
        found: tuple[int, int | None]
        if self._rows is None and not self.has_long_key:
            found = memtable.insert_blocks(self._chunk, self._bounds, after_seq)
        else:
            found = memtable.insert_rows([row for row in self.decode() if row[1] > after_seq])
        return found


_NO_BLOCKS: Final = array("q")


def open_wal(stored: bytes, path: str) -> WalRows:
    """The rows of a WAL file; none for a fence. Raises `CorruptData` naming object and offset."""
    if not stored or stored == VOID:
        return WalRows(b"", _NO_BLOCKS)
    with suppress(CorruptData):  # `decode_sst` and `rows` below find the same damage, and its offset
        bounds = find_plain_blocks(stored)
        if bounds is not None:
            return WalRows(stored, bounds)
    image = decode_sst(stored, path)
    if image.info.sst_type is not SstType.WAL:
        raise CorruptData(
            "an SST of L0 or of a sorted run where a WAL file was expected", object=path, offset=0
        )
    with suppress(CorruptData):
        if image.version == FORMAT_V2:
            blocks = [image.block(number) for number in range(len(image.index))]
            edges = pairwise(accumulate(map(len, blocks), initial=0))
            return WalRows(b"".join(blocks), array("q", chain.from_iterable(edges)))
    rows = [row for block in image.rows() for row in block]
    return WalRows.from_rows(rows) if rows else WalRows(b"", _NO_BLOCKS)


def decode_wal(stored: bytes, path: str) -> list[EntryTuple]:
    """The rows of a WAL file in commit order; none for a fence. Raises `CorruptData` naming object and offset."""
    return open_wal(stored, path).decode()


DEFAULT_PARALLELISM: Final = 16
DEFAULT_BYTES_IN_FLIGHT: Final = 64 * 1024 * 1024
_FIRST_WINDOW: Final = 2
_QUICK_S: Final = 0.001
_HICCUPS_S: Final = 0.004
"""A busy machine delays a read now and then; only a store that is slow on average justifies other threads."""
_NEAR_PROBES: Final = 16
_NEAR_AT_ONCE: Final = 8
_NEAR_BYTES: Final = 256 * 1024
"""After some quick reads, a few small files are read in a row: the caches of the processor then serve one task at a
time, which saves a tenth."""


class FetchedWal(NamedTuple):
    """The bytes of one WAL file; None when it does not exist."""

    wal_id: WalId
    stored: bytes | None


def plan_window(*, fetched: int, largest_bytes: int, parallelism: int, max_bytes: int) -> int:
    """How many files may be in flight after `fetched` of them, the largest of that size; at least one.

    Sizes are unknown before a file has arrived, so the window starts small and grows.
    """
    affordable = max_bytes // largest_bytes if largest_bytes else parallelism
    return max(1, min(parallelism, _FIRST_WINDOW * (1 + fetched), affordable))


def fetch_in_order(
    wal_store: ObjectStore,
    paths: DbPaths,
    wal_ids: Iterable[WalId],
    *,
    pool: IoPool | None = None,
    parallelism: int = DEFAULT_PARALLELISM,
    max_bytes_in_flight: int = DEFAULT_BYTES_IN_FLIGHT,
    clock: Clock = SYSTEM_CLOCK,
) -> Iterator[FetchedWal]:
    """Each file in the given order, one GET per file, later files in flight while one is used.

    The read-ahead stays within `max_bytes_in_flight`, judged by the largest file so far; a single file larger than
    that is still read. Without a `pool`, files are read one by one in the caller's thread, and so are those of a store
    in memory or on a disk for as long as it answers at once: another thread would cost more than the read. Abandoning
    the iterator cancels requests that have not started.
    """
    waiting = iter(wal_ids)

    def load(wal_id: WalId) -> FetchedWal:
        try:
            return FetchedWal(wal_id, wal_store.get(paths.wal(wal_id)).data)
        except ObjectMissing:
            return FetchedWal(wal_id, None)

    if pool is None:
        yield from map(load, waiting)
        return
    under_way: deque[Future[FetchedWal]] = deque()
    fetched = largest = 0
    quick = wal_store.url.startswith(NEARBY)
    allowed_s = _HICCUPS_S
    at_once = 1
    read = 0
    while quick and (near := list(islice(waiting, at_once))):
        started = clock.monotonic()
        files = [load(wal_id) for wal_id in near]
        allowed_s += len(files) * _QUICK_S - (clock.monotonic() - started)
        quick = allowed_s > 0
        read += len(files)
        largest = max(largest, *(len(file.stored or b"") for file in files))
        if read >= _NEAR_PROBES:
            at_once = plan_window(
                fetched=read, largest_bytes=largest, parallelism=_NEAR_AT_ONCE, max_bytes=_NEAR_BYTES
            )
        yield from files
    try:
        while True:
            window = plan_window(
                fetched=fetched,
                largest_bytes=largest,
                parallelism=parallelism,
                max_bytes=max_bytes_in_flight,
            )
            while len(under_way) < window and (wal_id := next(waiting, None)) is not None:
                under_way.append(pool.submit(load, wal_id))
            if not under_way:
                return
            arrived = under_way.popleft().result()
            fetched += 1
            largest = max(largest, len(arrived.stored or b""))
            yield arrived
    finally:
        for future in under_way:
            future.cancel()


class WalTruncated(Unavailable):
    """A WAL file vanished during the replay: read the manifest again and start over.

    Files are removed only after their rows are in SSTs, so the manifest that needs this one is out of date. If a fresh
    manifest needs it too, the WAL has a hole, and `verify` names it.
    """


class ReplayedFile(NamedTuple):
    """One WAL file; `size` is that of the stored file. Rows up to `skip_through_seq` are in SSTs already."""

    wal_id: WalId
    content: WalRows
    size: int
    skip_through_seq: int

    @property
    def rows(self) -> list[EntryTuple]:
        """The rows that are not in SSTs. Each call decodes them again."""
        rows = self.content.decode()
        if self.content.first_seq > self.skip_through_seq:
            return rows
        return [row for row in rows if row[1] > self.skip_through_seq]

    def insert_into(self, memtable: kernel.Memtable) -> tuple[int, int | None]:
        """Add these rows to a memtable; returns as `WalRows.insert_into` does."""
        return self.content.insert_into(memtable, self.skip_through_seq)


class Replayed:
    """How far a WAL was replayed: the last sequence number, its file, and the empty files since.

    `step_id` is the last file before which sequence numbers are neither in the WAL nor in the SSTs of the manifest.
    """

    def __init__(self) -> None:
        self.last_seq: int = -1
        self.last_id: WalId = WalId(0)
        self.step_id: WalId = WalId(0)
        self.empty: list[WalId] = []


def replay(
    wal_store: ObjectStore,
    paths: DbPaths,
    after: WalId,
    last: WalId,
    *,
    skip_through_seq: int = 0,
    writers: int | None = None,
    settled: WalId | None = None,
    before: Replayed | None = None,
    pool: IoPool | None = None,
) -> Iterator[ReplayedFile]:
    """Every file above `after` up to and including `last`, in order; fences come as files without rows.

    Rows up to `skip_through_seq` are left out: the WAL usually overlaps the SSTs by a file. `writers` is how many
    writers have claimed the database and may have left a fence up to `last`; with it, a file that lost its rows is
    detected. It ends before the first empty file above `settled`, where a takeover is under way
    (`flagstone.wal.takeover`). `before` is the state of the replay up to `after`, and is updated file by file. Reads
    only, so a crash changes nothing. Memory is bounded by the read-ahead of `fetch_in_order`, plus the rows of the
    current file.

    Raises:
        WalTruncated: a file has vanished. A writer must first check whether it was replaced.
        WalDamaged: sequence numbers are missing. The manifest may be out of date.
        CorruptData: a file is damaged, or begins before the previous file ended; names the object.

    """
    wal_ids = (WalId(wal_id) for wal_id in range(after + 1, last + 1))
    fetched = fetch_in_order(wal_store, paths, wal_ids, pool=pool)
    done = before or Replayed()
    for wal_id, stored in fetched:
        path = paths.wal(wal_id)
        if stored is None:
            raise WalTruncated(
                f"{path} has vanished from {wal_store.url}, but the WAL is to be replayed up to {last}; read the "
                "manifest again and start over, and if the file is still missing, verify the database"
            )
        if not stored and settled is not None and wal_id > settled:
            return
        content = open_wal(stored, path)
        if not stored:
            done.empty.append(wal_id)
        if content.count:
            first = content.first_seq
            if first <= done.last_seq:
                raise CorruptData(
                    f"out-of-order sequence numbers across WAL files: {first} after {done.last_seq} in file "
                    f"{done.last_id}",
                    object=path,
                )
            seen_seq = max(done.last_seq, skip_through_seq)
            if first > seen_seq + 1:
                done.step_id = wal_id
            if done.empty and writers is not None:
                check_step(
                    wal_store,
                    paths,
                    done.empty,
                    seen_seq=seen_seq,
                    first_seq=first,
                    end=last,
                    writers=writers,
                )
            done.last_seq, done.last_id, done.empty = content.last_seq, wal_id, []
        yield ReplayedFile(wal_id, content, len(stored), skip_through_seq)
