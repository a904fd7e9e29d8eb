"""Snapshots and transactions for an event loop."""
# ruff: noqa: SLF001 - two faces of one thing

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from flagstone.db.async_reading import AsyncReads, AtOnce
from flagstone.db.transaction import Snapshot, Transaction
from flagstone.types import Row
from flagstone.write.batch import Instant, Ttl
from flagstone.write.durability import WriteHandle


class AsyncSnapshot(AsyncReads, AtOnce):
    """The database as it was when the snapshot was taken; see `Snapshot`. Close it, or use `async with`."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._reads: Snapshot = snapshot

    @property
    def seq(self) -> int:
        """The sequence number it reads at."""
        return self._reads.seq

    async def close(self) -> None:
        """Give it back. Closing twice is fine."""
        self._reads.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncTransaction(AsyncReads, AtOnce):
    """Reads at one moment, with its own writes on top; see `Transaction`. Not for several tasks at once.

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
        """Let the commit depend on these keys as if they had been read."""
        self._reads.mark_read(*keys)

    async def unmark_write(self, *keys: bytes) -> None:
        """Let the writes of these keys conflict with nobody's."""
        self._reads.unmark_write(*keys)

    async def get_row(
        self, key: bytes, *, durable_only: bool = False, dirty: bool = False, include_expired: bool = False
    ) -> Row | None:
        """The row of `key` with its sequence number and times, or None. The commit depends on it."""
        self._reads._state.track_read(self._reads._place.check_key(key))
        return await super().get_row(
            key, durable_only=durable_only, dirty=dirty, include_expired=include_expired
        )

    async def multi_get(
        self,
        keys: Sequence[bytes],
        *,
        durable_only: bool = False,
        dirty: bool = False,
        include_expired: bool = False,
    ) -> list[bytes | None]:
        """The values of many keys in their order. The commit depends on all of them."""
        for key in keys:
            self._reads._state.track_read(self._reads._place.check_key(key))
        return await super().multi_get(
            keys, durable_only=durable_only, dirty=dirty, include_expired=include_expired
        )

    async def commit(self, *, await_durable: bool = False) -> WriteHandle | None:
        """Write everything, or raise and write nothing; see `Transaction.commit`.

        Raises:
            TransactionConflict: what it read or wrote was written by somebody else since it began.

        """
        if await_durable or self._reads._engine.committer.may_wait:
            return await asyncio.to_thread(self._reads.commit, await_durable=await_durable)
        return self._reads.commit()

    async def rollback(self) -> None:
        """Forget everything. Rolling back twice, or after a commit, does nothing."""
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
