"""`AsyncDbReader`, `AsyncWalReader` and `AsyncChangeFeed`: readers for an event loop. Threads make the requests."""
# ruff: noqa: SLF001 - the classes use private members of their blocking twins

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from flagstone.changes.change import Change, ChangeBatch, WalFile
from flagstone.changes.reader import DEFAULT_MAX_POLL_S, DEFAULT_POLL_S, Pace, WalReader
from flagstone.db.aio.read_methods import AsyncClosing, AsyncHandle
from flagstone.db.reader.feed import ChangeFeed
from flagstone.db.reader.reader import DbReader
from flagstone.db.status import ReaderStatus

if TYPE_CHECKING:
    from flagstone.runtime.sync import Event

T = TypeVar("T")


class AsyncDbReader(AsyncHandle):
    """A database open for reading only, for any number of tasks; see `DbReader`. Close it, or use `async with`."""

    def __init__(self, reader: DbReader) -> None:
        self._reads: DbReader = reader

    async def status(self) -> ReaderStatus:
        """What the reader shows and how it follows the database, as plain values."""
        return self._reads.status()

    async def refresh(self) -> None:
        """Show what is on the store now, without waiting for the next poll. See `DbReader.refresh`."""
        await asyncio.to_thread(self._reads.refresh)


class AsyncWalReader(AsyncClosing):
    """Reads the WAL of a database; see `WalReader`. `AsyncWalReader(WalReader(path))` makes no request."""

    def __init__(self, reader: WalReader) -> None:
        self._reader = reader

    def __repr__(self) -> str:
        return f"Async{self._reader!r}"

    async def files(self, start_id: int | None = None) -> list[WalFile]:
        """The WAL files from `start_id` on (None: all there are), ascending. One listing."""
        return await asyncio.to_thread(self._reader.files, start_id)

    async def read(self, wal_id: int) -> ChangeBatch:
        """The changes of one WAL file; see `WalReader.read`."""
        return await asyncio.to_thread(self._reader.read, wal_id)

    def batches(
        self, start_id: int | None = None, *, stop_id: int | None = None
    ) -> AsyncIterator[ChangeBatch]:
        """The files from `start_id` up to `stop_id`, or to the current end of the WAL; see `WalReader.batches`."""
        return _awaited(self._reader.batches(start_id, stop_id=stop_id))

    async def changes(
        self, start_id: int | None = None, *, stop_id: int | None = None
    ) -> AsyncIterator[Change]:
        """The rows of `batches`, one by one."""
        async for batch in self.batches(start_id, stop_id=stop_id):
            for change in batch.changes:
                yield change

    async def follow(
        self,
        start_id: int | Sequence[int] | None = None,
        *,
        poll_interval_s: float = DEFAULT_POLL_S,
        max_poll_interval_s: float = DEFAULT_MAX_POLL_S,
        timeout_s: float | None = None,
        allow_gaps: bool = False,
        stop: Event | None = None,
    ) -> AsyncIterator[ChangeBatch]:
        """Every change from `start_id` on, endlessly; see `WalReader.follow`. Cancelling the task ends it at once."""
        pace = Pace(poll_interval_s, max_poll_interval_s, timeout_s)
        follower = self._reader._follower(start_id, pace, allow_gaps=allow_gaps)
        while stop is None or not stop.is_set():
            batch, wait_s = await asyncio.to_thread(follower.take)
            if batch is not None:
                yield batch
            elif wait_s is None:
                return
            elif wait_s:
                await asyncio.sleep(wait_s)

    @property
    def position(self) -> int | None:
        """The WAL file at which the consumer continues; None if it has not begun, or has no retention checkpoint."""
        return self._reader.position

    async def commit(self, batch: ChangeBatch) -> None:
        """Record that the consumer has used `batch` and all before it; see `WalReader.commit`."""
        await asyncio.to_thread(self._reader.commit, batch)

    async def release(self) -> None:
        """Delete the retention checkpoint: the WAL is no longer kept for this consumer."""
        await asyncio.to_thread(self._reader.release)

    async def close(self) -> None:
        """Store what was committed; the retention checkpoint stays. Closing twice is fine; the reader stays usable."""
        await asyncio.to_thread(self._reader.close)


class AsyncChangeFeed(AsyncWalReader):
    """A snapshot when a consumer begins, and all changes after it; see `ChangeFeed`. Made by `aio.open_feed`."""

    def __init__(self, feed: ChangeFeed) -> None:
        super().__init__(feed)
        self._feed = feed

    @property
    def snapshot(self) -> AsyncDbReader | None:
        """The database at one moment, to be copied; None once the consumer has copied it."""
        shown = self._feed.snapshot
        return None if shown is None else AsyncDbReader(shown)

    @property
    def seq(self) -> int:
        """The sequence number up to which the consumer has all changes, or will have after copying the snapshot."""
        return self._feed.seq

    async def copied(self) -> None:
        """Record that the copy of the snapshot is stored: from now on the consumer receives changes only."""
        await asyncio.to_thread(self._feed.copied)


async def _awaited(blocking: Iterator[T]) -> AsyncIterator[T]:
    end = object()
    while (item := await asyncio.to_thread(next, blocking, end)) is not end:
        yield item  # type: ignore[misc]
