"""After our garbage collection the official wheel reads all its rows, at every checkpoint, and continues writing."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import flagstone
from flagstone import Admin
from flagstone.clones.checkpoint import delete_checkpoint
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from golden.corpus import DATA, GoldenDatabase, databases
from kit.databases import QUIET

NOW = timedelta()
CASES = sorted({database.store for database in databases()})


def decoded(pairs: dict[str, str]) -> dict[bytes, bytes]:
    return {bytes.fromhex(key): bytes.fromhex(value) for key, value in pairs.items()}


def copied(database: GoldenDatabase, to: Path) -> tuple[Path, Path | None]:
    """The whole case, because clones share a store with their parents; returns its store and its WAL store."""
    case = database.store.parent if database.wal_store else database.store
    if not to.exists():
        shutil.copytree(case, to)
    moved = to / database.store.relative_to(case)
    return moved, None if database.wal_store is None else to / database.wal_store.relative_to(case)


def collect(database: GoldenDatabase, store: Path, wal_store: Path | None) -> None:
    admin = Admin(database.path, store=store, wal_store=wal_store)
    for _ in range(2):
        report = admin.collect_garbage(min_age=NOW)
        assert report.ok, report.errors
    report = admin.collect_garbage(kinds=["wal_fence"], min_age=NOW)
    assert report.ok, report.errors


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.relative_to(DATA)))
def test_the_wheel_reads_golden_databases_after_our_collection(
    wheel: Any, tmp_path: Path, case: Path
) -> None:
    members = [database for database in databases() if database.store == case]
    for database in members:
        store, wal_store = copied(database, tmp_path / "case")
        collect(database, store, wal_store)
    for database in members:
        store, wal_store = copied(database, tmp_path / "case")
        wal_folder = None if wal_store is None else str(wal_store)
        expected = decoded(database.expected["kv"])
        if database.name == "segments":
            assert wheel.apply(str(store), database.path, [], segments=True) == expected
        else:
            assert wheel.scan(str(store), database.path, wal_folder=wal_folder) == expected
        left = {
            str(checkpoint.id)
            for checkpoint in ManifestStore(LocalStore(store), DbPaths(database.path))
            .require_latest()
            .value.checkpoints
        }
        for checkpoint, pairs in database.expected.get("checkpoint_kv", {}).items():
            if checkpoint in left:
                assert wheel.scan(str(store), database.path, checkpoint=checkpoint) == decoded(pairs)
        report = Admin(database.path, store=store, wal_store=wal_store).verify()
        assert report.ok, report


@pytest.mark.slow
def test_the_wheel_keeps_writing_between_our_collections(wheel: Any, tmp_path: Path) -> None:
    folder, paths = str(tmp_path), DbPaths("db")
    store = LocalStore(tmp_path)
    manifests, admin = ManifestStore(store, paths), Admin("db", store=store)
    expected: dict[bytes, bytes] = {}
    boundaries = []
    for turn in range(4):
        rows = {b"%d/%02d" % (turn % 2, number): b"%d" % turn for number in range(30)}
        expected |= rows
        operations: list[tuple[Any, ...]] = [("put", key, value) for key, value in rows.items()]
        assert wheel.apply(folder, "db", [*operations, ("flush", "memtable")]) == expected
        if turn == 1:
            kept, _ = wheel.create_checkpoint(folder, "db", name="kept")
            at_checkpoint = dict(expected)
        assert wheel.compact_everything(folder, "db") == expected
        report = admin.collect_garbage(min_age=NOW)
        assert report.ok, report.errors
        boundaries.append(manifests.read_boundary())
        assert wheel.scan(folder, "db") == expected
    assert boundaries == sorted(set(boundaries))
    assert boundaries[0] > 0
    assert wheel.scan(folder, "db", checkpoint=kept) == at_checkpoint
    with flagstone.open("db", store=store, settings=QUIET) as db:
        assert dict(db.scan()) == expected
        db.put(b"ours", b"1")
    assert wheel.apply(folder, "db", [("put", b"theirs", b"2")]) == {
        **expected,
        b"ours": b"1",
        b"theirs": b"2",
    }
    assert admin.verify().ok


def test_a_collection_leaves_exactly_the_objects_that_manifests_and_checkpoints_need(
    wheel: Any, tmp_path: Path
) -> None:
    """One manifest, one compactions file, the WAL files that replay needs, and the SSTs of the manifest."""
    folder, store, paths = str(tmp_path), LocalStore(tmp_path), DbPaths("db")
    operations: list[tuple[Any, ...]] = []
    for number in range(40):
        operations.append(("put", b"%03d" % number, b"x" * 50))
        if number % 20 == 19:  # fewer SSTs than the wheel's scheduler compacts
            operations.append(("flush", "memtable"))
    wheel.apply(folder, "db", operations)
    expected = wheel.compact_everything(folder, "db")
    manifests = ManifestStore(store, paths)
    for checkpoint in manifests.require_latest().value.checkpoints:
        delete_checkpoint(manifests, checkpoint.id)
    admin = Admin("db", store=store)
    report = admin.collect_garbage(min_age=NOW)
    assert report.ok, report.errors
    admin.collect_garbage(min_age=NOW)
    latest = manifests.require_latest()
    assert [entry.id for entry in manifests.list()] == [latest.id]
    assert len(CompactionsStore(store, paths).list()) == 1
    ssts = {paths.parse_sst(meta.path) for meta in store.list(paths.sst_folder)}
    assert ssts == set(latest.value.ssts)
    wal_ids = [paths.parse_wal(meta.path) for meta in store.list(paths.wal_folder) if meta.size]
    assert all(wal_id is not None and wal_id >= latest.value.replay_after_wal_id for wal_id in wal_ids)
    assert wheel.scan(folder, "db") == expected


def test_a_compacted_clone_of_the_wheel_is_detached_from_its_lender(wheel: Any, tmp_path: Path) -> None:
    folder, store = str(tmp_path), LocalStore(tmp_path)
    rows: list[tuple[Any, ...]] = [("put", b"%03d" % number, b"x") for number in range(20)]
    expected = wheel.apply(folder, "parent", [*rows, ("flush", "memtable")])
    wheel.clone(folder, "child", [("parent", None, None)])
    assert wheel.scan(folder, "child") == expected
    # The lender replaces its SSTs, but its collector must not delete those that the clone uses.
    wheel.apply(folder, "parent", [("delete", key) for _, key, _ in rows] + [("flush", "memtable")])
    wheel.compact_everything(folder, "parent")
    for _ in range(2):
        assert Admin("parent", store=store).collect_garbage(min_age=NOW).ok
    assert wheel.scan(folder, "child") == expected
    # The clone compacts everything into its own SSTs, and then needs no SST of the lender.
    assert wheel.compact_everything(folder, "child") == expected
    child = ManifestStore(store, DbPaths("child"))
    for checkpoint in child.require_latest().value.checkpoints:
        delete_checkpoint(child, checkpoint.id)
    report = Admin("child", store=store).collect_garbage(min_age=NOW)
    assert report.of("detach").paths == ["parent"], report.to_dict()
    assert child.require_latest().value.external_dbs == ()
    assert wheel.apply(folder, "child", [("put", b"new", b"1")]) == {**expected, b"new": b"1"}
