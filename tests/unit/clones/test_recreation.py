"""A database created at the path of a destroyed one: no id is used twice, and old handles are closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from flagstone import Closed, InvalidRequest
from flagstone.changes.reader import WalReader
from flagstone.config import CompactorOptions, ReaderSettings
from flagstone.db.reader.feed import open_feed
from flagstone.db.reader.reader import open_reader
from flagstone.db.writer.database import Db
from flagstone.errors import FlagstoneError
from flagstone.metadata.destruction import incarnation
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.sync import Event, start_thread
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.testing.faults import FaultyStore
from flagstone.types import ManifestId, WalId
from kit.databases import World, numbered
from kit.faults import InterposingStore

PATHS = DbPaths("p")
QUIET = ReaderSettings(manifest_poll_interval=timedelta(minutes=5))


class Delaying(FaultyStore):
    """Delays the first write to a path with `part` in it until `go` is set: a request in flight."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(inner)
        self.part: str | None = None
        self.reached = Event()
        self.go = Event()

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> Any:
        self._hold(path)
        return super().put_if_absent(path, data, token=token)

    def put(self, path: str, data: bytes) -> Any:
        self._hold(path)
        return super().put(path, data)

    def _hold(self, path: str) -> None:
        if self.part is not None and self.part in path:
            self.part = None
            self.reached.set()
            assert self.go.wait(30)


class OldWriter:
    """A writer of the first database, whose requests can be delayed."""

    def __init__(self, world: World) -> None:
        inner = world.store
        self.store = Delaying(inner)
        world.store = self.store  # type: ignore[assignment]
        self.db: Db = world.open("p")
        world.store = inner
        self.outcome: Any = None
        self._done = Event()

    def begin(self, work: Callable[[Db], object], part: str) -> None:
        """Do the work in a thread, up to its first request to `part`."""
        self.store.part = part

        def run() -> None:
            try:
                self.outcome = work(self.db)
            except FlagstoneError as error:
                self.outcome = error
            self._done.set()

        start_thread(run, name="old-writer")
        assert self.store.reached.wait(30)

    def finish(self) -> Any:
        self.store.go.set()
        assert self._done.wait(30)
        return self.outcome


@pytest.fixture
def old(world: World) -> Iterator[OldWriter]:
    world.write("p", numbered(0, 5))
    writer = OldWriter(world)
    yield writer
    writer.store.go.set()
    with suppress(FlagstoneError):
        writer.db.close()


def recreate(world: World) -> None:
    world.admin("p").destroy()
    with world.open("p") as db:
        for key, value in numbered(100, 120).items():
            db.put(key, value, await_durable=True)


def check_new_database(world: World) -> None:
    """The database has every row that the second one acknowledged, and none of the first."""
    assert world.scan("p") == numbered(100, 120)
    with world.open("p", create=False) as db:
        assert dict(db.scan()) == numbered(100, 120)
        db.put(b"more", b"1", await_durable=True)
    assert world.scan("p") == numbered(100, 120) | {b"more": b"1"}
    assert world.admin("p").verify().ok


def test_a_writer_of_a_destroyed_database_acknowledges_no_further_write(world: World, old: OldWriter) -> None:
    world.admin("p").destroy()
    left = world.objects()
    with pytest.raises(Closed, match=r"destroyed|replaced"):
        old.db.put(b"late", b"1", await_durable=True)
    assert world.objects() == left


def test_opening_raises_closed_if_the_database_is_destroyed_during_the_replay(
    world: World, old: OldWriter
) -> None:
    for key, value in numbered(5, 8).items():
        old.db.put(key, value, await_durable=True)
    replayed = InterposingStore(world.store, world.admin("p").destroy, op="get", path="p/wal/*")
    world.store = replayed  # type: ignore[assignment]

    with pytest.raises(Closed, match="destroyed"):
        world.open("p")

    ops = [op for op, path in replayed.calls if path.startswith("p/wal/")]
    assert ops.index("put_if_absent") < ops.index("get"), "the WAL is fenced before its files are read"


def test_a_writer_without_a_wal_acknowledges_no_write_after_a_recreation(world: World) -> None:
    world.write("p", numbered(0, 5))
    db = world.open("p", wal_enabled=False)
    recreate(world)
    with pytest.raises(Closed):
        db.put(b"late", b"1", await_durable=True)
    db.close()
    check_new_database(world)


@pytest.mark.parametrize("part", ["/wal/", "/manifest/", "/compacted/"])
def test_a_request_of_the_old_writer_in_flight_adds_nothing_to_the_new_database(
    world: World, old: OldWriter, part: str
) -> None:
    def work(db: Db) -> None:
        db.put(b"late", b"1", await_durable=part == "/wal/")
        db.flush()

    old.begin(work, part)
    recreate(world)
    assert isinstance(old.finish(), Closed)
    check_new_database(world)


