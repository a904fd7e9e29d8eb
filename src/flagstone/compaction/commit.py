"""Commits the result of a compaction job: the pure edits of the manifest, and the two manifests that apply them.

The first manifest adds a checkpoint of the state before the result, so that readers of that state keep their SSTs for a
while. The second one holds the result. A crash between the two leaves a checkpoint that expires. The checkpoint's id
is derived from the job's id, so a second attempt renews it instead of adding another. A result that is already in the
manifest is recognised, and nothing is written.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from uuid import UUID

from flagstone.compaction.shared_state import Board
from flagstone.compaction.validation import find_commit_problem
from flagstone.lsm import tree as trees
from flagstone.lsm.tree import SstView, Tree
from flagstone.metadata.compactions import DrainSpec, Job, JobStatus, Spec, TieredSpec
from flagstone.metadata.fencing import Fence
from flagstone.metadata.manifest import Checkpoint, Manifest, SsTable, add_checkpoint, edit_tree
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import ulid_text
from flagstone.types import KeyRange, ManifestId, RunId, Ulid


@dataclass(frozen=True, slots=True)
class Result:
    """What replaces the sources of a job: a sorted run of these views, or nothing."""

    spec: Spec
    views: tuple[SstView, ...] = ()
    added: tuple[SsTable, ...] = ()

    @classmethod
    def of_job(cls, job: Job) -> Result:
        """The result of a job that was executed."""
        return cls(job.spec, tuple(SstView.whole(sst.id) for sst in job.output_ssts), job.output_ssts)

    @property
    def destination(self) -> RunId | None:
        return self.spec.destination if isinstance(self.spec, TieredSpec) else None


def apply_result(manifest: Manifest, result: Result) -> Manifest:
    """The manifest with the result in place of its sources, all of which the manifest must hold."""
    spec = result.spec
    return edit_tree(
        manifest,
        spec.segment,
        lambda tree: trees.apply_compaction(
            tree,
            l0=spec.l0_view_ids,
            runs=spec.sorted_runs,
            destination=result.destination,
            output=result.views,
        ),
        added=result.added,
    )


def is_applied(manifest: Manifest, result: Result, job_id: Ulid) -> bool:
    """Whether an earlier attempt has put the result into the manifest.

    A result without SSTs is recognised only by the checkpoint that precedes it.
    """
    spec = result.spec
    tree = manifest.tree_of(spec.segment) or Tree()
    left = {view.id for view in tree.l0} & set(spec.l0_view_ids)
    runs = {run.id: run for run in tree.runs}
    if result.views:
        made = runs.get(spec.destination) if isinstance(spec, TieredSpec) else None
        return not left and made is not None and made.views == result.views
    gone = not left and not runs.keys() & set(spec.sorted_runs)
    return gone and manifest.checkpoint(checkpoint_id(job_id)) is not None


def add_commit_checkpoint(
    manifest: Manifest, *, manifest_id: ManifestId, job_id: Ulid, now_s: int, lifetime_s: int
) -> Manifest:
    """The manifest `manifest_id` with a checkpoint of itself, for readers whose SSTs the result replaces."""
    created = Checkpoint(checkpoint_id(job_id), manifest_id, now_s, now_s + lifetime_s)
    return add_checkpoint(manifest, created)


def checkpoint_id(job_id: Ulid) -> UUID:
    """The id of the checkpoint that precedes the result of a job."""
    return UUID(int=job_id, version=4)


def source_views(manifest: Manifest, spec: Spec) -> list[SstView]:
    """The views of a job's sources that the manifest holds: L0 from new to old, then run by run."""
    tree = manifest.tree_of(spec.segment) or Tree()
    views = [view for view in tree.l0 if view.id in spec.l0_view_ids]
    return views + [view for run in tree.runs if run.id in spec.sorted_runs for view in run.views]


def source_bytes(manifest: Manifest, spec: Spec) -> int:
    """The bytes that a job reads."""
    return sum(manifest.sst(view).info.estimated_size for view in source_views(manifest, spec))


def plan_trivial_move(manifest: Manifest, spec: Spec) -> Result | None:
    """The result of a job whose sources do not overlap: a sorted run of the same SSTs. None if they overlap.

    A job of a single run is there to rewrite it: moving its SSTs would change nothing.
    """
    if isinstance(spec, DrainSpec) or (not spec.l0_view_ids and len(spec.sorted_runs) == 1):
        return None
    ranges = sorted(
        ((view.effective_range(manifest.sst(view).info), view) for view in source_views(manifest, spec)),
        key=lambda entry: entry[0].start or b"",
    )
    if any(_overlap(before[0], after[0]) for before, after in pairwise(ranges)):
        return None
    return Result(spec, tuple(view for _, view in ranges))


def plan_drain(spec: Spec) -> Result | None:
    """The result of a drain: nothing. None for any other job."""
    return Result(spec) if isinstance(spec, DrainSpec) else None


def _overlap(before: KeyRange, after: KeyRange) -> bool:
    return before.stop is None or after.start is None or before.stop > after.start


_log = logging.getLogger("flagstone.compaction")


def commit_result(
    board: Board, fence: Fence, result: Result, job_id: Ulid, *, lifetime_s: int, clock: Clock
) -> JobStatus:
    """Put the result of a job into the manifest, unless it is there; returns completed, or failed if it does not fit.

    After `Unavailable` or a crash the outcome is unknown; committing the result again resolves it.

    Raises:
        Closed: a newer coordinator has taken over, and commits the job.

    """
    manifest = board.manifest
    if manifest is None or find_commit_problem(result.spec, manifest.value) is not None:
        manifest = board.fetch_manifest()  # an old manifest is no reason to refuse a result
    if is_applied(manifest.value, result, job_id):
        return JobStatus.COMPLETED
    problem = find_commit_problem(result.spec, manifest.value)
    if problem is not None:
        _log.warning("failed compaction job=%s reason=%s", ulid_text(job_id), problem)
        return JobStatus.FAILED

    def keep_state(now: Versioned[Manifest]) -> Manifest:
        return add_commit_checkpoint(
            now.value,
            manifest_id=ManifestId(now.next_id),
            job_id=job_id,
            now_s=clock.now_ms() // 1000,
            lifetime_s=lifetime_s,
        )

    def replace_sources(now: Versioned[Manifest]) -> Manifest | None:
        if is_applied(now.value, result, job_id) or find_commit_problem(result.spec, now.value) is not None:
            return None
        return apply_result(now.value, result)

    board.edit_manifest(fence.guard(keep_state))
    written = board.edit_manifest(fence.guard(replace_sources))
    if not is_applied(written.value, result, job_id):
        return JobStatus.FAILED
    _log.info(
        "committed compaction job=%s manifest=%d ssts=%d", ulid_text(job_id), written.id, len(result.views)
    )
    return JobStatus.COMPLETED
