"""The asyncio classes: calls answered from memory do not suspend, and calls that wait do not block the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import pytest

import flagstone
from flagstone import Closed, CorruptData, InvalidRequest, ReaderSettings, Settings, WriteBatch, aio
from flagstone.db.aio.database import AsyncDb
from flagstone.db.aio.reader import AsyncDbReader
from flagstone.metadata.stores import ManifestStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.testing.faults import Fault, FaultyStore

MANUAL = Settings(flush_interval=None)
PATIENT = ReaderSettings(manifest_poll_interval=timedelta(seconds=100))


def at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never suspends, driven by hand: there is no loop at all."""
    with pytest.raises(StopIteration) as stopped:
        coroutine.send(None)
    return stopped.value.value


async def drain(scan: Any) -> list[Any]:
    return [row async for row in scan]


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


# -- memory needs no loop ---------------------------------------------------------------------------------


def test_reads_and_writes_in_memory_start_no_thread_and_do_not_suspend(store: MemoryStore) -> None:
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        face = AsyncDb(db)
        batch = WriteBatch()
        batch.put(b"c", b"3")
        threads = threading.active_count()

        assert at_once(face.put(b"a", b"1")).seq == 1
        at_once(face.put(b"b", b"2"))
        at_once(face.delete(b"b"))
        at_once(face.write(batch))
        assert at_once(face.get(b"a")) == b"1"
        assert at_once(face.get(b"b")) is None
        assert at_once(face.get(b"nobody", b"default")) == b"default"
        assert at_once(face.get_row(b"a")).seq == 1
        assert at_once(face.multi_get([b"a", b"b", b"c"])) == [b"1", None, b"3"]
        assert at_once(drain(face.scan())) == [(b"a", b"1"), (b"c", b"3")]
        assert at_once(face.status())["last_seq"] == 4

        assert threading.active_count() == threads


def test_transactions_and_snapshots_in_memory_do_not_suspend(store: MemoryStore) -> None:
    async def work(face: AsyncDb) -> list[Any]:
        await face.put(b"a", b"1")
        async with face.transaction("serializable") as transaction:
            seen = await transaction.get(b"a")
            await transaction.put(b"a", b"2")
            await transaction.delete(b"b")
        snapshot = await face.snapshot()
        await face.put(b"a", b"3")
        old = await snapshot.get(b"a")
        await snapshot.close()
        begun = await face.transaction()
        await begun.rollback()
        return [seen, old, await face.get(b"a")]

    with flagstone.open("db", store=store, settings=MANUAL) as db:
        threads = threading.active_count()
        assert at_once(work(AsyncDb(db))) == [b"1", b"2", b"3"]
        assert threading.active_count() == threads


def test_a_get_from_a_cached_block_does_not_suspend(store: MemoryStore) -> None:
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        db.put(b"a", b"1")
        db.flush()
        assert db.get(b"a") == b"1"
        assert at_once(AsyncDb(db).get(b"a")) == b"1"


def test_a_reader_gets_a_row_of_the_wal_without_suspending(store: MemoryStore) -> None:
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        db.put(b"a", b"1", await_durable=True)
        with flagstone.open_reader("db", store=store, settings=PATIENT) as reader:
            face = AsyncDbReader(reader)
            assert at_once(face.get(b"a")) == b"1"
            assert at_once(drain(face.scan())) == [(b"a", b"1")]


# -- waiting ----------------------------------------------------------------------------------------------


def test_cold_reads_and_durable_writes_suspend_and_resume(store: MemoryStore) -> None:
    async def main() -> None:
        async with aio.open("db", store=store, settings=MANUAL) as db:
            for number in range(100):
                await db.put(b"%03d" % number, b"v%d" % number)
            handle = await db.put(b"durable", b"yes", await_durable=True)
            assert handle.done()
            later = await db.put(b"later", b"yes")
            await later
            assert later.done()
            await db.flush()
        async with await aio.open("db", store=store, settings=MANUAL) as db:
            assert await db.get(b"050") == b"v50"
            assert await db.multi_get([b"001", b"none", b"099"]) == [b"v1", None, b"v99"]
            assert len(await drain(db.scan())) == 102
            pinned = await db.checkpoint(name="pinned")
            assert [entry.id for entry in (await db.manifest()).checkpoints] == [pinned.id]
        assert db.closed

    asyncio.run(main())


def test_many_durable_writers_share_wal_files(store: MemoryStore) -> None:
    counted = FaultyStore(store)

    async def main() -> None:
        async with aio.open("db", store=counted, settings=MANUAL) as db:
            counted.calls.clear()
            await asyncio.gather(*(db.put(b"%04d" % n, b"v", await_durable=True) for n in range(1000)))
            written = [path for op, path in counted.calls if op == "put_if_absent" and "/wal/" in path]
            assert len(written) < 20

    asyncio.run(main())


