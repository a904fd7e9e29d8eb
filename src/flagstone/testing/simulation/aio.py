"""A process that uses the asyncio interface: a writer with several client tasks, a reader and a consumer, on one loop.

Clients cancel some of their calls. A write that was cancelled is in doubt, as after an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal

from flagstone import aio
from flagstone.db.aio.database import AsyncDb
from flagstone.db.aio.read_methods import AsyncReads
from flagstone.errors import Closed, CorruptData, InvalidRequest, TransactionConflict, Unavailable
from flagstone.testing.simulation.databases import MAIN_PATH
from flagstone.testing.simulation.event_loop import SimulatedLoop
from flagstone.testing.simulation.feeds import note_end
from flagstone.testing.simulation.history import Change, Commit, Violation
from flagstone.testing.simulation.scheduler import Process, describe
from flagstone.testing.simulation.session import Session
from flagstone.write.batch import WriteBatch

if TYPE_CHECKING:
    from flagstone.testing.simulation.world import World

_CANCELLED: Final = 0.1
"""How many of the calls are cancelled before they are over, if they take long."""


def use_asyncio(world: World, process: Process) -> None:
    """The life of a process with an event loop."""
    while True:
        process.machine.sleep(world.random.expovariate(1 / world.plan.idle_s))
        SimulatedLoop(process.machine).run(_live(world, process))


async def _live(world: World, process: Process) -> None:
    roles = [_write(world, process), _read(world, process)]
    if world.plan.settings.wal_enabled:
        roles.append(_consume(world, process))
    for outcome in await asyncio.gather(*(_tolerate(world, role) for role in roles), return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def _tolerate(world: World, role: Awaitable[None]) -> None:
    try:
        await role
    except (Closed, Unavailable, InvalidRequest, CorruptData) as error:
        if world.is_unexpected(error):
            raise
        world.scheduler.note(f"aio: {describe(error)}")


# -- the writer -----------------------------------------------------------------------------------------------


async def _write(world: World, process: Process) -> None:
    async with aio.open(MAIN_PATH, **world.options(process), settings=world.settings) as db:
        world.done["open"] += 1
        session = await asyncio.to_thread(AsyncSession, world, process, db)
        await asyncio.gather(*(session.serve_async() for _ in range(world.plan.clients)))


class AsyncSession(Session):
    """One opening of the database for writing, and the clients that use it on an event loop."""

    def __init__(self, world: World, process: Process, db: AsyncDb) -> None:
        super().__init__(world, world.main, process, db._reads)  # noqa: SLF001 - the blocking twin
        self._async_db = db

    async def serve_async(self) -> None:
        """One client: random operations for a while, or until the database is closed."""
        machine, random = self._machine, self._random
        end_s = machine.monotonic() + random.expovariate(1 / self._world.plan.busy_s)
        actions: tuple[Callable[[], Awaitable[None]], ...] = (
            *(self._put, self._put, self._delete, self._merge, self._batch, self._transact, self._transact),
            *(self._get, self._get_many, self._scan, self._snapshot),
            *(self._flush, self._checkpoint),
        )
        while machine.monotonic() < end_s and not self._async_db.closed:
            action = random.choice(actions)
            try:
                if random.random() < _CANCELLED:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(action(), random.choice((0.0, 0.05, 5.0)))
                else:
                    await action()
            except (Closed, Unavailable, CorruptData) as error:
                self._world.scheduler.note(f"aio {action.__name__}: {describe(error)}")
                if isinstance(error, CorruptData) and self._world.is_unexpected(error):
                    raise
                if isinstance(error, Closed):
                    self._check_fenced(error)
                    return
            self._world.done[f"aio{action.__name__}"] += 1
            await asyncio.sleep(random.expovariate(2.0))

    # -- writes -------------------------------------------------------------------------------------------

    async def _put(self) -> None:
        key, value = self._new_key(), self._world.new_value()
        await self._commit_async([Change("put", key, value)], lambda: self._async_db.put(key, value))

    async def _delete(self) -> None:
        key = self._new_key()
        await self._commit_async([Change("delete", key)], lambda: self._async_db.delete(key))

    async def _merge(self) -> None:
        key, value = b"m" + self._new_key()[1:], self._world.new_value()
        await self._commit_async([Change("merge", key, value)], lambda: self._async_db.merge(key, value))

    async def _batch(self) -> None:
        batch, changes = WriteBatch(), {}
        for _ in range(self._random.randrange(2, 6)):
            key = self._new_key()
            if key not in changes:
                changes[key] = Change("put", key, self._world.new_value())
                batch.put(key, changes[key].value)
        await self._commit_async(list(changes.values()), lambda: self._async_db.write(batch))

    async def _commit_async(self, changes: Iterable[Change], write: Callable[[], Awaitable[Any]]) -> int:
        intent = self._oracle.begin(self.branch, changes)
        try:
            handle = await write()
        except TransactionConflict:
            self._oracle.drop(self.branch, intent)
            raise
        self._oracle.settle(self.branch, intent, handle.seq)
        self._world.scheduler.note(f"wrote {handle.seq}: {len(intent.changes)} rows")
        if self._random.random() < 0.3:
            await handle
            self._oracle.acknowledge(self.branch, handle.seq)
        seq: int = handle.seq
        return seq

    async def _flush(self) -> None:
        seq = (await self._async_db.status())["last_seq"]
        await self._async_db.flush("wal" if self._world.plan.settings.wal_enabled else "memtable")
        self._oracle.acknowledge(self.branch, seq)

    # -- reads --------------------------------------------------------------------------------------------

    async def _get(self) -> None:
        key = self._new_key()
        low, before_ms = (await self._async_db.status())["committed_seq"], self._machine.now_ms()
        value = await self._async_db.get(key)
        high = (await self._async_db.status())["last_seq"]
        self._oracle.expect(self.branch, key, value, (low, high), self._window(before_ms))

    async def _get_many(self) -> None:
        async with self._async_db.snapshot() as snapshot:
            keys, before_ms = [self._new_key() for _ in range(3)], self._machine.now_ms()
            values, seqs = await snapshot.multi_get(keys), (snapshot.seq, snapshot.seq)
            for key, value in zip(keys, values, strict=True):
                self._oracle.expect(self.branch, key, value, seqs, self._window(before_ms))

    async def _scan(self) -> None:
        async with self._async_db.snapshot() as snapshot:
            before_ms = self._machine.now_ms()
            rows = {key: value async for key, value in snapshot.scan(reverse=self._random.random() < 0.3)}
            self._oracle.expect_all(self.branch, rows, (snapshot.seq, snapshot.seq), self._window(before_ms))

    async def _snapshot(self) -> None:
        """A snapshot shows the same for as long as it lives."""
        async with self._async_db.snapshot() as snapshot:
            for _ in range(self._random.randrange(2, 5)):
                await self._get_async(snapshot, snapshot.seq, self._new_key())
                await asyncio.sleep(self._random.choice((0.01, 1.0, 100.0)))

    async def _get_async(self, source: AsyncReads, seq: int, key: bytes) -> None:
        before_ms = self._machine.now_ms()
        value = await source.get(key)
        self._oracle.expect(self.branch, key, value, (seq, seq), self._window(before_ms))

    # -- transactions and checkpoints ---------------------------------------------------------------------

    async def _transact(self) -> None:
        serializable = self._random.random() < 0.5
        transaction = self._async_db.transaction("serializable" if serializable else "snapshot")
        read: set[bytes] = set()
        changes: dict[bytes, Change] = {}
        try:
            for _ in range(self._random.randrange(1, 5)):
                key = self._new_key()
                if self._random.random() < 0.5:
                    changes[key] = Change("put", key, self._world.new_value())
                    await transaction.put(key, changes[key].value)
                elif key not in changes:
                    read.add(key)
                    await self._get_async(transaction, transaction.seq, key)
                elif await transaction.get(key) != changes[key].value:
                    raise Violation(f"a transaction does not see its own write of {key!r}")
                await asyncio.sleep(self._random.choice((0.001, 0.1, 2.0)))
            if not changes:
                await transaction.rollback()
                return
            seq = await self._commit_async(changes.values(), transaction.commit)
        except TransactionConflict:
            self._world.done["conflict"] += 1
            return
        finally:
            await transaction.rollback()
        depends = {*changes, *read} if serializable else {*changes}
        self._oracle.check_isolation(self.branch, Commit(transaction.seq, seq, frozenset(depends)))

    async def _checkpoint(self) -> None:
        await asyncio.to_thread(self.checkpoint)


# -- the reader and the consumer ------------------------------------------------------------------------------


async def _read(world: World, process: Process) -> None:
    machine, random, oracle = process.machine, world.random, world.main.oracle
    mode: Literal["managed", "latest"] = random.choice(("managed", "latest"))
    async with aio.open_reader(MAIN_PATH, **world.options(process), mode=mode) as reader:
        for _ in range(random.randrange(1, 8)):
            await asyncio.sleep(random.expovariate(0.5))
            if random.random() < 0.3:
                await reader.refresh()
            low, before_ms = (await reader.status())["last_seq"], machine.now_ms()
            rows = {key: value async for key, value in reader.scan()}
            high, branch = (await reader.status())["last_seq"], oracle.latest
            if branch is not None and low == high:
                oracle.expect_all(branch, rows, (low, low), world.window(before_ms, machine))
            world.done["aio reader scan"] += 1


async def _consume(world: World, process: Process) -> None:
    """A consumer of changes that lets the database store its position."""
    subscription, clock = world.subscription(process.machine.name), process.machine
    async with aio.open_feed(MAIN_PATH, subscription.name, **world.options(process)) as feed:
        if subscription.is_over:
            await feed.release()
            subscription.start_over()
            return
        if feed.snapshot is not None:
            before_ms, seq = clock.now_ms(), feed.seq
            rows = {key: value async for key, value in feed.snapshot.scan()}
            branch = world.main.oracle.latest
            if branch is not None:
                world.main.oracle.expect_all(branch, rows, (seq, seq), world.window(before_ms, clock))
            await feed.copied()
            subscription.after_seq = seq
            world.done["aio copied"] += 1
        try:
            async for batch in feed.follow(timeout_s=world.random.choice((1.0, 60.0))):
                subscription.take(batch)
                if world.random.random() < 0.9:
                    await feed.commit(batch)
                world.done["aio changes"] += 1
        except InvalidRequest as error:
            note_end(world, subscription, error)
