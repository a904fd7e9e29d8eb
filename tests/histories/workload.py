"""Clients that do all a database offers, at once, and record it: threads, and tasks of an event loop."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from flagstone.config import CompactorOptions, Settings
from flagstone.db.aio.database import AsyncDb
from flagstone.db.open import open_database
from flagstone.errors import TransactionConflict
from flagstone.lsm.operators import Concatenate
from flagstone.store.memory import MemoryStore
from flagstone.write.batch import WriteBatch
from histories.history import Kind, Op, Recorder

KEYS = [b"%s/%d" % (group, number) for group in (b"a", b"b", b"c") for number in range(5)]
"""Few, so that calls meet."""


class SlowStore(MemoryStore):
    """Takes a moment to write, so that there is one between a write and its durability."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> Any:
        time.sleep(self._chance.random() * 0.002)
        return super().put_if_absent(path, data, token=token)


@dataclass
class Run:
    """What was done."""

    ops: list[Op] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        return ", ".join(f"{number} {name}" for name, number in sorted(self.calls.items()))


class Client:
    """One thread or task. Written for both faces: what a blocking one returns is the answer, an awaitable one's is
    awaited.
    """

    def __init__(self, number: int, db: Any, chance: random.Random, go_on: Callable[[], bool]) -> None:
        self.recorder = Recorder(number)
        self.calls: Counter[str] = Counter()
        self._db = db
        self._awaits = isinstance(db, AsyncDb)
        self._chance = chance
        self._go_on = go_on
        self._values = count()

    async def run(self) -> None:
        steps = [
            *[self._write] * 4,
            *[self._get] * 4,
            *[self._read_many] * 3,
            *[self._read_durable] * 1,
            *[self._snapshot] * 2,
            *[self._transaction] * 6,
        ]
        while self._go_on():
            await self._chance.choice(steps)()
            if self._chance.random() < 0.01:
                await self._flush()
            if self._awaits:
                await asyncio.sleep(0)

    # -- calls -------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        durable = self._chance.random() < 0.15
        keys = self._chance.sample(KEYS, self._chance.choice([1, 1, 1, 2, 4]))
        wrote = [self._effect(key) for key in keys]
        begin = self.recorder.now()
        if len(wrote) > 1:
            batch = WriteBatch()
            for key, kind, value in wrote:
                _do(batch, key, kind, value)
            handle = await self._answer(self._db.write(batch, await_durable=durable))
        else:
            handle = await self._answer(_do(self._db, *wrote[0], await_durable=durable))
        self.recorder.add("write", begin, wrote=wrote, seq=handle.seq, durable=durable)
        self.calls["durable writes" if durable else "writes"] += 1
        # Whether it sees what it wrote is what is asked most often.
        if self._chance.random() < 0.5:
            await self._get(wrote[0][0])

    async def _get(self, key: bytes | None = None) -> None:
        key = key or self._chance.choice(KEYS)
        begin = self.recorder.now()
        value = await self._answer(self._db.get(key))
        self.recorder.add("read", begin, seen=[(key, value)])
        self.calls["gets"] += 1

    async def _read_many(self) -> None:
        begin = self.recorder.now()
        seen = await self._some_rows(self._db)
        self.recorder.add("read", begin, seen=seen)
        self.calls["scans and multi_gets"] += 1

    async def _read_durable(self) -> None:
        begin = self.recorder.now()
        seen = await self._some_rows(self._db, durable_only=True)
        self.recorder.add("read durable", begin, seen=seen, durable=True)
        self.calls["durable reads"] += 1

    async def _snapshot(self) -> None:
        begin = self.recorder.now()
        snapshot = self._db.snapshot()
        looked = self.recorder.now()
        seen = []
        for _ in range(self._chance.randint(1, 4)):
            seen += await self._some_rows(snapshot)
            await self._pause()
        self.recorder.add("snapshot", begin, seen=seen, at=snapshot.seq, looked=looked)
        await self._answer(snapshot.close())
        self.calls["snapshots"] += 1

    async def _flush(self) -> None:
        begin = self.recorder.now()
        await self._answer(self._db.flush(self._chance.choice(["wal", "memtable"])))
        self.recorder.add("flush", begin, durable=True)
        self.calls["flushes"] += 1

    # -- transactions ------------------------------------------------------------------------------------

    async def _transaction(self) -> None:
        isolation = self._chance.choice(["snapshot", "serializable"])
        begin = self.recorder.now()
        transaction = self._db.transaction(isolation)
        looked = self.recorder.now()
        facts: dict[str, Any] = {"at": transaction.seq, "looked": looked, "isolation": isolation}
        seen: list[tuple[bytes, bytes | None]] = []
        own: list[tuple[bytes, list[tuple[Kind, bytes]], bytes | None]] = []
        wrote: list[tuple[bytes, Kind, bytes]] = []
        done: dict[bytes, list[tuple[Kind, bytes]]] = defaultdict(list)
        for _ in range(self._chance.randint(1, 4)):
            if self._chance.random() < 0.6:
                for key, value in await self._some_rows(transaction, few=True):
                    if key in done:
                        own.append((key, list(done[key]), value))
                    else:
                        seen.append((key, value))
            else:
                effect = self._effect(self._chance.choice(KEYS))
                await self._answer(_do(transaction, *effect))
                wrote.append(effect)
                done[effect[0]].append(effect[1:])
            await self._pause()
        durable = self._chance.random() < 0.1
        if self._chance.random() < 0.05:
            await self._answer(transaction.rollback())
            outcome = "transactions rolled back"
        else:
            try:
                handle = await self._answer(transaction.commit(await_durable=durable))
                outcome = f"{isolation} transactions"
            except TransactionConflict:
                outcome = f"{isolation} conflicts"
        if outcome == f"{isolation} transactions":
            facts |= {
                "seq": None if handle is None else handle.seq,
                "durable": durable and handle is not None,
            }
        else:
            facts["committed"] = False
        self.recorder.add("transaction", begin, seen=seen, wrote=wrote, own=own, **facts)
        self.calls[outcome] += 1

    # -- parts -------------------------------------------------------------------------------------------

    def _effect(self, key: bytes) -> tuple[bytes, Kind, bytes]:
        kind: Kind = self._chance.choice(["put", "put", "put", "delete", "merge"])
        value = b"" if kind == "delete" else b"%d.%d;" % (self.recorder.client, next(self._values))
        return key, kind, value

    async def _some_rows(
        self, reads: Any, *, few: bool = False, **options: Any
    ) -> list[tuple[bytes, bytes | None]]:
        """A key, some keys, a group of keys, or all of them; of a scan also the keys it did not find."""
        how = self._chance.random()
        if few and how < 0.6:
            key = self._chance.choice(KEYS)
            return [(key, await self._answer(reads.get(key, **options)))]
        if how < 0.75:
            keys = self._chance.sample(KEYS, self._chance.randint(1, 5))
            return list(zip(keys, await self._answer(reads.multi_get(keys, **options)), strict=True))
        prefix = self._chance.choice([b"a/", b"b/", b"c/", b""])
        scan = reads.scan(prefix=prefix, reverse=self._chance.random() < 0.5, **options)
        rows = dict([row async for row in scan] if self._awaits else list(scan))
        expected = [key for key in KEYS if key.startswith(prefix)]
        return [(key, rows.get(key)) for key in {*expected, *rows}]

    async def _answer(self, given: Any) -> Any:
        # A write handle can be awaited as well, but that is no part of the call.
        return await given if self._awaits else given

    async def _pause(self) -> None:
        if self._awaits:
            await asyncio.sleep(0)
        elif self._chance.random() < 0.2:
            time.sleep(0)


