"""Lazy leveling by small examples; `tests/property/test_lazy_leveling.py` proves what always holds."""

from __future__ import annotations

from typing import Any

from flagstone.compaction.dead_rows import Stats, ViewStats
from flagstone.compaction.lazy_leveling import plan_lazy_leveling
from flagstone.compaction.picker import SizeTieredScheduler
from flagstone.compaction.policy import new_scheduler, new_survey
from flagstone.config.settings import CompactorOptions, SchedulerOptions
from flagstone.lsm.tree import SstView
from flagstone.metadata.compactions import Compactions, Job, JobStatus, TieredSpec
from flagstone.metadata.manifest import Manifest
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.types import RunId, Ulid
from unit.compaction.test_picker import l0_ids, manifest

NOTHING = Compactions()


def lazy(**options: Any) -> CompactorOptions:
    chosen = {"compaction_policy": "lazy-leveling", "min_dead_share": 0.3, **options}
    return CompactorOptions(scheduler_options=SchedulerOptions.from_dict(chosen))


def plan(
    state: Manifest, *, jobs: Compactions = NOTHING, stats: Stats | None = None, **options: Any
) -> list[TieredSpec]:
    return plan_lazy_leveling(state, jobs, lazy(**options), stats or {})


def merge(*runs: int) -> TieredSpec:
    return TieredSpec((), tuple(RunId(run) for run in runs), RunId(runs[-1]))


def running(*specs: TieredSpec) -> Compactions:
    jobs = [Job(Ulid(number), spec, JobStatus.RUNNING) for number, spec in enumerate(specs, 1)]
    return Compactions(0, tuple(jobs))


def test_the_first_ssts_of_l0_become_the_last_run() -> None:
    state = manifest([10] * 4, [])
    assert plan(state) == [TieredSpec(l0_ids(state.tree), (), RunId(0))]


def test_runs_wait_above_the_last_while_they_are_small_together() -> None:
    assert plan(manifest([], [(7, 80), (6, 80), (5, 80), (1, 961)])) == []


def test_runs_are_merged_into_the_last_once_they_are_a_quarter_of_it() -> None:
    state = manifest([], [(7, 80), (6, 80), (5, 80), (1, 960)])
    assert plan(state) == [merge(7, 6, 5, 1)]
    assert plan(state, last_run_ratio=2.0) == []


def test_similar_runs_above_the_last_are_merged_with_each_other() -> None:
    state = manifest([], [(9, 10), (8, 10), (7, 10), (6, 10), (1, 10_000)])
    assert plan(state) == [merge(9, 8, 7, 6)]
    assert plan(state, min_compaction_sources=5) == []


def test_a_larger_run_above_the_last_is_left_out_of_a_merge() -> None:
    state = manifest([], [(9, 10), (8, 10), (7, 10), (6, 10), (5, 500), (1, 10_000)])
    assert plan(state) == [merge(9, 8, 7, 6)]


def test_l0_waits_for_room_above_the_last_run_and_the_smallest_neighbours_make_it() -> None:
    state = manifest([10] * 4, [(9, 10), (8, 900), (7, 20), (6, 500), (5, 100), (1, 100_000)])
    assert plan(state, max_upper_runs=5, min_compaction_sources=3)[0] == merge(7, 6, 5)
    assert plan(state, max_upper_runs=6) == [TieredSpec(l0_ids(state.tree), (), RunId(10))]


def test_a_single_run_that_is_in_the_way_is_merged_into_the_last() -> None:
    state = manifest([10] * 4, [(9, 10), (1, 100_000)])
    assert plan(state, max_upper_runs=1) == [merge(9, 1), TieredSpec(l0_ids(state.tree), (), RunId(10))]


def test_while_runs_are_merged_into_the_last_others_gather_above() -> None:
    state = manifest([10] * 4, [(9, 10), (8, 10), (7, 10), (1, 40)])
    under_way = running(merge(8, 7, 1))
    assert plan(state, jobs=under_way, max_upper_runs=2) == [TieredSpec(l0_ids(state.tree), (), RunId(10))]
    assert plan(state, jobs=under_way, max_upper_runs=1) == []


