"""`delete_range` and `delete_prefix` of an open database, and what others see of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from threading import Thread
from typing import Any

import pytest

import flagstone
from flagstone import Admin, InvalidRequest, TransactionConflict, WalReader, WriteBatch
from flagstone.db.writer.database import Db
from flagstone.db.writer.few_rows import FEW_ROWS
from flagstone.format.filter import FixedPrefix
from flagstone.lsm.system_rows import SYSTEM_PREFIX, SYSTEM_START, SYSTEM_STOP
from flagstone.metadata.annotations import RETENTION_MANIFEST_ID, held_loads
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from flagstone.types import KeyRange
from kit.databases import IDLE, MANUAL, QUIET, World, apply_change, numbered

ROWS = numbered(0, 400)
LEFT = {key: value for key, value in ROWS.items() if not b"k100" <= key < b"k300"}


def filled(store: MemoryStore, *, flush: bool = True, **options: Any) -> Db:
    db = flagstone.open("db", store=store, settings=options.pop("settings", MANUAL), **options)
    batch = WriteBatch()
    for key, value in ROWS.items():
        batch.put(key, value)
    db.write(batch)
    if flush:
        db.flush()
    return db


@pytest.mark.parametrize("flush", [True, False], ids=["in an SST", "in the memtable"])
def test_a_range_disappears_with_one_manifest_and_stays_away_after_reopening(flush: bool) -> None:
    store = MemoryStore()
    with filled(store, flush=flush) as db:
        handle = db.delete_range(b"k100", b"k300")
        assert (handle.seq, handle.done()) == (2, True)
        assert dict(db.scan()) == LEFT
        assert dict(db.scan(reverse=True)) == LEFT
        assert db.get(b"k200") is None
        assert db.multi_get([b"k099", b"k100", b"k299", b"k300"]) == [b"v99", None, None, b"v300"]
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        assert dict(db.scan()) == LEFT
        assert db.status()["last_seq"] == 2
    assert Admin("db", store=store).verify().ok


def test_a_range_delete_writes_no_sst_if_the_memtable_is_empty() -> None:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=QUIET) as db:
        for key, value in ROWS.items():
            db.put(key, value)
        db.flush()
        before = {meta.path for meta in store.list("db/compacted")}
        manifests = Admin("db", store=store).manifest().id
        db.delete_range(b"k100", b"k300")
        assert {meta.path for meta in store.list("db/compacted")} == before
        assert Admin("db", store=store).manifest().id == manifests + 1


def test_few_rows_become_tombstones_and_cut_no_view() -> None:
    store = MemoryStore()
    with filled(store) as db:
        views = list(db.manifest().views)
        db.delete_range(b"k100", b"k%03d" % (100 + FEW_ROWS))
        assert list(db.manifest().views) == views
        assert db.scan(b"k100", b"k201").__next__()[0] == b"k200"
        db.delete_range(b"k201", b"k%03d" % (202 + FEW_ROWS))
        assert list(db.manifest().views) != views


@pytest.mark.parametrize(("start", "stop"), [(b"x", b"z"), (b"k1", b"k1"), (None, b""), (b"", b"")])
def test_a_range_without_rows_writes_nothing(start: bytes | None, stop: bytes | None) -> None:
    with filled(MemoryStore()) as db:
        handle = db.delete_range(start, stop)
        assert (handle.seq, handle.done()) == (0, True)
        assert db.status()["last_seq"] == 1
        assert dict(db.scan()) == ROWS


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda db: db.delete_range(b"b", b"a"), "start must not be above stop"),
        (lambda db: db.delete_range("a", None), "start is bytes"),
        (lambda db: db.delete_prefix(b""), "delete_range"),
        (lambda db: db.delete_prefix("a"), "bytes"),
    ],
)
def test_a_bad_range_is_refused(call: Callable[[Any], Any], message: str) -> None:
    with filled(MemoryStore()) as db:
        with pytest.raises(InvalidRequest, match=message):
            call(db)
        assert dict(db.scan()) == ROWS


def test_the_whole_database_and_a_prefix_can_be_deleted() -> None:
    store = MemoryStore()
    with filled(store) as db:
        db.delete_prefix(b"k1")
        db.put(b"k1", b"exactly")
        assert b"k199" not in db
        db.delete_range(None, None)
        assert dict(db.scan()) == {}
        assert not db.manifest().ssts
        db.put(b"k200", b"new")
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        assert dict(db.scan()) == {b"k200": b"new"}


def test_snapshots_and_transactions_that_are_open_keep_seeing_the_rows() -> None:
    with filled(MemoryStore()) as db:
        db.put(b"k150", b"in memory")
        seen = ROWS | {b"k150": b"in memory"}
        with db.snapshot() as snapshot, db.transaction() as transaction:
            scan = iter(db.scan())
            first = next(scan)
            db.delete_range(b"k100", b"k300")
            assert dict(snapshot.scan()) == dict(transaction.scan()) == dict([first, *scan]) == seen
            assert snapshot.get(b"k150") == transaction.get(b"k150") == b"in memory"


@pytest.mark.parametrize(
    ("isolation", "touch", "conflicts"),
    [
        ("snapshot", lambda tx: tx.put(b"k150", b"x"), True),
        ("snapshot", lambda tx: tx.get(b"k150"), False),
        ("serializable", lambda tx: tx.get(b"k150"), True),
        ("serializable", lambda tx: list(tx.scan(b"k299", b"k350")), True),
        ("serializable", lambda tx: list(tx.scan(b"k300", b"k350")), False),
        ("serializable", lambda tx: tx.get(b"k300"), False),
    ],
)
def test_a_transaction_that_depends_on_the_range_conflicts(
    isolation: Any, touch: Callable[[Any], Any], conflicts: bool
) -> None:
    with filled(MemoryStore()) as db:
        transaction = db.transaction(isolation)
        touch(transaction)
        transaction.put(b"outside", b"x")
        db.delete_range(b"k100", b"k300")
        if conflicts:
            with pytest.raises(TransactionConflict, match="range"):
                transaction.commit()
        else:
            transaction.commit()
        assert (db.get(b"outside") is None) is conflicts


def test_a_reader_in_another_process_sees_the_delete_with_its_next_manifest() -> None:
    store = MemoryStore()
    with filled(store) as db:
        db.put(b"k150", b"in the WAL", await_durable=True)
        with flagstone.open_reader("db", store=store) as held:
            db.delete_range(b"k100", b"k300")
            assert len(dict(held.scan())) == len(ROWS)
            with flagstone.open_reader("db", store=store) as newer:
                assert dict(newer.scan()) == LEFT


def test_former_states_and_checkpoints_keep_the_rows_and_later_states_never_show_them() -> None:
    world = World()
    with world.open() as db:
        for key, value in ROWS.items():
            db.put(key, value)
        db.flush()
        kept = db.checkpoint(name="before")
        world.clock.advance(5_000)
        seq = db.delete_range(b"k100", b"k300").seq
        with pytest.raises(InvalidRequest, match="cannot show"):
            db.snapshot(as_of=seq - 1)
        world.clock.advance(5_000)
        db.put(b"k150", b"later", await_durable=True)
        shown = {as_of: state(world, as_of) for as_of in (seq - 1, seq, seq + 1)}
        assert shown == {seq - 1: ROWS, seq: LEFT, seq + 1: LEFT | {b"k150": b"later"}}
        db.flush()
    assert world.scan("db", kept.id) == state(world, seq - 1) == ROWS
    assert state(world, seq + 1) == shown[seq + 1]
    with pytest.raises(InvalidRequest, match="not in the WAL"):
        state(world, seq)
    world.admin().restore(kept.id)
    assert world.scan("db") == ROWS


def state(world: World, as_of: int) -> dict[bytes, bytes]:
    with flagstone.open_reader("db", store=world.store, as_of=as_of, clock=world.clock) as reader:
        return dict(reader.scan())


def test_garbage_collection_wins_the_space_back_when_the_former_state_has_expired() -> None:
    world = World()
    with world.open() as db:
        for key, value in ROWS.items():
            db.put(key, value)
        db.flush()
        db.delete_range(None, None)
        world.admin().collect_garbage(min_age="0s")
        assert world.objects("db/compacted"), "readers of the former state may still need them"
        world.clock.advance(901_000)
        world.admin().collect_garbage(min_age="0s")
        assert not world.objects("db/compacted")


def test_a_clone_releases_the_borrowed_ssts_that_a_range_covers() -> None:
    world = World()
    world.write("p", ROWS)
    world.admin("p").clone("c")
    with world.open("c") as db:
        assert db.manifest().external_dbs[0].sst_ids
        db.delete_range(b"k100", b"k300")
        assert dict(db.scan()) == LEFT
        db.delete_range(None, None)
        assert not db.manifest().external_dbs[0].sst_ids
    assert world.scan("p") == ROWS
    assert world.scan("c") == {}


def test_a_projection_deletes_only_in_its_writable_range() -> None:
    world = World()
    world.write("p", ROWS)
    world.admin("p").clone("c", range=(b"k100", b"k300"))
    with world.open("c") as db:
        with pytest.raises(InvalidRequest, match="writable range"):
            db.delete_range(b"k300", None)
        db.delete_range(None, b"k250")
        assert dict(db.scan(b"k100", b"k300")) == {key: ROWS[key] for key in sorted(ROWS)[250:300]}


def test_segments_are_cut_too_and_an_empty_one_leaves_with_the_next_flush() -> None:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=MANUAL, segment_extractor=FixedPrefix("first", 2)) as db:
        for key, value in ROWS.items():
            db.put(key, value)
        db.flush()
        db.delete_range(b"k100", b"k300")
        assert dict(db.scan()) == LEFT
        db.put(b"k111", b"new")
        db.flush()
        assert [segment.prefix for segment in db.manifest().segments] == [b"k0", b"k1", b"k3"]
        assert dict(db.scan()) == LEFT | {b"k111": b"new"}


# -- changes ------------------------------------------------------------------------------------------------


def test_a_consumer_receives_one_change_at_its_place_and_its_copy_stays_equal() -> None:
    store = MemoryStore()
    copy: dict[bytes, bytes] = {}
    with filled(store) as db:
        db.put(b"k150", b"before", await_durable=True)
        db.delete_range(b"k100", b"k300")
        db.put(b"k150", b"after", await_durable=True)
        db.delete_range(b"k050", None)
        with WalReader("db", store=store, pin="copy") as reader:
            found = []
            for batch in reader.follow(timeout_s=0):
                found += [change for change in batch.changes if change.op == "delete_range"]
                for change in batch.changes:
                    apply_change(copy, change)
                reader.commit(batch)
        assert copy == dict(db.scan())
        assert [(change.key, change.value, change.seq) for change in found] == [
            (b"k100", b"k300", 3),
            (b"k050", None, 5),
        ]
        with WalReader("db", store=store, pin="copy") as reader:
            assert list(reader.follow(timeout_s=0)) == []


def test_a_pinned_consumer_finds_the_delete_later_and_keeps_no_sst_for_it() -> None:
    world = World()
    with world.open() as db:
        for key, value in ROWS.items():
            db.put(key, value)
        db.flush()
        reader = WalReader("db", store=world.store, pin="slow", clock=world.clock, ids=world.ids)
        first = next(reader.follow(timeout_s=0))
        reader.commit(first)
        reader.close()
        db.delete_range(None, None)
        record = next(held_loads(db.manifest()))
        assert (record.checkpoint.manifest_id, record.checkpoint.expires_s) == (RETENTION_MANIFEST_ID, None)
        world.clock.advance(901_000)
        world.admin().collect_garbage(min_age="0s")
        assert not world.objects("db/compacted")
        batches = list(reader.follow(timeout_s=0))
        # System rows, which are hidden, stay, so the whole database is two ranges.
        found = [(change.op, change.key, change.value) for batch in batches for change in batch.changes]
        assert found == [
            ("delete_range", b"", SYSTEM_START),
            ("delete_range", SYSTEM_STOP, None),
        ]
        assert world.admin().verify().ok
        with pytest.raises(InvalidRequest, match="has no state"):
            world.admin().clone("c", checkpoint=record.checkpoint.id)
        for batch in batches:
            reader.commit(batch)
        reader.close()


def test_a_consumer_without_the_record_gets_an_error_and_not_silence() -> None:
    world = World()
    with world.open() as db:
        for key, value in ROWS.items():
            db.put(key, value, await_durable=key == b"k399")
        reader = WalReader("db", store=world.store, clock=world.clock, ids=world.ids)
        position = list(reader.follow(timeout_s=0))[-1].position
        db.delete_range(b"k100", b"k300")
        world.clock.advance(901_000)
        world.admin().collect_garbage(min_age="0s")
        db.put(b"k150", b"later", await_durable=True)
        with pytest.raises(InvalidRequest, match="start over with a copy"):
            list(reader.follow(position, timeout_s=0))


# -- other faces --------------------------------------------------------------------------------------------


def test_the_asyncio_database_deletes_ranges() -> None:
    async def use() -> dict[bytes, bytes]:
        async with flagstone.aio.open("db", store=MemoryStore(), settings=MANUAL) as db:
            for key, value in ROWS.items():
                await db.put(key, value)
            assert (await db.delete_range(b"k100", b"k300")).done()
            await db.delete_prefix(b"k3")
            return {key: value async for key, value in db.scan()}

    assert asyncio.run(use()) == {key: value for key, value in LEFT.items() if key < b"k3"}


def test_writers_beside_a_range_delete_lose_nothing_that_they_wrote_afterwards() -> None:
    store = MemoryStore()
    failed = list[BaseException]()
    with flagstone.open("db", store=store, settings=IDLE) as db:

        def write(number: int) -> None:
            try:
                for round_ in range(40):
                    db.put(b"w%d" % number, b"%d" % round_)
                    db.put(b"x%d" % number, b"%d" % round_)
            except BaseException as error:  # noqa: BLE001 - checked below
                failed.append(error)

        threads = [Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        handles = [db._engine.services.range_deletes.delete(KeyRange(b"w", b"x")) for _ in range(10)]
        for thread in threads:
            thread.join()
        assert not failed
        last = {row.key: row.seq for row in db.scan(b"w").rows()}
        assert all(db.get(b"x%d" % number) == b"39" for number in range(4))
    changes = [
        change for batch in WalReader("db", store=store).follow(timeout_s=0) for change in batch.changes
    ]
    copy: dict[bytes, bytes] = {}
    for change in changes:
        apply_change(copy, change)
    with flagstone.open("db", store=store, settings=IDLE) as db:
        assert dict(db.scan()) == copy
    seqs = [handle.seq for handle in handles if handle is not None]
    assert seqs == sorted(set(seqs))
    assert set(last) <= set(copy)


def test_a_former_view_whose_ssts_are_gone_raises_instead_of_hiding_the_rows() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    with flagstone.open("db", store=store, settings=IDLE, clock=clock) as db:
        for key, value in ROWS.items():
            db.put(key, value)
        db.flush()
        with db.snapshot(timeout=timedelta.max) as snapshot:
            db.delete_range(b"k100", b"k300")
            for meta in list(store.list("db/compacted")):
                store.delete(meta.path)
            db._engine.manifest.views.ssts.drop(list(db.manifest().ssts))
            with pytest.raises(flagstone.Unavailable, match="a range was deleted after"):
                list(snapshot.scan(b"k100"))


@pytest.mark.parametrize("flush", [True, False], ids=["in an SST", "in the memtable"])
def test_a_delete_of_the_whole_database_keeps_system_rows_and_is_one_manifest(flush: bool) -> None:
    store, name = MemoryStore(), SYSTEM_PREFIX + b"schema/orders"
    with filled(store, flush=False) as db:
        batch = WriteBatch()
        batch.put_system(name, b"columns")
        batch.put(b"\x00", b"before the system rows")
        db.write(batch)
        if flush:
            db.flush()
        manifests = db.manifest()
        handle = db.delete_range(None, None)
        assert handle.seq == 3
        assert list(db.scan(include_system=True)) == [(name, b"columns")]
        former = {entry.id for entry in manifests.checkpoints}
        # One record and one checkpoint of the former state: a second manifest would have added two more.
        assert len([entry for entry in db.manifest().checkpoints if entry.id not in former]) == 2
        db.put(b"k100", b"later")
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        assert dict(db.scan(include_system=True)) == {name: b"columns", b"k100": b"later"}
    assert Admin("db", store=store).verify().ok


def test_a_consumer_that_follows_a_delete_of_the_whole_database_keeps_system_rows() -> None:
    store, name = MemoryStore(), SYSTEM_PREFIX + b"schema/orders"
    with filled(store) as db:
        batch = WriteBatch()
        batch.put_system(name, b"columns")
        db.write(batch, await_durable=True)
        db.delete_range(None, None)
        db.put(b"k100", b"later", await_durable=True)
        rows: dict[bytes, bytes] = {}
        reader = WalReader("db", store=store, include_system=True)
        for found in reader.follow(1, timeout_s=0):
            for change in found.changes:
                apply_change(rows, change)
        assert rows == dict(db.scan(include_system=True)) == {name: b"columns", b"k100": b"later"}


def test_a_range_of_system_rows_alone_is_refused() -> None:
    with (
        filled(MemoryStore()) as db,
        pytest.raises(InvalidRequest, match="keeps system rows"),
    ):
        db.delete_prefix(SYSTEM_PREFIX + b"stream/")


def test_range_deletes_are_no_bulk_loads_in_the_list_of_loads() -> None:
    store = MemoryStore()
    with filled(store) as db:
        db.delete_range(b"k100", b"k300")
        assert len(list(held_loads(db.manifest()))) == 1
    assert Admin("db", store=store).loads() == []