def _do(target: Any, key: bytes, kind: Kind, value: bytes, **options: Any) -> Any:
    match kind:
        case "put":
            return target.put(key, value, **options)
        case "merge":
            return target.merge(key, value, **options)
        case "delete":
            return target.delete(key, **options)


def run_clients(
    *, transactions: int, seed: int, settings: dict[str, Any], threads: int = 5, tasks: int = 3
) -> Run:
    """Run until that many transactions were made; then close, open again, and read once more."""
    store, run = SlowStore(seed), Run()
    chosen = Settings(
        flush_interval="2ms",  # type: ignore[arg-type]
        l0_sst_size_bytes=8192,
        sst_block_size=1024,
        l0_max_ssts=1000,
        l0_max_ssts_per_key=1000,
        compactor_options=CompactorOptions(poll_interval="20ms"),  # type: ignore[arg-type]
        garbage_collector_options=None,
        **settings,
    )
    chance = random.Random(seed)
    left = iter(range(3 * transactions))  # about every third step is a transaction

    def go_on() -> bool:
        return not run.errors and next(left, None) is not None

    with (
        _quick_switching(),
        open_database("db", store=store, settings=chosen, merge_operator=Concatenate()) as db,
    ):
        blocking = [Client(n, db, random.Random(chance.random()), go_on) for n in range(threads)]
        awaiting = [
            Client(threads + n, AsyncDb(db), random.Random(chance.random()), go_on) for n in range(tasks)
        ]

        async def together() -> None:
            await asyncio.gather(*(client.run() for client in awaiting))

        works: list[Callable[[], Any]] = [lambda client=client: _at_once(client.run()) for client in blocking]
        works += [lambda: asyncio.run(together())] if tasks else []
        _run_all(works, run)
        for client in (*blocking, *awaiting):
            run.ops += client.recorder.ops
            run.calls += client.calls
        # A writer that ended by a failure is not asked how it ends.
        if run.errors:
            raise run.errors[0]
    with open_database("db", store=store, settings=chosen, merge_operator=Concatenate()) as db:
        last = Recorder(threads + tasks)
        begin = last.now()
        last.add("read", begin, seen=list(zip(KEYS, db.multi_get(KEYS), strict=True)))
        run.ops += last.ops
    return run


def total(run: Run) -> int:
    """How many transactions were tried."""
    return sum(number for name, number in run.calls.items() if "transactions" in name or "conflicts" in name)


def _at_once(work: Awaitable[None]) -> None:
    """Run a coroutine that never suspends."""
    try:
        work.__await__().send(None)  # type: ignore[attr-defined]
    except StopIteration:
        return
    raise AssertionError("a blocking client was suspended")


def _run_all(works: list[Callable[[], Any]], run: Run) -> None:
    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            run.errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def _quick_switching() -> Iterator[None]:
    """Switch threads far more often than Python does, so that calls interleave at every step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
