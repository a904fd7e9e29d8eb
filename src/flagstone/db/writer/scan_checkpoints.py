"""Scan checkpoints keep the SSTs of scans, snapshots and transactions that run longer than a compaction's checkpoint.

A read holds a read view, and the view refers to SSTs. When a compaction replaces some of them, it leaves a checkpoint
that keeps them for a while (SlateDB's default is 900 s), long enough for almost every read. For a longer read the
writer creates a checkpoint of its own for the same manifest, early enough. It renews the checkpoint at half its
lifetime and removes it after the read. A crash leaves the checkpoint behind, and it expires.

No counter tracks the reads: a view is in use while this process refers to its SSTs. So reads pay nothing for this, and
the store gets no request while no read is that long.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final
from weakref import ReferenceType, WeakSet, ref

from flagstone.clones.checkpoint import expiry
from flagstone.errors import Unavailable
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint, remove_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.read.view import Forest
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.runtime.service import Supervisor
from flagstone.runtime.sync import Lock
from flagstone.store.port import ObjectMissing
from flagstone.types import ManifestId
from flagstone.write.manifest import WriterManifest

_log = logging.getLogger("flagstone.db")

_IDLE_S: Final = 3600.0
_RETRY_S: Final = 10.0
_TEND_EVERY_S: Final = 60.0


@dataclass(slots=True)
class _Use:
    """The SSTs of one manifest, while a read uses them. `due_ms` is when they need a scan checkpoint."""

    forest: ReferenceType[Forest]
    manifest_id: int
    ssts: Mapping[Any, Any]
    due_ms: int | None = None


@dataclass(slots=True)
class _ScanCheckpoint:
    """A checkpoint of this writer, and the views that need it."""

    checkpoint: Checkpoint
    ssts: Mapping[Any, Any]
    users: WeakSet[Forest] = field(default_factory=WeakSet)


class ScanCheckpoints:
    """A background service of the writer."""

    name = "scan-checkpoints"

    def __init__(
        self,
        manifest: WriterManifest,
        *,
        lifetime: timedelta,
        clock: Clock,
        ids: Ids,
        supervisor: Supervisor,
    ) -> None:
        self._manifest = manifest
        self._lifetime = lifetime
        self._clock = clock
        self._ids = ids
        self._supervisor = supervisor
        self._turn = Lock()
        self._lock = Lock()
        self._uses: list[_Use] = []
        self._held: list[_ScanCheckpoint] = []

    def before_adoption(self, latest: Versioned[Manifest], forest: Forest) -> None:
        """Reads that begin now use the SSTs of `latest`. Wake the service if an older read needs a checkpoint."""
        if self.track(latest, forest):
            self._supervisor.wake(self)

    def after_adoption(self, latest: Versioned[Manifest]) -> None:
        """Nothing to do."""

    def track(self, latest: Versioned[Manifest], forest: Forest) -> bool:
        """Remember the SSTs that reads use from now on; return True if an older read will need a checkpoint."""
        now_ms, ssts = self._clock.now_ms(), latest.value.ssts
        with self._lock:
            self._uses = [use for use in self._uses if use.forest() is not None]
            for use in self._uses:
                if use.due_ms is None and not use.ssts.keys() <= ssts.keys():
                    use.due_ms = plan_due_ms(now_ms, latest.value, use.manifest_id, self._lifetime)
            due = any(use.due_ms is not None for use in self._uses)
            self._uses.append(_Use(ref(forest), latest.id, ssts))
            return due

    def run_once(self) -> float | None:
        """Create, renew and remove checkpoints. If the store does not answer, try again soon."""
        with self._turn:
            try:
                self._tend()
            except Unavailable as error:
                _log.warning("cannot keep the SSTs of a long read, trying again error=%s", error)
                return _RETRY_S
            with self._lock:
                due = [use.due_ms for use in self._uses if use.due_ms is not None]
                wait_s = max((min(due) - self._clock.now_ms()) / 1000, 1.0) if due else _IDLE_S
                if self._held:
                    wait_s = min(wait_s, _TEND_EVERY_S, self._lifetime.total_seconds() / 4)
                return wait_s

    def without_checkpoints(self, manifest: Manifest) -> Manifest:
        """The manifest without the checkpoints of this service, for closing."""
        for held in self._held:
            manifest = remove_checkpoint(manifest, held.checkpoint.id)
        return manifest

    @property
    def count(self) -> int:
        """The number of checkpoints for long reads."""
        return len(self._held)

    def _tend(self) -> None:
        now_ms = self._clock.now_ms()
        with self._lock:
            self._uses = [use for use in self._uses if use.forest() is not None]
            due = [use for use in self._uses if use.due_ms is not None and use.due_ms <= now_ms]
        wanted = self._share(due)
        done = [held for held in self._held if not held.users]
        kept = [held for held in self._held if held.users]
        created = self._find_sources(wanted, now_ms)
        renewed = [held.checkpoint for held in kept if self._is_half_over(held.checkpoint, now_ms)]
        if not (done or created or renewed):
            return
        now_s = now_ms // 1000
        expires_s = expiry(now_s, self._lifetime)

        def edit(now: Versioned[Manifest]) -> Manifest:
            manifest = now.value
            for held in done:
                manifest = remove_checkpoint(manifest, held.checkpoint.id)
            for checkpoint in renewed:
                if manifest.checkpoint(checkpoint.id) is not None:
                    manifest = add_checkpoint(manifest, replace(checkpoint, expires_s=expires_s))
            for held in created:
                # The manifest certainly exists only while another checkpoint holds it.
                if any(_holds(other, held.checkpoint.manifest_id, now_s) for other in manifest.checkpoints):
                    manifest = add_checkpoint(manifest, replace(held.checkpoint, expires_s=expires_s))
            return manifest

        written = self._manifest.update(edit).value
        self._held = [held for held in kept + created if self._is_in(written, held)]

    def _share(self, due: list[_Use]) -> list[_Use]:
        """Let due uses share the existing checkpoints; return those that need another one."""
        wanted = []
        for use in due:
            forest = use.forest()
            if forest is None or any(forest in held.users for held in self._held):
                continue
            held = next((held for held in self._held if use.ssts.keys() <= held.ssts.keys()), None)
            if held is None:
                wanted.append(use)
            else:
                held.users.add(forest)
        return wanted

    def _find_sources(self, wanted: list[_Use], now_ms: int) -> list[_ScanCheckpoint]:
        """A checkpoint for each use, of a manifest that another checkpoint holds and that has all of its SSTs."""
        if not wanted:
            return []
        latest = self._manifest.store.require_latest()
        now_s = now_ms // 1000
        held_ids = sorted(
            {
                entry.manifest_id
                for entry in latest.value.checkpoints
                if _holds(entry, entry.manifest_id, now_s)
            }
        )
        found: dict[ManifestId, _ScanCheckpoint] = {}
        loaded: dict[ManifestId, Manifest | None] = {}
        for use in wanted:
            forest = use.forest()
            if forest is None:
                continue
            for manifest_id in held_ids:
                if manifest_id < use.manifest_id:
                    continue
                if manifest_id not in loaded:
                    loaded[manifest_id] = self._load(manifest_id)
                manifest = loaded[manifest_id]
                if manifest is not None and use.ssts.keys() <= manifest.ssts.keys():
                    if manifest_id not in found:
                        checkpoint = Checkpoint(self._ids.uuid(), manifest_id, now_s)
                        found[manifest_id] = _ScanCheckpoint(checkpoint, manifest.ssts)
                    found[manifest_id].users.add(forest)
                    break
            else:
                use.due_ms = None
                _log.warning(
                    "no checkpoint holds the SSTs of a long read of manifest %d: it fails when they are collected",
                    use.manifest_id,
                )
        return list(found.values())

    def _load(self, manifest_id: ManifestId) -> Manifest | None:
        try:
            return self._manifest.store.load(manifest_id)
        except ObjectMissing:
            return None

    def _is_half_over(self, checkpoint: Checkpoint, now_ms: int) -> bool:
        half_life_s = self._lifetime.total_seconds() / 2
        return checkpoint.expires_s is not None and now_ms / 1000 >= checkpoint.expires_s - half_life_s

    def _is_in(self, manifest: Manifest, held: _ScanCheckpoint) -> bool:
        """Whether the manifest has the checkpoint; remember its expiry. A missing one is created again."""
        stored = manifest.checkpoint(held.checkpoint.id)
        if stored is None:
            _log.warning("lost the checkpoint of a long read id=%s", held.checkpoint.id)
            return False
        held.checkpoint = stored
        return True


def plan_due_ms(now_ms: int, manifest: Manifest, since_id: int, lifetime: timedelta) -> int:
    """The latest time to create a checkpoint for SSTs that manifest `since_id` had and `manifest` lacks.

    It is half of the remaining lifetime of the checkpoint that keeps them, which is the first to expire of those made
    since. Without one it is now.
    """
    left_ms = [
        min(entry.expires_s * 1000 - now_ms, int(lifetime.total_seconds() * 1000))
        for entry in manifest.checkpoints
        if entry.manifest_id >= since_id and entry.expires_s is not None
    ]
    return now_ms + max(min(left_ms, default=0), 0) // 2


def _holds(checkpoint: Checkpoint, manifest_id: ManifestId, now_s: int) -> bool:
    alive = checkpoint.expires_s is None or checkpoint.expires_s > now_s
    return alive and checkpoint.manifest_id == manifest_id
