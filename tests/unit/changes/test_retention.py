"""Retention checkpoints: no collector deletes a WAL file that a consumer has not read."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone import Admin
from flagstone.changes.retention import plan_wal_start
from flagstone.errors import InvalidRequest
from flagstone.metadata.annotations import (
    RETENTION_MANIFEST_ID,
    Position,
    decode_retention,
    encode_retention,
    held_retentions,
)
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.commit_log.sqlite import SqliteCommitLog
from flagstone.store.local import LocalStore
from flagstone.store.port import ObjectStore
from flagstone.store.two_phase import TwoPhaseStore
from flagstone.testing.faults import Crashed, Fault, FaultyStore
from flagstone.types import ManifestId, WalId
from kit.changes import ChangeWorld, begin_at, seqs_of
from kit.faults import InterposingStore


@pytest.fixture
def world() -> ChangeWorld:
    return ChangeWorld()


def with_retentions(*positions: Position, replay_after: int = 100) -> Manifest:
    return Manifest(
        replay_after_wal_id=WalId(replay_after),
        checkpoints=tuple(
            Checkpoint(
                SYSTEM_IDS.uuid(), RETENTION_MANIFEST_ID, 1, None, encode_retention(f"c{number}", position)
            )
            for number, position in enumerate(positions)
        ),
    )


# -- names ------------------------------------------------------------------------------------------------


@given(
    name=st.text(min_size=1),
    next_id=st.integers(0, 2**64),
    after=st.integers(0, 2**64 - 1),
    copied=st.booleans(),
)
def test_a_position_encoded_in_a_checkpoint_name_decodes_to_itself(
    name: str, next_id: int, after: int, copied: bool
) -> None:
    position = Position(WalId(next_id), after, copied=copied)
    try:
        encoded = encode_retention(name, position)
    except UnicodeEncodeError:
        return

    held = decode_retention(Checkpoint(SYSTEM_IDS.uuid(), RETENTION_MANIFEST_ID, 1, None, encoded))

    assert held is not None
    assert (held.name, held.position) == (name, position)


@pytest.mark.parametrize(
    "name", [None, "nightly", "flagstone.log-pin/x", "flagstone.log-pin/x?next=a&after=1"]
)
def test_a_checkpoint_with_another_name_is_no_retention_checkpoint(name: str | None) -> None:
    assert decode_retention(Checkpoint(SYSTEM_IDS.uuid(), RETENTION_MANIFEST_ID, 1, None, name)) is None


def test_a_checkpoint_of_a_real_manifest_is_no_retention_checkpoint_under_any_name() -> None:
    name = encode_retention("x", Position(WalId(3)))

    assert decode_retention(Checkpoint(SYSTEM_IDS.uuid(), ManifestId(4), 1, None, name)) is None


def test_the_wal_is_kept_from_the_slowest_consumer_or_from_the_replay_start() -> None:
    assert plan_wal_start(Manifest()) is None
    assert plan_wal_start(with_retentions(Position(WalId(8)), Position(WalId(5)))) == 4
    assert plan_wal_start(with_retentions(Position(WalId(300)), replay_after=100)) == 100


# -- keeping ----------------------------------------------------------------------------------------------


def test_wal_files_flushed_while_the_consumer_is_away_are_kept(world: ChangeWorld) -> None:
    world.write(3)
    assert seqs_of(world.reader("c"), limit=2) == [1, 2]
    for _ in range(5):
        world.write(4)
        world.flush()
        world.collect()

    reader = world.reader("c")
    assert seqs_of(reader) == list(range(1, world.last_id + 1))
    reader.close()
    world.collect()

    # The latest manifest needs the last WAL file in any case.
    assert world.wal_ids() == [world.last_id]
    world.write(2)
    world.flush()
    world.collect()
    assert seqs_of(world.reader("c")) == [world.last_id - 1, world.last_id]


def test_our_own_collector_keeps_the_wal_of_a_consumer_and_the_database_verifies(world: ChangeWorld) -> None:
    world.write(3)
    world.flush()
    reader = world.reader("c")
    assert seqs_of(reader) == [1, 2, 3]
    reader.close()
    world.write(5)
    world.flush()
    world.write(5)
    world.flush()
    world.clock.advance(5000)
    admin = Admin("db", store=world.memory, clock=world.clock)
    admin.collect_garbage(kinds=["wal", "manifest"], min_age=timedelta(0))

    assert world.missing_wal_ids(4) == []
    assert world.wal_ids()[0] == 4
    assert admin.verify().ok
    assert seqs_of(world.reader("c")) == list(range(4, 14))

    world.reader("c").release()
    admin.collect_garbage(kinds=["wal", "manifest"], min_age=timedelta(0))
    assert world.wal_ids() == [13]
    assert admin.verify().ok
    # A retention checkpoint can be placed again, although no checkpoint referred to manifest 0 in between.
    world.write(1)
    assert seqs_of(world.reader("c")) == [13, 14]


@pytest.mark.parametrize("kind", ["local", "two-phase"])
def test_retention_works_on_local_and_two_phase_stores(tmp_path: Path, kind: str) -> None:
    store: ObjectStore = LocalStore(tmp_path / "store")
    if kind == "two-phase":
        store = TwoPhaseStore(store, SqliteCommitLog(tmp_path / "commits.db"))
    world = ChangeWorld(store)
    admin = Admin("db", store=store)
    for _ in range(3):
        world.write(3)
        world.flush()
        seen = seqs_of(reader := world.reader("c"), limit=2)
        reader.close()
        admin.collect_garbage(kinds=["wal", "manifest"], min_age=timedelta(0))
        assert world.missing_wal_ids(seen[-1] + 1) == []
        world.reader("c").release()
        admin.collect_garbage(kinds=["wal", "manifest"], min_age=timedelta(0))


def test_a_start_at_a_collected_wal_file_raises_with_the_first_one_left(world: ChangeWorld) -> None:
    world.write(3)
    world.flush()
    world.write(3)
    world.flush()
    world.collect()

    with pytest.raises(InvalidRequest, match=r"file 2 .* from 6 on"):
        list(world.reader("c").batches(2))


def test_a_retention_checkpoint_keeps_no_sst(world: ChangeWorld) -> None:
    world.write(2)
    seqs_of(world.reader("c"))

    (held,) = held_retentions(world.manifests.require_latest().value)
    assert held.checkpoint.manifest_id == 0
    assert world.manifests.load(0).ssts == {}
    assert world.manifests.require_latest().id > 0


def test_a_retention_checkpoint_lives_for_its_lifetime_after_the_last_read(world: ChangeWorld) -> None:
    world.write(1)
    reader = world.reader("c", pin_lifetime=timedelta(seconds=60))
    assert seqs_of(reader) == [1]
    for _ in range(10):
        world.clock.advance(31_000)
        world.write(1)
        world.flush()
        world.collect()
        assert len(seqs_of(reader)) == 1

    world.clock.advance(61_000)
    world.write(3)
    world.flush()
    world.collect()

    assert world.position("c") is None
    with pytest.raises(InvalidRequest, match=r"of 'c' is gone|file 12 .* was removed"):
        seqs_of(reader)


def test_a_new_consumer_reads_from_the_oldest_wal_file_although_a_collector_runs_meanwhile() -> None:
    nth, interrupted = 0, True
    while interrupted:
        nth += 1
        world = ChangeWorld()
        world.write(5)
        world.flush()
        world.write(3)
        store = InterposingStore(world.memory, world.collect, nth=nth)
        seen = seqs_of(world.reader("c", store))
        interrupted = store.acted

        assert seen == list(range(seen[0], 9))
        assert seen[0] in (1, 5)
    assert nth > 10


def test_a_consumer_may_start_at_a_wal_file_instead_of_its_stored_position(world: ChangeWorld) -> None:
    world.write(9)
    reader = world.reader("c")
    assert seqs_of(reader, commit=False) == list(range(1, 10))

    batches = list(world.reader("c").follow(6, timeout_s=0))

    assert [batch.wal_id for batch in batches] == [6, 7, 8, 9]
    assert world.position("c") == Position(WalId(6))


def test_positions_are_stored_about_every_ten_seconds_and_on_close(world: ChangeWorld) -> None:
    world.write(100)
    with world.reader("c") as reader:
        versions = world.manifests.require_latest().id
        for batch in reader.follow(timeout_s=0):
            world.clock.advance(1000)
            reader.commit(batch)
        stored = world.manifests.require_latest().id - versions

    assert 9 <= stored <= 12
    assert world.position("c") == Position(WalId(101), 100)


def test_a_reader_without_a_consumer_name_has_no_position_and_cannot_commit(world: ChangeWorld) -> None:
    world.write(1)
    reader = world.reader(None)

    assert reader.position is None
    with pytest.raises(InvalidRequest, match="name its consumer"):
        reader.commit(next(reader.batches()))
    with pytest.raises(InvalidRequest, match="needs a name"):
        world.reader("")
    for lifetime in (timedelta(0), timedelta.max):
        with pytest.raises(InvalidRequest, match="from one second to"):
            world.reader("c", pin_lifetime=lifetime)


# -- crashes and races ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("effect", ["crash", "crash_after"])
def test_a_crash_at_any_request_of_a_consumer_loses_no_change(effect: str) -> None:
    nth, finished = 0, False
    while not finished:
        nth += 1
        world = ChangeWorld()
        world.write(4)
        store = FaultyStore(world.memory, [Fault(nth=nth, effect=effect)])  # type: ignore[arg-type]
        used: list[int] = []
        try:
            reader = world.reader("c", store)
            for batch in reader.follow(timeout_s=0):
                used.append(batch.wal_id)
                world.clock.advance(11_000)
                reader.commit(batch)
                world.write(1 if batch.wal_id < 6 else 0)
                world.flush()
            reader.close()
            finished = True
        except Crashed:
            pass
        world.write(3)
        world.flush()
        world.collect()
        world.flush()
        world.collect()

        position = world.position("c")
        if position is not None:
            assert position.next_id <= (used[-1] if used else 0) + 1
            assert world.missing_wal_ids(position.next_id) == []
            again = seqs_of(world.reader("c"))
            assert sorted({*used, *again}) == list(range(1, world.last_id + 1))
    assert nth > 20


@pytest.mark.slow
@pytest.mark.parametrize("effect", ["error", "lost_reply"])
def test_a_failed_request_or_lost_reply_loses_no_change(effect: str) -> None:
    nth, faulted = 0, True
    while faulted:
        nth += 1
        world = ChangeWorld()
        world.write(4)
        store = FaultyStore(world.memory, [Fault(nth=nth, effect=effect)])  # type: ignore[arg-type]
        with world.reader("c", store) as reader:
            assert seqs_of(reader, limit=3) == [1, 2, 3]
        world.reader("gone", store).release()
        faulted = len(store.calls) >= nth
        world.write(2)
        world.flush()
        world.collect()

        assert world.position("c") == Position(WalId(4), 3)
        assert seqs_of(world.reader("c")) == [4, 5, 6]
    assert nth > 20


def _others(world: ChangeWorld) -> dict[str, Callable[[], None]]:
    def another_begins() -> None:
        world.retention("new").set(begin_at(world.manifests.require_latest().value.replay_after_wal_id + 1))  # type: ignore[arg-type]

    def another_moves() -> None:
        world.retention("slow").move(Position(WalId(7)))

    def another_is_released() -> None:
        world.retention("slow").release()

    def the_writer_continues() -> None:
        world.write(3)
        world.flush()
        world.collect()

    def all_of_it() -> None:
        the_writer_continues()
        another_begins()
        the_writer_continues()
        another_moves()
        the_writer_continues()

    return {
        "another begins": another_begins,
        "another moves": another_moves,
        "another is released": another_is_released,
        "the writer continues": the_writer_continues,
        "all of it": all_of_it,
    }


@pytest.mark.slow
@pytest.mark.parametrize("action", ["place", "place early", "move", "release"])
@pytest.mark.parametrize("other", _others(ChangeWorld()))
def test_a_concurrent_writer_collector_or_consumer_between_any_two_requests_loses_no_wal_file(
    action: str, other: str
) -> None:
    nth, interrupted = 0, True
    while interrupted:
        nth += 1
        world = ChangeWorld()
        world.write(5)
        world.retention("slow").set(begin_at(3))  # type: ignore[arg-type]
        world.retention("mine").set(begin_at(4))  # type: ignore[arg-type]
        world.write(5)
        world.flush()
        world.collect()
        store = InterposingStore(world.memory, _others(world)[other], nth=nth)
        mine = world.retention("fresh" if action.startswith("place") else "mine", store)
        match action:
            case "place":
                start = world.manifests.require_latest().value.replay_after_wal_id + 1
                mine.set(begin_at(start))  # type: ignore[arg-type]
            case "place early":
                mine.set(begin_at(4))  # type: ignore[arg-type]
            case "move":
                mine.move(Position(WalId(9)))
            case _:
                mine.release()
        interrupted = store.acted
        for _ in range(2):
            world.write(2)
            world.flush()
            world.collect()

        for held in held_retentions(world.manifests.require_latest().value):
            assert world.missing_wal_ids(held.position.next_id) == [], (nth, held)
    assert nth > 3


@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.integers(1, 4)),
            st.tuples(st.just("flush"), st.just(0)),
            st.tuples(st.just("collect"), st.just(0)),
            st.tuples(st.just("read"), st.integers(1, 6)),
            st.tuples(st.just("save"), st.just(0)),
            st.tuples(st.just("crash"), st.just(0)),
            st.tuples(st.just("other"), st.integers(0, 2)),
        ),
        max_size=40,
    )
)
def test_a_consumer_gets_every_change_after_any_sequence_of_writes_collections_and_crashes(
    steps: list[tuple[str, int]],
) -> None:
    world = ChangeWorld()
    reader = world.reader("c")
    assert seqs_of(reader) == []
    used: list[int] = []
    for step, number in steps:
        match step:
            case "write":
                world.write(number)
            case "flush":
                world.flush()
            case "collect":
                world.collect()
            case "read":
                used += seqs_of(reader, limit=number)
            case "save":
                reader.close()
            case "crash":
                reader = world.reader("c")
            case _:
                other = world.reader("other")
                if number == 0:
                    other.release()
                else:
                    seqs_of(other, limit=number)
                    other.close()
    used += seqs_of(world.reader("c"))

    assert sorted(set(used)) == list(range(1, world.last_id + 1))
