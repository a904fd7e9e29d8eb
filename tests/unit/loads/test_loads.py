"""Bulk loads among the changes: delivered once, in order, and kept until every consumer has read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flagstone.loads.rows
from flagstone.changes.change import ChangeBatch
from flagstone.changes.reader import WalReader
from flagstone.changes.retention import further
from flagstone.clones.checkpoint import delete_checkpoint
from flagstone.errors import InvalidRequest
from flagstone.loads.edit import RECORD_LIFETIME_S, is_ahead, settle_load_records
from flagstone.metadata.annotations import (
    RETENTION_MANIFEST_ID,
    HeldLoad,
    LoadPosition,
    LoadRecord,
    Position,
    encode_load,
    encode_retention,
    find_retention,
    held_loads,
)
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.counting import CountingStore
from flagstone.store.port import ObjectMissing, StoredObject
from flagstone.testing.faults import FaultyStore
from flagstone.types import ManifestId, Seq, WalId
from kit.changes import PATHS, ChangeWorld

FAR = 1 << 36


@pytest.fixture
def world() -> ChangeWorld:
    return ChangeWorld(boundary_files=True)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of an SST becomes a batch of its own."""
    monkeypatch.setattr(flagstone.loads.rows, "PIECE_BYTES", 1)


def many(count: int, value: bytes = b"x" * 90) -> dict[bytes, bytes | None]:
    return {b"k%04d" % number: value for number in range(count)}


def consume(
    reader: WalReader, start: Any = None, *, limit: int | None = None, **options: Any
) -> list[tuple[int, bytes]]:
    """The sequence number and key of every change that there is now; commits each batch."""
    found = []
    for number, batch in enumerate(reader.follow(start, timeout_s=0, **options), 1):
        found += [(change.seq, change.key) for change in batch.changes]
        reader.commit(batch)
        if number == limit:
            break
    return found


# -- delivery -------------------------------------------------------------------------------------------------


def test_a_load_is_delivered_between_the_writes_before_and_after_it(world: ChangeWorld) -> None:
    world.write(3)
    world.load({b"a": b"1", b"b": None, b"c": b"+2"})
    world.write(2)
    reader = world.reader("c")

    batches = list(reader.follow(timeout_s=0))

    assert [(change.seq, change.key) for batch in batches for change in batch.changes] == world.written
    (load,) = [batch for batch in batches if batch.wal_id is None]
    assert [(change.op, change.key, change.value) for change in load.changes] == [
        ("put", b"a", b"1"),
        ("delete", b"b", None),
        ("merge", b"c", b"+2"),
    ]
    assert {(change.seq, change.wal_id) for change in load.changes} == {(4, None)}
    assert {change.created_ms for change in load.changes} == {world.clock.now_ms()}
    assert load.position == Position(WalId(4), 4)
    assert load.next_id == 4


def test_a_load_after_the_last_wal_file_is_delivered_without_waiting_for_the_next(world: ChangeWorld) -> None:
    reader = world.reader("c")
    world.write(2)
    assert consume(reader) == world.written
    world.load(many(3), ahead=FAR)
    assert consume(reader) == world.written[2:]
    world.load(many(2), ahead=FAR)
    world.load(many(1))
    assert [seq for seq, _ in consume(reader)] == [world.seq - 1, world.seq - 1, world.seq]
    assert consume(reader) == []


@pytest.mark.parametrize("before", [0, 2])
def test_a_wal_file_written_while_it_is_missed_is_delivered_before_the_load_behind_it(
    world: ChangeWorld, before: int
) -> None:
    class Racing(FaultyStore):
        """Writes a WAL file right after it was found missing, and commits a load behind it."""

        armed = True

        def get(self, path: str) -> StoredObject:
            try:
                return super().get(path)
            except ObjectMissing:
                if self.armed and PATHS.parse_wal(path) is not None:
                    self.armed = False
                    world.write(1)
                    world.load({b"a": b""}, ahead=FAR)
                raise

    world.write(before)
    reader = world.reader("c", Racing(world.memory))

    assert consume(reader) + consume(reader) == world.written


def test_a_load_that_comes_between_two_looks_at_the_manifest_is_no_gap(world: ChangeWorld) -> None:
    class Racing(FaultyStore):
        """Commits a load right after a poll for the next manifest, in the turn that also looks for gaps."""

        armed = True

        def get(self, path: str) -> StoredObject:
            try:
                return super().get(path)
            except ObjectMissing:
                if self.armed and world.clock.monotonic() >= looks_at_s and PATHS.parse_manifest(path):
                    self.armed = False
                    world.load({b"a": b""}, ahead=FAR)
                raise

    world.write(2)
    reader = world.reader("c", Racing(world.memory))
    looks_at_s = world.clock.monotonic() + 30
    batches = reader.follow(timeout_s=60)
    found = [(change.seq, change.key) for batch in batches for change in batch.changes]
    assert found == world.written
    assert len(found) == 3


