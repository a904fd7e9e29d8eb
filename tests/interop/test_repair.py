"""The official wheel opens repaired databases and reads the same rows."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin
from flagstone.metadata.manifest_codec import encode_manifest
from flagstone.runtime.clock import SYSTEM_CLOCK, VirtualClock
from flagstone.store.paths import DbPaths
from flagstone.types import ManifestId
from flagstone.wal.replay import decode_wal
from kit.databases import MANUAL, encode_wal

pytestmark = pytest.mark.slow

SETTINGS = MANUAL.replace(manifest_poll_interval=timedelta(hours=1))
PATHS = DbPaths("db")
DEFECTS = [
    "order",
    "hole",
    "cut",
    "manifest",
    "sst",
    "sst and wal",
    "checkpoint",
    "clock",
    "clock in the wal",
    "no manifest",
]


def files(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


class DamagedDatabase:
    """A database in a folder, crashed and then damaged."""

    def __init__(self, folder: Path, *, ahead_ms: int = 0) -> None:
        self.folder = folder
        self.path = folder / "db"
        self.model: dict[bytes, bytes] = {}
        clock = VirtualClock(SYSTEM_CLOCK.now_ms() + ahead_ms) if ahead_ms else SYSTEM_CLOCK
        db = flagstone.open("db", store=str(folder), settings=SETTINGS, clock=clock)
        for round_ in range(6):
            for number in range(20):
                self.put(db, b"key/%03d" % (13 * round_ + 7 * number), b"%d" % round_ * 20)
            if round_ < 2:
                db.flush()
            else:
                db.flush("wal")
        left = files(folder)
        db.close()
        for file in files(folder).keys() - left.keys():
            file.unlink()

    def put(self, db: Any, key: bytes, value: bytes) -> None:
        db.put(key, value)
        self.model[key] = value

    @property
    def admin(self) -> Admin:
        return Admin("db", store=str(self.folder))

    def wal(self) -> list[Path]:
        return sorted(file for file in (self.path / "wal").iterdir() if file.stat().st_size)

    def rows_of(self, file: Path) -> list[Any]:
        return decode_wal(file.read_bytes(), file.name)

    def damage(self, defect: str) -> None:
        manifest = self.admin.manifest()
        newest = self.folder / PATHS.manifest(ManifestId(manifest.id))
        wal = self.wal()
        match defect:
            case "order":
                rows = self.rows_of(wal[-2])
                wal[-2].write_bytes(encode_wal([(row[0], 3, *row[2:]) for row in rows[:1]] + rows[1:]))
            case "hole" | "cut":
                if defect == "hole":
                    wal[-2].unlink()
                else:
                    wal[-2].write_bytes(wal[-2].read_bytes()[:50])
                self.model = self._without(4)
            case "manifest":
                newest.write_bytes(b"\x00\x02junk")
            case "sst" | "sst and wal":
                sst = max((self.path / "compacted").iterdir(), key=lambda file: file.name)
                sst.unlink()
                if defect == "sst and wal":
                    wal[1].unlink()
                    self.model = self._without(1)
            case "checkpoint":
                held = self.admin.create_checkpoint(name="gone")
                self.admin.create_checkpoint(name="kept")
                (self.folder / PATHS.manifest(held.manifest_id)).unlink()
            case "no manifest":
                for file in (self.path / "manifest").iterdir():
                    file.unlink()
            case _:
                state = manifest.value
                ahead = SYSTEM_CLOCK.now_ms() + 10**9
                newest.write_bytes(encode_manifest(replace(state, last_l0_clock_tick=ahead)))

    def _without(self, lost: int) -> dict[bytes, bytes]:
        """The rows of all rounds but one."""
        model: dict[bytes, bytes] = {}
        for round_ in range(6):
            if round_ != lost:
                model |= {
                    b"key/%03d" % (13 * round_ + 7 * number): b"%d" % round_ * 20 for number in range(20)
                }
        return model


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_wheel_reads_and_writes_a_repaired_database(wheel: Any, tmp_path: Path, defect: str) -> None:
    damaged = DamagedDatabase(tmp_path, ahead_ms=10**8 if defect == "clock in the wal" else 0)
    if defect != "clock in the wal":
        damaged.damage(defect)
    if defect == "no manifest":
        for sst in (damaged.path / "compacted").iterdir():
            sst.unlink()

    report = damaged.admin.repair(plan_only=False)

    assert report.applied, report.defects
    assert damaged.admin.verify().ok, damaged.admin.verify().damage
    assert wheel.scan(str(tmp_path), "db") == damaged.model
    wheel.apply(str(tmp_path), "db", [("put", b"from the wheel", b"1"), ("flush", "memtable")])
    damaged.model[b"from the wheel"] = b"1"
    with flagstone.open("db", store=str(tmp_path), settings=SETTINGS) as db:
        assert dict(db.scan()) == damaged.model
    assert damaged.admin.verify().ok
