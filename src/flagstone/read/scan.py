"""`Scan` and `AsyncScan`, which callers iterate, seek and close. Both use the same cursor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from flagstone.errors import Closed, InvalidRequest
from flagstone.kernels import scan as scan_kernel
from flagstone.read.drivers import next_chunk, next_chunk_async
from flagstone.read.preview import PREVIEW_ROWS, html_rows, shown
from flagstone.read.scan_cursor import Chunk, ScanCursor, ScanRequest, rows_from
from flagstone.read.view import ReadView
from flagstone.sst.store import SstStore
from flagstone.types import MAX_SEQ, KeyRange, Row

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa

Pair = tuple[bytes, bytes]


class _OpenScan:
    """What both classes share: the cursor, which starts with the first row requested, and the rows it gave."""

    def __init__(self, ssts: SstStore, view: ReadView, request: ScanRequest) -> None:
        self._ssts = ssts
        self._view: ReadView | None = view
        self._request = request
        self._cursor: ScanCursor | None = None
        self._buffered = scan_kernel.ChunkIterator(_nothing)

    def seek(self, key: bytes) -> None:
        """Continue at `key`: forward with the first key not below it, backward with the first not above it.

        A scan never goes back: seeking a key that was passed changes nothing. Skipped rows do not count towards the
        limit.
        """
        if not isinstance(key, bytes):
            raise InvalidRequest(f"the key to seek is bytes, not {type(key).__name__}")
        reverse = self._request.reverse
        if self._cursor is None:
            beyond = KeyRange(None, key + b"\0") if reverse else KeyRange(key)
            self._request = replace(self._request, keys=self._request.keys.intersect(beyond))
            return
        rest = self._buffered.rest()
        kept = rows_from(rest, key, reverse=reverse)
        self._cursor.give_back(len(rest) - len(kept))
        if not kept:
            self._cursor.seek(key)
        self._buffered.replace(kept)

    def __repr__(self) -> str:
        wanted = self._request
        keys = wanted.keys
        bounds = ":".join("" if bound is None else shown(bound) for bound in (keys.start, keys.stop))
        state = "closed" if self._view is None else "not begun" if self._cursor is None else "begun"
        parts = [f"[{bounds}]", f"seq={wanted.max_seq}" if wanted.max_seq < MAX_SEQ else "dirty"]
        parts += ["reverse"] if wanted.reverse else []
        parts += [] if wanted.limit is None else [f"limit={wanted.limit}"]
        return f"{type(self).__name__}({', '.join([*parts, state])})"

    def _close(self) -> None:
        self._buffered.end()
        self._cursor = self._view = None

    def _start(self, *, whole_rows: bool, refill: Callable[[ScanCursor], Callable[[], Chunk | None]]) -> None:
        if self._view is None:
            raise Closed("this scan is closed; start another one")
        if self._cursor is None:
            self._request = replace(self._request, whole_rows=whole_rows)
            self._cursor = ScanCursor(self._view, self._request)
            self._buffered = scan_kernel.ChunkIterator(refill(self._cursor))
        elif self._request.whole_rows != whole_rows:
            raise InvalidRequest("a scan is iterated as pairs or as rows(), not both; start another scan")

    def _export(self, columns: Sequence[str]) -> pa.RecordBatchReader:
        """The rows as Arrow batches. A scan that was begun gives those that are left, and is closed."""
        # Imported here: importing Arrow takes half a second, and most callers do not use it.
        from flagstone.read.arrow import DEFAULT_BATCH_ROWS, scan_arrow, to_batches  # noqa: PLC0415

        view, cursor, request = self._view, self._cursor, self._request
        if view is None:
            raise Closed("this scan is closed; start another one")
        whole_rows = not set(columns) <= {"key", "value"}
        if cursor is not None:
            if whole_rows and not request.whole_rows:
                raise InvalidRequest(
                    f"this scan was begun as pairs, so only key and value are left, not {', '.join(columns)}; "
                    "start another scan"
                )
            left = self._buffered.rest()
            self._close()
            return to_batches(_chunks(self._ssts, cursor, left), columns)
        if request.reverse or request.limit is not None:
            fresh = ScanCursor(view, replace(request, whole_rows=whole_rows))
            return to_batches(_chunks(self._ssts, fresh, []), columns)
        return scan_arrow(self._ssts, view, request, columns=columns, batch_rows=DEFAULT_BATCH_ROWS)


class Scan(_OpenScan):
    """The rows of a range as they were when the scan began, however long it takes.

    Iterate it for `(key, value)`, or `rows()` for whole rows; not both. It is its own iterator: a second loop continues
    where the first one stopped. Not for concurrent use by several threads. Closing or dropping it frees what it holds.
    """

    def __iter__(self) -> Iterator[Pair]:
        self._start(whole_rows=False, refill=self._refill)
        return self._buffered

    def __next__(self) -> Pair:
        pair: Pair = next(self.__iter__())
        return pair

    def rows(self) -> Iterator[Row]:
        """The same rows with sequence number and times."""
        self._start(whole_rows=True, refill=self._refill)
        return map(Row._make, self._buffered)

    def count_rest(self) -> int:
        """The number of rows that were not shown yet. Reads them, so the scan is then at its end."""
        self._start(whole_rows=False, refill=self._refill)
        assert self._cursor is not None, "starting creates the cursor"
        counted = len(self._buffered.rest())
        self._buffered.replace([])
        while (chunk := next_chunk(self._ssts, self._cursor)) is not None:
            counted += len(chunk)
        return counted

    def _repr_html_(self) -> str:
        """The first rows. The scan itself does not move; one that has begun shows no rows."""
        if self._view is None or self._cursor is not None:
            return html_rows(repr(self), (), more=self._view is not None)
        limit, most = self._request.limit, PREVIEW_ROWS + 1
        request = replace(self._request, limit=most if limit is None else min(limit, most))
        rows = list(Scan(self._ssts, self._view, request))
        return html_rows(repr(self), rows[:PREVIEW_ROWS], more=len(rows) > PREVIEW_ROWS)

    def to_arrow(self, columns: Sequence[str] = ("key", "value")) -> pa.Table:
        """The rows as an Arrow table. `columns` may also be seq, created_ms and expires_ms.

        A scan that was begun gives the rows that are left, and is closed; another scan gives the same rows again.
        """
        return self._export(columns).read_all()

    def to_pandas(self, columns: Sequence[str] = ("key", "value")) -> pd.DataFrame:
        """The rows as a pandas DataFrame; see `to_arrow`."""
        return as_pandas(self.to_arrow(columns))

    def to_polars(self, columns: Sequence[str] = ("key", "value")) -> pl.DataFrame:
        """The rows as a Polars DataFrame; see `to_arrow`."""
        return as_polars(self.to_arrow(columns))

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Key and value of the rows, batch by batch, for any library that takes Arrow data; see `to_arrow`."""
        return self._export(("key", "value")).__arrow_c_stream__(requested_schema)

    def close(self) -> None:
        """End the scan and release its view. Closing twice is fine."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refill(self, cursor: ScanCursor) -> Callable[[], Chunk | None]:
        # Not a bound method: that reference cycle would keep a dropped scan until the cyclic garbage collector runs.
        return partial(next_chunk, self._ssts, cursor)


class AsyncScan(_OpenScan):
    """`Scan` for an event loop: `async for` over pairs or `rows()`. Rows in memory do not yield to the loop."""

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

    async def count_rest(self) -> int:
        """The number of rows that were not shown yet. Reads them, so the scan is then at its end."""
        self._start(whole_rows=False, refill=_nothing_from)
        assert self._cursor is not None, "starting creates the cursor"
        counted = len(self._buffered.rest())
        self._buffered.replace([])
        while (chunk := await next_chunk_async(self._ssts, self._cursor)) is not None:
            counted += len(chunk)
        return counted

    async def to_arrow(self, columns: Sequence[str] = ("key", "value")) -> pa.Table:
        """The rows as an Arrow table, read on another thread; see `Scan.to_arrow`."""
        import asyncio  # noqa: PLC0415 - it takes eleven megabytes, and blocking programs do not need it

        return await asyncio.to_thread(lambda: self._export(columns).read_all())

    async def to_pandas(self, columns: Sequence[str] = ("key", "value")) -> pd.DataFrame:
        """The rows as a pandas DataFrame; see `Scan.to_arrow`."""
        return as_pandas(await self.to_arrow(columns))

    async def to_polars(self, columns: Sequence[str] = ("key", "value")) -> pl.DataFrame:
        """The rows as a Polars DataFrame; see `Scan.to_arrow`."""
        return as_polars(await self.to_arrow(columns))

    async def close(self) -> None:
        """End the scan and release its view. Closing twice is fine."""
        self._close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    async def _next_row(self) -> Pair:
        while True:
            for pair in self._buffered:
                return pair  # type: ignore[no-any-return]
            chunk = None if self._cursor is None else await next_chunk_async(self._ssts, self._cursor)
            if chunk is None:
                raise StopAsyncIteration
            self._buffered.replace(chunk)


def _nothing() -> None:
    return None


def _nothing_from(_: ScanCursor) -> Callable[[], None]:
    return _nothing


def _chunks(ssts: SstStore, cursor: ScanCursor, buffered: Chunk) -> Iterator[Chunk]:
    if buffered:
        yield buffered
    while (chunk := next_chunk(ssts, cursor)) is not None:
        yield chunk


def as_pandas(table: Any) -> pd.DataFrame:
    """The table as a pandas DataFrame. Raises `InvalidRequest` if pandas is not installed."""
    try:
        return table.to_pandas()
    except ImportError:
        raise InvalidRequest("pandas is not installed; install pandas, or use to_arrow()") from None


def as_polars(table: Any) -> pl.DataFrame:
    """The table as a Polars DataFrame. Raises `InvalidRequest` if Polars is not installed."""
    try:
        import polars as pl  # noqa: PLC0415 - an optional package
    except ImportError:
        raise InvalidRequest("Polars is not installed; install flagstone[arrow], or use to_arrow()") from None
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame), "a table becomes a frame"
    return frame
