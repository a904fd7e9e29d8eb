"""Picks the sources to merge next: the size-tiered choice, the same as SlateDB's for the same manifest.

The sources of a tree are in one line, from the newest L0 to the oldest run. A job takes neighbours of similar size, so
that every row is rewritten about as often as the size of the database doubles. Pure: the same manifest and the same
jobs always give the same result.

One choice differs: with `min_compaction_sources = 1` SlateDB merges a single run with itself, again and again. Here a
job of runs has two of them or more.
"""

from __future__ import annotations

from flagstone.compaction.dead_rows import Stats, plan_rewrites
from flagstone.compaction.lines import (
    Entry,
    Line,
    active_jobs,
    named_trees,
    next_run_id,
    plan_in_turns,
    scaled,
    similar_runs,
)
from flagstone.config.settings import CompactorOptions, SchedulerOptions
from flagstone.metadata.compactions import Compactions, TieredSpec
from flagstone.metadata.manifest import Manifest
from flagstone.types import RunId


class SizeTieredScheduler:
    """The default `Scheduler`: `plan_compactions` with the options of the settings.

    With `space_driven`, a tree for which that is nothing, and which has no job, may have a run rewritten for its dead
    rows. `stats` is what is known of them.
    """

    def __init__(self, options: CompactorOptions, stats: Stats | None = None) -> None:
        self._options = options
        self._stats: Stats = {} if stats is None else stats

    def plan(self, manifest: Manifest, compactions: Compactions) -> list[TieredSpec]:
        """See `Scheduler.plan`."""
        planned = plan_compactions(manifest, compactions, self._options)
        if self._options.scheduler_options.space_driven:
            planned += plan_rewrites(manifest, compactions, planned, self._options, self._stats)
        return planned


def plan_compactions(
    manifest: Manifest, compactions: Compactions, options: CompactorOptions
) -> list[TieredSpec]:
    """The jobs that may start now, up to `max_concurrent_compactions` together with those under way."""
    return plan_in_turns(
        manifest,
        compactions,
        options.max_concurrent_compactions,
        lambda line, fresh: _pick(line, fresh, options),
    )


def plan_full(
    manifest: Manifest, compactions: Compactions, segment: bytes | None = None, *, around: bool = False
) -> list[TieredSpec]:
    """Jobs that make one run of each tree, or only of the tree of `segment`; none for a tree that is one run already.

    They take all sources, also those of jobs under way, which must end first; with `around` only the sources that are
    older than those of jobs under way.
    """
    active = active_jobs(compactions)
    fresh = next_run_id(manifest, active)
    planned: list[TieredSpec] = []
    for prefix, tree in named_trees(manifest):
        if segment is not None and prefix != segment:
            continue
        l0 = [view.id for view in tree.l0]
        runs = [run.id for run in tree.runs]
        for job in active if around else ():
            if job.spec.segment == prefix:
                # L0 is compacted from its end: the rest of it is newer, and waits.
                l0 = [] if job.spec.l0_view_ids else l0
                taken = [place for place, run in enumerate(runs) if run in job.spec.sorted_runs]
                if taken:
                    l0, runs = [], runs[taken[-1] + 1 :]
        if not l0 and len(runs) <= 1:
            continue
        destination = runs[-1] if runs else fresh
        fresh = RunId(max(fresh, destination + 1))
        planned.append(TieredSpec(tuple(l0), tuple(runs), destination, prefix))
    return planned


def _pick(line: Line, fresh: RunId, options: CompactorOptions) -> TieredSpec | None:
    """The next job of one tree: its oldest L0 SSTs, or else the first neighbouring runs of similar size."""
    limits = options.scheduler_options
    if len(line.l0) >= limits.min_compaction_sources:
        # The newest are left for later: the result must be older than everything that stays in L0.
        sources = line.l0[-limits.max_compaction_sources :]
        if _admissible(line, sources, fresh, 0, options):
            return line.compact_l0(sources, fresh)

    def check(candidates: list[Entry], last: int) -> bool:
        return _admissible(line, candidates, RunId(candidates[-1].id), last + 1, options)

    for start in range(len(line.runs)):
        found = similar_runs(line.runs, start, limits.include_size_threshold, check)
        # A single run would be rewritten again and again, whatever the settings are.
        if len(found) >= max(2, limits.min_compaction_sources):
            return line.merge(found[-_most_runs(limits) :])
    return None


def _admissible(
    line: Line, candidates: list[Entry], destination: RunId, following: int, options: CompactorOptions
) -> bool:
    """Whether these sources are free, and the runs from index `following` on do not have to be merged first.

    If those runs are enough for a job of maximum size, they must be merged first, or the tree grows ever longer.
    """
    if destination in line.used_runs or not line.has_free(candidates):
        return False
    if following >= len(line.runs):
        return True
    limits = options.scheduler_options
    total = sum(source.size for source in candidates)
    if line.runs[following].size > scaled(total, limits.include_size_threshold):
        return True
    waiting = similar_runs(line.runs, following, limits.include_size_threshold)
    return len(waiting) < _most_runs(limits)


def _most_runs(limits: SchedulerOptions) -> int:
    return max(2, limits.max_compaction_sources)
