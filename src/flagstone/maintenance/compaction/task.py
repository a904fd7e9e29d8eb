"""What a worker hands to whoever does the merging, and what it gets back.

The worker owns the job in the compactions file; an executor owns nothing but the objects it uploads. That is why
progress is reported through `record` and never written by the executor itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from flagstone.metadata.compactions import JobContext, TieredSpec
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.types import Ulid


class Cancelled(Exception):
    """The worker told the executor to stop. Uploaded tables stay behind, for a successor or the garbage collector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionTask:
    """One claimed job.

    `manifest` was read after the claim, so that it has every source the job names. `context` is what an earlier
    worker recorded of the same job; None when nobody has begun.
    """

    job_id: Ulid
    spec: TieredSpec
    manifest: Manifest
    context: JobContext | None = None


class Executor(Protocol):
    """Merges the sources of a job into new tables: in this process, or wherever an implementation likes."""

    def run(
        self,
        task: CompactionTask,
        *,
        record: Callable[[JobContext], None],
        cancelled: Callable[[], bool],
    ) -> tuple[SsTable, ...]:
        """All output tables, uploaded, in key order; none when nothing is left of the sources.

        `record` is called once before the work begins and again after each table that was uploaded, from any
        thread, one call at a time. Ranges and barrier stay as first recorded and finished tables only grow in
        number, so after a crash any recorded context, even an outdated one, can be continued.

        Raises:
            Cancelled: `cancelled` returned True. It is asked often; the answer must be cheap and never go back.

        """
        ...
