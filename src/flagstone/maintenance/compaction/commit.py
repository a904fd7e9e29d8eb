"""How the result of a compaction enters the manifest.

First a manifest with a checkpoint of the state before, so that readers of that state keep their tables for a while;
then one with the result. A crash between the two leaves a checkpoint that expires. The checkpoint's id follows from
the job's, so that a second attempt renews it instead of adding another. A result that is in the manifest already
is recognised, and nothing is written.
"""

from __future__ import annotations

import logging

from flagstone.maintenance.compaction.board import Board
from flagstone.maintenance.compaction.results import Result, apply_result, is_applied, pin_state
from flagstone.maintenance.compaction.validation import find_commit_problem
from flagstone.metadata.compactions import JobStatus
from flagstone.metadata.fencing import Fence
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import ulid_text
from flagstone.types import ManifestId, Ulid

_log = logging.getLogger("flagstone.compaction")


def commit_result(
    board: Board, fence: Fence, result: Result, job_id: Ulid, *, lifetime_s: int, clock: Clock
) -> JobStatus:
    """Put the result of a job into the manifest, unless it is there: completed, or failed if it does not fit.

    After `Unavailable` or a crash it may be there or not; committing it again finds out.

    Raises:
        Closed: a newer coordinator has taken over; the job is its to commit.

    """
    manifest = board.manifest
    if manifest is None or find_commit_problem(result.spec, manifest.value) is not None:
        manifest = board.fetch_manifest()  # nothing is refused because of what may be out of date
    if is_applied(manifest.value, result, job_id):
        return JobStatus.COMPLETED
    problem = find_commit_problem(result.spec, manifest.value)
    if problem is not None:
        _log.warning("failed compaction job=%s reason=%s", ulid_text(job_id), problem)
        return JobStatus.FAILED

    def pin(now: Versioned[Manifest]) -> Manifest:
        return pin_state(
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

    board.edit_manifest(fence.guard(pin))
    written = board.edit_manifest(fence.guard(replace_sources))
    if not is_applied(written.value, result, job_id):
        return JobStatus.FAILED
    _log.info(
        "committed compaction job=%s manifest=%d tables=%d", ulid_text(job_id), written.id, len(result.views)
    )
    return JobStatus.COMPLETED
