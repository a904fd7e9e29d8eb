"""Final checkpoints of clones, and clones that one engine starts and the other finishes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from flagstone import InvalidRequest
from flagstone.clones.clone import Cloner
from flagstone.clones.origin import CloneSource
from flagstone.metadata.manifest import ExternalDb
from flagstone.metadata.stores import ManifestStore
from flagstone.store.paths import DbPaths
from flagstone.testing.faults import Crashed, Fault, FaultyStore
from flagstone.types import ManifestId
from interop.test_views import SharedFolder, make_parent
from kit.databases import numbered

NOW = timedelta(0)
OURS = "flagstone.clone/c"


@pytest.fixture
def shared(tmp_path: Path, wheel: Any) -> SharedFolder:
    made = SharedFolder(tmp_path, wheel)
    make_parent(made, "the wheel's parent", "p", numbered(0, 20), numbered(5, 8, b"w"))
    return made


ROWS = numbered(0, 20) | numbered(5, 8, b"w")


def finals(shared: SharedFolder, path: str = "p") -> dict[UUID, str | None]:
    return {entry.id: entry.name for entry in shared.admin(path).checkpoints() if entry.expires_s is None}


def unfinish(shared: SharedFolder, path: str) -> None:
    """Leave what a crash of the wheel before its last step leaves: the clone's manifest 1, which is not initialized."""
    shared.store.delete(DbPaths(path).manifest(ManifestId(2)))
    assert not shared.admin(path).manifest().value.initialized


def begin(shared: SharedFolder, to: str, source: CloneSource) -> None:
    """Begin a clone with Flagstone, and crash before its last step."""
    dying = FaultyStore(shared.store, [Fault("crash", op="put_if_absent", path=f"{to}/manifest/*2.manifest")])
    with pytest.raises(Crashed):
        Cloner(dying).clone(to, [source])


def wheel_error(shared: SharedFolder, call: str, *arguments: Any) -> str:
    with pytest.raises(pytest.fail.Exception) as failed:
        getattr(shared.wheel, call)(shared.folder, *arguments)
    return str(failed.value)


@pytest.mark.slow
def test_the_wheel_lists_and_clones_with_named_final_checkpoints(shared: SharedFolder) -> None:
    shared.admin("p").clone("c")
    ((final, name),) = finals(shared).items()
    assert name == OURS
    assert (str(final), OURS) in [
        (id_, name) for id_, _, name in shared.wheel.list_checkpoints(shared.folder, "p")
    ]

    shared.wheel.clone(
        shared.folder, "c", [("p", None, None)]
    )  # finds the clone and its checkpoint, and does nothing
    shared.wheel.clone(
        shared.folder, "d", [("c", None, None)]
    )  # takes its checkpoint in p from the named one
    shared.write_with_wheel("p", {b"k001": b"newer"})
    shared.wheel.run_gc_once(shared.folder, "p")

    assert finals(shared)[final] == OURS
    shared.use("c", ROWS, b"k002")
    shared.use("d", ROWS, b"k003")


@pytest.mark.slow
def test_wheel_and_flagstone_name_the_missing_final_checkpoint(shared: SharedFolder) -> None:
    shared.admin("p").clone("c")
    ((final, _),) = finals(shared).items()
    shared.wheel.edit_checkpoint(
        shared.folder, "p", str(final), 0
    )  # the wheel deletes it although a clone needs it

    error = wheel_error(shared, "clone", "c", [("p", None, None)])
    assert str(final) in error
    assert "no longer exists" in error
    with pytest.raises(InvalidRequest, match=rf"{final} in 'p', which no longer exists"):
        shared.admin("p").clone("c")


