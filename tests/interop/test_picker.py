"""For the same manifest and jobs our scheduler picks the same jobs as the wheel's.

`PICKER_CASES=300` runs more cases than an ordinary run.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from flagstone.compaction.picker import plan_compactions
from flagstone.config.settings import CompactorOptions, SchedulerOptions
from flagstone.format.sst_info import SsTableInfo
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.compactions import Compactions, Job, JobStatus, Spec, Worker
from flagstone.metadata.manifest import Manifest, Segment, SsTable, new_manifest, replace_trees
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.ids import Ids
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from flagstone.types import RunId

CASES = int(os.environ.get("PICKER_CASES", "20"))


class Case:
    """A database that consists only of metadata, which is all that the wheel's coordinator reads."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ids = Ids(seed)
        self.ssts: list[SsTable] = []
        self.next_run = self.random.choice([0, 0, 3, 40])
        self.segmented = self.random.random() < 0.3
        self.manifest = self._manifest()
        self.options = self._options()
        self.compactions = self._compactions()

    def _options(self) -> CompactorOptions:
        if self.random.random() < 0.5:
            return CompactorOptions()
        # With 1, SlateDB merges a single run with itself, which we do not.
        minimum = self.random.randint(2, 5)
        return CompactorOptions(
            max_concurrent_compactions=self.random.randint(1, 6),
            scheduler_options=SchedulerOptions(
                min_compaction_sources=minimum,
                max_compaction_sources=self.random.randint(minimum, 10),
                include_size_threshold=self.random.choice([1.0, 1.1, 1.5, 2.0, 3.3, 4.0, 10.0]),
            ),
        )

    def _manifest(self) -> Manifest:
        if not self.segmented:
            tree = self._tree(b"")
            return replace_trees(new_manifest(), tree=tree, added=self.ssts)
        prefixes = self.random.sample([b"aaa", b"bbb", b"ccc", b"ddd", b"eee"], self.random.randint(1, 5))
        segments = [Segment(prefix, self._tree(prefix)) for prefix in prefixes]
        empty = new_manifest(segment_extractor_name="first3")
        return replace_trees(empty, segments=segments, added=self.ssts)

    def _tree(self, prefix: bytes) -> Tree:
        base = self.random.choice([1_000, 70_000, 64 << 20, (1 << 24) + 3])
        l0 = tuple(
            self._view(prefix, self._size(base)) for _ in range(self.random.choice([0, 2, 4, 5, 9, 14]))
        )
        runs = []
        size = base * self.random.choice([1, 4])
        for _ in range(self.random.choice([0, 1, 3, 6, 12, 20])):
            views = tuple(self._view(prefix, self._size(size)) for _ in range(self.random.randint(1, 3)))
            runs.append(SortedRun(RunId(self.next_run), views))
            self.next_run += self.random.choice([1, 1, 1, 5])
            # From old to new, and so usually from large to small.
            size = max(100, int(size * self.random.choice([1, 1, 1, 0.9, 0.24, 0.26, 0.5, 4.1])))
        return Tree(tuple(reversed(l0)), tuple(reversed(runs)))

    def _size(self, about: int) -> int:
        return max(10, int(about * self.random.choice([1, 1, self.random.uniform(0.5, 2.0)])))

    def _view(self, prefix: bytes, size: int) -> SstView:
        first = prefix + b"%06d" % len(self.ssts)
        info = SsTableInfo(
            first_entry=first,
            last_entry=first + b"z",
            index_offset=size - 7,
            index_len=7,
            filter_offset=size - 7,
            filter_len=0,
        )
        sst = SsTable(self.ids.ulid(), info)
        self.ssts.append(sst)
        return SstView.whole(sst.id)

    def _compactions(self) -> Compactions | None:
        """Jobs of a worker that, in some cases, already has some of the sources."""
        picks = plan_compactions(self.manifest, Compactions(), self.options)
        if not picks or self.random.random() < 0.5:
            return None
        taken = self.random.sample(picks, self.random.randint(1, len(picks)))
        elsewhere = Worker("elsewhere", SYSTEM_CLOCK.now_ms() + 60_000)
        jobs = [Job(self.ids.ulid(), spec, JobStatus.RUNNING, worker=elsewhere) for spec in taken]
        return Compactions(0, tuple(sorted(jobs, key=lambda job: job.id)))

    def expected(self) -> set[Spec]:
        held = self.compactions or Compactions()
        picks = plan_compactions(self.manifest, held, self.options)
        return {*picks, *(job.spec for job in held.jobs)}

    def decided_by(self, wheel: Any, folder: Path) -> set[Spec]:
        store, paths = LocalStore(folder), DbPaths("db")
        ManifestStore(store, paths).create_next(self.manifest, None)
        jobs = CompactionsStore(store, paths)
        if self.compactions is not None:
            jobs.create_next(self.compactions, None)
        wheel.schedule(
            str(folder),
            "db",
            segments=self.segmented,
            max_concurrent_compactions=self.options.max_concurrent_compactions,
            scheduler_options=self.options.scheduler_options.to_dict(),
        )
        return {job.spec for job in jobs.require_latest().value.jobs}


@pytest.mark.slow
def test_the_picker_chooses_what_the_wheel_chooses_for_random_manifests(wheel: Any, tmp_path: Path) -> None:
    chosen = segmented = busy = 0
    for seed in range(CASES):
        case = Case(seed)
        expected = case.expected()
        assert case.decided_by(wheel, tmp_path / str(seed)) == expected, f"seed {seed}: {case.manifest}"
        chosen += len(expected)
        segmented += case.segmented
        busy += case.compactions is not None
    assert chosen
    print(
        f"{CASES} manifests ({segmented} with segments, {busy} with jobs under way): {chosen} jobs agreed on"
    )
