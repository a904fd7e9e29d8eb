"""Retention checkpoints: what keeps WAL files and bulk loads for a consumer of changes until it has read them.

An ordinary checkpoint keeps the WAL files that its own readers replay, and no later ones; so it cannot keep files that
are not written yet. A retention checkpoint therefore names manifest 0, an object that belongs to no database history
(the first manifest is 1) and that no process takes for the latest. Manifest 0 keeps all WAL files above its
`replay_after_wal_id`, without an end. Every garbage collector that follows SlateDB's rules, SlateDB's own included,
then keeps what a consumer has not read, however long the consumer is away and whichever process writes. Manifest 0
refers to no SST, so a slow consumer costs nothing but WAL files (and the SSTs of the bulk loads that it has not passed:
`flagstone.loads.edit`).

The name of the checkpoint holds the position of its consumer, so the position changes with the manifest, atomically.
Manifest 0 follows: it keeps the WAL from the smallest position on, and never less than the latest manifest does, so
that a new consumer at the end of the WAL needs no change of it. Three rules make that safe against crashes and races:

- manifest 0 exists before a checkpoint names it, and is made again if a garbage collector removed it in between;
- a position moves in the manifest first and in manifest 0 afterwards: a crash in between keeps too much;
- manifest 0 is replaced by compare-and-swap, read before the positions and never written twice with the same bytes;
  a new retention checkpoint replaces it once more after the manifest has the checkpoint, so that a concurrent update
  based on an older manifest fails its compare-and-swap.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Final
from uuid import UUID

from flagstone.changes.change import WalFiles
from flagstone.config.durations import as_duration
from flagstone.errors import InvalidRequest, Unavailable
from flagstone.loads.edit import settle_load_records
from flagstone.metadata.annotations import (
    RETENTION_MANIFEST_ID,
    HeldRetention,
    Position,
    encode_retention,
    find_retention,
    held_retentions,
    retention_manifest,
)
from flagstone.metadata.integrity import seal_metadata
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint, remove_checkpoint
from flagstone.metadata.manifest_codec import encode_manifest, load_manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.runtime.sync import Lock
from flagstone.store.port import ObjectChanged, ObjectExists, ObjectMissing, ObjectStore, ObjectVersion
from flagstone.types import WalId

_LONGEST: Final = timedelta(days=10_000)
"""The end of a checkpoint's life is stored as a 32-bit second, which lasts until 2106."""

_ATTEMPTS: Final = 100
_PAUSE_S: Final = 0.02


def plan_wal_start(manifest: Manifest) -> WalId | None:
    """The WAL file after which manifest 0 must keep the WAL; None without a retention checkpoint.

    Never after the file from which the latest manifest keeps it: a new consumer starts there.
    """
    positions = [held.position.next_id - 1 for held in held_retentions(manifest)]
    return WalId(min(*positions, manifest.replay_after_wal_id)) if positions else None


Decide = Callable[[Versioned[Manifest], Position | None], tuple[Manifest, Position]]
"""From the latest manifest and the position in it: the manifest to add the checkpoint to, and the new position."""


