from __future__ import annotations

import pickle
from itertools import islice
from threading import Event, Thread
from typing import TYPE_CHECKING

import pytest

from flagstone.changes.change import Change
from flagstone.changes.reader import WalReader
from flagstone.errors import InvalidRequest
from flagstone.metadata.manifest import new_manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import StoredObject
from flagstone.testing.faults import FaultyStore
from flagstone.types import MERGE, TOMBSTONE, VALUE, WalId
from golden.corpus import databases
from kit.databases import encode_wal
from kit.faults import InterposingStore
from kit.wal import row

if TYPE_CHECKING:
    from kit.wal import WalFiles


def reader(wal: WalFiles, clock: VirtualClock | None = None) -> WalReader:
    return WalReader("db", store=wal.store, clock=clock or VirtualClock())


def test_a_change_has_its_operation_key_value_times_sequence_number_and_wal_file(wal: WalFiles) -> None:
    wal.add(
        1,
        (b"a", 7, VALUE, b"1", 10, 99),
        (b"b", 7, TOMBSTONE, b"", 10, None),
        (b"c", 8, MERGE, b"+1", 11, None),
    )

    assert list(reader(wal).changes()) == [
        Change("put", b"a", b"1", 7, 10, 99, WalId(1)),
        Change("delete", b"b", None, 7, 10, None, WalId(1)),
        Change("merge", b"c", b"+1", 8, 11, None, WalId(1)),
    ]


def test_reading_costs_one_request_per_wal_file_and_one_listing(wal: WalFiles) -> None:
    wal.add_files(1, 50)

    assert [change.seq for change in reader(wal).changes(11)] == list(range(11, 51))
    assert wal.requests == {"list": 1, "get": 40}


def test_the_listing_has_every_wal_file_including_fences(wal: WalFiles) -> None:
    wal.add(1)
    wal.add_files(2, 3)
    wal.memory.put("db/wal/notes.txt", b"not ours")

    assert [(file.wal_id, file.size > 0) for file in reader(wal).files()] == [
        (1, False),
        (2, True),
        (3, True),
    ]
    assert [file.wal_id for file in reader(wal).files(3)] == [3]


def test_batches_end_before_stop_id(wal: WalFiles) -> None:
    wal.add_files(1, 9)

    batches = list(reader(wal).batches(3, stop_id=6))

    assert [batch.wal_id for batch in batches] == [3, 4, 5]
    assert batches[-1].next_id == 6


def test_without_a_start_reading_begins_with_the_oldest_wal_file_left(wal: WalFiles) -> None:
    wal.add_files(1, 5)
    wal.remove(1, 2)

    assert [batch.wal_id for batch in reader(wal).batches()] == [3, 4, 5]


def test_a_start_at_a_removed_wal_file_is_refused_with_the_first_id_that_can_be_read(wal: WalFiles) -> None:
    wal.add_files(1, 9)
    wal.remove(1, 2, 3)

    with pytest.raises(InvalidRequest, match=r"file 2 .* removed .* from 4 on"):
        list(reader(wal).batches(2))
    with pytest.raises(InvalidRequest, match=r"file 2 .* removed .* from 4 on"):
        reader(wal).read(2)


def test_a_wal_file_not_written_yet_is_not_reported_as_removed(wal: WalFiles) -> None:
    wal.add_files(1, 3)

    assert list(reader(wal).batches(4)) == []
    with pytest.raises(InvalidRequest, match="not reached file 4"):
        reader(wal).read(4)
    assert reader(wal).read(3).changes[0].seq == 3


def test_a_wal_file_written_between_get_and_listing_is_not_reported_as_removed(wal: WalFiles) -> None:
    racing = InterposingStore(wal.memory, lambda: wal.add_files(1, 2), op="list")

    with pytest.raises(InvalidRequest, match="not reached file 1"):
        WalReader("db", store=racing).read(1)


def test_a_missing_wal_file_with_later_ones_raises_when_it_is_reached(wal: WalFiles) -> None:
    wal.add_files(1, 5)
    wal.remove(3)

    batches = reader(wal).batches(1)
    assert [next(batches).wal_id, next(batches).wal_id] == [1, 2]
    with pytest.raises(InvalidRequest, match=r"file 3 .* is missing.*from 4 on"):
        next(batches)
    following = reader(wal).follow(1, timeout_s=0)
    assert [next(following).wal_id, next(following).wal_id] == [1, 2]
    with pytest.raises(InvalidRequest, match="file 3 "):
        next(following)
    assert [batch.wal_id for batch in reader(wal).batches(1, stop_id=3)] == [1, 2]


def test_a_wal_id_below_one_is_refused(wal: WalFiles) -> None:
    with pytest.raises(InvalidRequest, match="start at 1"):
        list(reader(wal).batches(0))


class Writing(VirtualClock):
    """A clock on which the writer adds one WAL file during every sleep, from `first` to `last`."""

    def __init__(self, wal: WalFiles, first: int, last: int) -> None:
        super().__init__()
        self.wal, self.next, self.last = wal, first, last
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self.slept.append(seconds)
        if self.next <= self.last:
            self.wal.add(self.next, row(self.next))
            self.next += 1


