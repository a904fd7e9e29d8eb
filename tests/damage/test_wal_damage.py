"""Truncated, emptied or missing WAL files raise in every reader; undamaged ones are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import flagstone
from damage.damage_rig import contents_of
from flagstone import Admin, WalReader
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.codec import seal
from flagstone.format.sst import encode_footer
from flagstone.format.sst_info import SsTableInfo, SstType
from flagstone.kernels import index as index_kernel
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.types import WalId
from kit.databases import MANUAL, copy_of

PATHS = DbPaths("db")


def crashed(files: int = 4, *, flushed: bool = False) -> MemoryStore:
    """A database whose writer crashed: a fence, then WAL files of two rows each, none of them flushed to L0."""
    store = MemoryStore()
    db = flagstone.open("db", store=store, settings=MANUAL)
    if flushed:
        db.put(b"flushed", b"")
        db.flush()
    for number in range(files):
        db.put(b"a%d" % number, b"1")
        db.put(b"b%d" % number, b"2")
        db.flush("wal")
    copy = MemoryStore()
    for path, data in contents_of(store).items():
        copy.put(path, data)
    db.close()
    return copy


def open_database(store: MemoryStore) -> Any:
    with flagstone.open("db", store=store, settings=MANUAL) as db:
        return list(db.scan())


def open_reader(store: MemoryStore) -> Any:
    with flagstone.open_reader("db", store=store, mode="latest") as reader:
        return list(reader.scan())


def read_wal(store: MemoryStore) -> Any:
    return list(WalReader("db", store=store).changes())


def follow(store: MemoryStore) -> Any:
    return list(WalReader("db", store=store).follow(1, timeout_s=0))


def follow_a_feed(store: MemoryStore) -> Any:
    reader = WalReader("db", store=store, pin="consumer")
    return [change for batch in reader.follow(timeout_s=0) for change in batch.changes]


def verify(store: MemoryStore) -> Any:
    report = Admin("db", store=store).verify()
    if report.damage:
        raise CorruptData(
            report.damage[0].problem, object=report.damage[0].object, offset=report.damage[0].offset
        )
    return report


every_reader = pytest.mark.parametrize(
    "read", [open_database, open_reader, read_wal, follow, follow_a_feed, verify]
)


@every_reader
def test_undamaged_wal_files_are_read(read: Callable[[MemoryStore], Any]) -> None:
    read(crashed())


@pytest.mark.slow
@every_reader
@pytest.mark.parametrize("kept", [1, 9, 10, 11, 100])
def test_a_truncated_wal_file_is_not_taken_for_a_fence(read: Callable[[MemoryStore], Any], kept: int) -> None:
    store = crashed()
    path = PATHS.wal(WalId(3))
    store.put(path, store.get(path).data[:kept])
    with pytest.raises(CorruptData) as caught:
        read(store)
    assert caught.value.object == path
    assert caught.value.offset is not None


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("read", [open_database, open_reader, read_wal, verify])
def test_an_emptied_wal_file_is_not_taken_for_a_fence(
    read: Callable[[MemoryStore], Any], flushed: bool
) -> None:
    store = crashed(flushed=flushed)
    path = PATHS.wal(WalId(4))
    store.put(path, b"")
    with pytest.raises(CorruptData, match=r"sequence numbers \d to \d are missing") as caught:
        read(store)
    assert caught.value.object == path


@pytest.mark.parametrize("read", [follow, follow_a_feed])
def test_a_wal_reader_raises_when_rows_are_missing(read: Callable[[MemoryStore], Any]) -> None:
    store = crashed()
    store.put(PATHS.wal(WalId(4)), b"")
    with pytest.raises((InvalidRequest, CorruptData), match="sequence numbers 5 to 6 are"):
        read(store)


@every_reader
def test_a_missing_wal_file_with_later_ones_raises(read: Callable[[MemoryStore], Any]) -> None:
    store = crashed()
    store.delete(PATHS.wal(WalId(3)))
    with pytest.raises((CorruptData, InvalidRequest), match=r"missing|vanished"):
        read(store)
    assert not store_has(store, 6), "nothing was written into or behind the hole"


def store_has(store: MemoryStore, wal_id: int) -> bool:
    return any(meta.path == PATHS.wal(WalId(wal_id)) for meta in store.list("db/wal"))


def test_fences_of_many_writers_are_not_reported_as_lost_rows() -> None:
    store = MemoryStore()
    for number in range(4):
        db = flagstone.open("db", store=store, settings=MANUAL)
        db.put(b"%d" % number, b"")
        db.flush("wal")
        store = copy_of(store)
        db.close()
    assert [key for key, _ in open_reader(store)] == [b"0", b"1", b"2", b"3"]
    assert [key for key, _ in open_database(copy_of(store))] == [b"0", b"1", b"2", b"3"]
    assert len(read_wal(store)) == 4
    verify(store)


def fence_of_old_releases() -> bytes:
    index = seal(index_kernel.encode_index([], []))
    info = SsTableInfo(None, None, 0, len(index), 0, 0, sst_type=SstType.WAL)
    return index + encode_footer(info, len(index), 1)


@every_reader
def test_a_fence_of_releases_before_0_14_is_a_fence(read: Callable[[MemoryStore], Any]) -> None:
    store = crashed()
    before = len(read_wal(store))
    store.put(PATHS.wal(WalId(1)), fence_of_old_releases())
    store.put(PATHS.wal(WalId(6)), fence_of_old_releases())
    read(store)
    assert len(read_wal(store)) == before


def test_verify_does_not_iterate_up_to_the_wal_id_of_a_damaged_manifest() -> None:
    from dataclasses import replace

    from flagstone.metadata.manifest_codec import encode_manifest, load_manifest

    store = crashed()
    newest = max(meta.path for meta in store.list("db/manifest"))
    manifest = load_manifest(store.get(newest).data, newest)
    # As SlateDB would have written it, without a checksum.
    store.put(newest, encode_manifest(replace(manifest, wal_id_last_seen=WalId(2**62))))
    report = Admin("db", store=store).verify()
    assert len(report.damage) == 1
    assert "missing like" in report.damage[0].problem
