"""The rules of a valid compaction job, and the reason given for an invalid one."""

from __future__ import annotations

import pytest

from flagstone.compaction.validation import find_commit_problem, find_problem
from flagstone.lsm.tree import Tree
from flagstone.metadata.compactions import Compactions, DrainSpec, Job, JobStatus, Spec, TieredSpec
from flagstone.metadata.manifest import Manifest, Segment, new_manifest, replace_trees
from flagstone.runtime.ids import ulid_text
from flagstone.types import RunId, Ulid
from unit.compaction.test_picker import Shape

NEWEST, MIDDLE, OLDEST = (Ulid((1_700_000_000_000 << 80) + number) for number in range(3))
# The two in L0 of segment `deep`, made after the eight SSTs of the other trees.
NEW, OLD = (Ulid((1_700_000_000_000 << 80) + number) for number in (8, 9))
NONE = Compactions()


@pytest.fixture
def state() -> Manifest:
    shape = Shape()
    tree = shape.tree([1, 1, 1], [(8, 1), (5, 1), (2, 1)])
    other = shape.tree([1], [(9, 1)])
    deep = shape.tree([1, 1], [(7, 1), (4, 1), (1, 1)])
    segments = [Segment(b"deep", deep), Segment(b"seg", other)]
    return replace_trees(new_manifest(), tree=tree, segments=segments, added=shape.ssts)


def tiered(l0: tuple[Ulid, ...], runs: tuple[int, ...], destination: int, segment: bytes = b"") -> TieredSpec:
    return TieredSpec(l0, tuple(map(RunId, runs)), RunId(destination), segment)


@pytest.mark.parametrize(
    "spec",
    [
        tiered((NEWEST, MIDDLE, OLDEST), (), 10),
        tiered((MIDDLE, OLDEST), (), 12),
        tiered((OLDEST,), (8,), 8),
        tiered((NEWEST, MIDDLE, OLDEST), (8, 5, 2), 2),
        tiered((), (8, 5), 5),
        tiered((), (5,), 5),
        DrainSpec(b"seg", (), (RunId(9),)),
        DrainSpec(b"deep", (), (RunId(4),)),
        DrainSpec(b"deep", (OLD,), (RunId(1), RunId(7))),
        DrainSpec(b"deep", (OLD, NEW, OLD)),
    ],
)
def test_a_valid_job_has_no_problem(state: Manifest, spec: Spec) -> None:
    assert find_problem(spec, state, NONE) is None
    assert find_commit_problem(spec, state) is None


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (tiered((), (), 10), "no sources"),
        (DrainSpec(b"seg"), "no sources"),
        (DrainSpec(b"", (OLDEST,)), "drains the root tree"),
        (DrainSpec(b"deep", (NEW,)), f"leaves {ulid_text(OLD)} in L0"),
        (DrainSpec(b"deep", (NEW,), (RunId(7), RunId(4), RunId(1))), "older than what it drains"),
        (tiered((OLDEST, OLDEST), (), 10), "twice"),
        (tiered((), (5, 5), 5), "twice"),
        (tiered((Ulid(7),), (), 10), "00000000000000000000000007 is not in L0 of the database"),
        (tiered((), (8, 7), 7), "run 7 is not in the database"),
        (tiered((), (8,), 8, b"seg"), "run 8 is not in segment b'seg'"),
        (tiered((), (9,), 9, b"nowhere"), "no segment b'nowhere'"),
        (tiered((), (8, 2), 2), "not neighbours"),
        (tiered((), (5, 8), 5), "not neighbours"),
        (tiered((NEWEST, OLDEST), (), 10), "not neighbours"),
        (tiered((MIDDLE,), (8,), 8), "not neighbours"),
        (tiered((OLDEST, MIDDLE, NEWEST), (), 10), "not neighbours"),
        (tiered((), (8, 5), 8), "its destination is run 8; with runs among its sources it must be 5"),
        (tiered((), (8, 5), 10), "must be 5"),
        (tiered((NEWEST, MIDDLE, OLDEST), (), 9), "must be above 9"),
        (tiered((NEWEST, MIDDLE, OLDEST), (), 3), "must be above 9"),
        (tiered((NEWEST, MIDDLE), (), 10), "leaves older SSTs in L0"),
    ],
)
def test_an_invalid_job_is_refused_with_the_reason(state: Manifest, spec: Spec, problem: str) -> None:
    assert problem in (find_problem(spec, state, NONE) or "")


@pytest.mark.parametrize(
    "status", [JobStatus.SUBMITTED, JobStatus.SCHEDULED, JobStatus.RUNNING, JobStatus.COMPACTED]
)
def test_sources_of_an_unfinished_job_are_refused_for_another(state: Manifest, status: JobStatus) -> None:
    def held(spec: Spec) -> Compactions:
        return Compactions(1, (Job(Ulid(1), spec, status),))

    runs = held(tiered((), (8, 5), 5))
    assert "run 5 belongs to job" in (find_problem(tiered((), (5, 2), 2), state, runs) or "")
    assert find_problem(tiered((), (2,), 2), state, runs) is None
    assert find_problem(tiered((NEWEST, MIDDLE, OLDEST), (), 10), state, runs) is None
    l0 = held(tiered((OLDEST,), (), 10))
    assert "belongs to job" in (find_problem(tiered((MIDDLE, OLDEST), (), 11), state, l0) or "")
    assert find_problem(tiered((), (8, 5), 5), state, l0) is None
    # Run ids are unique over all segments.
    seg = tiered(tuple(view.id for view in state.segments[-1].tree.l0), (), 10, b"seg")
    assert "belongs to job" in (find_problem(seg, state, l0) or "")
    assert find_problem(seg, state, held(tiered((OLDEST,), (), 11))) is None


def test_a_job_conflicts_only_with_jobs_submitted_before_it(state: Manifest) -> None:
    spec = tiered((), (8, 5), 5)
    both = Compactions(1, (Job(Ulid(1), spec), Job(Ulid(2), spec)))
    assert find_problem(spec, state, both, job_id=Ulid(1)) is None
    assert "belongs to job" in (find_problem(spec, state, both, job_id=Ulid(2)) or "")


def test_at_the_commit_only_runs_of_the_same_tree_limit_the_destination(state: Manifest) -> None:
    assert find_commit_problem(tiered((NEWEST, MIDDLE, OLDEST), (), 10), state) is None
    seg = tuple(view.id for view in state.segments[-1].tree.l0)
    below = replace_trees(state, tree=Tree())
    assert find_commit_problem(tiered(seg, (), 10, b"seg"), below) is None
    taken = "has been made in another segment"
    assert taken in (find_commit_problem(tiered((NEWEST, MIDDLE, OLDEST), (), 9), state) or "")
    assert "no segment" in (find_commit_problem(tiered(seg, (), 10, b"x"), state) or "")


@pytest.mark.parametrize("status", [JobStatus.SUBMITTED, JobStatus.SCHEDULED, JobStatus.RUNNING])
def test_a_drain_of_l0_waits_for_the_compaction_of_l0(state: Manifest, status: JobStatus) -> None:
    held = Compactions(1, (Job(Ulid(1), tiered((NEW,), (), 10, b"deep"), status),))
    assert "one at a time" in (find_problem(DrainSpec(b"deep", (OLD,)), state, held) or "")
    assert find_problem(DrainSpec(b"deep", (), (RunId(4),)), state, held) is None
    assert find_problem(DrainSpec(b"seg", (), (RunId(9),)), state, held) is None
