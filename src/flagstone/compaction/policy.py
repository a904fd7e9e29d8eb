"""The scheduler that the settings choose, and what it must know about the rows of the runs."""

from __future__ import annotations

from flagstone.compaction.extensions import Scheduler
from flagstone.compaction.lazy_leveling import LazyLevelingScheduler
from flagstone.compaction.picker import SizeTieredScheduler
from flagstone.compaction.survey import Survey
from flagstone.config.settings import CompactorOptions
from flagstone.runtime.pool import IoPool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore


def new_survey(
    options: CompactorOptions, store: ObjectStore, paths: DbPaths, *, pool: IoPool | None = None
) -> Survey | None:
    """A survey, if the policy uses one: otherwise compaction reads no SST that it does not merge."""
    limits = options.scheduler_options
    needed = limits.space_driven or limits.compaction_policy == "lazy-leveling"
    return Survey(store, paths, pool=pool) if needed else None


def new_scheduler(options: CompactorOptions, survey: Survey | None = None) -> Scheduler:
    """The scheduler of the policy in `options`; without a survey no run is rewritten for its dead rows alone."""
    stats = None if survey is None else survey.stats
    if options.scheduler_options.compaction_policy == "lazy-leveling":
        return LazyLevelingScheduler(options, stats)
    return SizeTieredScheduler(options, stats)
