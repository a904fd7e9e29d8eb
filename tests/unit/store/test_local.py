"""The local store beyond the contract: durability, crashes, other processes, and SlateDB on the same folder."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from obstore.store import LocalStore as SlateLocalStore

from flagstone.errors import InvalidRequest, Unavailable
from flagstone.runtime.clock import VirtualClock
from flagstone.store import local
from flagstone.store.counting import CountingStore
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from flagstone.store.port import (
    NotWritten,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    read_range_into,
)
from flagstone.store.retrying import RetryingStore, RetryPolicy


def failing(
    code: int, *, times: int = 1, only: Callable[[int], bool] = lambda _: True
) -> Callable[[int], None]:
    left = [times]
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if left[0] and only(descriptor):
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    return fail


def is_folder(descriptor: int) -> bool:
    return os.fstat(descriptor).st_mode & 0o040000 != 0


def test_slatedbs_store_and_ours_see_the_same_objects(tmp_path: Path) -> None:
    ours, theirs = LocalStore(tmp_path, fsync=False), SlateLocalStore(str(tmp_path))
    names = ["db/manifest/00000000000000000001.manifest", "db/gc/manifest.boundary", "db/a b%20/ü"]
    for name in names:
        ours.put_if_absent(name, name.encode())
    ours.put_if_match(names[1], b"2", ours.head(names[1]).version)
    theirs.put("db/wal/00000000000000000001.sst", b"", mode="create")
    theirs.put("db/compacted/x.sst", b"table")
    (tmp_path / "db/wal/00000000000000000002.sst#1").write_bytes(b"torn")

    listed = [meta.path for meta in ours.list("")]

    assert listed == sorted(meta["path"] for meta in theirs.list().collect())
    assert bytes(theirs.get(names[1]).bytes()) == b"2"
    assert ours.get("db/compacted/x.sst").data == b"table"
    with pytest.raises(ObjectExists):
        ours.put_if_absent("db/wal/00000000000000000001.sst", b"")
    assert len(listed) == len([file for file in tmp_path.rglob("*") if file.is_file()]) - 1


def test_a_write_syncs_its_bytes_before_the_name_and_the_folder_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, link, rename = os.fsync, os.link, os.rename

    def note_fsync(descriptor: int) -> None:
        events.append("sync folder" if is_folder(descriptor) else "sync file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "link", lambda *names: (events.append("link"), link(*names)))
    monkeypatch.setattr(os, "rename", lambda *names: (events.append("rename"), rename(*names)))
    store = LocalStore(tmp_path / "new")

    version = store.put_if_absent("a/b/x", b"1")
    assert events == [*["sync folder"] * 3, "sync file", "link", "sync folder"]
    events.clear()
    store.put_if_match("a/b/x", b"2", version)
    assert events == ["sync file", "rename", "sync folder"]
    events.clear()
    LocalStore(tmp_path / "new", fsync=False).put("a/b/x", b"3")
    assert events == ["rename"]


@pytest.mark.parametrize("verb", ["create", "swap"])
def test_a_write_whose_folder_could_not_be_synced_is_finished_by_the_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    inner = LocalStore(tmp_path)
    first = inner.put("f/x", b"0")
    monkeypatch.setattr(os, "fsync", failing(errno.EIO, times=2, only=is_folder))
    store = RetryingStore(inner, policy=RetryPolicy(initial_backoff_s=0, max_backoff_s=0))

    version = store.put_if_absent("f/y", b"1") if verb == "create" else store.put_if_match("f/x", b"1", first)

    path = "f/y" if verb == "create" else "f/x"
    assert (store.get(path).data, store.head(path).version) == (b"1", version)


def test_a_write_whose_folder_could_not_be_synced_raises_unavailable_and_keeps_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path)
    store.put("f/x", b"")
    monkeypatch.setattr(os, "fsync", failing(errno.EIO, only=is_folder))

    with pytest.raises(Unavailable, match="power loss") as error:
        store.put_if_absent("f/y", b"", token="mine")

    assert not isinstance(error.value, NotWritten)
    assert store.head("f/y").token == "mine"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_before_its_name_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = LocalStore(tmp_path)
    first = store.put("x", b"old")
    monkeypatch.setattr(os, "fsync", failing(code, times=99))

    for write in (
        lambda: store.put("x", b"new"),
        lambda: store.put_if_absent("y", b"new"),
        lambda: store.put_if_match("x", b"new", first),
    ):
        with pytest.raises(NotWritten, match=os.strerror(code)):
            write()

    assert store.get("x").data == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["x"]


def test_a_refused_permission_raises_invalid_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path, fsync=False)
    store.put("x", b"")

    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)

    with pytest.raises(InvalidRequest, match="Permission denied"):
        store.get_range("x", 0, 1)
    with pytest.raises(InvalidRequest, match="Permission denied"):
        store.put("x", b"")


def test_versions_never_repeat_even_when_time_stands_still(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, fsync=False, clock=VirtualClock())
    seen = set()
    for round_number in range(300):
        seen.add(store.put("x", b"same"))
        seen.add(store.put_if_match("x", b"same", store.head("x").version))
        if round_number % 3 == 0:
            store.delete("x")
            seen.add(store.put_if_absent("x", b"same"))
    assert len(seen) == 700


def test_versions_never_repeat_on_a_file_system_with_coarse_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    utime, second = os.utime, 1_000_000_000

    def coarse(file: str, *, ns: tuple[int, int]) -> None:
        utime(file, ns=(ns[0] // second * second, ns[1] // second * second))

    monkeypatch.setattr(os, "utime", coarse)
    store = LocalStore(tmp_path, fsync=False)
    assert len({store.put("x", b"same") for _ in range(5)}) == 5


def test_staging_files_of_crashed_writers_are_hidden_skipped_and_swept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, fsync=False)
    store.put("db/x", b"1")
    for name in ("x#1", "x#2", "y#7"):
        (tmp_path / "db" / name).write_bytes(b"torn")
    os.utime(tmp_path / "db" / "y#7", ns=(0, 0))

    store.put("db/x", b"2")

    assert [meta.path for meta in store.list("")] == ["db/x"]
    assert len(store.sweep_staging(60_000)) == 1
    assert len(store.sweep_staging(0, dry_run=True)) == 2
    assert len(store.sweep_staging(0)) == 2
    assert store.sweep_staging(0) == ()
    assert [file.name for file in (tmp_path / "db").iterdir()] == ["x"]


def test_a_write_whose_staging_file_was_swept_raises_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path, fsync=False)
    restamp = local.restamp

    def swept(file: str, stamp_ns: int, *, later_than_ns: int) -> os.stat_result:
        status = restamp(file, stamp_ns, later_than_ns=later_than_ns)
        Path(file).unlink()
        return status

    monkeypatch.setattr("flagstone.store.local.restamp", swept)
    with pytest.raises(NotWritten):
        store.put_if_absent("x", b"")
    with pytest.raises(NotWritten):
        store.put("x", b"")


def test_folders_are_not_objects(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, fsync=False)
    store.put("a/b/c", b"1")

    for read in (
        store.get,
        store.head,
        lambda path: store.get_range(path, 0, 1),
        lambda path: store.get_tail(path, 1),
    ):
        with pytest.raises(ObjectMissing):
            read("a/b")
        with pytest.raises(ObjectMissing):
            read("a/b/c/d")
    for write in (store.put, store.put_if_absent):
        with pytest.raises(InvalidRequest):
            write("a/b", b"")
        with pytest.raises(InvalidRequest):
            write("a/b/c/d", b"")
    assert sum(1 for _ in tmp_path.rglob("*")) == 3


def test_names_of_staging_files_are_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, fsync=False)
    for call in (store.get, store.head, store.delete, lambda path: store.put(path, b"")):
        with pytest.raises(InvalidRequest, match="unfinished"):
            call("a/x#1")
    store.put("a/x#1b", b"")
    with pytest.raises(InvalidRequest, match="too long"):
        store.put("n" * 300, b"")


def test_a_folder_removed_from_under_the_store_is_made_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "s")
    store.put("a/x", b"1")
    shutil.rmtree(tmp_path / "s")

    assert list(store.list("")) == []
    store.put_if_absent("a/x", b"2")
    assert store.get("a/x").data == b"2"


def test_an_unpickled_local_store_has_the_same_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "with space", fsync=False)
    arrived = pickle.loads(pickle.dumps(store))
    assert repr(arrived) == repr(store)
    assert arrived.url == (tmp_path / "with space").as_uri()


def test_a_killed_holder_of_the_lock_does_not_block_others(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, fsync=False)
    version = store.put("x", b"1")
    script = (
        "import sys\n"
        "from flagstone.store.local import locked_folder\n"
        "with locked_folder(sys.argv[1], exclusive=True):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        holder.kill()

    store.put_if_match("x", b"2", version)
    with pytest.raises(ObjectChanged):
        store.put_if_match("x", b"3", version)


def test_processes_lose_no_conditional_update(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, fsync=False)
    store.put("counter", b"0")
    script = (
        "import sys\n"
        "from flagstone.store.local import LocalStore\n"
        "from flagstone.store.port import ObjectChanged\n"
        "store, done = LocalStore(sys.argv[1], fsync=False), 0\n"
        "while done < 100:\n"
        "    found = store.get('counter')\n"
        "    try:\n"
        "        store.put_if_match('counter', b'%d' % (int(found.data) + 1), found.meta.version)\n"
        "        done += 1\n"
        "    except ObjectChanged:\n"
        "        pass\n"
    )

    workers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) for _ in range(3)]

    assert [worker.wait() for worker in workers] == [0, 0, 0]
    assert store.get("counter").data == b"300"
    assert [file.name for file in tmp_path.iterdir()] == ["counter"]


def test_a_range_is_read_into_the_memory_of_the_caller(tmp_path: Path) -> None:
    store = RetryingStore(LocalStore(tmp_path, fsync=False))
    store.put("a", bytes(range(100)))
    memory = memoryview(bytearray(64))
    for start, stop in [(0, 10), (90, 150), (5, 69), (100, 120), (7, 7)]:
        piece = read_range_into(store, "a", start, stop, memory)
        assert isinstance(piece, memoryview)
        assert piece.obj is memory.obj
        assert bytes(piece) == store.get_range("a", start, stop)
    with pytest.raises(ObjectMissing):
        read_range_into(store, "b", 0, 1, memory)
    with pytest.raises(InvalidRequest):
        read_range_into(store, "a", 9, 8, memory)


def test_a_store_that_cannot_read_into_memory_returns_new_bytes() -> None:
    store = MemoryStore()
    store.put("a", b"0123456789")
    assert (
        read_range_into(CountingStore(store, component="db"), "a", 2, 5, memoryview(bytearray(3))) == b"234"
    )
