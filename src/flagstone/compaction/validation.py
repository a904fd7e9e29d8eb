"""Checks whether a compaction job is valid for a manifest. Pure; a problem is returned as a text for people.

A job is checked when it is accepted and again before its result enters the manifest, because the tree may have changed
in between. A result applied to the wrong tree would bring back deleted rows or hide newer ones.
"""

from __future__ import annotations

from itertools import pairwise

from flagstone.lsm.tree import Tree
from flagstone.metadata.compactions import Compactions, DrainSpec, Job, JobStatus, Spec, TieredSpec
from flagstone.metadata.manifest import Manifest
from flagstone.runtime.ids import ulid_text
from flagstone.types import RunId, Ulid


def find_problem(
    spec: Spec, manifest: Manifest, compactions: Compactions, *, job_id: Ulid | None = None
) -> str | None:
    """Why the job cannot be accepted, or None if it can. `job_id` is its own id, if it is listed already."""
    tree = manifest.tree_of(spec.segment)
    if tree is None:
        return f"there is no segment {spec.segment!r}"
    return (
        _shape_problem(spec)
        or _source_problem(spec, tree)
        or _slice_problem(spec, tree)
        or _destination_problem(spec, tree, [*manifest.run_ids])
        or _rival_problem(spec, compactions, job_id)
    )


def find_commit_problem(spec: Spec, manifest: Manifest) -> str | None:
    """Why the result of a job cannot enter the manifest, or None if it can.

    Unlike in `find_problem`, a run of another tree may have a greater id by now; but none may have the same id.
    """
    tree = manifest.tree_of(spec.segment)
    if tree is None:
        return f"there is no segment {spec.segment!r} any more"
    return (
        _shape_problem(spec)
        or _source_problem(spec, tree)
        or _slice_problem(spec, tree)
        or _destination_problem(spec, tree, [run.id for run in tree.runs])
        or _taken_problem(spec, tree, manifest)
    )


def _shape_problem(spec: Spec) -> str | None:
    if not spec.l0_view_ids and not spec.sorted_runs:
        return "it names no sources"
    if isinstance(spec, DrainSpec):
        # The sources of a drain are a set: order and repetition do not matter.
        return None if spec.segment else "it drains the root tree; only a segment can be drained"
    sources = [*spec.l0_view_ids, *spec.sorted_runs]
    if len(set(sources)) < len(sources):
        return "it names a source twice"
    return None


def _source_problem(spec: Spec, tree: Tree) -> str | None:
    views, runs = {view.id for view in tree.l0}, {run.id for run in tree.runs}
    where = f"segment {spec.segment!r}" if spec.segment else "the database"
    absent = [ulid_text(view_id) for view_id in spec.l0_view_ids if view_id not in views]
    if absent:
        return f"{', '.join(absent)} {_are(absent)} not in L0 of {where}; it may have been compacted already"
    lost = [str(run_id) for run_id in spec.sorted_runs if run_id not in runs]
    if lost:
        return f"run {', '.join(lost)} {_are(lost)} not in {where}; it may have been compacted already"
    return None


def _slice_problem(spec: Spec, tree: Tree) -> str | None:
    """Sources must be neighbours, from new to old: a source left out between them would lose its place in the order.

    A drain may leave runs out. It must take every L0 SST older than the newest one it takes: `last_compacted_l0` moves
    to that one, and the writer then drops all older L0 SSTs, whether or not the drain named them.
    """
    if isinstance(spec, DrainSpec):
        drained = set(spec.l0_view_ids)
        newest = next((place for place, view in enumerate(tree.l0) if view.id in drained), len(tree.l0))
        passed = [ulid_text(view.id) for view in tree.l0[newest:] if view.id not in drained]
        if passed:
            return (
                f"it leaves {', '.join(passed)} in L0, older than what it drains; the writer would drop "
                f"{'that' if len(passed) == 1 else 'those'} too"
            )
        return None
    line: list[int] = [view.id for view in tree.l0]
    line += [run.id for run in tree.runs]
    place = {source: position for position, source in enumerate(line)}
    places = [place[source] for source in (*spec.l0_view_ids, *spec.sorted_runs)]
    if any(after != before + 1 for before, after in pairwise(places)):
        return (
            "its sources are not neighbours in reading order: L0 from new to old, then runs by descending id, "
            "with none left out"
        )
    return None


def _destination_problem(spec: Spec, tree: Tree, other_runs: list[RunId]) -> str | None:
    if not isinstance(spec, TieredSpec):
        return None
    if spec.sorted_runs:
        lowest = min(spec.sorted_runs)
        if spec.destination != lowest:
            return (
                f"its destination is run {spec.destination}; with runs among its sources it must be {lowest}"
            )
        return None
    highest = max(other_runs, default=None)
    if highest is not None and spec.destination <= highest:
        return f"its destination is run {spec.destination}; L0 is newer than every run, so it must be above {highest}"
    if tree.l0 and spec.l0_view_ids[-1] != tree.l0[-1].id:
        return "it leaves older SSTs in L0, which would then hide the newer rows of its result"
    return None


def _taken_problem(spec: Spec, tree: Tree, manifest: Manifest) -> str | None:
    own = {run.id for run in tree.runs}
    if isinstance(spec, TieredSpec) and spec.destination not in own and spec.destination in manifest.run_ids:
        return f"run {spec.destination}, its destination, has been made in another segment"
    return None


def _rival_problem(spec: Spec, compactions: Compactions, job_id: Ulid | None) -> str | None:
    """Jobs under way own their sources. Only one job at a time compacts L0, because L0 is compacted from its end."""
    for job in compactions.jobs:
        if job.id == job_id or job.status.finished:
            continue
        if job.status is JobStatus.SUBMITTED and job_id is not None and job.id > job_id:
            continue  # of two submitted jobs the older one is accepted first
        if job.spec.segment != spec.segment:
            # Run ids are unique over all segments.
            if isinstance(spec, TieredSpec) and spec.destination in _runs_of(job.spec):
                return f"run {spec.destination}, its destination, belongs to job {ulid_text(job.id)}"
            continue
        shared = _overlap(spec, job)
        if shared:
            return f"{shared} belongs to job {ulid_text(job.id)}, which is {job.status.name.lower()}"
        if spec.l0_view_ids and job.spec.l0_view_ids:
            return f"L0 is being compacted by job {ulid_text(job.id)}; one at a time"
    return None


def _overlap(spec: Spec, job: Job) -> str | None:
    views = set(spec.l0_view_ids) & set(job.spec.l0_view_ids)
    if views:
        return f"L0 SST {ulid_text(min(views))}"
    runs = _runs_of(spec) & _runs_of(job.spec)
    return f"run {min(runs)}" if runs else None


def _runs_of(spec: Spec) -> set[RunId]:
    destination = {spec.destination} if isinstance(spec, TieredSpec) else set[RunId]()
    return {*spec.sorted_runs, *destination}


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
