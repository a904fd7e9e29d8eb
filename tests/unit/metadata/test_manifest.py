"""Edits of the manifest."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from flagstone.errors import CorruptData, InternalError
from flagstone.format.sst_info import SsTableInfo
from flagstone.lsm.sequence import SequenceTracker
from flagstone.lsm.tree import Bound, BoundKind, BytesRange, SortedRun, SstView, Tree
from flagstone.metadata.invariants import check_manifest
from flagstone.metadata.manifest import (
    NO_CLOCK_TICK,
    Checkpoint,
    ExternalDb,
    Flush,
    Manifest,
    Segment,
    SsTable,
    add_checkpoint,
    apply_compaction,
    apply_flush,
    drop_empty_segments,
    new_manifest,
    remove_checkpoint,
    remove_expired_checkpoints,
    replace_trees,
)
from flagstone.metadata.manifest_codec import decode_manifest, encode_manifest
from flagstone.types import ManifestId, RunId, Seq, Ulid, WalId


def sst(number: int) -> SsTable:
    return SsTable(Ulid(number << 80), SsTableInfo(b"a", b"z", 10, 5, 10, 0))


def flush(
    number: int, *, prefixes: tuple[bytes, ...] = (b"",), points: SequenceTracker | None = None
) -> Flush:
    return Flush(
        ssts=tuple((prefix, sst(10 * number + i)) for i, prefix in enumerate(prefixes)),
        replay_after_wal_id=WalId(number),
        wal_id_last_seen=WalId(number + 1),
        last_clock_tick=1000 * number,
        last_seq=Seq(100 * number),
        snapshot_min_seq=Seq(100 * number),
        points=points or SequenceTracker(),
    )


def checkpoint(number: int, expires_s: int | None = None) -> Checkpoint:
    return Checkpoint(UUID(int=number), ManifestId(number), 10, expires_s)


def test_the_first_manifest_is_initialized_and_has_no_clock_tick() -> None:
    first = new_manifest(segment_extractor_name="first3")
    assert first.initialized
    assert first.last_l0_clock_tick == NO_CLOCK_TICK == -(2**63)
    assert first.segment_extractor_name == "first3"
    check_manifest(first, None)
    assert decode_manifest(encode_manifest(first)) == first


def test_flushes_add_ssts_to_l0_and_repeating_one_changes_nothing() -> None:
    points = SequenceTracker().record(100, 60)
    once = apply_flush(new_manifest(), flush(1, points=points))
    assert apply_flush(once, flush(1)) is once
    twice = apply_flush(once, flush(2))
    check_manifest(twice, once)
    assert [view.id >> 80 for view in twice.tree.l0] == [20, 10]
    assert set(twice.ssts) == {sst(20).id, sst(10).id}
    assert (twice.last_l0_seq, twice.replay_after_wal_id, twice.wal_id_last_seen) == (200, 2, 3)
    assert twice.sequence_tracker == points
    assert twice.sst(twice.tree.l0[0]) == sst(20)


def test_a_flush_adds_one_sst_to_each_segment() -> None:
    manifest = apply_flush(new_manifest(segment_extractor_name="x"), flush(1, prefixes=(b"b", b"a")))
    assert [segment.prefix for segment in manifest.segments] == [b"a", b"b"]
    assert manifest.tree.empty
    found = manifest.tree_of(b"b")
    assert found is not None
    assert [view.id >> 80 for view in found.l0] == [10]
    assert manifest.tree_of(b"c") is None


def test_a_compaction_replaces_its_sources_and_removes_their_ssts() -> None:
    before = apply_flush(apply_flush(new_manifest(), flush(1)), flush(2))
    after = apply_compaction(
        before,
        segment=b"",
        l0=(sst(20).id, sst(10).id),
        runs=(),
        destination=RunId(0),
        output=(sst(30), sst(31)),
    )
    check_manifest(after, before)
    assert set(after.ssts) == {sst(30).id, sst(31).id}
    assert list(after.run_ids) == [0]
    assert after.newest_l0 == sst(20).id


def test_a_compaction_of_one_segment_changes_no_other() -> None:
    before = apply_flush(new_manifest(), flush(1, prefixes=(b"a", b"b")))
    after = apply_compaction(before, segment=b"a", l0=(sst(10).id,), runs=(), destination=None)
    assert set(after.ssts) == {sst(11).id}
    assert [segment.prefix for segment in drop_empty_segments(after).segments] == [b"b"]
    assert drop_empty_segments(before) is before


def test_compacted_ssts_are_removed_from_the_list_of_their_lender() -> None:
    db = ExternalDb("parent", UUID(int=1), UUID(int=2), (sst(10).id, sst(99).id))
    before = replace(apply_flush(new_manifest(), flush(1)), external_dbs=(db,))
    assert before.path_of_owner(sst(10).id) == "parent"
    assert before.path_of_owner(sst(20).id) is None
    after = apply_compaction(before, segment=b"", l0=(sst(10).id,), runs=(), destination=None)
    assert after.external_dbs == (replace(db, sst_ids=()),)


def test_an_sst_stays_while_another_run_has_a_view_of_it() -> None:
    shared, other = sst(1), sst(2)
    older = SortedRun(RunId(1), (SstView(Ulid(7), shared.id), SstView.whole(other.id)))
    newer = SortedRun(RunId(2), (SstView.whole(shared.id),))
    manifest = replace_trees(new_manifest(), tree=Tree((), (newer, older)), added=(shared, other))
    edited = replace_trees(manifest, tree=Tree((), (older,)))
    assert list(edited.ssts) == [shared.id, other.id]
    assert list(replace_trees(edited, tree=Tree()).ssts) == []


def test_an_added_sst_without_a_view_does_not_join_the_manifest() -> None:
    assert replace_trees(new_manifest(), added=(sst(1),)).ssts == {}


def test_ssts_stay_in_the_order_of_their_ids() -> None:
    runs = [SortedRun(RunId(9 - number), (SstView.whole(sst(number).id),)) for number in (3, 1, 2)]
    manifest = new_manifest()
    for number, run in zip((3, 1, 2), runs, strict=True):
        manifest = replace_trees(manifest, tree=Tree((), (*manifest.tree.runs, run)), added=(sst(number),))
    assert list(manifest.ssts) == [sst(number).id for number in (1, 2, 3)]


def test_a_flush_into_the_root_tree_leaves_the_runs_as_they_are() -> None:
    run = SortedRun(RunId(1), (SstView.whole(sst(1).id),))
    manifest = replace_trees(new_manifest(), tree=Tree((), (run,)), added=(sst(1),))
    assert apply_flush(manifest, flush(2)).tree.runs[0] is run


def test_a_view_of_an_unknown_sst_is_refused() -> None:
    with pytest.raises(InternalError, match="not described"):
        replace_trees(new_manifest(), tree=Tree((SstView.whole(Ulid(7)),)))


def test_checkpoints_are_added_replaced_and_removed() -> None:
    manifest = add_checkpoint(add_checkpoint(new_manifest(), checkpoint(1)), checkpoint(2, 50))
    refreshed = add_checkpoint(manifest, checkpoint(1, 99))
    assert [entry.expires_s for entry in refreshed.checkpoints] == [99, 50]
    assert remove_checkpoint(refreshed, UUID(int=1)).checkpoints == (checkpoint(2, 50),)
    assert remove_checkpoint(manifest, UUID(int=9)) is manifest
    assert manifest.checkpoint(UUID(int=2)) == checkpoint(2, 50)


def test_a_checkpoint_is_removed_from_its_expiry_second_on() -> None:
    manifest = replace(new_manifest(), checkpoints=(checkpoint(1), checkpoint(2, 50)))
    assert remove_expired_checkpoints(manifest, 49) is manifest
    assert remove_expired_checkpoints(manifest, 50).checkpoints == (checkpoint(1),)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "cut off"),
        (b"\0", "cut off"),
        (b"\0\2", "holds no table"),
        (b"\0\0" + bytes(40), "version 0"),
        (b"\0\3" + bytes(40), "version 3"),
        (b"\2\0" + bytes(40), "version 512"),
    ],
)
def test_bytes_that_are_no_manifest_raise_corrupt_data(data: bytes, problem: str) -> None:
    with pytest.raises(CorruptData, match=problem):
        decode_manifest(data)


def broken(**changes: object) -> bytes:
    return encode_manifest(replace(apply_flush(new_manifest(), flush(1)), **changes))  # type: ignore[arg-type]


def test_a_stored_view_of_an_unknown_sst_raises_corrupt_data() -> None:
    with pytest.raises(CorruptData, match="does not describe"):
        decode_manifest(broken(ssts={}))
    with pytest.raises(CorruptData, match="does not describe"):
        decode_manifest(broken(segments=(Segment(b"a", Tree((SstView.whole(Ulid(7)),))),)))


def test_a_stored_view_that_excludes_its_start_raises_corrupt_data() -> None:
    odd = BytesRange(start=Bound(BoundKind.EXCLUDED, b"k"))
    run = SortedRun(RunId(1), (SstView(Ulid(1), sst(10).id, odd),))
    with pytest.raises(CorruptData, match="exclude its start"):
        decode_manifest(broken(tree=Tree((), (run,))))


def test_a_damaged_sequence_tracker_raises_corrupt_data() -> None:
    data = encode_manifest(new_manifest())
    at = data.index(b"\x01" + bytes(12))
    with pytest.raises(CorruptData, match="tracker") as caught:
        decode_manifest(data[:at] + b"\x09" + data[at + 1 :])
    assert caught.value.offset is not None


def test_two_new_manifests_are_equal() -> None:
    assert new_manifest() == Manifest()
