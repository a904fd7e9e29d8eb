"""Writer, readers and clones on one database, beside a garbage collector with almost no minimum age.

A writer writes, compacts itself, collects its garbage and is closed or dies at any moment; then it opens the
database again. Beside it work a second collector, readers that hold checkpoints, and a thread that makes clones,
writes to them and destroys them. Every value contains its key and version, so each read is checked by itself: it must
show the last acknowledged version or a later one. An auditor checks for missing objects all the time.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b

from flagstone import Admin
from flagstone.config import (
    CompactionWorkerOptions,
    CompactorOptions,
    GarbageCollectorOptions,
    ReaderSettings,
    Settings,
)
from flagstone.config.settings import GcDetachOptions, GcDirectoryOptions, GcFenceOptions
from flagstone.db.open import open_database
from flagstone.db.reader.reader import open_reader
from flagstone.db.writer.database import Db
from flagstone.errors import FlagstoneError
from flagstone.gc.report import GarbageReport
from flagstone.metadata.stores import ManifestStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.testing.faults import Crashed, FaultyStore
from flagstone.types import ManifestId, WalId

KEYS = 400
MIN_AGE = timedelta(milliseconds=200)
ROUND = timedelta(milliseconds=300)
_DIRECTORY = GcDirectoryOptions(interval=ROUND, min_age=MIN_AGE)
SETTINGS = Settings(
    flush_interval=timedelta(milliseconds=5),
    manifest_poll_interval=timedelta(milliseconds=100),
    l0_sst_size_bytes=16 * 1024,
    l0_max_ssts=32,
    l0_max_ssts_per_key=32,
    compactor_options=CompactorOptions(
        poll_interval=timedelta(milliseconds=100),
        commit_compacted_interval=timedelta(milliseconds=50),
        checkpoint_lifetime=timedelta(seconds=2),
        worker_heartbeat_timeout=timedelta(seconds=2),
        worker=CompactionWorkerOptions(
            compactions_poll_interval=timedelta(milliseconds=100),
            heartbeat_interval=timedelta(milliseconds=500),
            max_sst_size=32 * 1024,
        ),
    ),
    garbage_collector_options=GarbageCollectorOptions(
        manifest_options=_DIRECTORY,
        wal_options=_DIRECTORY,
        compacted_options=_DIRECTORY,
        compactions_options=_DIRECTORY,
        wal_fence_options=GcFenceOptions(interval=ROUND, min_age=MIN_AGE, dry_run=False),
        detach_options=GcDetachOptions(interval=ROUND),
    ),
)
READER = ReaderSettings(
    manifest_poll_interval=timedelta(milliseconds=200), checkpoint_lifetime=timedelta(seconds=3)
)


def key_of(number: int) -> bytes:
    return b"key/%06d" % number


def value_of(key: bytes, version: int) -> bytes | None:
    """What that version of the key is; every seventh is a deletion."""
    return None if version % 7 == 0 else b"%d/" % version + blake2b(key + b"%d" % version).digest() * 2


def version_in(key: bytes, value: bytes) -> int:
    version = int(value.partition(b"/")[0])
    assert value == value_of(key, version), f"a value that was never written at {key!r}"
    return version


@dataclass
class Ledger:
    """Which version of each key was acknowledged, and which may have been written."""

    acknowledged: dict[bytes, int] = field(default_factory=dict)
    attempted: dict[bytes, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, key: bytes, value: bytes | None, at_least: int) -> None:
        """A read that began when `at_least` was acknowledged."""
        with self.lock:
            at_most = self.attempted.get(key, 0)
        if value is None:
            gone = any(version % 7 == 0 for version in range(at_least, at_most + 1))
            assert gone, f"{key!r} is missing; version {at_least} was acknowledged, {at_most} was the last"
        else:
            version = version_in(key, value)
            assert at_least <= version <= at_most, f"{key!r} shows {version}, not {at_least} to {at_most}"

    def floor(self, keys: list[bytes]) -> dict[bytes, int]:
        with self.lock:
            return {key: self.acknowledged.get(key, 0) for key in keys}


class Soak:
    """One run. `counts` has how often each thing was done; `failures` is empty if all went well."""

    def __init__(self, store: ObjectStore, *, seconds: float, seed: int) -> None:
        self.store = store
        self.seconds = seconds
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.ledger = Ledger()
        self.most_objects = 0
        self._stop = threading.Event()
        self._ready = threading.Event()

    def run(self) -> None:
        roles: list[Callable[[random.Random], None]] = [
            self._write,
            self._collect,
            self._read,
            self._read,
            self._clone,
            self._audit,
        ]
        threads = [
            threading.Thread(target=self._guarded, args=(role, random.Random(f"{self.seed}/{number}")))
            for number, role in enumerate(roles)
        ]
        for thread in threads:
            thread.start()
        self._stop.wait(self.seconds)
        self._stop.set()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "a thread hangs"

    def _guarded(self, role: Callable[[random.Random], None], chance: random.Random) -> None:
        if role != self._write:
            self._ready.wait(30)
        try:
            role(chance)
        except BaseException as failure:  # noqa: BLE001 - raised by the main thread
            self.failures.append(failure)
            self._stop.set()

    # -- the writer ---------------------------------------------------------------------------------------

    def _write(self, chance: random.Random) -> None:
        while not self._stop.is_set():
            mortal = FaultyStore(self.store)
            db = open_database("db", store=mortal, settings=SETTINGS)
            self.counts["openings"] += 1
            self._ready.set()
            self._live(db, chance, until=time.monotonic() + chance.uniform(0.3, 3.0))
            self._check_all(db)
            collector = db.status()["garbage_collector"]
            self.counts["embedded rounds"] += collector["rounds"]
            assert collector["failure"] is None or self.counts["crashes"], collector
            if chance.random() < 0.5:
                mortal.crash()
                self.counts["crashes"] += 1
                with suppress(FlagstoneError, Crashed):
                    db.close()
            else:
                db.close()

    def _live(self, db: Db, chance: random.Random, until: float) -> None:
        while time.monotonic() < until and not self._stop.is_set():
            written: list[tuple[bytes, int]] = []
            for _ in range(chance.randrange(1, 40)):
                key = key_of(int(KEYS * chance.random() ** 2))
                with self.ledger.lock:
                    version = self.ledger.attempted[key] = self.ledger.attempted.get(key, 0) + 1
                value = value_of(key, version)
                handle = db.delete(key) if value is None else db.put(key, value)
                written.append((key, version))
            handle.wait(60)
            with self.ledger.lock:
                self.ledger.acknowledged.update(written)
            self.counts["writes"] += len(written)
            if chance.random() < 0.05:
                db.flush("memtable")
            if chance.random() < 0.1:
                key = key_of(chance.randrange(KEYS))
                at_least = self.ledger.floor([key])[key]
                self.ledger.check(key, db.get(key), at_least)
                self.counts["own reads"] += 1
            if chance.random() < 0.02:
                self._hold_snapshot(db, chance)

    def _hold_snapshot(self, db: Db, chance: random.Random) -> None:
        """A scan that starts before SSTs are replaced and continues after that."""
        with db.snapshot() as snapshot:
            before = dict(snapshot.scan())
            time.sleep(chance.uniform(0, 0.3))
            assert dict(snapshot.scan()) == before, "a snapshot changed"
            self.counts["snapshots"] += 1

    def _check_all(self, db: Db) -> None:
        keys = [key_of(number) for number in range(KEYS)]
        floor = self.ledger.floor(keys)
        found = dict(db.scan())
        for key in keys:
            self.ledger.check(key, found.get(key), floor[key])
        self.counts["full checks"] += 1

    # -- the others ---------------------------------------------------------------------------------------

    def _collect(self, chance: random.Random) -> None:
        admin = Admin("db", store=self.store)
        while not self._stop.wait(chance.uniform(0, 0.4)):
            report = admin.collect_garbage(min_age=MIN_AGE)
            self._count(report)
            self.counts["outside rounds"] += 1

    def _count(self, report: GarbageReport) -> None:
        assert report.ok, report.errors
        for entry in report:
            if not entry.dry_run:
                self.counts[f"deleted {entry.kind}"] += entry.deleted

    def _read(self, chance: random.Random) -> None:
        while not self._stop.is_set():
            # A reader may show older rows than those acknowledged since its last poll.
            floor = self.ledger.floor([key_of(number) for number in range(KEYS)])
            with open_reader("db", store=self.store, settings=READER) as reader:
                until = time.monotonic() + chance.uniform(0.2, 4.0)
                while time.monotonic() < until and not self._stop.is_set():
                    key = key_of(chance.randrange(KEYS))
                    self.ledger.check(key, reader.get(key), floor[key])
                    self.counts["reads"] += 1
                    if chance.random() < 0.1:
                        start = chance.randrange(KEYS)
                        for found, value in reader.scan(key_of(start), key_of(start + 50)):
                            self.ledger.check(found, value, floor[found])
                        self.counts["reader scans"] += 1
                    time.sleep(0.002)
            self.counts["readers"] += 1

    def _clone(self, chance: random.Random) -> None:
        number = 0
        while not self._stop.wait(chance.uniform(0.2, 1.5)):
            number += 1
            path = f"clone-{number}"
            floor = self.ledger.floor([key_of(each) for each in range(KEYS)])
            # An admin's checkpoint contains the WAL up to the end in the writer's last manifest.
            Admin("db", store=self.store).clone(path)
            with open_database(path, store=self.store, settings=SETTINGS) as db:
                found = dict(db.scan())
                for key in floor:
                    self.ledger.check(key, found.get(key), 0)
                for each in range(50):
                    db.put(b"own/%d" % each, b"x" * 300)
                db.flush("memtable")
                time.sleep(chance.uniform(0, 1.0))
                again = dict(db.scan())
                assert {key: value for key, value in again.items() if key.startswith(b"key/")} == found
                assert len(again) == len(found) + 50
            admin = Admin(path, store=self.store)
            self._count(admin.collect_garbage(min_age=MIN_AGE))
            assert (report := admin.verify()).ok, report
            self.counts["clones"] += 1
            if chance.random() < 0.5:
                # Its own compactions hold checkpoints of it for two more seconds.
                admin.destroy(soft=True, grace=timedelta(0))
                self._wait_until_gone(admin)
                self.counts["destroyed clones"] += 1

    def _wait_until_gone(self, admin: Admin) -> None:
        for _ in range(200):
            if "destroyed" in admin.collect_garbage(min_age=MIN_AGE).kinds:
                return
            time.sleep(0.05)
        raise AssertionError("a destroyed clone stays for ever")

    def _audit(self, chance: random.Random) -> None:
        paths = DbPaths("db")
        while not self._stop.wait(chance.uniform(0, 0.2)):
            before = self._needed()
            # Read first: a round that ends during the listing may write its boundary behind the listing.
            rounds = self.counts["outside rounds"]
            present = {meta.path for meta in self.store.list("db")}
            # Needed before and after the listing means needed all the time: a released object is never needed again.
            missing = (before - present) & self._needed()
            assert not missing, f"missing: {sorted(missing)}"
            assert paths.boundary("manifest") in present or not rounds
            self.counts["audits"] += 1
            self.most_objects = max(self.most_objects, len(present))

    def _needed(self) -> set[str]:
        """Every object that the latest manifest and its checkpoints refer to."""
        paths = DbPaths("db")
        manifests = ManifestStore(self.store, paths)
        latest = manifests.require_latest()
        needed = {paths.manifest(ManifestId(latest.id))}
        reached = [latest.value]
        for checkpoint in latest.value.checkpoints:
            needed.add(paths.manifest(checkpoint.manifest_id))
            with suppress(ObjectMissing):  # the caller finds it missing, if it is still needed afterwards
                saved = manifests.load(checkpoint.manifest_id)
                reached.append(saved)
                last = saved.wal_id_last_seen
                needed |= {
                    paths.wal(WalId(wal_id)) for wal_id in range(saved.replay_after_wal_id + 1, last + 1)
                }
        last = latest.value.wal_id_last_seen
        needed |= {
            paths.wal(WalId(wal_id)) for wal_id in range(latest.value.replay_after_wal_id + 1, last + 1)
        }
        return needed | {paths.sst(sst_id) for manifest in reached for sst_id in manifest.ssts}

    # -- the end ------------------------------------------------------------------------------------------

    def settle(self) -> dict[str, int]:
        """Collect until nothing is left to collect; returns the objects by folder that remain."""
        with open_database("db", store=self.store, settings=SETTINGS) as db:
            self._check_all(db)
            db.put(b"last", b"x")
            db.flush("memtable")
        admin = Admin("db", store=self.store)
        time.sleep(3.1)  # the longest life of a checkpoint here
        for _ in range(3):
            report = admin.collect_garbage(min_age=timedelta())
            assert report.ok, report.errors
        assert (audit := admin.verify()).ok, audit
        paths = DbPaths("db")
        manifests = ManifestStore(self.store, paths)
        latest = manifests.require_latest()
        saved = {checkpoint.manifest_id for checkpoint in latest.value.checkpoints} - {latest.id}
        reached = [latest.value, *(manifests.load(version) for version in saved)]
        in_use = {sst_id for manifest in reached for sst_id in manifest.ssts}
        files = {paths.parse_wal(meta.path): meta.size for meta in self.store.list(paths.wal_folder)}
        needed = set(range(latest.value.replay_after_wal_id, max(filter(None, files)) + 1))
        for manifest in reached[1:]:
            needed |= set(range(manifest.replay_after_wal_id + 1, manifest.wal_id_last_seen + 1))
        return {
            "tables": sum(1 for _ in self.store.list(paths.sst_folder)),
            "unused tables": sum(
                paths.parse_sst(meta.path) not in in_use for meta in self.store.list(paths.sst_folder)
            ),
            "unused manifests": len(manifests.list()) - len(reached),
            "compactions files": sum(1 for _ in self.store.list(paths.compactions_folder)),
            "unused WAL files": sum(1 for wal_id, size in files.items() if size and wal_id not in needed),
            "fences": sum(1 for size in files.values() if not size),
        }