def test_a_put_that_waits_for_free_memory_does_not_block_the_loop(store: MemoryStore) -> None:
    stuck = Fault("error", nth=None, op="put*", path="*/compacted/*")
    faulty = FaultyStore(store)
    small = Settings(flush_interval=None, l0_sst_size_bytes=1000, max_unflushed_bytes=2000)

    async def main() -> None:
        async with aio.open("db", store=faulty, settings=small) as db:
            faulty.faults.append(stuck)
            number = 0
            while not (await db.status())["writers_paused"]:
                await db.put(b"%06d" % number, b"x" * 100)
                number += 1
            waiting = asyncio.ensure_future(db.put(b"waiting", b"v"))
            assert await db.get(b"000000") == b"x" * 100
            await asyncio.sleep(0)
            assert not waiting.done()
            faulty.faults.clear()
            await asyncio.wait_for(waiting, 30)
            assert await db.get(b"waiting") == b"v"

    asyncio.run(main())


def test_closing_ends_more_waiting_writes_than_the_loop_has_threads(store: MemoryStore) -> None:
    full = Settings(
        flush_interval=None,
        compactor_options=None,
        l0_max_ssts=1,
        l0_sst_size_bytes=1000,
        max_unflushed_bytes=2000,
    )

    async def main() -> None:
        db = await aio.open("db", store=store, settings=full)
        number = 0
        while not ((status := await db.status())["writers_paused"] and status["upload_paused"]):
            # The first memtable is flushed, and then L0 is full.
            await asyncio.wait_for(db.put(b"%06d" % number, b"x" * 100), 20)
            number += 1
        waiting = [asyncio.ensure_future(db.put(b"waiting%d" % each, b"v")) for each in range(100)]
        waiting += [asyncio.ensure_future(committed(db)) for _ in range(100)]
        await asyncio.sleep(0.05)
        # Their waiting takes no thread from the rest of the program.
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 20) == "free"
        await asyncio.wait_for(db.close(), 20)
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {Closed}

    async def committed(db: AsyncDb) -> None:
        async with db.transaction() as transaction:
            await transaction.put(b"in a transaction", b"v")

    asyncio.run(main())


def test_closing_needs_no_thread_of_the_loop(store: MemoryStore) -> None:
    gate = threading.Event()

    async def main() -> None:
        db = await aio.open("db", store=store, settings=MANUAL)
        taken = [asyncio.ensure_future(asyncio.to_thread(gate.wait, 20)) for _ in range(64)]
        await asyncio.wait_for(db.close(), 10)
        assert db.closed
        gate.set()
        await asyncio.gather(*taken)

    asyncio.run(main())


def test_a_write_that_another_thread_stops_at_the_last_moment_suspends_its_task_only(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with aio.open("db", store=store, settings=MANUAL) as db:
            await db.put(b"before", b"v")
            state = db._engine.state
            # As if writers were stopped just after it was read.
            monkeypatch.setattr(type(state), "may_wait", False)
            state.hold()
            transaction = await db.transaction()
            await transaction.put(b"c", b"v")
            batch = WriteBatch()
            batch.put(b"b", b"v")
            waiting = [
                asyncio.ensure_future(db.put(b"a", b"v")),
                asyncio.ensure_future(db.write(batch)),
                asyncio.ensure_future(transaction.commit()),
            ]
            cancelled = asyncio.ensure_future(db.put(b"cancelled", b"v"))
            done, _ = await asyncio.wait(waiting, timeout=0.05)
            assert not done
            cancelled.cancel()
            state.release()
            await asyncio.wait_for(asyncio.gather(*waiting), 20)
            assert transaction.committed
            assert [key async for key, _ in db.scan()] == [b"a", b"b", b"before", b"c"]

    asyncio.run(main())


def test_a_commit_that_is_cancelled_while_writers_wait_rolls_back(store: MemoryStore) -> None:
    async def main() -> None:
        async with aio.open("db", store=store, settings=MANUAL) as db:
            db._engine.state.hold()
            transaction = await db.transaction()
            await transaction.put(b"a", b"v")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(transaction.commit(), 0.02)
            assert (transaction.done, transaction.committed) == (True, False)
            db._engine.state.release()
            assert await db.get(b"a") is None
            assert db._engine.state.min_active_seq() is None

    asyncio.run(main())


def test_a_write_waits_for_earlier_synchronous_ones_without_a_thread(store: MemoryStore) -> None:
    faulty = FaultyStore(store)
    stuck = Fault("error", nth=None, op="put*", path="*/wal/*")

    async def main() -> None:
        async with aio.open("db", store=faulty, settings=MANUAL.replace(synchronous_commit=True)) as db:
            faulty.faults.append(stuck)
            waiting = [
                asyncio.ensure_future(db.put(b"%d" % each, b"v", await_durable=True)) for each in range(50)
            ]
            waiting += [asyncio.ensure_future(db.put(b"later%d" % each, b"v")) for each in range(50)]
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in waiting)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 20) == "free"
            assert await db.get(b"later1") is None
            faulty.faults.clear()
            await asyncio.wait_for(asyncio.gather(*waiting), 30)
            assert await db.get(b"later1") == b"v"

    asyncio.run(main())


