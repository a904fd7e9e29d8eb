"""Uploads in parts beyond the contract: one put for small objects, faults at every part, what a crash leaves."""

from __future__ import annotations

import errno
import os
from itertools import count
from pathlib import Path

import pytest

from flagstone.errors import InvalidRequest, Unavailable
from flagstone.runtime.clock import VirtualClock
from flagstone.store import local
from flagstone.store.caching import CachingStore
from flagstone.store.commit_log.sqlite import SqliteCommitLog
from flagstone.store.counting import CountingStore
from flagstone.store.kept_uploads import KeepingStore
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from flagstone.store.port import NotWritten, ObjectMissing, ObjectStore, StoreFull, UploadLost
from flagstone.store.retrying import RetryingStore, RetryPolicy
from flagstone.store.two_phase import TwoPhaseStore
from flagstone.store.writing import ObjectWriter
from flagstone.testing.faults import Crashed, Effect, Fault, FaultyStore

PART = 1000
SST = "db/compacted/01J00000000000000000000000.sst"


def content(size: int) -> bytes:
    return bytes(number % 251 for number in range(size))


def write(store: ObjectStore, path: str, data: bytes, *, piece: int = 300) -> ObjectWriter:
    """Write an object in pieces, each in the same memory."""
    writer = ObjectWriter(store, path)
    memory = bytearray(piece)
    for start in range(0, len(data), piece):
        taken = data[start : start + piece]
        memory[: len(taken)] = taken
        writer.write(memoryview(memory)[: len(taken)])
    assert writer.size == len(data)
    writer.commit()
    return writer


# -- the writer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, PART - 1])
def test_an_object_smaller_than_a_part_is_one_put(size: int) -> None:
    store = FaultyStore(MemoryStore(part_bytes=PART))

    writer = write(store, "x", content(size))

    assert store.calls == [("put", "x")]
    assert store.get("x").data == writer.whole == content(size)


@pytest.mark.parametrize("piece", [1, 300, PART, 3 * PART])
@pytest.mark.parametrize("size", [PART, PART + 1, 5 * PART - 1, 5 * PART])
def test_a_larger_object_is_uploaded_in_parts_of_at_least_the_size_that_the_store_names(
    size: int, piece: int
) -> None:
    store = FaultyStore(MemoryStore(part_bytes=PART))

    writer = write(store, "x", content(size), piece=piece)

    parts = -(-size // max(PART, piece))
    assert [op for op, _ in store.calls] == ["upload_part"] * parts + ["upload_commit"]
    assert store.get("x").data == content(size)
    assert writer.whole is None


def test_a_writer_that_is_aborted_leaves_nothing_even_if_the_store_does_not_answer() -> None:
    inner = MemoryStore(part_bytes=PART)
    store = FaultyStore(inner, [Fault("error", op="upload_abort")])
    writer = ObjectWriter(store, "x")
    writer.write(content(2 * PART))

    writer.abort()

    assert list(inner.list("")) == []


# -- faults at every part -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fsync", [True, False, None], ids=["fsync", "no fsync", "memory"])
@pytest.mark.parametrize("effect", ["error", "lost_reply", "slow", "crash", "crash_after"])
def test_a_fault_at_any_call_of_an_upload_leaves_the_whole_object_or_nothing(
    tmp_path: Path, effect: Effect, fsync: bool | None
) -> None:
    data = content(3 * 128 * 1024 + 77)
    for nth in count(1):
        clock = VirtualClock()
        path = f"db/{nth}"
        inner: ObjectStore = (
            MemoryStore(part_bytes=128 * 1024) if fsync is None else LocalStore(tmp_path, fsync=fsync)
        )
        faulty = FaultyStore(inner, [Fault(effect, nth=nth, delay_s=30)], clock=clock)
        try:
            write(RetryingStore(faulty, clock=clock), path, data, piece=50_000)
        except Crashed:
            assert effect in ("crash", "crash_after")
        if effect == "crash_after" and faulty.calls[-1][0] == "upload_commit":
            assert inner.get(path).data == data
        elif faulty.dead:
            assert list(inner.list("")) == []
        else:
            assert inner.get(path).data == data
        inner.delete(path)
        if len(faulty.calls) < nth:
            break
    assert nth == 6  # four parts, the commit, and a run without a fault


def test_a_part_that_fails_is_repeated_alone() -> None:
    clock = VirtualClock()
    faulty = FaultyStore(MemoryStore(part_bytes=PART), [Fault("error", op="upload_part", nth=2)], clock=clock)

    write(RetryingStore(faulty, clock=clock), "x", content(3 * PART))

    assert [op for op, _ in faulty.calls] == ["upload_part"] * 4 + ["upload_commit"]


def test_an_upload_that_fails_for_too_long_raises_unavailable() -> None:
    clock = VirtualClock()
    for op in ("upload_part", "upload_commit"):
        faulty = FaultyStore(MemoryStore(part_bytes=PART), [Fault("error", op=op, nth=None)], clock=clock)
        with pytest.raises(Unavailable, match="upload of x in memory:// failed after 3 attempts"):
            write(RetryingStore(faulty, clock=clock, policy=RetryPolicy(attempts=3)), "x", content(3 * PART))


def test_an_upload_whose_parts_are_lost_is_not_repeated() -> None:
    clock = VirtualClock()
    upload = RetryingStore(MemoryStore(), clock=clock).upload("x")
    upload.write(0, b"1")
    upload.abort()
    started = clock.monotonic()

    with pytest.raises(UploadLost):
        upload.commit()

    assert clock.monotonic() == started


# -- a folder -------------------------------------------------------------------------------------------------


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.rglob("*") if file.is_file())


