"""Scans longer than a compaction keeps its inputs: a checkpoint keeps their SSTs, or they continue in a newer view."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import islice
from typing import Any

import pytest

from flagstone import aio
from flagstone.config import Settings
from flagstone.db.open import open_database
from flagstone.db.reader.reader import open_reader
from flagstone.db.writer.database import Db
from flagstone.db.writer.scan_checkpoints import plan_due_ms
from flagstone.errors import Unavailable
from flagstone.lsm.operators import Concatenate
from flagstone.metadata.manifest import Checkpoint, new_manifest
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.memory import MemoryStore
from flagstone.types import ManifestId
from kit.databases import MANUAL, Upkeep

ROWS = 400
SETTINGS = MANUAL.replace(
    manifest_poll_interval=timedelta(hours=1),
    sst_block_size=1024,
    block_cache_bytes=0,
    meta_cache_bytes=0,
)


def key(number: int) -> bytes:
    return b"key%05d" % number


class Rig:
    """A database with two SSTs and empty caches, so that every read goes to the store."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.clock = VirtualClock()
        self.upkeep = Upkeep(self.store, self.clock, operator=Concatenate())
        self.db = self.open()
        self.write(b"old", range(0, ROWS, 2))
        self.write(b"old", range(1, ROWS, 2))

    def open(self) -> Db:
        return open_database(
            "db", store=self.store, settings=SETTINGS, clock=self.clock, merge_operator=Concatenate()
        )

    def write(self, value: bytes, numbers: range) -> None:
        for number in numbers:
            self.db.put(key(number), value * 20)
        self.db.flush()

    def pass_time(self, seconds: float) -> None:
        """Advance the clock, and let the writer renew its scan checkpoints on the way."""
        for _ in range(10):
            self.clock.advance(seconds * 100)
            self.db._engine.manifest.refresh()
            self.db._engine.services.scan_checkpoints.run_once()

    @property
    def pinned(self) -> int:
        return int(self.db.status()["pinned_for_long_reads"])


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.db.close()


OLD = [(key(number), b"old" * 20) for number in range(ROWS)]


def begun(scan: Any) -> tuple[Any, list[Any]]:
    """A scan after its first rows, and those rows."""
    iterator = iter(scan)
    return iterator, list(islice(iterator, 20))


def by_scan(db: Db) -> tuple[Callable[[], list[Any]], Callable[[], None]]:
    iterator, first = begun(db.scan())
    held = [iterator]
    return lambda: first + list(held[0]), held.clear


def by_snapshot(db: Db) -> tuple[Callable[[], list[Any]], Callable[[], None]]:
    snapshot = db.snapshot(timeout="1day")
    return lambda: list(snapshot.scan()), snapshot.close


def by_transaction(db: Db) -> tuple[Callable[[], list[Any]], Callable[[], None]]:
    transaction = db.transaction(timeout="1day")
    return lambda: list(transaction.scan()), transaction.rollback


def by_arrow(db: Db) -> tuple[Callable[[], list[Any]], Callable[[], None]]:
    held = [db.scan_arrow(batch_rows=20)]
    first = held[0].read_next_batch().to_pylist()

    def rest() -> list[Any]:
        rows = first + [row for batch in held[0] for row in batch.to_pylist()]
        return [(row["key"], row["value"]) for row in rows]

    return rest, held.clear


@pytest.mark.slow
@pytest.mark.parametrize("read", [by_scan, by_snapshot, by_transaction, by_arrow])
def test_a_long_scan_gets_a_checkpoint_before_its_ssts_may_be_deleted_and_releases_it_at_its_end(
    rig: Rig, read: Callable[[Db], tuple[Callable[[], list[Any]], Callable[[], None]]]
) -> None:
    rest, end = read(rig.db)
    rig.write(b"new", range(ROWS))
    rig.upkeep.compact()
    rig.db._engine.manifest.refresh()
    rig.pass_time(440)
    assert rig.pinned == 0, "most reads are over before it is worth a manifest"
    rig.pass_time(100)
    assert rig.pinned == 1
    rig.pass_time(4 * 900)
    assert rig.upkeep.checkpoints() == 1, "the compactor's has expired, ours was renewed"
    rig.upkeep.collect()
    assert rest() == OLD
    end()
    del rest
    gc.collect()
    rig.pass_time(60)
    assert (rig.pinned, rig.upkeep.checkpoints()) == (0, 0)
    assert rig.upkeep.collect() > 0
    assert [value for _, value in rig.db.scan()] == [b"new" * 20] * ROWS


def test_a_scan_continues_through_several_compactions(rig: Rig) -> None:
    rest, _ = by_scan(rig.db)
    for round_ in range(4):
        rig.write(b"%d" % round_, range(ROWS))
        rig.upkeep.compact()
        rig.pass_time(700)
        rig.upkeep.collect()
    assert rest() == OLD


