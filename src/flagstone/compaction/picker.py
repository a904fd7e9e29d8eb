"""Picks the sources to merge next: the size-tiered choice, the same as SlateDB's for the same manifest.

The sources of a tree are in one line, from the newest L0 to the oldest run. A job takes neighbours of similar size, so
that every row is rewritten about as often as the size of the database doubles. Pure: the same manifest and the same
jobs always give the same result.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from flagstone.config.settings import CompactorOptions
from flagstone.lsm.tree import SstView, Tree
from flagstone.metadata.compactions import Compactions, Job, JobStatus, Spec, TieredSpec
from flagstone.metadata.manifest import Manifest
from flagstone.types import RunId, Ulid

_SINGLE: Final = struct.Struct("<f")


class SizeTieredScheduler:
    """The default `Scheduler`: `plan_compactions` with the options of the settings."""

    def __init__(self, options: CompactorOptions) -> None:
        self._options = options

    def plan(self, manifest: Manifest, compactions: Compactions) -> list[TieredSpec]:
        """See `Scheduler.plan`."""
        return plan_compactions(manifest, compactions, self._options)


@dataclass(frozen=True, slots=True)
class _Source:
    """One L0 view or one run, and its size in bytes."""

    id: Ulid | RunId
    size: int


@dataclass(slots=True)
class _Line:
    """The sources of one tree, and which of them belong to a job already."""

    segment: bytes
    l0: list[_Source]
    runs: list[_Source]
    used_views: set[Ulid] = field(default_factory=set)
    used_runs: set[RunId] = field(default_factory=set)

    def take(self, spec: Spec) -> None:
        self.used_views.update(spec.l0_view_ids)
        self.used_runs.update(spec.sorted_runs)
        if isinstance(spec, TieredSpec):
            self.used_runs.add(spec.destination)


def plan_compactions(
    manifest: Manifest, compactions: Compactions, options: CompactorOptions
) -> list[TieredSpec]:
    """The jobs that may start now, up to `max_concurrent_compactions` together with those under way."""
    active = [job for job in compactions.jobs if not job.status.finished]
    # A compacted job, which waits for its commit, keeps its sources but needs no worker.
    busy = sum(job.status is not JobStatus.COMPACTED for job in active)
    slots = options.max_concurrent_compactions - busy
    lines = _lines(manifest, active)
    fresh = next_run_id(manifest, active)
    picked: list[TieredSpec] = []
    while len(picked) < slots:
        before = len(picked)
        for line in lines:
            if len(picked) >= slots:
                break
            spec = _pick(line, fresh, options)
            if spec is not None:
                line.take(spec)
                picked.append(spec)
                fresh = RunId(max(fresh, spec.destination + 1))
        if len(picked) == before:
            break
    return picked


def next_run_id(manifest: Manifest, active: Sequence[Job]) -> RunId:
    """An id above every run, and above the destination of every active job."""
    taken = [*manifest.run_ids]
    taken += [job.spec.destination for job in active if isinstance(job.spec, TieredSpec)]
    return RunId(max(taken, default=-1) + 1)


def plan_full(
    manifest: Manifest, compactions: Compactions, segment: bytes | None = None, *, around: bool = False
) -> list[TieredSpec]:
    """Jobs that make one run of each tree, or only of the tree of `segment`; none for a tree that is one run already.

    They take all sources, also those of jobs under way, which must end first; with `around` only the sources that are
    older than those of jobs under way.
    """
    active = [job for job in compactions.jobs if not job.status.finished]
    fresh = next_run_id(manifest, active)
    planned: list[TieredSpec] = []
    for prefix, tree in _trees(manifest):
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


def _trees(manifest: Manifest) -> list[tuple[bytes, Tree]]:
    return [(b"", manifest.tree), *((segment.prefix, segment.tree) for segment in manifest.segments)]


def _lines(manifest: Manifest, active: Sequence[Job]) -> list[_Line]:
    """All trees, those with the most L0 SSTs first: their reads and writes are slowed down most."""

    def size(view: SstView) -> int:
        return manifest.sst(view).info.estimated_size

    lines = []
    for prefix, tree in _trees(manifest):
        l0 = [_Source(view.id, size(view)) for view in tree.l0]
        runs = [_Source(run.id, sum(map(size, run.views))) for run in tree.runs]
        line = _Line(prefix, l0, runs)
        for job in active:
            if job.spec.segment == prefix:
                line.take(job.spec)
        lines.append(line)
    return sorted(lines, key=lambda line: -len(line.l0))


def _pick(line: _Line, fresh: RunId, options: CompactorOptions) -> TieredSpec | None:
    """The next job of one tree: its oldest L0 SSTs, or else the first neighbouring runs of similar size."""
    limits = options.scheduler_options
    if len(line.l0) >= limits.min_compaction_sources:
        # The newest are left for later: the result must be older than everything that stays in L0.
        sources = line.l0[-limits.max_compaction_sources :]
        if _admissible(line, sources, fresh, 0, options):
            return TieredSpec(tuple(Ulid(source.id) for source in sources), (), fresh, line.segment)

    def check(candidates: list[_Source], last: int) -> bool:
        return _admissible(line, candidates, RunId(candidates[-1].id), last + 1, options)

    for start in range(len(line.runs)):
        found = _similar_runs(line.runs, start, limits.include_size_threshold, check)
        if len(found) >= limits.min_compaction_sources:
            found = found[-limits.max_compaction_sources :]
            runs = tuple(RunId(source.id) for source in found)
            return TieredSpec((), runs, runs[-1], line.segment)
    return None


def _similar_runs(
    runs: list[_Source],
    start: int,
    threshold: float,
    check: Callable[[list[_Source], int], bool] = lambda _candidates, _last: True,
) -> list[_Source]:
    """Neighbours from `start` on, none much larger than the smallest before it, while `check` returns True."""
    found: list[_Source] = []
    smallest = runs[start].size
    for position in range(start, len(runs)):
        run = runs[position]
        # The first run is never too large for itself; rounding could give another result.
        if found and run.size > scaled(smallest, threshold):
            break
        found.append(run)
        if not check(found, position):
            found.pop()
            break
        smallest = min(smallest, run.size)
    return found


def _admissible(
    line: _Line, candidates: list[_Source], destination: RunId, following: int, options: CompactorOptions
) -> bool:
    """Whether these sources are free, and the runs from index `following` on do not have to be merged first.

    If those runs are enough for a job of maximum size, they must be merged first, or the tree grows ever longer.
    """
    if destination in line.used_runs:
        return False
    # View ids have 128 bits and begin with a time, run ids have 32: they cannot be confused.
    if any(source.id in line.used_views or source.id in line.used_runs for source in candidates):
        return False
    if following >= len(line.runs):
        return True
    limits = options.scheduler_options
    total = sum(source.size for source in candidates)
    if line.runs[following].size > scaled(total, limits.include_size_threshold):
        return True
    waiting = _similar_runs(line.runs, following, limits.include_size_threshold)
    return len(waiting) < limits.max_compaction_sources


def scaled(size: int, threshold: float) -> int:
    """`size · threshold` in single precision, truncated, with the same rounding as in SlateDB."""
    # Exact in double precision: both factors have 24 significant bits.
    return int(_single(_single(size) * _single(threshold)))


def _single(number: float) -> float:
    rounded: float = _SINGLE.unpack(_SINGLE.pack(number))[0]
    return rounded
