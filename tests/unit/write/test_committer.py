"""Neither a clock that is behind nor a slow merge operator stops other writes."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.errors import InvalidRequest
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from flagstone.types import VALUE
from flagstone.write.batch import WriteBatch
from kit.databases import MANUAL


def test_a_write_that_waits_for_the_clock_blocks_neither_snapshots_nor_wal_flushes() -> None:
    clock = VirtualClock(blocking=True)
    db = open_database("db", store=MemoryStore(), settings=MANUAL, clock=clock)
    first = db.put(b"before", b"1")
    clock.shift_wall(-3000)
    late: list[int] = []
    writer = threading.Thread(target=lambda: late.append(db.put(b"after", b"2").created_ms))
    writer.start()
    assert clock.wait_for_sleepers()
    # Everything that needs the write lock: a snapshot, durability, the WAL.
    with db.snapshot() as snapshot:
        assert snapshot.get(b"before") == b"1"
    db.flush("wal")
    assert first.done()
    clock.advance(6000)
    writer.join(5)
    assert late[0] >= first.created_ms
    db.close()


def test_a_clock_that_stays_behind_raises_and_writes_nothing() -> None:
    clock = VirtualClock()
    with open_database("db", store=MemoryStore(), settings=MANUAL, clock=clock) as db:
        db.put(b"before", b"1")
        clock.shift_wall(-60_000)
        for write in (lambda: db.put(b"after", b"2"), lambda: db.write(one_row())):
            with pytest.raises(InvalidRequest, match="monotonic"):
                write()
        clock.shift_wall(120_000)
        assert db.get(b"after") is None
        db.put(b"after", b"3")


def test_with_a_held_clock_rows_get_the_newest_known_time() -> None:
    clock, store = VirtualClock(), MemoryStore()
    settings = MANUAL.replace(on_clock_regression="hold")
    with open_database("db", store=store, settings=settings, clock=clock) as db:
        clock.shift_wall(3_600_000)
        ahead = db.put(b"ahead", b"1").created_ms
        clock.shift_wall(-3_600_000)
        began = clock.monotonic()
        assert db.put(b"after", b"2", ttl=timedelta(minutes=1)).created_ms == ahead
        assert db.write(one_row()).created_ms == ahead
        assert clock.monotonic() == began, "no write waits"
        db.flush()
    with open_database("db", store=store, settings=settings, clock=clock) as db:
        assert db.put(b"again", b"3").created_ms == ahead
        assert db.get(b"ahead") == b"1"
        clock.advance(2 * 3_600_000)
        assert db.put(b"later", b"4").created_ms > ahead


def test_the_error_about_a_clock_that_is_behind_names_the_remedies() -> None:
    clock = VirtualClock()
    with open_database("db", store=MemoryStore(), settings=MANUAL, clock=clock) as db:
        db.put(b"before", b"1")
        clock.shift_wall(-60_000)
        with pytest.raises(InvalidRequest, match=r"on_clock_regression='hold'.*flagstone repair"):
            db.put(b"after", b"2")
        clock.shift_wall(120_000)


def one_row() -> WriteBatch:
    batch = WriteBatch()
    batch.put(b"after", b"2")
    return batch


class Patient:
    """A merge operator that signals its start and waits for permission to continue."""

    def __init__(self) -> None:
        self.folding = threading.Event()
        self.go_on = threading.Event()

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        self.folding.set()
        assert self.go_on.wait(5)
        return (existing or b"") + operand


def test_merging_the_operands_of_a_batch_does_not_block_other_writers() -> None:
    operator = Patient()
    db: Db = open_database("db", store=MemoryStore(), settings=MANUAL, merge_operator=operator)
    batch = WriteBatch()
    batch.merge(b"k", b"1")
    batch.merge(b"k", b"2")
    writer = threading.Thread(target=lambda: db.write(batch))
    writer.start()
    assert operator.folding.wait(5)
    handle = db.put(b"other", b"value", await_durable=True)
    assert handle.done()
    assert db.get(b"k") is None
    operator.go_on.set()
    writer.join(5)
    assert db.get(b"k") == b"12"
    db.close()


def test_rows_of_max_wal_bytes_are_written_to_a_wal_file_without_a_timer() -> None:
    store = MemoryStore()
    with open_database("db", store=store, settings=MANUAL.replace(max_wal_bytes=1000)) as db:
        handles = [db.put(b"%03d" % number, b"x" * 50) for number in range(100)]
        deadline = time.monotonic() + 20
        # Nothing waits for it, so nothing but its size makes the file be written.
        while not handles[50].done() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert handles[50].done()
        assert any(meta.size for meta in store.list("db/wal"))
        assert db.status()["frozen_memtables"] == 0


def test_max_wal_bytes_counts_from_the_last_file_and_across_frozen_memtables() -> None:
    settings = MANUAL.replace(
        max_wal_bytes=1000, l0_sst_size_bytes=600, l0_max_ssts=1000, l0_max_ssts_per_key=1000
    )
    with open_database("db", store=MemoryStore(), settings=settings) as db:
        for number in range(200):
            last = db.put(b"%03d" % number, b"x" * 50)
        db.flush()
        assert last.done()
        assert len(dict(db.scan())) == 200


def test_the_rows_of_an_interrupted_write_are_not_written_to_the_wal() -> None:
    store = MemoryStore()
    db = open_database("db", store=store, settings=MANUAL)
    db.put(b"whole", b"1")
    state = db._engine.state
    seq = state.last_seq + 1
    with state.lock:
        # As an exception leaves it between the rows and their sequence number.
        state.now.memtables.active.insert_batch([(b"torn/1", VALUE, b"1", None)], seq, 5)
    db.flush("wal")
    with open_database("db", store=store, settings=MANUAL) as again:
        assert dict(again.scan()) == {b"whole": b"1"}