@pytest.mark.parametrize("part", ["/wal/", "/manifest/"])
def test_a_request_in_flight_during_a_destruction_is_not_acknowledged(
    world: World, old: OldWriter, part: str
) -> None:
    old.begin(lambda db: (db.put(b"late", b"1", await_durable=part == "/wal/"), db.flush()), part)
    world.admin("p").destroy()
    assert isinstance(old.finish(), Closed)
    with pytest.raises(InvalidRequest, match="no database"):
        world.scan("p")
    with world.open("p") as db:
        assert dict(db.scan()) == {}


def test_ids_epochs_and_sequence_numbers_keep_growing_over_every_recreation(world: World) -> None:
    seen: list[tuple[int, ...]] = []
    wal_ids: set[int] = set()
    for round_number in range(4):
        with world.open("p") as db:
            assert dict(db.scan()) == {}
            handle = db.put(b"k", b"%d" % round_number, await_durable=True)
            db.flush()
        latest = world.admin("p").manifest()
        files = {PATHS.parse_wal(meta.path) for meta in world.store.list("p/wal") if meta.size}
        assert not files & wal_ids
        wal_ids |= {wal_id for wal_id in files if wal_id}
        seen.append((latest.id, latest.value.writer_epoch, latest.value.wal_id_last_seen, handle.seq))
        world.admin("p").destroy()
    for numbers in zip(*seen, strict=True):
        assert list(numbers) == sorted(set(numbers))


def test_the_destruction_mark_is_neither_listed_as_a_checkpoint_nor_deleted(world: World) -> None:
    world.write("p", numbered(0, 5))
    recreate(world)
    admin = world.admin("p")
    [mark] = admin.manifest().value.checkpoints
    assert admin.checkpoints() == ()
    with pytest.raises(InvalidRequest, match="destroyed"):
        admin.delete_checkpoint(mark.id)
    with pytest.raises(InvalidRequest, match="destroyed"):
        admin.refresh_checkpoint(mark.id, timedelta(hours=1))
    admin.collect_garbage(min_age=timedelta())
    assert incarnation(admin.manifest().value) == mark.manifest_id
    check_new_database(world)


# -- other handles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("mode", ["managed", "latest"])
def test_a_reader_of_a_destroyed_database_raises_closed_on_refresh(
    world: World, mode: Any, again: bool
) -> None:
    world.write("p", numbered(0, 5))
    with open_reader(
        "p", store=world.store, mode=mode, clock=world.clock, ids=world.ids, settings=QUIET
    ) as reader:
        assert dict(reader.scan()) == numbered(0, 5)
        if mode == "managed":
            # Destroying waits until the reader checkpoint has expired.
            world.clock.advance(3_600_000)
        if again:
            recreate(world)
        else:
            world.admin("p").destroy()
        with pytest.raises(Closed, match="destroyed"):
            reader.refresh()
        with pytest.raises(Closed, match="destroyed"):
            reader.refresh()


@pytest.mark.parametrize("allow_gaps", [False, True])
def test_a_feed_of_a_destroyed_database_does_not_continue_with_its_successor(
    world: World, allow_gaps: bool
) -> None:
    world.write("p", numbered(0, 5))
    changes = WalReader("p", store=world.store, clock=world.clock, ids=world.ids).follow(
        timeout_s=600, allow_gaps=allow_gaps
    )
    seen = [change.key for change in next(changes).changes]
    assert seen == list(numbered(0, 5))
    recreate(world)
    with pytest.raises(FlagstoneError, match=r"destroyed|removed|not in the WAL"):
        next(changes)


def test_a_position_of_a_destroyed_database_is_refused_by_its_successor(world: World) -> None:
    world.write("p", numbered(0, 5))
    reader = WalReader("p", store=world.store, clock=world.clock, ids=world.ids)
    batches = [*reader.follow(timeout_s=0)]
    world.admin("p").destroy()
    *_, residue = world.store.list("p/wal")
    recreated_from = PATHS.parse_wal(residue.path)
    assert recreated_from is not None
    with world.open("p") as db:
        for key, value in numbered(100, 120).items():
            db.put(key, value, await_durable=True)
    fresh = WalReader("p", store=world.store, clock=world.clock, ids=world.ids)
    for next_id in (batches[-1].position.next_id, recreated_from, recreated_from + 1):
        position = batches[-1].position._replace(next_id=WalId(next_id))
        with pytest.raises(InvalidRequest):
            [*fresh.follow(position, timeout_s=0)]
    # A new consumer reads the second database from its beginning.
    assert [change.key for batch in fresh.follow(timeout_s=0) for change in batch.changes] == list(
        numbered(100, 120)
    )


