"""Databases for tests: settings, rows, WAL files made by hand, a store with databases, and processes beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import pytest

from flagstone.changes.change import Change
from flagstone.clones.checkpoint import create_checkpoint
from flagstone.clones.clone import Cloner
from flagstone.clones.origin import CloneSource
from flagstone.config import Settings
from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.db.reader.reader import open_reader
from flagstone.db.writer.database import Db
from flagstone.format.codec import Codec
from flagstone.format.sst import decode_sst
from flagstone.format.sst_info import SstType
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.operators import Concatenate
from flagstone.lsm.retention import RetentionPolicy, retain
from flagstone.metadata.manifest import SsTable, apply_compaction
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock, VirtualClock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.sst.builder import SstOptions, encode_sst
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.testing.faults import Crashed, Fault, FaultyStore
from flagstone.testing.model import Model
from flagstone.types import EntryTuple, KeyRange, RunId

Rows = dict[bytes, bytes]
Found = TypeVar("Found")

QUIET = Settings(compactor_options=None, garbage_collector_options=None)
"""No compaction and no garbage collection unless a test runs it."""
MANUAL = Settings(flush_interval=None, compactor_options=None, garbage_collector_options=None)
"""As `QUIET`, and rows become durable only when a test flushes."""
IDLE = MANUAL.replace(manifest_poll_interval=timedelta(hours=1))
"""As `MANUAL`, and a writer learns of newer manifests only when it writes one."""


class Append:
    """A merge operator that concatenates pairs; unlike `Concatenate` it has no `merge_many`."""

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:
        return (existing or b"") + operand


def numbered(start: int, stop: int, value: bytes = b"v") -> Rows:
    return {b"k%03d" % number: value + b"%d" % number for number in range(start, stop)}


def encode_wal(rows: Iterable[EntryTuple], *, codec: Codec = Codec.NONE) -> bytes:
    """One WAL file with these rows, which must be in commit order. Raises `InvalidRequest` if there are none."""
    return encode_sst(rows, SstOptions(codec=codec), sst_type=SstType.WAL).data


def apply_change(rows: Rows, change: Change) -> None:
    """Apply one change to a copy of the database; merging is concatenation."""
    match change.op:
        case "put":
            rows[change.key] = change.value or b""
        case "delete":
            rows.pop(change.key, None)
        case "delete_range":
            deleted = KeyRange(change.key or None, change.value)
            for key in [key for key in rows if key in deleted]:
                del rows[key]
        case _:
            rows[change.key] = rows.get(change.key, b"") + (change.value or b"")


def copy_of(store: ObjectStore, *, clock: Clock = SYSTEM_CLOCK) -> MemoryStore:
    """The objects that a crash would leave now."""
    copy = MemoryStore(clock=clock)
    for meta in list(store.list("")):
        copy.put(meta.path, store.get(meta.path).data)
    return copy


def eventually(
    condition: Callable[[], Found], what: object = "the condition holds", *, timeout_s: float = 20
) -> Found:
    """Wait until the condition holds, and return what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what() if callable(what) else what}"
        time.sleep(0.005)
    return found


class World:
    """One store with databases in it, a clock that only a test moves, and an administrator."""

    def __init__(self, store: MemoryStore | None = None, wal_store: MemoryStore | None = None) -> None:
        self.clock = VirtualClock()
        self.store = store or MemoryStore(clock=self.clock)
        self.wal_store = wal_store
        self.ids = Ids(7, clock=self.clock)

    def admin(self, path: str = "db") -> Admin:
        return Admin(path, store=self.store, wal_store=self.wal_store, clock=self.clock, ids=self.ids)

    def open(self, path: str = "db", *, wal_enabled: bool = True, **options: Any) -> Db:
        return open_database(
            path,
            store=self.store,
            wal_store=self.wal_store,
            settings=IDLE.replace(wal_enabled=wal_enabled),
            clock=self.clock,
            ids=self.ids,
            **options,
        )

    def write(self, path: str, rows: Rows, **options: Any) -> None:
        """Open the database, put the rows, flush them to L0 and close it."""
        with self.open(path, **options) as db:
            for key, value in rows.items():
                db.put(key, value)
            db.flush()
        self.clock.advance(1_000)

    def crash_while_cloning(self, fault: Fault, keys: KeyRange | None = None) -> None:
        """Begin to clone `p` to `c`; the process crashes at the fault, and the clone stays unfinished."""
        store = FaultyStore(self.store, [fault])
        with pytest.raises(Crashed):
            Cloner(store, clock=self.clock, ids=self.ids).clone("c", [CloneSource("p", None, keys)])

    def scan(self, path: str, checkpoint: Any = None) -> Rows:
        with open_reader(
            path,
            store=self.store,
            wal_store=self.wal_store,
            mode="latest",
            checkpoint=checkpoint,
            clock=self.clock,
        ) as reader:
            return dict(reader.scan())

    def objects(self, path: str = "") -> dict[str, bytes]:
        """Every object below a path, of both stores."""
        stores = [self.store] if self.wal_store is None else [self.store, self.wal_store]
        return {meta.path: store.get(meta.path).data for store in stores for meta in store.list(path)}


