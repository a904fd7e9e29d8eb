"""Change feeds and bulk loads, adopted or with a claim: a copy made from changes equals the database."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flagstone
import flagstone.spark.load.adoption
from flagstone import Admin, ChangeFeed, InvalidRequest
from flagstone.changes.change import Change
from flagstone.loads.notice import load_notice
from flagstone.lsm.operators import Concatenate
from flagstone.metadata.annotations import held_loads
from flagstone.metadata.stores import ManifestStore
from flagstone.spark.address import DatabaseAddress, open_store
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.request import begin_load
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import parse_write_options
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.testing.faults import Crashed, Fault, FaultyStore
from flagstone.types import Ulid
from kit.databases import QUIET, apply_change
from kit.spark_loads import batch_of

LIVE = QUIET.replace(
    manifest_poll_interval=timedelta(milliseconds=20), l0_max_ssts=1000, l0_max_ssts_per_key=1000
)
Rows = Mapping[bytes, bytes | None]
"""None deletes; a value that begins with + is merged."""


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flagstone.spark.load.adoption, "_POLL_S", 0.01)


class Copy:
    """The rows that a consumer builds from the changes, and the changes it got."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.given: list[tuple[int, bytes]] = []

    def apply(self, change: Change) -> None:
        self.given.append((change.seq, change.key))
        apply_change(self.rows, change)

    def consume(self, feed: ChangeFeed, *, limit: int | None = None) -> None:
        if feed.snapshot is not None:
            self.rows = dict(feed.snapshot.scan())
            feed.copied()
        for number, batch in enumerate(feed.follow(timeout_s=0), 1):
            for change in batch.changes:
                self.apply(change)
            feed.commit(batch)
            if number == limit:
                return


class World:
    _names = count()

    def __init__(self) -> None:
        # An address, because a load opens the database itself.
        self.path = f"memory://feed-loads-{next(self._names)}/db"
        self.store, _ = open_store(DatabaseAddress(self.path))
        self.manifests = ManifestStore(self.store, DbPaths("db"))
        self.copy = Copy()
        self.db = self.open()

    def open(self) -> flagstone.Db:
        db = flagstone.open(self.path, settings=LIVE, merge_operator=Concatenate())
        while (
            load_notice(self.store, DbPaths("db")).epoch != self.manifests.require_latest().value.writer_epoch
        ):
            db.status()
        return db

    def feed(self, name: str = "copy") -> ChangeFeed:
        return flagstone.open_feed(self.path, name, merge_operator=Concatenate())

    def load(self, rows: Rows, *, adopted: bool = False, replaces_all: bool = False) -> int:
        """A load that the writer adopts, or one that claims the closed database. The database is open afterwards."""
        if not adopted:
            self.db.close()
        seq = load_into(DatabaseAddress(self.path), rows, replaces_all=replaces_all)
        if not adopted:
            self.db = self.open()
        return seq

    def compact(self) -> None:
        self.db.close()
        Admin(self.path).compact(full=True, merge_operator=Concatenate())
        self.db = self.open()

    def collect(self) -> None:
        Admin(self.path).collect_garbage(min_age=timedelta())
        # With ordinary ages, a writer polls several times before an old manifest is deleted.
        self.db._engine.manifest.refresh()

    @property
    def ssts(self) -> set[Ulid]:
        found = (DbPaths("db").parse_sst(meta.path) for meta in self.store.list("db/compacted"))
        return {sst_id for sst_id in found if sst_id is not None}


def load_into(address: DatabaseAddress, rows: Rows, *, replaces_all: bool = False) -> int:
    options = replace(parse_write_options({"path": address.path}), address=address)
    listed = list(rows.items())
    plan = begin_load(address)
    made = []
    for part in (listed[::2], listed[1::2]):
        ops = [
            "delete" if value is None else "merge" if value.startswith(b"+") else "put" for _, value in part
        ]
        cells = {"key": [key for key, _ in part], "value": [value or b"" for _, value in part], "op": ops}
        made += write_ssts([batch_of(cells)], plan, options) if part else []
    return commit_load(plan, options, made, replaces_all=replaces_all).seq


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.db.close()


