"""Base checkpoints: the former state of the database that a stream with former rows needs.

A stream that delivers former values, or deletes what an overwriting load removed, must find the state at the start of
every micro-batch. The driver keeps a base checkpoint at or before that position, and the retention checkpoint keeps the
WAL files since the base, so the state is the base and these files (`flagstone.spark.stream.former`). Three rules keep
the distance short and the state complete:

- when much was written since the base, the driver creates the next base of the present state, which is used once the
  stream has reached it; the older one is then deleted;
- rows of bulk loads are in no WAL file, so after a load the base is the state that the load made, which its load record
  keeps until the base exists;
- after the stream has skipped to a new copy, the base is the state of that copy.

A crash leaves at most one base more, which the next run deletes or which expires.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from flagstone.errors import InvalidRequest
from flagstone.metadata.annotations import Position, held_loads
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.spark.held_state import CheckpointRead
from flagstone.spark.options import ReadOptions
from flagstone.spark.stored_schema import find_schema
from flagstone.spark.stream.former import BaseState
from flagstone.spark.stream.options import StreamOptions
from flagstone.types import WalId

_FILES_SINCE: Final = 64
_BYTES_SINCE: Final = 32 * 1024 * 1024
"""How much may be written since a base until the next one is created: every task reads it again."""


class Bases:
    """The base checkpoints of one stream, on the driver."""

    def __init__(self, options: StreamOptions, consumer: str, manifests: ManifestStore, clock: Clock) -> None:
        self._options = options
        self._consumer = consumer
        self._name = f"spark stream base {consumer}"
        self._manifests = manifests
        self._clock = clock
        self._positions: dict[UUID, Position] = {}
        self._bytes = 0

    def create(self, source: str | UUID | None = None) -> BaseState:
        """A new base: the state of the checkpoint `source`, or the present one."""
        created = self._options.address.admin().create_checkpoint(
            self._options.retention_lifetime, source, self._name
        )
        return self._state(created)

    def at(self, start: Position) -> BaseState:
        """The base for a micro-batch that begins at `start`. Deletes older ones.

        Raises:
            InvalidRequest: there is none: it expired, or the stream began without former rows.

        """
        manifest = self._manifests.require_latest().value
        states = [self._state(entry) for entry in self._held(manifest)]
        usable = [state for state in states if state.position.after_seq <= start.after_seq]
        if not usable:
            raise InvalidRequest(
                f"the state of the database before sequence number {start.after_seq + 1} is not kept for the consumer "
                f"{self._consumer!r}: its base checkpoint expired, or the query began without the options 'before' and "
                "'on_overwrite'. Start over with a new copy: an empty checkpointLocation and starting=snapshot"
            )
        best = max(usable, key=lambda state: state.position.after_seq)
        loads = [
            (record.seq, checkpoint.id)
            for checkpoint, record in held_loads(manifest)
            if record.state == "done"
            and best.position.after_seq < record.seq <= start.after_seq
            # A stream with former rows passes only range deletes that have no key of its own.
            and record.deleted is None
        ]
        if loads:
            best = self.create(max(loads)[1])
        admin = self._options.address.admin()
        for state in usable:
            if state.checkpoint != best.checkpoint:
                admin.delete_checkpoint(state.checkpoint)
                self._bytes = 0
        return best

    def tend(self, start: Position, base: BaseState, read_bytes: int) -> None:
        """Create the next base if much was written since `base`, and renew bases. `read_bytes` were just planned."""
        self._bytes += read_bytes
        held = self._held(self._manifests.require_latest().value)
        newer = [entry for entry in held if self._state(entry).position.after_seq > base.position.after_seq]
        far = start.next_id - base.position.next_id > _FILES_SINCE or self._bytes > _BYTES_SINCE
        if far and not newer:
            self.create()
        lifetime = self._options.retention_lifetime
        if lifetime is None:
            return
        half_s = self._clock.now_ms() / 1000 + lifetime.total_seconds() / 2
        admin = self._options.address.admin()
        for entry in held:
            if entry.expires_s is not None and entry.expires_s < half_s:
                admin.refresh_checkpoint(entry.id, lifetime)

    def _held(self, manifest: Manifest) -> list[Checkpoint]:
        now_s = self._clock.now_ms() // 1000
        return [
            entry
            for entry in manifest.checkpoints
            if entry.name == self._name and (entry.expires_s is None or entry.expires_s > now_s)
        ]

    def _state(self, entry: Checkpoint) -> BaseState:
        if entry.id not in self._positions:
            self._positions[entry.id] = position_at(self._options, str(entry.id))
        return BaseState(str(entry.id), self._positions[entry.id])


def position_at(options: StreamOptions, checkpoint: str) -> Position:
    """The position after everything that the checkpoint shows."""
    with CheckpointRead(ReadOptions(options.address), checkpoint).open() as reader:
        return Position(WalId(reader.manifest().wal_id_last_seen + 1), reader.status()["last_seq"])


def version_at(options: StreamOptions, checkpoint: str) -> int | None:
    """The newest version of the schema that the checkpoint stores for the rows of the stream; None without one."""
    if options.read.raw:
        return None
    with CheckpointRead(ReadOptions(options.address), checkpoint).open() as reader:
        table, _ = find_schema(reader, options.read.prefix)
    return None if table is None else table.current.number