def test_a_consumer_of_a_destroyed_database_starts_with_a_copy_of_its_successor(world: World) -> None:
    world.write("p", numbered(0, 5))
    with open_feed("p", "c", store=world.store, clock=world.clock, ids=world.ids):
        pass
    with pytest.raises(InvalidRequest, match="live checkpoints"):
        world.admin("p").destroy()
    for entry in world.admin("p").checkpoints():
        world.admin("p").delete_checkpoint(entry.id)
    recreate(world)
    with open_feed("p", "c", store=world.store, clock=world.clock, ids=world.ids) as feed:
        assert feed.snapshot is not None
        assert dict(feed.snapshot.scan()) == numbered(100, 120)


def test_a_manifest_store_of_a_destroyed_database_raises_closed_after_a_recreation(world: World) -> None:
    world.write("p", numbered(0, 5))
    follower, late = ManifestStore(world.store, PATHS), ManifestStore(world.store, PATHS)
    known = follower.require_latest()
    recreate(world)
    for call in (follower.latest, follower.require_latest, lambda: follower.update(lambda now: now.value)):
        with pytest.raises(Closed, match="another database"):
            call()
    assert late.require_latest().id > known.id


def test_an_old_compactor_is_closed_and_the_compactions_file_continues(world: World) -> None:
    world.write("p", numbered(0, 5))
    admin = world.admin("p")
    admin.compact(full=True)
    before = admin.compactions()
    board = admin._board(CompactorOptions())
    board.fetch_manifest()
    world.clock.advance(3_600_000)
    recreate(world)
    with pytest.raises(Closed, match="destroyed"):
        board.fetch_manifest()
    with pytest.raises(Closed, match="destroyed"):
        board.edit_manifest(lambda now: replace(now.value, compactor_epoch=99))
    assert admin.compactions().id > before.id
    assert admin.compactions().value.jobs == ()
    assert admin.compact(full=True)
    check_new_database(world)


# -- clones and residue -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flushed", [False, True])
def test_a_clone_made_where_a_database_was_destroyed_has_the_rows_of_its_source(
    world: World, flushed: bool
) -> None:
    world.write("c", numbered(50, 60))
    world.write("c", numbered(60, 70))
    world.admin("c").destroy()
    with world.open("p") as db:
        for key, value in numbered(0, 5).items():
            db.put(key, value, await_durable=True)
        if flushed:
            db.flush()
        world.admin("p").clone("c")
    assert world.scan("c") == numbered(0, 5)
    world.write("c", numbered(5, 8))
    assert world.scan("c") == numbered(0, 8)
    assert world.admin("c").verify().ok
    world.clock.advance(600_000)
    world.admin("c").destroy()
    assert [entry for entry in world.admin("p").checkpoints() if entry.expires_s is None] == []


def test_a_purge_removes_the_residue_after_a_day(world: World) -> None:
    world.write("p", numbered(0, 5))
    with pytest.raises(InvalidRequest, match="destroy it first"):
        world.admin("p").purge()
    world.admin("p").destroy()
    with pytest.raises(InvalidRequest, match="stays for at least"):
        world.admin("p").purge()
    world.clock.advance(25 * 3_600_000)
    assert world.admin("p").purge()
    assert world.objects() == {}
    with pytest.raises(InvalidRequest, match="nothing is left"):
        world.admin("p").purge()
    world.write("p", numbered(0, 1))
    assert world.admin("p").manifest(1).id == 1


@pytest.mark.parametrize("wal_apart", [False, True])
def test_a_purge_removes_what_a_crashed_collector_has_left(wal_apart: bool) -> None:
    world = World(wal_store=MemoryStore() if wal_apart else None)
    world.write("p", numbered(0, 5))
    for store in (world.store, world.wal_store or world.store):
        store.put("p/gc/clock", b"")
    world.admin("p").destroy()
    world.clock.advance(25 * 3_600_000)
    world.admin("p").purge()
    assert world.objects() == {}


def test_a_database_created_while_the_destroyer_still_deletes_loses_no_row(world: World) -> None:
    """The destroyer lists the objects of the first database before the path becomes vacant."""
    world.write("p", numbered(0, 5))
    inner = world.store

    class Recreating(FaultyStore):
        done = False

        def list(self, prefix: str, *, after: str | None = None) -> Any:
            listed = [*super().list(prefix, after=after)]
            if prefix == "p/manifest" and not self.done and "/manifest.boundary" in str(inner_paths()):
                self.done = True
                recreate_rows(world)
            return iter(listed)

    def inner_paths() -> list[str]:
        return [meta.path for meta in inner.list("p/gc")]

    def recreate_rows(world: World) -> None:
        with world.open("p") as db:
            for key, value in numbered(100, 120).items():
                db.put(key, value, await_durable=True)
            db.flush()

    watched = Recreating(inner)
    destroyer = world.admin("p")
    destroyer._store = destroyer._wal_store = watched
    with suppress(FlagstoneError):
        destroyer.destroy()
    assert watched.done
    check_new_database(world)
    assert world.admin("p").manifest().id > ManifestId(1)
