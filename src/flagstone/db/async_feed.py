"""Change data for an event loop: `WalReader` and `ChangeFeed`, awaited. Requests are made on other threads."""
# ruff: noqa: SLF001 - two faces of one thing

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from flagstone.db.async_reader import AsyncDbReader
from flagstone.db.feed import ChangeFeed
from flagstone.wal.changes import Change, ChangeBatch
from flagstone.wal.tail import DEFAULT_MAX_POLL_S, DEFAULT_POLL_S, WalFile, WalReader
from flagstone.wal.turns import Pace

if TYPE_CHECKING:
    from flagstone.runtime.sync import Event

T = TypeVar("T")


class AsyncWalReader:
    """Reads the log of a database; see `WalReader`. `AsyncWalReader(WalReader(path))` asks the store nothing."""

    def __init__(self, reader: WalReader) -> None:
        self._reader = reader

    def __repr__(self) -> str:
        return f"Async{self._reader!r}"

    async def files(self, start_id: int | None = None) -> list[WalFile]:
        """The files of the log from `start_id` on (None: all there are), ascending. One listing."""
        return await asyncio.to_thread(self._reader.files, start_id)

    async def read(self, wal_id: int) -> ChangeBatch:
        """The changes of one file; see `WalReader.read`."""
        return await asyncio.to_thread(self._reader.read, wal_id)

    def batches(
        self, start_id: int | None = None, *, stop_id: int | None = None
    ) -> AsyncIterator[ChangeBatch]:
        """The files from `start_id` up to `stop_id`, or to the end there is now; see `WalReader.batches`."""
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
        """Every change from `start_id` on, for ever; see `WalReader.follow`. Cancelling the task ends it at once."""
        pace = Pace(poll_interval_s, max_poll_interval_s, timeout_s)
        turns = self._reader._turns(start_id, pace, allow_gaps=allow_gaps)
        while stop is None or not stop.is_set():
            batch, wait_s = await asyncio.to_thread(turns.take)
            if batch is not None:
                yield batch
            elif wait_s is None:
                return
            elif wait_s:
                await asyncio.sleep(wait_s)

    @property
    def position(self) -> int | None:
        """The file at which the pinned consumer goes on; None when it has not begun, or nothing is pinned."""
        return self._reader.position

    async def commit(self, batch: ChangeBatch) -> None:
        """The pinned consumer has used `batch` and all before it; see `WalReader.commit`."""
        await asyncio.to_thread(self._reader.commit, batch)

    async def release(self) -> None:
        """Give the pin up: the log is not kept for this consumer any more."""
        await asyncio.to_thread(self._reader.release)

    async def close(self) -> None:
        """Tell the store what was committed; the pin stays. Closing twice is fine, and so is going on."""
        await asyncio.to_thread(self._reader.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncChangeFeed(AsyncWalReader):
    """A snapshot when a consumer begins, and all changes after it; see `ChangeFeed`. Made by `aio.open_feed`."""

    def __init__(self, feed: ChangeFeed) -> None:
        super().__init__(feed)
        self._feed = feed

    @property
    def snapshot(self) -> AsyncDbReader | None:
        """The database at one moment, to be copied; None once the consumer has done that."""
        shown = self._feed.snapshot
        return None if shown is None else AsyncDbReader(shown)

    @property
    def seq(self) -> int:
        """The sequence number up to which the consumer has everything, or will have when it has copied the snapshot."""
        return self._feed.seq

    async def copied(self) -> None:
        """The snapshot was copied, and the copy is safe: from now on there are changes only."""
        await asyncio.to_thread(self._feed.copied)


async def _awaited(blocking: Iterator[T]) -> AsyncIterator[T]:
    end = object()
    while (item := await asyncio.to_thread(next, blocking, end)) is not end:
        yield item  # type: ignore[misc]
