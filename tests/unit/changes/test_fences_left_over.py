"""Consumers that begin after garbage collection removed WAL files, but not fences and files of late requests."""

from __future__ import annotations

import pytest

import flagstone
from flagstone import Admin, InvalidRequest, WalReader
from flagstone.changes.change import WalFile, find_oldest
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.types import WalId
from kit.databases import QUIET

PATHS = DbPaths("db")


@pytest.fixture
def store() -> MemoryStore:
    """A database of three writers. Of the WAL files before the last one, only the fences are left."""
    store = MemoryStore()
    for number in range(3):
        with flagstone.open("db", store=store, settings=QUIET) as db:
            db.put(b"key", b"%d" % number, await_durable=True)
            if number < 2:
                db.flush()
    Admin("db", store=store).collect_garbage(kinds=["wal"], min_age="0s")
    return store


def wal_ids(store: MemoryStore) -> list[WalId | None]:
    return [PATHS.parse_wal(meta.path) for meta in store.list(PATHS.wal_folder)]


@pytest.mark.parametrize("consumer", [None, "copy"])
def test_a_new_consumer_begins_after_fences_that_garbage_collection_has_left(
    store: MemoryStore, consumer: str | None
) -> None:
    ids = wal_ids(store)
    assert ids[0] == 1, "a fence is left"
    assert 2 not in ids, "the rows after it are gone"
    with WalReader("db", store=store, pin=consumer) as reader:
        assert [change.value for batch in reader.follow(timeout_s=0) for change in batch.changes] == [b"2"]


def test_a_listing_of_all_batches_begins_after_fences_that_garbage_collection_has_left(
    store: MemoryStore,
) -> None:
    reader = WalReader("db", store=store)
    assert [change.value for change in reader.changes()] == [b"2"]


def test_a_removed_file_that_a_late_request_has_created_again_is_skipped() -> None:
    files = [WalFile(WalId(2), 400, 900), WalFile(WalId(5), 0, 500), WalFile(WalId(6), 400, 600)]
    assert find_oldest(files) == 5


def test_a_file_that_was_not_written_late_is_not_skipped() -> None:
    files = [WalFile(WalId(2), 400, 400), WalFile(WalId(5), 0, 500), WalFile(WalId(6), 400, 600)]
    assert find_oldest(files) == 2


@pytest.mark.parametrize("consumer", [None, "copy"])
def test_a_new_consumer_begins_after_files_that_only_a_checkpoint_holds(consumer: str | None) -> None:
    store = MemoryStore()
    with flagstone.open("db", store=store, settings=QUIET) as db:
        db.put(b"key", b"held", await_durable=True)
        Admin("db", store=store).create_checkpoint()
        for number in range(3):
            db.put(b"key", b"%d" % number, await_durable=True)
        db.flush()
        db.put(b"key", b"last", await_durable=True)
        Admin("db", store=store).collect_garbage(kinds=["wal"], min_age="0s")
        ids = wal_ids(store)
        assert len(ids) < ids[-1] - ids[0] + 1, "there is a gap"
        with WalReader("db", store=store, pin=consumer) as reader:
            values = [change.value for batch in reader.follow(timeout_s=0) for change in batch.changes]
        assert values == [b"2", b"last"], "garbage collection keeps the newest file that was flushed"


def test_a_missing_file_after_one_with_rows_is_an_error(store: MemoryStore) -> None:
    with flagstone.open("db", store=store, settings=QUIET) as db:
        for number in range(3):
            db.put(b"key", b"later %d" % number, await_durable=True)
    with_rows = [meta.path for meta in store.list(PATHS.wal_folder) if meta.size]
    store.delete(with_rows[-2])
    with pytest.raises(InvalidRequest, match="is missing"):
        list(WalReader("db", store=store).follow(timeout_s=0))