@pytest.mark.parametrize("adopted", [False, True])
def test_a_feed_gets_the_rows_of_a_load_between_changes(world: World, *, adopted: bool) -> None:
    world.db.put(b"a", b"1", await_durable=True)
    world.db.put(b"gone", b"soon", await_durable=True)
    feed = world.feed()
    world.copy.consume(feed)
    world.db.put(b"b", b"before the load", await_durable=True)
    seq = world.load({b"a": b"2", b"gone": None, b"c": b"3", b"b": b"+."}, adopted=adopted)
    world.copy.consume(feed)
    assert world.copy.given[-5:] == [(3, b"b"), (seq, b"a"), (seq, b"b"), (seq, b"c"), (seq, b"gone")]
    world.db.put(b"c", b"after the load", await_durable=True)

    with world.feed() as again:
        assert again.snapshot is None
    world.copy.consume(feed)
    feed.close()

    assert world.copy.rows == dict(world.db.scan())
    assert world.copy.rows[b"b"] == b"before the load+."
    assert world.copy.given[-1] == (seq + 1, b"c")
    assert len(world.copy.given) == len(set(world.copy.given))


def test_a_feed_of_a_database_that_starts_with_a_load_gets_its_rows(world: World) -> None:
    feed = world.feed()
    world.copy.consume(feed)
    first = world.load({b"a": b"1"})
    second = world.load({b"b": b"1"}, adopted=True)

    world.copy.consume(feed)

    assert world.copy.given == [(first, b"a"), (second, b"b")]


def test_an_async_feed_gets_loads(world: World) -> None:
    async def consume() -> list[Change]:
        async with flagstone.aio.open_feed(world.path, "async") as feed:
            await feed.copied()
            seq = await asyncio.to_thread(world.load, {b"a": b"1"}, adopted=True)
            await asyncio.to_thread(world.db.put, b"b", b"2", await_durable=True)
            changes = []
            async for batch in feed.follow(timeout_s=0):
                changes += batch.changes
                await feed.commit(batch)
            assert feed.seq == seq + 1
            return changes

    changes = asyncio.run(consume())

    assert [(change.key, change.wal_id is None) for change in changes] == [(b"a", True), (b"b", False)]


@pytest.mark.slow
@pytest.mark.parametrize("adopted", [False, True])
def test_a_load_is_kept_until_a_stopped_feed_has_read_it(world: World, *, adopted: bool) -> None:
    with world.feed() as feed:
        world.copy.consume(feed)
    seq = world.load({b"k%d" % number: b"v" for number in range(10)}, adopted=adopted)
    loaded = {view.sst_id for view in world.manifests.require_latest().value.tree.runs[0].views}
    world.db.put(b"after", b"row", await_durable=True)
    world.compact()
    forget_other_checkpoints(world, loaded=True)
    world.collect()
    (held,) = held_loads(world.manifests.require_latest().value)
    assert (held.record.seq, held.checkpoint.expires_s) == (seq, None)
    assert loaded <= world.ssts

    with world.feed() as feed:
        world.copy.consume(feed)

    assert world.copy.rows == dict(world.db.scan())
    (held,) = held_loads(world.manifests.require_latest().value)
    assert held.checkpoint.expires_s is not None, "it expires after a quarter of an hour"
    forget_other_checkpoints(world, loaded=False)
    world.collect()
    assert not loaded & world.ssts


def forget_other_checkpoints(world: World, *, loaded: bool) -> None:
    """As if time passed: the checkpoints of compactions expire, and with `loaded=False` those of loads."""
    for entry in Admin(world.path).checkpoints():
        if entry.manifest_id and not (loaded and (entry.name or "").startswith("flagstone.load/")):
            Admin(world.path).delete_checkpoint(entry.id)


@pytest.mark.parametrize("adopted", [False, True])
def test_an_overwriting_load_raises_in_a_feed(world: World, *, adopted: bool) -> None:
    world.db.put(b"a", b"1", await_durable=True)
    feed = world.feed()
    world.copy.consume(feed)
    before = world.manifests.require_latest().value
    world.load({b"b": b"2"}, adopted=adopted, replaces_all=True)

    with pytest.raises(InvalidRequest, match=r"replaced everything .* start over with a copy"):
        world.copy.consume(feed)
    (held,) = held_loads(world.manifests.require_latest().value)
    replaced = world.manifests.load(held.checkpoint.manifest_id)
    assert replaced.ssts.keys() >= before.ssts.keys(), "for readers of the replaced rows"
    feed.release()
    with world.feed() as restarted:
        world.copy.consume(restarted)
    assert world.copy.rows == {b"b": b"2"}