class RetentionCheckpoint:
    """The retention checkpoint of one consumer. Two consumers with one name move each other's position.

    `lifetime` is how long it outlives its consumer; None: until it is released. It is refreshed after half of that.
    """

    def __init__(
        self,
        manifests: ManifestStore,
        store: ObjectStore,
        name: str,
        *,
        lifetime: timedelta | str | None,
        clock: Clock,
        ids: Ids,
    ) -> None:
        if not name:
            raise InvalidRequest("a consumer needs a name, by which it finds its position again")
        lifetime = None if lifetime is None else as_duration(lifetime, "lifetime")
        if lifetime is not None and not timedelta(seconds=1) <= lifetime <= _LONGEST:
            raise InvalidRequest(
                f"a retention checkpoint lives from one second to {_LONGEST.days} days, not {lifetime}; None means "
                "until released"
            )
        self.name: Final = name
        self._manifests = manifests
        self._store = store
        self._path = manifests.paths.manifest(RETENTION_MANIFEST_ID)
        self._lifetime_s = None if lifetime is None else int(lifetime.total_seconds())
        self._clock = clock
        self._ids = ids
        self._expires_s: int | None = None
        self.found: Position | None = None
        """The furthest position at which this object has found the checkpoint: another consumer may have moved it."""

    def find(self) -> Position | None:
        """Where the consumer stopped; None when it never began, or its checkpoint is gone."""
        held = self._held(self._manifests.require_latest().value)
        return None if held is None else held.position

    def _held(self, manifest: Manifest) -> HeldRetention | None:
        held = find_retention(manifest, self.name)
        if held is not None and (self.found is None or held.position.after_seq > self.found.after_seq):
            self.found = held.position
        return held

    def set(self, decide: Decide) -> tuple[Position, Versioned[Manifest]]:
        """Set the checkpoint, found again or new; returns its position and the manifest that has it.

        A crash before the manifest is written leaves only manifest 0, which keeps nothing unless a checkpoint names
        it; a crash after it, a checkpoint that may keep too much, which the next `set` or `move` corrects.
        """
        self._ensure()
        checkpoint_id = self._ids.uuid()

        def edit(now: Versioned[Manifest]) -> Manifest:
            held = self._held(now.value)
            edited, position = decide(now, None if held is None else held.position)
            return self._with(edited, checkpoint_id if held is None else held.checkpoint.id, position, held)

        written = self._manifests.update(edit)
        held = find_retention(written.value, self.name)
        assert held is not None, "the edit put it there"
        self._expires_s = held.checkpoint.expires_s
        self._settle(lazily=False)
        return held.position, written

    def move(self, position: Position) -> None:
        """The consumer needs nothing before `position` any more. Also prolongs the checkpoint.

        Raises:
            InvalidRequest: the checkpoint is gone: it expired, or was released.

        """

        def edit(now: Versioned[Manifest]) -> Manifest:
            held = self._held(now.value)
            if held is None:
                raise InvalidRequest(
                    f"the retention checkpoint of {self.name!r} is gone: it expired or was released, and WAL files may "
                    "be gone, too; begin again, with a longer lifetime"
                )
            return self._with(now.value, held.checkpoint.id, position, held)

        held = find_retention(self._manifests.update(edit).value, self.name)
        assert held is not None, "the edit put it there"
        self._expires_s = held.checkpoint.expires_s
        self._settle(lazily=True)

    def due(self) -> bool:
        """Whether half of its lifetime is over."""
        if self._lifetime_s is None or self._expires_s is None:
            return False
        return self._clock.now_ms() / 1000 >= self._expires_s - self._lifetime_s / 2

    def release(self) -> None:
        """Keep nothing for this consumer any more. Releasing twice is fine."""

        def edit(now: Versioned[Manifest]) -> Manifest:
            held = find_retention(now.value, self.name)
            if held is None:
                return now.value
            return settle_load_records(remove_checkpoint(now.value, held.checkpoint.id), now_s=self._now_s())

        self._manifests.update(edit)
        self._settle(lazily=True)

    def _with(
        self, manifest: Manifest, checkpoint_id: UUID, position: Position, held: HeldRetention | None
    ) -> Manifest:
        now_s = self._now_s()
        expires_s = None if self._lifetime_s is None else now_s + self._lifetime_s
        entry = Checkpoint(
            checkpoint_id,
            RETENTION_MANIFEST_ID,
            now_s if held is None else held.checkpoint.created_s,
            expires_s,
            encode_retention(self.name, position),
        )
        return settle_load_records(add_checkpoint(manifest, entry), now_s=now_s)

    def _now_s(self) -> int:
        return self._clock.now_ms() // 1000

    def _ensure(self) -> None:
        """Make manifest 0 before a checkpoint names it: a garbage collector that found only the name would stop."""
        if self._read() is not None:
            return
        latest = self._manifests.require_latest().value
        start = plan_wal_start(latest)
        with suppress(ObjectExists):
            self._write(latest.replay_after_wal_id if start is None else start, None)

    def _settle(self, *, lazily: bool) -> None:
        """Bring manifest 0 in line with the positions; `lazily` writes nothing when it is."""
        for _ in range(_ATTEMPTS):
            stored = self._read()
            # Read after manifest 0: the owner of a checkpoint that came in between replaces manifest 0 first.
            start = plan_wal_start(self._manifests.require_latest().value)
            unchanged = stored is not None and stored[0].replay_after_wal_id == start
            if start is None or (lazily and unchanged):
                return
            try:
                self._write(start, stored)
            except (ObjectExists, ObjectChanged):
                self._clock.sleep(self._ids.uniform(0, _PAUSE_S))
                continue
            return
        raise Unavailable(f"lost every race for {self._path}; try again")

    def _read(self) -> tuple[Manifest, ObjectVersion] | None:
        try:
            stored = self._store.get(self._path)
        except ObjectMissing:
            return None
        return load_manifest(stored.data, self._path), stored.meta.version

    def _write(self, start: WalId, stored: tuple[Manifest, ObjectVersion] | None) -> None:
        data = encode_manifest(retention_manifest(start, salt=self._ids.uuid().int >> 66))
        if stored is None:
            self._store.put_if_absent(self._path, seal_metadata(data, self._path))
        else:
            self._store.put_if_match(self._path, seal_metadata(data, self._path), stored[1])