def test_a_consumer_without_a_retention_checkpoint_gets_loads_for_fifteen_minutes(world: ChangeWorld) -> None:
    world.write(2)
    world.load(many(3))
    world.write(1)
    assert consume_without_retention(world) == world.written
    world.clock.advance(RECORD_LIFETIME_S * 1000)
    world.collect()
    with pytest.raises(InvalidRequest, match="sequence numbers 3 to 3 are not in the WAL"):
        consume_without_retention(world, 2)
    assert consume_without_retention(world, 2, allow_gaps=True) == [(2, b"w2"), (4, b"w4")]


def consume_without_retention(world: ChangeWorld, start: Any = 1, **options: Any) -> list[tuple[int, bytes]]:
    batches = world.reader(None).follow(start, timeout_s=0, **options)
    return [(change.seq, change.key) for batch in batches for change in batch.changes]


def test_a_consumer_that_starts_at_a_wal_file_gets_the_loads_placed_after_the_file_before(
    world: ChangeWorld,
) -> None:
    world.write(1)
    world.load({b"early": b""})
    world.write(1)
    world.fence()
    world.load({b"later": b""})
    world.fence()
    world.fence()
    world.write(1)

    assert [key for _, key in consume_without_retention(world, 2)] == [b"early", b"w3", b"later", b"w5"]
    assert [key for _, key in consume_without_retention(world, 3)] == [b"later", b"w5"]
    assert [key for _, key in consume_without_retention(world, 4)] == [b"later", b"w5"]
    assert [key for _, key in consume_without_retention(world, 5)] == [b"w5"]
    assert consume_without_retention(world, Position(WalId(3), 4)) == [(5, b"w5")]


def test_a_large_load_is_delivered_in_batches_and_resumes_after_any_of_them(
    world: ChangeWorld, small_pieces: None
) -> None:
    world.write(1)
    world.load(many(100), {b"z%d" % number: b"" for number in range(5)}, ahead=FAR)
    world.write(1)
    whole = world.written

    batches = list(world.reader(None).follow(1, timeout_s=0))

    assert [(change.seq, change.key) for batch in batches for change in batch.changes] == whole
    assert len(batches) > 10
    for number, batch in enumerate(batches):
        used = sum(len(before.changes) for before in batches[: number + 1])
        stored = json.loads(json.dumps(batch.position))
        assert consume_without_retention(world, stored) == whole[used:]


def test_a_position_stored_in_the_middle_of_a_load_resumes_there_after_a_compaction(
    world: ChangeWorld, small_pieces: None
) -> None:
    reader = world.reader("c")
    world.write(1)
    world.load(many(60))
    got = consume(reader, limit=3)
    reader.close()
    position = world.position("c")
    assert position is not None
    assert position.loaded == len(got) - 1
    world.compact()
    world.collect()

    got += consume(world.reader("c"))

    assert got == world.written


def test_a_load_that_replaces_all_rows_ends_the_feed_with_an_error(world: ChangeWorld) -> None:
    reader = world.reader("c")
    world.write(1)
    world.load({b"a": b""})
    consume(reader)
    world.load({b"b": b""}, replaces_all=True)
    with pytest.raises(InvalidRequest, match=r"replaced everything .* start over with a copy"):
        consume(reader)
    world.write(1)
    with pytest.raises(InvalidRequest, match=r"replaced everything .* start over with a copy"):
        consume(reader)
    assert consume(reader, allow_gaps=True) == [(world.seq, b"w4")]


def test_a_replacing_load_into_an_empty_database_is_delivered(world: ChangeWorld) -> None:
    world.load({b"a": b""}, replaces_all=True)

    assert consume(world.reader("c")) == [(1, b"a")]


def test_sequence_numbers_in_neither_wal_nor_load_raise_unless_gaps_are_allowed(world: ChangeWorld) -> None:
    reader = world.reader("c")
    world.write(2)
    consume(reader)
    world.seq += 3
    world.load({b"a": b""})

    with pytest.raises(InvalidRequest, match="sequence numbers 3 to 5 are not in the WAL"):
        consume(reader)
    assert consume(reader, allow_gaps=True) == [(6, b"a")]


def test_with_gaps_allowed_flushed_rows_cost_no_extra_requests(world: ChangeWorld) -> None:
    for _ in range(20):
        world.write(1)
        world.seq += 5
    world.flush()
    store = CountingStore(world.memory, component="test")

    rows = list(world.reader(None, store).follow(1, timeout_s=0, allow_gaps=True))

    assert len(rows) == 20
    assert store.totals()["requests"]["get"] <= 20 + 1 + 3 + 3 + 1  # the last one reads which database it is