@pytest.mark.parametrize("effect", ["crash_after", "lost_reply"])
def test_a_crash_right_after_the_commit_of_a_load_changes_nothing_for_feeds(effect: Any) -> None:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=QUIET) as db:
        db.put(b"a", b"1")
    with flagstone.open_feed("db", "copy", store=store) as feed:
        copy = Copy()
        copy.consume(feed)
    faulty = FaultyStore(store)
    address = DatabaseAddress("db", store=faulty)  # type: ignore[arg-type]
    options = replace(parse_write_options({"path": "db"}), address=address)
    plan = begin_load(address)
    made = write_ssts([batch_of({"key": [b"b"], "value": [b"2"]})], plan, options)
    faulty.faults.append(Fault(op="put_if_absent", path="db/manifest/*", effect=effect))
    if effect == "crash_after":
        with pytest.raises(Crashed):
            commit_load(plan, options, made)
    else:
        commit_load(plan, options, made)

    with flagstone.open("db", store=store, settings=QUIET) as db:
        db.put(b"c", b"3")
    Admin("db", store=store).collect_garbage(min_age=timedelta())
    for _ in range(2):
        with flagstone.open_feed("db", "copy", store=store) as feed:
            copy.consume(feed)

    assert copy.given == [(plan.seq, b"b"), (plan.seq + 1, b"c")]
    assert copy.rows == {b"a": b"1", b"b": b"2", b"c": b"3"}


KEYS = st.sampled_from([b"\0", b"0", b"9", b"K", b"\\", b"k", b"k\0", b"k\\", b"k\xff", b"\xff"])
VALUES = st.one_of(st.none(), st.binary(min_size=1, max_size=3), st.just(b"+m"))
ROWS = st.dictionaries(KEYS, VALUES, min_size=1, max_size=6)
STEPS = st.one_of(
    st.tuples(st.just("write"), ROWS),
    st.tuples(st.just("write"), ROWS),
    st.tuples(st.just("load"), ROWS),
    st.tuples(st.just("load request"), ROWS),
    st.tuples(
        st.sampled_from(["flush", "flush wal", "reopen", "compact", "collect", "consume", "consume one"]),
        st.just({}),
    ),
    st.tuples(st.just("restart"), st.just({})),
)


