"""Unions of databases with different keys."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from flagstone import InvalidRequest
from flagstone.clones.origin import CheckpointedSource, CloneSource
from flagstone.clones.union import unite
from flagstone.format.filter import FixedPrefix
from flagstone.format.sst_info import SsTableInfo
from flagstone.lsm.tree import BytesRange, SortedRun, SstView, Tree
from flagstone.metadata.manifest import NO_CLOCK_TICK, ExternalDb, Manifest, SsTable
from flagstone.types import KeyRange, RunId, Ulid
from kit.databases import World, numbered


def sst(number: int, first: bytes, last: bytes | None) -> SsTable:
    return SsTable(Ulid(number), SsTableInfo(first, last, 100, 10, 100, 0))


def view(held: SsTable, start: bytes | None = None, stop: bytes | None = None) -> SstView:
    shown = None if start is None and stop is None else BytesRange.of(KeyRange(start, stop))
    return SstView(held.id, held.id, shown)


def source(path: str, ssts: list[SsTable], tree: Tree) -> CheckpointedSource:
    """A database whose SSTs all belong to `parent`."""
    held = {t.id: t for t in ssts}
    lender = ExternalDb("parent", UUID(int=1), UUID(int=2), tuple(held))
    return CheckpointedSource(path, UUID(int=3), Manifest(ssts=held, tree=tree, external_dbs=(lender,)))


def test_a_union_has_the_rows_of_independent_databases(world: World) -> None:
    world.write("a", numbered(0, 10))
    world.write("a", numbered(3, 5, b"w"))
    world.write("b", numbered(10, 20))
    world.write("c", numbered(20, 30))

    made = world.admin("b").union("u", ["a", CloneSource("c")]).value

    expected = numbered(0, 30) | numbered(3, 5, b"w")
    assert world.scan("u") == expected
    assert (made.writer_epoch, made.compactor_epoch, made.replay_after_wal_id, made.wal_id_last_seen) == (
        0,
    ) * 4
    assert made.last_l0_seq == max(world.admin(p).manifest().value.last_l0_seq for p in "abc")
    assert made.last_l0_clock_tick > NO_CLOCK_TICK
    assert len(made.sequence_tracker) == made.recent_snapshot_min_seq == 0
    world.write("u", {b"k005": b"new"})
    assert world.scan("u") == expected | {b"k005": b"new"}
    assert all(world.admin(path).verify().ok for path in "abcu")


def test_the_parts_of_a_union_may_be_destroyed(world: World) -> None:
    world.write("p", numbered(0, 10))
    world.admin("p").clone("a", range=(None, b"k005"))
    world.admin("p").clone("b", range=(b"k005", None))
    world.admin("a").union("u", ["b"])
    world.clock.advance(300_000)  # until the checkpoints that the union was made from have expired

    world.admin("a").destroy()
    world.admin("b").destroy()

    assert world.scan("u") == numbered(0, 10)
    held = [entry.id for entry in world.admin("p").checkpoints() if entry.expires_s is None]
    assert held == [db.final_checkpoint_id for db in world.admin("u").manifest().value.external_dbs]


def test_a_source_of_a_union_may_be_a_range_of_a_checkpoint(world: World) -> None:
    world.write("a", numbered(0, 10))
    before = world.admin("a").create_checkpoint()
    world.write("a", numbered(0, 10, b"w"))
    world.write("b", numbered(5, 15, b"b"))

    world.admin("b").union("u", [CloneSource("a", before.id, KeyRange(None, b"k005"))])

    assert world.scan("u") == numbered(0, 5) | numbered(5, 15, b"b")


def test_overlapping_databases_are_refused_with_their_ranges(world: World) -> None:
    world.write("a", numbered(0, 10))
    world.write("b", numbered(9, 20))
    before = world.objects()

    with pytest.raises(InvalidRequest, match=r"'a' and 'b' overlap.*k000.*k009.*k019"):
        world.admin("a").union("u", ["b"])

    assert world.objects() == before


def test_interleaved_keys_in_separate_ssts_do_not_overlap(world: World) -> None:
    world.write("a", numbered(0, 3))
    world.write("a", numbered(6, 9))
    world.write("b", numbered(3, 6))

    world.admin("a").union("u", ["b"])

    assert world.scan("u") == numbered(0, 9)


def test_a_source_with_unflushed_wal_rows_is_refused(world: World) -> None:
    world.write("a", numbered(0, 3))
    with world.open("b") as db:
        db.put(b"z", b"1", await_durable=True)
        with pytest.raises(InvalidRequest, match="the WAL of 'b'"):
            world.admin("a").union("u", ["b"])
        db.flush()
        world.admin("a").union("u", ["b"])
    assert world.scan("u") == numbered(0, 3) | {b"z": b"1"}


def test_sources_with_different_segment_extractors_are_refused(world: World) -> None:
    world.write("a", numbered(0, 3))
    world.write("b", {b"zzz": b"1"}, segment_extractor=FixedPrefix("first3", 3))
    before = world.objects()

    with pytest.raises(InvalidRequest, match="segment extractors"):
        world.admin("a").union("u", ["b"])

    assert world.objects() == before


def test_copied_ssts_with_one_id_in_two_databases_are_both_kept(world: World) -> None:
    """Ids are random, so only copied files have the same ones."""
    world.write("a", numbered(0, 10))
    for path, data in world.objects("a").items():
        world.store.put("b" + path[1:], data)
    world.admin("a").clone("left", range=(None, b"k005"))
    world.admin("b").clone("right", range=(b"k005", None))

    made = world.admin("left").union("u", ["right"]).value

    assert world.scan("u") == numbered(0, 10)
    assert len(made.ssts) == 2
    assert len(list(world.store.list("u/compacted"))) == 1
    assert {db.path for db in made.external_dbs} == {"a"}
    assert world.admin("u").verify().ok
    world.admin("u").clone("v")
    assert world.scan("v") == numbered(0, 10)


def test_parts_of_one_sorted_run_are_joined_and_other_runs_keep_their_order() -> None:
    one, two, three, four = (
        sst(1, b"a", b"m"),
        sst(2, b"n", b"z"),
        sst(3, b"a", b"z"),
        sst(4, b"a", b"z"),
    )
    left = source(
        "left",
        [one, three],
        Tree(
            runs=(
                SortedRun(RunId(7), (view(three, b"a", b"k"),)),
                SortedRun(RunId(3), (view(one, b"a", b"k"),)),
            )
        ),
    )
    right = source(
        "right",
        [one, two, four],
        Tree(
            runs=(
                SortedRun(RunId(5), (view(four, b"k", None),)),
                SortedRun(RunId(3), (view(one, b"k", None), view(two))),
            )
        ),
    )

    united = unite([right, left])

    assert [run.id for run in united.tree.runs] == [2, 1, 0]
    assert [[v.sst_id for v in run.views] for run in united.tree.runs] == [[3], [4], [1, 2]]
    assert [v.visible_range for v in united.tree.runs[2].views] == [None, None]
    assert united.tree.runs[0].views[0].visible_range is not None


def test_a_gap_between_two_views_of_an_sst_stays() -> None:
    whole = sst(1, b"a", b"z")
    left = source("left", [whole], Tree(l0=(view(whole, b"a", b"g"),)))
    right = source("right", [whole], Tree(l0=(view(whole, b"h", None),)))

    united = unite([left, right])

    assert len(united.tree.l0) == 2
    assert len({v.id for v in united.tree.l0}) == 2
    assert [v.effective_range(whole.info) for v in united.tree.l0] == [
        KeyRange(b"a", b"g"),
        KeyRange(b"h", b"z\0"),
    ]


def test_l0_lists_that_disagree_keep_their_own_order() -> None:
    one, two = sst(1, b"a", b"z"), sst(2, b"a", b"z")
    left = source("left", [one, two], Tree(l0=(view(one, None, b"k"), view(two, None, b"k"))))
    right = source("right", [one, two], Tree(l0=(view(two, b"k", None), view(one, b"k", None))))

    united = unite([left, right])

    for keys, order in ((KeyRange(b"a", b"k"), [1, 2]), (KeyRange(b"k", b"z"), [2, 1])):
        shown = [v.sst_id for v in united.tree.l0 if not v.effective_range(one.info).intersect(keys).empty]
        assert shown == order
    assert len(united.tree.l0) == 3


def test_an_sst_without_a_last_key_reaches_to_the_next_one() -> None:
    one, two = sst(1, b"a", None), sst(2, b"m", b"p")
    left = source("left", [one, two], Tree(runs=(SortedRun(RunId(0), (view(one), view(two))),)))
    right = source("right", [sst(3, b"q", b"z")], Tree(l0=(view(sst(3, b"q", b"z")),)))

    assert len(unite([left, right]).ssts) == 3
    endless = replace(left, manifest=replace(left.manifest, tree=Tree(l0=(view(one),)), ssts={one.id: one}))
    with pytest.raises(InvalidRequest, match=r"'left' shows keys of \[b'a', end\)"):
        unite([endless, right])


def test_segments_are_united_tree_by_tree(world: World) -> None:
    extractor = FixedPrefix("first3", 3)
    world.write("a", {b"aaa1": b"1", b"bbb1": b"1"}, segment_extractor=extractor)
    world.write("b", {b"bbb2": b"2", b"ccc2": b"2"}, segment_extractor=extractor)

    made = world.admin("a").union("u", ["b"]).value

    assert [segment.prefix for segment in made.segments] == [b"aaa", b"bbb", b"ccc"]
    assert world.scan("u") == {b"aaa1": b"1", b"bbb1": b"1", b"bbb2": b"2", b"ccc2": b"2"}
    world.write("u", {b"ddd": b"3"}, segment_extractor=extractor)
