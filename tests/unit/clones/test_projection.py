"""Projection of single manifests: which views are kept, and their visible ranges."""

from __future__ import annotations

from uuid import UUID

import pytest

from flagstone import InternalError, InvalidRequest
from flagstone.clones.projection import project
from flagstone.format.sst_info import SsTableInfo
from flagstone.lsm.tree import Bound, BoundKind, BytesRange, SortedRun, SstView, Tree
from flagstone.metadata.invariants import check_manifest
from flagstone.metadata.manifest import ExternalDb, Manifest, Segment, SsTable, renew_repeated_view_ids
from flagstone.types import KeyRange, RunId, Ulid


def sst(number: int, first: bytes, last: bytes | None) -> SsTable:
    return SsTable(Ulid(number << 80), SsTableInfo(first, last, 100, 10, 100, 0))


def manifest(*ssts: SsTable, tree: Tree, **fields: object) -> Manifest:
    return Manifest(ssts={t.id: t for t in ssts}, tree=tree, **fields)  # type: ignore[arg-type]


ONE, TWO, THREE = sst(1, b"a", b"k"), sst(2, b"k", b"p"), sst(3, b"c", b"d")


def test_the_last_key_of_an_sst_is_included_and_the_end_of_a_range_is_excluded() -> None:
    whole = manifest(ONE, tree=Tree(l0=(SstView.whole(ONE.id),)))

    for keys, shown in (
        (KeyRange(b"b", b"f"), (BoundKind.INCLUDED, b"b", BoundKind.EXCLUDED, b"f")),
        (KeyRange(b"b", None), (BoundKind.INCLUDED, b"b", BoundKind.INCLUDED, b"k")),
        (KeyRange(None, b"z"), (BoundKind.INCLUDED, b"a", BoundKind.INCLUDED, b"k")),
        (KeyRange(b"k", None), (BoundKind.INCLUDED, b"k", BoundKind.INCLUDED, b"k")),
    ):
        (view,) = project(whole, keys).tree.l0
        assert view.visible_range == BytesRange(Bound(*shown[:2]), Bound(*shown[2:]))


@pytest.mark.parametrize("keys", [KeyRange(None, b"a"), KeyRange(b"k\0", None), KeyRange(b"x", b"y")])
def test_an_sst_outside_of_the_range_is_left_out_with_its_lender(keys: KeyRange) -> None:
    lender = ExternalDb("p", UUID(int=1), UUID(int=2), (ONE.id,))
    whole = manifest(
        ONE, tree=Tree(l0=(SstView.whole(ONE.id),), last_compacted_l0=Ulid(7)), external_dbs=(lender,)
    )

    projected = project(whole, keys)

    assert projected.tree == Tree(last_compacted_l0=Ulid(7))
    assert projected.ssts == {}
    assert projected.external_dbs == ()


def test_sorted_runs_keep_their_ids_and_adjacent_ssts_their_common_key() -> None:
    run = SortedRun(RunId(5), (SstView.whole(ONE.id), SstView.whole(TWO.id)))
    older = SortedRun(RunId(3), (SstView.whole(THREE.id),))
    whole = manifest(ONE, TWO, THREE, tree=Tree(runs=(run, older)))

    projected = project(whole, KeyRange(b"k", b"m"))

    assert [held.id for held in projected.tree.runs] == [5]
    assert [view.sst_id for view in projected.tree.runs[0].views] == [ONE.id, TWO.id]
    assert projected.ssts.keys() == {ONE.id, TWO.id}


def test_a_wider_projection_of_a_projection_adds_no_keys() -> None:
    whole = manifest(ONE, tree=Tree(l0=(SstView.whole(ONE.id),)))

    twice = project(project(whole, KeyRange(b"b", b"f")), KeyRange(None, b"z"))

    assert twice.tree.l0[0].effective_range(ONE.info) == KeyRange(b"b", b"f")


def test_an_sst_without_a_last_key_ends_at_the_next_one() -> None:
    endless = sst(1, b"a", None)
    run = SortedRun(RunId(0), (SstView.whole(endless.id), SstView.whole(TWO.id)))

    projected = project(manifest(endless, TWO, tree=Tree(runs=(run,))), KeyRange(b"k", None))

    assert [view.sst_id for view in projected.tree.runs[0].views] == [TWO.id]


def test_a_segment_without_rows_in_the_range_is_left_out() -> None:
    segments = (
        Segment(b"a", Tree(l0=(SstView.whole(ONE.id),))),
        Segment(b"c", Tree(l0=(SstView.whole(THREE.id),))),
    )
    whole = manifest(ONE, THREE, tree=Tree(), segments=segments, segment_extractor_name="first")

    assert [held.prefix for held in project(whole, KeyRange(b"e", None)).segments] == [b"a"]


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="holds no key"):
        project(manifest(tree=Tree()), KeyRange(b"b", b"a"))


# -- the repeated view ids of SlateDB's unions ------------------------------------------------------------


def repeated() -> Manifest:
    left = SstView(ONE.id, ONE.id, BytesRange.of(KeyRange(b"a", b"f")))
    right = SstView(ONE.id, ONE.id, BytesRange.of(KeyRange(b"f", b"k\0")))
    runs = (SortedRun(RunId(1), (SstView.whole(TWO.id),)), SortedRun(RunId(0), (SstView.whole(TWO.id),)))
    return manifest(ONE, TWO, tree=Tree(l0=(left, right), runs=runs))


def test_repeated_view_ids_are_replaced_by_new_ones_with_the_same_time() -> None:
    renewed = renew_repeated_view_ids(repeated())

    ids = [view.id for view in renewed.views]
    assert len(set(ids)) == 4
    assert [view_id >> 80 for view_id in ids] == [1, 1, 2, 2]
    assert ids[0] == ONE.id
    assert [(v.sst_id, v.visible_range) for v in renewed.views] == [
        (v.sst_id, v.visible_range) for v in repeated().views
    ]
    assert renew_repeated_view_ids(renewed) is renewed


def test_repeated_view_ids_may_stay_or_be_replaced_but_not_be_added() -> None:
    check_manifest(repeated(), repeated())
    check_manifest(renew_repeated_view_ids(repeated()), repeated())
    with pytest.raises(InternalError, match="view_ids_unique"):
        check_manifest(repeated(), None)
    with pytest.raises(InternalError, match="view_ids_unique"):
        check_manifest(repeated(), renew_repeated_view_ids(repeated()))