def test_follow_returns_wal_files_as_they_appear(wal: WalFiles) -> None:
    wal.add_files(1, 3)
    clock = Writing(wal, 4, 6)

    batches = list(islice(reader(wal, clock).follow(2, poll_interval_s=0.5), 5))

    assert [batch.wal_id for batch in batches] == [2, 3, 4, 5, 6]
    assert clock.slept == [0.5] * 3


@pytest.mark.parametrize("ahead", [1, 4])
def test_a_wal_file_that_is_empty_for_a_moment_is_delivered_once_it_has_its_rows(
    wal: WalFiles, ahead: int
) -> None:
    third = DbPaths("db").wal(WalId(3))

    class Emptied(FaultyStore):
        """The third file is empty when it is read for the first time."""

        damaged = True

        def get(self, path: str) -> StoredObject:
            stored = super().get(path)
            if path == third and self.damaged:
                self.damaged = False
                return StoredObject(b"", stored.meta)
            return stored

    wal.add_files(1, ahead)
    store = Emptied(wal.store)
    found = []
    for batch in WalReader("db", store=store, clock=VirtualClock()).follow(1, timeout_s=60):
        found += [change.seq for change in batch.changes]
        if batch.wal_id == ahead == 1:
            wal.add_files(2, 4)
    assert found == [1, 2, 3, 4]
    assert not store.damaged
    store.damaged = True
    changes = WalReader("db", store=store, clock=VirtualClock()).changes()
    assert [change.seq for change in changes] == [1, 2, 3, 4]


def test_follow_of_an_empty_wal_waits_for_the_first_file(wal: WalFiles) -> None:
    assert next(reader(wal, Writing(wal, 1, 1)).follow()).wal_id == 1


def test_waiting_costs_two_requests_per_poll_and_a_listing_every_half_minute(wal: WalFiles) -> None:
    class Later(Writing):
        def sleep(self, seconds: float) -> None:
            self.next = 2 if self.monotonic() >= 99 else 3
            super().sleep(seconds)

    wal.add_files(1, 1)
    clock = Later(wal, 3, 2)
    ManifestStore(wal.memory, DbPaths("db"), clock=clock).create_next(new_manifest(), None)
    followed = reader(wal, clock).follow(1, poll_interval_s=1, max_poll_interval_s=1)
    next(followed)
    wal.store.reset()

    assert next(followed).wal_id == 2
    # One for the next WAL file and one for the next manifest, and sometimes one for the boundary of manifests.
    assert wal.requests["get"] <= 2 * 101 + 3 * 3 + 2
    assert wal.requests["list"] == 3, "of WAL files: whether the next one was written and removed"


def test_a_wal_without_a_manifest_is_followed(wal: WalFiles) -> None:
    wal.add_files(1, 1)
    followed = reader(wal, Writing(wal, 2, 3)).follow(1, poll_interval_s=1, max_poll_interval_s=1)

    assert [next(followed).wal_id for _ in range(3)] == [1, 2, 3]
    assert wal.requests["list"] == 2, "of WAL files and, every half minute, of manifests"


def test_a_consumer_whose_next_wal_file_was_removed_gets_an_error_and_no_gap(wal: WalFiles) -> None:
    class Collecting(Writing):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.next == 6:
                self.wal.remove(1, 2, 3, 4)

    wal.add_files(1, 2)
    clock = Collecting(wal, 6, 5)
    followed = reader(wal, clock).follow(1, poll_interval_s=3600)
    assert [next(followed).wal_id, next(followed).wal_id] == [1, 2]
    wal.add_files(3, 5)
    assert next(followed).wal_id == 3
    wal.remove(4)

    with pytest.raises(InvalidRequest, match=r"file 4 .* from 5 on"):
        next(followed)


def test_follow_ends_when_its_stop_event_is_set(wal: WalFiles) -> None:
    wal.add_files(1, 2)
    stop = Event()
    seen: list[int] = []
    caught_up = Event()

    def consume() -> None:
        for batch in WalReader("db", store=wal.store).follow(poll_interval_s=60, stop=stop):
            seen.append(batch.wal_id)
            if batch.wal_id == 2:
                caught_up.set()

    consumer = Thread(target=consume)
    consumer.start()
    assert caught_up.wait(5)
    stop.set()
    consumer.join(5)

    assert not consumer.is_alive()
    assert seen == [1, 2]


def test_an_unpickled_reader_reads_the_same_wal() -> None:
    store = MemoryStore.named("test-wal-tail")
    store.put(DbPaths("db").wal(WalId(1)), encode_wal([row(1)]))

    there = pickle.loads(pickle.dumps(WalReader("memory://test-wal-tail/db")))

    assert [change.seq for change in there.changes()] == [1]


@pytest.mark.parametrize("name", ["fencing", "wal_store", "ttl", "merge"])
def test_the_wal_of_the_official_writer_is_read_in_order(name: str) -> None:
    database = next(database for database in databases() if database.name == name)
    wal_store = None if database.wal_store is None else str(database.wal_store)

    changes = list(WalReader(database.path, store=str(database.store), wal_store=wal_store).changes())

    assert changes
    assert [change.seq for change in changes] == sorted(change.seq for change in changes)
    assert {change.op for change in changes} <= {"put", "delete", "merge"}
