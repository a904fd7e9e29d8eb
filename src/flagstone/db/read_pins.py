"""Keeps the tables of long reads: a checkpoint for scans, snapshots and transactions that outlive a compaction's grace.

A read holds a view, and the view names tables. When a compaction replaces some of them, it leaves a checkpoint that
keeps them for a while (SlateDB's default is 900 s), long enough for almost every read. For a read that takes longer
the writer makes a checkpoint of its own of the same manifest, in good time, renews it at half its life and removes it
when the read is over. A crash leaves it behind, and it expires.

Which reads run is not counted anywhere: a view whose tables are still referred to in this process is in use. So reads
pay nothing for this, and neither does the store while no read is that long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final
from weakref import ReferenceType, WeakSet, ref

from flagstone.errors import Unavailable
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint, remove_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.read.view import Forest
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.runtime.sync import Lock
from flagstone.store.port import ObjectMissing
from flagstone.types import ManifestId
from flagstone.views.checkpoint import expiry

_log = logging.getLogger("flagstone.db")

_IDLE_S: Final = 3600.0
_RETRY_S: Final = 10.0
_TEND_EVERY_S: Final = 60.0

Edit = Callable[[Versioned[Manifest]], Manifest | None]


@dataclass(slots=True)
class _Use:
    """The tables of one manifest, for as long as somebody reads them. `due_ms`: when they must be pinned."""

    forest: ReferenceType[Forest]
    manifest_id: int
    tables: Mapping[Any, Any]
    due_ms: int | None = None


@dataclass(slots=True)
class _Pin:
    """A checkpoint of ours, and who needs it."""

    checkpoint: Checkpoint
    tables: Mapping[Any, Any]
    users: WeakSet[Forest] = field(default_factory=WeakSet)


class ReadPins:
    """A background service of the writer. `commit` applies an edit to the manifest as the writer that we are."""

    name = "read-pins"

    def __init__(
        self,
        manifests: ManifestStore,
        *,
        commit: Callable[[Edit], Versioned[Manifest]],
        lifetime: timedelta,
        clock: Clock,
        ids: Ids,
    ) -> None:
        self._manifests = manifests
        self._commit = commit
        self._lifetime = lifetime
        self._clock = clock
        self._ids = ids
        self._turn = Lock()
        self._lock = Lock()
        self._uses: list[_Use] = []
        self._pins: list[_Pin] = []

    def shown(self, forest: Forest, latest: Versioned[Manifest]) -> bool:
        """Reads that begin now use the tables of `latest`; whether some older read will need a pin."""
        now_ms, tables = self._clock.now_ms(), latest.value.ssts
        with self._lock:
            self._uses = [use for use in self._uses if use.forest() is not None]
            for use in self._uses:
                if use.due_ms is None and not use.tables.keys() <= tables.keys():
                    use.due_ms = plan_due_ms(now_ms, latest.value, use.manifest_id, self._lifetime)
            due = any(use.due_ms is not None for use in self._uses)
            self._uses.append(_Use(ref(forest), latest.id, tables))
            return due

    def run_once(self) -> float | None:
        """Pin what is due, renew and remove pins. A store that does not answer is asked again soon."""
        with self._turn:
            try:
                self._tend()
            except Unavailable as error:
                _log.warning("cannot keep the tables of a long read, trying again error=%s", error)
                return _RETRY_S
            with self._lock:
                due = [use.due_ms for use in self._uses if use.due_ms is not None]
                wait_s = max((min(due) - self._clock.now_ms()) / 1000, 1.0) if due else _IDLE_S
                if self._pins:
                    wait_s = min(wait_s, _TEND_EVERY_S, self._lifetime.total_seconds() / 4)
                return wait_s

    def without_pins(self, manifest: Manifest) -> Manifest:
        """The manifest without our checkpoints: the database is being closed."""
        for pin in self._pins:
            manifest = remove_checkpoint(manifest, pin.checkpoint.id)
        return manifest

    @property
    def count(self) -> int:
        """How many checkpoints are held for long reads."""
        return len(self._pins)

    def _tend(self) -> None:
        now_ms = self._clock.now_ms()
        with self._lock:
            self._uses = [use for use in self._uses if use.forest() is not None]
            due = [use for use in self._uses if use.due_ms is not None and use.due_ms <= now_ms]
        wanted = self._share(due)
        done = [pin for pin in self._pins if not pin.users]
        kept = [pin for pin in self._pins if pin.users]
        created = self._find_sources(wanted, now_ms)
        renewed = [pin.checkpoint for pin in kept if self._is_half_over(pin.checkpoint, now_ms)]
        if not (done or created or renewed):
            return
        now_s = now_ms // 1000
        expires_s = expiry(now_s, self._lifetime)

        def edit(now: Versioned[Manifest]) -> Manifest:
            manifest = now.value
            for pin in done:
                manifest = remove_checkpoint(manifest, pin.checkpoint.id)
            for checkpoint in renewed:
                if manifest.checkpoint(checkpoint.id) is not None:
                    manifest = add_checkpoint(manifest, replace(checkpoint, expires_s=expires_s))
            for pin in created:
                # Only while another checkpoint still holds that manifest can we be sure that it is there.
                if any(_holds(other, pin.checkpoint.manifest_id, now_s) for other in manifest.checkpoints):
                    manifest = add_checkpoint(manifest, replace(pin.checkpoint, expires_s=expires_s))
            return manifest

        written = self._commit(edit).value
        self._pins = [pin for pin in kept + created if self._is_in(written, pin)]

    def _share(self, due: list[_Use]) -> list[_Use]:
        """Let what is due use the pins there are; returns what needs another one."""
        wanted = []
        for use in due:
            forest = use.forest()
            if forest is None or any(forest in pin.users for pin in self._pins):
                continue
            pin = next((pin for pin in self._pins if use.tables.keys() <= pin.tables.keys()), None)
            if pin is None:
                wanted.append(use)
            else:
                pin.users.add(forest)
        return wanted

    def _find_sources(self, wanted: list[_Use], now_ms: int) -> list[_Pin]:
        """A pin for each use, of a manifest that some checkpoint holds and that has all of its tables."""
        if not wanted:
            return []
        latest = self._manifests.require_latest()
        now_s = now_ms // 1000
        held = sorted(
            {
                entry.manifest_id
                for entry in latest.value.checkpoints
                if _holds(entry, entry.manifest_id, now_s)
            }
        )
        found: dict[ManifestId, _Pin] = {}
        loaded: dict[ManifestId, Manifest | None] = {}
        for use in wanted:
            forest = use.forest()
            if forest is None:
                continue
            for manifest_id in held:
                if manifest_id < use.manifest_id:
                    continue
                if manifest_id not in loaded:
                    loaded[manifest_id] = self._load(manifest_id)
                manifest = loaded[manifest_id]
                if manifest is not None and use.tables.keys() <= manifest.ssts.keys():
                    if manifest_id not in found:
                        checkpoint = Checkpoint(self._ids.uuid(), manifest_id, now_s)
                        found[manifest_id] = _Pin(checkpoint, manifest.ssts)
                    found[manifest_id].users.add(forest)
                    break
            else:
                use.due_ms = None
                _log.warning(
                    "no checkpoint holds the tables of a long read of manifest %d: it goes on until they are collected",
                    use.manifest_id,
                )
        return list(found.values())

    def _load(self, manifest_id: ManifestId) -> Manifest | None:
        try:
            return self._manifests.load(manifest_id)
        except ObjectMissing:
            return None

    def _is_half_over(self, checkpoint: Checkpoint, now_ms: int) -> bool:
        half_life_s = self._lifetime.total_seconds() / 2
        return checkpoint.expires_s is not None and now_ms / 1000 >= checkpoint.expires_s - half_life_s

    def _is_in(self, manifest: Manifest, pin: _Pin) -> bool:
        """Whether the pin is in the manifest, and remember until when. One that is not is tried again."""
        stored = manifest.checkpoint(pin.checkpoint.id)
        if stored is None:
            _log.warning("lost the checkpoint of a long read id=%s", pin.checkpoint.id)
            return False
        pin.checkpoint = stored
        return True


def plan_due_ms(now_ms: int, manifest: Manifest, since_id: int, lifetime: timedelta) -> int:
    """When tables that `manifest` lacks, and manifest `since_id` had, must be pinned at the latest.

    Half of what is left to the checkpoint that keeps them, which is the first to end of those made since; at once
    when there is none.
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
