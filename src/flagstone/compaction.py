"""The parts of compaction that a program may replace: the scheduler that decides, the executor that merges."""

from __future__ import annotations

from flagstone.maintenance.compaction.picker import Scheduler, SizeTieredScheduler, next_run_id, plan_full
from flagstone.maintenance.compaction.task import Cancelled, CompactionTask, Executor
from flagstone.maintenance.compaction.validation import find_problem
from flagstone.metadata.compactions import (
    Compactions,
    DrainSpec,
    Job,
    JobContext,
    JobStatus,
    Subcompaction,
    TieredSpec,
)
from flagstone.metadata.manifest import Manifest, SsTable

__all__ = [
    "Cancelled",
    "CompactionTask",
    "Compactions",
    "DrainSpec",
    "Executor",
    "Job",
    "JobContext",
    "JobStatus",
    "Manifest",
    "Scheduler",
    "SizeTieredScheduler",
    "SsTable",
    "Subcompaction",
    "TieredSpec",
    "find_problem",
    "next_run_id",
    "plan_full",
]
