"""The size-tiered picker by small examples; `tests/interop/test_picker.py` compares it with the wheel's."""

from __future__ import annotations

import pytest

from flagstone.compaction.commit import Result, apply_result, source_bytes
from flagstone.compaction.lines import scaled
from flagstone.compaction.picker import SizeTieredScheduler, plan_compactions, plan_full
from flagstone.config.settings import CompactorOptions, SchedulerOptions
from flagstone.format.sst_info import SsTableInfo
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.compactions import Compactions, Job, JobStatus, TieredSpec
from flagstone.metadata.manifest import Manifest, Segment, SsTable, new_manifest, replace_trees
from flagstone.types import RunId, Ulid

DEFAULTS = CompactorOptions()


class Shape:
    """Trees by the sizes of their sources: L0 newest first, then runs as (id, size) by descending id."""

    def __init__(self) -> None:
        self.ssts: list[SsTable] = []

    def view(self, size: int) -> SstView:
        # Ids as large as real ones, so that they cannot be mistaken for run ids.
        sst_id = Ulid((1_700_000_000_000 << 80) + len(self.ssts))
        info = SsTableInfo(b"a", b"z", size, 0, size, 0)
        self.ssts.append(SsTable(sst_id, info))
        return SstView.whole(sst_id)

    def tree(self, l0: list[int], runs: list[tuple[int, int]]) -> Tree:
        return Tree(
            tuple(self.view(size) for size in l0),
            tuple(SortedRun(RunId(run_id), (self.view(size),)) for run_id, size in runs),
        )


def manifest(l0: list[int], runs: list[tuple[int, int]]) -> Manifest:
    shape = Shape()
    tree = shape.tree(l0, runs)
    return replace_trees(new_manifest(), tree=tree, added=shape.ssts)


def l0_ids(tree: Tree) -> tuple[Ulid, ...]:
    return tuple(view.id for view in tree.l0)


def test_fewer_than_four_ssts_are_not_compacted() -> None:
    assert plan_compactions(manifest([10] * 3, []), Compactions(), DEFAULTS) == []


def test_four_ssts_of_l0_become_the_first_sorted_run() -> None:
    state = manifest([10] * 4, [])
    assert plan_compactions(state, Compactions(), DEFAULTS) == [TieredSpec(l0_ids(state.tree), (), RunId(0))]


def test_of_many_ssts_the_oldest_eight_are_compacted() -> None:
    state = manifest([10] * 11, [(4, 1000)])
    (spec,) = plan_compactions(state, Compactions(), DEFAULTS)
    assert spec == TieredSpec(l0_ids(state.tree)[3:], (), RunId(5))


def test_sorted_runs_of_similar_size_are_merged_into_the_oldest() -> None:
    state = manifest([], [(9, 100), (7, 110), (6, 300), (2, 390), (1, 100_000)])
    (spec,) = plan_compactions(state, Compactions(), DEFAULTS)
    assert spec == TieredSpec((), (RunId(9), RunId(7), RunId(6), RunId(2)), RunId(2))


def test_a_sorted_run_over_four_times_the_smallest_before_it_is_left_out() -> None:
    assert (
        plan_compactions(manifest([], [(4, 100), (3, 100), (2, 100), (1, 401)]), Compactions(), DEFAULTS)
        == []
    )
    assert plan_compactions(manifest([], [(4, 100), (3, 100), (2, 100), (1, 400)]), Compactions(), DEFAULTS)


@pytest.mark.parametrize("most", [1, 2, 8])
@pytest.mark.parametrize("space_driven", [False, True])
def test_compaction_comes_to_an_end_if_one_source_is_enough(most: int, space_driven: bool) -> None:
    options = CompactorOptions(
        scheduler_options=SchedulerOptions(
            min_compaction_sources=1, max_compaction_sources=most, space_driven=space_driven
        )
    )
    state, jobs = manifest([10] * 7, [(9, 10), (8, 15), (7, 10), (2, 100_000)]), 0
    while planned := SizeTieredScheduler(options).plan(state, Compactions()):
        spec, jobs = planned[0], jobs + 1
        assert jobs <= 7 + 10, "each job takes L0 or leaves fewer runs"
        size = source_bytes(state, spec)
        made = SsTable(Ulid((1_800_000_000_000 << 80) + jobs), SsTableInfo(b"a", b"z", size, 0, size, 0))
        state = apply_result(state, Result(spec, (SstView.whole(made.id),), (made,)))
    assert state.tree.l0 == ()


