"""Compaction merges SSTs into fewer: schedule a job, claim it, execute it, commit its result.

The names below are public: a program may replace the scheduler, which decides, and the executor, which merges.
"""

from __future__ import annotations

from flagstone.compaction.extensions import Cancelled, CompactionTask, Executor, Scheduler
from flagstone.compaction.lazy_leveling import LazyLevelingScheduler
from flagstone.compaction.lines import next_run_id
from flagstone.compaction.picker import SizeTieredScheduler, plan_full
from flagstone.compaction.validation import find_problem
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
    "LazyLevelingScheduler",
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