def test_a_folder_holds_an_upload_in_a_staging_file(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    upload = store.upload("db/x")
    assert names(tmp_path) == []

    upload.write(0, b"1" * upload.part_bytes)

    assert names(tmp_path) == ["x#1"]
    upload.commit()
    assert names(tmp_path) == ["x"]


def test_an_upload_that_is_dropped_takes_its_staging_file_with_it(tmp_path: Path) -> None:
    upload = LocalStore(tmp_path).upload("db/x")
    upload.write(0, b"1")

    del upload

    assert names(tmp_path) == []


def test_the_staging_file_of_a_crashed_upload_is_swept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    upload = store.upload("db/x")
    upload.write(0, b"1")

    assert store.sweep_staging(3_600_000) == ()
    assert store.sweep_staging(0) == ("db/x#1",)
    with pytest.raises(UploadLost, match="swept"):
        upload.commit()
    assert names(tmp_path) == []


def test_a_commit_whose_rename_was_done_but_reported_as_failed_succeeds_when_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def doubtful(source: str, destination: str) -> None:
        rename(source, destination)
        monkeypatch.undo()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "rename", doubtful)
    upload = LocalStore(tmp_path).upload("db/x")
    upload.write(0, b"1")
    with pytest.raises(Unavailable):
        upload.commit()
    upload.commit()

    assert (tmp_path / "db" / "x").read_bytes() == b"1"


def test_a_commit_whose_folder_was_not_synced_syncs_it_when_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def sync(folder: str) -> None:
        synced.append(folder)
        if len(synced) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = LocalStore(tmp_path)
    store.put("db/y", b"")
    monkeypatch.setattr(local, "sync_folder", sync)
    synced.append("the first call fails")
    upload = store.upload("db/x")
    upload.write(0, b"1")
    with pytest.raises(Unavailable, match="power loss"):
        upload.commit()
    assert len(synced) == 2

    upload.commit()

    assert len(synced) == 3


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.ENOSPC, StoreFull), (errno.EIO, NotWritten), (errno.EROFS, InvalidRequest)],
)
def test_a_part_that_the_disk_does_not_take_may_be_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    upload = LocalStore(tmp_path).upload("db/x")
    upload.write(0, b"1")
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(expected):
        upload.write(1, b"2")
    monkeypatch.undo()
    upload.write(1, b"2")
    upload.commit()

    assert (tmp_path / "db" / "x").read_bytes() == b"12"


# -- wrappers -------------------------------------------------------------------------------------------------


def test_each_part_and_the_commit_count_as_one_request() -> None:
    store = CountingStore(MemoryStore(part_bytes=PART), component="test")

    write(store, "x", content(2 * PART + 1))

    assert store.totals()["requests"] == {"upload": 4}
    assert store.totals()["bytes_written"] == 2 * PART + 1


@pytest.mark.parametrize("size", [500, 10_000])
def test_an_uploaded_sst_is_in_the_cache_if_the_cache_keeps_what_is_put(tmp_path: Path, size: int) -> None:
    inner = CountingStore(MemoryStore(part_bytes=PART), component="test")
    keeping = CachingStore(
        inner, folder=tmp_path / "a", max_bytes=1 << 20, part_bytes=1024, cache_on_put=True
    )
    plain = CachingStore(inner, folder=tmp_path / "b", max_bytes=1 << 20, part_bytes=1024)

    write(keeping, SST, content(size))
    inner.reset()
    assert keeping.get_range(SST, 0, size) == content(size)
    assert inner.totals()["requests"] == {}

    other = SST.replace("01J", "01K")
    write(plain, other, content(size))
    inner.reset()
    assert plain.get_range(other, 0, size) == content(size)
    assert inner.totals()["requests"] == {"get_range": 1}

    another = SST.replace("01J", "01M")
    write(KeepingStore(inner, plain), another, content(size))  # type: ignore[arg-type]
    inner.reset()
    assert plain.get_range(another, 0, size) == content(size)
    assert inner.totals()["requests"] == {}


def test_the_cache_shows_nothing_of_an_upload_before_its_commit_or_after_its_abort(tmp_path: Path) -> None:
    store = CachingStore(
        MemoryStore(part_bytes=PART), folder=tmp_path, max_bytes=1 << 20, part_bytes=1024, cache_on_put=True
    )
    for path in (SST, SST.replace("01J", "01K")):
        upload = store.upload(path)
        upload.write(0, content(5000))
        with pytest.raises(ObjectMissing):
            store.get_range(path, 0, 10)
        upload.abort()
        with pytest.raises(ObjectMissing):
            store.get_range(path, 0, 10)
    assert names(tmp_path) == []


def test_an_upload_succeeds_if_the_disk_of_the_cache_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = CachingStore(
        MemoryStore(part_bytes=PART), folder=tmp_path, max_bytes=1 << 20, part_bytes=1024, cache_on_put=True
    )
    upload = store.upload(SST)
    upload.write(0, content(2000))
    monkeypatch.setattr("flagstone.store.caching.stage_part", full)
    upload.write(2000, content(5000))
    upload.commit()

    assert names(tmp_path) == []
    assert store.get_range(SST, 2000, 7000) == content(5000)


def test_the_two_phase_store_uploads_to_the_base_and_replaces_a_recorded_object_through_its_record(
    tmp_path: Path,
) -> None:
    base = FaultyStore(MemoryStore(part_bytes=PART))
    log = SqliteCommitLog(tmp_path / "commits.db")
    store = TwoPhaseStore(base, log)

    write(store, "x", content(2 * PART))
    assert ("upload_commit", "x") in base.calls

    store.put_if_absent("y", b"old")
    before = store.head("y").version
    write(store, "y", content(2 * PART))

    assert store.get("y").data == content(2 * PART)
    assert store.head("y").version != before
    assert ("upload_commit", "y") not in base.calls
    log.close()
