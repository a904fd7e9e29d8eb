"""Destroying databases: what is refused, what is deleted in which order, and how a crash is completed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest

from flagstone import Closed, InvalidRequest
from flagstone.clones.destroy import Destroyer, Destruction, Verdict, collect_destroyed, plan_destruction
from flagstone.clones.origin import load_destroyed
from flagstone.db.reader.reader import open_reader
from flagstone.metadata.annotations import Destroyed
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.testing.faults import Crashed, Fault, FaultyStore
from flagstone.types import ManifestId
from kit.databases import World, numbered
from kit.faults import InterposingStore

HOUR = timedelta(hours=1)


def collect(world: World, path: str, *, dry_run: bool = False) -> Destruction:
    return collect_destroyed(
        world.store,
        DbPaths(path),
        wal_store=world.wal_store or world.store,
        clock=world.clock,
        ids=world.ids,
        dry_run=dry_run,
    )


def assert_vacant(world: World, path: str) -> None:
    """Only the residue is left: one manifest, the end of the WAL, boundaries, perhaps a compactions file."""
    paths, left = DbPaths(path), set(world.objects(path)) - set(world.objects(f"{path}/nested"))
    wal_store = world.wal_store or world.store
    wal_files = list(wal_store.list(paths.wal_folder))
    assert {meta.size for meta in wal_files} == {0}
    assert len(wal_files) <= 8
    left -= {meta.path for meta in wal_files} | {paths.boundary("manifest"), paths.boundary("compactions")}
    assert len([name for name in left if paths.parse_manifest(name)]) == 1
    assert len([name for name in left if paths.parse_compactions(name)]) <= 1
    assert all(paths.parse_manifest(name) or paths.parse_compactions(name) for name in left), left
    assert sum(len(data) for name, data in world.objects(path).items() if name in left) < 1_000
    with pytest.raises(InvalidRequest, match="no database"):
        world.admin(path).manifest()
    with pytest.raises(InvalidRequest, match="no database"):
        world.open(path, create=False)


# -- hard -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wal_apart", [False, True])
def test_destroy_leaves_only_the_residue_and_a_new_database_begins_empty(wal_apart: bool) -> None:
    world = World(wal_store=MemoryStore() if wal_apart else None)
    world.write("p", numbered(0, 5))
    world.write("p/nested", numbered(0, 5))
    world.write("pq", numbered(0, 5))
    neighbours = world.objects("p/nested") | world.objects("pq")

    report = world.admin("p").destroy()

    assert report.verdict is Verdict.DUE
    assert_vacant(world, "p")
    assert {name: data for name, data in world.objects().items() if name in neighbours} == neighbours
    assert set(report.kept) <= set(world.objects("p")) | {
        meta.path for meta in (world.wal_store or world.store).list("p/wal")
    }
    world.write("p", numbered(5, 6))
    assert world.scan("p") == numbered(5, 6)


def test_live_checkpoints_prevent_a_destruction_and_expired_ones_do_not(world: World) -> None:
    world.write("p", numbered(0, 5))
    admin = world.admin("p")
    admin.create_checkpoint(lifetime=timedelta(seconds=10))
    named = admin.create_checkpoint(name="keep me")
    before = world.objects()

    with pytest.raises(InvalidRequest, match=rf"{named.id} \(keep me\).*the last in 10 s"):
        admin.destroy()
    with pytest.raises(InvalidRequest, match="keep me"):
        admin.destroy(dry_run=True)
    assert world.objects() == before

    admin.delete_checkpoint(named.id)
    world.clock.advance(10_000)
    admin.destroy()
    assert_vacant(world, "p")


def test_a_database_with_clones_can_be_destroyed_only_after_them(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.admin("p").clone("c")
    world.admin("c").clone("d")
    world.clock.advance(300_000)

    with pytest.raises(InvalidRequest, match="live checkpoints"):
        world.admin("p").destroy()
    world.admin("d").destroy()
    world.admin("c").destroy()
    world.admin("p").destroy()

    for path in "dcp":
        assert_vacant(world, path)


def test_a_dry_run_lists_every_object_and_changes_none(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.admin("p").clone("c")
    before = world.objects()

    report = world.admin("c").destroy(dry_run=True)

    assert world.objects() == before
    assert set(report.deleted) == {path for path in before if path.startswith("c/")}
    done = world.admin("c").destroy()
    assert set(report.deleted) <= set(done.deleted) | set(done.kept)
    assert_vacant(world, "c")


def test_files_with_foreign_names_are_not_deleted(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.store.put("p/wal/README", b"mine")
    world.store.put("p/notes.txt", b"mine")

    world.admin("p").destroy()

    assert {"p/wal/README", "p/notes.txt"} <= set(world.objects())


@pytest.mark.slow
@pytest.mark.parametrize("effect", ["crash", "crash_after"])
def test_a_destruction_that_crashes_at_any_call_is_completed_by_repeating_it(effect: str) -> None:
    nth, crashed = 0, True
    while crashed:
        nth += 1
        world = World()
        world.write("p", numbered(0, 5))
        world.admin("p").clone("c")
        world.write("c", numbered(5, 10))
        world.clock.advance(300_000)
        dying = FaultyStore(world.store, [Fault(effect, nth=nth)])  # type: ignore[arg-type]
        destroyer = Destroyer(dying, DbPaths("c"), wal_store=dying, clock=world.clock, ids=world.ids)
        try:
            destroyer.destroy()
            crashed = False
        except Crashed:
            if load_destroyed(world.store, DbPaths("c")) is not None:
                with pytest.raises(InvalidRequest, match="destroyed"):
                    world.open("c")
            with suppress(InvalidRequest):  # it may be complete
                world.admin("c").destroy()
        assert_vacant(world, "c")
        assert not [entry for entry in world.admin("p").checkpoints() if entry.expires_s is None]
        assert world.scan("p") == numbered(0, 5)
    assert nth > 20


def test_a_checkpoint_created_right_before_the_destruction_prevents_it(world: World) -> None:
    world.write("p", numbered(0, 5))

    store = InterposingStore(
        world.store, world.admin("p").create_checkpoint, op="put_if_absent", path="*/manifest/*"
    )
    with pytest.raises(InvalidRequest, match="live checkpoints"):
        Destroyer(store, DbPaths("p"), wal_store=store, clock=world.clock, ids=world.ids).destroy()
    assert world.scan("p") == numbered(0, 5)
    world.write("p", numbered(5, 6))


# -- soft -------------------------------------------------------------------------------------------------


def test_a_softly_destroyed_database_refuses_every_use_and_keeps_its_objects(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.write("q", numbered(5, 9))
    saved = world.admin("p").create_checkpoint()
    db = world.open("p")
    db.put(b"late", b"1", await_durable=True)

    report = world.admin("p").destroy(soft=True, grace=HOUR)

    assert report.due_ms == world.clock.now_ms() + 3_600_000
    with pytest.raises(Closed):
        db.put(b"later", b"1", await_durable=True)
    db.close()
    before = world.objects()
    for call in (
        lambda: world.open("p"),
        lambda: world.open("p", create=False),
        lambda: open_reader("p", store=world.store, clock=world.clock),
        lambda: world.scan("p"),
        lambda: world.admin("p").clone("c"),
        lambda: world.admin("q").clone("p"),
        lambda: world.admin("q").union("u", ["p"]),
        lambda: world.admin("p").create_checkpoint(),
        lambda: world.admin("p").restore(saved.id),
    ):
        with pytest.raises(InvalidRequest, match="destroyed"):
            call()
    assert world.objects() == before
    assert any("compacted" in path for path in before)


def test_collection_deletes_a_destroyed_database_after_its_grace_period_and_its_checkpoints(
    world: World,
) -> None:
    world.write("p", numbered(0, 5))
    world.admin("p").clone("c")
    world.admin("c").create_checkpoint(lifetime=2 * HOUR)
    assert collect(world, "c").verdict is Verdict.ALIVE

    world.admin("c").destroy(soft=True, grace=HOUR)
    first = world.objects("c")
    world.clock.advance(1_000)
    assert world.admin("c").destroy(soft=True, grace=HOUR).due_ms == world.clock.now_ms() + 3_599_000
    assert world.objects("c") == first

    assert collect(world, "c").verdict is Verdict.WAITING
    world.clock.advance(3_600_000)
    assert collect(world, "c").verdict is Verdict.PINNED
    world.clock.advance(3_600_000)
    assert collect(world, "c", dry_run=True).verdict is Verdict.DUE
    assert world.objects("c") == first
    report = collect(world, "c")
    assert report.verdict is Verdict.DUE
    assert_vacant(world, "c")
    assert collect(world, "c").verdict is Verdict.GONE
    assert [entry for entry in world.admin("p").checkpoints() if entry.expires_s is None] == []
    assert world.scan("p") == numbered(0, 5)


def claim_as_slatedb(world: World, path: str, role: str) -> None:
    """Raise an epoch as SlateDB does, which does not know destruction marks."""
    manifests = ManifestStore(world.store, DbPaths(path), check=lambda *_: None)
    manifests.update(lambda now: replace(now.value, **{role: getattr(now.value, role) + 1}))  # type: ignore[arg-type]


def test_a_destroyed_database_that_a_slatedb_writer_opened_is_not_deleted(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.admin("p").destroy(soft=True, grace=HOUR)
    claim_as_slatedb(world, "p", "writer_epoch")
    world.clock.advance(7_200_000)

    assert collect(world, "p").verdict is Verdict.REOPENED
    assert world.objects("p/compacted")
    world.admin("p").destroy(soft=True, grace=HOUR)
    assert collect(world, "p").verdict is Verdict.WAITING
    world.clock.advance(7_200_000)
    assert collect(world, "p").verdict is Verdict.DUE
    assert_vacant(world, "p")


def test_a_slatedb_compactor_that_restarts_does_not_keep_a_destroyed_database(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.admin("p").destroy(soft=True, grace=HOUR)
    claim_as_slatedb(world, "p", "compactor_epoch")
    world.clock.advance(7_200_000)

    assert collect(world, "p").verdict is Verdict.DUE
    assert_vacant(world, "p")


def test_a_hard_destruction_after_a_soft_one_does_not_wait_for_the_grace_period(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.admin("p").destroy(soft=True)

    world.admin("p").destroy()

    assert_vacant(world, "p")


def test_opening_a_database_during_its_destruction_is_refused(world: World) -> None:
    """The destroyer marks before it claims, and an opener reads after its claim: one of them sees the other."""
    world.write("p", numbered(0, 5))

    destroy = partial(world.admin("p").destroy, soft=True)
    # Between the opener's first read of the manifest and its claim.
    world.store = InterposingStore(world.store, destroy, op="put_if_absent", path="*/manifest/*")  # type: ignore[assignment]
    with pytest.raises(InvalidRequest, match="destroyed"):
        world.open("p")


@pytest.mark.parametrize(
    ("mark", "manifest", "verdict"),
    [
        (None, Manifest(), Verdict.ALIVE),
        (None, None, Verdict.ALIVE),
        (Destroyed(0, 10, 1, 1), None, Verdict.ALIVE),
        (Destroyed(0, 10, 1, 1, erased=True), Manifest(writer_epoch=1, compactor_epoch=1), Verdict.GONE),
        (Destroyed(0, 101, 1, 1), Manifest(writer_epoch=1, compactor_epoch=1), Verdict.WAITING),
        (Destroyed(0, 100, 1, 1), Manifest(writer_epoch=1, compactor_epoch=1), Verdict.DUE),
        (Destroyed(0, 100, 1, 1), Manifest(writer_epoch=2, compactor_epoch=1), Verdict.REOPENED),
        (Destroyed(0, 100, 1, 1), Manifest(writer_epoch=1, compactor_epoch=2), Verdict.DUE),
    ],
)
def test_a_destroyed_database_is_due_after_its_grace_period_unless_a_writer_has_claimed_it(
    mark: Destroyed | None, manifest: Manifest | None, verdict: Verdict
) -> None:
    assert plan_destruction(mark, manifest, now_ms=100) is verdict


def test_a_live_checkpoint_defers_the_deletion_of_a_destroyed_database(world: World) -> None:
    saved = Checkpoint(world.ids.uuid(), ManifestId(1), 0)
    manifest = Manifest(writer_epoch=1, compactor_epoch=1, checkpoints=(saved,))
    assert plan_destruction(Destroyed(0, 0, 1, 1), manifest, now_ms=100) is Verdict.PINNED
