"""Every store call of a clone, projection or union fails in every way; repeating the call completes it.

The first run counts the calls. Then each of them in turn fails before its effect, fails after it, or ends the
process before or after it. A fault that retries overcome must not show. After a crash the same call finishes the
work, from the same or another process; lenders are unchanged, and no unused checkpoint stays for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from functools import cache

import pytest

from flagstone.db.admin.admin import Admin
from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.runtime.ids import Ids
from flagstone.store.memory import MemoryStore
from flagstone.testing.faults import Crashed, Effect, Fault, FaultyStore
from kit.databases import Rows, World, numbered
from kit.faults import struck_calls


@dataclass
class Scene:
    """Databases before, the call, and the contents of all afterwards."""

    world: World
    call: Callable[[Callable[[str], Admin]], object]
    expected: dict[str, Rows] = field(default_factory=dict)

    def copy(self) -> Scene:
        """The same databases in another store: making them takes longer than the call."""
        old, wal_store = self.world, self.world.wal_store
        world = World(wal_store=None if wal_store is None else MemoryStore())
        for source, target in ((old.store, world.store), (wal_store, world.wal_store)):
            if source is not None and target is not None:
                for meta in source.list(""):
                    target.put(meta.path, source.get(meta.path).data)
        world.clock.advance(old.clock.now_ms() - world.clock.now_ms())
        world.ids = Ids(8, clock=world.clock)  # none that the databases have already
        return Scene(world, self.call, self.expected)


def leave_in_the_wal(world: World, path: str, rows: Rows) -> None:
    """Write rows durably and crash before they are flushed to L0."""
    dying = FaultyStore(world.store)
    db = replace_store(world, dying).open(path)
    for key, value in rows.items():
        db.put(key, value, await_durable=True)
    dying.crash()
    with suppress(Crashed, FlagstoneError):
        db.close()


def replace_store(world: World, store: FaultyStore) -> World:
    other = copy(world)
    other.store = store  # type: ignore[assignment]
    return other


def whole_clone_of_a_clone() -> Scene:
    world = World()
    world.write("p", numbered(0, 5))
    world.admin("p").clone("c")
    world.write("c", numbered(5, 8))
    leave_in_the_wal(world, "c", {b"logged": b"1"})
    rows = numbered(0, 8) | {b"logged": b"1"}
    return Scene(world, lambda admin: admin("c").clone("new"), {"p": numbered(0, 5), "c": rows, "new": rows})


def clone_of_a_checkpoint_with_its_wal_apart() -> Scene:
    world = World(wal_store=MemoryStore())
    world.write("p", numbered(0, 5))
    with world.open("p") as db:
        db.put(b"logged", b"1", await_durable=True)
        saved = db.checkpoint(scope="durable")
        db.put(b"later", b"1")
    rows = numbered(0, 5) | {b"logged": b"1"}
    return Scene(
        world,
        lambda admin: admin("p").clone("new", checkpoint=saved.id),
        {"p": rows | {b"later": b"1"}, "new": rows},
    )


def projection() -> Scene:
    world = World()
    world.write("p", numbered(0, 10))
    return Scene(
        world,
        lambda admin: admin("p").clone("new", range=(b"k003", b"k007")),
        {"p": numbered(0, 10), "new": numbered(3, 7)},
    )


def union() -> Scene:
    world = World()
    world.write("p", numbered(0, 10))
    world.admin("p").clone("a", range=(None, b"k005"))
    world.admin("p").clone("b", range=(b"k005", None))
    world.write("q", {b"z": b"1"})
    return Scene(
        world,
        lambda admin: admin("a").union("new", ["b", "q"]),
        {"p": numbered(0, 10), "q": {b"z": b"1"}, "new": numbered(0, 10) | {b"z": b"1"}},
    )


def union_with_a_copied_sst() -> Scene:
    world = World()
    world.write("p", numbered(0, 10))
    for path, data in world.objects("p").items():
        world.store.put("q" + path[1:], data)
    world.admin("p").clone("a", range=(None, b"k005"))
    world.admin("q").clone("b", range=(b"k005", None))
    return Scene(
        world, lambda admin: admin("a").union("new", ["b"]), {"p": numbered(0, 10), "new": numbered(0, 10)}
    )


made = cache(lambda make: make())


def run(make: Callable[[], Scene], main: list[Fault], wal: list[Fault]) -> tuple[int, int, bool]:
    """One case; returns the number of calls to the store and to a separate WAL store, and whether it crashed."""
    scene = made(make).copy()
    world = scene.world
    before = kept_for_ever(world)
    store = FaultyStore(world.store, main, clock=world.clock)
    wal_store = None if world.wal_store is None else FaultyStore(world.wal_store, wal, clock=world.clock)
    crashed = False
    try:
        scene.call(
            lambda path: Admin(path, store=store, wal_store=wal_store, clock=world.clock, ids=world.ids)
        )
    except Crashed:
        crashed = True
        check_that_an_unfinished_clone_is_not_opened(world)
    repeat(scene)
    check(scene, before)
    return len(store.calls), 0 if wal_store is None else len(wal_store.calls), crashed


def repeat(scene: Scene) -> None:
    """The same call again finishes the clone; after a crash behind the last step there is nothing to finish."""
    world = scene.world
    begun = any(path.startswith("new/manifest/") for path in world.objects("new"))
    if begun and world.admin("new").manifest().value.initialized:
        objects = world.objects()
        with pytest.raises(InvalidRequest, match="a finished clone at 'new'"):
            scene.call(world.admin)
        assert world.objects() == objects
    else:
        scene.call(world.admin)


def check_that_an_unfinished_clone_is_not_opened(world: World) -> None:
    begun = any(path.startswith("new/manifest/") for path in world.objects("new"))
    if begun and not world.admin("new").manifest().value.initialized:
        with pytest.raises(InvalidRequest, match="not finished"):
            world.open("new")


def check(scene: Scene, before: set[object]) -> None:
    world = scene.world
    for path, rows in scene.expected.items():
        assert world.scan(path) == rows, path
        report = world.admin(path).verify()
        assert not [finding for finding in report.findings if finding.severity != "note"], report
    new = world.admin("new").manifest()
    assert new.id == 2
    assert kept_for_ever(world) - before == {lender.final_checkpoint_id for lender in new.value.external_dbs}
    for lender in new.value.external_dbs:
        (final,) = [c for c in world.admin(lender.path).checkpoints() if c.id == lender.final_checkpoint_id]
        assert final.name == "flagstone.clone/new"
    # And it is a database like any other.
    world.write("new", {next(iter(scene.expected["new"])): b"changed"})
    assert b"changed" in world.scan("new").values()


def kept_for_ever(world: World) -> set[object]:
    """The checkpoints of all databases that never expire."""
    paths = {path.partition("/")[0] for path in world.objects() if "/manifest/" in path}
    return {
        entry.id for path in paths for entry in world.admin(path).checkpoints() if entry.expires_s is None
    }


SCENES = [
    whole_clone_of_a_clone,
    union,
    clone_of_a_checkpoint_with_its_wal_apart,
    projection,
    union_with_a_copied_sst,
]
# A crash after an effect is the hardest case and runs with every scene; the other effects run with two.
CASES = [(make, "crash_after") for make in SCENES]
CASES += [(make, effect) for make in SCENES[:2] for effect in ("error", "lost_reply", "crash")]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "effect"), CASES)
def test_repeating_the_call_after_a_fault_completes_the_operation(
    make: Callable[[], Scene], effect: Effect
) -> None:
    calls, wal_calls, crashed = run(make, [], [])
    assert not crashed
    for nth in struck_calls(calls):
        assert run(make, [Fault(effect, nth=nth)], [])[2] == effect.startswith("crash"), nth
    for nth in struck_calls(wal_calls) if wal_calls else ():
        assert run(make, [], [Fault(effect, nth=nth)])[2] == effect.startswith("crash"), nth
    print(f"{calls + wal_calls} calls, struck by {effect}")


@pytest.mark.slow
@pytest.mark.parametrize("effect", ["crash", "crash_after"])
def test_repeating_the_call_after_each_of_many_crashes_completes_the_operation(effect: Effect) -> None:
    scene = whole_clone_of_a_clone()
    world = scene.world
    before = kept_for_ever(world)
    for nth in range(1, 200):
        store = FaultyStore(world.store, [Fault(effect, nth=nth)], clock=world.clock)
        try:
            scene.call(lambda path, store=store: Admin(path, store=store, clock=world.clock, ids=world.ids))
        except Crashed:
            continue
        except InvalidRequest as refusal:
            assert "a finished clone" in str(refusal)  # it crashed after the last step
        break
    else:
        pytest.fail("it never came to an end")
    check(scene, before)
