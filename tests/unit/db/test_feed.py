"""A feed: a snapshot of the whole database, then every change after it, once."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace
from datetime import timedelta
from threading import Event, Thread

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flagstone
from flagstone import ChangeFeed, InvalidRequest
from flagstone.changes.change import Change
from flagstone.config import Settings
from flagstone.lsm.operators import Concatenate
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.testing.faults import Crashed, Fault, FaultyStore
from kit.databases import apply_change

QUIET = Settings(
    flush_interval=None,
    manifest_poll_interval=timedelta(hours=1),
    compactor_options=None,
    l0_max_ssts=1000,
    l0_max_ssts_per_key=1000,
)


class Replica:
    """A consumer: a copy of the database and nothing else, as a process would keep it on its own disk."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.seqs: list[int] = []

    def copy(self, feed: ChangeFeed) -> None:
        if feed.snapshot is not None:
            self.rows, self.seqs = dict(feed.snapshot.scan()), [feed.seq]
            feed.copied()

    def apply(self, change: Change) -> None:
        self.seqs.append(change.seq)
        apply_change(self.rows, change)


class World:
    def __init__(self) -> None:
        self.clock = VirtualClock(1_700_000_000_000)
        self.store = MemoryStore(clock=self.clock)
        self.db = self.open()
        self.replica = Replica()

    def open(self, **changes: object) -> flagstone.Db:
        return flagstone.open(
            "db",
            store=self.store,
            clock=self.clock,
            merge_operator=Concatenate(),
            settings=replace(QUIET, **changes),  # type: ignore[arg-type]
        )

    def feed(self, store: ObjectStore | None = None) -> ChangeFeed:
        return flagstone.open_feed(
            "db", "replica", store=store or self.store, clock=self.clock, merge_operator=Concatenate()
        )

    def consume(self, feed: ChangeFeed, *, limit: int | None = None) -> None:
        self.replica.copy(feed)
        for number, batch in enumerate(feed.follow(timeout_s=0), 1):
            for change in batch.changes:
                self.replica.apply(change)
            feed.commit(batch)
            if number == limit:
                return

    def collect(self) -> None:
        self.clock.advance(2000)
        admin = flagstone.Admin("db", store=self.store, clock=self.clock)
        admin.collect_garbage(kinds=["wal", "manifest", "compacted"], min_age=timedelta(0))

    @property
    def contents(self) -> dict[bytes, bytes]:
        return dict(self.db.scan())


@pytest.fixture
def world() -> World:
    return World()


def test_the_snapshot_plus_the_changes_after_it_equal_the_database(world: World) -> None:
    for number in range(10):
        world.db.put(b"%d" % number, b"tables")
    world.db.flush()
    world.db.put(b"log", b"only in the log", await_durable=True)
    feed = world.feed()
    assert feed.snapshot is not None
    world.db.put(b"3", b"after the snapshot")
    world.db.delete(b"4")
    world.db.merge(b"5", b"+")
    world.db.flush()

    with feed:
        world.consume(feed)

    assert world.replica.rows == world.contents
    assert world.replica.seqs == list(range(world.replica.seqs[0], world.replica.seqs[-1] + 1))
    assert feed.seq == world.replica.seqs[-1]


def test_a_restarted_consumer_gets_changes_only(world: World) -> None:
    world.db.put(b"a", b"1", await_durable=True)
    with world.feed() as feed:
        world.consume(feed)
    for number in range(5):
        world.db.put(b"b%d" % number, b"while it was away", await_durable=True)
        world.db.flush()
        world.collect()

    with world.feed() as feed:
        assert feed.snapshot is None
        world.consume(feed)

    assert world.replica.rows == world.contents
    assert len(world.replica.seqs) == len(set(world.replica.seqs))


def test_an_unfinished_copy_starts_again_with_a_new_snapshot(world: World) -> None:
    world.db.put(b"a", b"1", await_durable=True)
    first = world.feed()
    assert first.snapshot is not None
    with pytest.raises(InvalidRequest, match="has yet to copy"):
        next(first.follow(timeout_s=0))
    first.close()
    world.db.put(b"b", b"2", await_durable=True)
    world.db.flush()
    world.collect()

    with pytest.raises(InvalidRequest, match="has yet to copy"):
        next(flagstone.WalReader("db", store=world.store, pin="replica", clock=world.clock).follow())
    with world.feed() as feed:
        assert feed.snapshot is not None
        world.consume(feed)
    assert world.replica.rows == world.contents


