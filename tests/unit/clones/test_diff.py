"""Differences between the rows of two checkpoints, found in the SSTs that only one of them has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flagstone
from flagstone.db.admin.diff import Diff, Difference, plan_diff
from flagstone.errors import InvalidRequest
from flagstone.format.filter import FixedPrefix
from flagstone.lsm.operators import Concatenate
from flagstone.metadata.manifest import Checkpoint
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.counting import CountingStore
from flagstone.types import MERGE, TOMBSTONE, VALUE, KeyRange, Row
from kit.databases import IDLE, ModelledDatabase

EVERYTHING = KeyRange()


class DiffWorld(ModelledDatabase):
    """A database, its model, and checkpoints of both."""

    def __init__(self) -> None:
        super().__init__(step_ms=1000)
        self.counting = CountingStore(self.store, component="test")

    def checkpoint(self, *, flush: bool = True) -> tuple[Checkpoint, int]:
        return self.db.checkpoint(scope="all" if flush else "durable"), self.model.last_seq

    def diff(self, one: Checkpoint, two: Checkpoint, **options: bytes) -> Diff:
        admin = flagstone.Admin("db", store=self.counting)
        return admin.diff(one.id, two.id, merge_operator=Concatenate(), **options)  # type: ignore[arg-type]

    def expected(self, one: int, two: int, later: Checkpoint) -> list[Difference]:
        now_ms = later.created_s * 1000
        before = {row.key: row for row in self.model.scan(EVERYTHING, one, now_ms)}
        after = {row.key: row for row in self.model.scan(EVERYTHING, two, now_ms)}
        return [
            Difference(key, before.get(key), after.get(key))
            for key in sorted(before.keys() | after.keys())
            if _content(before.get(key)) != _content(after.get(key))
        ]


def _content(row: Row | None) -> object:
    return None if row is None else (row.value, row.expires_ms)


@pytest.fixture
def world() -> DiffWorld:
    return DiffWorld()


def test_added_changed_and_removed_keys_are_returned_with_their_rows(world: DiffWorld) -> None:
    for key in (b"a", b"b", b"c"):
        world.commit(key, VALUE, b"old")
    one, one_seq = world.checkpoint()
    world.commit(b"a", VALUE, b"new")
    world.commit(b"b", TOMBSTONE)
    world.commit(b"d", VALUE, b"new")
    two, two_seq = world.checkpoint()

    found = list(world.diff(one, two))

    assert found == world.expected(one_seq, two_seq, two)
    assert [
        (entry.key, entry.before and entry.before.value, entry.after and entry.after.value) for entry in found
    ] == [
        (b"a", b"old", b"new"),
        (b"b", b"old", None),
        (b"d", None, b"new"),
    ]
    assert [Difference(key, after, before) for key, before, after in found] == list(world.diff(two, one))
    assert list(world.diff(one, one)) == []


def test_a_key_written_again_with_the_same_value_is_no_difference(world: DiffWorld) -> None:
    world.commit(b"a", VALUE, b"same")
    one, _ = world.checkpoint()
    world.commit(b"a", VALUE, b"same")
    two, _ = world.checkpoint()

    assert list(world.diff(one, two)) == []


def test_a_key_that_only_expired_is_no_difference_whether_or_not_it_was_removed(world: DiffWorld) -> None:
    world.commit(b"a", VALUE, b"short", ttl_ms=5000)
    world.commit(b"b", VALUE, b"long", ttl_ms=500_000)
    one, _ = world.checkpoint()
    world.clock.advance(10_000)
    world.commit(b"c", VALUE, b"new")
    two, _ = world.checkpoint()
    world.upkeep.compact(lifetime=None)
    three, _ = world.checkpoint()

    assert [entry.key for entry in world.diff(one, two)] == [b"c"]
    assert [entry.key for entry in world.diff(one, three)] == [b"c"]
    assert list(world.diff(two, three)) == []


def test_a_compaction_makes_no_difference(world: DiffWorld) -> None:
    for number in range(20):
        world.commit(b"%02d" % (number % 7), MERGE if number % 3 else VALUE, b"%d" % number)
        world.db.flush()
    one, _ = world.checkpoint()
    world.upkeep.compact(lifetime=None)
    two, _ = world.checkpoint()

    assert list(world.diff(one, two)) == []


def test_a_range_limits_the_compared_keys(world: DiffWorld) -> None:
    one, _ = world.checkpoint()
    for key in (b"a1", b"a2", b"b1", b"c1"):
        world.commit(key, VALUE, b"x")
    two, _ = world.checkpoint()

    assert [entry.key for entry in world.diff(one, two, prefix=b"a")] == [b"a1", b"a2"]
    assert [entry.key for entry in world.diff(one, two, start=b"a2", stop=b"c1")] == [b"a2", b"b1"]
    assert [entry.key for entry in world.diff(one, two, start=b"x")] == []


@pytest.mark.slow
def test_ssts_that_both_states_have_are_not_read_completely(world: DiffWorld) -> None:
    with world.db.batch() as batch:
        for number in range(20_000):
            batch.put(b"%06d" % number, b"value of a hundred bytes".ljust(100, b"."))
    one, _ = world.checkpoint()
    world.commit(b"000777", VALUE, b"changed")
    two, _ = world.checkpoint()
    size = sum(meta.size for meta in world.store.list("db/compacted"))
    diff = world.diff(one, two)
    world.counting.reset()

    assert [entry.key for entry in diff] == [b"000777"]
    assert world.counting.totals()["bytes_read"] < size / 10


def test_segments_and_clones_are_compared(world: DiffWorld) -> None:
    extractor = FixedPrefix("first", 1)
    with flagstone.open("parts", store=world.store, segment_extractor=extractor, settings=IDLE) as db:
        for key in (b"a1", b"a2", b"b1"):
            db.put(key, b"old")
        db.checkpoint()
    flagstone.Admin("parts", store=world.store).clone("copy")
    admin = flagstone.Admin("copy", store=world.store)
    one = admin.create_checkpoint()
    with flagstone.open("copy", store=world.store, segment_extractor=extractor, settings=IDLE) as db:
        db.put(b"a1", b"new")
        db.put(b"c1", b"new")
        db.delete(b"b1")
        db.flush()
        db.put(b"d1", b"in the WAL", await_durable=True)
        two = db.checkpoint(scope="durable")
        three = db.checkpoint()
        with flagstone.open_reader("copy", store=world.store, as_of=4) as former:
            assert dict(former.scan()) == {b"a1": b"new", b"a2": b"old", b"b1": b"old"}

    for later in (two, three):
        for sparse in (False, True):
            diff = admin.diff(one.id, later.id)
            diff._plan = replace(diff._plan, sparse=sparse)
            assert [entry.key for entry in diff] == [b"a1", b"b1", b"c1", b"d1"]


def test_arrow_batches_have_the_same_differences(world: DiffWorld) -> None:
    world.commit(b"a", VALUE, b"old")
    one, _ = world.checkpoint()
    world.commit(b"a", TOMBSTONE)
    for number in range(10):
        world.commit(b"b%d" % number, VALUE, b"new", ttl_ms=10**9)
    two, _ = world.checkpoint()
    diff = world.diff(one, two)

    batches = list(diff.arrow(batch_rows=4))

    assert [batch.num_rows for batch in batches] == [4, 4, 3]
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert rows == [
        {
            "key": entry.key,
            "before": entry.before and {k: v for k, v in entry.before._asdict().items() if k != "key"},
            "after": entry.after and {k: v for k, v in entry.after._asdict().items() if k != "key"},
        }
        for entry in diff
    ]


def test_unknown_checkpoints_missing_operators_and_inverted_ranges_are_refused(world: DiffWorld) -> None:
    world.commit(b"a", MERGE, b"+")
    one, _ = world.checkpoint()
    world.commit(b"a", MERGE, b"+")
    two, _ = world.checkpoint()
    admin = flagstone.Admin("db", store=world.store)

    with pytest.raises(InvalidRequest, match="no checkpoint"):
        admin.diff(one.id, SYSTEM_IDS.uuid())
    with pytest.raises(InvalidRequest, match="no checkpoint has the id or name"):
        admin.diff(one.id, "yesterday")
    with pytest.raises(InvalidRequest, match="merge operands"):
        list(admin.diff(one.id, two.id))
    with pytest.raises(InvalidRequest, match="inverted"):
        admin.diff(one.id, two.id, start=b"b", stop=b"a")


def test_a_checkpoint_deleted_during_a_diff_raises(world: DiffWorld) -> None:
    for number in range(10):
        world.commit(b"%d" % number, VALUE, b"x")
    one, _ = world.checkpoint()
    world.commit(b"5", VALUE, b"y")
    two, _ = world.checkpoint()
    diff = world.diff(one, two)
    flagstone.Admin("db", store=world.store).delete_checkpoint(one.id)
    world.db.close()
    for meta in list(world.store.list("db/compacted")):
        world.store.delete(meta.path)

    with pytest.raises(InvalidRequest, match="no checkpoint"):
        list(diff)


STEPS = st.one_of(
    st.tuples(
        st.just("commit"),
        st.sampled_from([b"\0", b"0", b"B", b"b", b"b\0", b"b\\", b"b\xff", b"\xff"]),
        st.sampled_from([VALUE, VALUE, TOMBSTONE, MERGE]),
        st.binary(min_size=1, max_size=1),
        st.none() | st.sampled_from([1500, 4500, 10**6]),
    ),
    st.tuples(st.just("flush"), st.sampled_from(["wal", "memtable"])),
    st.tuples(st.just("compact")),
    st.tuples(st.just("checkpoint"), st.booleans()),
)


@pytest.mark.long
@pytest.mark.slow
@settings(
    max_examples=settings.default.max_examples // 2,  # type: ignore[union-attr]
    suppress_health_check=[HealthCheck.too_slow],
    deadline=None,
)
@given(steps=st.lists(STEPS, min_size=5, max_size=30))
def test_the_diff_of_any_two_checkpoints_equals_that_of_the_model(steps: list[tuple[object, ...]]) -> None:
    world = DiffWorld()
    world.commit(b"z", VALUE, b"an SST needs a row")
    taken = [world.checkpoint()]
    for step in steps:
        match step:
            case ("commit", bytes(key), int(kind), bytes(value), ttl):
                world.commit(key, kind, value, None if kind == TOMBSTONE else ttl)  # type: ignore[arg-type]
            case ("flush", kind):
                world.db.flush(kind)  # type: ignore[arg-type]
            case ("compact",):
                world.db.flush()
                world.upkeep.compact(lifetime=None)
            case ("checkpoint", _):
                taken.append(world.checkpoint())
    taken.append(world.checkpoint())
    for one, one_seq in taken:
        for two, two_seq in taken:
            later = max(one, two, key=lambda entry: entry.created_s)
            expected = world.expected(one_seq, two_seq, later)
            diff = world.diff(one, two)
            for sparse in (False, True):
                diff._plan = replace(diff._plan, sparse=sparse)
                assert list(diff) == expected
    world.db.close()


def test_a_diff_plan_leaves_out_the_ssts_that_both_states_have(world: DiffWorld) -> None:
    world.commit(b"a", VALUE, b"1")
    world.db.flush()
    first = world.db.manifest()
    for number in range(3):
        world.commit(b"%d" % number, VALUE, b"1")
        world.db.flush()
    second = world.db.manifest()

    assert plan_diff(first, second, EVERYTHING).before.tree.empty
    assert len(plan_diff(first, second, EVERYTHING).after.tree.l0) == 3
    assert not plan_diff(first, second, EVERYTHING).sparse
    assert plan_diff(second, second, EVERYTHING).sparse
    assert plan_diff(first, second, KeyRange(b"x")).after.tree.empty