def test_l0_waits_while_eight_sorted_runs_can_be_merged() -> None:
    state = manifest([10] * 4, [(run_id, 10) for run_id in range(8, 0, -1)])
    (spec,) = plan_compactions(state, Compactions(), DEFAULTS)
    assert spec.l0_view_ids == ()
    assert spec.sorted_runs == tuple(range(8, 0, -1))


def test_sources_of_unfinished_jobs_are_not_chosen_again() -> None:
    state = manifest([10] * 8, [])
    (spec,) = plan_compactions(state, Compactions(), DEFAULTS)
    for status in (JobStatus.SUBMITTED, JobStatus.SCHEDULED, JobStatus.RUNNING, JobStatus.COMPACTED):
        held = Compactions(1, (Job(Ulid(1), spec, status),))
        assert plan_compactions(state, held, DEFAULTS) == []
    for status in (JobStatus.COMPLETED, JobStatus.FAILED):
        assert plan_compactions(state, Compactions(1, (Job(Ulid(1), spec, status),)), DEFAULTS) == [spec]


def test_a_new_sorted_run_is_above_the_destinations_of_unfinished_jobs() -> None:
    state = manifest([10] * 4, [(3, 1)])
    elsewhere = Job(Ulid(1), TieredSpec((Ulid(9),), (), RunId(12), b"elsewhere"), JobStatus.RUNNING)
    (spec,) = plan_compactions(state, Compactions(1, (elsewhere,)), DEFAULTS)
    assert spec.destination == 13


def test_no_more_jobs_than_allowed_run_at_once() -> None:
    shape = Shape()
    segments = [Segment(b"%d" % number, shape.tree([10] * (4 + number), [])) for number in range(6)]
    state = replace_trees(new_manifest(segment_extractor_name="x"), segments=segments, added=shape.ssts)
    specs = plan_compactions(state, Compactions(), DEFAULTS)
    assert [spec.segment for spec in specs] == [b"5", b"4", b"3", b"2"]
    assert [spec.destination for spec in specs] == [0, 1, 2, 3]
    busy = Compactions(1, (Job(Ulid(1), specs[0], JobStatus.RUNNING),))
    assert [spec.segment for spec in plan_compactions(state, busy, DEFAULTS)] == [b"4", b"3", b"2"]


def test_sizes_are_compared_in_single_precision() -> None:
    assert scaled(2**24 + 1, 1.0) == 2**24
    assert scaled(100, 1.1) == 110
    assert scaled(10**12, 4.0) == 3_999_999_983_616
    single = CompactorOptions(
        scheduler_options=SchedulerOptions(min_compaction_sources=2, include_size_threshold=1.0)
    )
    # The first run is not compared with its own rounded size, which is smaller.
    assert plan_compactions(manifest([], [(2, 2**24 + 1), (1, 5)]), Compactions(), single)


def test_a_full_compaction_takes_all_sources_of_each_tree() -> None:
    shape = Shape()
    state = replace_trees(
        new_manifest(segment_extractor_name="x"),
        segments=[
            Segment(b"a", shape.tree([1, 2], [(7, 5), (3, 5)])),
            Segment(b"b", shape.tree([1], [])),
            Segment(b"c", shape.tree([], [(9, 5)])),
        ],
        added=shape.ssts,
    )
    trees = {segment.prefix: segment.tree for segment in state.segments}
    assert plan_full(state, Compactions()) == [
        TieredSpec(l0_ids(trees[b"a"]), (RunId(7), RunId(3)), RunId(3), b"a"),
        TieredSpec(l0_ids(trees[b"b"]), (), RunId(10), b"b"),
    ]
    assert [spec.segment for spec in plan_full(state, Compactions(), b"b")] == [b"b"]


def test_a_full_compaction_can_leave_out_the_sources_of_unfinished_jobs() -> None:
    state = manifest([10] * 4, [(5, 10), (4, 10), (3, 10), (2, 10)])
    l0 = l0_ids(state.tree)

    def around(spec: TieredSpec) -> list[TieredSpec]:
        return plan_full(state, Compactions(1, (Job(Ulid(1), spec, JobStatus.RUNNING),)), around=True)

    runs = (RunId(5), RunId(4), RunId(3), RunId(2))
    assert around(TieredSpec(l0[2:], (), RunId(6))) == [TieredSpec((), runs, RunId(2))]
    assert around(TieredSpec((), runs[:2], RunId(4))) == [TieredSpec((), runs[2:], RunId(2))]
    assert around(TieredSpec((), runs[2:], RunId(2))) == []
    assert around(TieredSpec((), runs, RunId(2), b"elsewhere")) == [TieredSpec(l0, runs, RunId(2))]
