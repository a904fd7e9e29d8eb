"""Which manifest a reader shows, and what keeps the objects it refers to from garbage collection.

A reader follows the database with a checkpoint of its own, follows it without one, shows a checkpoint that the caller
names, or stays at one manifest (`as_of`, and the snapshot of a change feed).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import reduce
from typing import Any
from uuid import UUID
from weakref import WeakSet

from flagstone.clones import checkpoint as checkpoints
from flagstone.errors import Closed, InvalidRequest, Unavailable
from flagstone.metadata.manifest import Checkpoint, Manifest, remove_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.read.view import ReadView
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.types import WalId

_log = logging.getLogger("flagstone.db")


class ReaderCheckpoint:
    """Decides which manifest a reader shows, and keeps what it refers to from garbage collection.

    This base class holds no checkpoint and shows the WAL up to the last file that the manifest has recorded.
    """

    mode: str

    def advance(self) -> Versioned[Manifest]:
        """The manifest to show now."""
        raise NotImplementedError

    def wal_end(self, manifest: Manifest) -> WalId | None:
        """The last WAL file to show with it; None means all there are."""
        return manifest.wal_id_last_seen

    def track(self, view: ReadView) -> ReadView:
        """The same view, or a copy of it that keeps its checkpoint for as long as a read refers to the copy."""
        return view

    def release(self) -> None:
        """Delete the reader's own checkpoints: the reader is closed."""

    def status(self) -> dict[str, Any]:
        """The checkpoint's id and when it expires."""
        return _status(None)


class NoCheckpoint(ReaderCheckpoint):
    """Shows the newest manifest and writes nothing: a read slower than garbage collection starts over."""

    mode = "latest"

    def __init__(self, manifests: ManifestStore) -> None:
        self._manifests = manifests

    def advance(self) -> Versioned[Manifest]:
        return self._manifests.require_latest()

    def wal_end(self, manifest: Manifest) -> WalId | None:  # noqa: ARG002 - all WAL files, whatever it records
        return None


class FixedCheckpoint(ReaderCheckpoint):
    """Shows one checkpoint and nothing newer. Writes nothing; the checkpoint's owner has to keep it."""

    mode = "checkpoint"

    def __init__(self, manifests: ManifestStore, checkpoint_id: UUID) -> None:
        self._manifests = manifests
        self._id = checkpoint_id
        self._expires_s: int | None = None

    def advance(self) -> Versioned[Manifest]:
        """The manifest of the checkpoint. Raises `InvalidRequest` once the checkpoint is gone."""
        held = checkpoints.require_checkpoint(self._manifests.require_latest().value, self._id)
        self._expires_s = held.expires_s
        return checkpoints.load_checkpointed(self._manifests, held)

    def status(self) -> dict[str, Any]:
        return {"checkpoint": str(self._id), "checkpoint_expires_s": self._expires_s}


class FormerCheckpoint(ReaderCheckpoint):
    """Stays at one manifest, and holds it with a checkpoint of the reader's own, which it refreshes.

    Without a `checkpoint` it holds nothing: another checkpoint keeps the manifest, or the caller accepts that garbage
    collection may end the reads. A crash leaves the checkpoint behind, and it expires. Each poll of the reader calls
    `on_poll`.
    """

    def __init__(
        self,
        manifests: ManifestStore,
        manifest: Versioned[Manifest],
        checkpoint: Checkpoint | None,
        *,
        mode: str,
        lifetime: timedelta | None,
        clock: Clock,
        on_poll: Callable[[], None] = lambda: None,
    ) -> None:
        self.mode = mode
        self._on_poll = on_poll
        self._manifests = manifests
        self._manifest = manifest
        self._checkpoint = checkpoint
        self._lifetime = lifetime
        self._clock = clock

    def advance(self) -> Versioned[Manifest]:
        """The same manifest again. Raises `InvalidRequest` when its checkpoint is gone."""
        self._on_poll()
        held = self._checkpoint
        if held is not None and _is_due(held, self._lifetime, self._clock):
            self._checkpoint = checkpoints.refresh_checkpoint(
                self._manifests, held.id, clock=self._clock, lifetime=self._lifetime
            )
        return self._manifest

    def release(self) -> None:
        """Delete the checkpoint. If the store does not answer, the checkpoint stays until it expires."""
        held, self._checkpoint = self._checkpoint, None
        if held is not None:
            with suppress(Unavailable):
                checkpoints.delete_checkpoint(self._manifests, held.id)

    def status(self) -> dict[str, Any]:
        return _status(self._checkpoint)


class _TrackedView(ReadView):
    """A view that a `WeakSet` counts: it leaves the set when the last read that uses it ends."""

    __slots__ = ()


