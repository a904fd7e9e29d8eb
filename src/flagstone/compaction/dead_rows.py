"""Finds runs with many dead rows: rows that a merge would drop, though they take space until then. Pure.

What is known of a view comes from `compaction.survey`. It is an estimate and only decides what is merged first:
whatever the merge finds, its result is right. A row counts as dead if

- the view hides it, because its range was deleted and the SST is larger than what the view shows,
- it has expired at the manifest's clock, judged by a sample,
- it is a tombstone, or below one, in runs that are merged down to the last one of their tree.

Overwritten rows are not counted: nothing tells how many keys of two runs are the same. Merge operands are not counted
either.

Every merge that is picked leaves less to do, so there is an end: either there are fewer runs, or a run that is
rewritten alone has neither hidden rows nor rows that have expired at that clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flagstone.compaction.lines import Line, named_trees, plan_in_turns
from flagstone.config.settings import CompactorOptions, SchedulerOptions
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.compactions import Compactions, TieredSpec
from flagstone.metadata.manifest import Manifest
from flagstone.types import KeyRange, RunId, Ulid


@dataclass(frozen=True, slots=True)
class ViewStats:
    """What one view of an SST shows: the bytes of its blocks, its rows, and when a sample of `sampled` rows expires.

    `expiries` are ascending, and without the rows of the sample that never expire.
    """

    shown_bytes: int
    rows: int
    tombstones: int
    sampled: int = 0
    expiries: tuple[int, ...] = ()

    def expired_share(self, clock_ms: int) -> float:
        """The share of rows that have expired at that time."""
        return bisect_right(self.expiries, clock_ms) / self.sampled if self.sampled else 0.0


Stats = Mapping[SstView, ViewStats]


@dataclass(frozen=True, slots=True)
class RunStats:
    """One run: its bytes on the store, those a merge of this run alone would drop, and what it shows.

    `deletes` are the tombstones that may delete rows of older runs. Views that are not known are taken to be like the
    others; without any known view nothing counts as dead.
    """

    stored_bytes: int
    dead_bytes: float
    shown_bytes: float
    rows: float
    tombstones: float
    deletes: float


class DeadRows:
    """The runs of one manifest, as far as they are known."""

    def __init__(self, manifest: Manifest, stats: Stats, options: SchedulerOptions) -> None:
        self._options = options
        self._trees: dict[bytes, list[RunStats]] = {}
        if stats:
            views = Counter(view.sst_id for view in manifest.views)
            borrowed = {sst_id for db in manifest.external_dbs for sst_id in db.sst_ids}
            for prefix, tree in named_trees(manifest):
                self._trees[prefix] = _measure(manifest, tree, stats, views, borrowed)

    def pick(self, line: Line) -> TieredSpec | None:
        """The job that drops the largest share of what it reads, if that is `min_dead_share` or more."""
        runs = self._trees.get(line.segment, [])
        most = max(2, self._options.max_compaction_sources)
        possible = [
            merge
            for merge in (*_merges_to_the_last(runs), *_rewrites(runs))
            if merge.share >= self._options.min_dead_share
            and merge.stop - merge.start <= most
            and line.has_free(line.runs[merge.start : merge.stop])
        ]
        if not possible:
            return None
        best = max(possible, key=lambda merge: (merge.share, -merge.stored_bytes))
        return line.merge(line.runs[best.start : best.stop])


def plan_rewrites(
    manifest: Manifest,
    compactions: Compactions,
    planned: Sequence[TieredSpec],
    options: CompactorOptions,
    stats: Stats,
) -> list[TieredSpec]:
    """At most one job for each tree that has no job and for which none is `planned`, as far as slots are free."""
    dead = DeadRows(manifest, stats, options.scheduler_options)
    chosen = {spec.segment for spec in planned}

    def pick(line: Line, _fresh: RunId) -> TieredSpec | None:
        return None if line.specs or line.segment in chosen else dead.pick(line)

    return plan_in_turns(manifest, compactions, options.max_concurrent_compactions - len(planned), pick)


class _Merge(NamedTuple):
    """A merge of the runs from `start` to before `stop`: the share of its sources' bytes that it would drop."""

    start: int
    stop: int
    share: float
    stored_bytes: int


