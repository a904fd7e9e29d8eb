"""A request of a fenced process that creates a manifest or a compactions file again, after garbage collection has
deleted it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import flagstone
from flagstone import Admin
from flagstone.metadata.compactions import Compactions, encode_compactions
from flagstone.metadata.integrity import seal_metadata
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.manifest_codec import encode_manifest
from flagstone.metadata.stores import CompactionsStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.types import CompactionsId, ManifestId
from kit.databases import QUIET

PATHS = DbPaths("db")


def make_database() -> tuple[MemoryStore, ManifestId]:
    """A database with a checkpoint, and the id of the manifest that the checkpoint names."""
    store = MemoryStore()
    admin = Admin("db", store=store)
    with flagstone.open("db", store=store, settings=QUIET) as db:
        db.put(b"a", b"1", await_durable=True)
        db.flush()
    kept = admin.create_checkpoint().manifest_id
    with flagstone.open("db", store=store, settings=QUIET) as db:
        db.put(b"b", b"2", await_durable=True)
        db.flush()
    return store, kept


def create(store: MemoryStore, manifest_id: int, manifest: Manifest) -> None:
    path = PATHS.manifest(ManifestId(manifest_id))
    store.put(path, seal_metadata(encode_manifest(manifest), path))


def test_a_manifest_that_came_back_below_the_boundary_is_no_damage() -> None:
    store, kept = make_database()
    admin = Admin("db", store=store)
    newest = admin.manifest().value
    admin.collect_garbage(kinds=["manifest"], min_age="0s")
    assert ManifestId(kept - 1) not in [entry.id for entry in admin.manifests()]

    create(store, kept - 1, newest)

    report = admin.verify()
    assert report.ok, report.findings
    assert [finding.object for finding in report.findings] == [PATHS.manifest(kept)]
    assert "late request" in report.findings[0].problem


def test_a_manifest_that_goes_back_above_the_boundary_is_damage() -> None:
    store, kept = make_database()
    admin = Admin("db", store=store)

    create(store, kept - 1, admin.manifest().value)

    assert not admin.verify().ok


def write_compactions(store: MemoryStore, *epochs: int) -> CompactionsStore:
    """The next compactions files, one for each epoch of a coordinator."""
    compactions = CompactionsStore(store, PATHS)
    if compactions.latest() is None:
        compactions.create_next(Compactions(), None)
    for epoch in epochs:
        compactions.update(lambda now, epoch=epoch: replace(now.value, compactor_epoch=epoch))  # type: ignore[misc]
    return compactions


def create_compactions(store: MemoryStore, compactions_id: int, *, epoch: int) -> None:
    path = PATHS.compactions(CompactionsId(compactions_id))
    store.put(path, seal_metadata(encode_compactions(Compactions(compactor_epoch=epoch)), path))


@pytest.mark.parametrize("later", [(), (5,), (5, 6)])
def test_a_compactions_file_that_came_back_below_the_boundary_is_no_damage(later: tuple[int, ...]) -> None:
    """Also if `later` coordinators have created files since."""
    store, _ = make_database()
    admin = Admin("db", store=store)
    compactions = write_compactions(store, 1, 2, 3, 4)
    admin.collect_garbage(kinds=["compactions"], min_age="0s")
    assert [entry.id for entry in compactions.list()] == [5]
    write_compactions(store, *later)

    create_compactions(store, 4, epoch=9)

    report = admin.verify()
    assert report.ok, report.findings
    noted = [finding for finding in report.findings if "late request" in finding.problem]
    assert [finding.object for finding in noted] == [PATHS.compactions(CompactionsId(5))]


def test_a_compactions_file_that_goes_back_above_the_boundary_is_damage() -> None:
    store, _ = make_database()
    write_compactions(store, 1, 2, 3, 4)

    create_compactions(store, 4, epoch=9)

    damaged = [finding.object for finding in Admin("db", store=store).verify().damage]
    assert damaged == [PATHS.compactions(CompactionsId(5))]
