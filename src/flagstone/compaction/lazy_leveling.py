"""Picks the sources to merge next: lazy leveling, which keeps one run at the last level. Pure.

New runs gather above the last run of a tree and are merged among themselves, like tiers. When together they are large
enough, all of them are merged into the last run. A tombstone or an overwritten row therefore waits at most until the
runs above have grown to that share of the last one, while most rows are rewritten as rarely as by size-tiered
compaction.

Every job takes free neighbours, so jobs under way never overlap. Every job makes fewer sources, or drops dead rows of
one run for good, so without writes there is an end. Then at most `max_upper_runs` runs are above the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

from flagstone.compaction.dead_rows import DeadRows, Stats
from flagstone.compaction.lines import Entry, Line, plan_in_turns, similar_runs
from flagstone.config.settings import CompactorOptions, SchedulerOptions
from flagstone.metadata.compactions import Compactions, TieredSpec
from flagstone.metadata.manifest import Manifest
from flagstone.types import RunId


class LazyLevelingScheduler:
    """The `Scheduler` of the policy "lazy-leveling": `plan_lazy_leveling` with the options of the settings.

    `stats` is what is known of the runs' rows; without it no run is rewritten for its dead rows alone.
    """

    def __init__(self, options: CompactorOptions, stats: Stats | None = None) -> None:
        self._options = options
        self._stats: Stats = {} if stats is None else stats

    def plan(self, manifest: Manifest, compactions: Compactions) -> list[TieredSpec]:
        """See `Scheduler.plan`."""
        return plan_lazy_leveling(manifest, compactions, self._options, self._stats)


def plan_lazy_leveling(
    manifest: Manifest, compactions: Compactions, options: CompactorOptions, stats: Stats
) -> list[TieredSpec]:
    """The jobs that may start now, up to `max_concurrent_compactions` together with those under way."""
    limits = options.scheduler_options
    dead = DeadRows(manifest, stats, limits)

    def pick(line: Line, fresh: RunId) -> TieredSpec | None:
        return (
            _pick_l0(line, fresh, limits)
            or _pick_for_last_run(line, limits)
            or dead.pick(line)
            or _pick_similar(line, limits)
            or _pick_to_make_room(line, limits)
        )

    return plan_in_turns(manifest, compactions, options.max_concurrent_compactions, pick)


def upper_runs(line: Line) -> list[Entry]:
    """The runs above the last one, without those that a job merges into it now."""
    if not line.runs:
        return []
    last = line.runs[-1].id
    merges = [spec for spec in line.specs if isinstance(spec, TieredSpec) and last in spec.sorted_runs]
    sinking = {run_id for spec in merges for run_id in spec.sorted_runs}
    return [run for run in line.runs[:-1] if run.id not in sinking]


def _pick_l0(line: Line, fresh: RunId, limits: SchedulerOptions) -> TieredSpec | None:
    """The oldest L0 SSTs become a run, if there is room for one more."""
    sources = _waiting_l0(line, limits)
    if not sources or (line.runs and len(upper_runs(line)) >= limits.max_upper_runs):
        return None
    return line.compact_l0(sources, fresh)


def _waiting_l0(line: Line, limits: SchedulerOptions) -> list[Entry]:
    """The L0 SSTs of the next job: the oldest, because its result must be older than everything that stays in L0."""
    if len(line.l0) < limits.min_compaction_sources:
        return []
    sources = line.l0[-limits.max_compaction_sources :]
    return sources if line.has_free(sources) else []


def _pick_for_last_run(line: Line, limits: SchedulerOptions, *, forced: bool = False) -> TieredSpec | None:
    """The runs above the last one are merged into it, if they are large enough, or if it is `forced`."""
    if len(line.runs) < 2 or not line.has_free(line.runs[-1:]):
        return None
    above = _free_from(line, line.runs[-2::-1])
    size = sum(run.size for run in above)
    if not above or not (forced or size * limits.last_run_ratio >= line.runs[-1].size):
        return None
    oldest = above[: _most_sources(limits) - 1]
    return line.merge([*reversed(oldest), line.runs[-1]])


def _pick_similar(line: Line, limits: SchedulerOptions) -> TieredSpec | None:
    """The first neighbours of similar size above the last run, if there are enough of them."""
    upper = upper_runs(line)
    for start in range(len(upper)):
        found = similar_runs(
            upper, start, limits.include_size_threshold, lambda candidates, _: line.has_free(candidates)
        )
        if len(found) >= max(2, limits.min_compaction_sources):
            return line.merge(found[-_most_sources(limits) :])
    return None


def _pick_to_make_room(line: Line, limits: SchedulerOptions) -> TieredSpec | None:
    """If there are too many runs above the last one, or if L0 waits for room: the neighbours with the fewest bytes.

    Without two free neighbours, these runs are merged into the last one.
    """
    upper = upper_runs(line)
    excess = len(upper) - limits.max_upper_runs
    if excess < 0 or (excess == 0 and not _waiting_l0(line, limits)):
        return None
    wanted = max(2, limits.min_compaction_sources)
    groups: list[list[Entry]] = []
    for start in range(len(upper)):
        group = _free_from(line, upper[start : start + wanted])
        if len(group) >= 2:
            groups.append(group)
    longest = max(map(len, groups), default=0)
    fewest = min(
        (group for group in groups if len(group) == longest),
        key=lambda group: sum(run.size for run in group),
        default=None,
    )
    return _pick_for_last_run(line, limits, forced=True) if fewest is None else line.merge(fewest)


def _free_from(line: Line, runs: Sequence[Entry]) -> list[Entry]:
    """The runs of the list up to the first one that a job has."""
    found: list[Entry] = []
    for run in runs:
        if not line.has_free([run]):
            break
        found.append(run)
    return found


def _most_sources(limits: SchedulerOptions) -> int:
    return max(2, limits.max_compaction_sources)
