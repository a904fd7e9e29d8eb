"""A violation names its rule; valid changes satisfy all rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flagstone.errors import InternalError
from flagstone.format.sst_info import SsTableInfo
from flagstone.lsm.sequence import SequenceTracker
from flagstone.lsm.tree import BytesRange, SortedRun, SstView, Tree
from flagstone.metadata.compactions import (
    Compactions,
    Job,
    JobContext,
    JobStatus,
    Subcompaction,
    TieredSpec,
    check_compactions,
)
from flagstone.metadata.invariants import check_manifest
from flagstone.metadata.manifest import Manifest, Segment, SsTable, replace_trees
from flagstone.types import RunId, Ulid


def ulid(ms: int, salt: int = 0) -> Ulid:
    return Ulid(ms << 80 | salt)


def sst(ms: int, salt: int = 0) -> SsTable:
    return SsTable(ulid(ms, salt), SsTableInfo(b"a", b"z", 10, 5, 10, 0))


def view(ms: int, salt: int = 0) -> SstView:
    return SstView.whole(ulid(ms, salt))


def run(number: int, *times: int) -> SortedRun:
    return SortedRun(RunId(number), tuple(view(ms) for ms in times))


ALL = [sst(ms, salt) for ms in range(1, 30) for salt in (0, 1)]
BASE = replace_trees(
    Manifest(writer_epoch=2, compactor_epoch=2, last_l0_clock_tick=5),
    tree=Tree((view(9), view(8)), (run(4, 3), run(2, 2)), ulid(7)),
    segments=[Segment(b"b", Tree((view(6),), (run(3, 1),)))],
    added=ALL,
)


def with_trees(tree: Tree | None = None, segments: list[Segment] | None = None) -> Manifest:
    return replace_trees(BASE, tree=tree, segments=segments, added=ALL)


def test_the_base_manifest_satisfies_every_rule() -> None:
    check_manifest(BASE, None)
    check_manifest(BASE, BASE)


@pytest.mark.parametrize(
    ("rule", "following"),
    [
        ("run_ids_descend", with_trees(Tree(BASE.tree.l0, (run(2, 2), run(4, 3))))),
        ("run_ids_descend", with_trees(Tree(BASE.tree.l0, (run(4, 3), run(4, 2))))),
        ("run_ids_unique", with_trees(Tree(BASE.tree.l0, (run(4, 4), run(3, 3))))),
        ("view_ids_unique", with_trees(Tree((view(9), view(8)), (run(4, 8),)))),
        ("view_ids_unique", with_trees(segments=[Segment(b"b", Tree((view(9),)))])),
        ("ssts_are_those_referenced", replace(BASE, ssts={**BASE.ssts, ulid(20): sst(20)})),
        ("ssts_are_those_referenced", replace(BASE, ssts={})),
        ("ssts_are_those_referenced", replace(BASE, ssts={**BASE.ssts, ulid(9): sst(20)})),
        ("segments_ordered_and_disjoint", replace(BASE, segments=(Segment(b"b"), Segment(b"a")))),
        ("segments_ordered_and_disjoint", replace(BASE, segments=(Segment(b"b"), Segment(b"b")))),
        ("segments_ordered_and_disjoint", replace(BASE, segments=(Segment(b"b"), Segment(b"ba")))),
        ("tracker_not_ahead", replace(BASE, sequence_tracker=SequenceTracker((5, 6), (1, 2)))),
        ("counters_grow", replace(BASE, writer_epoch=1)),
        ("counters_grow", replace(BASE, compactor_epoch=1)),
        ("counters_grow", replace(BASE, last_l0_clock_tick=4)),
        ("stays_initialized", replace(BASE, initialized=False)),
        ("new_l0_not_older", with_trees(replace(BASE.tree, l0=(view(8, 1), *BASE.tree.l0)))),
        ("new_l0_not_older", with_trees(segments=[*BASE.segments, Segment(b"c", Tree((view(8, 1),)))])),
        ("l0_order_kept", with_trees(replace(BASE.tree, l0=(view(8), view(9))))),
        ("l0_order_kept", with_trees(replace(BASE.tree, l0=(view(9), view(10), view(8))))),
    ],
)
def test_a_violation_of_a_manifest_rule_names_the_rule(rule: str, following: Manifest) -> None:
    if rule.startswith("segments"):
        following = replace(
            following, ssts={view.sst_id: following.ssts[view.sst_id] for view in following.views}
        )
    with pytest.raises(InternalError, match=f"rule {rule}"):
        check_manifest(following, BASE)


@pytest.mark.parametrize(
    "following",
    [
        with_trees(replace(BASE.tree, l0=(view(9, 1), *BASE.tree.l0))),  # the same millisecond
        with_trees(replace(BASE.tree, l0=(view(9),), last_compacted_l0=ulid(8))),
        with_trees(Tree((), (run(5, 12, 13),), ulid(9))),
        with_trees(segments=[Segment(b"a", Tree((view(10),))), *BASE.segments]),
        with_trees(segments=[]),
    ],
)
def test_valid_manifest_changes_satisfy_every_rule(following: Manifest) -> None:
    check_manifest(following, BASE)


def test_new_l0_ids_are_bounded_by_the_last_compacted_l0() -> None:
    drained = with_trees(Tree((), (run(5, 12),), ulid(9)), segments=[])
    early = replace_trees(drained, tree=replace(drained.tree, l0=(view(8, 1),)), added=ALL)
    with pytest.raises(InternalError, match="new_l0_not_older"):
        check_manifest(early, drained)


def job(ms: int, status: JobStatus = JobStatus.SUBMITTED, **changes: object) -> Job:
    return replace(Job(ulid(ms), TieredSpec((), (), RunId(0)), status), **changes)  # type: ignore[arg-type]


JOBS = Compactions(3, (job(10, JobStatus.RUNNING), job(11)))


@pytest.mark.parametrize(
    ("rule", "following"),
    [
        ("job_ids_ascend", Compactions(3, (job(11), job(10)))),
        ("job_ids_ascend", Compactions(3, (job(11), job(11)))),
        ("outputs_not_older_than_job", Compactions(3, (job(11, output_ssts=(sst(10),)),))),
        (
            "outputs_not_older_than_job",
            Compactions(3, (job(11, context=JobContext((Subcompaction(BytesRange(), (sst(10),)),))),)),
        ),
        ("coordinator_epoch_grows", replace(JOBS, compactor_epoch=2)),
        ("new_job_not_older", Compactions(3, (job(9), *JOBS.jobs))),
        ("jobs_follow_life_cycle", Compactions(3, (job(10, JobStatus.SUBMITTED), job(11)))),
    ],
)
def test_a_violation_of_a_compactions_rule_names_the_rule(rule: str, following: Compactions) -> None:
    with pytest.raises(InternalError, match=f"rule {rule}"):
        check_compactions(following, JOBS)


@pytest.mark.parametrize(
    "following",
    [
        JOBS,
        Compactions(4, (job(11, JobStatus.SCHEDULED), job(11 + 1))),
        Compactions(3, (job(10, JobStatus.COMPACTED, output_ssts=(sst(10, 1),)), job(11))),
        Compactions(3),
    ],
)
def test_valid_compactions_changes_satisfy_every_rule(following: Compactions) -> None:
    check_compactions(following, JOBS)
    check_compactions(following, None)
