"""Restoring a checkpoint: its rows come back under new ids, epochs and sequence numbers."""

from __future__ import annotations

from datetime import timedelta

import pytest

from flagstone import Closed, InvalidRequest
from flagstone.clones.restore import restore
from flagstone.db.reader.reader import open_reader
from flagstone.db.writer.database import Db
from flagstone.format.filter import FixedPrefix
from flagstone.metadata.compactions import Compactions, Job, JobStatus, TieredSpec
from flagstone.metadata.fencing import claim_compactions, claim_compactor
from flagstone.metadata.manifest import apply_compaction
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.testing.faults import Crashed, Fault, FaultyStore
from flagstone.types import RunId
from kit.databases import World, numbered
from kit.faults import InterposingStore

pytestmark = pytest.mark.slow


@pytest.fixture(params=["one store", "WAL apart"])
def world(request: pytest.FixtureRequest) -> World:
    return World(wal_store=None if request.param == "one store" else MemoryStore())


def test_a_restored_database_has_the_rows_of_the_checkpoint(world: World) -> None:
    world.write("p", numbered(0, 10))
    db = world.open("p")
    db.put(b"logged", b"1", await_durable=True)
    db.delete(b"k009")
    db.flush("wal")
    kept = db.checkpoint(scope="durable", name="then")
    expected = world.scan("p", kept.id)
    db.put(b"k001", b"later")
    db.flush()
    db.put(b"lost", b"1", await_durable=True)
    before = world.admin("p").manifest().value

    restored = world.admin("p").restore(str(kept.id)).value

    assert expected == numbered(0, 9) | {b"logged": b"1"}
    assert world.scan("p") == expected
    assert restored.last_l0_seq > before.last_l0_seq  # the WAL has rows that are not in SSTs
    assert restored.replay_after_wal_id == restored.wal_id_last_seen > before.wal_id_last_seen
    assert restored.writer_epoch == before.writer_epoch + 1
    assert restored.checkpoints == before.checkpoints
    with pytest.raises(Closed):
        db.put(b"zombie", b"1", await_durable=True)
    db.close()
    assert world.scan("p") == expected
    world.write("p", {b"k001": b"new"})
    assert world.scan("p") == expected | {b"k001": b"new"}
    assert world.admin("p").verify().ok


def test_a_newer_checkpoint_can_be_restored_after_an_older_one(world: World) -> None:
    world.write("p", numbered(0, 5))
    first = world.admin("p").create_checkpoint()
    world.write("p", numbered(0, 5, b"w"))
    second = world.admin("p").create_checkpoint()

    for kept, value in ((first, b"v"), (second, b"w"), (first, b"v"), (first, b"v")):
        world.admin("p").restore(kept.id)
        assert world.scan("p") == numbered(0, 5, value)
        world.clock.advance(1_000)
    world.write("p", {b"k000": b"last"})
    assert world.scan("p") == numbered(0, 5) | {b"k000": b"last"}
    assert world.admin("p").verify().ok


