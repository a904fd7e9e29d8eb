"""How an open database takes in a bulk load that others have made (`flagstone.metadata.hand_over`).

The load's rows are in tables already, under a number far ahead. To take them in, the writer lets other writes wait,
puts what it has into tables, adds the load with one manifest version and goes on behind its number: everything written
before is older than the load, everything after it newer, and nobody ever sees half of it. Writes wait for a flush and
a manifest.

A crash before that version leaves the load waiting for the next writer; after it, all of the load is there. The same
version tells consumers of changes where to find it (`flagstone.wal.load_marks`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol
from uuid import UUID

from flagstone.db.environment import Environment
from flagstone.db.maintenance import Maintenance
from flagstone.errors import CorruptData, FlagstoneError, Unavailable
from flagstone.metadata.fencing import Fence
from flagstone.metadata.hand_over import (
    announce_writer,
    find_mark,
    held_marks,
    load_request,
    move_mark,
)
from flagstone.metadata.loads import Load
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.store.port import ObjectMissing
from flagstone.types import Seq
from flagstone.wal.loads import apply_told_load
from flagstone.write.committer import Committer

_log = logging.getLogger("flagstone.db")

_LONGEST_HOLD_S: Final = 10.0


class Host(Protocol):
    """What it needs of the engine."""

    env: Environment
    manifests: ManifestStore
    fence: Fence
    committer: Committer
    maintenance: Maintenance

    @property
    def manifest(self) -> Versioned[Manifest]: ...

    def adopt(self, latest: Versioned[Manifest]) -> None: ...

    def flush_memtables(
        self, unless: Callable[[], bool] = ..., *, timeout_s: float | None = None
    ) -> None: ...

    def min_active_seq(self) -> int | None: ...


class LoadAdoption:
    """Finds loads that are ready for this writer, and takes them in. One thread at a time."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._announced = False
        self._doubtful: set[UUID] = set()
        """Loads whose manifest may have been written although nobody said so."""

    def announce(self) -> None:
        """Tell those who load that there is a writer to ask. What the store cannot be told now is told later."""
        if not self._announced:
            env = self._host.env
            try:
                announce_writer(env.store, env.paths, self._host.fence.epoch)
                self._announced = True
            except Unavailable as error:
                _log.warning("cannot announce this writer to bulk loads error=%s", error)

    def retract(self) -> None:
        """Tell those who load that this writer has closed the database."""
        if self._announced:
            env = self._host.env
            try:
                announce_writer(env.store, env.paths, None)
            except Unavailable as error:
                _log.warning("cannot take the announcement of this writer back error=%s", error)

    @property
    def expected(self) -> bool:
        """Whether a load is under way that will ask, or asks already."""
        return any(held.mark.open for held in held_marks(self._host.manifest.value))

    def run(self) -> None:
        """Take in what is ready.

        Raises:
            Closed: a newer writer owns the database.

        """
        for held in list(held_marks(self._host.manifest.value)):
            mark_id = held.checkpoint.id
            if held.mark.state == "ready":
                try:
                    self._take(mark_id)
                except Unavailable as error:
                    # The load waits, and so does its maker: at the next look it is tried again.
                    _log.warning("cannot take in a bulk load yet id=%s error=%s", mark_id, error)
            elif held.mark.state == "done" and mark_id in self._doubtful:
                self._doubtful.remove(mark_id)
                self._host.maintenance.note_load(self._host.manifest.value)

    def _take(self, mark_id: UUID) -> None:
        host = self._host
        try:
            load = load_request(host.env.store, host.env.paths, mark_id)
        except (ObjectMissing, CorruptData) as error:
            self._refuse(mark_id, f"its request cannot be read: {error}")
            return
        # What takes long is done before others have to wait.
        host.flush_memtables(timeout_s=_LONGEST_HOLD_S)
        with host.committer.held():
            host.flush_memtables(timeout_s=_LONGEST_HOLD_S)
            last_seq = host.committer.durability.last_seq
            # Without a log, rows are in tables a moment before they count as durable.
            host.committer.durability.wait(last_seq, _LONGEST_HOLD_S)
            if last_seq > load.seq:
                self._refuse(
                    mark_id, f"the database is at {last_seq} and has passed its number {load.seq}; load again"
                )
                return
            ranges = load.key_ranges
            try:
                written = self._commit(mark_id, load)
            except FlagstoneError:
                # Perhaps it was written, and only the answer lost: no later row may have a number below the load's.
                self._doubtful.add(mark_id)
                host.committer.take_load(load.seq, ranges)
                raise
            held = find_mark(written.value, mark_id)
            if held is None or held.mark.state != "done":
                return  # it was called off
            host.committer.take_load(load.seq, ranges)
            host.adopt(written)
        self._doubtful.discard(mark_id)
        host.maintenance.note_load(written.value)
        _log.info("took in a bulk load id=%s seq=%d tables=%d", mark_id, load.seq, len(load.tables))

    def _commit(self, mark_id: UUID, load: Load) -> Versioned[Manifest]:
        host, now_ms = self._host, self._host.env.clock.now_ms()
        oldest_read = host.min_active_seq()
        placed = replace(
            load,
            # The clock of whoever made the load may be ahead of ours, which all later rows go by.
            created_ms=min(load.created_ms, now_ms),
            snapshot_min_seq=Seq(load.seq if oldest_read is None else min(oldest_read, load.seq)),
        )

        def add(now: Versioned[Manifest]) -> Manifest | None:
            held = find_mark(now.value, mark_id)
            if held is None or held.mark.state != "ready":
                return None
            # Writers wait and all they wrote is in the log: where it ends now is the place of the load in it.
            return apply_told_load(
                now, placed, held, now_s=now_ms // 1000, last_wal_id=host.committer.last_wal_id
            )

        return host.manifests.update(
            host.fence.guard(add),
            timeout_s=min(_LONGEST_HOLD_S, host.env.settings.manifest_update_timeout.total_seconds()),
        )

    def _refuse(self, mark_id: UUID, reason: str) -> None:
        _log.warning("refused a bulk load id=%s reason=%s", mark_id, reason)

        def edit(now: Versioned[Manifest]) -> Manifest | None:
            held = find_mark(now.value, mark_id)
            return (
                None
                if held is None or held.mark.state != "ready"
                else move_mark(now.value, held, "refused", reason=reason)
            )

        self._host.adopt(self._host.manifests.update(self._host.fence.guard(edit)))