def _merges_to_the_last(runs: Sequence[RunStats]) -> list[_Merge]:
    """A merge for each run, of that run and all older ones."""
    found = []
    dead, stored, live_rows, live_bytes = 0.0, 0, 0.0, 0.0
    for start in reversed(range(len(runs))):
        run = runs[start]
        stored += run.stored_bytes
        dead += run.dead_bytes
        kept: float = run.shown_bytes
        if start < len(runs) - 1:
            of_tombstones = run.shown_bytes * run.tombstones / max(1, run.rows)
            killed = min(run.deletes, live_rows)
            of_killed = live_bytes * killed / max(1.0, live_rows)
            dead += of_tombstones + of_killed
            live_rows, live_bytes = live_rows - killed, live_bytes - of_killed
            kept -= of_tombstones
        live_rows += run.rows - run.tombstones
        live_bytes += kept
        found.append(_Merge(start, len(runs), min(1.0, dead / max(1, stored)), stored))
    return found


def _rewrites(runs: Sequence[RunStats]) -> list[_Merge]:
    """A merge of each run alone: tombstones stay, because there may be older rows."""
    return [
        _Merge(at, at + 1, run.dead_bytes / max(1, run.stored_bytes), run.stored_bytes)
        for at, run in enumerate(runs)
    ]


def _measure(
    manifest: Manifest, tree: Tree, stats: Stats, views: Counter[Ulid], borrowed: set[Ulid]
) -> list[RunStats]:
    bounds = [_bounds(manifest, run) for run in tree.runs]
    return [
        _measure_run(manifest, run, stats, views, borrowed, older=bounds[at + 1 :])
        for at, run in enumerate(tree.runs)
    ]


def _measure_run(
    manifest: Manifest,
    run: SortedRun,
    stats: Stats,
    views: Counter[Ulid],
    borrowed: set[Ulid],
    *,
    older: Sequence[KeyRange],
) -> RunStats:
    hidden: dict[Ulid, int] = {}
    expired, shown, unknown_bytes, rows, tombstones, deletes = 0.0, 0, 0, 0, 0, 0
    here = Counter(view.sst_id for view in run.views)
    unknown: set[Ulid] = set()
    for view in run.views:
        sst = manifest.sst(view)
        known = stats.get(view)
        if known is None:
            unknown.add(sst.id)
            unknown_bytes += sst.info.filter_offset
            continue
        # The blocks end where the filters begin. An SST that is also elsewhere, or a lender's, stays on the store.
        if here[sst.id] == views[sst.id] and sst.id not in borrowed:
            hidden[sst.id] = hidden.get(sst.id, sst.info.filter_offset) - known.shown_bytes
        if sst.id not in borrowed:
            expired += known.shown_bytes * known.expired_share(manifest.last_l0_clock_tick)
        shown += known.shown_bytes
        rows += known.rows
        tombstones += known.tombstones
        keys = view.effective_range(sst.info)
        if any(not keys.intersect(bound).empty for bound in older):
            deletes += known.tombstones
    stored = sum(manifest.ssts[sst_id].info.estimated_size for sst_id in here)
    dropped = sum(max(0, size) for sst_id, size in hidden.items() if sst_id not in unknown)
    scale = (shown + unknown_bytes) / shown if shown else 1.0
    # Index and filters shrink with the blocks.
    blocks = sum(manifest.ssts[sst_id].info.filter_offset for sst_id in here)
    share = stored / max(1, blocks)
    return RunStats(
        stored,
        (dropped + expired * scale) * share,
        (shown + unknown_bytes) * share,
        rows * scale,
        tombstones * scale,
        deletes * scale,
    )


def _bounds(manifest: Manifest, run: SortedRun) -> KeyRange:
    first, last = run.views[0], run.views[-1]
    return KeyRange(
        first.effective_range(manifest.sst(first).info).start,
        last.effective_range(manifest.sst(last).info).stop,
    )
