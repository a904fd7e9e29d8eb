"""Databases are found below a prefix by their manifests, with a few listings for each."""

from __future__ import annotations

from flagstone import Admin
from flagstone.cli.connection import find_databases
from flagstone.db.open import open_database
from flagstone.store.memory import MemoryStore
from flagstone.testing.faults import FaultyStore
from kit.databases import QUIET


def filled(*paths: str) -> MemoryStore:
    store = MemoryStore()
    for path in paths:
        with open_database(path, store=store, settings=QUIET) as db:
            for number in range(3):
                db.put(b"%d" % number, b"v", await_durable=True)
            db.flush()
    return store


def test_all_databases_below_a_prefix_are_found_once() -> None:
    paths = ["a", "a/nested", "b/c/d", "b/c/e", "manifest", "wal/manifest"]
    store = filled(*paths)
    store.put("b/c/notes.txt", b"")
    store.put("b/c/d/manifest/~foreign", b"")
    store.put("b/c/d/manifest/notes.txt", b"")
    store.put("x/manifest/00000000000000000001.txt", b"")
    assert sorted(find_databases(store)) == sorted(paths)
    assert sorted(find_databases(store, "b")) == ["b/c/d", "b/c/e"]
    assert list(find_databases(store, "nothing")) == []


def test_finding_databases_takes_as_many_requests_for_many_objects_as_for_few() -> None:
    store = filled("a", "b")
    for number in range(500):
        store.put(f"a/compacted/{number:026d}.sst", b"")
    counted = FaultyStore(store)
    assert list(find_databases(counted)) == ["a", "b"]
    assert len(counted.calls) <= 2 * 6 + 1


def test_a_path_whose_database_was_destroyed_is_found_until_it_is_purged() -> None:
    store = filled("a", "b")
    Admin("a", store=store).destroy()
    assert list(find_databases(store)) == ["a", "b"]
