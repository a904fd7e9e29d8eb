"""Which thread writes a WAL file, and what an interrupted or failed write leaves for the next one."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread, get_ident
from typing import TypeVar

import pytest

from flagstone.db.open import open_database
from flagstone.db.reader.reader import open_reader
from flagstone.db.writer.database import Db
from flagstone.errors import Closed, FlagstoneError
from flagstone.store.memory import MemoryStore
from flagstone.testing.faults import Fault, FaultyStore
from kit.databases import MANUAL, QUIET

T = TypeVar("T")


class WatchedStore(FaultyStore):
    """A store that calls `before` and `after` around the creation of each WAL file."""

    def __init__(self, *, url: str | None = None) -> None:
        super().__init__(MemoryStore())
        self.before: Callable[[str], None] = lambda _: None
        self.after: Callable[[str], None] = lambda _: None
        self.threads: list[int] = []
        self._url = url

    @property
    def url(self) -> str:
        return self._url or self.inner.url

    def _call(self, op: str, path: str, request: Callable[[], T]) -> T:
        if op != "put_if_absent" or "/wal/" not in path:
            return super()._call(op, path, request)
        self.threads.append(get_ident())
        self.before(path)
        try:
            return super()._call(op, path, request)
        finally:
            self.after(path)

    @property
    def wal_files(self) -> int:
        return sum(1 for _ in self.inner.list("db/wal"))


def rows_after_a_crash(store: WatchedStore) -> dict[bytes, bytes]:
    copy = MemoryStore()
    for meta in store.inner.list(""):
        copy.put(meta.path, store.inner.get(meta.path).data)
    with open_database("db", store=copy, settings=MANUAL) as db:
        return dict(db.scan())


def opened(store: WatchedStore) -> Db:
    db = open_database("db", store=store, settings=MANUAL)
    store.threads.clear()
    return db


def test_a_caller_that_waits_writes_the_wal_file_in_its_own_thread() -> None:
    store = WatchedStore()
    with opened(store) as db:
        db.put(b"a", b"1", await_durable=True)
        assert store.threads == [get_ident()]
        db.put(b"b", b"2")
        db.flush("wal")
        assert store.threads == [get_ident()] * 2
        db.put(b"c", b"3").wait(20)
        assert store.threads[2] != get_ident()  # a wait with a timeout leaves it to the service


def test_a_caller_does_not_write_to_a_store_far_away() -> None:
    store = WatchedStore(url="s3://bucket")
    with opened(store) as db:
        db.put(b"a", b"1", await_durable=True)
        assert store.threads[0] != get_ident()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_wal_file_that_an_interrupt_cut_off_is_written_by_the_next_caller(when: str) -> None:
    store = WatchedStore()
    db = opened(store)

    def interrupt(_path: str) -> None:
        setattr(store, when, lambda _: None)
        raise KeyboardInterrupt

    setattr(store, when, interrupt)
    with pytest.raises(KeyboardInterrupt):
        db.put(b"a", b"1", await_durable=True)
    assert not db.put(b"b", b"2").done()

    db.put(b"c", b"3", await_durable=True)

    assert rows_after_a_crash(store) == {b"a": b"1", b"b": b"2", b"c": b"3"}
    db.close()


def test_the_service_writes_a_file_that_an_interrupt_cut_off_when_the_flush_interval_is_over() -> None:
    store = WatchedStore()
    with open_database("db", store=store, settings=QUIET) as db:

        def interrupt(_path: str) -> None:
            store.before = lambda _: None
            raise KeyboardInterrupt

        store.before = interrupt
        handle = db.put(b"a", b"1")
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
        handle.wait(20)
        assert rows_after_a_crash(store) == {b"a": b"1"}


def test_after_an_error_of_the_store_the_service_continues_with_the_file_of_the_caller() -> None:
    store = WatchedStore()
    with opened(store) as db:
        tries = [Fault(op="put_if_absent", path="*/wal/*", nth=nth, effect="lost_reply") for nth in (2, 3)]
        store.faults += tries
        db.put(b"a", b"1", await_durable=True)
        db.put(b"b", b"2", await_durable=True)
        assert store.wal_files == 3
    assert rows_after_a_crash(store) == {b"a": b"1", b"b": b"2"}


def test_a_caller_that_finds_its_wal_id_taken_fails_the_database_for_all() -> None:
    store = WatchedStore()
    old = opened(store)
    before = old.put(b"a", b"1")
    with open_database("db", store=store, settings=MANUAL):
        with pytest.raises(Closed) as fenced:
            old.put(b"b", b"2", await_durable=True)
        assert fenced.value.reason == "fenced"
        with pytest.raises(Closed):
            before.wait()
        with pytest.raises(Closed):
            old.get(b"a")
    old.close()


def test_rows_of_callers_that_come_during_a_write_share_the_next_file() -> None:
    store, under_way, go_on = WatchedStore(), Event(), Event()
    db = opened(store)

    def hold(_path: str) -> None:
        under_way.set()
        go_on.wait(20)

    store.before = hold
    threads = [Thread(target=db.put, args=(b"first", b"1"), kwargs={"await_durable": True})]
    threads[0].start()
    assert under_way.wait(20)
    threads += [
        Thread(target=db.put, args=(b"%d" % number, b"2"), kwargs={"await_durable": True})
        for number in range(20)
    ]
    for thread in threads[1:]:
        thread.start()
    while db.status()["last_seq"] < 21:
        pass
    store.before = lambda _: None
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert store.wal_files == 3  # the fence, the first row, all others
    db.close()


def test_a_wait_of_many_threads_ends_when_the_store_refuses_for_good() -> None:
    store = WatchedStore()
    db = open_database("db", store=store, settings=MANUAL.replace(object_store_max_retries=0))
    errors: list[FlagstoneError] = []

    def write(number: int) -> None:
        try:
            db.put(b"%d" % number, b"1", await_durable=True)
        except FlagstoneError as error:
            errors.append(error)

    def refuse(path: str) -> None:
        raise Closed(f"{path} is refused", reason="failed")

    store.before = refuse
    threads = [Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 8
    db.close()


def test_a_large_wal_file_has_every_row_and_leaves_no_memory_behind() -> None:
    store = MemoryStore()
    with open_database("db", store=store, settings=MANUAL) as db:
        wal = db._engine.services.wal
        buffer = len(wal._stream)
        # Larger than a step of a large file, and than the first size from which a file counts as one.
        rows = {b"%03d" % number: b"%03d" % number * 40_000 for number in range(60)}
        for key, value in rows.items():
            db.put(key, value)
        db.flush("wal")
        assert len(wal._stream) == buffer
        assert not wal._data.getvalue()
        db.put(b"after", b"1")
        db.flush("wal")
        rows[b"after"] = b"1"
        with open_reader("db", store=store, mode="latest") as reader:
            assert dict(reader.scan()) == rows
