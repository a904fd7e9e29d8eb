"""Several WAL files under way: what the next owner fences, which files do not count, and what readers see meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from threading import Event, Thread
from typing import TypeVar

import pytest

import flagstone
from flagstone.changes.change import WalFiles
from flagstone.config import Settings
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.errors import Closed, FlagstoneError, InvalidRequest, Unavailable
from flagstone.metadata.annotations import ParallelWal, encode_parallel_wal
from flagstone.metadata.manifest import Checkpoint, add_checkpoint
from flagstone.metadata.parallel_wal import RECORD_ID, find_parallel_wal
from flagstone.metadata.stores import ManifestStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.testing.faults import FaultyStore
from flagstone.types import ManifestId, WalId
from flagstone.wal.frontier import FENCE, VOID
from flagstone.wal.takeover import plan_void
from flagstone.wal.uploads import plan_gap_s
from kit.databases import MANUAL

T = TypeVar("T")
PATHS = DbPaths("db")
PARALLEL = MANUAL.replace(max_parallel_wal_writes=4)
FIRST_ID = 5
"""The first file after the four fences of the first writer."""


class HeldStore(FaultyStore):
    """A store that holds the creation of chosen WAL files back until they are released."""

    def __init__(self, inner: MemoryStore, held: Iterable[int] = ()) -> None:
        super().__init__(inner)
        self.released = {PATHS.wal(WalId(wal_id)): Event() for wal_id in held}
        self.created: list[str] = []

    def _call(self, op: str, path: str, request: Callable[[], T]) -> T:
        if op == "put_if_absent" and path in self.released:
            self.released[path].wait(20)
        answer = super()._call(op, path, request)
        if op == "put_if_absent" and "/wal/" in path:
            self.created.append(path)
        return answer

    def release(self) -> None:
        for event in self.released.values():
            event.set()


def opened(store: FaultyStore, settings: Settings = PARALLEL) -> Db:
    return open_database("db", store=store, settings=settings)


def write_each(db: Db, store: HeldStore, count: int) -> list[flagstone.WriteHandle]:
    """One file for each row; returns when all that are not held are on the store."""
    free = len(store.created)
    handles = []
    for number in range(count):
        handles.append(db.put(b"%d" % number, b"v"))
        db._engine.services.wal_now()
        wait_until(
            lambda number=number: len(db._engine.state.now.sealed) + db.status()["durable_seq"] > number
        )
        free += PATHS.wal(WalId(FIRST_ID + number)) not in store.released
    wait_until(lambda: len(store.created) >= free)
    return handles


def wait_until(done: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if done():
            return
        Event().wait(0.001)
    raise AssertionError("it never happened")


def wal_sizes(store: MemoryStore) -> dict[int, int]:
    return {int(meta.path[-24:-4]): meta.size for meta in store.list("db/wal")}


def rows(store: MemoryStore, settings: Settings = MANUAL) -> dict[bytes, bytes]:
    with open_database("db", store=store, settings=settings) as db:
        return dict(db.scan())


def test_rows_are_durable_in_the_order_of_their_files() -> None:
    inner = MemoryStore()
    store = HeldStore(inner, [FIRST_ID])
    db = opened(store)
    first, second = write_each(db, store, 2)
    assert not first.done()
    assert not second.done()
    store.release()
    second.wait(20)
    assert first.done()
    db.close()


def test_no_more_files_than_the_limit_are_under_way() -> None:
    inner = MemoryStore()
    store = HeldStore(inner, [FIRST_ID])
    db = opened(store)
    write_each(db, store, 4)
    last = db.put(b"more", b"v")
    db._engine.services.wal_now()
    assert max(wal_sizes(inner)) == FIRST_ID + 3
    store.release()
    last.wait(20)
    assert max(wal_sizes(inner)) == FIRST_ID + 4
    db.close()


def test_a_replaced_writer_reports_nothing_after_the_hole_and_its_rows_there_do_not_count() -> None:
    inner = MemoryStore()
    store = HeldStore(inner, [FIRST_ID + 1])
    old = opened(store)
    handles = write_each(old, store, 4)
    handles[0].wait(20)

    assert rows(inner, PARALLEL) == {b"0": b"v"}

    store.release()
    for handle in handles[1:]:
        with pytest.raises(Closed):
            handle.wait(20)
    assert rows(inner) == {b"0": b"v"}
    assert inner.get(PATHS.wal(WalId(FIRST_ID + 1))).data == FENCE
    assert [inner.get(PATHS.wal(WalId(FIRST_ID + step))).data for step in (2, 3, 4)] == [VOID] * 3
    with suppress(FlagstoneError):
        old.close()


@pytest.mark.parametrize("before", range(1, 13))
@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_hole_ends_the_wal_wherever_the_search_for_the_end_looks(before: int, missing: int) -> None:
    inner = MemoryStore()
    store = HeldStore(inner, range(FIRST_ID + before, FIRST_ID + before + missing))
    old = opened(store)
    handles = write_each(old, store, before + 4)
    handles[before - 1].wait(20)
    expected = {b"%d" % number: b"v" for number in range(before)}

    with flagstone.open_reader("db", store=inner, mode="latest") as reader:
        assert dict(reader.scan()) == expected
    admin = flagstone.Admin("db", store=inner)
    checkpoint = admin.create_checkpoint()
    with flagstone.open_reader("db", store=inner, checkpoint=checkpoint.id) as reader:
        assert dict(reader.scan()) == expected
    assert admin.verify().ok
    assert rows(inner, PARALLEL) == expected
    assert flagstone.Admin("db", store=inner).verify().ok
    store.release()
    with suppress(FlagstoneError):
        old.close()


@pytest.mark.parametrize("settings", [MANUAL, PARALLEL], ids=["one file", "four files"])
def test_sequence_numbers_continue_after_the_last_row_that_counts(settings: Settings) -> None:
    inner = MemoryStore()
    store = HeldStore(inner, [FIRST_ID + 1])
    old = opened(store)
    write_each(old, store, 4)[0].wait(20)
    with open_database("db", store=inner, settings=settings) as db:
        assert db.put(b"new", b"w", await_durable=True).seq == 2
    assert rows(inner) == {b"0": b"v", b"new": b"w"}
    assert flagstone.Admin("db", store=inner).verify().ok
    store.release()
    with suppress(FlagstoneError):
        old.close()


def test_an_owner_that_crashed_after_its_fence_leaves_no_row_after_the_hole() -> None:
    inner = MemoryStore()
    store = HeldStore(inner, [FIRST_ID + 1])
    old = opened(store)
    write_each(old, store, 4)[0].wait(20)

    class Crashing(FaultyStore):
        def _call(self, op: str, path: str, request: Callable[[], T]) -> T:
            if op == "put_if_absent" and path == PATHS.wal(WalId(FIRST_ID + 2)):
                raise KeyboardInterrupt
            return super()._call(op, path, request)

    with pytest.raises(KeyboardInterrupt):
        opened(Crashing(inner))
    sizes = wal_sizes(inner)
    assert sizes[FIRST_ID + 1] == 0
    assert sizes[FIRST_ID + 2] > len(VOID)
    with flagstone.open_reader("db", store=inner, mode="latest") as reader:
        assert dict(reader.scan()) == {b"0": b"v"}
    assert [change.key for change in flagstone.WalReader("db", store=inner).changes()] == [b"0"]

    assert rows(inner) == {b"0": b"v"}
    assert flagstone.Admin("db", store=inner).verify().ok
    store.release()
    with suppress(FlagstoneError):
        old.close()


def test_a_reader_opens_while_a_file_before_others_is_missing() -> None:
    inner = MemoryStore()
    store = HeldStore(inner, [FIRST_ID + 1])
    db = opened(store)
    handles = write_each(db, store, 4)
    handles[0].wait(20)
    with flagstone.open_reader("db", store=inner, mode="latest") as reader:
        assert dict(reader.scan()) == {b"0": b"v"}
        store.release()
        handles[3].wait(20)
        reader.refresh()
        assert len(dict(reader.scan())) == 4
    db.close()


def test_a_fence_of_a_takeover_under_way_does_not_count_as_missing() -> None:
    """A consumer does not read it yet. By the next look at the manifest the takeover may be complete (world 309)."""
    store = MemoryStore()
    opened(store, MANUAL).close()
    manifests = ManifestStore(store, PATHS)
    name = encode_parallel_wal(ParallelWal(1, WalId(5), 1, 1))
    manifests.update(
        lambda now: add_checkpoint(now.value, Checkpoint(RECORD_ID, ManifestId(now.next_id), 0, None, name))
    )
    for wal_id in (6, 7):
        store.put(PATHS.wal(WalId(wal_id)), FENCE)
    files = WalFiles(store, PATHS, manifests)

    assert files.find(WalId(6)) is None
    files.check_not_removed(WalId(6))
    store.delete(PATHS.wal(WalId(6)))
    with pytest.raises(InvalidRequest, match="file 6 of the WAL of db is missing"):
        files.check_not_removed(WalId(6))


def test_a_file_under_way_after_a_fence_is_no_damage_when_older_fences_are_collected() -> None:
    inner = MemoryStore()
    for number in range(4):
        with opened(inner) as db:
            db.put(b"old", b"%d" % number)
            db.flush()
    inner.delete_many([meta.path for meta in inner.list("db/wal")][:-5])
    store = HeldStore(inner)
    db = opened(store)
    first = db._engine.state.last_wal_id + 1
    held = PATHS.wal(WalId(first))
    store.released[held] = Event()
    for number in range(2):
        db.put(b"new", b"%d" % number)
        db._engine.services.wal_now()
        wait_until(lambda number=number: len(db._engine.state.now.sealed) > number)
    wait_until(lambda: PATHS.wal(WalId(first + 1)) in store.created)
    report = flagstone.Admin("db", store=inner).verify()
    assert report.damage == []
    assert held in [finding.object for finding in report.findings if finding.severity == "warning"]
    store.release()
    db.close()


def test_repair_closes_the_hole_without_opening_the_database() -> None:
    inner = MemoryStore()
    store = HeldStore(inner, [FIRST_ID + 1])
    old = opened(store)
    write_each(old, store, 4)[0].wait(20)
    admin = flagstone.Admin("db", store=inner)
    assert [defect.kind for defect in admin.repair(plan_only=True).defects] == ["wal hole"]

    admin.repair(plan_only=False)

    assert admin.repair(plan_only=True).sound
    assert find_parallel_wal(admin.manifest().value) is None
    assert rows(inner) == {b"0": b"v"}
    store.release()
    with suppress(FlagstoneError):
        old.close()


def test_a_clean_close_leaves_no_record() -> None:
    inner = MemoryStore()
    with opened(FaultyStore(inner)) as db:
        db.put(b"a", b"1", await_durable=True)
        assert find_parallel_wal(db.manifest()) is not None
        assert flagstone.Admin("db", store=inner).checkpoints() == ()
    assert flagstone.Admin("db", store=inner).manifest().value.checkpoints == ()


def test_only_files_after_the_first_fence_above_the_end_of_order_are_void() -> None:
    record = ParallelWal(limit=3, through=WalId(4), settled_epoch=1, epoch=2)
    sizes = {WalId(wal_id): size for wal_id, size in {5: 200, 6: 0, 7: 200, 8: 10, 9: 200}.items()}
    assert plan_void(record, sizes, WalId(10)) == [7]
    assert plan_void(record, {WalId(5): 200, WalId(6): 200}, WalId(7)) == []


def test_files_under_way_spread_over_the_time_of_an_upload() -> None:
    assert plan_gap_s(0, 4, 0.2) == 0
    assert plan_gap_s(1, 4, 0.2) == 0.05


# -- a second request -------------------------------------------------------------------------------------


class SlowFirstStore(FaultyStore):
    """The first request for each WAL file waits until it is released; `then` decides how it ends."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        super().__init__(MemoryStore())
        self.go_on = Event()
        self.ended = Event()
        self._then = then
        self._met: set[str] = set()

    def _call(self, op: str, path: str, request: Callable[[], T]) -> T:
        first = op == "put_if_absent" and path == PATHS.wal(WalId(2)) and path not in self._met
        self._met.add(path)
        if not first:
            return super()._call(op, path, request)
        self.go_on.wait(20)
        try:
            answer = super()._call(op, path, request)
            self._then()
            return answer
        finally:
            self.ended.set()


