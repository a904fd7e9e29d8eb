"""Compaction and garbage collection by another process, as small as they can be: what they do to the store, at once."""

from __future__ import annotations

from datetime import timedelta

from flagstone.format.sst import decode_sst
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.retention import RetentionPolicy, retain
from flagstone.metadata.manifest import SsTable, apply_compaction
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.table.builder import TableBuilder, TableOptions
from flagstone.types import RunId
from flagstone.views.checkpoint import create_checkpoint


class Upkeep:
    """Another process that looks after the database `db` of a store."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock,
        *,
        block_bytes: int = 1024,
        operator: MergeOperator | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._paths = DbPaths("db")
        self._options = TableOptions(block_bytes=block_bytes)
        self._operator = operator
        self._manifests = ManifestStore(store, self._paths, clock=clock)

    def compact(self, *, lifetime: timedelta | None = timedelta(seconds=900)) -> None:
        """Merge all tables into one run; without a `lifetime` the old ones are kept by nothing."""
        if lifetime is not None:
            create_checkpoint(self._manifests, clock=self._clock, ids=SYSTEM_IDS, lifetime=lifetime)
        manifest = self._manifests.require_latest().value
        rows = [
            row
            for view in manifest.views
            for block in decode_sst(self._store.get(self._paths.table(view.sst_id)).data, "table").rows()
            for row in block
        ]
        rows.sort(key=lambda row: (row[0], -row[1]))
        policy = RetentionPolicy(
            min_seq=manifest.recent_snapshot_min_seq,
            clock_ms=manifest.last_l0_clock_tick,
            keep_tombstones=False,
            merge_operator=self._operator,
        )
        builder = TableBuilder(self._options)
        builder.add_rows(list(retain(rows, policy)))
        built = builder.finish()
        table = SsTable(SYSTEM_IDS.ulid(), built.info)
        self._store.put(self._paths.table(table.id), built.data)
        l0, runs = [view.id for view in manifest.tree.l0], [run.id for run in manifest.tree.runs]
        destination = RunId(min(runs, default=0))
        self._manifests.update(
            lambda now: apply_compaction(
                now.value, segment=b"", l0=l0, runs=runs, destination=destination, output=[table]
            )
        )

    def collect(self) -> int:
        """Remove expired checkpoints, then tables that nothing refers to, however young; returns how many went."""
        now_s = self._clock.now_ms() // 1000
        latest = self._manifests.require_latest().value
        alive = [entry for entry in latest.checkpoints if entry.expires_s is None or entry.expires_s > now_s]
        kept = set(latest.ssts)
        for entry in alive:
            kept |= self._manifests.load(entry.manifest_id).ssts.keys()
        wanted = {self._paths.table(table_id) for table_id in kept}
        doomed = [meta.path for meta in self._store.list("db/compacted") if meta.path not in wanted]
        self._store.delete_many(doomed)
        return len(doomed)

    def checkpoints(self) -> int:
        """How many there are that have not expired."""
        now_s = self._clock.now_ms() // 1000
        found = self._manifests.require_latest().value.checkpoints
        return sum(entry.expires_s is None or entry.expires_s > now_s for entry in found)
