"""A two-phase writer crashes at every step; the next process finds the old object or the new one."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from flagstone.store.commit_log.sqlite import SqliteCommitLog
from flagstone.store.local import LocalStore
from flagstone.store.port import ObjectExists, ObjectMissing
from flagstone.store.two_phase import TwoPhaseStore
from kit.two_phase import Crash, FailAt, TwoPhaseWorld

pytestmark = pytest.mark.slow

PATH = "gc/boundary"
Write = Callable[[TwoPhaseStore], None]


def _create(store: TwoPhaseStore) -> None:
    store.put_if_absent(PATH, b"new", token="writer")


def _update(store: TwoPhaseStore) -> None:
    store.put_if_match(PATH, b"new", store.head(PATH).version, token="writer")


def _overwrite(store: TwoPhaseStore) -> None:
    store.put(PATH, b"new")


def _delete(store: TwoPhaseStore) -> None:
    store.delete(PATH)


def _delete_many(store: TwoPhaseStore) -> None:
    store.delete_many([PATH])


def _absent(store: TwoPhaseStore) -> None:
    """Nothing was written before."""


def _created(store: TwoPhaseStore) -> None:
    store.put_if_absent(PATH, b"old")


def _updated(store: TwoPhaseStore) -> None:
    store.put_if_match(PATH, b"old", store.put_if_absent(PATH, b"older"))


def _unrecorded(store: TwoPhaseStore) -> None:
    store.put(PATH, b"old")


CASES = {
    "create": (_absent, _create, None, b"new"),
    "first update": (_created, _update, b"old", b"new"),
    "later update": (_updated, _update, b"old", b"new"),
    "update of an unrecorded object": (_unrecorded, _update, b"old", b"new"),
    "put over a created object": (_created, _overwrite, b"old", b"new"),
    "put over an updated object": (_updated, _overwrite, b"old", b"new"),
    "delete of a created object": (_created, _delete, b"old", None),
    "delete of an updated object": (_updated, _delete, b"old", None),
    "delete of many": (_updated, _delete_many, b"old", None),
}


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[[], TwoPhaseWorld]]:
    """Makes worlds, each with a commit log of its own."""
    made: list[TwoPhaseWorld] = []

    def make() -> TwoPhaseWorld:
        made.append(TwoPhaseWorld(SqliteCommitLog(tmp_path / f"{len(made)}.db", synchronous="OFF")))
        return made[-1]

    yield make
    for world in made:
        world.log.close()


def crashed(
    make: Callable[[], TwoPhaseWorld], prepare: Write, write: Write
) -> Iterator[tuple[TwoPhaseWorld, bool]]:
    """One world for each point at which the write can crash, and whether the write was acknowledged."""
    for call in itertools.count():
        for moment in ("before", "after"):
            world = make()
            prepare(world.process())
            try:
                write(world.process(FailAt(call, moment)))
            except Crash:
                yield world, False
            else:
                yield world, True
                return


def read(store: TwoPhaseStore) -> bytes | None:
    try:
        return store.get(PATH).data
    except ObjectMissing:
        return None


def check_final(world: TwoPhaseWorld, expected: bytes | None) -> None:
    """After recovery and collection the base has exactly the objects that readers see."""
    store = world.process()
    store.recover()
    store.collect_garbage(min_age_ms=0)
    assert read(store) == expected
    assert world.base.contents() == ({} if expected is None else {PATH: expected})
    assert [meta.path for meta in store.list("")] == ([] if expected is None else [PATH])
    world.check_settled()


@pytest.mark.parametrize("case", CASES)
def test_readers_after_a_crash_see_the_old_or_the_new_object_and_never_the_other_later(
    worlds: Callable[[], TwoPhaseWorld], case: str
) -> None:
    prepare, write, old, new = CASES[case]
    seen = []
    for world, acknowledged in crashed(worlds, prepare, write):
        found = read(world.process())
        assert found == new if acknowledged else found in (old, new)
        seen.append(found)
        check_final(world, found)
    # There is one commit point: from it on, no crash shows the old object.
    assert seen == sorted(seen, key=lambda found: found == new)
    assert {*seen} == {old, new}


@pytest.mark.parametrize("case", CASES)
def test_recovery_after_a_crash_leaves_the_object_that_readers_then_see(
    worlds: Callable[[], TwoPhaseWorld], case: str
) -> None:
    prepare, write, old, new = CASES[case]
    for world, acknowledged in crashed(worlds, prepare, write):
        world.process().recover()
        assert world.log.pending("") == []
        found = world.base.contents().get(PATH)
        assert found == new if acknowledged else found in (old, new)
        assert read(world.process()) == found
        check_final(world, found)


@pytest.mark.parametrize(
    "repair",
    [TwoPhaseStore.recover, partial(TwoPhaseStore.collect_garbage, min_age_ms=0)],
    ids=["recover", "collect"],
)
@pytest.mark.parametrize("case", CASES)
def test_a_recovery_or_collection_that_crashes_at_any_step_leaves_the_old_or_the_new_object(
    worlds: Callable[[], TwoPhaseWorld], case: str, repair: Callable[[TwoPhaseStore], object]
) -> None:
    prepare, write, old, new = CASES[case]
    for point in itertools.count():
        finished_all = True
        for world, acknowledged in crashed(worlds, prepare, write):
            try:
                repair(world.process(FailAt(point, "after")))
            except Crash:
                finished_all = False
            found = read(world.process())
            assert found == new if acknowledged else found in (old, new)
            check_final(world, found)
        if finished_all:
            return


def test_another_creator_after_a_crash_succeeds_or_finds_the_object(
    worlds: Callable[[], TwoPhaseWorld],
) -> None:
    for world, acknowledged in crashed(worlds, _absent, _create):
        rival = world.process()
        try:
            rival.put_if_absent(PATH, b"rival", token="rival")
        except ObjectExists:
            assert rival.head(PATH).token == "writer"
            assert world.base.contents() == {PATH: b"new"}
            check_final(world, b"new")
        else:
            assert not acknowledged
            check_final(world, b"rival")


def test_a_listing_after_a_crash_has_every_decided_object(worlds: Callable[[], TwoPhaseWorld]) -> None:
    for world, acknowledged in crashed(worlds, _absent, _create):
        listed = [meta.path for meta in world.process().list("gc")]
        assert listed == ([PATH] if read(world.process()) else [])
        assert listed or not acknowledged


def test_range_reads_after_a_crash_find_every_decided_object(worlds: Callable[[], TwoPhaseWorld]) -> None:
    for world, _ in crashed(worlds, _absent, _create):
        store = world.process()
        try:
            tail = store.get_tail(PATH, 2).data
        except ObjectMissing:
            assert read(store) is None
        else:
            assert tail == b"ew"


CHILD = """
import os, signal, sys
from flagstone.store.commit_log.sqlite import SqliteCommitLog
from flagstone.store.local import LocalStore
from flagstone.store.two_phase import TwoPhaseStore

