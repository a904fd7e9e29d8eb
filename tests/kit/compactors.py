"""A database in memory with coordinators and workers that a test drives step by step, without threads.

`RowExecutor` merges row by row with `retain`: a slow and simple model of the real executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from flagstone.compaction.coordinator import Coordinator, LocalWorker
from flagstone.compaction.extensions import Cancelled, CompactionTask
from flagstone.compaction.shared_state import Board
from flagstone.compaction.worker import Worker
from flagstone.config.settings import CompactionWorkerOptions, CompactorOptions
from flagstone.format.sst import decode_sst
from flagstone.lsm.retention import RetentionPolicy, retain, visible_value
from flagstone.lsm.tree import BytesRange, SstView
from flagstone.metadata.compactions import Job, JobContext, JobStatus, Subcompaction
from flagstone.metadata.manifest import Flush, Manifest, SsTable, apply_flush, new_manifest
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import Clock, VirtualClock
from flagstone.runtime.ids import Ids, ulid_ms
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.pool import IoPool
from flagstone.sst.builder import encode_sst
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import MAX_SEQ, TOMBSTONE, VALUE, EntryTuple, Seq, Ulid, WalId
from kit.ssts import SMALL_BLOCKS, ordered

PATHS = DbPaths("db")


class RowExecutor:
    """Merges sources row by row into SSTs of at most `rows_per_sst` rows.

    `after_sst` is called with the number of SSTs made so far in this run, and may raise.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        rows_per_sst: int = 4,
        ids: Ids | None = None,
        paths: DbPaths = PATHS,
        after_sst: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.store = store
        self.paths = paths
        self.rows_per_sst = rows_per_sst
        self.ids = ids or Ids()
        self.after_sst = after_sst
        self.made = 0
        self.reused = 0

    def run(
        self,
        task: CompactionTask,
        *,
        record: Callable[[JobContext], None],
        cancelled: Callable[[], bool],
    ) -> tuple[SsTable, ...]:
        manifest = task.manifest
        context = task.context or JobContext((Subcompaction(BytesRange()),), manifest.recent_snapshot_min_seq)
        assert len(context.subcompactions) == 1
        record(context)
        tree = manifest.tree_of(task.spec.segment)
        assert tree is not None
        views = [view for view in tree.l0 if view.id in task.spec.l0_view_ids]
        views += [view for run in tree.runs if run.id in task.spec.sorted_runs for view in run.views]
        rows = ordered(row for view in views for row in view_rows(self.store, manifest, view, self.paths))
        last = not tree.runs or tree.runs[-1].id == task.spec.destination
        policy = RetentionPolicy(
            min_seq=context.retention_min_seq, clock_ms=manifest.last_l0_clock_tick, keep_tombstones=not last
        )
        kept = list(retain(rows, policy))
        done = list(context.subcompactions[0].output_ssts)
        self.reused += len(done)
        if done:
            ended = sst_rows(self.store, done[-1], self.paths)[-1]
            kept = [row for row in kept if (row[0], -row[1]) > (ended[0], -ended[1])]
        for made, start in enumerate(range(0, len(kept), self.rows_per_sst), 1):
            if cancelled():
                raise Cancelled
            encoded = encode_sst(kept[start : start + self.rows_per_sst], SMALL_BLOCKS)
            sst = SsTable(self.ids.ulid(ulid_ms(task.job_id)), encoded.info)
            self.store.put(self.paths.sst(sst.id), encoded.data)
            done.append(sst)
            self.made += 1
            record(replace(context, subcompactions=(Subcompaction(BytesRange(), tuple(done)),)))
            self.after_sst(made)
        return tuple(done)


