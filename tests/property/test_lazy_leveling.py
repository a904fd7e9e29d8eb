"""Lazy leveling on random trees: jobs are valid beside others, and without writes they end with one last run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import event, given
from hypothesis import strategies as st

from flagstone.compaction.dead_rows import ViewStats
from flagstone.compaction.lazy_leveling import plan_lazy_leveling
from flagstone.compaction.lines import active_jobs, named_trees
from flagstone.compaction.picker import SizeTieredScheduler, plan_compactions
from flagstone.compaction.validation import find_commit_problem, find_problem
from flagstone.config.settings import CompactorOptions, SchedulerOptions
from flagstone.format.sst_info import SsTableInfo
from flagstone.lsm.tree import SortedRun, SstView, Tree
from flagstone.metadata.compactions import Compactions, Job, JobStatus, TieredSpec, add_job, edit_job
from flagstone.metadata.invariants import check_manifest
from flagstone.metadata.manifest import (
    Manifest,
    Segment,
    SsTable,
    apply_compaction,
    edit_tree,
    new_manifest,
    replace_trees,
)
from flagstone.types import RunId, Ulid

CLOCK_MS = 50
SIZES = (1, 10, 100, 1_000, 64 << 20)


@dataclass(repr=False)
class Database:
    """A manifest and its jobs; what is written and merged has only sizes and statistics."""

    options: CompactorOptions
    random: random.Random
    segments: tuple[bytes, ...] = ()
    manifest: Manifest = field(default_factory=new_manifest)
    jobs: Compactions = field(default_factory=Compactions)
    stats: dict[SstView, ViewStats] = field(default_factory=dict)
    minted: int = 0
    done: int = 0

    def __post_init__(self) -> None:
        empty = new_manifest(segment_extractor_name="first1") if self.segments else new_manifest()
        segments = [Segment(prefix, Tree()) for prefix in self.segments]
        self.manifest = replace(replace_trees(empty, segments=segments), last_l0_clock_tick=CLOCK_MS)

    @property
    def limits(self) -> SchedulerOptions:
        return self.options.scheduler_options

    def sst(self, size: int) -> SsTable:
        self.minted += 1
        return SsTable(
            Ulid((1_700_000_000_000 + self.minted) << 80), SsTableInfo(b"a", b"z", size, 0, size, 0)
        )

    def note(self, view: SstView, size: int, *, fresh: bool) -> None:
        """Statistics as a survey would find them. What a merge wrote has no dead row except tombstones."""
        if self.random.random() < 0.2:
            return  # not read yet
        rows = self.random.randint(1, 100)
        expiries = () if fresh else tuple(sorted(self.random.choices(range(100), k=8)))
        shown = size if fresh else self.random.randint(0, size)
        self.stats[view] = ViewStats(shown, rows, self.random.randint(0, rows), 8, expiries)

    def prefix(self) -> bytes:
        return self.random.choice(self.segments) if self.segments else b""

    # -- what happens to a database

    def flush(self) -> None:
        sst = self.sst(self.random.choice(SIZES))
        view = SstView.whole(sst.id)
        self.manifest = edit_tree(
            self.manifest,
            self.prefix(),
            lambda tree: replace(tree, l0=(view, *tree.l0)),
            added=[sst],
        )

    def load(self) -> None:
        """A bulk load puts a run on top. The SSTs of L0 become runs below it, and their jobs become impossible."""
        ssts = [self.sst(self.random.choice(SIZES)) for _ in range(self.random.randint(1, 2))]
        views = tuple(SstView.whole(sst.id) for sst in ssts)
        above = max([*self.manifest.run_ids, *self.destinations(), -1]) + 1

        def put_on_top(tree: Tree) -> Tree:
            stacked = [*((view,) for view in reversed(tree.l0)), views]
            runs = [SortedRun(RunId(above + at), parts) for at, parts in enumerate(stacked)]
            newest = tree.l0[0].id if tree.l0 else tree.last_compacted_l0
            return Tree((), (*reversed(runs), *tree.runs), newest)

        self.manifest = edit_tree(self.manifest, self.prefix(), put_on_top, added=ssts)
        for sst, view in zip(ssts, views, strict=True):
            self.note(view, sst.info.estimated_size, fresh=False)
        possible = [job for job in self.jobs.jobs if find_commit_problem(job.spec, self.manifest) is None]
        self.jobs = replace(self.jobs, jobs=tuple(possible))

    def submit(self) -> None:
        """An operator submits a job of some neighbours."""
        prefix = self.prefix()
        tree = self.manifest.tree_of(prefix)
        assert tree is not None
        runs = [run.id for run in tree.runs]
        start = self.random.randint(0, len(runs))
        chosen = runs[start : start + self.random.randint(1, 4)]
        l0 = [view.id for view in tree.l0] if start == 0 and self.random.random() < 0.5 else []
        if chosen:
            self.add(TieredSpec(tuple(l0), tuple(chosen), chosen[-1], prefix))

    def destinations(self) -> list[int]:
        active = active_jobs(self.jobs)
        return [job.spec.destination for job in active if isinstance(job.spec, TieredSpec)]

    def add(self, spec: TieredSpec) -> None:
        if find_problem(spec, self.manifest, self.jobs) is None:
            self.minted += 1
            self.jobs = add_job(self.jobs, Job(Ulid(self.minted << 80), spec, JobStatus.RUNNING))

    def end_job(self) -> None:
        active = active_jobs(self.jobs)
        if not active:
            return
        job = self.random.choice(active)
        assert isinstance(job.spec, TieredSpec)
        fails = self.random.random() < 0.1
        if not fails:
            assert find_commit_problem(job.spec, self.manifest) is None
            tree = self.manifest.tree_of(job.spec.segment)
            assert tree is not None
            sources = [view for view in tree.l0 if view.id in job.spec.l0_view_ids]
            sources += [view for run in tree.runs if run.id in job.spec.sorted_runs for view in run.views]
            size = sum(self.manifest.sst(view).info.estimated_size for view in sources)
            left = int(size * self.random.choice([0, 0.3, 1, 1]))
            output = [self.sst(left)] if left else []
            self.manifest = apply_compaction(
                self.manifest,
                segment=job.spec.segment,
                l0=job.spec.l0_view_ids,
                runs=job.spec.sorted_runs,
                destination=job.spec.destination,
                output=output,
            )
            for sst in output:
                self.note(SstView.whole(sst.id), left, fresh=True)
            self.done += 1
        status = JobStatus.FAILED if fails else JobStatus.COMPLETED
        for step in (status,) if fails else (JobStatus.COMPACTED, status):
            self.jobs = edit_job(self.jobs, job.id, lambda job, step=step: replace(job, status=step))  # type: ignore[misc]
        self.jobs = Compactions(0, tuple(job for job in self.jobs.jobs if not job.status.finished))

    # -- what must hold

    def plan(self) -> int:
        specs = plan_lazy_leveling(self.manifest, self.jobs, self.options, self.stats)
        for spec in specs:
            assert find_problem(spec, self.manifest, self.jobs) is None
            self.add(spec)
        busy = [source for job in self.jobs.jobs for source in self.places(job.spec)]
        assert len(busy) == len(set(busy))
        check_manifest(self.manifest, None)
        return len(specs)

    def places(self, spec: object) -> list[tuple[bytes, int]]:
        """Where the sources of a job are in the line of its tree: neighbours."""
        assert isinstance(spec, TieredSpec)
        tree = self.manifest.tree_of(spec.segment)
        assert tree is not None
        line: list[int] = [view.id for view in tree.l0]
        line += [run.id for run in tree.runs]
        places = [line.index(source) for source in (*spec.l0_view_ids, *spec.sorted_runs)]
        assert all(after == before + 1 for before, after in pairwise(places))
        return [(spec.segment, place) for place in places]

    def __repr__(self) -> str:
        trees = {
            prefix: [[self.manifest.sst(view).info.estimated_size for view in run.views] for run in tree.runs]
            for prefix, tree in named_trees(self.manifest)
        }
        return f"Database({self.limits}, runs={trees}, jobs={[job.spec for job in self.jobs.jobs]})"

    def measure(self) -> int:
        """Every job makes this smaller: there are fewer sources, or fewer runs with rows that can be dropped."""
        sources = sum(2 * len(tree.l0) + len(tree.runs) for tree in self.manifest.trees)
        return 2 * sources


def scheduling(draw: st.DrawFn) -> CompactorOptions:
    least = draw(st.integers(1, 5))
    return CompactorOptions(
        max_concurrent_compactions=draw(st.integers(1, 4)),
        scheduler_options=SchedulerOptions(
            compaction_policy="lazy-leveling",
            min_compaction_sources=least,
            max_compaction_sources=draw(st.integers(least, 8)),
            include_size_threshold=draw(st.sampled_from([1.0, 4.0, 10.0])),
            last_run_ratio=draw(st.sampled_from([1.0, 2.5, 4.0, 100.0])),
            max_upper_runs=draw(st.integers(1, 8)),
            min_dead_share=draw(st.sampled_from([0.01, 0.3, 1.0])),
        ),
    )


@st.composite
def databases(draw: st.DrawFn) -> Database:
    segments = draw(st.sampled_from([(), (), (b"x", b"y")]))
    return Database(scheduling(draw), draw(st.randoms(use_true_random=False)), segments)


ACTIONS = st.lists(
    st.sampled_from(["flush"] * 8 + ["load", "submit", "end_job", "end_job", "plan", "plan", "plan"]),
    max_size=60,
)


@given(databases(), ACTIONS)
def test_jobs_are_valid_beside_others_and_end_with_one_run_below_a_few(
    db: Database, actions: list[str]
) -> None:
    for action in actions:
        getattr(db, action)()

    most, db.done = db.measure(), 0
    while db.plan() or active_jobs(db.jobs):
        db.end_job()
        assert db.done <= most, "it does not end"

    event(f"{min(db.done, 10)} jobs at the end")
    for _, tree in named_trees(db.manifest):
        sizes = [sum(db.manifest.sst(view).info.estimated_size for view in run.views) for run in tree.runs]
        assert len(tree.l0) < db.limits.min_compaction_sources
        assert len(sizes) <= db.limits.max_upper_runs + 1
        if len(sizes) > 1:
            assert sum(sizes[:-1]) * db.limits.last_run_ratio < sizes[-1]


@given(databases(), ACTIONS)
def test_without_loads_the_runs_never_exceed_the_limit_and_one_merge_into_the_last(
    db: Database, actions: list[str]
) -> None:
    of_one_merge = max(2, db.limits.max_compaction_sources)
    for action in actions:
        if action != "load":
            getattr(db, action)()
        for tree in db.manifest.trees:
            assert len(tree.runs) <= db.limits.max_upper_runs + of_one_merge


@given(databases(), ACTIONS)
def test_space_driven_jobs_come_only_after_those_of_slatedb(db: Database, actions: list[str]) -> None:
    limits = db.limits.replace(
        compaction_policy="size-tiered",
        space_driven=True,
        min_compaction_sources=2,
        max_compaction_sources=8,
    )
    options = db.options.replace(scheduler_options=limits)
    for action in actions:
        if action != "plan":
            getattr(db, action)()
            continue
        chosen = plan_compactions(db.manifest, db.jobs, options)
        planned = SizeTieredScheduler(options, db.stats).plan(db.manifest, db.jobs)
        assert planned[: len(chosen)] == chosen
        waiting = {job.spec.segment for job in active_jobs(db.jobs)} | {spec.segment for spec in chosen}
        added = planned[len(chosen) :]
        assert not waiting & {spec.segment for spec in added}
        assert all(not spec.l0_view_ids for spec in added)
        for spec in planned:
            assert find_problem(spec, db.manifest, db.jobs) is None
            db.add(spec)
        assert not planned or len(active_jobs(db.jobs)) <= db.options.max_concurrent_compactions
