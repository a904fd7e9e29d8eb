"""A log with bulk loads between its files, and a collector that takes every table nobody refers to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flagstone.loads.edit import Load, apply_recorded_load
from flagstone.lsm.tree import SortedRun, SstView
from flagstone.metadata.annotations import HeldLoad, LoadRecord, held_loads
from flagstone.metadata.manifest import Checkpoint, Manifest, SsTable, replace_trees
from flagstone.metadata.sequenced import Versioned
from flagstone.sst.builder import SstBuilder, SstOptions
from flagstone.store.port import ObjectMissing
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, ManifestId, RunId, Seq, WalId
from kit.databases import encode_wal
from unit.changes.retention_rig import PATHS, LogWorld

SMALL_BLOCKS = SstOptions(block_bytes=1024)


class LoadWorld(LogWorld):
    """A database whose writer and loads take turns. `told` is all that happened, in order: sequence number and key."""

    def __init__(self) -> None:
        super().__init__()
        self.seq = 0
        self.told: list[tuple[int, bytes]] = []

    def write(self, count: int = 1) -> None:
        for _ in range(count):
            self.last_id += 1
            self.seq += 1
            key = b"w%d" % self.seq
            rows = [(key, self.seq, VALUE, b"v", self.clock.now_ms(), None)]
            self.memory.put_if_absent(PATHS.wal(WalId(self.last_id)), encode_wal(rows))
            self.told.append((self.seq, key))

    def fence(self) -> None:
        self.last_id += 1
        self.memory.put_if_absent(PATHS.wal(WalId(self.last_id)), b"")

    def flush(self) -> None:
        last, seq = WalId(self.last_id), Seq(self.seq)
        self.manifests.update(
            lambda now: replace(now.value, replay_after_wal_id=last, wal_id_last_seen=last, last_l0_seq=seq)
        )

    def load(
        self,
        rows: Mapping[bytes, bytes | None],
        *more: Mapping[bytes, bytes | None],
        ahead: int = 1,
        replaces_all: bool = False,
    ) -> int:
        """A load of one table per argument; None deletes, and a value that begins with + is merged."""
        self.flush()
        self.seq += ahead
        tables = tuple(self._table(part) for part in (rows, *more) if part)
        load = Load(tables, Seq(self.seq), self.clock.now_ms(), self.ids.ulid(), replaces_all=replaces_all)
        mark_id, now_s = self.ids.uuid(), self.clock.now_ms() // 1000

        def add(now: Versioned[Manifest]) -> Manifest:
            held = HeldLoad(Checkpoint(mark_id, ManifestId(0), now_s), LoadRecord("done", load.seq, 0))
            return apply_recorded_load(now, load, held, now_s=now_s)

        self.manifests.update(add)
        self.told += [(self.seq, key) for part in (rows, *more) for key in sorted(part)]
        return self.seq

    def _table(self, rows: Mapping[bytes, bytes | None]) -> SsTable:
        builder = SstBuilder(SMALL_BLOCKS)
        builder.add_rows([self._row(key, value) for key, value in sorted(rows.items())])
        built = builder.finish()
        table = SsTable(self.ids.ulid(), built.info, built.format_version)
        self.memory.put(PATHS.sst(table.id), built.data)
        return table

    def _row(self, key: bytes, value: bytes | None) -> EntryTuple:
        kind = TOMBSTONE if value is None else MERGE if value.startswith(b"+") else VALUE
        return (key, self.seq, kind, value or b"", self.clock.now_ms(), None)

    def compact(self) -> None:
        """All tables go into one new table: what they were is garbage, unless somebody keeps it."""
        merged = self._table({b"everything": b""})

        def edit(now: Versioned[Manifest]) -> Manifest:
            newest = max(now.value.run_ids, default=0)
            runs = (SortedRun(RunId(newest + 1), (SstView.whole(merged.id),)),)
            return replace_trees(now.value, tree=replace(now.value.tree, runs=runs), added=(merged,))

        self.manifests.update(edit)

    @property
    def marks(self) -> list[int]:
        """The numbers of the loads that consumers can find."""
        return [held.record.seq for held in held_loads(self.manifests.require_latest().value)]

    @property
    def tables(self) -> int:
        return sum(1 for _ in self.memory.list(PATHS.sst_folder))

    def plan_like_slatedb(self) -> list[str]:
        doomed = super().plan_like_slatedb()
        latest = self.manifests.require_latest().value
        kept = [latest, *(self.manifests.load(entry.manifest_id) for entry in latest.checkpoints)]
        needed = {PATHS.sst(table_id) for manifest in kept for table_id in manifest.ssts}
        found = [meta.path for meta in self.memory.list(PATHS.sst_folder)]
        return doomed + [path for path in found if path not in needed]

    def collect(self) -> None:
        try:
            doomed = self.plan_like_slatedb()
        except ObjectMissing:
            return
        versions = (PATHS.parse_manifest(path) for path in doomed)
        self.manifests.advance_boundary(max((version for version in versions if version), default=0))
        self.memory.delete_many(doomed)
