"""The tree of views: bounds, ranges and edits."""

from __future__ import annotations

import pytest

from flagstone.errors import CorruptData, InternalError
from flagstone.format.sst_info import SsTableInfo
from flagstone.lsm.tree import (
    Bound,
    BoundKind,
    BytesRange,
    SortedRun,
    SstView,
    Tree,
    apply_compaction,
    apply_flush,
    cut_l0,
    newest_l0,
)
from flagstone.types import KeyRange, RunId, Ulid


def view(number: int) -> SstView:
    return SstView.whole(Ulid(number << 80))


def run(run_id: int, *numbers: int) -> SortedRun:
    return SortedRun(RunId(run_id), tuple(view(number) for number in numbers))


def ids(*numbers: int) -> tuple[Ulid, ...]:
    return tuple(Ulid(number << 80) for number in numbers)


TREE = Tree((view(9), view(8), view(7)), (run(4, 5, 6), run(2, 3), run(0, 1)), Ulid(6 << 80))


@pytest.mark.parametrize(
    ("stored", "keys"),
    [
        (BytesRange(), KeyRange()),
        (BytesRange(Bound(BoundKind.INCLUDED, b"a"), Bound(BoundKind.EXCLUDED, b"b")), KeyRange(b"a", b"b")),
        (
            BytesRange(Bound(BoundKind.EXCLUDED, b"a"), Bound(BoundKind.INCLUDED, b"b")),
            KeyRange(b"a\0", b"b\0"),
        ),
    ],
)
def test_a_stored_range_becomes_this_half_open_range(stored: BytesRange, keys: KeyRange) -> None:
    assert stored.keys == keys
    assert BytesRange.of(keys).keys == keys


@pytest.mark.parametrize(
    ("kind", "key"), [(BoundKind.UNBOUNDED, b"k"), (BoundKind.INCLUDED, None), (BoundKind.EXCLUDED, None)]
)
def test_an_unbounded_bound_with_a_key_and_a_bounded_one_without_are_refused(
    kind: BoundKind, key: bytes | None
) -> None:
    with pytest.raises(CorruptData):
        Bound(kind, key)


@pytest.mark.parametrize(
    ("last", "visible", "expected"),
    [
        (b"m", None, KeyRange(b"c", b"m\0")),
        (None, None, KeyRange(b"c", None)),
        (b"m", KeyRange(b"a", b"d"), KeyRange(b"c", b"d")),
        (b"m", KeyRange(b"e", None), KeyRange(b"e", b"m\0")),
    ],
)
def test_a_view_holds_the_visible_keys_of_its_sst(
    last: bytes | None, visible: KeyRange | None, expected: KeyRange
) -> None:
    info = SsTableInfo(b"c", last, 0, 0, 0, 0)
    seen = SstView(Ulid(1), Ulid(2), None if visible is None else BytesRange.of(visible))
    assert seen.effective_range(info) == expected


def test_views_are_ordered_from_new_to_old() -> None:
    assert [held.id >> 80 for held in TREE.views] == [9, 8, 7, 5, 6, 3, 1]
    assert not TREE.empty
    assert Tree(last_compacted_l0=Ulid(1)).empty


def test_the_newest_l0_is_in_l0_or_was_compacted_last() -> None:
    assert TREE.newest_l0 == Ulid(9 << 80)
    assert Tree(last_compacted_l0=Ulid(5)).newest_l0 == Ulid(5)
    assert newest_l0([Tree(), Tree(last_compacted_l0=Ulid(5)), Tree((view(3),))]) == Ulid(3 << 80)
    assert newest_l0([Tree()]) is None


def test_a_flush_adds_its_view_in_front_and_only_once() -> None:
    flushed = apply_flush(TREE, view(10))
    assert flushed.l0 == (view(10), *TREE.l0)
    assert apply_flush(flushed, view(10)) is flushed


def test_a_compaction_of_l0_adds_a_run() -> None:
    after = apply_compaction(TREE, l0=ids(8, 7), runs=(), destination=RunId(5), output=(view(11), view(12)))
    assert after == Tree((view(9),), (run(5, 11, 12), *TREE.runs), Ulid(8 << 80))


def test_a_compaction_of_everything_keeps_the_lowest_run_id() -> None:
    runs = (RunId(4), RunId(2), RunId(0))
    after = apply_compaction(TREE, l0=ids(9, 8, 7), runs=runs, destination=RunId(0), output=(view(11),))
    assert after == Tree((), (run(0, 11),), Ulid(9 << 80))


def test_a_compaction_of_runs_keeps_their_position_and_last_compacted_l0() -> None:
    after = apply_compaction(TREE, l0=(), runs=(RunId(4), RunId(2)), destination=RunId(2), output=(view(11),))
    assert [held.id for held in after.runs] == [2, 0]
    assert after.last_compacted_l0 == TREE.last_compacted_l0


def test_a_compaction_without_output_adds_no_run() -> None:
    after = apply_compaction(TREE, l0=ids(9), runs=(RunId(0),), destination=None)
    assert after == Tree((view(8), view(7)), TREE.runs[:2], Ulid(9 << 80))
    assert apply_compaction(TREE, l0=(), runs=(RunId(0),), destination=RunId(0)).runs == TREE.runs[:2]


def test_a_compaction_with_sources_of_another_tree_is_refused() -> None:
    with pytest.raises(InternalError, match="sources"):
        apply_compaction(TREE, l0=ids(99), runs=(), destination=RunId(9))
    with pytest.raises(InternalError, match="sources"):
        apply_compaction(TREE, l0=(), runs=(RunId(3),), destination=RunId(3))
    with pytest.raises(InternalError, match="not one of its sources"):
        apply_compaction(TREE, l0=ids(7), runs=(), destination=RunId(4), output=(view(11),))


def test_cut_l0_keeps_the_views_newer_than_last_compacted_l0() -> None:
    assert cut_l0(TREE.l0, Ulid(8 << 80)) == (view(9),)
    assert cut_l0(TREE.l0, Ulid(9 << 80)) == ()
    assert cut_l0(TREE.l0, Ulid(6 << 80)) == TREE.l0
    assert cut_l0(TREE.l0, None) == TREE.l0
