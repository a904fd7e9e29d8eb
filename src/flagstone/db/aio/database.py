"""`AsyncDb`, `AsyncSnapshot` and `AsyncTransaction`: the methods of `Db`, `Snapshot` and `Transaction`, awaited.

Writes go to memory without leaving the loop, and so do reads from memory. Only waiting uses a thread: for the store,
and for free memory while writers are held up. The engine has threads of its own, so a busy loop does not delay the
WAL.
"""
# ruff: noqa: SLF001 - the classes use private members of their blocking twins

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self
from uuid import UUID

from flagstone.db.aio.read_methods import AsyncClosing, AsyncHandle, AsyncReads, AtOnce
from flagstone.db.writer.database import Db
from flagstone.db.writer.transaction import Snapshot, Transaction
from flagstone.lsm.merge_operator import check_operand
from flagstone.metadata.manifest import Checkpoint
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
from flagstone.write.conflicts import Isolation, Timeout
from flagstone.write.durability import WriteHandle


class AsyncDb(AsyncHandle):
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
        """Set `key` to `value`. Returns once it is in memory; with `await_durable` once it is on the store.

        A crash may lose a write that is not durable yet: `await` the handle, or `flush`, if that matters. `ttl` is a
        timedelta or text such as "30s", `expire_at` a moment.
        """
        expiry = BY_DEFAULT if ttl is None and expire_at is None else check_expiry(ttl, expire_at)
        return await self._commit_one(
            check_key(key), VALUE, check_value(value), expiry, durable=await_durable
        )

    async def delete(self, key: bytes, *, await_durable: bool = False) -> WriteHandle:
        """Delete `key`, whether or not it exists."""
        never = check_expiry(timedelta.max, None)
        return await self._commit_one(check_key(key), TOMBSTONE, b"", never, durable=await_durable)

    async def delete_range(self, start: bytes | None, stop: bytes | None) -> WriteHandle:
        """Delete every row with a key in [start, stop) with one manifest, on another thread. See `Db.delete_range`."""
        return await asyncio.to_thread(self._reads.delete_range, start, stop)

    async def delete_prefix(self, prefix: bytes) -> WriteHandle:
        """Delete every row whose key begins with `prefix`; see `Db.delete_range`."""
        return await asyncio.to_thread(self._reads.delete_prefix, prefix)

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
        """Write a batch atomically, under one sequence number."""
        state = self._engine.state
        return await self._commit(
            lambda: state.commit_batch(batch, synchronous=await_durable), durable=await_durable
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
        op: str | None = None,
        ttl_ms: str | None = None,
        expires_ms: str | None = None,
        await_durable: bool = True,
    ) -> int:
        """Write the rows of Arrow columns on another thread; returns how many. See `Db.write_arrow`."""
        return await asyncio.to_thread(
            self._reads.write_arrow,
            rows,
            key=key,
            value=value,
            op=op,
            ttl_ms=ttl_ms,
            expires_ms=expires_ms,
            await_durable=await_durable,
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
        """The value of `key`, or `default`; see `Reads.get`. A value in memory is returned without waiting."""
        engine = self._engine
        if type(key) is bytes and not durable_only and not dirty and engine.key_ranges is None:
            # The sequence number is read before the view: the view then holds every row up to it.
            seq = engine.state.committed_seq
            simple = engine.state.now.view.memtables[0].get_value(key, seq)
            if type(simple) is bytes:
                return simple
            self._reads._context.gets -= 1  # the memtable counted this get, and the slow path counts it again
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
        """Wait until everything written so far is in the WAL ("wal"), or also in SSTs; see `Db.flush`."""
        await asyncio.to_thread(self._reads.flush, kind)

    async def checkpoint(
        self,
        *,
        scope: Literal["all", "durable"] = "all",
        name: str | None = None,
        lifetime: timedelta | str | None = None,
        source: UUID | None = None,
    ) -> Checkpoint:
        """Create a checkpoint of everything written so far (`all`), or of what is on the store already (`durable`)."""
        return await asyncio.to_thread(
            self._reads.checkpoint, scope=scope, name=name, lifetime=lifetime, source=source
        )

    async def _commit_one(
        self, key: bytes, kind: int, value: bytes, expiry: Expiry, *, durable: bool
    ) -> WriteHandle:
        state = self._engine.state
        return await self._commit(
            lambda: state.commit_one(key, kind, value, expiry, synchronous=durable), durable=durable
        )

    async def _commit(self, write: Callable[[], WriteHandle], *, durable: bool) -> WriteHandle:
        """Write without leaving the loop; on a thread while writers have to wait for free memory."""
        handle = await asyncio.to_thread(write) if self._engine.state.may_wait else write()
        if durable:
            await handle
        return handle


class AsyncSnapshot(AsyncReads, AsyncClosing, AtOnce):
    """The database as it was when the snapshot was taken; see `Snapshot`. Close it, or use `async with`."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._reads: Snapshot = snapshot

    @property
    def seq(self) -> int:
        """The sequence number it reads at."""
        return self._reads.seq

    async def close(self) -> None:
        """Release the versions that the snapshot keeps. Closing twice is fine."""
        self._reads.close()


class AsyncTransaction(AsyncReads, AtOnce):
    """Reads at one moment, with its own writes on top; see `Transaction`. Not for concurrent use by several tasks.

    `async with` commits on a clean exit and rolls back on an error.
    """

    def __init__(self, transaction: Transaction) -> None:
        self._reads: Transaction = transaction

    @property
    def seq(self) -> int:
        """The sequence number it reads at."""
        return self._reads.seq

    async def put(
        self, key: bytes, value: bytes, *, ttl: Ttl | None = None, expire_at: Instant | None = None
    ) -> None:
        """Set `key` when the transaction commits."""
        self._reads.put(key, value, ttl=ttl, expire_at=expire_at)

    async def delete(self, key: bytes) -> None:
        """Delete `key` when the transaction commits."""
        self._reads.delete(key)

    async def merge(
        self, key: bytes, operand: bytes, *, ttl: Ttl | None = None, expire_at: Instant | None = None
    ) -> None:
        """Merge `operand` into `key` when the transaction commits."""
        self._reads.merge(key, operand, ttl=ttl, expire_at=expire_at)

    async def mark_read(self, *keys: bytes) -> None:
        """Let the commit depend on these keys as if the transaction had read them."""
        self._reads.mark_read(*keys)

    async def unmark_write(self, *keys: bytes) -> None:
        """Exclude the writes of these keys from conflict detection."""
        self._reads.unmark_write(*keys)

    async def commit(self, *, await_durable: bool = False) -> WriteHandle | None:
        """Write everything, or raise and write nothing; see `Transaction.commit`.

        Raises:
            TransactionConflict: another commit since the transaction began wrote a key that it read or wrote.

        """
        if await_durable or self._reads._engine.state.may_wait:
            return await asyncio.to_thread(self._reads.commit, await_durable=await_durable)
        return self._reads.commit()

    async def rollback(self) -> None:
        """Drop all writes. Rolling back twice, or after a commit, does nothing."""
        self._reads.rollback()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._reads._done:
            await self.commit()
        else:
            await self.rollback()