# -- keeping --------------------------------------------------------------------------------------------------


def test_ssts_of_a_load_are_kept_until_the_absent_consumer_has_read_them(world: ChangeWorld) -> None:
    reader = world.reader("c")
    world.write(1)
    assert consume(reader, limit=1) == world.written
    reader.close()
    world.load(many(10), ahead=FAR)
    world.write(2)
    world.flush()
    world.compact()
    world.clock.advance(7 * 24 * 3600 * 1000)
    world.collect()
    assert world.ssts == 2

    assert consume(world.reader("c")) == world.written[1:]

    passing = world.reader("c")
    consume(passing)
    passing.close()
    world.write(1)
    consume(passing)
    world.clock.advance(20_000)
    passing.close()
    assert world.load_records == []
    world.collect()
    assert world.ssts == 1


def test_a_retention_checkpoint_placed_in_time_keeps_an_earlier_load(world: ChangeWorld) -> None:
    world.write(1)
    world.load(many(3))
    world.compact()
    reader = world.reader("c")
    assert consume(reader, limit=1) == world.written[:1]
    world.clock.advance(2 * RECORD_LIFETIME_S * 1000)
    world.collect()

    assert consume(reader) == world.written[1:]


def test_a_released_or_expired_retention_checkpoint_keeps_no_load(world: ChangeWorld) -> None:
    for lifetime in (None, timedelta(hours=1)):
        reader = world.reader("c", pin_lifetime=lifetime)
        next(reader.follow(timeout_s=0), None)
        world.load({b"k": b""})
        world.write(1)
        world.clock.advance(RECORD_LIFETIME_S * 1000)
        world.collect()
        assert world.load_records == [world.seq - 1]
        if lifetime is None:
            reader.release()
        else:
            world.clock.advance(3_600_000)
            world.collect()
        assert world.load_records == []


def test_a_retention_checkpoint_deleted_by_an_administrator_keeps_no_load(world: ChangeWorld) -> None:
    for name in ("one", "other"):
        next(world.reader(name).follow(timeout_s=0), None)
    world.load({b"k": b""})
    world.clock.advance(RECORD_LIFETIME_S * 1000)
    for left, name in ((1, "one"), (0, "other")):
        held = find_retention(world.manifests.require_latest().value, name)
        assert held is not None
        delete_checkpoint(world.manifests, held.checkpoint.id)
        world.collect()
        assert len(world.load_records) == left


def test_without_consumers_only_the_newest_load_records_are_kept(world: ChangeWorld) -> None:
    for _ in range(40):
        world.load({b"k": b""})
    assert world.load_records == list(range(25, 41))
    next(world.reader("c").follow(timeout_s=0))
    for _ in range(40):
        world.load({b"k": b""})
    assert world.load_records == list(range(25, 81))


def record_at(seq: int, wal_id: int, *, created_s: int = 1_000, **options: Any) -> Checkpoint:
    record = LoadRecord("done", Seq(seq), 0, position=LoadPosition(Seq(seq - 1), WalId(wal_id)), **options)
    return Checkpoint(SYSTEM_IDS.uuid(), ManifestId(7), created_s, None, encode_load(record))


def waiting(position: Position, expires_s: int | None) -> Checkpoint:
    """The retention checkpoint of a consumer at that position."""
    name = encode_retention("c", position)
    return Checkpoint(SYSTEM_IDS.uuid(), RETENTION_MANIFEST_ID, 1_000, expires_s, name)


def expiries(manifest: Manifest) -> list[int | None]:
    return [entry.expires_s for entry in manifest.checkpoints]


def test_a_load_record_decodes_with_its_position_or_without_one() -> None:
    entry = record_at(9, 4, replaces=True, owner="a b&c")
    (held,) = held_loads(Manifest(checkpoints=(entry,)))
    assert held == HeldLoad(
        entry, LoadRecord("done", Seq(9), 0, "", "a b&c", LoadPosition(Seq(8), WalId(4)), replaces=True)
    )
    old = Checkpoint(entry.id, ManifestId(7), 1, None, "flagstone.load/done?seq=9&id_ms=0&reason=&owner=")
    assert next(held_loads(Manifest(checkpoints=(old,)))).record.position is None