def test_a_clone_of_the_wheel_keeps_its_checkpoint_until_it_is_destroyed(shared: SharedFolder) -> None:
    shared.wheel.clone(shared.folder, "c", [("p", None, None)])
    shared.wheel.clone(shared.folder, "d", [("c", None, None)])
    assert set(finals(shared).values()) == {None}
    for final in finals(shared):
        with pytest.raises(InvalidRequest, match=r"the clone at '[cd]' borrows SSTs of 'p'"):
            shared.admin("p").delete_checkpoint(final)

    assert shared.admin("d").destroy().unreleased == ()
    assert len(finals(shared)) == 1
    assert finals(shared, "c") == {}
    shared.agree("c", ROWS)
    for entry in shared.admin("c").checkpoints():
        shared.admin("c").delete_checkpoint(entry.id)  # the temporary checkpoint of cloning it
    assert shared.admin("c").destroy().unreleased == ()
    assert finals(shared) == {}
    shared.agree("p", ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("maker", ["us", "the wheel"])
def test_destroying_a_copy_of_a_clone_keeps_the_final_checkpoint_of_the_original(
    shared: SharedFolder, tmp_path: Path, maker: str
) -> None:
    if maker == "us":
        shared.admin("p").clone("c")
    else:
        shared.wheel.clone(shared.folder, "c", [("p", None, None)])
    before = finals(shared)
    shutil.copytree(tmp_path / "c", tmp_path / "x")

    assert len(shared.admin("x").destroy().unreleased) == 1
    shutil.copytree(tmp_path / "c", tmp_path / "y")
    shared.wheel.compact_everything(shared.folder, "y")
    for _ in range(2):
        assert shared.admin("y").collect_garbage(min_age=NOW).ok

    assert finals(shared) == before
    shared.write_with_wheel("p", {b"k001": b"newer"})
    shared.wheel.compact_everything(shared.folder, "p")
    for _ in range(2):
        assert shared.admin("p").collect_garbage(min_age=NOW).ok
    shared.use("c", ROWS, b"k002")


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [None, (b"k003", b"k011"), (None, b"k003")], ids=["whole", "inside", "start"]
)
def test_only_the_same_call_finishes_a_clone_that_the_wheel_began(
    shared: SharedFolder, keys: tuple[bytes | None, bytes | None] | None
) -> None:
    make_parent(shared, "the wheel's parent", "q", numbered(0, 5), {})
    checkpoint = shared.admin("p").create_checkpoint()
    shared.wheel.clone(shared.folder, "c", [("p", None, keys)])
    unfinish(shared, "c")
    others: list[tuple[str, dict[str, Any]]] = [
        ("q", {"range": keys}),
        ("p", {"checkpoint": checkpoint.id, "range": keys}),
        ("p", {"range": (b"k004", b"k012")}),
        ("p", {"range": None if keys else (b"k001", None)}),
    ]
    for path, arguments in others:
        with pytest.raises(InvalidRequest, match=r"an unfinished clone at 'c' .* not this one"):
            shared.admin(path).clone("c", **arguments)

    shared.admin("p").clone("c", range=keys)

    start, stop = keys or (None, None)
    rows = {k: v for k, v in ROWS.items() if (start is None or k >= start) and (stop is None or k < stop)}
    shared.use("c", rows, min(rows))
    with pytest.raises(InvalidRequest, match="a finished clone"):
        shared.admin("p").clone("c", range=keys)


def test_a_clone_of_a_clone_that_the_wheel_began_is_not_finished_as_a_clone_of_the_grandparent(
    shared: SharedFolder,
) -> None:
    shared.wheel.clone(shared.folder, "c", [("p", None, None)])
    shared.write_with_wheel("c", {b"new": b"1"}, wal_enabled=False)
    shared.wheel.clone(shared.folder, "d", [("c", None, None)])
    unfinish(shared, "d")

    with pytest.raises(InvalidRequest, match="not this one"):
        shared.admin("p").clone("d")
    shared.admin("c").clone("d")

    shared.agree("d", ROWS | {b"new": b"1"})


def test_a_union_that_the_wheel_began_is_not_finished_as_a_clone(shared: SharedFolder) -> None:
    make_parent(shared, "the wheel's parent", "q", {b"z": b"1"}, {})
    shared.wheel.clone(shared.folder, "u", [("p", None, None), ("q", None, None)])
    unfinish(shared, "u")

    for call in (
        lambda: shared.admin("p").clone("u"),
        lambda: shared.admin("q").clone("u"),
        lambda: shared.admin("p").union("u", ["q"]),
    ):
        with pytest.raises(InvalidRequest, match="not this one"):
            call()
    shared.admin("u").destroy()
    shared.admin("p").union("u", ["q"])
    shared.agree("u", ROWS | {b"z": b"1"})


def test_the_wheel_finishes_a_clone_that_we_began(shared: SharedFolder) -> None:
    begin(shared, "c", CloneSource("p"))

    shared.wheel.clone(shared.folder, "c", [("p", None, None)])

    assert set(finals(shared).values()) == {OURS}
    shared.agree("c", ROWS)
    assert shared.admin("c").destroy().unreleased == ()
    assert finals(shared) == {}


@pytest.mark.slow
def test_a_crafted_database_does_not_release_the_checkpoints_of_a_clone_of_the_wheel(
    shared: SharedFolder,
) -> None:
    shared.wheel.clone(shared.folder, "c", [("p", None, None)])
    shared.wheel.create_checkpoint(shared.folder, "p")
    before = finals(shared)
    shared.write("x", {b"a": b"1"})
    entries = tuple(ExternalDb("p", UUID(int=1), id_, ()) for id_ in before)
    ManifestStore(shared.store, DbPaths("x")).update(lambda now: replace(now.value, external_dbs=entries))

    shared.admin("x").collect_garbage(min_age=NOW)
    shared.admin("x").destroy()

    assert finals(shared) == before
    shared.use("c", ROWS, b"k002")


def test_the_wheel_reads_a_projection_and_we_refuse_keys_outside_of_it(shared: SharedFolder) -> None:
    shared.wheel.clone(shared.folder, "w", [("p", None, (b"k003", b"k006"))])
    shared.admin("p").clone("c", range=(b"k003", b"k006"))

    assert shared.wheel.get_many(shared.folder, "c", [b"k001", b"k004"]) == [None, b"v4"]
    with shared.open("c") as db, pytest.raises(InvalidRequest, match="b'k003' up to b'k006'"):
        db.get(b"k001")
    with shared.open("w") as db:  # the wheel does not store the range
        assert db.get(b"k001") is None
    shared.write_with_wheel("c", {b"outside": b"1"})
    with shared.open("c") as db:
        assert dict(db.scan())[b"outside"] == b"1"  # a scan is not limited to the range
        with pytest.raises(InvalidRequest, match="outside"):
            db.get(b"outside")