def test_scans_of_the_same_ssts_share_a_checkpoint(rig: Rig) -> None:
    reads = [by_scan(rig.db) for _ in range(3)]
    rig.write(b"new", range(10))
    reads += [by_scan(rig.db) for _ in range(3)]
    rig.upkeep.compact()
    rig.pass_time(600)
    assert rig.pinned == 1
    rig.pass_time(600)
    rig.upkeep.collect()
    assert all(rest() == OLD for rest, _ in reads[:3])
    assert all(len(rest()) == ROWS for rest, _ in reads[3:])


def test_short_scans_and_flushes_create_no_checkpoint(rig: Rig) -> None:
    by_scan(rig.db)
    for _ in range(3):
        rig.write(b"new", range(10))
        rig.upkeep.compact()
        rig.db._engine.manifest.refresh()
    before = rig.db._engine.manifest.store.require_latest().id
    rig.pass_time(2000)
    assert rig.db._engine.manifest.store.require_latest().id == before


def test_a_flush_during_a_scan_creates_no_checkpoint(rig: Rig) -> None:
    rest, _ = by_scan(rig.db)
    rig.write(b"new", range(ROWS))
    before = rig.db._engine.manifest.store.require_latest().id
    rig.pass_time(5000)
    assert rig.db._engine.manifest.store.require_latest().id == before
    assert rest() == OLD


def test_closing_deletes_the_scan_checkpoints(rig: Rig) -> None:
    read = by_scan(rig.db)
    rig.upkeep.compact()
    rig.pass_time(600)
    assert rig.pinned == 1
    rig.db.close()
    rig.clock.advance(900_000)
    assert rig.upkeep.checkpoints() == 0
    del read
    rig.db = rig.open()


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("taken", [0, 1, 33, 150, ROWS])
def test_a_scan_of_a_snapshot_continues_in_a_newer_view_when_its_ssts_are_gone(
    rig: Rig, taken: int, reverse: bool
) -> None:
    with rig.db.snapshot() as snapshot:
        scan = iter(snapshot.scan(reverse=reverse, read_ahead_bytes=1024))
        found = list(islice(scan, taken))
        rig.write(b"new", range(ROWS))
        for number in range(0, ROWS, 3):
            rig.db.delete(key(number))
        rig.db.flush()
        rig.upkeep.compact(lifetime=None)
        assert rig.upkeep.collect() >= 4
        found += list(scan)
        assert found == (OLD[::-1] if reverse else OLD)
        assert snapshot.get(key(0)) == b"old" * 20
        assert snapshot.multi_get([key(3), key(4)]) == [b"old" * 20] * 2


def test_operands_are_merged_once_when_a_scan_changes_its_view(rig: Rig) -> None:
    for letter in (b"a", b"b", b"c"):
        for number in range(ROWS):
            rig.db.merge(key(number), letter)
        rig.db.flush()
    expected = [(name, value + b"abc") for name, value in OLD]
    for columns in (False, True):
        with rig.db.snapshot() as snapshot:
            if columns:
                batches = snapshot.scan_arrow(batch_rows=16)
                found = batches.read_next_batch().to_pylist()
            else:
                scan = iter(snapshot.scan(read_ahead_bytes=1024))
                found = list(islice(scan, 17))
            rig.db.merge(key(5), b"late")
            rig.db.flush()
            rig.upkeep.compact(lifetime=None)
            rig.upkeep.collect()
            if columns:
                found += [row for batch in batches for row in batch.to_pylist()]
                found = [(row["key"], row["value"]) for row in found]
            else:
                found += list(scan)
            assert found == expected
        rig.db.put(key(5), OLD[5][1] + b"abc")
        rig.db.flush()


def test_a_scan_of_a_transaction_keeps_its_own_writes_in_a_newer_view(rig: Rig) -> None:
    transaction = rig.db.transaction()
    transaction.put(key(100), b"mine")
    transaction.delete(key(101))
    scan = iter(transaction.scan(read_ahead_bytes=1024))
    found = list(islice(scan, 10))
    transaction.put(key(200), b"after the scan began")
    assert transaction.get(key(200)) == b"after the scan began"
    rig.write(b"new", range(ROWS))
    rig.upkeep.compact(lifetime=None)
    rig.upkeep.collect()
    found += list(scan)
    expected = dict(OLD) | {key(100): b"mine"}
    del expected[key(101)]
    assert dict(found) == expected
    assert dict(transaction.scan())[key(200)] == b"after the scan began"
    transaction.rollback()


def test_a_plain_scan_continues_if_compaction_dropped_no_row_that_it_shows(rig: Rig) -> None:
    scan = iter(rig.db.scan(read_ahead_bytes=1024))
    found = list(islice(scan, 50))
    rig.upkeep.compact(lifetime=None)
    assert rig.upkeep.collect() == 2
    assert found + list(scan) == OLD


