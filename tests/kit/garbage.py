"""A database without rows: manifests, SSTs and WAL files of a few bytes, on a clock that only a test moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

from flagstone.clones.checkpoint import create_checkpoint
from flagstone.format.sst_info import SsTableInfo
from flagstone.gc.collector import Collector
from flagstone.gc.plan import KINDS, Kind, KindOptions
from flagstone.gc.report import GarbageReport
from flagstone.metadata.compactions import Compactions, Job, JobStatus, TieredSpec, add_job
from flagstone.metadata.manifest import (
    Checkpoint,
    Flush,
    SsTable,
    apply_compaction,
    apply_flush,
    new_manifest,
)
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids
from flagstone.runtime.metrics import Metrics
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import RunId, Seq, Ulid, WalId

DEFAULT = {kind: KindOptions(60_000) for kind in KINDS}


class GarbageWorld:
    """One database whose objects a test makes, and a collector for it."""

    def __init__(
        self, store: ObjectStore | None = None, *, root: str = "db", clock: VirtualClock | None = None
    ):
        self.clock = clock or VirtualClock(1_700_000_000_123)
        self.store = store or MemoryStore(clock=self.clock)
        self.ids = Ids(7, clock=self.clock)
        self.paths = DbPaths(root)
        self.metrics = Metrics()
        self.manifests = ManifestStore(self.store, self.paths, clock=self.clock, ids=self.ids)
        self.compactions = CompactionsStore(self.store, self.paths, clock=self.clock, ids=self.ids)
        self.seq = 0
        self.last_wal = 0
        if self.manifests.latest() is None:
            self.manifests.create_next(new_manifest(), None)

    # -- making things ------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        self.clock.advance(1000 * seconds)

    def upload(self, ulid: Ulid | None = None) -> SsTable:
        """Upload an SST that no manifest refers to."""
        sst = SsTable(self.ids.ulid() if ulid is None else ulid, SsTableInfo(b"a", b"z", 10, 5, 10, 0))
        self.store.put(self.paths.sst(sst.id), b"bytes" * 10)
        return sst

    def write_wal(self, count: int = 1, *, data: bytes = b"rows of a WAL file") -> None:
        for _ in range(count):
            self.last_wal += 1
            self.store.put(self.paths.wal(WalId(self.last_wal)), data)

    def fence(self) -> int:
        self.write_wal(data=b"")
        return self.last_wal

    def flush(self, sst: SsTable | None = None) -> SsTable:
        """Write one WAL file, then add an SST to L0, so that only the last WAL file is needed."""
        sst = sst or self.upload()
        self.write_wal()
        self.seq += 1
        change = Flush(
            ssts=((b"", sst),),
            replay_after_wal_id=WalId(self.last_wal - 1),
            wal_id_last_seen=WalId(self.last_wal),
            last_clock_tick=self.clock.now_ms(),
            last_seq=Seq(self.seq),
            snapshot_min_seq=Seq(self.seq),
        )
        self.manifests.update(lambda now: apply_flush(now.value, change))
        return sst

    def compact(self, *, output: SsTable | None = None) -> SsTable:
        """Replace all SSTs by one sorted run."""
        made = output or self.upload()
        tree = self.manifests.require_latest().value.tree
        self.manifests.update(
            lambda now: apply_compaction(
                now.value,
                segment=b"",
                l0=[view.id for view in tree.l0],
                runs=[run.id for run in tree.runs],
                destination=RunId(0),
                output=[made],
            )
        )
        return made

    def job(self, status: JobStatus = JobStatus.RUNNING, *, job_id: Ulid | None = None) -> Job:
        """Add a compaction job to the compactions file, which is created if there is none."""
        job = Job(self.ids.ulid() if job_id is None else job_id, TieredSpec((), (), RunId(0)), status)
        if self.compactions.latest() is None:
            self.compactions.create_next(Compactions(), None)
        self.compactions.update(lambda now: add_job(now.value, job))
        return job

    def checkpoint(self, *, lifetime: timedelta | None = None, name: str | None = None) -> Checkpoint:
        return create_checkpoint(
            self.manifests, clock=self.clock, ids=self.ids, lifetime=lifetime, name=name
        )[0]

    def claim(self, times: int = 1) -> None:
        """Write manifests that differ only in the epoch of the writer."""
        for _ in range(times):
            self.manifests.update(lambda now: replace(now.value, writer_epoch=now.value.writer_epoch + 1))

    # -- collecting ---------------------------------------------------------------------------------------

    def collector(
        self, options: dict[Kind, KindOptions] | None = None, *, boundary_files: bool = True
    ) -> Collector:
        return Collector(
            self.store,
            self.paths,
            options or DEFAULT,
            boundary_files=boundary_files,
            clock=self.clock,
            metrics=self.metrics,
        )

    def collect(
        self,
        *kinds: Kind,
        min_age_s: float = 60,
        dry_run: bool = False,
        boundary_files: bool = True,
    ) -> GarbageReport:
        options = {kind: KindOptions(int(1000 * min_age_s)) for kind in DEFAULT}
        return self.collector(options, boundary_files=boundary_files).collect(kinds or None, dry_run=dry_run)

    # -- looking ------------------------------------------------------------------------------------------

    def exists(self, path: str) -> bool:
        return any(meta.path == path for meta in self.store.list(self.paths.root))

    def has(self, sst: SsTable) -> bool:
        return self.exists(self.paths.sst(sst.id))

    def manifest_ids(self) -> list[int]:
        return [entry.id for entry in self.manifests.list()]

    def wal_ids(self) -> list[int]:
        found = (self.paths.parse_wal(meta.path) for meta in self.store.list(self.paths.wal_folder))
        return [wal_id for wal_id in found if wal_id is not None]

    def paths_in(self, folder: str) -> list[str]:
        return [meta.path for meta in self.store.list(f"{self.paths.root}/{folder}")]


def no_checkpoint(ids: Iterable[UUID], world: GarbageWorld) -> bool:
    return not {entry.id for entry in world.manifests.require_latest().value.checkpoints} & set(ids)
