"""Verification beside processes that never stop: what they release during a walk is no damage."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID

import flagstone
from flagstone import Admin
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectMeta
from kit.databases import QUIET

WALKS = 3


class BusyStore(MemoryStore):
    """Deletes an SST of a checkpoint in the first walk, and creates a manifest in each.

    If it `releases`, it deletes the checkpoints in the last walk, as if the SST had been collected after them.
    """

    walks = 0
    releases = True

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        found = [*super().list(prefix, after=after)]
        if prefix == "db/compacted" and 0 < self.walks <= WALKS:
            walk, self.walks = self.walks, 0
            admin = Admin("db", store=self)
            if walk == 1:
                self.delete(found[0].path)
            if walk == WALKS and self.releases:
                for checkpoint in admin.checkpoints():
                    admin.delete_checkpoint(checkpoint.id, force=True)
            admin.create_checkpoint()
            self.walks = walk + 1
        return iter(found)


def make_database() -> BusyStore:
    """A database whose first SST only a checkpoint refers to."""
    store = BusyStore()
    admin = Admin("db", store=store)
    with flagstone.open("db", store=store, settings=QUIET) as db:
        db.put(b"a", b"1")
        db.flush()
        admin.create_checkpoint()
        db.put(b"b", b"2")
        db.flush()
    admin.compact(full=True)
    assert admin.verify().ok
    return store


def test_an_sst_whose_last_checkpoint_is_deleted_during_the_walk_is_no_damage() -> None:
    store = make_database()
    store.walks = 1

    report = Admin("db", store=store).verify()

    assert store.walks == WALKS + 1
    assert report.ok, report.findings


def test_a_missing_sst_of_a_checkpoint_is_damage_however_busy_the_database_is() -> None:
    store = make_database()
    store.walks, store.releases = 1, False

    report = Admin("db", store=store).verify()

    assert store.walks == WALKS + 1
    assert not report.ok


class RestoredStore(MemoryStore):
    """Before each listing of the WAL the database is restored, and a new writer writes after the skipped number."""

    checkpoint: UUID | None = None

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectMeta]:
        if prefix == "db/wal" and (checkpoint := self.checkpoint) is not None:
            self.checkpoint = None
            Admin("db", store=self).restore(checkpoint)
            with flagstone.open("db", store=self, settings=QUIET) as db:
                db.put(b"later", b"1", await_durable=True)
            self.checkpoint = checkpoint
        return super().list(prefix, after=after)


def test_numbers_that_a_restore_skips_during_the_walk_are_no_damage() -> None:
    store = RestoredStore()
    with flagstone.open("db", store=store, settings=QUIET) as db:
        db.put(b"a", b"1", await_durable=True)
        checkpoint = Admin("db", store=store).create_checkpoint().id
        db.put(b"b", b"2", await_durable=True)
    store.checkpoint = checkpoint
    report = Admin("db", store=store).verify()
    store.checkpoint = None
    assert report.damage == []
