"""Scans as callers hold them: iterate, seek, close. One blocking and one awaitable class over the same cursor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

from flagstone.errors import Closed, InvalidRequest
from flagstone.kernels import scan as scan_kernel
from flagstone.read.drivers import next_chunk, next_chunk_async
from flagstone.read.scan import Chunk, ScanCursor, ScanRequest, rows_from
from flagstone.read.view import ReadView
from flagstone.table.table_store import TableStore
from flagstone.types import KeyRange, Row

Pair = tuple[bytes, bytes]


class _OpenScan:
    """What both faces share: the cursor, which starts with the first row asked for, and the rows at hand."""

    def __init__(self, tables: TableStore, view: ReadView, request: ScanRequest) -> None:
        self._tables = tables
        self._view: ReadView | None = view
        self._request = request
        self._cursor: ScanCursor | None = None
        self._rows_at_hand = scan_kernel.ChunkIterator(_nothing)

    def seek(self, key: bytes) -> None:
        """Go on at `key`: forward with the first key not below it, backward with the first not above it.

        Never goes back: a key that was passed changes nothing. Rows passed over do not count towards the limit.
        """
        if not isinstance(key, bytes):
            raise InvalidRequest(f"the key to seek is bytes, not {type(key).__name__}")
        reverse = self._request.reverse
        if self._cursor is None:
            beyond = KeyRange(None, key + b"\0") if reverse else KeyRange(key)
            self._request = replace(self._request, keys=self._request.keys.intersect(beyond))
            return
        rest = self._rows_at_hand.rest()
        kept = rows_from(rest, key, reverse=reverse)
        self._cursor.give_back(len(rest) - len(kept))
        if not kept:
            self._cursor.seek(key)
        self._rows_at_hand.replace(kept)

    def _close(self) -> None:
        self._rows_at_hand.end()
        self._cursor = self._view = None

    def _start(self, *, whole_rows: bool, refill: Callable[[ScanCursor], Callable[[], Chunk | None]]) -> None:
        if self._view is None:
            raise Closed("this scan is closed; start another one")
        if self._cursor is None:
            self._request = replace(self._request, whole_rows=whole_rows)
            self._cursor = ScanCursor(self._view, self._request)
            self._rows_at_hand = scan_kernel.ChunkIterator(refill(self._cursor))
        elif self._request.whole_rows != whole_rows:
            raise InvalidRequest("a scan is iterated as pairs or as rows(), not both; start another scan")


class Scan(_OpenScan):
    """The rows of a range as they were when the scan began, however long it takes.

    Iterate it for `(key, value)`, or `rows()` for whole rows; not both. It is its own iterator: a loop that was
    left goes on where it was. Not for several threads at once. Closing it, or dropping it, frees what it holds.
    """

    def __iter__(self) -> Iterator[Pair]:
        self._start(whole_rows=False, refill=self._refill)
        return self._rows_at_hand

    def __next__(self) -> Pair:
        pair: Pair = next(self.__iter__())
        return pair

    def rows(self) -> Iterator[Row]:
        """The same rows with sequence number and times."""
        self._start(whole_rows=True, refill=self._refill)
        return map(Row._make, self._rows_at_hand)

    def close(self) -> None:
        """Hand out no more rows and let go of the view. Closing twice is fine."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refill(self, cursor: ScanCursor) -> Callable[[], Chunk | None]:
        # Not a method bound to us: that cycle would keep a dropped scan until the garbage collector comes.
        return partial(next_chunk, self._tables, cursor)


class AsyncScan(_OpenScan):
    """`Scan` for an event loop: `async for` over pairs or `rows()`. Rows in memory come without a turn of the loop."""

    def __aiter__(self) -> AsyncIterator[Pair]:
        self._start(whole_rows=False, refill=_nothing_from)
        return self

    async def __anext__(self) -> Pair:
        self._start(whole_rows=False, refill=_nothing_from)
        pair: Pair = await self._next_row()
        return pair

    async def rows(self) -> AsyncIterator[Row]:
        """The same rows with sequence number and times."""
        self._start(whole_rows=True, refill=_nothing_from)
        while True:
            try:
                row = await self._next_row()
            except StopAsyncIteration:
                return
            yield Row._make(row)

    async def close(self) -> None:
        """Hand out no more rows and let go of the view. Closing twice is fine."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    async def _next_row(self) -> Pair:
        while True:
            for pair in self._rows_at_hand:
                return pair  # type: ignore[no-any-return]
            chunk = None if self._cursor is None else await next_chunk_async(self._tables, self._cursor)
            if chunk is None:
                raise StopAsyncIteration
            self._rows_at_hand.replace(chunk)


def _nothing() -> None:
    return None


def _nothing_from(_: ScanCursor) -> Callable[[], None]:
    return _nothing