def test_a_merge_into_the_last_run_takes_the_oldest_if_there_are_too_many() -> None:
    state = manifest([], [(run_id, 100) for run_id in range(9, 0, -1)])
    assert plan(state, max_compaction_sources=4) == [merge(4, 3, 2, 1), merge(8, 7, 6, 5)]


# -- dead rows


def known(state: Manifest, run: int, stats: ViewStats) -> dict[SstView, ViewStats]:
    (views,) = [entry.views for entry in state.tree.runs if entry.id == run]
    return dict.fromkeys(views, stats)


def test_a_run_that_hides_most_of_its_bytes_is_rewritten() -> None:
    state = manifest([], [(5, 100), (1, 10_000)])
    hidden = known(state, 1, ViewStats(shown_bytes=6_000, rows=60, tombstones=0))
    assert plan(state, stats=hidden) == [merge(1)]
    assert plan(state, stats=hidden, min_dead_share=0.5) == []


def test_a_run_whose_sample_has_expired_is_rewritten() -> None:
    state = manifest([], [(5, 1_000), (1, 10_000)])
    clock = state.last_l0_clock_tick
    expired = ViewStats(1_000, 10, 0, sampled=10, expiries=(*[clock] * 4, clock + 1))
    assert plan(state, stats=known(state, 5, expired)) == [merge(5)]
    alive = ViewStats(1_000, 10, 0, sampled=10, expiries=(*[clock] * 2, clock + 1))
    assert plan(state, stats=known(state, 5, alive)) == []


def test_runs_with_many_tombstones_are_merged_down_to_the_last() -> None:
    state = manifest([], [(9, 10), (5, 100), (1, 10_000)])
    stats = known(state, 1, ViewStats(10_000, 1_000, 0)) | known(state, 5, ViewStats(100, 400, 400))
    assert plan(state, stats=stats) == [merge(5, 1)]
    few = stats | known(state, 5, ViewStats(100, 250, 250))
    assert plan(state, stats=few) == []


def test_tombstones_of_the_last_run_are_no_reason_to_rewrite_it() -> None:
    # A snapshot may need them: rewriting would change nothing, again and again.
    state = manifest([], [(1, 10_000)])
    assert plan(state, stats=known(state, 1, ViewStats(10_000, 100, 100))) == []


def test_a_run_that_has_a_job_is_not_rewritten_beside_it() -> None:
    state = manifest([], [(5, 100), (1, 10_000)])
    hidden = known(state, 1, ViewStats(1_000, 10, 0))
    assert plan(state, stats=hidden, jobs=running(merge(5, 1))) == []


def test_size_tiered_compaction_rewrites_for_space_only_if_asked_to_and_with_nothing_else_to_do() -> None:
    state = manifest([], [(5, 100), (1, 10_000)])
    hidden = known(state, 1, ViewStats(1_000, 10, 0))
    asked = CompactorOptions(scheduler_options=SchedulerOptions(space_driven=True))
    assert SizeTieredScheduler(CompactorOptions(), hidden).plan(state, NOTHING) == []
    assert SizeTieredScheduler(asked, hidden).plan(state, NOTHING) == [merge(1)]
    assert SizeTieredScheduler(asked, hidden).plan(state, running(merge(5))) == []
    busy = manifest([10] * 4, [(1, 10_000)])
    (chosen,) = SizeTieredScheduler(asked, known(busy, 1, ViewStats(1_000, 10, 0))).plan(busy, NOTHING)
    assert chosen.l0_view_ids


def test_the_policy_of_the_settings_decides_the_scheduler_and_whether_ssts_are_surveyed() -> None:
    state = manifest([], [(7, 80), (6, 80), (5, 80), (1, 960)])

    def parts(options: CompactorOptions) -> tuple[list[Any], bool]:
        survey = new_survey(options, MemoryStore(), DbPaths("db"))
        return list(new_scheduler(options, survey).plan(state, NOTHING)), survey is not None

    assert parts(CompactorOptions()) == ([], False)
    assert parts(CompactorOptions(scheduler_options=SchedulerOptions(space_driven=True))) == ([], True)
    assert parts(lazy()) == ([merge(7, 6, 5, 1)], True)