class CompactionWorld:
    """One database with any number of coordinators and workers."""

    def __init__(
        self, store: ObjectStore | None = None, *, clock: Clock | None = None, seed: int = 7
    ) -> None:
        self.clock: Any = clock or VirtualClock()
        self.store = store or MemoryStore()
        self.ids = Ids(seed, clock=self.clock)
        self.manifests = ManifestStore(self.store, PATHS, clock=self.clock, ids=self.ids)
        self.compactions = CompactionsStore(self.store, PATHS, clock=self.clock, ids=self.ids)
        self.metrics = Metrics()
        self.executors: list[RowExecutor] = []
        self.seq = 0

    def create(self) -> CompactionWorld:
        self.manifests.create_next(new_manifest(), None)
        return self

    # -- a writer

    def flush(self, *rows: tuple[bytes, bytes | None], segment: bytes = b"") -> Ulid:
        """Add an SST to L0 of the segment; each row is a write of its own."""
        entries: list[EntryTuple] = []
        for key, value in rows:
            self.seq += 1
            kind = TOMBSTONE if value is None else VALUE
            entries.append((key, self.seq, kind, value or b"", self.seq, None))
        encoded = encode_sst(ordered(entries), SMALL_BLOCKS)
        newest = self.manifests.require_latest().value.newest_l0
        sst = SsTable(self.ids.ulid(0 if newest is None else ulid_ms(newest)), encoded.info)
        self.store.put(PATHS.sst(sst.id), encoded.data)
        seq = Seq(self.seq)
        done = Flush(((segment, sst),), WalId(0), WalId(0), self.seq, seq, seq)
        self.manifests.update(lambda now: apply_flush(now.value, done))
        return sst.id

    def flush_many(self, count: int, *, start: int = 0, rows: int = 4) -> None:
        """Add SSTs that overlap: each has new keys and overwrites some keys of the one before."""
        for number in range(start, start + count):
            keys = [b"key%04d" % (number * rows // 2 + offset) for offset in range(rows)]
            self.flush(*((key, b"%d" % number) for key in keys), (b"gone%d" % (number % 3), None))

    # -- compactors

    def board(self) -> Board:
        manifests = ManifestStore(self.store, PATHS, clock=self.clock, ids=self.ids)
        compactions = CompactionsStore(self.store, PATHS, clock=self.clock, ids=self.ids)
        return Board(manifests, compactions, clock=self.clock, ids=self.ids, metrics=self.metrics)

    def coordinator(
        self, options: CompactorOptions | None = None, *, board: Board | None = None, **more: Any
    ) -> Coordinator:
        return Coordinator(board or self.board(), options or CompactorOptions(), **more)

    def worker(
        self,
        options: CompactionWorkerOptions | None = None,
        *,
        board: Board | None = None,
        executor: Any = None,
        **more: Any,
    ) -> Worker:
        executor = executor or RowExecutor(self.store, ids=self.ids)
        self.executors.append(executor)
        return Worker(
            board or self.board(),
            executor,
            options or CompactionWorkerOptions(),
            pool=IoPool(max_workers=0, name="inline"),
            **more,
        )

    def pair(self, options: CompactorOptions | None = None, **more: Any) -> tuple[Coordinator, Worker]:
        """Coordinator and worker of one process, with one shared state."""
        board = self.board()
        worker = self.worker(board=board, polls=False, follows=lambda: True, **more)
        local = LocalWorker(worker.id, worker.slots)
        return self.coordinator(options, board=board, local=local), worker

    def settle(self, *services: Any, rounds: int = 50) -> None:
        """Run the services in turn until none of them changes anything."""
        quiet = 0
        while quiet < 2:
            rounds -= 1
            assert rounds, f"the services never stop making changes: {self.jobs()}"
            before = self.versions()
            for service in services:
                service.run_once()
            self.clock.advance(6000)
            quiet = quiet + 1 if self.versions() == before else 0

    # -- inspecting

    def versions(self) -> tuple[int, int]:
        jobs = self.compactions.latest()
        return self.manifest_id, 0 if jobs is None else jobs.id

    @property
    def manifest(self) -> Manifest:
        return self.manifests.require_latest().value

    @property
    def manifest_id(self) -> int:
        return self.manifests.require_latest().id

    def jobs(self) -> Sequence[Job]:
        latest = self.compactions.latest()
        return () if latest is None else latest.value.jobs

    def statuses(self) -> list[JobStatus]:
        return [job.status for job in self.jobs()]

    def edit_job(self, edit: Callable[[Job], Job]) -> None:
        """Edit the newest job, as another process does."""

        def change(now: Any) -> Any:
            jobs = (*now.value.jobs[:-1], edit(now.value.jobs[-1]))
            return replace(now.value, jobs=jobs)

        self.compactions.update(change)

    def contents(self) -> dict[bytes, bytes]:
        """The rows that a reader finds in the SSTs of the latest manifest."""
        return contents(self.store, self.manifest)


def contents(store: ObjectStore, manifest: Manifest, paths: DbPaths = PATHS) -> dict[bytes, bytes]:
    """Every visible row, taken from the first source in reading order that has its key, as point reads do."""
    found: dict[bytes, bytes] = {}
    seen: set[bytes] = set()
    for tree in manifest.trees:
        sources: list[Iterable[SstView]] = [[view] for view in tree.l0]
        sources += [run.views for run in tree.runs]
        for source in sources:
            groups: dict[bytes, list[EntryTuple]] = {}
            for view in source:
                for row in view_rows(store, manifest, view, paths):
                    groups.setdefault(row[0], []).append(row)
            for key, versions in groups.items():
                if key not in seen:
                    row = visible_value(versions, max_seq=MAX_SEQ, now_ms=0)
                    if row is not None:
                        found[key] = row.value
            seen |= groups.keys()
    return found


def view_rows(
    store: ObjectStore, manifest: Manifest, view: SstView, paths: DbPaths = PATHS
) -> list[EntryTuple]:
    sst = manifest.sst(view)
    visible = view.effective_range(sst.info)
    return [row for row in sst_rows(store, sst, paths) if row[0] in visible]


def sst_rows(store: ObjectStore, sst: SsTable, paths: DbPaths = PATHS) -> list[EntryTuple]:
    path = paths.sst(sst.id)
    return [row for block in decode_sst(store.get(path).data, path).rows() for row in block]