def test_the_snapshot_outlives_garbage_collection_however_long_the_copy_takes(world: World) -> None:
    world.db.put(b"a", b"1")
    world.db.flush()
    feed = world.feed()
    assert feed.snapshot is not None
    for _ in range(5):
        world.db.put(b"a", b"2")
        world.db.flush()
        world.clock.advance(400_000)
        feed.snapshot.refresh()
        world.collect()

    assert dict(feed.snapshot.scan()) == {b"a": b"1"}
    world.consume(feed)
    manifest = ManifestStore(world.store, DbPaths("db")).require_latest().value
    assert [entry.manifest_id for entry in manifest.checkpoints] == [0]
    feed.release()
    assert ManifestStore(world.store, DbPaths("db")).require_latest().value.checkpoints == ()


def test_rows_that_bypass_the_wal_raise_instead_of_being_skipped(world: World) -> None:
    world.db.put(b"a", b"1", await_durable=True)
    feed = world.feed()
    world.consume(feed)
    world.db.close()
    world.db = world.open(wal_enabled=False)
    world.db.put(b"b", b"not in the log")
    world.db.close()

    with pytest.raises(InvalidRequest, match="start over with a copy of the database"):
        for _ in feed.follow(timeout_s=40):
            pass
    world.db = world.open()
    world.db.put(b"c", b"in the log", await_durable=True)
    with pytest.raises(InvalidRequest, match="numbers 2 to 2 are not in the WAL"):
        world.consume(feed)
    assert [batch.changes[0].seq for batch in feed.follow(timeout_s=40, allow_gaps=True)] == [3]


def test_following_after_a_restore_raises(world: World) -> None:
    world.db.put(b"a", b"1", await_durable=True)
    checkpoint = world.db.checkpoint()
    world.db.put(b"a", b"2", await_durable=True)
    feed = world.feed()
    world.consume(feed)
    world.db.close()
    flagstone.Admin("db", store=world.store, clock=world.clock).restore(checkpoint.id)
    world.db = world.open()
    world.db.put(b"b", b"3", await_durable=True)

    with pytest.raises(InvalidRequest, match="an older state was restored"):
        world.consume(feed)


def test_pickling_a_feed_is_refused(world: World) -> None:
    with pytest.raises(InvalidRequest, match="one process"):
        pickle.dumps(world.feed())


def test_an_async_feed_copies_and_follows(world: World) -> None:
    world.db.put(b"a", b"1", await_durable=True)
    world.db.flush()

    async def consume() -> tuple[dict[bytes, bytes], list[int], int | None]:
        async with flagstone.aio.open_feed("db", "replica", store=world.store, clock=world.clock) as feed:
            assert feed.snapshot is not None
            rows = {key: value async for key, value in feed.snapshot.scan()}
            await feed.copied()
            assert feed.snapshot is None
            assert feed.seq == 1
            world.db.put(b"b", b"2", await_durable=True)
            seqs = []
            async for batch in feed.follow(timeout_s=0):
                seqs += [change.seq for change in batch.changes]
                await feed.commit(batch)
            assert [change.seq async for change in feed.changes()] == [1, 2]
            assert (await feed.read((await feed.files())[-1].wal_id)).changes[0].key == b"b"
            position = feed.position
            await feed.release()
            return rows, seqs, position

    rows, seqs, position = asyncio.run(consume())

    assert rows == {b"a": b"1"}
    assert seqs == [2]
    assert position == flagstone.WalReader("db", store=world.store).files()[-1].wal_id + 1


