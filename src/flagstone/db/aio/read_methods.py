"""Reads for an event loop, the same for a database, a snapshot, a transaction and a reader.

Each class wraps its blocking twin, which checks arguments and gives the view and the sequence number to read at; only
the waiting differs. Reads from memory need no thread and do not yield to the loop.
"""
# ruff: noqa: SLF001 - the classes use private members of their blocking twins

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self, TypeVar, overload

from flagstone.db.read_methods import Reads
from flagstone.errors import CorruptData
from flagstone.metadata.manifest import Manifest
from flagstone.read import drivers
from flagstone.read.explanation import Explanation
from flagstone.read.preview import brief, html_facts
from flagstone.read.scan import AsyncScan
from flagstone.read.scan_cursor import DEFAULT_READ_AHEAD_BYTES
from flagstone.read.view import ReadView
from flagstone.runtime.sync import start_thread
from flagstone.sst.store import SstGone
from flagstone.types import Row

if TYPE_CHECKING:
    import pyarrow as pa

    from flagstone.db.aio.collection import AsyncCollection
    from flagstone.db.reader.reader import DbReader
    from flagstone.db.writer.database import Db
    from flagstone.schema.table_schema import TableSchema

T = TypeVar("T")

_ATTEMPTS: Final = 3


class AsyncReads:
    """The read methods; `_reads` is the blocking twin."""

    _reads: Reads

    @overload
    async def get(
        self,
        key: bytes,
        default: None = None,
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> bytes | None: ...
    @overload
    async def get(
        self,
        key: bytes,
        default: bytes,
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> bytes: ...
    @overload
    async def get(
        self,
        key: bytes,
        default: T,
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> bytes | T: ...
    async def get(
        self,
        key: bytes,
        default: Any = None,
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> Any:
        """The value of `key`, or `default`; see `Reads.get`."""
        row = await self.get_row(key, durable_only=durable_only, dirty=dirty, include_expired=include_expired)
        return default if row is None else row.value

    async def get_row(
        self, key: bytes, *, durable_only: bool = False, dirty: bool = False, include_expired: bool = False
    ) -> Row | None:
        """The row of `key` with its sequence number and times, or None."""
        checked, ssts = self._reads._check_key(key), self._reads._context.ssts
        self._reads._context.gets += 1
        found, seq = await self._read(
            lambda view, seq: drivers.get_async(ssts, view, checked, seq),
            durable_only=durable_only,
            dirty=dirty,
        )
        return self._reads._visible(found, seq, include_expired=include_expired)

    async def explain(self, key: bytes) -> Explanation:
        """How `get(key)` finds its answer now; see `Db.explain`. It reads on another thread."""
        return await asyncio.to_thread(self._reads.explain, key)

    async def multi_get(
        self,
        keys: Sequence[bytes],
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> list[bytes | None]:
        """The values of many keys in their order, at one moment. Keys share blocks and requests."""
        checked, ssts = self._reads._check_keys(keys), self._reads._context.ssts
        self._reads._context.gets += len(checked)
        found, seq = await self._read(
            lambda view, seq: drivers.multi_get_async(ssts, view, checked, seq),
            durable_only=durable_only,
            dirty=dirty,
        )
        rows = (self._reads._visible(answer, seq, include_expired=include_expired) for answer in found)
        return [None if row is None else row.value for row in rows]

    def scan(
        self,
        start: bytes | None = None,
        stop: bytes | None = None,
        *,
        prefix: bytes | None = None,
        reverse: bool = False,
        limit: int | None = None,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
        include_system: bool = False,
        read_ahead_bytes: int = DEFAULT_READ_AHEAD_BYTES,
    ) -> AsyncScan:
        """The rows with keys in [start, stop), or that start with `prefix`, as they are now; for `async for`.

        Iterate for `(key, value)`, `.rows()` for whole rows, `.seek(key)` to skip; see `Reads.scan`.
        """
        twin = self._reads.scan(
            start,
            stop,
            prefix=prefix,
            reverse=reverse,
            limit=limit,
            durable_only=durable_only,
            dirty=dirty,
            include_expired=include_expired,
            include_system=include_system,
            read_ahead_bytes=read_ahead_bytes,
        )
        assert twin._view is not None, "a scan that was just made is open"
        return AsyncScan(twin._ssts, twin._view, twin._request)

    def scan_arrow(
        self,
        start: bytes | None = None,
        stop: bytes | None = None,
        *,
        prefix: bytes | None = None,
        batch_rows: int | None = 65_536,
        columns: Sequence[str] = ("key", "value"),
        include_expired: bool = False,
        include_system: bool = False,
    ) -> AsyncIterator[pa.RecordBatch]:
        """The same rows as Arrow batches for `async for`, by ascending key. Each batch is made on another thread."""
        return _batches(
            self._reads.scan_arrow(
                start,
                stop,
                prefix=prefix,
                batch_rows=batch_rows,
                columns=columns,
                include_expired=include_expired,
                include_system=include_system,
            )
        )

    async def keys(self) -> AsyncIterator[bytes]:
        """The keys in ascending order, for `async for`."""
        async for key, _ in self.scan():
            yield key

    async def values(self) -> AsyncIterator[bytes]:
        """The values in the order of their keys, for `async for`."""
        async for _, value in self.scan():
            yield value

    def items(self) -> AsyncScan:
        """Pairs of key and value in ascending order, for `async for`."""
        return self.scan()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self.keys()

    async def count(
        self,
        start: bytes | None = None,
        stop: bytes | None = None,
        *,
        prefix: bytes | None = None,
        include_expired: bool = False,
    ) -> int:
        """The number of rows with keys in [start, stop), or that begin with `prefix`. Reads all of them."""
        return await self.scan(start, stop, prefix=prefix, include_expired=include_expired).count_rest()

    async def approximate_len(
        self, start: bytes | None = None, stop: bytes | None = None, *, prefix: bytes | None = None
    ) -> int:
        """The estimated number of rows in a range, without reading them; see `Reads.approximate_len`."""
        return await asyncio.to_thread(self._reads.approximate_len, start, stop, prefix=prefix)

    def __reduce__(self) -> NoReturn:
        self._reads.__reduce__()

    def _repr_html_(self) -> str:
        return html_facts(repr(self), brief(self._reads._facts()))

    def __repr__(self) -> str:
        return f"Async{self._reads!r}"

    async def schema(self, prefix: bytes = b"") -> TableSchema | None:
        """The schema of the structured rows under `prefix`; see `Reads.schema`."""
        return await asyncio.to_thread(self._reads.schema, prefix)

    async def _read(
        self, attempt: Callable[[ReadView, int], Awaitable[T]], *, durable_only: bool, dirty: bool
    ) -> tuple[T, int]:
        """`Reads._read` for an event loop."""
        view, seq = self._reads._read_point(durable_only=durable_only, dirty=dirty)
        for _ in range(_ATTEMPTS):
            try:
                return await attempt(view, seq), seq
            except SstGone as gone:
                lost = gone
                view, seq = await asyncio.to_thread(
                    self._reads._refresh_read_point, seq, durable_only=durable_only, dirty=dirty
                )
        raise CorruptData("missing, but the newest manifest refers to it", object=lost.path)


class AsyncCollections:
    """A handle that declares collections, as `HasCollections`."""

    _reads: Any

    async def collection(self, name: str, *, key: Any, value: Any = "json") -> AsyncCollection[Any, Any]:
        """Typed rows under the prefix `flagstone.keys.encode(name)`; see `Db.collection`."""
        # Imported here: most callers do not use it.
        from flagstone.db.aio.collection import AsyncCollection  # noqa: PLC0415

        opened = await asyncio.to_thread(self._reads.collection, name, key=key, value=value)
        return AsyncCollection(self, opened)


class AsyncClosing:
    """`async with` that closes at its end."""

    async def close(self) -> None:
        """Close it. Closing twice is fine."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncHandle(AsyncReads, AsyncClosing, AsyncCollections):
    """What `AsyncDb` and `AsyncDbReader` share beside the read methods."""

    _reads: Db | DbReader

    async def metrics(self) -> dict[str, Any]:
        """All metrics under SlateDB's names."""
        return self._reads.metrics()

    async def metrics_text(self, *, labels: Mapping[str, str] | None = None) -> str:
        """All metrics as Prometheus scrapes them; `labels` are added to every sample. Makes no request."""
        return self._reads.metrics_text(labels=labels)

    async def manifest(self) -> Manifest:
        """The newest manifest that this handle has read."""
        return self._reads.manifest()

    @property
    def closed(self) -> bool:
        """Whether it was closed, by the caller or by a newer writer; every call then raises `Closed`."""
        return self._reads.closed

    async def close(self) -> None:
        """Close it; see `Db.close` and `DbReader.close`. Closing twice is fine."""
        await _on_own_thread(self._reads.close)


class AtOnce:
    """`await` returns the object itself: `await db.snapshot()` works as well as `async with db.snapshot()`."""

    def __await__(self) -> Generator[Any, None, Self]:
        yield from ()
        return self


async def _on_own_thread(call: Callable[[], None]) -> None:
    """Run `call` on a thread of its own. All threads of the loop may be waiting for something that it ends."""
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    context = copy_context()

    def settle(error: BaseException | None) -> None:
        if done.done():
            return  # the task was cancelled
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        failure: BaseException | None = None
        try:
            context.run(call)
        except BaseException as error:  # noqa: BLE001 - raised in the task
            failure = error
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, failure)

    start_thread(run, name="flagstone-close")
    await done


async def _batches(reader: pa.RecordBatchReader) -> AsyncIterator[pa.RecordBatch]:
    batches = iter(reader)
    while (batch := await asyncio.to_thread(next, batches, None)) is not None:
        yield batch
