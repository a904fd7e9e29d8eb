"""Which manifest a reader shows, and what keeps the objects it refers to from being collected.

Three ways: a checkpoint of the reader's own that moves along, somebody else's checkpoint that does not move, or
none at all.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import timedelta
from functools import reduce
from typing import Any, Protocol
from uuid import UUID
from weakref import WeakSet

from flagstone.errors import Closed, InvalidRequest, Unavailable
from flagstone.metadata.manifest import Checkpoint, Manifest, remove_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.read.view import ReadView
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.types import WalId
from flagstone.views import checkpoint as checkpoints

_log = logging.getLogger("flagstone.db")


class Pin(Protocol):
    """Decides which manifest a reader shows, and keeps what it refers to from being collected."""

    mode: str

    def advance(self) -> Versioned[Manifest]:
        """The manifest to show now."""
        ...

    def log_end(self, manifest: Manifest) -> WalId | None:
        """The last log file to show with it; None means all there are."""
        ...

    def lend(self, view: ReadView) -> ReadView:
        """The same view; while somebody holds it, what it shows is kept as this pin keeps things."""
        ...

    def release(self) -> None:
        """Nobody reads any more."""
        ...

    def status(self) -> dict[str, Any]: ...


class LatestPin:
    """Shows the newest manifest and writes nothing: a read slower than garbage collection starts over."""

    mode = "latest"

    def __init__(self, manifests: ManifestStore) -> None:
        self._manifests = manifests

    def advance(self) -> Versioned[Manifest]:
        return self._manifests.require_latest()

    def log_end(self, manifest: Manifest) -> WalId | None:  # noqa: ARG002 - the whole log, whatever it says
        return None

    def lend(self, view: ReadView) -> ReadView:
        return view

    def release(self) -> None:
        return

    def status(self) -> dict[str, Any]:
        return {"checkpoint": None, "checkpoint_expires_s": None}


class FixedPin:
    """Shows what one checkpoint pins, and nothing newer. Writes nothing; keeping the checkpoint is its owner's job."""

    mode = "checkpoint"

    def __init__(self, manifests: ManifestStore, checkpoint_id: UUID) -> None:
        self._manifests = manifests
        self._id = checkpoint_id
        self._expires_s: int | None = None

    def advance(self) -> Versioned[Manifest]:
        """What the checkpoint names. Raises `InvalidRequest` once it is gone."""
        held = checkpoints.require_checkpoint(self._manifests.require_latest().value, self._id)
        self._expires_s = held.expires_s
        return checkpoints.load_pinned(self._manifests, held)

    def log_end(self, manifest: Manifest) -> WalId | None:
        return manifest.wal_id_last_seen

    def lend(self, view: ReadView) -> ReadView:
        return view

    def release(self) -> None:
        return

    def status(self) -> dict[str, Any]:
        return {"checkpoint": str(self._id), "checkpoint_expires_s": self._expires_s}


class _LentView(ReadView):
    """A view of which we learn when the last read that uses it is over."""

    __slots__ = ()


class ManagedPin:
    """Shows the newest manifest and holds it with an unnamed checkpoint of its own.

    The checkpoint moves when the tables change, is refreshed at half its life, and is made anew when an outage was
    longer than that life. One that a running scan still needs stays until the scan is over. A crash leaves them
    behind, and they expire; with `lifetime` None they never do, and must be deleted by hand.
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
        self._lent: WeakSet[_LentView] = WeakSet()
        self._outlived: list[tuple[Checkpoint, WeakSet[_LentView]]] = []

    def advance(self) -> Versioned[Manifest]:
        latest = self._manifests.require_latest()
        check_readable(latest.value)
        self._tend_outlived()
        if self._held is None:
            return self._create()
        checkpoint, pinned = self._held
        if latest.value.checkpoint(checkpoint.id) is None:
            _log.warning("making a new checkpoint: the old one expired or was deleted id=%s", checkpoint.id)
            return self._create()
        if not same_data(pinned, latest.value):
            return self._move(checkpoint)
        if self._is_due(checkpoint):
            try:
                self._held = self._refreshed(checkpoint), latest.value
            except InvalidRequest:  # collected since we looked
                return self._create()
        return latest

    def log_end(self, manifest: Manifest) -> WalId | None:  # noqa: ARG002 - the whole log, whatever it says
        return None

    def lend(self, view: ReadView) -> ReadView:
        lent = _LentView(view.memtables, view.forest)
        self._lent.add(lent)
        return lent

    def release(self) -> None:
        """Delete the checkpoints. A store that does not answer keeps them until they expire, if they do; a destroyed
        database has none any more.
        """
        held = [] if self._held is None else [self._held[0]]
        held += [checkpoint for checkpoint, _ in self._outlived]
        self._held, self._outlived = None, []
        try:
            self._delete(held)
        except (Closed, Unavailable) as error:
            ids = [str(entry.id) for entry in held]
            if self._lifetime is None:
                _log.error("left checkpoints that never expire; delete them: ids=%s error=%s", ids, error)
            else:
                _log.warning("left checkpoints to expire ids=%s error=%s", ids, error)

    def status(self) -> dict[str, Any]:
        checkpoint = None if self._held is None else self._held[0]
        return {
            "checkpoint": None if checkpoint is None else str(checkpoint.id),
            "checkpoint_expires_s": None if checkpoint is None else checkpoint.expires_s,
        }

    def _create(self) -> Versioned[Manifest]:
        created, written = checkpoints.create_checkpoint(
            self._manifests, clock=self._clock, ids=self._ids, lifetime=self._lifetime
        )
        self._held, self._lent = (created, written.value), WeakSet()
        return written

    def _move(self, checkpoint: Checkpoint) -> Versioned[Manifest]:
        """Pin the newest state, and let go of the former one unless somebody still reads it."""
        if self._lent:
            in_use = self._lent
            written = self._create()
            self._outlived.append((checkpoint, in_use))
            return written
        created, written = checkpoints.replace_checkpoint(
            self._manifests, checkpoint.id, clock=self._clock, ids=self._ids, lifetime=self._lifetime
        )
        self._held, self._lent = (created, written.value), WeakSet()
        return written

    def _tend_outlived(self) -> None:
        """Delete the former checkpoints whose reads are over, and refresh the others in time."""
        done = [checkpoint for checkpoint, in_use in self._outlived if not in_use]
        self._delete(done)
        kept = []
        for checkpoint, in_use in self._outlived:
            if checkpoint not in done:
                # Collected in an outage: the scan that needed it finds that out by itself.
                with suppress(InvalidRequest):
                    kept.append(
                        (self._refreshed(checkpoint) if self._is_due(checkpoint) else checkpoint, in_use)
                    )
        self._outlived = kept

    def _is_due(self, checkpoint: Checkpoint) -> bool:
        if checkpoint.expires_s is None or self._lifetime is None:
            return False
        half_life_s = self._lifetime.total_seconds() / 2
        return self._clock.now_ms() / 1000 >= checkpoint.expires_s - half_life_s

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
    """Whether both refer to the same tables and the same begin of the log: only such changes concern a reader."""
    return (
        one.last_l0_seq == two.last_l0_seq
        and one.replay_after_wal_id == two.replay_after_wal_id
        and one.tree == two.tree
        and one.segments == two.segments
        and one.external_dbs == two.external_dbs
    )
