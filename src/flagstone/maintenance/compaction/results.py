"""What the manifest becomes by a compaction: pure edits, and how to tell that one was made already."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from uuid import UUID

from flagstone.lsm import tree as trees
from flagstone.lsm.tree import SstView, Tree
from flagstone.metadata.compactions import DrainSpec, Job, Spec, TieredSpec
from flagstone.metadata.manifest import Checkpoint, Manifest, SsTable, add_checkpoint, edit_tree
from flagstone.types import KeyRange, ManifestId, RunId, Ulid


@dataclass(frozen=True, slots=True)
class Result:
    """What takes the place of a job's sources: a run of these views, or nothing at all."""

    spec: Spec
    views: tuple[SstView, ...] = ()
    added: tuple[SsTable, ...] = ()

    @classmethod
    def of_job(cls, job: Job) -> Result:
        """The result of a job that was executed."""
        return cls(job.spec, tuple(SstView.whole(table.id) for table in job.output_ssts), job.output_ssts)

    @property
    def destination(self) -> RunId | None:
        return self.spec.destination if isinstance(self.spec, TieredSpec) else None


def apply_result(manifest: Manifest, result: Result) -> Manifest:
    """The manifest with the result in place of its sources, which must all be there."""
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

    A result without tables leaves no trace but the checkpoint that came before it.
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


def pin_state(
    manifest: Manifest, *, manifest_id: ManifestId, job_id: Ulid, now_s: int, lifetime_s: int
) -> Manifest:
    """The manifest `manifest_id` with a checkpoint of itself, for readers that are about to lose its tables."""
    pin = Checkpoint(checkpoint_id(job_id), manifest_id, now_s, now_s + lifetime_s)
    return add_checkpoint(manifest, pin)


def checkpoint_id(job_id: Ulid) -> UUID:
    """The id of the checkpoint that precedes the result of a job."""
    return UUID(int=job_id, version=4)


def source_views(manifest: Manifest, spec: Spec) -> list[SstView]:
    """The views a job takes, as far as they are there: L0 from new to old, then run by run."""
    tree = manifest.tree_of(spec.segment) or Tree()
    views = [view for view in tree.l0 if view.id in spec.l0_view_ids]
    return views + [view for run in tree.runs if run.id in spec.sorted_runs for view in run.views]


def source_bytes(manifest: Manifest, spec: Spec) -> int:
    """How much a job has to read."""
    return sum(manifest.table(view).info.estimated_size for view in source_views(manifest, spec))


def plan_trivial_move(manifest: Manifest, spec: Spec) -> Result | None:
    """The result of a job whose sources do not overlap, made of the very same tables; None when they do."""
    if isinstance(spec, DrainSpec):
        return None
    ranges = sorted(
        ((view.effective_range(manifest.table(view).info), view) for view in source_views(manifest, spec)),
        key=lambda entry: entry[0].start or b"",
    )
    if any(_meet(before[0], after[0]) for before, after in pairwise(ranges)):
        return None
    return Result(spec, tuple(view for _, view in ranges))


def plan_drain(spec: Spec) -> Result | None:
    """The result of a drain: nothing. None for any other job."""
    return Result(spec) if isinstance(spec, DrainSpec) else None


def _meet(before: KeyRange, after: KeyRange) -> bool:
    return before.stop is None or after.start is None or before.stop > after.start