SAVE_EVERY_S: Final = 10.0
"""How often a position is saved at most: each time is one manifest."""


def further(one: Position, other: Position) -> Position:
    """The position of a consumer that has used everything before both positions."""
    after_seq = max(one.after_seq, other.after_seq)
    # The rows used of a load count only while the load comes next.
    loaded = max(each.loaded for each in (one, other) if each.after_seq == after_seq)
    return Position(max(one.next_id, other.next_id), after_seq, loaded)


class ConsumerPosition:
    """The position of one consumer, and its retention checkpoint. May be used by several threads."""

    def __init__(self, checkpoint: RetentionCheckpoint, clock: Clock) -> None:
        self._checkpoint = checkpoint
        self._clock = clock
        self._saved: Position | None = None
        self._saved_at = 0.0
        self._lock = Lock()
        self.position: Position | None = None

    def begin(self, start: Position | None, wal: WalFiles) -> Position:
        """Find the retention checkpoint, or set it: at `start`, by default where it was, else at the oldest WAL file.

        Raises:
            InvalidRequest: the consumer has not finished its copy of the database.

        """
        if self.position is not None and start is None:
            self._check_copied(self.position)
            return self.position
        first = wal.oldest() if start is None and self._checkpoint.find() is None else None

        def choose(held: Position | None) -> Position:
            if held is not None:
                self._check_copied(held)
            if held is not None and (start is None or start == Position(held.next_id)):
                return held
            return start or Position(first or WalId(1))

        placed, _ = self.set(lambda now, held: (now.value, choose(held)))
        while first is not None and placed.next_id == first and (oldest := wal.oldest()) > first:
            # A garbage collector was faster than the checkpoint: the oldest file is now another one.
            first, placed = oldest, Position(oldest)
            self.position = placed
            self.save()
        return placed

    def set(self, decide: Decide) -> tuple[Position, Versioned[Manifest]]:
        """Set the retention checkpoint; see `RetentionCheckpoint.set`."""
        with self._lock:
            placed, written = self._checkpoint.set(decide)
            self._note_saved(placed)
            self.position = placed
            return placed, written

    def reach(self, seq: int) -> None:
        """The consumer has copied the database up to `seq`. Saved at once."""
        with self._lock:
            if self.position is not None:
                self.position = Position(self.position.next_id, seq)
                self._save()

    def use(self, position: Position) -> None:
        """The consumer needs nothing before `position` any more. Saved now and then."""
        with self._lock:
            if self.position is None or not self.position.copied:
                raise InvalidRequest("nothing was followed yet, so nothing can be committed")
            # Batches may be used in parallel and committed in another order; the position never goes back.
            self.position = further(self.position, position)
        self.tend()

    def tend(self) -> None:
        """Save the position if it has changed and it is time, or if the checkpoint must be prolonged."""
        with self._lock:
            unsaved = self.position != self._saved
            due = unsaved and self._clock.monotonic() - self._saved_at >= SAVE_EVERY_S
            if due or self._checkpoint.due():
                self._save()

    def save(self) -> None:
        """Save the position if it has changed."""
        with self._lock:
            if self.position != self._saved:
                self._save()

    def release(self) -> None:
        """Remove the retention checkpoint."""
        with self._lock:
            self._checkpoint.release()
            self.position = self._saved = None

    def _save(self) -> None:
        if self.position is not None:
            self._checkpoint.move(self.position)
            self._note_saved(self.position)

    def _check_copied(self, position: Position) -> None:
        if not position.copied:
            raise InvalidRequest(
                f"the consumer {self._checkpoint.name!r} has yet to copy the database: open_feed gives it a snapshot, "
                "and copied() records that the copy is done"
            )

    def _note_saved(self, position: Position) -> None:
        self._saved, self._saved_at = position, self._clock.monotonic()