def test_a_load_record_expires_with_the_last_retention_checkpoint_that_needs_it() -> None:
    manifest = Manifest(checkpoints=(record_at(9, 4),))
    spare_s = 1_000 + RECORD_LIFETIME_S

    def settled(*consumers: Checkpoint) -> list[int | None]:
        once = settle_load_records(
            replace(manifest, checkpoints=(*manifest.checkpoints, *consumers)), now_s=1_100
        )
        assert settle_load_records(once, now_s=1_200) == once
        return expiries(once)[:1]

    before, behind = Position(WalId(2), 8), Position(WalId(5), 9)
    assert settled() == [spare_s]
    assert settled(waiting(behind, None)) == [spare_s]
    assert settled(waiting(before, None), waiting(behind, None)) == [None]
    assert settled(waiting(before, 1_200)) == [spare_s]
    assert settled(waiting(before, 90_000), waiting(before, 5_000)) == [90_000]
    assert settled(waiting(before, 90_000), waiting(before, None)) == [None]
    assert settled(waiting(Position(WalId(5)), None)) == [None]
    assert settled(waiting(Position(WalId(6)), None)) == [spare_s]


def test_an_expired_load_record_is_removed_although_a_consumer_needs_it() -> None:
    expired = settle_load_records(Manifest(checkpoints=(record_at(9, 4),)), now_s=1_000)

    needed = waiting(Position(WalId(1), 0), None)
    settled = settle_load_records(
        replace(expired, checkpoints=(*expired.checkpoints, needed)), now_s=1_000 + RECORD_LIFETIME_S
    )

    assert settled.checkpoints == (needed,)


def test_a_replacing_load_is_not_kept_for_retention_checkpoints() -> None:
    manifest = Manifest(checkpoints=(record_at(9, 4, replaces=True), waiting(Position(WalId(1), 0), None)))

    settled = settle_load_records(manifest, now_s=1_000)

    assert expiries(settled) == [1_000 + RECORD_LIFETIME_S, None]


def test_further_returns_the_later_of_two_positions() -> None:
    in_the_load = Position(WalId(5), 8, loaded=30)
    assert further(in_the_load, Position(WalId(5), 8, loaded=20)) == in_the_load
    assert further(in_the_load, Position(WalId(5), 9)) == Position(WalId(5), 9)
    assert further(Position(WalId(6), 12), in_the_load) == Position(WalId(6), 12)
    assert further(in_the_load, Position(WalId(6))) == Position(WalId(6), 8, loaded=30)
    assert is_ahead(in_the_load, 9, LoadPosition(Seq(8), WalId(4)))


# -- a model --------------------------------------------------------------------------------------------------

STEPS = st.sampled_from(
    (
        *("write", "write", "fence", "flush", "load", "load_far", "compact", "collect", "wait"),
        *("consume_one", "consume", "restart"),
    )
)


class Consumer:
    """Stores changes and position together, as a consumer does that writes both in one transaction."""

    def __init__(self, world: ChangeWorld) -> None:
        self.world = world
        self.got: list[tuple[int, bytes]] = []
        self.stored: list[Any] | None = None
        self.follow()

    def follow(self, start: Any = None) -> None:
        self.reader = self.world.reader("c")
        self.batches: Iterator[ChangeBatch] = self.reader.follow(start, timeout_s=0)

    def consume(self, limit: int | None) -> None:
        taken = 0
        while limit is None or taken < limit:
            batch = next(self.batches, None)
            if batch is None:
                self.batches = self.reader.follow(timeout_s=0)
                return
            self.got += [(change.seq, change.key) for change in batch.changes]
            self.stored = list(batch.position)
            self.reader.commit(batch)
            taken += 1


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, max_size=30), crashes=st.booleans())
def test_every_change_is_delivered_once_after_any_sequence_of_steps(
    small_pieces: None, steps: list[str], *, crashes: bool
) -> None:
    world = ChangeWorld(boundary_files=True)
    consumer = Consumer(world)
    consumer.consume(None)
    for number, step in enumerate(steps):
        match step:
            case "write":
                world.write()
            case "fence":
                world.fence()
            case "flush":
                world.flush()
            case "load" | "load_far":
                ahead = FAR if step == "load_far" else 1
                world.load({b"%d/%d" % (number, key): b"x" * 400 for key in range(5)}, ahead=ahead)
            case "compact":
                world.flush()
                world.compact()
            case "collect":
                world.collect()
            case "wait":
                world.clock.advance(1_000_000)
            case "consume_one":
                consumer.consume(1)
            case "consume":
                consumer.consume(None)
            case _ if crashes:
                consumer.follow(consumer.stored)  # later than the position of the retention checkpoint
            case _:
                consumer.reader.close()
                consumer.follow()
    # Where collected manifests left a gap, a reader finds the latest manifest after a minute.
    world.clock.advance(60_001)
    consumer.consume(None)

    assert consumer.got == world.written
    consumer.reader.close()
    world.clock.advance(2_000_000)
    world.collect()
    assert world.load_records == []
