"""Final checkpoints: each has the name of its clone, is kept while the clone exists, and is released only by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import pytest

from flagstone import InvalidRequest
from flagstone.clones.clone import Cloner
from flagstone.clones.destroy import Destroyer
from flagstone.clones.origin import CloneSource
from flagstone.errors import Unavailable
from flagstone.metadata import borrowing
from flagstone.metadata.annotations import borrower_of, final_name
from flagstone.metadata.borrowing import Owner, could_be_final, find_borrowers, owner_of
from flagstone.metadata.manifest import Checkpoint, ExternalDb, Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.testing.faults import Crashed, Fault, FaultyStore
from flagstone.types import KeyRange, ManifestId
from kit.databases import World, copy_of, numbered
from kit.faults import InterposingStore

NOW = timedelta(0)


def finals(world: World, path: str = "p") -> dict[str | None, UUID]:
    """The checkpoints of a database that never expire, by name."""
    return {entry.name: entry.id for entry in world.admin(path).checkpoints() if entry.expires_s is None}


def copy_database(world: World, path: str, to: str) -> None:
    for name, data in world.objects(path).items():
        world.store.put(to + name[len(path) :], data)


def delete_folder(world: World, path: str) -> None:
    for name in world.objects(path):
        world.store.delete(name)


def forget_names(world: World, path: str = "p") -> None:
    """Remove the names, because SlateDB creates final checkpoints without one."""

    manifests = ManifestStore(world.store, DbPaths(path))
    manifests.update(
        lambda now: replace(
            now.value, checkpoints=tuple(replace(entry, name=None) for entry in now.value.checkpoints)
        )
    )


def collect(world: World, *paths: str) -> None:
    world.clock.advance(1_000_000)
    for path in paths:
        report = world.admin(path).collect_garbage(min_age=NOW)
        assert report.ok, report.errors


def detach(world: World, path: str) -> None:
    """Compact a clone, so that it borrows nothing, and let its collector release the final checkpoints."""
    world.admin(path).compact(full=True)
    collect(world, path)
    collect(world, path)


def forge(world: World, path: str, *checkpoints: UUID, lender: str = "p") -> None:
    """A database that lists checkpoints of another one as its own."""
    world.write(path, {b"a": b"1"})
    entries = tuple(ExternalDb(lender, UUID(int=number), id_, ()) for number, id_ in enumerate(checkpoints))
    ManifestStore(world.store, DbPaths(path)).update(lambda now: replace(now.value, external_dbs=entries))


@pytest.fixture
def cloned(world: World) -> World:
    world.write("p", numbered(0, 5))
    world.admin("p").clone("c")
    return world


# -- names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["c", "deep/er/c", "spaced out", "ünï/cödé", "100%/c", "a?b=c", "flagstone.clone/c"]
)
def test_the_name_of_a_final_checkpoint_identifies_its_clone(path: str) -> None:
    entry = Checkpoint(UUID(int=1), ManifestId(3), 0, name=final_name(path))
    assert borrower_of(entry) == path
    assert owner_of(entry, path) is Owner.OURS
    assert owner_of(entry, path + "x") is Owner.OTHER
    assert owner_of(replace(entry, name="nightly"), path) is Owner.OTHER
    assert owner_of(replace(entry, name=None), path) is Owner.UNNAMED
    assert owner_of(None, path) is Owner.GONE
    assert borrower_of(replace(entry, name="nightly")) is None


def test_an_unnamed_checkpoint_that_expires_or_is_in_its_own_manifest_is_no_final_checkpoint() -> None:
    entry = Checkpoint(UUID(int=1), ManifestId(3), 0)
    assert could_be_final(entry, Manifest())
    assert not could_be_final(entry, Manifest(checkpoints=(entry,)))
    assert not could_be_final(replace(entry, expires_s=9), Manifest())


def test_every_lender_of_a_clone_has_a_final_checkpoint_with_its_name(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.admin("p").clone("c")
    world.write("c", numbered(5, 8))
    world.admin("c").clone("deep/d")
    world.write("q", {b"z": b"1"})
    world.admin("deep/d").union("u", ["q"])

    assert set(finals(world, "p")) == {"flagstone.clone/c", "flagstone.clone/deep/d", "flagstone.clone/u"}
    assert set(finals(world, "c")) == {"flagstone.clone/deep/d", "flagstone.clone/u"}
    assert set(finals(world, "q")) == {"flagstone.clone/u"}


# -- deleting ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_a_final_checkpoint_of_an_existing_clone_is_deleted_only_with_force(
    cloned: World, named: bool
) -> None:
    if not named:
        forget_names(cloned)
    (final,) = finals(cloned).values()
    before = cloned.objects()

    for call in (
        lambda: cloned.admin("p").delete_checkpoint(final),
        lambda: cloned.admin("p").delete_checkpoint(str(final)),
        lambda: cloned.admin("p").refresh_checkpoint(final, timedelta(hours=1)),
    ):
        with pytest.raises(InvalidRequest, match=r"the clone at 'c' borrows SSTs of 'p' .* force"):
            call()
    assert cloned.objects() == before
    assert cloned.admin("p").refresh_checkpoint(final).expires_s is None

    assert cloned.admin("p").refresh_checkpoint(final, timedelta(hours=1), force=True).expires_s
    cloned.admin("p").refresh_checkpoint(final)
    cloned.admin("p").delete_checkpoint(final, force=True)
    assert finals(cloned) == {}


def destroy_softly(world: World) -> None:
    world.admin("c").destroy(soft=True)


def delete_the_clone(world: World) -> None:
    delete_folder(world, "c")  # as delete_db of SlateDB does, which releases no checkpoint


def create_another_database_there(world: World) -> None:
    delete_folder(world, "c")
    world.write("c", {b"a": b"1"})


@pytest.mark.parametrize("end", [destroy_softly, delete_the_clone, create_another_database_there])
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_a_final_checkpoint_whose_clone_is_gone_is_deleted_without_force(
    cloned: World, named: bool, end: Callable[[World], None]
) -> None:
    if not named:
        forget_names(cloned)
    (final,) = finals(cloned).values()
    end(cloned)

    cloned.admin("p").delete_checkpoint(final)

    assert finals(cloned) == {}


def test_a_final_checkpoint_of_an_unfinished_clone_is_not_deleted(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.crash_while_cloning(Fault("crash", op="put_if_absent", path="c/manifest/*2.manifest"))
    (final,) = finals(world).values()

    with pytest.raises(InvalidRequest, match="the clone at 'c'"):
        world.admin("p").delete_checkpoint(final)
    world.admin("p").clone("c")
    assert world.scan("c") == numbered(0, 5)


def test_checkpoints_of_users_are_deleted_without_reading_other_databases(cloned: World) -> None:
    saved = [
        cloned.admin("p").create_checkpoint(),
        cloned.admin("p").create_checkpoint(name="nightly"),
        cloned.admin("p").create_checkpoint(timedelta(hours=1)),
        cloned.admin("p").create_checkpoint(name="flagstone.clone/c"),  # not listed by that clone
    ]
    cloned.store.put("broken/manifest/00000000000000000001.manifest", b"damaged")
    for entry in saved:
        cloned.admin("p").delete_checkpoint(entry.id)
    assert set(finals(cloned)) == {"flagstone.clone/c"}


def test_an_unnamed_checkpoint_needs_force_if_not_every_database_can_be_read(
    cloned: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_names(cloned)
    delete_folder(cloned, "c")
    (final,) = finals(cloned).values()
    damaged = "broken/manifest/00000000000000000001.manifest"
    cloned.store.put(damaged, b"damaged")

    with pytest.raises(InvalidRequest, match=r"could not all be read .* force"):
        cloned.admin("p").delete_checkpoint(final)
    cloned.store.delete(damaged)
    with monkeypatch.context() as patch:
        patch.setattr(borrowing, "_MOST_LISTED", 1)
        with pytest.raises(InvalidRequest, match="could not all be read"):
            cloned.admin("p").delete_checkpoint(final)
    cloned.admin("p").delete_checkpoint(final)


# -- releasing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["destroy", "collect"])
def test_a_destroyed_or_compacted_clone_releases_its_own_final_checkpoint(cloned: World, way: str) -> None:
    cloned.admin("p").clone("other")
    if way == "destroy":
        assert cloned.admin("c").destroy().unreleased == ()
    else:
        detach(cloned, "c")
        assert cloned.admin("c").manifest().value.external_dbs == ()
    assert set(finals(cloned)) == {"flagstone.clone/other"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["destroy", "collect"])
@pytest.mark.parametrize("named", [True, False], ids=["named", "unnamed"])
def test_a_copy_of_a_clone_releases_no_final_checkpoint(cloned: World, way: str, named: bool) -> None:
    if not named:
        forget_names(cloned)
    before = finals(cloned)
    copy_database(cloned, "c", "x")
    warned = [str(finding) for finding in cloned.admin("x").verify().findings]
    assert any("was copied or moved" in finding for finding in warned) == named
    assert not cloned.admin("c").verify().findings

    if way == "destroy":
        (kept,) = cloned.admin("x").destroy().unreleased
        assert ("is kept for the clone at 'c'" if named else "'c' needs it as well") in kept
    else:
        detach(cloned, "x")
        assert cloned.scan("x") == numbered(0, 5)
        # The name proves that the checkpoint is another clone's; without a name the copy keeps its entry.
        assert (cloned.admin("x").manifest().value.external_dbs == ()) == named

    assert finals(cloned) == before
    cloned.write("p", numbered(0, 5, b"w"))
    cloned.admin("p").compact(full=True)
    collect(cloned, "p", "p")
    assert cloned.scan("c") == numbered(0, 5)


def test_the_last_of_a_clone_and_its_copies_releases_a_checkpoint_without_a_name(cloned: World) -> None:
    forget_names(cloned)
    copy_database(cloned, "c", "x")
    assert cloned.admin("c").destroy().unreleased
    assert finals(cloned)

    assert cloned.admin("x").destroy().unreleased == ()

    assert finals(cloned) == {}


@pytest.mark.parametrize("way", ["destroy", "collect"])
def test_a_forged_database_releases_no_checkpoint_of_others(cloned: World, way: str) -> None:
    admin = cloned.admin("p")
    own = finals(cloned)["flagstone.clone/c"]
    victims = [
        own,
        admin.create_checkpoint().id,
        admin.create_checkpoint(name="nightly").id,
        admin.create_checkpoint(timedelta(days=9)).id,
    ]
    before = admin.checkpoints()
    forge(cloned, "x", *victims)

    if way == "destroy":
        assert len(cloned.admin("x").destroy().unreleased) == len(victims)
    else:
        cloned.admin("x").collect_garbage(min_age=NOW)
        assert cloned.admin("x").manifest().value.external_dbs == ()

    assert admin.checkpoints() == before


def test_a_forged_database_at_the_path_of_a_deleted_clone_releases_only_its_final_checkpoint(
    cloned: World,
) -> None:
    cloned.admin("p").clone("other")
    delete_folder(cloned, "c")
    held = finals(cloned)
    forge(cloned, "c", *held.values())

    cloned.admin("c").destroy()

    assert set(finals(cloned)) == {"flagstone.clone/other"}


def test_a_moved_clone_releases_no_checkpoint_and_reports_it(cloned: World) -> None:
    copy_database(cloned, "c", "moved")
    delete_folder(cloned, "c")
    (kept,) = cloned.admin("moved").destroy().unreleased

    assert "is kept for the clone at 'c', not for 'moved'" in kept
    (final,) = finals(cloned).values()
    cloned.admin("p").delete_checkpoint(final)  # there is no clone at 'c'


def test_a_clone_of_a_moved_clone_is_independent_of_the_old_path(cloned: World) -> None:
    copy_database(cloned, "c", "moved")
    delete_folder(cloned, "c")
    cloned.admin("moved").clone("new")
    collect(cloned, "new")  # it uses no SST of 'moved' itself, and releases it
    cloned.admin("moved").destroy()
    cloned.admin("p").delete_checkpoint(finals(cloned)["flagstone.clone/c"])
    cloned.write("p", numbered(0, 5, b"w"))
    cloned.admin("p").compact(full=True)
    collect(cloned, "p", "p")

    assert cloned.scan("new") == numbered(0, 5)
    assert cloned.admin("new").verify().ok


def test_a_copy_of_an_unfinished_clone_is_not_finished(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.crash_while_cloning(Fault("crash", op="put_if_absent", path="c/manifest/*2.manifest"))
    copy_database(world, "c", "x")

    with pytest.raises(InvalidRequest, match="a copy; destroy it and clone again"):
        world.admin("p").clone("x")
    assert world.admin("x").destroy().unreleased
    world.admin("p").clone("c")
    world.admin("p").clone("x")
    assert world.scan("c") == world.scan("x") == numbered(0, 5)


@pytest.mark.slow
def test_a_release_that_crashes_at_any_call_is_completed_by_destroying_again(world: World) -> None:
    world.write("p", numbered(0, 3))
    world.admin("p").clone("c")
    world.admin("p").clone("other")
    world.write("c", numbered(3, 5))
    world.admin("c").clone("d")
    nth = 0
    crashed = True
    while crashed:
        nth += 1
        crashed = False
        store = copy_of(world.store, clock=world.clock)
        again = World(store)
        again.clock, again.ids = world.clock, world.ids
        dying = FaultyStore(store, [Fault("crash_after", nth=nth)], clock=world.clock)
        try:
            Destroyer(dying, DbPaths("d"), wal_store=dying, clock=world.clock, ids=world.ids).destroy()
        except Crashed:
            crashed = True
            try:
                assert again.admin("d").destroy().unreleased == ()
            except InvalidRequest as refusal:
                assert "no database" in str(refusal)  # it crashed after the last step
        with pytest.raises(InvalidRequest, match="no database"):
            again.admin("d").manifest()
        assert set(finals(again, "p")) == {"flagstone.clone/c", "flagstone.clone/other"}, nth
        assert finals(again, "c") == {}, nth
        assert again.scan("c") == numbered(0, 5)
    assert nth > 20


def test_the_search_for_borrowers_skips_sst_and_wal_folders(cloned: World) -> None:
    for number in range(5):
        cloned.write("p", {b"%d" % number: b"v"})
    forget_names(cloned)
    (final,) = finals(cloned).values()
    listed = []

    class Counting(MemoryStore):
        def list(self, prefix: str, *, after: str | None = None):  # type: ignore[no-untyped-def]
            for meta in super().list(prefix, after=after):
                listed.append(meta.path)
                yield meta

    counting = Counting()
    for path, data in cloned.objects().items():
        counting.put(path, data)
    counting.put("readme.txt", b"")
    counting.put("some/where/else", b"")

    assert find_borrowers(counting, "p", final) == ("c",)
    assert find_borrowers(counting, "q", final) == ()
    assert find_borrowers(counting, "p", UUID(int=9)) == ()
    assert sum("/compacted/" in path or "/wal/" in path for path in listed) <= 3 * 2 * 2


def test_a_clone_is_not_destroyed_while_the_store_cannot_be_listed(cloned: World) -> None:
    forget_names(cloned)
    silent = FaultyStore(cloned.store, [Fault("error", nth=None, op="list", path="")])
    with pytest.raises(Unavailable):
        Destroyer(silent, DbPaths("c"), wal_store=silent, clock=cloned.clock, ids=cloned.ids).destroy()

    assert cloned.admin("c").destroy().unreleased == ()
    assert finals(cloned) == {}


# -- repeating --------------------------------------------------------------------------------------------


def test_repeating_a_clone_whose_final_checkpoint_is_gone_is_refused_with_its_id(cloned: World) -> None:
    (final,) = finals(cloned).values()
    cloned.admin("p").delete_checkpoint(final, force=True)
    with pytest.raises(InvalidRequest, match=rf"{final} in 'p', which no longer exists"):
        cloned.admin("p").clone("c")
    cloned.clock.advance(400_000)
    cloned.admin("p").destroy()
    cloned.write("q", {b"a": b"1"})
    with pytest.raises(InvalidRequest, match=rf"{final} in 'p', which no longer exists"):
        cloned.admin("q").clone("c")


def test_an_unfinished_clone_that_was_opened_for_writing_is_not_finished(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.crash_while_cloning(
        Fault("crash_after", op="put_if_absent", path="c/manifest/*1.manifest"), KeyRange(b"k001")
    )
    # A writer of SlateDB opens a database that is not initialized.
    ManifestStore(world.store, DbPaths("c")).update(lambda now: replace(now.value, writer_epoch=9))
    before = world.objects()

    with pytest.raises(InvalidRequest, match="opened for writing"):
        world.admin("p").clone("c", range=(b"k001", None))
    assert world.objects() == before
    world.admin("c").destroy()
    world.admin("p").clone("c", range=(b"k001", None))


def test_an_unfinished_clone_at_the_path_of_a_destroyed_database_is_finished(cloned: World) -> None:
    cloned.admin("c").destroy()
    assert finals(cloned) == {}
    cloned.crash_while_cloning(Fault("crash_after", op="put_if_absent", path="p/manifest/*", nth=2))
    assert not cloned.admin("c").manifest().value.initialized

    cloned.admin("p").clone("c")

    assert cloned.scan("c") == numbered(0, 5)
    assert set(finals(cloned)) == {"flagstone.clone/c"}
    with pytest.raises(InvalidRequest, match="a finished clone at 'c'"):
        cloned.admin("p").clone("c")


def test_cloning_to_a_path_where_a_database_is_created_meanwhile_is_refused(world: World) -> None:
    world.write("p", numbered(0, 5))

    manifests = ManifestStore(world.store, DbPaths("c"))
    store = InterposingStore(
        world.store,
        lambda: manifests.create_next(Manifest(), None),
        op="put_if_absent",
        path="c/flagstone/origin",
        after=True,
    )

    with pytest.raises(InvalidRequest, match="there is a database at 'c'"):
        Cloner(store, clock=world.clock, ids=world.ids).clone("c", [CloneSource("p")])
