"""`AsyncDb`: the face of a database for an event loop. The same engine, the same methods, awaited.

Writes go to memory in the caller's own turn, and so do reads of what is in memory. Only waiting leaves the loop: for
the store, and for room when writers are held up. The engine works in threads of its own either way, so a loop
that is busy does not hold up the log.
"""
# ruff: noqa: SLF001 - two faces of one thing

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self
from uuid import UUID

from flagstone.db.async_reading import AsyncReads
from flagstone.db.async_transaction import AsyncSnapshot, AsyncTransaction
from flagstone.db.database import Db
from flagstone.db.timeouts import Timeout
from flagstone.lsm.merge_operator import check_operand
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.types import MERGE, TOMBSTONE, VALUE
from flagstone.write.batch import (
    BY_DEFAULT,
    Expiry,
    Instant,
    Ttl,
    WriteBatch,
    check_expiry,
    check_key,
    check_value,
)
from flagstone.write.conflicts import Isolation
from flagstone.write.durability import WriteHandle


class AsyncDb(AsyncReads):
    """A database open for writing, for any number of tasks. Close it, or use `async with`."""

    def __init__(self, db: Db) -> None:
        self._reads: Db = db
        self._engine = db._engine

    # -- writing ------------------------------------------------------------------------------------------

    async def put(
        self,
        key: bytes,
        value: bytes,
        *,
        ttl: Ttl | None = None,
        expire_at: Instant | None = None,
        await_durable: bool = False,
    ) -> WriteHandle:
        """Set `key` to `value`. Returns at memory speed; with `await_durable` once it is on the store.

        A crash before it is durable may lose it: `await` the handle, or `flush`, where that matters. `ttl` is a
        timedelta or text such as "30s", `expire_at` a moment.
        """
        expiry = BY_DEFAULT if ttl is None and expire_at is None else check_expiry(ttl, expire_at)
        return await self._commit_one(
            check_key(key), VALUE, check_value(value), expiry, durable=await_durable
        )

    async def delete(self, key: bytes, *, await_durable: bool = False) -> WriteHandle:
        """Delete `key`, whether or not it is there."""
        never = check_expiry(timedelta.max, None)
        return await self._commit_one(check_key(key), TOMBSTONE, b"", never, durable=await_durable)

    async def merge(
        self,
        key: bytes,
        operand: bytes,
        *,
        ttl: Ttl | None = None,
        expire_at: Instant | None = None,
        await_durable: bool = False,
    ) -> WriteHandle:
        """Merge `operand` into `key` with the database's merge operator, without reading it first."""
        key, operand = check_key(key), check_value(operand)
        check_operand(self._engine.env.merge_operator, key, operand)
        expiry = check_expiry(ttl, expire_at)
        return await self._commit_one(key, MERGE, operand, expiry, durable=await_durable)

    async def write(self, batch: WriteBatch, *, await_durable: bool = False) -> WriteHandle:
        """Write all of a batch under one sequence number, or none of it."""
        committer = self._engine.committer
        return await self._commit(
            lambda: committer.commit_batch(batch, synchronous=await_durable), durable=await_durable
        )

    @asynccontextmanager
    async def batch(self, *, await_durable: bool = False) -> AsyncIterator[WriteBatch]:
        """A batch that is written when the block ends without an error."""
        collected = WriteBatch()
        yield collected
        if len(collected):
            await self.write(collected, await_durable=await_durable)

    async def write_arrow(
        self,
        rows: Any,
        *,
        key: str = "key",
        value: str = "value",
        await_durable: bool = True,
    ) -> int:
        """Write the rows of a table or of batches on another thread; returns how many. See `Db.write_arrow`."""
        return await asyncio.to_thread(
            self._reads.write_arrow, rows, key=key, value=value, await_durable=await_durable
        )

    # -- reading ------------------------------------------------------------------------------------------

    async def get(
        self,
        key: bytes,
        default: bytes | None = None,
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> bytes | None:
        """The value of `key`, or `default`; see `Reads.get`. What is in memory is answered without any wait."""
        engine = self._engine
        if type(key) is bytes and not durable_only and not dirty and engine.key_ranges is None:
            # The number before the view: the view then holds every row up to it.
            seq = engine.durability.committed_seq
            simple = engine.view.memtables[0].get_value(key, seq)
            if type(simple) is bytes:
                return simple
            self._reads._place.gets -= 1  # counted by the memtable, and again on the long way
        return await super().get(
            key, default, durable_only=durable_only, dirty=dirty, include_expired=include_expired
        )

    def snapshot(self, *, as_of: int | None = None, timeout: Timeout | None = None) -> AsyncSnapshot:
        """The database as it is now, or was at `as_of`; see `Db.snapshot`. For `async with`, or `await` it."""
        return AsyncSnapshot(self._reads.snapshot(as_of=as_of, timeout=timeout))

    def transaction(
        self, isolation: Isolation = "snapshot", *, timeout: Timeout | None = None
    ) -> AsyncTransaction:
        """A transaction that begins now, for `async with`; see `Db.transaction`."""
        return AsyncTransaction(self._reads.transaction(isolation, timeout=timeout))

    # -- operating ----------------------------------------------------------------------------------------

    async def flush(self, kind: Literal["memtable", "wal"] = "memtable") -> None:
        """Wait until everything written so far is in the log ("wal"), or also in tables; see `Db.flush`."""
        await asyncio.to_thread(self._reads.flush, kind)

    async def checkpoint(
        self,
        *,
        scope: Literal["all", "durable"] = "all",
        name: str | None = None,
        lifetime: timedelta | str | None = None,
        source: UUID | None = None,
    ) -> Checkpoint:
        """Pin the current state: with `all` everything written so far, with `durable` what is on the store already."""
        return await asyncio.to_thread(
            self._reads.checkpoint, scope=scope, name=name, lifetime=lifetime, source=source
        )

    async def status(self) -> dict[str, Any]:
        """What an operator wants to know, as plain values."""
        return self._reads.status()

    async def metrics(self) -> dict[str, Any]:
        """All metrics under SlateDB's names."""
        return self._reads.metrics()

    async def manifest(self) -> Manifest:
        """The newest manifest this process knows."""
        return self._reads.manifest()

    @property
    def closed(self) -> bool:
        """Whether it was closed, by us or by a newer writer; every call then raises `Closed`."""
        return self._reads.closed

    async def close(self) -> None:
        """Flush and close; see `Engine.close`. Closing twice is fine."""
        await asyncio.to_thread(self._reads.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"Async{self._reads!r}"

    async def _commit_one(
        self, key: bytes, kind: int, value: bytes, expiry: Expiry, *, durable: bool
    ) -> WriteHandle:
        committer = self._engine.committer
        return await self._commit(
            lambda: committer.commit_one(key, kind, value, expiry, synchronous=durable), durable=durable
        )

    async def _commit(self, write: Callable[[], WriteHandle], *, durable: bool) -> WriteHandle:
        """Write in this turn of the loop; on a thread while writers have to wait for room."""
        handle = await asyncio.to_thread(write) if self._engine.committer.may_wait else write()
        if durable:
            await handle
        return handle