def test_a_plain_scan_whose_rows_were_dropped_raises(rig: Rig) -> None:
    scan = iter(rig.db.scan(read_ahead_bytes=1024))
    next(scan)
    rig.write(b"new", range(ROWS))
    rig.upkeep.compact(lifetime=None)
    rig.upkeep.collect()
    with pytest.raises(Unavailable, match="snapshot"):
        list(scan)


def test_a_scan_with_a_limit_and_a_seek_continues_in_a_newer_view(rig: Rig) -> None:
    with rig.db.snapshot() as snapshot:
        scan = snapshot.scan(limit=100, read_ahead_bytes=1024)
        found = list(islice(scan, 10))
        rig.upkeep.compact(lifetime=None)
        rig.upkeep.collect()
        found += list(islice(scan, 40))
        scan.seek(key(300))
        found += list(scan)
    assert found == OLD[:50] + OLD[300:350]


def test_an_async_scan_continues_in_a_newer_view() -> None:
    async def work() -> None:
        store, clock = MemoryStore(), VirtualClock()
        upkeep = Upkeep(store, clock)
        async with await aio.open("db", store=store, settings=SETTINGS, clock=clock) as db:
            for number in range(ROWS):
                await db.put(key(number), b"old" * 20)
            await db.flush()
            async with db.snapshot() as snapshot:
                found = []
                async for row in snapshot.scan(read_ahead_bytes=1024):
                    found.append(row)
                    if len(found) == 30:
                        await db.put(key(200), b"new")
                        await db.flush()
                        upkeep.compact(lifetime=None)
                        assert upkeep.collect() == 2
                assert found == OLD

    asyncio.run(work())


def test_a_scan_of_a_reader_without_checkpoint_continues_in_a_newer_view(rig: Rig) -> None:
    with open_reader(
        "db", store=rig.store, mode="latest", clock=rig.clock, merge_operator=Concatenate()
    ) as reader:
        scan = iter(reader.scan(read_ahead_bytes=1024))
        found = list(islice(scan, 50))
        rig.upkeep.compact(lifetime=None)
        rig.upkeep.collect()
        assert found + list(scan) == OLD


def test_a_scan_checkpoint_is_due_at_half_of_the_remaining_time() -> None:
    now_ms, lifetime = 1_000_000_000, timedelta(seconds=900)

    def manifest(*held: tuple[int, int | None]) -> Any:
        from dataclasses import replace

        return replace(
            new_manifest(),
            checkpoints=tuple(
                Checkpoint(SYSTEM_IDS.uuid(), ManifestId(of), 0, expires) for of, expires in held
            ),
        )

    def due_in(*held: tuple[int, int | None]) -> int:
        return plan_due_ms(now_ms, manifest(*held), 5, lifetime) - now_ms

    now_s = now_ms // 1000
    assert due_in() == 0
    assert due_in((6, now_s + 900)) == 450_000
    assert due_in((6, now_s + 900), (7, now_s + 100)) == 50_000
    assert due_in((6, now_s + 90_000)) == 450_000, "whoever made it may delete it, too"
    assert due_in((4, now_s + 10), (6, now_s + 900)) == 450_000, "older than what is read: of no use"
    assert due_in((6, now_s - 10)) == 0
    assert due_in((6, None)) == 0


@pytest.mark.long
@pytest.mark.slow
def test_a_scan_survives_compaction_and_collection_in_its_own_process() -> None:
    at_once = {"interval": "300ms", "min_age": "0s"}
    eager = {
        "poll_interval": "50ms",
        "commit_compacted_interval": "50ms",
        "checkpoint_lifetime": "4s",
        "worker": {"compactions_poll_interval": "50ms"},
    }
    settings = Settings.from_dict(
        {
            "sst_block_size": 1024,
            "block_cache_bytes": 0,
            "meta_cache_bytes": 0,
            "compactor_options": eager,
            "garbage_collector_options": {"manifest_options": at_once, "compacted_options": at_once},
        }
    )
    store = MemoryStore()
    with open_database("db", store=store, settings=settings) as db:
        for number in range(ROWS):
            db.put(key(number), b"old" * 20)
        db.flush()
        scan = iter(db.scan(read_ahead_bytes=1024))
        found = list(islice(scan, 10))
        pinned = 0
        began = time.monotonic()
        while time.monotonic() < began + 10:
            for number in range(0, ROWS, 7):
                db.put(key(number), b"new")
            db.flush()
            found += islice(scan, 2)
            pinned = max(pinned, db.status()["pinned_for_long_reads"])
            time.sleep(0.2)
        assert db.status()["garbage_collector"]["rounds"] > 5
        assert pinned == 1
        assert found + list(scan) == OLD