class ManagedCheckpoint(ReaderCheckpoint):
    """Shows the newest manifest and holds it with an unnamed checkpoint of its own.

    The checkpoint moves when the SSTs change, is refreshed at half its life, and is created again if an outage was
    longer than that life. A checkpoint that a running scan still needs stays until the scan ends. A crash leaves the
    checkpoints behind, and they expire; with `lifetime` None they never expire, and an operator must delete them.
    """

    mode = "managed"

    def __init__(
        self, manifests: ManifestStore, *, lifetime: timedelta | None, clock: Clock, ids: Ids
    ) -> None:
        self._manifests = manifests
        self._lifetime = lifetime
        self._clock = clock
        self._ids = ids
        self._held: tuple[Checkpoint, Manifest] | None = None
        self._views: WeakSet[_TrackedView] = WeakSet()
        self._former: list[tuple[Checkpoint, WeakSet[_TrackedView]]] = []

    def advance(self) -> Versioned[Manifest]:
        latest = self._manifests.require_latest()
        check_readable(latest.value)
        self._tend_former()
        if self._held is None:
            return self._create()
        checkpoint, held = self._held
        if latest.value.checkpoint(checkpoint.id) is None:
            _log.warning("making a new checkpoint: the old one expired or was deleted id=%s", checkpoint.id)
            return self._create()
        if not same_data(held, latest.value):
            return self._move(checkpoint)
        if _is_due(checkpoint, self._lifetime, self._clock):
            try:
                self._held = self._refreshed(checkpoint), latest.value
            except InvalidRequest:  # collected since the manifest was read
                return self._create()
        return latest

    def wal_end(self, manifest: Manifest) -> WalId | None:  # noqa: ARG002 - all WAL files, whatever it records
        return None

    def track(self, view: ReadView) -> ReadView:
        tracked = _TrackedView(view.memtables, view.forest)
        self._views.add(tracked)
        return tracked

    def release(self) -> None:
        """Delete the checkpoints. If the store does not answer, they stay until they expire, if they do; a destroyed
        database has none any more.
        """
        held = [] if self._held is None else [self._held[0]]
        held += [checkpoint for checkpoint, _ in self._former]
        self._held, self._former = None, []
        try:
            self._delete(held)
        except (Closed, Unavailable) as error:
            ids = [str(entry.id) for entry in held]
            if self._lifetime is None:
                _log.error("left checkpoints that never expire; delete them: ids=%s error=%s", ids, error)
            else:
                _log.warning("left checkpoints to expire ids=%s error=%s", ids, error)

    def status(self) -> dict[str, Any]:
        return _status(None if self._held is None else self._held[0])

    def _create(self) -> Versioned[Manifest]:
        created, written = checkpoints.create_checkpoint(
            self._manifests, clock=self._clock, ids=self._ids, lifetime=self._lifetime
        )
        self._held, self._views = (created, written.value), WeakSet()
        return written

    def _move(self, checkpoint: Checkpoint) -> Versioned[Manifest]:
        """Hold the newest manifest; keep the former checkpoint only while a read uses a view of it."""
        if self._views:
            in_use = self._views
            written = self._create()
            self._former.append((checkpoint, in_use))
            return written
        created, written = checkpoints.replace_checkpoint(
            self._manifests, checkpoint.id, clock=self._clock, ids=self._ids, lifetime=self._lifetime
        )
        self._held, self._views = (created, written.value), WeakSet()
        return written

    def _tend_former(self) -> None:
        """Delete the former checkpoints whose reads have ended, and refresh the others in time."""
        done = [checkpoint for checkpoint, in_use in self._former if not in_use]
        self._delete(done)
        kept = []
        for checkpoint, in_use in self._former:
            if checkpoint not in done:
                # Collected in an outage: the scan that needed it raises by itself.
                with suppress(InvalidRequest):
                    due = _is_due(checkpoint, self._lifetime, self._clock)
                    kept.append((self._refreshed(checkpoint) if due else checkpoint, in_use))
        self._former = kept

    def _refreshed(self, checkpoint: Checkpoint) -> Checkpoint:
        return checkpoints.refresh_checkpoint(
            self._manifests, checkpoint.id, clock=self._clock, lifetime=self._lifetime
        )

    def _delete(self, doomed: list[Checkpoint]) -> None:
        if doomed:
            self._manifests.update(
                lambda now: reduce(remove_checkpoint, (entry.id for entry in doomed), now.value)
            )


def check_readable(manifest: Manifest) -> None:
    """Refuse a database that is not complete yet."""
    if not manifest.initialized:
        raise InvalidRequest("the database is a clone that is still being made; open it when that is done")


def same_data(one: Manifest, two: Manifest) -> bool:
    """Whether both refer to the same SSTs and the same start of the WAL: a reader ignores all other changes."""
    return (
        one.last_l0_seq == two.last_l0_seq
        and one.replay_after_wal_id == two.replay_after_wal_id
        and one.tree == two.tree
        and one.segments == two.segments
        and one.external_dbs == two.external_dbs
    )


def _is_due(checkpoint: Checkpoint, lifetime: timedelta | None, clock: Clock) -> bool:
    """Whether half of the checkpoint's life is over, so that it has to be refreshed."""
    if checkpoint.expires_s is None or lifetime is None:
        return False
    return clock.now_ms() / 1000 >= checkpoint.expires_s - lifetime.total_seconds() / 2


def _status(checkpoint: Checkpoint | None) -> dict[str, Any]:
    if checkpoint is None:
        return {"checkpoint": None, "checkpoint_expires_s": None}
    return {"checkpoint": str(checkpoint.id), "checkpoint_expires_s": checkpoint.expires_s}