def test_restoring_a_state_before_a_compaction_fails_the_running_jobs(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.write("p", numbered(0, 5, b"w"))
    kept = world.admin("p").create_checkpoint()
    manifests = ManifestStore(world.store, DbPaths("p"), clock=world.clock, ids=world.ids)
    compactions = CompactionsStore(world.store, DbPaths("p"), clock=world.clock, ids=world.ids)
    fence, claimed = claim_compactor(manifests)
    claim_compactions(compactions, fence)
    l0 = tuple(view.id for view in claimed.value.tree.l0)
    newest = claimed.value.sst(claimed.value.tree.l0[0])
    manifests.update(
        lambda now: apply_compaction(
            now.value, segment=b"", l0=l0, runs=(), destination=RunId(0), output=(newest,)
        )
    )
    job = Job(world.ids.ulid(), TieredSpec((), (RunId(0),), RunId(0)), JobStatus.RUNNING)
    compactions.update(lambda now: Compactions(now.value.compactor_epoch, (job,)))

    world.admin("p").restore(kept.id)

    after = manifests.require_latest().value
    assert [view.id for view in after.tree.l0] == list(l0)
    assert after.tree.runs == ()
    assert [held.status for held in compactions.require_latest().value.jobs] == [JobStatus.FAILED]
    with pytest.raises(Closed):
        manifests.update(fence.guard(lambda now: now.value))
    assert world.scan("p") == numbered(0, 5, b"w")
    world.write("p", {b"k000": b"x"})
    assert world.scan("p") == numbered(0, 5, b"w") | {b"k000": b"x"}
    assert world.admin("p").verify().ok


def test_an_open_reader_sees_the_restored_state_after_a_refresh(world: World) -> None:
    world.write("p", numbered(0, 5))
    kept = world.admin("p").create_checkpoint()
    db = world.open("p")
    db.put(b"gone", b"1", await_durable=True)
    with open_reader("p", store=world.store, wal_store=world.wal_store, clock=world.clock) as reader:
        assert reader.get(b"gone") == b"1"

        world.admin("p").restore(kept.id)
        reader.refresh()

        assert dict(reader.scan()) == numbered(0, 5)
    with pytest.raises(Closed):
        db.close()


def test_a_restored_clone_borrows_the_ssts_of_its_checkpoint_again(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.admin("p").clone("c")
    kept = world.admin("c").create_checkpoint()
    manifests = ManifestStore(world.store, DbPaths("c"), clock=world.clock)
    world.write("c", numbered(0, 5, b"own"))
    manifests.update(
        lambda now: apply_compaction(
            now.value,
            segment=b"",
            l0=[view.id for view in now.value.tree.l0],
            runs=(),
            destination=RunId(0),
            output=(now.value.sst(now.value.tree.l0[0]),),
        )
    )
    assert manifests.require_latest().value.external_dbs[0].sst_ids == ()

    world.admin("c").restore(kept.id)

    assert world.scan("c") == numbered(0, 5)
    assert manifests.require_latest().value.external_dbs[0].sst_ids != ()


def test_restoring_wal_rows_of_a_new_segment_needs_the_segment_extractor(world: World) -> None:
    extractor = FixedPrefix("first3", 3)
    world.write("p", {b"aaa1": b"1"}, segment_extractor=extractor)
    db = world.open("p", segment_extractor=extractor)
    db.put(b"aaa2", b"2")
    db.put(b"bbb1", b"1", await_durable=True)
    kept = world.admin("p").create_checkpoint()
    before = world.objects()

    with pytest.raises(InvalidRequest, match="segment_extractor 'first3'"):
        world.admin("p").restore(kept.id)
    assert world.objects() == before
    world.admin("p").restore(kept.id, segment_extractor=extractor)
    with pytest.raises(Closed):
        db.close()

    assert world.scan("p") == {b"aaa1": b"1", b"aaa2": b"2", b"bbb1": b"1"}
    world.admin("p").restore(kept.id)  # now the manifest has its segment
    assert world.scan("p") == {b"aaa1": b"1", b"aaa2": b"2", b"bbb1": b"1"}


@pytest.mark.parametrize("effect", ["crash", "crash_after"])
def test_a_crash_during_a_restore_leaves_the_old_state_or_the_restored_one(effect: str) -> None:
    nth = 0
    crashed = True
    while crashed:
        nth += 1
        world = World()
        world.write("p", numbered(0, 5))
        with world.open("p") as db:
            db.put(b"logged", b"1", await_durable=True)
            kept = db.checkpoint(scope="durable")
            db.put(b"later", b"1")
        dying = FaultyStore(world.store, [Fault(effect, nth=nth)])  # type: ignore[arg-type]
        try:
            restore(dying, DbPaths("p"), kept.id, wal_store=dying, clock=world.clock, ids=world.ids)
            crashed = False
        except Crashed:
            pass
        state = numbered(0, 5) | {b"logged": b"1"}
        assert world.scan("p") in (state, state | {b"later": b"1"})

        world.admin("p").restore(kept.id)

        world.write("p", {b"k000": b"x"})
        assert world.scan("p") == state | {b"k000": b"x"}
        assert world.admin("p").verify().ok
    assert nth > 15


def test_a_writer_that_opens_the_database_during_a_restore_stops_the_restore(world: World) -> None:
    world.write("p", numbered(0, 5))
    kept = world.admin("p").create_checkpoint()
    opened: list[Db] = []
    wal_store = InterposingStore(
        world.wal_store or world.store,
        lambda: opened.append(world.open("p")),
        op="put_if_absent",
        path="*/wal/*",
    )
    with pytest.raises(Closed):
        restore(
            world.store,
            DbPaths("p"),
            kept.id,
            wal_store=wal_store,
            clock=world.clock,
            ids=world.ids,
        )
    opened[0].put(b"mine", b"1", await_durable=True)
    opened[0].close()
    assert world.scan("p") == numbered(0, 5) | {b"mine": b"1"}


def test_a_restore_does_not_stop_a_writer_that_opened_the_database_after_its_claim(world: World) -> None:
    world.write("p", numbered(0, 5))
    kept = world.admin("p").create_checkpoint()
    opened: list[Db] = []

    def write() -> None:
        opened.append(world.open("p"))
        opened[0].put(b"mine", b"1", await_durable=True)

    store = InterposingStore(world.store, write, op="put_if_absent", path="*/manifest/*", nth=2, after=True)
    with pytest.raises(Closed):
        restore(
            store,
            DbPaths("p"),
            kept.id,
            wal_store=world.wal_store or world.store,
            clock=world.clock,
            ids=world.ids,
        )
    opened[0].put(b"later", b"2", await_durable=True)
    opened[0].close()
    assert world.scan("p") == numbered(0, 5) | {b"mine": b"1", b"later": b"2"}


def test_a_checkpoint_that_expires_during_its_restore_is_not_restored(world: World) -> None:
    world.write("p", numbered(0, 5))
    kept = world.admin("p").create_checkpoint(lifetime=timedelta(seconds=10))
    world.write("p", numbered(0, 5, b"w"))
    slow = FaultyStore(
        world.store, [Fault("slow", op="put_if_absent", path="p/manifest/*", delay_s=20)], clock=world.clock
    )

    with pytest.raises(InvalidRequest, match="expired"):
        restore(
            slow,
            DbPaths("p"),
            kept.id,
            wal_store=world.wal_store or slow,
            clock=world.clock,
            ids=world.ids,
        )
    assert world.scan("p") == numbered(0, 5, b"w")
