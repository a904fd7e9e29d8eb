"""An open database that collects its own garbage, and what happens when it cannot; and the end of destroyed ones."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from flagstone import Admin
from flagstone.config import GarbageCollectorOptions, Settings
from flagstone.config.settings import GcDetachOptions, GcDirectoryOptions, GcFenceOptions
from flagstone.db.open import open_database
from flagstone.errors import Closed, InvalidRequest
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.testing.faults import Fault, FaultyStore
from flagstone.types import WalId
from kit.databases import QUIET, eventually

SOON = timedelta(milliseconds=20)
EAGER = GcDirectoryOptions(interval=SOON, min_age=timedelta())
SETTINGS = Settings(
    flush_interval=timedelta(milliseconds=1),
    compactor_options=None,
    garbage_collector_options=GarbageCollectorOptions(
        manifest_options=EAGER,
        wal_options=EAGER,
        compacted_options=EAGER,
        compactions_options=EAGER,
        wal_fence_options=None,
        detach_options=GcDetachOptions(interval=SOON),
    ),
)
PATHS = DbPaths("db")


def test_an_open_database_collects_its_own_garbage() -> None:
    store = MemoryStore()
    with open_database("db", store=store, settings=SETTINGS) as db:
        for number in range(5):
            db.put(b"k", b"%d" % number, await_durable=True)
            db.flush("memtable")
        manifests = ManifestStore(store, PATHS)
        eventually(lambda: len(manifests.list()) == 1)
        eventually(lambda: sum(1 for meta in store.list(PATHS.wal_folder) if meta.size) <= 2)
        status: dict[str, Any] = db.status()["garbage_collector"]
        assert status["rounds"] > 0
        assert status["failure"] is None
        assert db.get(b"k") == b"4"
    assert Admin("db", store=store).verify().ok


def test_a_disabled_collector_deletes_nothing() -> None:
    with open_database(
        "db", store=MemoryStore(), settings=SETTINGS.replace(garbage_collector_options=None)
    ) as db:
        assert db.status()["garbage_collector"] is None


def test_a_failing_collector_shows_in_the_status_and_writes_continue() -> None:
    store = FaultyStore(MemoryStore())
    with open_database("db", store=store, settings=SETTINGS) as db:
        store.faults.append(Fault("error", nth=None, op="delete_many"))
        for number in range(3):
            db.put(b"k", b"%d" % number)
            db.flush("memtable")
        # The store is asked for a minute before it counts as failed; that the round is under way is enough here.
        db.put(b"after", b"x", await_durable=True)
        assert db.get(b"after") == b"x"
        assert db.status()["state"] == "open"
        store.faults.clear()
        eventually(lambda: len(ManifestStore(store.inner, PATHS).list()) == 1)


def test_a_stalled_writer_whose_fence_was_collected_acknowledges_nothing() -> None:
    """The whole hazard, with real parts: replaced, flushed past, fence collected, and then it wakes up."""
    store = MemoryStore()
    fences = GarbageCollectorOptions(wal_fence_options=GcFenceOptions(dry_run=False))
    settings = Settings(
        flush_interval=None,
        compactor_options=None,
        garbage_collector_options=fences,
        manifest_poll_interval="1000s",
    )
    sleeper = open_database("db", store=store, settings=settings)
    sleeper.put(b"k", b"1", await_durable=True)
    with open_database("db", store=store, settings=settings) as rival:
        rival.put(b"k", b"2", await_durable=True)
        rival.flush("memtable")
        rival.put(b"k", b"3", await_durable=True)
        rival.flush("memtable")
        for meta in list(store.list(PATHS.wal_folder)):
            # As a collector does with fences and files that are old enough.
            wal_id = PATHS.parse_wal(meta.path)
            assert wal_id is not None
            if wal_id < ManifestStore(store, PATHS).require_latest().value.replay_after_wal_id:
                store.delete(meta.path)
        free = PATHS.wal(WalId(3))
        assert free not in {meta.path for meta in store.list(PATHS.wal_folder)}, "the sleeper's next file"

        with pytest.raises(Closed) as refused:
            sleeper.put(b"k", b"lost", await_durable=True)
        assert refused.value.reason == "fenced"
        assert free in {meta.path for meta in store.list(PATHS.wal_folder)}, (
            "it was created, and did not count"
        )
        assert rival.get(b"k") == b"3"
    sleeper.close()
    with open_database("db", store=store, settings=settings) as db:
        assert db.get(b"k") == b"3"


def test_a_softly_destroyed_database_is_deleted_when_its_grace_is_over() -> None:
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    with open_database("db", store=store, settings=QUIET) as db:
        db.put(b"k", b"v")
    admin = Admin("db", store=store, clock=clock)
    admin.destroy(soft=True, grace=timedelta(hours=1))
    assert "destroyed" not in admin.collect_garbage(min_age=timedelta()).kinds
    assert [*store.list("db")]
    clock.advance(3_600_001)
    dry = admin.collect_garbage(dry_run=True)
    assert dry.of("destroyed").deleted > 0
    assert dry.deleted == 0
    report = admin.collect_garbage()
    assert report.of("destroyed").paths == dry.of("destroyed").paths
    assert report.gone
    residue = [
        *store.list("db")
    ]  # a manifest, its boundary, and the fences with the WAL file before each, emptied
    assert len(residue) == 5
    assert sum(meta.size for meta in residue) < 1_000
    with pytest.raises(InvalidRequest, match="no database"):
        admin.collect_garbage()
