"""SSTs compacted by the real executor, and the same rows compacted by a simple model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flagstone.compaction.executor import LocalExecutor, Merging
from flagstone.compaction.extensions import CompactionTask
from flagstone.config import CompactionWorkerOptions
from flagstone.format.sst import decode_sst
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.retention import RetentionPolicy, retain
from flagstone.lsm.tree import BytesRange, SortedRun, SstView, Tree
from flagstone.metadata.compactions import JobContext, TieredSpec
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.pool import IoPool
from flagstone.sst.builder import EncodedSst, SstOptions, encode_sst
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import EntryTuple, KeyRange, RunId, Seq, Ulid
from kit.databases import Append
from kit.ssts import MemoryBuilder, ordered

JOB = Ulid(1_700_000_000_000 << 80)
PATHS = DbPaths("db")
SMALL = SstOptions(block_bytes=1024, min_filter_keys=3)


@dataclass
class ExecutorRig:
    """A store with SSTs to compact: `l0` newest first, then sorted runs by descending id."""

    store: ObjectStore = field(default_factory=MemoryStore)
    options: SstOptions = SMALL
    max_sst_bytes: int = 1 << 30
    max_subcompactions: int = 1
    bytes_to_fetch: int = 4096
    merge_operator: MergeOperator | None = field(default_factory=Append)
    compaction_filter: Any = None
    pool: IoPool = field(default_factory=lambda: IoPool(max_workers=0))
    manifest: Manifest = field(default_factory=Manifest)
    records: list[JobContext] = field(default_factory=list)
    metrics: Metrics = field(default_factory=Metrics)
    ids: Ids = field(default_factory=lambda: Ids(7, clock=VirtualClock()))

    def add_sst(
        self, rows: Sequence[EntryTuple], *, options: SstOptions | None = None, owner: str | None = None
    ) -> SstView:
        """Upload one SST and add it to the manifest."""
        encoded = encode_sst(rows, options or self.options)
        return self.add_encoded(encoded, owner=owner)

    def add_encoded(self, encoded: EncodedSst, *, owner: str | None = None) -> SstView:
        sst_id = self.ids.ulid()
        self.store.put((PATHS if owner is None else DbPaths(owner)).sst(sst_id), encoded.data)
        sst = SsTable(sst_id, encoded.info, encoded.format_version)
        self.manifest = replace(self.manifest, ssts={**self.manifest.ssts, sst_id: sst})
        return SstView.whole(sst_id)

    def set_tree(
        self, l0: Iterable[SstView] = (), runs: Iterable[tuple[int, Sequence[SstView]]] = ()
    ) -> None:
        tree = Tree(tuple(l0), tuple(SortedRun(RunId(number), tuple(views)) for number, views in runs))
        self.manifest = replace(self.manifest, tree=tree)

    def set_sources(self, sources: Sequence[Sequence[EntryTuple]], *, min_seq: int, clock_ms: int) -> None:
        """One SST per source: the oldest is sorted run 0, the others are in L0."""
        views = [self.add_sst(rows) for rows in sources if rows]
        self.set_tree(views[:-1], [(0, views[-1:])] if views else [])
        self.set_barrier(min_seq, clock_ms)

    def set_barrier(self, min_seq: int, clock_ms: int) -> None:
        self.manifest = replace(
            self.manifest, recent_snapshot_min_seq=Seq(min_seq), last_l0_clock_tick=clock_ms
        )

    def spec(self, destination: int | None = None) -> TieredSpec:
        """All SSTs, into the oldest sorted run or `destination`."""
        tree = self.manifest.tree
        lowest = tree.runs[-1].id if tree.runs else 0
        return TieredSpec(
            tuple(view.id for view in tree.l0),
            tuple(run.id for run in tree.runs),
            RunId(lowest if destination is None else destination),
        )

    def executor(self) -> LocalExecutor:
        return LocalExecutor(
            self.store,
            PATHS,
            Merging(
                work=CompactionWorkerOptions(
                    max_sst_size=self.max_sst_bytes,
                    max_subcompactions=self.max_subcompactions,
                    max_fetch_tasks=2,
                    bytes_to_fetch=self.bytes_to_fetch,
                ),
                sst=self.options,
                merge_operator=self.merge_operator,
                compaction_filter=self.compaction_filter,
            ),
            pool=self.pool,
            ids=self.ids,
            metrics=self.metrics,
        )

    def run(
        self,
        spec: TieredSpec | None = None,
        *,
        context: JobContext | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[SsTable, ...]:
        task = CompactionTask(job_id=JOB, spec=spec or self.spec(), manifest=self.manifest, context=context)
        return self.executor().run(task, record=self.records.append, cancelled=cancelled)

    def data(self, sst: SsTable) -> bytes:
        return self.store.get(PATHS.sst(sst.id)).data

    def rows(self, ssts: Iterable[SsTable]) -> list[EntryTuple]:
        images = [decode_sst(self.data(sst), "output") for sst in ssts]
        return [row for image in images for rows in image.rows() for row in rows]


def by_hand(
    sources: Iterable[Iterable[EntryTuple]],
    policy: RetentionPolicy,
    *,
    options: SstOptions = SMALL,
    max_bytes: int = 1 << 30,
    ranges: Sequence[BytesRange] = (BytesRange(),),
) -> list[bytes]:
    """The SSTs that a slow and simple merge makes of the sources."""
    ssts = []
    for keys in ranges:
        builder = MemoryBuilder(options)
        for row in retain(rows_within(sources, keys.keys), policy):
            builder.add_rows([row])
            if builder.finished_bytes > max_bytes:
                ssts.append(builder.encoded().data)
                builder = MemoryBuilder(options)
        if builder.rows:
            ssts.append(builder.encoded().data)
    return ssts


def rows_within(sources: Iterable[Iterable[EntryTuple]], keys: KeyRange) -> list[EntryTuple]:
    return ordered(row for rows in sources for row in rows if row[0] in keys)