@pytest.mark.slow
@settings(
    max_examples=max(settings.default.max_examples // 2, 15),  # type: ignore[union-attr]
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(steps=st.lists(STEPS, max_size=12))
def test_a_copy_made_from_changes_and_loads_equals_the_database(steps: list[tuple[str, Rows]]) -> None:
    world = World()
    feed = world.feed()
    world.copy.consume(feed)
    for step, rows in steps:
        perform(world, step, rows)
        match step:
            case "consume":
                world.copy.consume(feed)
            case "consume one":
                world.copy.consume(feed, limit=1)
            case "restart":
                feed.close()
                feed = world.feed()
    world.db.flush("wal")
    feed.close()
    feed = world.feed()
    world.copy.consume(feed)

    assert world.copy.rows == dict(world.db.scan())
    assert len(world.copy.given) == len(set(world.copy.given))
    assert [seq for seq, _ in world.copy.given] == sorted(seq for seq, _ in world.copy.given)
    world.db.close()
    assert Admin(world.path).verify().ok


def perform(world: World, step: str, rows: Rows) -> None:
    match step:
        case "write":
            for key, value in rows.items():
                if value is None:
                    world.db.delete(key)
                elif value.startswith(b"+"):
                    world.db.merge(key, value)
                else:
                    world.db.put(key, value)
        case "load":
            world.load(rows)
        case "load request":
            world.load(rows, adopted=True)
        case "flush":
            world.db.flush()
        case "flush wal":
            world.db.flush("wal")
        case "reopen":
            world.db.close()
            world.db = world.open()
        case "compact":
            world.compact()
        case "collect":
            world.collect()


@pytest.mark.slow
def test_consumers_beside_a_writer_loads_and_a_collector_miss_no_change(world: World) -> None:
    done = Event()
    copies = [Copy(), Copy()]
    failures: list[BaseException] = []

    def again_and_again(work: Callable[[], None]) -> Thread:
        def run() -> None:
            try:
                while not done.is_set():
                    work()
            except BaseException as error:
                failures.append(error)
                raise

        return Thread(target=run)

    def write() -> None:
        for number in range(10):
            world.db.put(b"k%d" % (number % 7), b"%d" % number, await_durable=number % 5 == 0)
        world.db.flush()

    def consume(number: int) -> None:
        with world.feed(f"copy {number}") as feed:
            copies[number].consume(feed, limit=7)

    def collect() -> None:
        # Not manifests: the writer may need them for a minute.
        Admin(world.path).collect_garbage(kinds=["wal", "compacted"], min_age=timedelta())
        done.wait(0.01)

    threads = [again_and_again(write), again_and_again(collect)]
    threads += [again_and_again(partial(consume, number)) for number in range(2)]
    for thread in threads:
        thread.start()
    seqs = [
        world.load({b"k%d" % key: b"load %d" % turn for key in range(turn % 3, 9)}, adopted=True)
        for turn in range(12)
    ]
    done.set()
    for thread in threads:
        thread.join(60)

    assert failures == []
    world.db.put(b"last", b"row", await_durable=True)
    for number, copy in enumerate(copies):
        while b"last" not in copy.rows:
            consume(number)
        assert copy.rows == dict(world.db.scan())
        given = [seq for seq, _ in copy.given]
        assert given == sorted(given)
        assert len(set(copy.given)) == len(copy.given)
        assert set(seqs) & set(given)


def test_the_wheel_opens_a_database_with_a_kept_load(tmp_path: Path, wheel: Any) -> None:
    folder = tmp_path / "db"
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"a", b"1")
    with flagstone.open_feed(folder, "copy") as feed:
        copy = Copy()
        copy.consume(feed)
    load_into(DatabaseAddress(str(folder)), {b"b": b"2"})

    assert wheel.scan(str(folder.parent), folder.name) == {b"a": b"1", b"b": b"2"}
    wheel.apply(str(folder.parent), folder.name, [("put", b"c", b"3")])
    with flagstone.open_feed(folder, "copy") as feed:
        copy.consume(feed)
    assert copy.rows == {b"a": b"1", b"b": b"2", b"c": b"3"}
    assert len(copy.given) == 2


@pytest.mark.slow
@pytest.mark.parametrize("consumed", [True, False])
def test_the_wheels_collector_keeps_the_rows_of_a_load_for_a_feed(
    tmp_path: Path, wheel: Any, *, consumed: bool
) -> None:
    root, folder = str(tmp_path), tmp_path / "db"
    with flagstone.open(folder, settings=QUIET) as db:
        db.put(b"a", b"1")
    copy = Copy()
    with flagstone.open_feed(folder, "copy") as feed:
        copy.consume(feed)
        if not consumed:
            feed.release()
    load_into(DatabaseAddress(str(folder)), {b"b": b"2", b"c": b"3"})
    manifests = ManifestStore(*open_store(DatabaseAddress(str(folder))))
    loaded = {path.name for path in (folder / "compacted").iterdir()}
    assert len(loaded) == len(manifests.require_latest().value.ssts)
    wheel.compact_everything(root, "db")
    for entry in Admin(folder).checkpoints():
        if entry.manifest_id and not (consumed and (entry.name or "").startswith("flagstone.load/")):
            Admin(folder).delete_checkpoint(entry.id)
    wheel.apply(root, "db", [("put", b"d", b"4"), ("flush",)])
    wheel.run_gc_once(root, "db")

    left = {path.name for path in (folder / "compacted").iterdir()}
    assert loaded <= left if consumed else not loaded & left
    if consumed:
        with flagstone.open_feed(folder, "copy") as feed:
            copy.consume(feed)
        assert copy.rows == wheel.scan(root, "db")
        assert [key for _, key in copy.given] == [b"b", b"c", b"d"]