class ModelledDatabase:
    """The database `db` in memory with a model of its rows, and another process that compacts and collects it."""

    def __init__(self, *, step_ms: int) -> None:
        self.clock = VirtualClock()
        self.store = MemoryStore()
        self.model = Model()
        self.times: dict[int, int] = {}
        self.db = self.open()
        self.upkeep = Upkeep(self.store, self.clock, operator=Concatenate())
        self._step_ms = step_ms

    def open(self, **changes: Any) -> Db:
        settings = IDLE.replace(l0_max_ssts=1000, l0_max_ssts_per_key=1000, min_filter_keys=1, **changes)
        return open_database(
            "db", store=self.store, clock=self.clock, merge_operator=Concatenate(), settings=settings
        )

    def commit(self, key: bytes, kind: int, value: bytes = b"", ttl_ms: int | None = None) -> int:
        """Write one row, `step_ms` after the one before, and return its sequence number."""
        self.clock.advance(self._step_ms)
        ttl = None if ttl_ms is None else f"{ttl_ms}ms"
        match kind:
            case 0:
                handle = self.db.put(key, value, ttl=ttl)
            case 1:
                handle = self.db.delete(key)
            case _:
                handle = self.db.merge(key, value, ttl=ttl)
        self.times[handle.seq] = self.clock.now_ms()
        self.model.commit(handle.seq, self.times[handle.seq], [(key, kind, value, ttl_ms)])
        return handle.seq


class Upkeep:
    """Another process that compacts and collects the database `db` of a store, in one step each."""

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
        self._options = SstOptions(block_bytes=block_bytes)
        self._operator = operator
        self._manifests = ManifestStore(store, self._paths, clock=clock)

    def compact(self, *, lifetime: timedelta | None = timedelta(seconds=900)) -> None:
        """Merge all SSTs into one sorted run; without a `lifetime` no checkpoint keeps the old ones."""
        if lifetime is not None:
            create_checkpoint(self._manifests, clock=self._clock, ids=SYSTEM_IDS, lifetime=lifetime)
        manifest = self._manifests.require_latest().value
        rows = [
            row
            for view in manifest.views
            for block in decode_sst(self._store.get(self._paths.sst(view.sst_id)).data, "sst").rows()
            for row in block
        ]
        rows.sort(key=lambda row: (row[0], -row[1]))
        policy = RetentionPolicy(
            min_seq=manifest.recent_snapshot_min_seq,
            clock_ms=manifest.last_l0_clock_tick,
            keep_tombstones=False,
            merge_operator=self._operator,
        )
        built = encode_sst(retain(rows, policy), self._options)
        sst = SsTable(SYSTEM_IDS.ulid(), built.info)
        self._store.put(self._paths.sst(sst.id), built.data)
        l0, runs = [view.id for view in manifest.tree.l0], [run.id for run in manifest.tree.runs]
        destination = RunId(min(runs, default=0))
        self._manifests.update(
            lambda now: apply_compaction(
                now.value, segment=b"", l0=l0, runs=runs, destination=destination, output=[sst]
            )
        )

    def collect(self) -> int:
        """Delete SSTs of any age that neither the manifest nor a live checkpoint refers to; returns how many."""
        now_s = self._clock.now_ms() // 1000
        latest = self._manifests.require_latest().value
        alive = [entry for entry in latest.checkpoints if entry.expires_s is None or entry.expires_s > now_s]
        kept = set(latest.ssts)
        for entry in alive:
            kept |= self._manifests.load(entry.manifest_id).ssts.keys()
        wanted = {self._paths.sst(sst_id) for sst_id in kept}
        doomed = [meta.path for meta in self._store.list("db/compacted") if meta.path not in wanted]
        self._store.delete_many(doomed)
        return len(doomed)

    def checkpoints(self) -> int:
        """The number of checkpoints that have not expired."""
        now_s = self._clock.now_ms() // 1000
        found = self._manifests.require_latest().value.checkpoints
        return sum(entry.expires_s is None or entry.expires_s > now_s for entry in found)
