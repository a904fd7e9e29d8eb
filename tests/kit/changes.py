"""A WAL with a writer, bulk loads, consumers, and a collector that follows SlateDB's rules to the letter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from flagstone.changes.reader import WalReader
from flagstone.changes.retention import RetentionCheckpoint
from flagstone.loads.edit import Load, apply_recorded_load
from flagstone.lsm.tree import SortedRun, SstView
from flagstone.metadata.annotations import HeldLoad, LoadRecord, Position, find_retention, held_loads
from flagstone.metadata.manifest import (
    Checkpoint,
    Manifest,
    SsTable,
    new_manifest,
    remove_expired_checkpoints,
    replace_trees,
)
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids
from flagstone.sst.builder import encode_sst
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, ManifestId, RunId, Seq, WalId
from kit.databases import encode_wal
from kit.ssts import SMALL_BLOCKS

PATHS = DbPaths("db")


class ChangeWorld:
    """A database whose writer and bulk loads alternate. `written` has the sequence number and key of every change.

    With `boundary_files` the collector advances the boundary before it deletes manifests.
    """

    def __init__(self, store: ObjectStore | None = None, *, boundary_files: bool = False) -> None:
        self.clock = VirtualClock(1_700_000_000_000)
        self.memory = store or MemoryStore(clock=self.clock)
        self.ids = Ids(7, clock=self.clock)
        self.manifests = ManifestStore(self.memory, PATHS, clock=self.clock, ids=self.ids)
        self.manifests.create_next(new_manifest(), None)
        self.boundary_files = boundary_files
        self.last_id = 0
        self.seq = 0
        self.written: list[tuple[int, bytes]] = []

    # -- the writer ---------------------------------------------------------------------------------------

    def write(self, count: int = 1) -> None:
        """Add WAL files with one row each."""
        for _ in range(count):
            self.seq += 1
            key = b"w%d" % self.seq
            self._add_wal_file(encode_wal([(key, self.seq, VALUE, b"v", self.clock.now_ms(), None)]))
            self.written.append((self.seq, key))

    def fence(self) -> None:
        self._add_wal_file(b"")

    def _add_wal_file(self, data: bytes) -> None:
        self.last_id += 1
        self.memory.put_if_absent(PATHS.wal(WalId(self.last_id)), data)

    def flush(self) -> None:
        """Record that all rows are in SSTs: of the WAL, the latest manifest then needs only the last file."""
        last, seq = WalId(self.last_id), Seq(self.seq)
        self.manifests.update(
            lambda now: replace(now.value, replay_after_wal_id=last, wal_id_last_seen=last, last_l0_seq=seq)
        )

    # -- bulk loads and compaction ------------------------------------------------------------------------

    def load(
        self,
        rows: Mapping[bytes, bytes | None],
        *more: Mapping[bytes, bytes | None],
        ahead: int = 1,
        replaces_all: bool = False,
    ) -> int:
        """Commit a load of one SST per argument; None deletes, and a value that begins with + is merged."""
        self.flush()
        self.seq += ahead
        ssts = tuple(self._upload(part) for part in (rows, *more) if part)
        load = Load(ssts, Seq(self.seq), self.clock.now_ms(), self.ids.ulid(), replaces_all=replaces_all)
        record_id, now_s = self.ids.uuid(), self.clock.now_ms() // 1000

        def add(now: Versioned[Manifest]) -> Manifest:
            held = HeldLoad(Checkpoint(record_id, ManifestId(0), now_s), LoadRecord("done", load.seq, 0))
            return apply_recorded_load(now, load, held, now_s=now_s)

        self.manifests.update(add)
        self.written += [(self.seq, key) for part in (rows, *more) for key in sorted(part)]
        return self.seq

    def _upload(self, rows: Mapping[bytes, bytes | None]) -> SsTable:
        built = encode_sst([self._row(key, value) for key, value in sorted(rows.items())], SMALL_BLOCKS)
        sst = SsTable(self.ids.ulid(), built.info, built.format_version)
        self.memory.put(PATHS.sst(sst.id), built.data)
        return sst

    def _row(self, key: bytes, value: bytes | None) -> EntryTuple:
        kind = TOMBSTONE if value is None else MERGE if value.startswith(b"+") else VALUE
        return (key, self.seq, kind, value or b"", self.clock.now_ms(), None)

    def compact(self) -> None:
        """Replace all SSTs by a new one: the old ones are garbage, unless a checkpoint keeps them."""
        merged = self._upload({b"everything": b""})

        def edit(now: Versioned[Manifest]) -> Manifest:
            newest = max(now.value.run_ids, default=0)
            runs = (SortedRun(RunId(newest + 1), (SstView.whole(merged.id),)),)
            return replace_trees(now.value, tree=replace(now.value.tree, runs=runs), added=(merged,))

        self.manifests.update(edit)

    @property
    def load_records(self) -> list[int]:
        """The sequence numbers of the loads that consumers can find."""
        return [held.record.seq for held in held_loads(self.manifests.require_latest().value)]

    @property
    def ssts(self) -> int:
        return sum(1 for _ in self.memory.list(PATHS.sst_folder))

    # -- the consumers ------------------------------------------------------------------------------------

    def retention(
        self, name: str, store: ObjectStore | None = None, lifetime: object = None
    ) -> RetentionCheckpoint:
        """The retention checkpoint as a process sees it that has just started."""
        store = store or self.memory
        manifests = ManifestStore(store, PATHS, clock=self.clock, ids=self.ids)
        return RetentionCheckpoint(manifests, store, name, lifetime=lifetime, clock=self.clock, ids=self.ids)  # type: ignore[arg-type]

    def reader(self, pin: str | None, store: ObjectStore | None = None, **options: object) -> WalReader:
        return WalReader(
            "db",
            store=store or self.memory,
            pin=pin,
            clock=self.clock,
            ids=self.ids,
            **options,  # type: ignore[arg-type]
        )

    def position(self, name: str) -> Position | None:
        held = find_retention(self.manifests.require_latest().value, name)
        return None if held is None else held.position

    # -- the collector ------------------------------------------------------------------------------------

    def plan_like_slatedb(self) -> list[str]:
        """The objects that SlateDB's collector finds unneeded, every object being old enough.

        Raises `ObjectMissing` if the manifest of a checkpoint is gone.
        """
        now_s = self.clock.now_ms() // 1000
        latest = self.manifests.update(lambda now: remove_expired_checkpoints(now.value, now_s))
        kept = {
            entry.manifest_id: self.manifests.load(entry.manifest_id) for entry in latest.value.checkpoints
        }
        manifests = [
            PATHS.manifest(entry.id)  # type: ignore[arg-type]
            for entry in self.manifests.list()
            if entry.id not in kept and entry.id != latest.id
        ]
        ranges = [(latest.value.replay_after_wal_id - 1, 2**64)]
        ranges += [(entry.replay_after_wal_id, entry.wal_id_last_seen) for entry in kept.values()]
        unread = [
            wal_id for wal_id in self.wal_ids() if not any(low < wal_id <= high for low, high in ranges)
        ]
        needed = {PATHS.sst(sst_id) for entry in (latest.value, *kept.values()) for sst_id in entry.ssts}
        ssts = [meta.path for meta in self.memory.list(PATHS.sst_folder) if meta.path not in needed]
        return manifests + [PATHS.wal(WalId(wal_id)) for wal_id in unread] + ssts

    def collect(self) -> None:
        """One round of SlateDB's collector; it deletes nothing if it cannot know what is needed."""
        try:
            doomed = self.plan_like_slatedb()
        except ObjectMissing:
            return
        if self.boundary_files:
            versions = (PATHS.parse_manifest(path) for path in doomed)
            self.manifests.advance_boundary(max((version for version in versions if version), default=0))
        self.memory.delete_many(doomed)

    def wal_ids(self) -> list[int]:
        found = (PATHS.parse_wal(meta.path) for meta in self.memory.list(PATHS.wal_folder))
        return [int(wal_id) for wal_id in found if wal_id is not None]

    def missing_wal_ids(self, first: int) -> list[int]:
        """The WAL files from `first` on that are gone."""
        return sorted(set(range(first, self.last_id + 1)) - set(self.wal_ids()))


def begin_at(next_id: int) -> Callable[..., object]:
    """A `Decide`: the position that the consumer had, or a WAL file."""
    return lambda now, held: (now.value, held or Position(WalId(next_id)))


def seqs_of(reader: WalReader, *, commit: bool = True, limit: int | None = None) -> list[int]:
    """The sequence numbers of all changes that there are now."""
    found: list[int] = []
    for batch in reader.follow(timeout_s=0):
        found += [change.seq for change in batch.changes]
        if commit:
            reader.commit(batch)
        if limit is not None and len(found) >= limit:
            break
    return found
