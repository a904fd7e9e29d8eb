"""The rates of a database that another process has open: from its manifests and the listing of its WAL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flagstone.errors import InvalidRequest
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import WalId


class Watched(Protocol):
    """Where a database is, and how many requests this process has sent to its stores."""

    @property
    def root(self) -> str: ...

    @property
    def store(self) -> ObjectStore: ...

    @property
    def wal_store(self) -> ObjectStore | None: ...

    @property
    def requests(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """What the store shows of a database at one moment."""

    at_ms: int
    manifest_id: int
    writer_epoch: int
    last_l0_seq: int
    l0: dict[int, int]
    """The size of each L0 SST by its id."""

    runs: dict[int, int]
    """The size of each SST of the sorted runs by its id."""

    run_count: int
    checkpoints: int
    last_wal_id: int
    wal_files: int
    """The WAL files seen since the first sample."""

    wal_bytes: int
    """Their size."""

    requests: int
    """The requests that this process has made."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two samples."""

    seconds: float
    rows: int
    """Sequence numbers that reached SSTs. A batch has one, so it counts batches, not rows, where there are batches."""

    wal_files: int
    wal_bytes: int
    flushes: int
    flushed_bytes: int
    compacted_ssts: int
    compacted_bytes: int
    """SSTs that are new in sorted runs: those of compactions and of bulk loads."""

    manifests: int
    requests: int


def plan_rates(before: Sample, after: Sample) -> Rates:
    """The differences of two samples. An SST that is both new and gone between them is not seen. Pure."""
    flushed = {sst: size for sst, size in after.l0.items() if sst not in before.l0}
    known = before.l0.keys() | before.runs.keys()
    compacted = {sst: size for sst, size in after.runs.items() if sst not in known and sst not in flushed}
    return Rates(
        seconds=max(after.at_ms - before.at_ms, 1) / 1000,
        rows=max(after.last_l0_seq - before.last_l0_seq, 0),
        wal_files=after.wal_files - before.wal_files,
        wal_bytes=after.wal_bytes - before.wal_bytes,
        flushes=len(flushed),
        flushed_bytes=sum(flushed.values()),
        compacted_ssts=len(compacted),
        compacted_bytes=sum(compacted.values()),
        manifests=after.manifest_id - before.manifest_id,
        requests=after.requests - before.requests,
    )


class Sampler:
    """Takes samples: one or two requests for the manifest, and one listing of the WAL files that are new."""

    def __init__(self, connection: Watched, clock: Clock = SYSTEM_CLOCK) -> None:
        self._connection = connection
        self._clock = clock
        self._paths = DbPaths(connection.root)
        self._manifests = ManifestStore(connection.store, self._paths)
        self._wal_store = connection.wal_store or connection.store
        self._last_wal_id: int | None = None
        self._wal_files = 0
        self._wal_bytes = 0

    def take(self) -> Sample:
        """The present state. Raises `InvalidRequest` if there is no database, and `Unavailable`."""
        latest = self._manifests.latest()
        if latest is None:
            raise InvalidRequest(
                f"no database at {self._connection.root!r} in {self._connection.store.url}; check the path"
            )
        manifest = latest.value
        self._list_wal(max(manifest.replay_after_wal_id, 0))
        return Sample(
            at_ms=self._clock.now_ms(),
            manifest_id=latest.id,
            writer_epoch=manifest.writer_epoch,
            last_l0_seq=manifest.last_l0_seq,
            l0={
                view.sst_id: manifest.sst(view).info.estimated_size
                for tree in manifest.trees
                for view in tree.l0
            },
            runs={
                view.sst_id: manifest.sst(view).info.estimated_size
                for tree in manifest.trees
                for run in tree.runs
                for view in run.views
            },
            run_count=sum(len(tree.runs) for tree in manifest.trees),
            checkpoints=len(manifest.checkpoints),
            last_wal_id=self._last_wal_id or 0,
            wal_files=self._wal_files,
            wal_bytes=self._wal_bytes,
            requests=self._connection.requests,
        )

    def _list_wal(self, replay_after: int) -> None:
        first = self._last_wal_id is None
        after = self._paths.wal(WalId(replay_after if self._last_wal_id is None else self._last_wal_id))
        last = replay_after if self._last_wal_id is None else self._last_wal_id
        for meta in self._wal_store.list(self._paths.wal_folder, after=after):
            wal_id = self._paths.parse_wal(meta.path)
            if wal_id is None:
                continue
            last = max(last, wal_id)
            if not first:
                self._wal_files += 1
                self._wal_bytes += meta.size
        self._last_wal_id = last
