"""Clones: their rows, how an unfinished one is finished, and which calls are refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest

import flagstone
from flagstone import Admin, CorruptData, InvalidRequest, KeyRange
from flagstone.clones.origin import load_origin
from flagstone.metadata.stores import ManifestStore
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.resolve import resolve_neighbour
from flagstone.testing.faults import Fault
from kit.databases import World, numbered


def test_a_clone_has_the_rows_of_ssts_and_wal_and_is_written_independently(world: World) -> None:
    world.write("p", numbered(0, 10))
    with world.open("p") as db:
        db.put(b"logged", b"1", await_durable=True)
        db.put(b"memory", b"1")
        made = world.admin("p").clone("c")
    expected = numbered(0, 10) | {b"logged": b"1"}

    assert made.id == 2
    assert world.scan("c") == expected
    world.write("c", {b"k000": b"child"})
    assert world.scan("c") == expected | {b"k000": b"child"}
    assert world.scan("p") == expected | {b"memory": b"1"}
    assert all(world.admin(path).verify().ok for path in "pc")


def test_the_two_manifests_of_a_clone_follow_the_protocol(world: World) -> None:
    world.write("p", numbered(0, 10))
    world.admin("p").clone("c")

    first, second = (world.admin("c").manifest(number).value for number in (1, 2))
    parent = world.admin("p").manifest().value
    (entry,) = second.external_dbs
    source, final = (
        parent.checkpoint(id_) for id_ in (entry.source_checkpoint_id, entry.final_checkpoint_id)
    )
    assert (first.initialized, second.initialized) == (False, True)
    assert (first.writer_epoch, first.wal_id_last_seen) == (parent.writer_epoch, parent.wal_id_last_seen)
    assert first.checkpoints == ()
    assert entry.path == "p"
    assert set(entry.sst_ids) == set(parent.ssts)
    assert source is not None
    assert final is not None
    assert source.expires_s == source.created_s + 300
    assert final.expires_s is None
    assert final.manifest_id == source.manifest_id


def test_a_clone_of_a_clone_borrows_from_both(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.admin("p").clone("c")
    world.write("c", numbered(5, 10))
    world.admin("c").clone("d")
    world.write("d", numbered(10, 15))
    world.admin("d").clone("e")

    assert world.scan("e") == numbered(0, 15)
    assert [db.path for db in world.admin("e").manifest().value.external_dbs] == ["p", "c", "d"]
    held = [entry for entry in world.admin("p").checkpoints() if entry.expires_s is None]
    assert len(held) == 3
    assert len({entry.manifest_id for entry in held}) == 1


def test_a_clone_of_a_given_checkpoint_has_its_rows_and_creates_no_source_checkpoint(world: World) -> None:
    world.write("p", numbered(0, 5))
    saved = world.admin("p").create_checkpoint(name="mine")
    world.write("p", numbered(0, 5, b"w"))

    world.admin("p").clone("c", checkpoint=str(saved.id))

    assert world.scan("c") == numbered(0, 5)
    assert [entry.name for entry in world.admin("p").checkpoints()] == ["mine", "flagstone.clone/c"]


def test_repeating_the_call_of_a_finished_clone_is_refused_and_changes_no_object(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.admin("p").clone("c")
    world.admin("p").clone("a", range=(None, b"k002"))
    world.admin("p").clone("b", range=KeyRange(b"k002"))
    world.admin("a").union("u", ["b"])
    world.write("c", {b"k000": b"child"})
    world.write("p", {b"k001": b"newer"})
    before = world.objects()

    for call in (
        lambda: world.admin("p").clone("c"),
        lambda: world.admin("p").clone("a", range=(b"", b"k002")),
        lambda: world.admin("a").union("u", ["a", "b"]),
    ):
        with pytest.raises(InvalidRequest, match=r"a finished clone at '[cau]' .* already"):
            call()

    assert world.objects() == before


def test_the_same_call_of_many_threads_makes_one_clone(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.write("q", numbered(5, 9))

    with ThreadPoolExecutor(8) as pool:
        clones = [pool.submit(world.admin("p").clone, "c") for _ in range(8)]
        unions = [pool.submit(world.admin("p").union, "u", ["q"]) for _ in range(8)]
        made = set()
        for future in (*clones, *unions):
            try:
                made.add((future.result().id, str(future.result().value)))
            except InvalidRequest as refusal:  # its call began after the clone was finished
                assert "a finished clone" in str(refusal)

    assert len(made) == 2
    assert world.scan("c") == numbered(0, 5)
    assert world.scan("u") == numbered(0, 9)
    held = {entry.id for entry in world.admin("p").checkpoints() if entry.expires_s is None}
    lenders = [db for path in "cu" for db in world.admin(path).manifest().value.external_dbs]
    assert held == {db.final_checkpoint_id for db in lenders if db.path == "p"}


def test_a_clone_made_during_writes_has_one_state_of_its_source(world: World) -> None:
    with world.open("p") as db:

        def write() -> None:
            for number in range(200):
                batch = flagstone.WriteBatch()
                batch.put(b"a", b"%d" % number)
                batch.put(b"b", b"%d" % number)
                db.write(batch, await_durable=True)
                if number % 40 == 39:
                    db.flush()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(write)
            for number in range(10):
                world.admin("p").clone(f"c{number}")
            writing.result()

    seen = []
    for number in range(10):
        rows = world.scan(f"c{number}")
        assert rows.get(b"a") == rows.get(b"b")
        seen.append(int(rows.get(b"a", b"-1")))
    assert seen == sorted(seen)


def test_another_call_for_the_path_of_a_clone_is_refused(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.write("q", numbered(0, 5))
    saved = world.admin("p").create_checkpoint()
    world.admin("p").clone("c")
    before = world.objects()

    for call in (
        lambda: world.admin("q").clone("c"),
        lambda: world.admin("p").clone("c", checkpoint=saved.id),
        lambda: world.admin("p").clone("c", range=(b"k001", None)),
        lambda: world.admin("p").clone("q"),
        lambda: world.admin("p").clone("p"),
        lambda: world.admin("p").union("u", ["q", "q"]),
    ):
        with pytest.raises(InvalidRequest, match=r"already|of itself|twice"):
            call()

    assert world.objects() == before


def test_an_unfinished_clone_is_finished_by_the_same_call_and_by_no_other(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.crash_while_cloning(Fault("crash_after", op="put_if_absent", path="c/manifest/*"))
    assert not world.admin("c").manifest().value.initialized
    before = world.objects()

    for call in (
        lambda: world.open("c"),
        lambda: flagstone.open_reader("c", store=world.store),
        lambda: world.admin("c").clone("d"),
        lambda: world.admin("c").create_checkpoint(),
        lambda: world.admin("p").union("c", ["q"]),
    ):
        with pytest.raises(InvalidRequest, match=r"not finished|still being made|other arguments"):
            call()
    assert world.objects() == before

    world.admin("p").clone("c")
    assert world.scan("c") == numbered(0, 5)


def test_no_other_database_is_created_at_the_path_of_an_unfinished_clone(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.crash_while_cloning(
        Fault("crash_after", op="put_if_absent", path="c/flagstone/origin"), KeyRange(b"k003")
    )
    before = world.objects()

    with pytest.raises(InvalidRequest, match="a clone was begun"):
        world.open("c")
    with pytest.raises(InvalidRequest, match="other arguments"):
        world.admin("p").clone("c")
    assert world.objects("c") == {path: data for path, data in before.items() if path.startswith("c/")}
    world.admin("c").destroy()
    world.write("c", {b"a": b"1"})
    assert world.scan("c") == {b"a": b"1"}


def test_a_clone_whose_source_checkpoint_is_gone_is_refused_until_it_is_destroyed(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.crash_while_cloning(Fault("crash_after", op="put_if_absent", path="c/manifest/*"))
    world.clock.advance(400_000)
    for entry in world.admin("p").checkpoints():
        world.admin("p").delete_checkpoint(entry.id)  # as garbage collection does after their expiry

    with pytest.raises(InvalidRequest, match="destroy the unfinished clone at 'c'"):
        world.admin("p").clone("c")
    world.admin("c").destroy()
    world.admin("p").clone("c")

    assert world.scan("c") == numbered(0, 5)


def test_an_unfinished_clone_is_finished_from_an_expired_checkpoint_that_still_exists(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.crash_while_cloning(Fault("crash_after", op="put_if_absent", path="c/manifest/*"))
    world.clock.advance(400_000)

    world.admin("p").clone("c")

    assert world.scan("c") == numbered(0, 5)


def test_a_wal_in_a_store_of_its_own_is_copied_there() -> None:
    world = World(wal_store=MemoryStore())
    with world.open("p") as db:
        db.put(b"a", b"1", await_durable=True)
        world.admin("p").clone("c")

    assert world.scan("c") == {b"a": b"1"}
    assert not list(world.store.list("c/wal"))


def test_a_fence_of_another_writer_in_an_unfinished_clone_is_not_overwritten(world: World) -> None:
    world.write("p", numbered(0, 5))
    world.crash_while_cloning(Fault("crash_after", op="put_if_absent", path="c/manifest/*"))
    manifest = world.admin("c").manifest().value
    fence = DbPaths("c").wal(manifest.wal_id_last_seen)
    world.store.put(fence, b"")  # a writer of SlateDB opens a database that is not initialized

    with pytest.raises(InvalidRequest, match="opened for writing"):
        world.admin("p").clone("c")
    assert world.store.get(fence).data == b""


# -- projections ------------------------------------------------------------------------------------------


def test_a_projection_has_the_rows_of_its_range_and_refuses_other_keys(world: World) -> None:
    world.write("p", numbered(0, 10))
    world.write("p", numbered(3, 6, b"w"))
    world.admin("p").clone("a", range=(b"k002", b"k005"))
    expected = numbered(2, 5) | numbered(3, 5, b"w")

    assert world.scan("a") == expected
    with world.open("a") as db:
        for key in (b"k001", b"k005", b"z", b"\0"):
            with pytest.raises(InvalidRequest, match="outside"):
                db.put(key, b"x")
            with pytest.raises(InvalidRequest, match="outside"):
                db.delete(key)
        batch = flagstone.WriteBatch()
        batch.put(b"k003", b"x")
        batch.put(b"k009", b"x")
        with pytest.raises(InvalidRequest, match="outside"):
            db.write(batch)
        with pytest.raises(InvalidRequest, match="outside"), db.transaction() as transaction:
            transaction.put(b"k009", b"x")
        db.put(b"k002", b"first")
        db.put(b"k004\xff", b"last")
        assert dict(db.scan()) == expected | {b"k002": b"first", b"k004\xff": b"last"}
    assert world.scan("a") == expected | {b"k002": b"first", b"k004\xff": b"last"}


def test_clones_and_unions_of_projections_inherit_the_writable_range(world: World) -> None:
    world.write("p", numbered(0, 20))
    world.admin("p").clone("a", range=(b"k002", b"k010"))
    world.admin("a").clone("b")
    world.admin("a").clone("c", range=(b"k005", b"k100"))
    world.admin("p").clone("d", range=(b"k010", b"k012"))
    world.admin("p").clone("e", range=(b"k015", None))
    world.admin("a").union("u", ["d"])
    world.admin("a").union("v", ["e"])
    world.admin("p").clone("f", range=(None, b"k002"))
    world.admin("p").clone("g", range=(b"k010", None))
    world.admin("a").union("w", ["f", "g"])

    writable = {
        path: origin.writable
        for path in "abcuvw"
        if (origin := load_origin(world.store, DbPaths(path))) is not None
    }
    assert writable == {
        "a": (KeyRange(b"k002", b"k010"),),
        "b": (KeyRange(b"k002", b"k010"),),
        "c": (KeyRange(b"k005", b"k010"),),
        "u": (KeyRange(b"k002", b"k012"),),
        "v": (KeyRange(b"k002", b"k010"), KeyRange(b"k015", None)),
        "w": None,
    }
    with world.open("v") as db:
        db.put(b"k002", b"")
        db.put(b"k015", b"")
        with pytest.raises(InvalidRequest, match=r"k010' and b'k015' up to the end"):
            db.put(b"k012", b"")


def test_rows_that_slatedb_wrote_outside_of_the_range_are_returned_by_scans(world: World) -> None:
    world.write("p", numbered(0, 10))
    world.admin("p").clone("a", range=(None, b"k005"))
    origin = DbPaths("a").own("origin")
    kept = world.store.get(origin).data
    world.store.delete(origin)  # SlateDB does not know it
    with world.open("a") as db:
        db.put(b"zzz", b"1", await_durable=True)
        db.put(b"zzz", b"2")
        db.flush("wal")
        saved = db.checkpoint(scope="durable")
    world.admin("a").clone("b", checkpoint=saved.id)
    world.store.put(origin, kept)
    world.store.put(DbPaths("b").own("origin"), kept)

    for path in ("a", "b"):  # in an SST, and in the WAL
        with world.open(path) as db:
            assert dict(db.scan()) == numbered(0, 5) | {b"zzz": b"2"}


def test_a_projection_of_a_range_with_rows_in_the_wal_is_refused(world: World) -> None:
    world.write("p", numbered(0, 10))
    with world.open("p") as db:
        db.put(b"k003", b"logged", await_durable=True)
        before = world.objects()
        with pytest.raises(InvalidRequest, match=r"b'k003'; .*flush"):
            world.admin("p").clone("a", range=(None, b"k005"))
        with pytest.raises(InvalidRequest, match="flush"):
            world.admin("p").clone("a", range=(b"k003", None))
        assert world.objects() == before

        world.admin("p").clone("b", range=(b"k004", None))
        assert world.scan("b") == numbered(4, 10)
        db.flush()
        world.admin("p").clone("a", range=(None, b"k005"))
    assert world.scan("a") == numbered(0, 5) | {b"k003": b"logged"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ((b"b", b"a"), "holds no key"),
        ((b"a", b"a"), "holds no key"),
        ((None, b""), "holds no key"),
        (("a", "b"), "pair of keys"),
    ],
)
def test_a_range_without_keys_is_refused(world: World, keys: object, message: str) -> None:
    world.write("p", numbered(0, 3))
    before = world.objects()
    with pytest.raises(InvalidRequest, match=message):
        world.admin("p").clone("a", range=keys)  # type: ignore[arg-type]
    assert world.objects() == before


def test_a_projection_of_a_range_without_rows_borrows_no_sst(world: World) -> None:
    world.write("p", numbered(0, 3))
    world.admin("p").clone("a", range=(b"x", None))

    assert world.admin("a").manifest().value.external_dbs == ()
    assert world.scan("a") == {}
    world.write("a", {b"y": b"1"})
    assert world.scan("a") == {b"y": b"1"}


# -- paths ------------------------------------------------------------------------------------------------


def test_the_path_of_a_clone_may_be_absolute_relative_a_url_or_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with flagstone.open(tmp_path / "p") as db:
        db.put(b"a", b"1")
    Admin(tmp_path / "p").clone(tmp_path / "c")
    Admin(tmp_path / "p").clone("d")
    Admin(tmp_path / "p").clone(f"file://{tmp_path}/deep/er/e")

    monkeypatch.chdir(tmp_path.parent)
    Admin(tmp_path / "p").clone(f"{tmp_path.name}/f")
    Admin(f"{tmp_path.name}/p").clone(f"./{tmp_path.name}/g")

    for path in ("c", "d", "deep/er/e", "f", "g"):
        with flagstone.open(path, store=tmp_path) as clone:
            assert dict(clone.scan()) == {b"a": b"1"}


def test_a_clone_in_another_store_is_refused(tmp_path: Path) -> None:
    store = MemoryStore.named("neighbours")
    assert resolve_neighbour("memory://neighbours/a/b", store) == "a/b"
    assert resolve_neighbour("a/b/", store) == "a/b"
    for elsewhere in ("memory://others/a", "s3://bucket/a", str(tmp_path), "memory://neighbours"):
        with pytest.raises(InvalidRequest, match=r"same store|not in"):
            resolve_neighbour(elsewhere, store)
    with pytest.raises(InvalidRequest):
        resolve_neighbour("../a", store)


def test_source_checkpoints_of_clones_expire_and_final_checkpoints_do_not(world: World) -> None:
    world.write("p", numbered(0, 3))
    for name in "abc":
        world.admin("p").clone(name)
    world.clock.advance(timedelta(minutes=6).total_seconds() * 1000)

    latest = ManifestStore(world.store, DbPaths("p"), clock=world.clock).require_latest().value
    now_s = world.clock.now_ms() // 1000
    assert len([c for c in latest.checkpoints if c.expires_s is not None and c.expires_s <= now_s]) == 3
    assert len([c for c in latest.checkpoints if c.expires_s is None]) == 3


def test_a_damaged_wal_file_is_not_copied_and_the_clone_can_be_finished_after_a_repair(world: World) -> None:
    with world.open("p") as db:
        db.put(b"a", b"1", await_durable=True)
        db.checkpoint(scope="durable")
        store = world.wal_store or world.store
        path = max(meta.path for meta in store.list("p/wal") if meta.size)
        whole = store.get(path).data
        store.put(path, whole[:20] + bytes([whole[20] ^ 1]) + whole[21:])

        with pytest.raises(CorruptData, match=path):
            world.admin("p").clone("c")

        assert [meta.path for meta in store.list("c/wal") if meta.size] == []
        store.put(path, whole)
        world.admin("p").clone("c")
        assert world.scan("c") == {b"a": b"1"}