def test_a_reserved_key_is_refused(store: MemoryStore) -> None:
    async def main() -> None:
        async with aio.open("db", store=store, settings=MANUAL) as db:
            with pytest.raises(InvalidRequest, match="reserved"):
                await db.put(b"\x00flagstone/schema/", b"v")
            await db.put(b"\x00flagstone0", b"v")
            await db.put(b"\x00", b"v")

    asyncio.run(main())


def test_rows_written_as_arrow_are_read_as_arrow(store: MemoryStore) -> None:
    import pyarrow as pa

    async def main() -> None:
        async with aio.open("db", store=store, settings=MANUAL) as db:
            table = pa.table({"key": [b"a", b"b", b"c"], "value": [b"1", b"2", b"3"]})
            assert await db.write_arrow(table) == 3
            batches = [batch async for batch in db.scan_arrow(batch_rows=2)]
            assert [batch.num_rows for batch in batches] == [2, 1]
            async with db.transaction() as transaction:
                assert sum([batch.num_rows async for batch in transaction.scan_arrow(prefix=b"a")]) == 1

    asyncio.run(main())


# -- endings ----------------------------------------------------------------------------------------------


def test_a_transaction_rolls_back_on_an_error_and_commits_durably_when_asked(store: MemoryStore) -> None:
    async def fail_halfway(db: AsyncDb) -> None:
        async with db.transaction() as transaction:
            await transaction.put(b"a", b"1")
            raise RuntimeError

    async def main() -> None:
        async with aio.open("db", store=store, settings=MANUAL) as db:
            with pytest.raises(RuntimeError):
                await fail_halfway(db)
            assert await db.get(b"a") is None
            transaction = await db.transaction()
            await transaction.put(b"a", b"2")
            handle = await transaction.commit(await_durable=True)
            assert handle is not None
            assert handle.done()
            async with db.transaction() as empty:
                pass
            assert empty.seq == handle.seq

    asyncio.run(main())


def test_every_call_after_close_raises_closed(store: MemoryStore) -> None:
    async def main() -> None:
        db = await aio.open("db", store=store)
        await db.close()
        await db.close()
        for call in (db.get(b"k"), db.put(b"k", b"v"), db.flush(), db.multi_get([b"k"])):
            with pytest.raises(Closed):
                await call
        reader = await aio.open_reader("db", store=store)
        await reader.close()
        assert reader.closed
        with pytest.raises(Closed):
            await reader.get(b"k")
        with pytest.raises(Closed):
            await reader.refresh()

    asyncio.run(main())


def test_a_cancelled_open_closes_the_database(store: MemoryStore) -> None:
    flagstone.open("db", store=store).close()
    slow = FaultyStore(store, [Fault("slow", op="list", delay_s=0.2)])

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(aio.open_reader("db", store=slow, settings=PATIENT), 0.05)
        manifests = ManifestStore(store, DbPaths("db"))
        for _ in range(1000):
            await asyncio.sleep(0.005)
            if manifests.require_latest().id >= 5:
                break
        assert manifests.require_latest().value.checkpoints == ()

    asyncio.run(main())


def test_opening_a_missing_database_raises_invalid_request(store: MemoryStore) -> None:
    async def main() -> None:
        with pytest.raises(flagstone.InvalidRequest, match="no database"):
            await aio.open("db", store=store, create=False)
        with pytest.raises(flagstone.InvalidRequest, match="no database"):
            async with aio.open_reader("db", store=store):
                pytest.fail("there is nothing to read")

    asyncio.run(main())


# -- a reader ---------------------------------------------------------------------------------------------


def test_a_reader_follows_and_deletes_its_checkpoint_on_close(store: MemoryStore) -> None:
    async def main() -> None:
        async with aio.open("db", store=store, settings=MANUAL) as db:
            async with aio.open_reader("db", store=store, settings=PATIENT) as reader:
                await db.put(b"a", b"1", await_durable=True)
                assert await reader.get(b"a") is None
                await reader.refresh()
                assert await reader.get(b"a") == b"1"
                assert len((await reader.manifest()).checkpoints) == 1
                assert "managed" in repr(reader)
            manifest = ManifestStore(store, DbPaths("db")).require_latest().value
            assert manifest.checkpoints == ()

    asyncio.run(main())


def test_a_read_of_a_lost_sst_tries_newer_manifests_and_then_raises_corrupt_data(store: MemoryStore) -> None:
    async def main() -> None:
        async with aio.open("db", store=store, settings=MANUAL) as db:
            await db.put(b"a", b"1")
            await db.flush()
            [sst] = (await db.manifest()).ssts
            async with aio.open_reader("db", store=store, mode="latest", settings=PATIENT) as reader:
                store.delete(DbPaths("db").sst(sst))
                with pytest.raises(CorruptData, match="missing"):
                    await reader.get(b"a")

    asyncio.run(main())