folder, die_at = sys.argv[1], int(sys.argv[2])
calls = 0

class Dying:
    def __init__(self, target):
        self.target = target
    def __getattr__(self, name):
        member = getattr(self.target, name)
        def call(*args, **options):
            global calls
            answer = member(*args, **options)
            calls += 1
            if calls == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer
        return call

store = TwoPhaseStore(Dying(LocalStore(folder + "/objects")), Dying(SqliteCommitLog(folder + "/commits.db")))
version = None
for number in range(1_000_000):
    store.put_if_absent(f"wal/{number:08}", str(number).encode() * 100)
    state = str(number).encode()
    version = store.put_if_match("state", state, version) if version else store.put_if_absent("state", state)
    print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("die_at", [2, 3, 4, 5, 25, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48])
def test_a_killed_process_loses_no_acknowledged_write(tmp_path: Path, die_at: int) -> None:
    (tmp_path / "objects").mkdir()
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), str(die_at)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    acknowledged = [int(line) for line in child.stdout.split()]
    log = SqliteCommitLog(tmp_path / "commits.db")
    base = LocalStore(tmp_path / "objects")
    store = TwoPhaseStore(base, log)
    store.recover()
    numbers = [int(meta.path.removeprefix("wal/")) for meta in store.list("wal")]
    assert numbers[: len(acknowledged)] == acknowledged
    assert numbers == list(range(len(numbers)))
    assert len(numbers) <= len(acknowledged) + 1
    for number in numbers:
        assert store.get(f"wal/{number:08}").data == str(number).encode() * 100
    if acknowledged:
        assert int(store.get("state").data) >= acknowledged[-1]
        assert base.get("state").data == store.get("state").data
    assert log.pending("") == []
    log.close()
