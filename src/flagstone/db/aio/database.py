"""`AsyncDb`, `AsyncSnapshot` and `AsyncTransaction`: the methods of `Db`, `Snapshot` and `Transaction`, awaited.

Writes go to memory without leaving the loop, and so do reads from memory. Only calls that wait for the store use a
thread. A task whose write waits, for free memory or until it is durable, occupies none. The engine has threads of its
own, so a busy loop does not delay the WAL.
"""
# ruff: noqa: SLF001 - the classes use private members of their blocking twins

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeVar, overload
from uuid import UUID

from flagstone.db.aio.read_methods import (
    AsyncClosing,
    AsyncCollections,
    AsyncHandle,
    AsyncReads,
    AtOnce,
)
from flagstone.db.mapping import Pairs, typed_like
from flagstone.db.status import WriterStatus
from flagstone.db.writer.database import Db
from flagstone.db.writer.mapping import MISSING
from flagstone.db.writer.run import DEFAULT_RETRIES, Attempts, check_awaitable
from flagstone.db.writer.transaction import Snapshot, Transaction
from flagstone.errors import TransactionConflict
from flagstone.kernels import probe as probe_kernel
from flagstone.lsm.merge_operator import check_operand
from flagstone.metadata.manifest import Checkpoint
from flagstone.schema.evolution import Evolution, GivenColumns
from flagstone.types import MERGE, TOMBSTONE, VALUE
from flagstone.write.batch import (
    BY_DEFAULT,
    Expiry,
    Instant,
    Ttl,
    WriteBatch,
    check_any_key,
    check_expiry,
    check_key,
    check_value,
)
from flagstone.write.conflicts import Isolation, Timeout
from flagstone.write.durability import WriteHandle
from flagstone.write.writer_state import MustWait, WriterState

_find: Final = probe_kernel.find
_T = TypeVar("_T")


class AsyncChanges:
    """The writing manners of a mapping, each on another thread; see the blocking twin."""

    _reads: Any

    @overload
    async def pop(self, key: bytes) -> bytes: ...
    @overload
    async def pop(self, key: bytes, default: bytes) -> bytes: ...
    @overload
    async def pop(self, key: bytes, default: _T) -> bytes | _T: ...
    async def pop(self, key: bytes, default: Any = MISSING) -> Any:
        """Delete `key` and return its value; without the key `default`, or a `KeyError`."""
        return await asyncio.to_thread(self._reads.pop, key, default)

    async def setdefault(self, key: bytes, default: bytes) -> bytes:
        """The value of `key`, which is set to `default` if it does not exist."""
        value: bytes = await asyncio.to_thread(self._reads.setdefault, key, default)
        return value

    async def popitem(self, *, last: bool = True) -> tuple[bytes, bytes]:
        """Delete the row with the largest key (or the smallest) and return it. Raises `KeyError` if there is none."""
        item: tuple[bytes, bytes] = await asyncio.to_thread(self._reads.popitem, last=last)
        return item

    async def update(self, rows: Pairs = (), /) -> None:
        """Put all rows of a mapping, or of an iterable of pairs."""
        await asyncio.to_thread(self._reads.update, rows)

    async def clear(self) -> None:
        """Delete all rows that there are now; see `Db.clear` and `Transaction.clear`."""
        await asyncio.to_thread(self._reads.clear)


