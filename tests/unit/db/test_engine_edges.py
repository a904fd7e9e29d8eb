"""What happens at the seams of the engine: between a flush and its manifest, while closing, after a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from flagstone.config import Settings
from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.errors import Closed, TransactionConflict, Unavailable
from flagstone.lsm.operators import Concatenate
from flagstone.runtime import metric_names as names
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectVersion
from flagstone.testing.faults import Fault, FaultyStore
from flagstone.write.batch import WriteBatch
from kit.databases import eventually


def tiny(**changed: Any) -> Settings:
    values: dict[str, Any] = {
        "flush_interval": None,
        "manifest_poll_interval": timedelta(hours=1),
        "compactor_options": None,
        "garbage_collector_options": None,
    }
    return Settings(**(values | changed))


class WatchedStore(FaultyStore):
    """Calls `after_manifest` when a manifest was written, before its writer continues."""

    after_manifest: Callable[[], None] | None = None

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> ObjectVersion:
        version = super().put_if_absent(path, data, token=token)
        if "/manifest/" in path and self.after_manifest is not None:
            self.after_manifest()
        return version


def test_operands_count_once_when_the_manifest_is_read_before_the_memtable_is_dropped() -> None:
    store = WatchedStore(MemoryStore())
    seen: list[object] = []
    looked = threading.Event()
    with open_database("db", store=store, settings=tiny(), merge_operator=Concatenate()) as db:

        def look() -> None:
            # As the manifest follower, a checkpoint or a missing SST do at any moment: adopt the newest manifest.
            store.after_manifest = None
            db._engine.manifest.refresh()
            seen.extend([db.get(b"k"), db.multi_get([b"k"]), list(db.scan()), list(db.scan(reverse=True))])
            looked.set()

        db.merge(b"k", b"a")
        db.merge(b"k", b"b")
        store.after_manifest = look
        db.flush()
        # The flush is over as soon as the manifest is adopted, which the poll does first.
        assert looked.wait(20)
        assert seen == [b"ab", [b"ab"], [(b"k", b"ab")], [(b"k", b"ab")]]
        assert db.get(b"k") == b"ab"


def test_closing_does_not_wait_for_a_compaction_when_l0_is_full() -> None:
    store = MemoryStore()
    settings = tiny(l0_max_ssts=2)
    db = open_database("db", store=store, settings=settings)
    for number in range(2):
        db.put(b"%d" % number, b"in a table")
        db.flush()
    db.put(b"2", b"no room in L0")
    closer = threading.Thread(target=db.close, daemon=True)
    closer.start()
    closer.join(20)
    assert not closer.is_alive()
    with open_database("db", store=store, settings=tiny()) as db:
        assert [key for key, _ in db.scan()] == [b"0", b"1", b"2"]


def test_a_write_that_waits_for_room_raises_closed_when_the_database_closes() -> None:
    settings = tiny(l0_max_ssts=1, l0_sst_size_bytes=1000, max_unflushed_bytes=2000)
    db = open_database("db", store=MemoryStore(), settings=settings)
    outcome: list[BaseException] = []

    def write() -> None:
        try:
            for number in range(1000):
                db.put(b"%d" % number, b"v" * 200)
        except BaseException as error:  # noqa: BLE001 - judged below
            outcome.append(error)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    while not db.status()["writers_paused"]:
        writer.join(0.001)
    db.close()
    writer.join(20)
    assert isinstance(outcome[0], Closed)


def test_writers_ahead_of_the_flushes_slow_down_before_they_stop() -> None:
    settings = tiny(l0_max_ssts=1, l0_sst_size_bytes=10_000, max_unflushed_bytes=400_000)
    with open_database("db", store=MemoryStore(), settings=settings) as db:

        def pauses_of(rows: int) -> int:
            before = db.metrics()[names.DB_BACKPRESSURE_COUNT]
            for _ in range(rows):
                db.put(b"%d" % db.status()["last_seq"], b"v" * 1000)
            return int(db.metrics()[names.DB_BACKPRESSURE_COUNT] - before)

        assert pauses_of(60) == 0
        # No flush can end: a writer waits once for each memtable that it fills, and goes on.
        assert 10 <= pauses_of(255) <= 30
        assert not db.status()["writers_paused"]


def test_a_flush_that_failed_is_tried_again_although_the_flusher_was_woken_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open_database("db", store=MemoryStore(), settings=tiny(wal_enabled=False)) as db:
        flusher = db._engine.services.memtable_flusher

        def fail(*_: Any) -> Any:
            monkeypatch.undo()
            raise Unavailable("the store is down")

        monkeypatch.setattr(flusher, "_build_and_upload", fail)
        db.put(b"k", b"v")
        flushing = threading.Thread(target=db.flush, daemon=True)
        flushing.start()
        eventually(lambda: flusher._retry_at > 0, "the flush has failed")
        # As any new manifest does, or a row that is in the WAL. Afterwards nothing else happens.
        db._engine.services.flusher()
        flushing.join(20)
        assert not flushing.is_alive()
        assert db.get(b"k") == b"v"


def test_writers_that_were_stopped_only_slow_down_when_one_memtable_is_flushed() -> None:
    store, number = MemoryStore(), 0
    settings = tiny(
        l0_max_ssts=1,
        l0_sst_size_bytes=10_000,
        max_unflushed_bytes=100_000,
        manifest_poll_interval=timedelta(milliseconds=20),
    )
    db = open_database("db", store=store, settings=settings)

    def write() -> None:
        nonlocal number
        with suppress(Closed):
            while True:
                db.put(b"%d" % number, b"v" * 1000)
                number += 1

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    eventually(lambda: db._engine.state.now.crowded, "writers have to wait")
    stopped_at = number
    # Room in L0 for one memtable: eight others still wait, and none of them can be flushed.
    Admin("db", store=store).compact(full=True)
    eventually(lambda: number >= stopped_at + 5, "the writer goes on")
    db.close()
    writer.join(20)
    assert not writer.is_alive()


@pytest.mark.slow
def test_writes_accepted_during_the_close_are_not_lost() -> None:
    for _ in range(20):
        store = MemoryStore()
        db = open_database("db", store=store, settings=tiny())
        accepted: list[list[int]] = [[], [], []]

        def write(db: Db, lane: int, mine: list[int]) -> None:
            try:
                while True:
                    db.put(b"%d/%d" % (lane, len(mine)), b"", await_durable=lane == 0)
                    mine.append(len(mine))
            except Closed:
                pass

        writers = [
            threading.Thread(target=write, args=(db, lane, mine), daemon=True)
            for lane, mine in enumerate(accepted)
        ]
        for writer in writers:
            writer.start()
        while not all(accepted):
            writers[0].join(0.001)
        db.close()
        for writer in writers:
            writer.join(20)
            assert not writer.is_alive()
        with open_database("db", store=store, settings=tiny()) as db:
            found = {key for key, _ in db.scan()}
        assert {b"%d/%d" % (lane, number) for lane, mine in enumerate(accepted) for number in mine} <= found


def test_a_wal_that_can_never_be_written_makes_the_database_read_only() -> None:
    clock, inner = VirtualClock(), MemoryStore()
    store = FaultyStore(inner, clock=clock)
    db = open_database("db", store=store, settings=tiny(object_store_max_retries=2), clock=clock)
    db.put(b"kept", b"1", await_durable=True)
    db.put(b"in memory", b"2")
    store.faults.append(Fault("error", nth=None, path="*/wal/*"))
    with pytest.raises(Unavailable):
        db.put(b"lost", b"3", await_durable=True)
    with pytest.raises(Unavailable):
        db.put(b"later", b"4")
    with pytest.raises(Unavailable):
        db.flush()
    assert db.status()["state"] == "read-only"
    # A write is visible when its call returns, also by an exception; what the store has is asked for with durable_only.
    assert dict(db.scan()) == {b"kept": b"1", b"in memory": b"2", b"lost": b"3"}
    assert dict(db.scan(durable_only=True)) == {b"kept": b"1"}
    db.close()
    with open_database("db", store=inner, settings=tiny(), clock=clock) as db:
        assert dict(db.scan()) == {b"kept": b"1"}


def test_a_fenced_writer_refuses_every_call_and_leaves_no_thread() -> None:
    store = MemoryStore()
    before = set(threading.enumerate())
    loser = open_database("db", store=store, settings=tiny(l0_sst_size_bytes=100))
    loser.put(b"a", b"1" * 200, await_durable=True)
    loser.flush()
    with open_database("db", store=store, settings=tiny()) as winner:
        pending = loser.put(b"b", b"2")
        for use in (
            lambda: loser.put(b"c", b"3", await_durable=True),
            lambda: loser.put(b"c", b"3"),
            pending.wait,
            lambda: loser.get(b"a"),
            loser.flush,
            loser.snapshot,
        ):
            with pytest.raises(Closed) as refused:
                use()
            assert refused.value.reason == "fenced"
        assert dict(winner.scan()) == {b"a": b"1" * 200}
        loser.close()
    left = [
        thread for thread in set(threading.enumerate()) - before if not thread.name.startswith("flagstone-io")
    ]
    for thread in left:
        thread.join(5)  # stopping, but perhaps not yet ended
    assert [thread.name for thread in left if thread.is_alive()] == []


def test_a_fenced_writer_that_has_not_noticed_it_closes_without_error_if_its_rows_are_durable() -> None:
    store, lonely = MemoryStore(), tiny(manifest_poll_interval=timedelta(hours=1))
    loser = open_database("db", store=store, settings=lonely)
    loser.put(b"a", b"1")
    loser.flush()
    with open_database("db", store=store, settings=lonely) as winner:
        loser.close()
        assert dict(winner.scan()) == {b"a": b"1"}


def test_a_fenced_writer_that_has_not_noticed_it_reports_its_lost_rows_on_close() -> None:
    store, lonely = MemoryStore(), tiny(manifest_poll_interval=timedelta(hours=1), flush_interval=None)
    loser = open_database("db", store=store, settings=lonely)
    loser.put(b"a", b"1")
    with open_database("db", store=store, settings=lonely) as winner:
        with pytest.raises(Closed) as refused:
            loser.close()
        assert refused.value.reason == "fenced"
        assert dict(winner.scan()) == {}


def test_a_write_is_visible_when_its_call_returns_while_another_thread_waits_for_the_store() -> None:
    clock = VirtualClock(blocking=True)
    store = FaultyStore(MemoryStore(), clock=clock)
    db = open_database("db", store=store, settings=tiny(), clock=clock)
    store.faults.append(Fault("slow", nth=1, op="put_if_absent", path="*/wal/*", delay_s=1.0))
    waiting = threading.Thread(target=lambda: db.put(b"k", b"new", await_durable=True), daemon=True)
    waiting.start()
    assert clock.wait_for_sleepers()
    batch = WriteBatch()
    batch.put(b"batch", b"1")
    db.put(b"put", b"1")
    db.write(batch)
    with db.transaction() as transaction:
        transaction.put(b"transaction", b"1")
    written = {b"put": b"1", b"batch": b"1", b"transaction": b"1"}
    assert {key: db.get(key) for key in written} == written
    assert dict(db.scan()) == {b"k": b"new", **written}
    assert dict(db.scan(durable_only=True)) == {}
    clock.advance(1000)
    waiting.join(20)
    db.flush("wal")
    assert dict(db.scan(durable_only=True)) == dict(db.scan())
    db.close()


def test_with_synchronous_commit_a_synchronous_write_is_visible_once_it_is_durable_and_later_ones_return_then() -> (
    None
):
    clock = VirtualClock(blocking=True)
    store = FaultyStore(MemoryStore(), clock=clock)
    db = open_database("db", store=store, settings=tiny(synchronous_commit=True), clock=clock)
    db.put(b"k", b"old", await_durable=True)
    store.faults.append(Fault("slow", nth=1, op="put_if_absent", path="*/wal/*", delay_s=1.0))
    waiting = threading.Thread(target=lambda: db.put(b"k", b"new", await_durable=True), daemon=True)
    waiting.start()
    assert clock.wait_for_sleepers()
    seen: list[bytes | None] = []

    def write_and_read() -> None:
        db.put(b"later", b"1")
        seen.append(db.get(b"later"))

    later = threading.Thread(target=write_and_read, daemon=True)
    later.start()
    while db.get(b"later", dirty=True) is None:
        later.join(0.001)
    assert (db.get(b"k"), db.get(b"k", dirty=True), db.get(b"later")) == (b"old", b"new", None)
    assert later.is_alive()
    with db.snapshot() as snapshot, db.transaction() as transaction:
        assert snapshot.get(b"k") == transaction.get(b"k") == b"old"
        clock.advance(1000)
        waiting.join(20)
        later.join(20)
        assert seen == [b"1"]
        assert (db.get(b"k"), db.get(b"later")) == (b"new", b"1")
        assert snapshot.get(b"k") == transaction.get(b"k") == b"old"
    db.close()


def test_snapshots_and_transactions_left_open_too_long_expire() -> None:
    clock = VirtualClock()
    settings = tiny(manifest_poll_interval=timedelta(milliseconds=1))
    with open_database("db", store=MemoryStore(), settings=settings, clock=clock) as db:
        snapshot, transaction = db.snapshot(), db.transaction()
        transaction.put(b"k", b"v")
        clock.advance(3_600_001)
        while not snapshot._point.expired:
            threading.Event().wait(0.001)
        with pytest.raises(Closed, match="time to live"):
            snapshot.get(b"k")
        for use in (transaction.commit, lambda: transaction.get(b"k")):
            with pytest.raises(TransactionConflict, match="time to live"):
                use()
        assert db.get(b"k") is None
