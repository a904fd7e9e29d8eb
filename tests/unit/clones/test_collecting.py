"""Garbage collection beside clones: lent SSTs are kept until no clone uses them."""

from __future__ import annotations

from datetime import timedelta

from flagstone.store.paths import DbPaths
from kit.databases import World, numbered

NOW = timedelta(0)


def collect(world: World, path: str) -> None:
    world.clock.advance(1_000_000)  # past the checkpoints that expire
    world.admin(path).collect_garbage(min_age=NOW)


def test_a_lender_keeps_lent_ssts_until_the_clone_has_compacted_them(world: World) -> None:
    world.write("p", numbered(0, 5))
    lent = set(world.admin("p").manifest().value.ssts)
    world.admin("p").clone("c")
    world.write("p", numbered(0, 5, b"w"))
    world.admin("p").compact(full=True)
    collect(world, "p")
    collect(world, "p")
    assert world.scan("c") == numbered(0, 5)

    world.admin("c").compact(full=True)
    collect(world, "c")
    collect(world, "c")
    assert world.admin("c").manifest().value.external_dbs == ()
    assert [entry for entry in world.admin("p").checkpoints() if entry.expires_s is None] == []
    world.write("p", numbered(0, 1, b"x"))
    world.admin("p").compact(full=True)
    collect(world, "p")
    collect(world, "p")

    left = set(world.objects("p/compacted"))
    assert not left & {DbPaths("p").sst(sst_id) for sst_id in lent}
    assert len(left) <= 2
    assert world.scan("p") == numbered(0, 5, b"w") | numbered(0, 1, b"x")
    assert world.scan("c") == numbered(0, 5)


def test_a_union_keeps_its_rows_when_its_parts_are_collected_and_destroyed(world: World) -> None:
    world.write("p", numbered(0, 10))
    world.write("p", numbered(3, 7, b"w"))
    world.admin("p").clone("a", range=(None, b"k005"))
    world.admin("p").clone("b", range=(b"k005", None))
    world.write("a", numbered(0, 1, b"a"))
    world.admin("a").union("u", ["b"])
    expected = numbered(0, 10) | numbered(3, 7, b"w") | numbered(0, 1, b"a")

    for path in ("a", "b", "p"):
        world.admin(path).compact(full=True)
        collect(world, path)
    world.admin("b").destroy(soft=True, grace=timedelta(hours=1))
    world.clock.advance(3_700_000)
    world.admin("b").collect_garbage(min_age=NOW)

    assert not world.objects("b/compacted")
    assert world.scan("u") == expected
    assert world.admin("u").verify().ok


def test_a_restored_state_keeps_its_rows_after_collection(world: World) -> None:
    world.write("p", numbered(0, 5))
    with world.open("p") as db:
        db.put(b"logged", b"1", await_durable=True)
        saved = db.checkpoint(scope="durable")
        db.put(b"later", b"1")
    world.admin("p").compact(full=True)
    world.admin("p").restore(saved.id)
    world.admin("p").delete_checkpoint(saved.id)

    for _ in range(3):
        collect(world, "p")

    assert world.scan("p") == numbered(0, 5) | {b"logged": b"1"}
    world.write("p", {b"k000": b"x"})
    world.admin("p").compact(full=True)
    collect(world, "p")
    assert world.scan("p") == numbered(0, 5) | {b"logged": b"1", b"k000": b"x"}
    assert world.admin("p").verify().ok
