"""WAL files in order, fetched ahead: as many at once as the memory they take allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.pool import Future, IoPool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import WalId

DEFAULT_PARALLELISM: Final = 16
DEFAULT_BYTES_IN_FLIGHT: Final = 64 * 1024 * 1024
_FIRST_WINDOW: Final = 2
_NEARBY: Final = ("file:", "memory:")
_QUICK_S: Final = 0.001
_HICCUPS_S: Final = 0.004
"""A busy machine delays a read now and then; only a store that is slow on average is worth other threads."""


class FetchedWal(NamedTuple):
    """The bytes of one WAL file; None when it does not exist."""

    wal_id: WalId
    stored: bytes | None


def plan_window(*, fetched: int, largest_bytes: int, parallelism: int, max_bytes: int) -> int:
    """How many files may be under way after `fetched` of them, the largest of that size; at least one.

    Sizes are unknown before a file has arrived, so the window starts small and grows with what was learnt.
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
    """Each file in the order asked, one GET per file, later ones already under way while one is used.

    What is read ahead stays within `max_bytes_in_flight`, judged by the largest file met so far; a single file
    larger than that is still read. Without a `pool`, files are read one by one in the caller's thread, and so are
    those of a store in memory or on a disk for as long as it answers at once: another thread would cost more than
    the read. Abandoning the iterator cancels what has not started.
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
    quick = wal_store.url.startswith(_NEARBY)
    allowed_s = _HICCUPS_S
    while quick and (wal_id := next(waiting, None)) is not None:
        started = clock.monotonic()
        arrived = load(wal_id)
        allowed_s += _QUICK_S - (clock.monotonic() - started)
        quick = allowed_s > 0
        largest = max(largest, len(arrived.stored or b""))
        yield arrived
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