def refused() -> None:
    raise Unavailable("no answer")


@pytest.mark.parametrize("then", [lambda: None, refused], ids=["answered", "unanswered"])
def test_a_second_request_for_a_slow_wal_file_makes_its_rows_durable(then: Callable[[], None]) -> None:
    store = SlowFirstStore(then)
    settings = MANUAL.replace(wal_hedge_after=timedelta(milliseconds=5))
    with open_database("db", store=store, settings=settings) as db:
        db.put(b"a", b"1", await_durable=True)
        store.go_on.set()
        assert store.ended.wait(20)
        db.put(b"b", b"2", await_durable=True)
    assert rows(store.inner) == {b"a": b"1", b"b": b"2"}  # type: ignore[arg-type]


def test_a_file_whose_two_requests_both_fail_is_sent_again() -> None:
    store = FaultyStore(MemoryStore())
    failures = [2]
    right = store._call

    def call(op: str, path: str, request: Callable[[], T]) -> T:
        if op == "put_if_absent" and path == PATHS.wal(WalId(2)) and failures[0]:
            failures[0] -= 1
            right(op, path, request)
            raise Unavailable("no answer")
        return right(op, path, request)

    store._call = call  # type: ignore[method-assign]
    settings = MANUAL.replace(wal_hedge_after=timedelta(milliseconds=1))
    with open_database("db", store=store, settings=settings) as db:
        thread = Thread(target=db.put, args=(b"a", b"1"), kwargs={"await_durable": True})
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    assert rows(store.inner) == {b"a": b"1"}  # type: ignore[arg-type]
