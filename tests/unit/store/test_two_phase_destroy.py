"""Destroying a database on a two-phase store deletes its records and temporaries and frees its path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from flagstone import Admin, InvalidRequest
from flagstone.db.open import open_database
from flagstone.db.reader.feed import open_feed
from flagstone.errors import Unavailable
from flagstone.metadata.boundary import Boundary
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.commit_log import CommitRecord, RecordState
from flagstone.store.commit_log.sqlite import SqliteCommitLog
from flagstone.store.intents import Intents, checksum, staged_destination
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectExists, ObjectMissing
from flagstone.store.two_phase import TwoPhaseStore
from flagstone.testing.faults import Crashed, Fault, FaultyStore
from kit.databases import QUIET


class Rig:
    def __init__(self, folder: Path) -> None:
        self.base = MemoryStore()
        self.log = SqliteCommitLog(folder / "commits.db", synchronous="OFF")
        self.store = TwoPhaseStore(self.base, self.log)

    def write(self, path: str, *keys: bytes) -> None:
        with open_database(path, store=self.store, settings=QUIET) as db:
            for key in keys:
                db.put(key, b"v", await_durable=True)
            db.flush()

    def keys(self, path: str) -> list[bytes]:
        with open_database(path, store=self.store, settings=QUIET, create=False) as db:
            return [key for key, _ in db.scan()]

    def records(self, path: str) -> list[CommitRecord]:
        return [*self.log.records(path)]

    def temporaries(self, path: str) -> list[str]:
        """Staged objects that no committed record reads from."""
        read = {record.source for record in self.records(path) if record.state is RecordState.COMMITTED}
        found = [meta.path for meta in self.base.list(path)]
        return [name for name in found if staged_destination(name) is not None and name not in read]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.log.close()


def test_destroy_deletes_the_records_and_temporaries_of_the_database(rig: Rig) -> None:
    rig.write("db", b"a", b"b")
    rig.write("db/nested", b"n")
    rig.write("neighbour", b"n")
    with open_feed("db", "consumer", store=rig.store) as feed:
        feed.close()
    admin = Admin("db", store=rig.store)
    for entry in admin.checkpoints():
        admin.delete_checkpoint(entry.id)
    Intents(rig.base, rig.log, ids=SYSTEM_IDS, clock=rig.store._clock).stage(
        "db/wal/00000000000000000001.sst", b"x"
    )
    assert rig.temporaries("db")
    nested, neighbours = rig.records("db/nested"), rig.records("neighbour")

    done = admin.destroy()

    own = [record for record in rig.records("db") if not record.destination.startswith("db/nested/")]
    assert {record.destination for record in own} <= set(done.kept)
    assert all(record.state is RecordState.COMMITTED for record in own)
    assert rig.temporaries("db") == []
    assert (rig.records("db/nested"), rig.records("neighbour")) == (nested, neighbours)
    assert rig.keys("db/nested") == [b"n"]


def test_one_path_can_have_many_databases_one_after_the_other(rig: Rig) -> None:
    for number in range(3):
        rig.write("db", b"%d" % number)
        assert rig.keys("db") == [b"%d" % number]
        with open_feed("db", "consumer", store=rig.store) as feed:
            assert feed.snapshot is not None
        admin = Admin("db", store=rig.store)
        for entry in admin.checkpoints():
            admin.delete_checkpoint(entry.id)
        admin.destroy()
        with pytest.raises(InvalidRequest, match="no database"):
            rig.keys("db")


def test_a_purge_leaves_no_record(rig: Rig) -> None:
    rig.write("db", b"a")
    admin = Admin("db", store=rig.store)
    admin.destroy()
    admin.purge(min_age=timedelta())
    assert rig.records("db") == []
    assert [*rig.base.list("db")] == []
    rig.write("db", b"a")


@pytest.mark.slow
@pytest.mark.parametrize("effect", ["crash", "crash_after"])
def test_a_crashed_destruction_is_completed_on_a_two_phase_store(tmp_path: Path, effect: Any) -> None:
    for nth in range(1, 80, 9):
        (tmp_path / str(nth)).mkdir()
        rig = Rig(tmp_path / str(nth))
        rig.write("db", b"a")
        dying = FaultyStore(rig.store, [Fault(effect, nth=nth)])
        try:
            Admin("db", store=dying).destroy()
        except Crashed:
            with suppress(InvalidRequest):  # it was complete
                Admin("db", store=rig.store).destroy()
        assert rig.temporaries("db") == []
        assert {record.state for record in rig.records("db")} == {RecordState.COMMITTED}
        rig.write("db", b"b")
        assert rig.keys("db") == [b"b"]
        rig.log.close()


def test_an_intent_whose_temporary_is_gone_does_not_break_a_listing(rig: Rig) -> None:
    rig.store.put("f/1", b"1")
    source = f"f/2.{SYSTEM_IDS.uuid()}.{checksum(b'2')}"
    rig.log.insert(CommitRecord("f/2", source, 1, RecordState.PENDING, 0))
    assert [meta.path for meta in rig.store.list("f")] == ["f/1"]


# -- loops end --------------------------------------------------------------------------------------------


class Contradicting(MemoryStore):
    """Refuses every create because the object exists, and every read because it is missing."""

    def put_if_absent(self, path: str, data: bytes, *, token: str | None = None) -> Any:
        raise ObjectExists(path)

    def get(self, path: str) -> Any:
        raise ObjectMissing(path)


def test_advancing_a_boundary_raises_unavailable_if_the_store_contradicts_itself() -> None:
    with pytest.raises(Unavailable, match="could not be advanced to 7"):
        Boundary(Contradicting(), "db/gc/manifest.boundary").advance(7)


class Restless:
    """A commit log in which another process changes every record after each read."""

    def __init__(self, inner: SqliteCommitLog, state: RecordState) -> None:
        self.inner = inner
        self.state = state
        self.reads = 0

    def find(self, destination: str) -> CommitRecord | None:
        self.reads += 1
        assert self.reads < 10_000, "the call does not end"
        source = f"{destination}.{SYSTEM_IDS.uuid()}.{checksum(b'x')}"
        return CommitRecord(destination, source, self.reads, self.state, 0)

    def replace(self, old: CommitRecord, new: CommitRecord) -> bool:
        return False

    def pending(self, prefix: str) -> list[CommitRecord]:
        return []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("state", [RecordState.COMMITTED, RecordState.PENDING])
@pytest.mark.parametrize("call", ["get", "head", "put", "delete", "delete_many", "put_if_absent"])
def test_every_call_ends_although_its_commit_record_keeps_changing(
    rig: Rig, call: str, state: RecordState
) -> None:
    store = TwoPhaseStore(rig.base, Restless(rig.log, state))
    arguments: tuple[Any, ...] = ("f/1",)
    if call == "delete_many":
        arguments = (["f/1"],)
    elif call.startswith("put"):
        arguments = ("f/1", b"x")
    if call == "put_if_absent":
        rig.base.put("f/1", b"")
        with pytest.raises((Unavailable, ObjectExists)):
            store.put_if_absent(*arguments)
        return
    with pytest.raises(Unavailable, match="try again"):
        getattr(store, call)(*arguments)
