"""What a compaction policy plans on: the sources of each tree in one line, from the newest L0 to the oldest run. Pure.

A source is free until a job has it. Every policy takes free neighbours, so jobs under way never overlap.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from flagstone.lsm.tree import SstView, Tree
from flagstone.metadata.compactions import Compactions, Job, JobStatus, Spec, TieredSpec
from flagstone.metadata.manifest import Manifest
from flagstone.types import RunId, Ulid

_SINGLE: Final = struct.Struct("<f")


@dataclass(frozen=True, slots=True)
class Entry:
    """One L0 view or one run, and its size in bytes."""

    id: Ulid | RunId
    size: int


@dataclass(slots=True)
class Line:
    """The sources of one tree, and the jobs that have some of them already."""

    segment: bytes
    l0: list[Entry]
    runs: list[Entry]
    specs: list[Spec] = field(default_factory=list)
    used_views: set[Ulid] = field(default_factory=set)
    used_runs: set[RunId] = field(default_factory=set)

    def take(self, spec: Spec) -> None:
        """Give the sources of a job to it."""
        self.specs.append(spec)
        self.used_views.update(spec.l0_view_ids)
        self.used_runs.update(spec.sorted_runs)
        if isinstance(spec, TieredSpec):
            self.used_runs.add(spec.destination)

    def has_free(self, entries: Sequence[Entry]) -> bool:
        """Whether no job has one of these sources."""
        # View ids have 128 bits and begin with a time, run ids have 32: they cannot be confused.
        return not any(entry.id in self.used_views or entry.id in self.used_runs for entry in entries)

    def merge(self, runs: Sequence[Entry]) -> TieredSpec:
        """A job that merges neighbouring runs into the oldest of them."""
        ids = tuple(RunId(run.id) for run in runs)
        return TieredSpec((), ids, ids[-1], self.segment)

    def compact_l0(self, sources: Sequence[Entry], destination: RunId) -> TieredSpec:
        """A job that makes a new run of the oldest L0 SSTs."""
        return TieredSpec(tuple(Ulid(source.id) for source in sources), (), destination, self.segment)


Pick = Callable[[Line, RunId], TieredSpec | None]
"""The next job of one tree, or None. The run id is free for a new run."""


def plan_in_turns(
    manifest: Manifest, compactions: Compactions, max_concurrent: int, pick: Pick
) -> list[TieredSpec]:
    """The jobs that may start now, up to `max_concurrent` together with those under way; the trees take turns."""
    active = active_jobs(compactions)
    # A compacted job, which waits for its commit, keeps its sources but needs no worker.
    busy = sum(job.status is not JobStatus.COMPACTED for job in active)
    slots = max_concurrent - busy
    lines = lines_of(manifest, active)
    fresh = next_run_id(manifest, active)
    picked: list[TieredSpec] = []
    while len(picked) < slots:
        before = len(picked)
        for line in lines:
            if len(picked) >= slots:
                break
            spec = pick(line, fresh)
            if spec is not None:
                line.take(spec)
                picked.append(spec)
                fresh = RunId(max(fresh, spec.destination + 1))
        if len(picked) == before:
            break
    return picked


def active_jobs(compactions: Compactions) -> list[Job]:
    """The jobs that are not finished."""
    return [job for job in compactions.jobs if not job.status.finished]


def next_run_id(manifest: Manifest, active: Sequence[Job]) -> RunId:
    """An id above every run, and above the destination of every active job."""
    taken = [*manifest.run_ids]
    taken += [job.spec.destination for job in active if isinstance(job.spec, TieredSpec)]
    return RunId(max(taken, default=-1) + 1)


def named_trees(manifest: Manifest) -> list[tuple[bytes, Tree]]:
    """The root tree under b"", then the trees of the segments under their prefixes."""
    return [(b"", manifest.tree), *((segment.prefix, segment.tree) for segment in manifest.segments)]


def lines_of(manifest: Manifest, active: Sequence[Job]) -> list[Line]:
    """All trees, those with the most L0 SSTs first: their reads and writes are slowed down most."""

    def size(view: SstView) -> int:
        return manifest.sst(view).info.estimated_size

    lines = []
    for prefix, tree in named_trees(manifest):
        l0 = [Entry(view.id, size(view)) for view in tree.l0]
        runs = [Entry(run.id, sum(map(size, run.views))) for run in tree.runs]
        line = Line(prefix, l0, runs)
        for job in active:
            if job.spec.segment == prefix:
                line.take(job.spec)
        lines.append(line)
    return sorted(lines, key=lambda line: -len(line.l0))


def similar_runs(
    runs: Sequence[Entry],
    start: int,
    threshold: float,
    check: Callable[[list[Entry], int], bool] = lambda _candidates, _last: True,
) -> list[Entry]:
    """Neighbours from `start` on, none much larger than the smallest before it, while `check` returns True."""
    found: list[Entry] = []
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


def scaled(size: int, threshold: float) -> int:
    """`size · threshold` in single precision, truncated, with the same rounding as in SlateDB."""
    # Exact in double precision: both factors have 24 significant bits.
    return int(_single(_single(size) * _single(threshold)))


def _single(number: float) -> float:
    rounded: float = _SINGLE.unpack(_SINGLE.pack(number))[0]
    return rounded
