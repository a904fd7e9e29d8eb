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
from interop.test_views import Place, make_parent
from kit.databases import numbered

NOW = timedelta(0)
OURS = "flagstone.clone/c"


@pytest.fixture
def place(tmp_path: Path, wheel: Any) -> Place:
    made = Place(tmp_path, wheel)
    make_parent(made, "the wheel's parent", "p", numbered(0, 20), numbered(5, 8, b"w"))
    return made


ROWS = numbered(0, 20) | numbered(5, 8, b"w")


def finals(place: Place, path: str = "p") -> dict[UUID, str | None]:
    return {entry.id: entry.name for entry in place.admin(path).checkpoints() if entry.expires_s is None}


def unfinish(place: Place, path: str) -> None:
    """What a crash of the wheel before its last step leaves: manifest 1 of the clone, which is not initialized."""
    place.store.delete(DbPaths(path).manifest(ManifestId(2)))
    assert not place.admin(path).manifest().value.initialized


def begin(place: Place, to: str, source: CloneSource) -> None:
    """Our clone without its last step."""
    dying = FaultyStore(place.store, [Fault("crash", op="put_if_absent", path=f"{to}/manifest/*2.manifest")])
    with pytest.raises(Crashed):
        Cloner(dying).clone(to, [source])


def wheel_error(place: Place, call: str, *arguments: Any) -> str:
    with pytest.raises(pytest.fail.Exception) as failed:
        getattr(place.wheel, call)(place.folder, *arguments)
    return str(failed.value)


@pytest.mark.slow
def test_the_wheel_lists_and_clones_with_named_final_checkpoints(place: Place) -> None:
    place.admin("p").clone("c")
    ((final, name),) = finals(place).items()
    assert name == OURS
    assert (str(final), OURS) in [
        (id_, name) for id_, _, name in place.wheel.list_checkpoints(place.folder, "p")
    ]

    place.wheel.clone(
        place.folder, "c", [("p", None, None)]
    )  # finds the clone and its checkpoint, and is content
    place.wheel.clone(place.folder, "d", [("c", None, None)])  # takes its checkpoint in p from the named one
    place.write_with_wheel("p", {b"k001": b"newer"})
    place.wheel.run_gc_once(place.folder, "p")

    assert finals(place)[final] == OURS
    place.use("c", ROWS, b"k002")
    place.use("d", ROWS, b"k003")


@pytest.mark.slow
def test_wheel_and_flagstone_name_the_missing_final_checkpoint(place: Place) -> None:
    place.admin("p").clone("c")
    ((final, _),) = finals(place).items()
    place.wheel.edit_checkpoint(place.folder, "p", str(final), 0)  # deletes it without a question

    said = wheel_error(place, "clone", "c", [("p", None, None)])
    assert str(final) in said
    assert "no longer exists" in said
    with pytest.raises(InvalidRequest, match=rf"{final} in 'p', which no longer exists"):
        place.admin("p").clone("c")


def test_a_clone_of_the_wheel_keeps_its_checkpoint_until_it_is_destroyed(place: Place) -> None:
    place.wheel.clone(place.folder, "c", [("p", None, None)])
    place.wheel.clone(place.folder, "d", [("c", None, None)])
    assert set(finals(place).values()) == {None}
    for final in finals(place):
        with pytest.raises(InvalidRequest, match=r"the clone at '[cd]' borrows SSTs of 'p'"):
            place.admin("p").delete_checkpoint(final)

    assert place.admin("d").destroy().unreleased == ()
    assert len(finals(place)) == 1
    assert finals(place, "c") == {}
    place.agree("c", ROWS)
    for entry in place.admin("c").checkpoints():
        place.admin("c").delete_checkpoint(entry.id)  # what cloning it needed for five minutes
    assert place.admin("c").destroy().unreleased == ()
    assert finals(place) == {}
    place.agree("p", ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("maker", ["us", "the wheel"])
def test_destroying_a_copy_of_a_clone_keeps_the_final_checkpoint_of_the_original(
    place: Place, tmp_path: Path, maker: str
) -> None:
    if maker == "us":
        place.admin("p").clone("c")
    else:
        place.wheel.clone(place.folder, "c", [("p", None, None)])
    before = finals(place)
    shutil.copytree(tmp_path / "c", tmp_path / "x")

    assert len(place.admin("x").destroy().unreleased) == 1
    shutil.copytree(tmp_path / "c", tmp_path / "y")
    place.wheel.compact_everything(place.folder, "y")
    for _ in range(2):
        assert place.admin("y").collect_garbage(min_age=NOW).ok

    assert finals(place) == before
    place.write_with_wheel("p", {b"k001": b"newer"})
    place.wheel.compact_everything(place.folder, "p")
    for _ in range(2):
        assert place.admin("p").collect_garbage(min_age=NOW).ok
    place.use("c", ROWS, b"k002")


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [None, (b"k003", b"k011"), (None, b"k003")], ids=["whole", "inside", "start"]
)
def test_only_the_same_call_finishes_a_clone_that_the_wheel_began(
    place: Place, keys: tuple[bytes | None, bytes | None] | None
) -> None:
    make_parent(place, "the wheel's parent", "q", numbered(0, 5), {})
    pinned = place.admin("p").create_checkpoint()
    place.wheel.clone(place.folder, "c", [("p", None, keys)])
    unfinish(place, "c")
    others: list[tuple[str, dict[str, Any]]] = [
        ("q", {"range": keys}),
        ("p", {"checkpoint": pinned.id, "range": keys}),
        ("p", {"range": (b"k004", b"k012")}),
        ("p", {"range": None if keys else (b"k001", None)}),
    ]
    for path, arguments in others:
        with pytest.raises(InvalidRequest, match=r"an unfinished clone at 'c' .* not this one"):
            place.admin(path).clone("c", **arguments)

    place.admin("p").clone("c", range=keys)

    start, stop = keys or (None, None)
    rows = {k: v for k, v in ROWS.items() if (start is None or k >= start) and (stop is None or k < stop)}
    place.use("c", rows, min(rows))
    with pytest.raises(InvalidRequest, match="a finished clone"):
        place.admin("p").clone("c", range=keys)