@pytest.mark.slow
def test_a_consumer_that_crashes_at_any_request_loses_no_change() -> None:
    nth, finished = 0, False
    while not finished:
        nth += 1
        world = World()
        world.db.put(b"a", b"1", await_durable=True)
        world.db.flush()
        try:
            with world.feed(FaultyStore(world.store, [Fault(nth=nth, effect="crash_after")])) as feed:
                world.db.put(b"b", b"2", await_durable=True)
                world.consume(feed)
            finished = True
        except Crashed:
            pass
        world.db.put(b"c", b"3", await_durable=True)
        world.db.flush()
        world.collect()

        with world.feed() as feed:
            world.consume(feed)
        assert world.replica.rows == world.contents
        world.db.close()
    assert nth > 20


@pytest.mark.slow
def test_consumers_that_restart_beside_a_writer_and_a_collector_lose_no_change() -> None:
    store = MemoryStore()
    db = flagstone.open("db", store=store, settings=replace(QUIET, flush_interval=timedelta(milliseconds=5)))
    done = Event()
    rounds: list[int] = []

    def collect() -> None:
        admin = flagstone.Admin("db", store=store)
        while not done.is_set():
            admin.collect_garbage(kinds=["wal", "manifest"], min_age=timedelta(0))
            rounds.append(1)
            done.wait(0.01)

    def consume(name: str, replica: Replica) -> None:
        with flagstone.open_feed("db", name, store=store) as feed:
            replica.copy(feed)
            for number, batch in enumerate(feed.follow(timeout_s=0.05, poll_interval_s=0.005), 1):
                for change in batch.changes:
                    replica.apply(change)
                feed.commit(batch)
                if number == 20:
                    return

    replicas = [Replica(), Replica()]

    def keep_consuming(number: int) -> None:
        while not done.is_set():
            consume(f"replica {number}", replicas[number])

    threads = [Thread(target=collect)] + [Thread(target=keep_consuming, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for number in range(2500):
        db.put(b"%d" % (number % 97), b"%d" % number, await_durable=number % 5 == 0)
        if number % 50 == 0:
            db.flush()
    db.flush()
    done.set()
    for thread in threads:
        thread.join(30)
    for number, replica in enumerate(replicas):
        for _ in range(100):
            consume(f"replica {number}", replica)
            if replica.seqs[-1] == 2500:
                break
        assert replica.rows == dict(db.scan())
        assert replica.seqs == list(range(replica.seqs[0], 2501))
    assert len(rounds) > 10
    assert len(flagstone.WalReader("db", store=store).files()) < 200
    db.close()


FEED_KEYS = st.sampled_from([b"\0", b"0", b"a", b"a\\", b"\xff"])
STEPS = st.one_of(
    st.tuples(st.just("put"), FEED_KEYS, st.binary(max_size=2)),
    st.tuples(st.just("delete"), FEED_KEYS, st.just(b"")),
    st.tuples(st.just("merge"), FEED_KEYS, st.binary(max_size=2)),
    st.tuples(st.just("flush"), st.sampled_from([b"wal", b"memtable"]), st.just(b"")),
    st.tuples(st.just("consume"), st.just(b""), st.just(b"")),
    st.tuples(st.just("restart"), st.just(b""), st.just(b"")),
    st.tuples(st.just("reopen"), st.just(b""), st.just(b"")),
    st.tuples(st.just("collect"), st.just(b""), st.just(b"")),
)


@pytest.mark.slow
@settings(
    max_examples=settings.default.max_examples // 2,  # type: ignore[union-attr]
    suppress_health_check=[HealthCheck.too_slow],
    deadline=None,
)
@given(steps=st.lists(STEPS, max_size=30))
def test_a_replica_equals_the_database_after_any_steps(steps: list[tuple[str, bytes, bytes]]) -> None:
    world = World()
    feed = world.feed()
    for step, key, value in steps:
        match step:
            case "put":
                world.db.put(key, value)
            case "delete":
                world.db.delete(key)
            case "merge":
                world.db.merge(key, value)
            case "flush":
                world.db.flush(key.decode())  # type: ignore[arg-type]
            case "consume":
                world.consume(feed, limit=2)
            case "restart":
                feed.close()
                feed = world.feed()
            case "reopen":
                world.db.close()
                world.db = world.open()
            case _:
                world.collect()
    world.db.flush()
    world.consume(feed)

    assert world.replica.rows == world.contents
    assert len(world.replica.seqs) == len(set(world.replica.seqs))
    world.db.close()
