"""A log with a writer, consumers, and a collector that follows SlateDB's rules to the letter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flagstone.changes.reader import WalReader
from flagstone.changes.retention import RetentionCheckpoint
from flagstone.metadata.annotations import Position, find_retention
from flagstone.metadata.manifest import new_manifest, remove_expired_checkpoints
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import VALUE, Seq, WalId
from kit.databases import encode_wal

PATHS = DbPaths("db")


class LogWorld:
    """A database without tables. File n of the log holds sequence number n."""

    def __init__(self, store: ObjectStore | None = None) -> None:
        self.clock = VirtualClock(1_700_000_000_000)
        self.memory = store or MemoryStore(clock=self.clock)
        self.ids = Ids(7, clock=self.clock)
        self.manifests = ManifestStore(self.memory, PATHS, clock=self.clock, ids=self.ids)
        self.manifests.create_next(new_manifest(), None)
        self.last_id = 0

    # -- the writer ---------------------------------------------------------------------------------------

    def write(self, count: int = 1) -> None:
        for _ in range(count):
            self.last_id += 1
            rows = [(b"k", self.last_id, VALUE, b"v", self.clock.now_ms(), None)]
            self.memory.put_if_absent(PATHS.wal(WalId(self.last_id)), encode_wal(rows))

    def flush(self) -> None:
        """Everything is in tables: of the log, the latest manifest needs only the end."""
        last = self.last_id
        self.manifests.update(
            lambda now: replace(
                now.value,
                replay_after_wal_id=WalId(last),
                wal_id_last_seen=WalId(last),
                last_l0_seq=Seq(last),
            )
        )

    # -- the consumers ------------------------------------------------------------------------------------

    def pin(
        self, name: str, store: ObjectStore | None = None, lifetime: object = None
    ) -> RetentionCheckpoint:
        """A pin as a process has it that has just started."""
        store = store or self.memory
        manifests = ManifestStore(store, PATHS, clock=self.clock, ids=self.ids)
        return RetentionCheckpoint(manifests, store, name, lifetime=lifetime, clock=self.clock, ids=self.ids)  # type: ignore[arg-type]

    def reader(self, pin: str, store: ObjectStore | None = None, **options: object) -> WalReader:
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
        """What SlateDB's collector finds unneeded, every object being old enough. Raises when it cannot tell."""
        now_s = self.clock.now_ms() // 1000
        latest = self.manifests.update(lambda now: remove_expired_checkpoints(now.value, now_s))
        pinned = {
            entry.manifest_id: self.manifests.load(entry.manifest_id) for entry in latest.value.checkpoints
        }
        doomed = [
            PATHS.manifest(entry.id)  # type: ignore[arg-type]
            for entry in self.manifests.list()
            if entry.id not in pinned and entry.id != latest.id
        ]
        ranges = [(latest.value.replay_after_wal_id - 1, 2**64)]
        ranges += [(entry.replay_after_wal_id, entry.wal_id_last_seen) for entry in pinned.values()]
        unread = [wal_id for wal_id in self.log() if not any(low < wal_id <= high for low, high in ranges)]
        return doomed + [PATHS.wal(WalId(wal_id)) for wal_id in unread]

    def collect(self) -> None:
        """A whole round of SlateDB's collector; one that cannot tell what is needed deletes nothing."""
        try:
            doomed = self.plan_like_slatedb()
        except ObjectMissing:
            return
        self.memory.delete_many(doomed)

    def log(self) -> list[int]:
        found = (PATHS.parse_wal(meta.path) for meta in self.memory.list(PATHS.wal_folder))
        return [int(wal_id) for wal_id in found if wal_id is not None]

    def lacks(self, first: int) -> list[int]:
        """The files from `first` on that are gone."""
        return sorted(set(range(first, self.last_id + 1)) - set(self.log()))


def begin_at(next_id: int) -> Callable[..., object]:
    """A `Decide`: where the pin was, or at a file."""
    return lambda now, held: (now.value, held or Position(WalId(next_id)))


def seqs_of(reader: WalReader, *, commit: bool = True, limit: int | None = None) -> list[int]:
    """What the reader gives until there is no more."""
    found: list[int] = []
    for batch in reader.follow(timeout_s=0):
        found += [change.seq for change in batch.changes]
        if commit:
            reader.commit(batch)
        if limit is not None and len(found) >= limit:
            break
    return found
