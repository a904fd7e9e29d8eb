"""On a full disk, garbage collection and destroy still run and make room."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import flagstone
from flagstone.db.admin.admin import Admin
from flagstone.gc.collector import Collector, GarbageCollection
from flagstone.gc.plan import KindOptions
from flagstone.runtime.clock import SYSTEM_CLOCK, VirtualClock
from flagstone.store import local
from flagstone.store.local import Fill, LocalStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import StoreFull
from flagstone.store.retrying import RetryingStore
from kit.databases import IDLE


class Disk:
    """A folder with a quota: a write that does not fit raises ENOSPC. Empty files always fit."""

    def __init__(self, folder: Path, stage: Callable[..., str]) -> None:
        self.folder = folder
        self.quota: int | None = None
        self._stage = stage

    @property
    def used(self) -> int:
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())

    def fill_up(self) -> None:
        self.quota = self.used

    def stage(self, file: str, fill: Fill, *, fsync: bool) -> str:
        stream = io.BytesIO()
        fill(stream)
        size = len(stream.getvalue())
        if size and self.quota is not None and self.used + size > self.quota:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._stage(file, lambda out: out.write(stream.getvalue()), fsync=False)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(tmp_path, local.stage)
    monkeypatch.setattr(local, "stage", made.stage)
    return made


def _written(folder: Path) -> Path:
    """A database with WAL files, SSTs and manifests that nothing needs any more."""
    path = folder / "db"
    with flagstone.open(path, settings=IDLE) as db:
        for turn in range(5):
            db.put(b"key", b"%d" % turn * 500)
            db.flush("wal")
            db.put(b"other", b"%d" % turn * 500)
            db.flush()
    return path


def _wal_files(path: Path) -> list[str]:
    return sorted(file.name for file in (path / "wal").iterdir() if file.stat().st_size)


def test_gc_frees_wal_files_when_no_byte_can_be_written(disk: Disk) -> None:
    path = _written(disk.folder)
    disk.fill_up()
    clock = VirtualClock(SYSTEM_CLOCK.now_ms())

    report = Admin(path, clock=clock).collect_garbage(min_age=timedelta(milliseconds=1))

    assert report.ok, report.errors
    assert report.of("wal").deleted >= 8
    assert report.of("manifest").deleted >= 4, "the bytes of the deleted WAL files suffice for the boundary"
    assert clock.monotonic() == 0, "no request is retried"
    with flagstone.open(path, settings=IDLE) as db:
        assert db.get(b"key") == b"4" * 500


@pytest.mark.slow
def test_an_expired_checkpoint_does_not_keep_gc_from_freeing_wal_files(disk: Disk) -> None:
    path = _written(disk.folder)
    earlier = VirtualClock(SYSTEM_CLOCK.now_ms() - 60_000)
    Admin(path, clock=earlier).create_checkpoint(timedelta(seconds=1))
    disk.quota = 0  # freed bytes do not become available, as on a disk that other processes fill
    before = _wal_files(path)

    report = Admin(path).collect_garbage(min_age=timedelta(milliseconds=1))

    assert report.of("wal").deleted >= 8
    assert len(_wal_files(path)) <= len(before) - 8
    assert report.of("checkpoint").errors
    assert report.of("checkpoint").deleted == 0
    disk.quota = None
    again = Admin(path).collect_garbage(min_age=timedelta(milliseconds=1))
    assert again.ok
    assert again.of("checkpoint").deleted == 1


@pytest.mark.slow
def test_a_write_to_a_full_store_is_retried_for_at_most_a_second(disk: Disk) -> None:
    clock = VirtualClock()
    store = RetryingStore(LocalStore(disk.folder), clock=clock)
    disk.quota = 0

    with pytest.raises(StoreFull, match=os.strerror(errno.ENOSPC)):
        store.put("x", b"a byte")

    assert clock.monotonic() <= 1


@pytest.mark.slow
@pytest.mark.parametrize("soft", [False, True])
def test_destroy_makes_its_own_room_on_a_full_disk(disk: Disk, *, soft: bool) -> None:
    path = _written(disk.folder)
    disk.fill_up()

    done = Admin(path).destroy(soft=soft)

    assert soft or done.deleted
    assert soft or not _wal_files(path)
    with pytest.raises(flagstone.InvalidRequest, match=r"destroyed|no database"):
        flagstone.open(path, settings=IDLE, create=False)


def test_the_service_does_not_wait_for_its_interval_while_the_disk_is_full(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _written(disk.folder)
    clock = VirtualClock()
    options = {"wal": KindOptions(0, interval=timedelta(seconds=600))}
    collector = Collector(LocalStore(disk.folder), DbPaths("db"), options)  # type: ignore[arg-type]
    service = GarbageCollection(collector, options, clock=clock)  # type: ignore[arg-type]
    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: 1 << 40)
    assert service.run_once() == 10.0
    assert len(_wal_files(path)) >= 8

    monkeypatch.setattr(LocalStore, "free_bytes", lambda _: 4096)
    service.run_once()

    assert len(_wal_files(path)) <= 2