class AsyncDb(AsyncHandle, AsyncChanges):
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
        # Reserved keys are below this one, and so is the empty key.
        if type(key) is not bytes or key < b"\x00flagstone0" or len(key) > 65_535:
            key = check_key(key)
        if type(value) is not bytes:
            value = check_value(value)
        expiry = BY_DEFAULT if ttl is None and expire_at is None else check_expiry(ttl, expire_at)
        state = self._engine.state
        if not await_durable and not state.may_wait:
            with suppress(MustWait):  # another thread has stopped writers in between
                return state.commit_one(key, VALUE, value, expiry, synchronous=False, wait=False)
        return await self._commit_one(key, VALUE, value, expiry, durable=await_durable)

    async def delete(self, key: bytes, *, await_durable: bool = False) -> WriteHandle:
        """Delete `key`, whether or not it exists."""
        never = check_expiry(timedelta.max, None)
        return await self._commit_one(check_any_key(key), TOMBSTONE, b"", never, durable=await_durable)

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
            lambda: state.commit_batch(batch, synchronous=await_durable, wait=False), durable=await_durable
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

    @typed_like(AsyncReads.get)
    async def get(
        self,
        key: bytes,
        default: Any = None,
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> Any:
        """The value of `key`, or `default`; see `Reads.get`. A value in memory is returned without waiting."""
        engine = self._engine
        if type(key) is bytes and key and not durable_only and not dirty and engine.key_ranges is None:
            # As in `Db.get`. A function for both would slow down that one by a tenth.
            state = engine.state
            # The sequence number is read before the view: the view then holds every row up to it.
            seq = state.committed_seq
            view = state.now.view
            found = view.get_newest(key, seq)
            if type(found) is bytes:
                return found
            if found is None and not view.segmented:
                found = _find(view.older_memtables, view.layers, key, seq, None, True)
                if found is None:
                    return default
                if type(found) is bytes:
                    return found
                if type(found) is tuple and found[2] == VALUE and found[5] is None:
                    return found[3]
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

    async def run(
        self,
        fn: Callable[[AsyncTransaction], Awaitable[_T]],
        *,
        isolation: Isolation = "snapshot",
        retries: int = DEFAULT_RETRIES,
        timeout: Timeout | None = None,
        await_durable: bool = False,
    ) -> _T:
        """Await `fn` with a transaction, commit it, and return its result; again after a conflict. See `Db.run`."""
        attempts = Attempts(retries, self._engine.env.ids)
        while True:
            transaction = self.transaction(isolation, timeout=timeout)
            try:
                async with transaction:
                    begun = fn(transaction)
                    check_awaitable(begun)
                    result = await begun
                    if not transaction.done:
                        await transaction.commit(await_durable=await_durable)
            except TransactionConflict as conflict:
                if transaction.committed:
                    raise
                pause_s = attempts.pause_s(conflict)
            else:
                return result
            await asyncio.sleep(pause_s)

    async def ensure_schema(self, given: GivenColumns, *, prefix: bytes = b"") -> Evolution:
        """Store the schema of rows with the given columns, unless the stored one fits them; see `Db.ensure_schema`."""
        return await asyncio.to_thread(self._reads.ensure_schema, given, prefix=prefix)

    # -- operating ----------------------------------------------------------------------------------------

    async def status(self) -> WriterStatus:
        """The state of writes, flushes, SSTs and background services, as plain values."""
        return self._reads.status()

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
            lambda: state.commit_one(key, kind, value, expiry, synchronous=durable, wait=False),
            durable=durable,
        )

    async def _commit(self, write: Callable[[], WriteHandle], *, durable: bool) -> WriteHandle:
        """Write without leaving the loop. While writers have to wait, the task waits, and occupies no thread."""
        state = self._engine.state
        while True:
            try:
                handle = write()
                break
            except MustWait:
                await state.wait_until_writable()
        await _settled(state, handle, durable=durable)
        return handle


async def _settled(state: WriterState, handle: WriteHandle, *, durable: bool) -> None:
    """Wait until the write is durable, or at least committed."""
    if durable:
        await handle
    else:
        await state.wait_committed_async(handle.seq)


class AsyncSnapshot(AsyncReads, AsyncClosing, AsyncCollections, AtOnce):
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


class AsyncTransaction(AsyncReads, AsyncChanges, AtOnce):
    """Reads at one moment, with its own writes on top; see `Transaction`. Not for concurrent use by several tasks.

    `async with` commits on a clean exit and rolls back on an error.
    """

    def __init__(self, transaction: Transaction) -> None:
        self._reads: Transaction = transaction

    @property
    def seq(self) -> int:
        """The sequence number it reads at."""
        return self._reads.seq

    @property
    def done(self) -> bool:
        """Whether it was committed or rolled back, or has failed to commit."""
        return self._reads.done

    @property
    def committed(self) -> bool:
        """Whether it was committed: all its writes are visible."""
        return self._reads.committed

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

    async def put_system(self, key: bytes, value: bytes) -> None:
        """Set a system row when the transaction commits; see `Transaction.put_system`."""
        self._reads.put_system(key, value)

    async def ensure_schema(self, given: GivenColumns, *, prefix: bytes = b"") -> Evolution:
        """Plan to write rows with the given columns under `prefix`; see `Transaction.ensure_schema`."""
        return await asyncio.to_thread(self._reads.ensure_schema, given, prefix=prefix)

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
        state = self._reads._engine.state
        while True:
            try:
                handle = self._reads._commit(synchronous=await_durable, wait=False)
                break
            except MustWait:
                try:
                    await state.wait_until_writable()
                except BaseException:
                    self._reads.rollback()  # the task was cancelled, or the database closed
                    raise
        if handle is not None:
            await _settled(state, handle, durable=await_durable)
        return handle

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