def test_a_clone_of_a_clone_that_the_wheel_began_is_not_finished_as_a_clone_of_the_grandparent(
    place: Place,
) -> None:
    place.wheel.clone(place.folder, "c", [("p", None, None)])
    place.write_with_wheel("c", {b"new": b"1"}, wal_enabled=False)
    place.wheel.clone(place.folder, "d", [("c", None, None)])
    unfinish(place, "d")

    with pytest.raises(InvalidRequest, match="not this one"):
        place.admin("p").clone("d")
    place.admin("c").clone("d")

    place.agree("d", ROWS | {b"new": b"1"})


def test_a_union_that_the_wheel_began_is_not_finished_as_a_clone(place: Place) -> None:
    make_parent(place, "the wheel's parent", "q", {b"z": b"1"}, {})
    place.wheel.clone(place.folder, "u", [("p", None, None), ("q", None, None)])
    unfinish(place, "u")

    for call in (
        lambda: place.admin("p").clone("u"),
        lambda: place.admin("q").clone("u"),
        lambda: place.admin("p").union("u", ["q"]),
    ):
        with pytest.raises(InvalidRequest, match="not this one"):
            call()
    place.admin("u").destroy()
    place.admin("p").union("u", ["q"])
    place.agree("u", ROWS | {b"z": b"1"})


def test_the_wheel_finishes_a_clone_that_we_began(place: Place) -> None:
    begin(place, "c", CloneSource("p"))

    place.wheel.clone(place.folder, "c", [("p", None, None)])

    assert set(finals(place).values()) == {OURS}
    place.agree("c", ROWS)
    assert place.admin("c").destroy().unreleased == ()
    assert finals(place) == {}


@pytest.mark.slow
def test_a_crafted_database_does_not_release_the_checkpoints_of_a_clone_of_the_wheel(place: Place) -> None:
    place.wheel.clone(place.folder, "c", [("p", None, None)])
    place.wheel.create_checkpoint(place.folder, "p")
    before = finals(place)
    place.write("x", {b"a": b"1"})
    entries = tuple(ExternalDb("p", UUID(int=1), id_, ()) for id_ in before)
    ManifestStore(place.store, DbPaths("x")).update(lambda now: replace(now.value, external_dbs=entries))

    place.admin("x").collect_garbage(min_age=NOW)
    place.admin("x").destroy()

    assert finals(place) == before
    place.use("c", ROWS, b"k002")


def test_the_wheel_reads_a_projection_and_we_refuse_keys_outside_of_it(place: Place) -> None:
    place.wheel.clone(place.folder, "w", [("p", None, (b"k003", b"k006"))])
    place.admin("p").clone("c", range=(b"k003", b"k006"))

    assert place.wheel.get_many(place.folder, "c", [b"k001", b"k004"]) == [None, b"v4"]
    with place.open("c") as db, pytest.raises(InvalidRequest, match="b'k003' up to b'k006'"):
        db.get(b"k001")
    with place.open("w") as db:  # the wheel stores the range nowhere
        assert db.get(b"k001") is None
    place.write_with_wheel("c", {b"outside": b"1"})
    with place.open("c") as db:
        assert dict(db.scan())[b"outside"] == b"1"  # a scan shows what the database holds
        with pytest.raises(InvalidRequest, match="outside"):
            db.get(b"outside")
