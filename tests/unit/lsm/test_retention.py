"""Which rows flushes and compactions drop, which rows reads see, and that retention changes no read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagstone.errors import InvalidRequest
from flagstone.format.sst import decode_sst
from flagstone.lsm.json_merge_patch import JsonMergePatch
from flagstone.lsm.operators import Concatenate, Counter
from flagstone.lsm.retention import RetentionPolicy, apply_retention, retain, visible_value
from flagstone.lsm.tree import SstView
from flagstone.metadata.manifest import Manifest
from flagstone.types import MAX_SEQ, MERGE, TOMBSTONE, VALUE, EntryTuple, Row, WalId
from golden.corpus import databases
from golden.reading import PlainReader

KEY = b"k"
NOW = 1000
CONCATENATE = Concatenate()


def value(seq: int, content: bytes = b"v", expires: int | None = None) -> EntryTuple:
    return (KEY, seq, VALUE, content, seq * 10, expires)


def operand(seq: int, content: bytes = b"+", expires: int | None = None) -> EntryTuple:
    return (KEY, seq, MERGE, content, seq * 10, expires)


def tombstone(seq: int) -> EntryTuple:
    return (KEY, seq, TOMBSTONE, b"", seq * 10, None)


def policy(min_seq: int, *, keep_tombstones: bool = True) -> RetentionPolicy:
    return RetentionPolicy(
        min_seq=min_seq, clock_ms=NOW, keep_tombstones=keep_tombstones, merge_operator=CONCATENATE
    )


@pytest.mark.parametrize(
    ("min_seq", "versions", "kept"),
    [
        # Of the versions up to min_seq the newest stays; above it all do.
        (9, [value(5), value(4), value(3)], [value(5)]),
        (4, [value(5), value(4), value(3)], [value(5), value(4)]),
        (3, [value(5), value(4), value(3)], [value(5), value(4), value(3)]),
        (0, [value(5), value(4)], [value(5), value(4)]),
        (9, [tombstone(5), value(4)], [tombstone(5)]),
        # A row expires when the clock reaches its expiry. A value becomes a tombstone, an operand is dropped.
        (9, [value(5, expires=NOW)], [tombstone(5)]),
        (9, [value(5, expires=NOW + 1)], [value(5, expires=NOW + 1)]),
        (9, [value(5, expires=NOW), value(4)], [tombstone(5)]),
        (4, [value(5, expires=NOW), value(4)], [tombstone(5), value(4)]),
        (9, [operand(5, expires=NOW), value(4)], [value(4)]),
        (4, [operand(5, expires=NOW), value(4)], [value(4)]),
        (9, [operand(5, expires=NOW)], []),
        # Operands fold onto their base, or stay an operand without one.
        (9, [operand(5, b"2"), operand(4, b"1"), value(3, b"0")], [value(5, b"012")]),
        (9, [operand(5, b"2"), operand(4, b"1"), tombstone(3)], [value(5, b"12")]),
        (9, [operand(5, b"2"), operand(4, b"1")], [operand(5, b"12")]),
        (9, [operand(5, b"1"), value(4, b"0"), value(3)], [value(5, b"01")]),
        (9, [operand(5)], [operand(5)]),
        # Operands above min_seq stay apart, those below fold.
        (4, [operand(5), operand(4, b"2"), operand(3, b"1")], [operand(5), operand(4, b"12")]),
        (3, [operand(5), operand(4), value(3), value(2)], [operand(5), operand(4), value(3)]),
        (5, [value(6), operand(5, b"1"), value(4, b"0")], [value(6), value(5, b"01")]),
        # Only operands with the same expiry are folded.
        (
            9,
            [operand(5, expires=2000), operand(4), value(3, b"0")],
            [operand(5, expires=2000), value(4, b"0+")],
        ),
        (9, [operand(5), value(4, expires=2000), value(3)], [operand(5), value(4, expires=2000)]),
        (9, [operand(5), value(4, expires=NOW), value(3)], [operand(5), tombstone(4)]),
        (
            9,
            [operand(5, b"2", 2000), operand(4, b"1", 2000), value(3, b"0", 2000), value(2)],
            [value(5, b"012", 2000)],
        ),
        (9, [operand(5, b"2", NOW), operand(4, b"1", NOW), value(3, b"0", NOW)], [tombstone(5)]),
        (9, [operand(5, b"2", NOW), operand(4, b"1", NOW), value(3)], [value(3)]),
    ],
)
def test_retention_keeps_these_versions_of_a_key(
    min_seq: int, versions: list[EntryTuple], kept: list[EntryTuple]
) -> None:
    assert list(apply_retention(versions, policy(min_seq))) == kept


@pytest.mark.parametrize(
    ("min_seq", "versions", "kept"),
    [
        (9, [tombstone(5)], []),
        (9, [value(5, expires=NOW), value(4)], []),
        (3, [tombstone(5), value(3)], [tombstone(5), value(3)]),
        (3, [value(5), tombstone(4), tombstone(3)], [value(5)]),
        (3, [operand(5), tombstone(4)], [operand(5)]),
        (9, [value(5)], [value(5)]),
    ],
)
def test_the_last_run_drops_the_oldest_tombstones(
    min_seq: int, versions: list[EntryTuple], kept: list[EntryTuple]
) -> None:
    assert list(apply_retention(versions, policy(min_seq, keep_tombstones=False))) == kept


def test_a_folded_row_has_the_newest_sequence_number_and_the_latest_creation_time() -> None:
    rows = [
        (KEY, 5, MERGE, b"2", 70, None),
        (KEY, 4, MERGE, b"1", None, None),
        (KEY, 3, VALUE, b"0", 90, None),
    ]

    assert list(apply_retention(rows, policy(9))) == [(KEY, 5, VALUE, b"012", 90, None)]


def test_only_operands_on_a_tombstone_are_finished() -> None:
    json = replace(policy(9), merge_operator=JsonMergePatch())
    patches = [operand(5, b'{"b":null}'), operand(4, b'{"a":1}')]

    assert list(apply_retention([*patches, tombstone(3)], json)) == [value(5, b'{"a":1}')]
    assert list(apply_retention(patches, json)) == [operand(5, b'\0{"a":[1],"b":null}')]


def test_merge_rows_without_an_operator_are_refused_or_kept_as_the_policy_demands() -> None:
    bare = replace(policy(9), merge_operator=None)
    rows = [operand(5), value(4), value(3)]

    with pytest.raises(InvalidRequest, match=r"cannot compact b'k'.*pass merge_operator="):
        list(apply_retention(rows, bare))
    assert list(apply_retention(rows, replace(bare, keep_unfoldable=True))) == [operand(5), value(4)]


def test_an_operator_that_raises_fails_a_compaction_but_not_a_flush() -> None:
    counting = replace(policy(9), merge_operator=Counter())
    rows = [operand(5), operand(4), value(3), value(2)]

    with pytest.raises(InvalidRequest, match="not a counter"):
        list(apply_retention(rows, counting))
    assert list(apply_retention(rows, replace(counting, keep_unfoldable=True))) == rows[:3]


def test_a_stream_of_several_keys_is_retained_key_by_key() -> None:
    rows: list[EntryTuple] = [
        (b"a", 2, VALUE, b"new", 0, None),
        (b"a", 1, VALUE, b"old", 0, None),
        (b"b", 9, TOMBSTONE, b"", 0, None),
        (b"c", 3, VALUE, b"only", 0, None),
    ]

    assert list(retain(iter(rows), policy(9, keep_tombstones=False))) == [rows[0], rows[3]]
    assert list(retain([], policy(9))) == []


@pytest.mark.parametrize(
    ("versions", "seen"),
    [
        ([], None),
        ([value(5)], Row(KEY, b"v", 5, 50, None)),
        ([tombstone(5), value(4)], None),
        ([value(5, expires=NOW + 1)], Row(KEY, b"v", 5, 50, NOW + 1)),
        ([value(5, expires=NOW), value(4)], None),
        ([value(11), value(10)], Row(KEY, b"v", 10, 100, None)),
        ([operand(11), value(10)], Row(KEY, b"v", 10, 100, None)),
        ([operand(5, b"2"), operand(4, b"1"), value(3, b"0"), value(2)], Row(KEY, b"012", 5, 50, None)),
        ([operand(5, b"2"), tombstone(4), value(3)], Row(KEY, b"2", 5, 50, None)),
        ([operand(5, b"2"), operand(4, b"1")], Row(KEY, b"12", 5, 50, None)),
        # An expired operand is ignored, an expired base is no base.
        ([operand(5, b"2", NOW), operand(4, b"1"), value(3, b"0")], Row(KEY, b"01", 4, 40, None)),
        ([operand(5, b"2"), value(4, b"0", NOW), value(3)], Row(KEY, b"2", 5, 50, None)),
        ([operand(5, b"2", NOW), tombstone(4)], None),
        # The earliest expiry counts.
        ([operand(5, b"2", 3000), operand(4, b"1", 2000), value(3, b"0")], Row(KEY, b"012", 5, 50, 2000)),
        ([operand(5, b"1"), value(3, b"0", 2000)], Row(KEY, b"01", 5, 50, 2000)),
    ],
)
def test_a_read_sees_this_row(versions: list[EntryTuple], seen: Row | None) -> None:
    assert visible_value(versions, max_seq=10, now_ms=NOW, merge_operator=CONCATENATE) == seen


def test_a_read_with_include_expired_sees_expired_rows() -> None:
    rows = [operand(5, b"1", NOW), value(4, b"0", 5)]

    assert visible_value(rows, max_seq=9, now_ms=NOW, merge_operator=CONCATENATE) is None
    assert visible_value(
        rows, max_seq=9, now_ms=NOW, include_expired=True, merge_operator=CONCATENATE
    ) == Row(KEY, b"01", 5, 50, 5)


def test_a_read_stops_at_the_first_barrier() -> None:
    rows = iter([operand(5), value(4), value(3)])

    visible_value(rows, max_seq=9, now_ms=NOW, merge_operator=CONCATENATE)
    assert list(rows) == [value(3)]


def test_a_read_of_operands_without_an_operator_raises_with_a_hint() -> None:
    with pytest.raises(InvalidRequest, match="b'k' has merge operands and no merge operator is configured"):
        visible_value([operand(5)], max_seq=9, now_ms=NOW)
    assert visible_value([value(6), operand(5)], max_seq=9, now_ms=NOW) is not None


def test_a_read_of_operands_without_a_base_returns_the_finished_value() -> None:
    rows = [operand(5, b'{"a":null,"b":1}')]

    row = visible_value(rows, max_seq=9, now_ms=NOW, merge_operator=JsonMergePatch())
    assert row is not None
    assert row.value == b'{"b":1}'


kinds = st.sampled_from([VALUE, TOMBSTONE, MERGE, MERGE])
times = st.sampled_from([None, None, 5, NOW, NOW + 5])
histories = st.lists(st.tuples(kinds, times), max_size=8).map(
    lambda rows: [
        (
            KEY,
            seq,
            kind,
            b"" if kind == TOMBSTONE else b"%d" % seq,
            seq,
            None if kind == TOMBSTONE else expires,
        )
        for seq, (kind, expires) in reversed(list(enumerate(rows, start=1)))
    ]
)


@given(histories, st.integers(0, 9), st.integers(0, 8), st.booleans(), st.sampled_from([NOW, NOW + 5]))
def test_retention_changes_no_read_at_min_seq_or_later(
    history: list[EntryTuple], min_seq: int, taken: int, with_the_rest: bool, now: int
) -> None:
    upper, lower = history[:taken], history[taken:] if with_the_rest else []
    kept = apply_retention(upper, policy(min_seq, keep_tombstones=with_the_rest))

    for max_seq in (*range(min_seq, 10), MAX_SEQ):
        before, after = (
            visible_value(rows, max_seq=max_seq, now_ms=now, merge_operator=CONCATENATE)
            for rows in (chain(upper, lower), chain(kept, lower))
        )
        assert after == before


class Golden:
    """A golden database, its SSTs and WAL as rows, and its compactions as pairs of manifests."""

    def __init__(self, name: str) -> None:
        database = next(database for database in databases() if database.name == name)
        reader = PlainReader(database)
        self.store, self.paths, self.manifests = reader.store, reader.paths, reader.manifests
        self.latest = reader.manifests.require_latest().value

    def rows(self, paths: Iterable[str]) -> list[EntryTuple]:
        ssts = (decode_sst(self.store.get(path).data, path) for path in paths)
        rows = (row for sst in ssts for block in sst.rows() for row in block)
        return sorted(rows, key=lambda row: (row[0], -row[1]))

    def sst_rows(self, views: Iterable[SstView]) -> list[EntryTuple]:
        return self.rows(self.paths.sst(view.sst_id) for view in views)

    def wal_rows(self) -> list[EntryTuple]:
        wal_ids = (WalId(wal_id) for wal_id in range(1, self.latest.wal_id_last_seen + 1))
        paths = (self.paths.wal(wal_id) for wal_id in wal_ids)
        return self.rows(path for path in paths if self.store.head(path).size)

    def jobs(self) -> list[tuple[Manifest, Manifest]]:
        """The manifests before and after each commit of a compaction."""
        manifests = [self.manifests.load(listed.id) for listed in self.manifests.list()]
        return [(old, new) for old, new in pairwise(manifests) if old.tree.runs != new.tree.runs]


@pytest.mark.parametrize(("name", "jobs"), [("ttl_compacted", 1), ("merge_compacted", 1), ("compaction", 2)])
def test_compactions_keep_the_rows_that_the_wheel_kept(name: str, jobs: int) -> None:
    golden = Golden(name)

    assert len(golden.jobs()) == jobs
    for before, after in golden.jobs():
        (run,) = (run for run in after.tree.runs if run not in before.tree.runs)
        compaction = RetentionPolicy(
            min_seq=before.recent_snapshot_min_seq,
            clock_ms=before.last_l0_clock_tick,
            keep_tombstones=run != after.tree.runs[-1],
            merge_operator=CONCATENATE,
        )
        sources = golden.sst_rows(view for view in before.tree.l0 if view not in after.tree.l0)

        assert list(retain(sources, compaction)) == golden.sst_rows(run.views)


@pytest.mark.parametrize("name", ["ttl", "merge"])
def test_flushes_keep_the_rows_that_the_wheel_kept(name: str) -> None:
    golden = Golden(name)
    # The wheel flushed before it counted the rows as durable, so none was old enough to be folded.
    flush = RetentionPolicy(
        min_seq=0,
        clock_ms=golden.latest.last_l0_clock_tick,
        keep_tombstones=True,
        merge_operator=CONCATENATE,
    )
    logged = [row for row in golden.wal_rows() if row[1] <= golden.latest.last_l0_seq]

    assert list(retain(logged, flush)) == golden.sst_rows(golden.latest.tree.l0)
