"""Writes while the clock is behind, and merge operators that take their time: neither stops the others."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest

from flagstone.config import Settings
from flagstone.db.database import Db
from flagstone.db.open import open_database
from flagstone.errors import InvalidRequest
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from flagstone.types import VALUE
from flagstone.write.batch import WriteBatch

SETTINGS = Settings(flush_interval=None, compactor_options=None, garbage_collector_options=None)


def test_a_writer_that_waits_for_the_clock_holds_nobody_up() -> None:
    clock = VirtualClock(blocking=True)
    db = open_database("db", store=MemoryStore(), settings=SETTINGS, clock=clock)
    first = db.put(b"before", b"1")
    clock.shift_wall(-3000)
    late: list[int] = []
    writer = threading.Thread(target=lambda: late.append(db.put(b"after", b"2").created_ms))
    writer.start()
    assert clock.wait_for_sleepers()
    # Everything that needs the lock of the writes: a snapshot, what is durable, the log.
    with db.snapshot() as snapshot:
        assert snapshot.get(b"before") == b"1"
    db.flush("wal")
    assert first.done()
    clock.advance(6000)
    writer.join(5)
    assert late[0] >= first.created_ms
    db.close()


def test_a_clock_that_stays_behind_is_an_error_and_nothing_is_written() -> None:
    clock = VirtualClock()
    with open_database("db", store=MemoryStore(), settings=SETTINGS, clock=clock) as db:
        db.put(b"before", b"1")
        clock.shift_wall(-60_000)
        for write in (lambda: db.put(b"after", b"2"), lambda: db.write(one_row())):
            with pytest.raises(InvalidRequest, match="monotonic"):
                write()
        clock.shift_wall(120_000)
        assert db.get(b"after") is None
        db.put(b"after", b"3")


def test_a_held_clock_writes_on_with_the_newest_time() -> None:
    clock, store = VirtualClock(), MemoryStore()
    settings = SETTINGS.replace(on_clock_regression="hold")
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


def test_the_refusal_of_a_clock_that_is_behind_names_the_ways_out() -> None:
    clock = VirtualClock()
    with open_database("db", store=MemoryStore(), settings=SETTINGS, clock=clock) as db:
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
    """An operator that looks at the database while it folds, and waits to be told to go on."""

    def __init__(self) -> None:
        self.folding = threading.Event()
        self.go_on = threading.Event()

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        self.folding.set()
        assert self.go_on.wait(5)
        return (existing or b"") + operand


def test_folding_a_batch_holds_nobody_up() -> None:
    operator = Patient()
    db: Db = open_database("db", store=MemoryStore(), settings=SETTINGS, merge_operator=operator)
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
    with open_database("db", store=store, settings=SETTINGS.replace(max_wal_bytes=1000)) as db:
        handles = [db.put(b"%03d" % number, b"x" * 50) for number in range(100)]
        deadline = time.monotonic() + 20
        # Nothing waits for it, so nothing but its size makes the file be written.
        while not handles[50].done() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert handles[50].done()
        assert any(meta.size for meta in store.list("db/wal"))
        assert db.status()["frozen_memtables"] == 0


def test_max_wal_bytes_counts_from_the_last_file_and_across_frozen_memtables() -> None:
    settings = SETTINGS.replace(
        max_wal_bytes=1000, l0_sst_size_bytes=600, l0_max_ssts=1000, l0_max_ssts_per_key=1000
    )
    with open_database("db", store=MemoryStore(), settings=settings) as db:
        for number in range(200):
            last = db.put(b"%03d" % number, b"x" * 50)
        db.flush()
        assert last.done()
        assert len(dict(db.scan())) == 200


def test_the_rows_of_a_write_that_was_cut_off_are_not_written_to_the_wal() -> None:
    store = MemoryStore()
    db = open_database("db", store=store, settings=SETTINGS)
    db.put(b"whole", b"1")
    committer = db._engine.committer
    seq = committer.durability.last_seq + 1
    with committer.lock:
        # As an exception leaves it between the rows and their number.
        committer.memtables.active.insert_batch([(b"torn/1", VALUE, b"1", None)], seq, 5)
    db.flush("wal")
    with open_database("db", store=store, settings=SETTINGS) as again:
        assert dict(again.scan()) == {b"whole": b"1"}
