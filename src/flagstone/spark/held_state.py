"""The state of a database that a DataFrame shows, and the checkpoint that keeps it.

A plain `load()` has no process that lives as long as its DataFrame: Spark creates it in a worker that ends. So its
checkpoint is short, several loads of one state share it, and tasks renew it while they read. After a crash it expires.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from flagstone.clones.checkpoint import (
    find_checkpoint,
    is_expired,
    refresh_checkpoint,
    require_live_checkpoint,
)
from flagstone.config import ReaderSettings
from flagstone.db.reader.pinned import PinnedState, find_state, open_pinned
from flagstone.db.reader.reader import DbReader, open_reader
from flagstone.db.reader.reader_checkpoint import same_data
from flagstone.errors import CorruptData, FlagstoneError, InvalidRequest, Unavailable
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.schema import TableSchema
from flagstone.spark.address import open_manifests, open_store, open_wal_store
from flagstone.spark.options import ReadOptions
from flagstone.spark.stored_schema import fetch_schema, find_schema
from flagstone.sst.store import SstGone
from flagstone.store.port import AccessRefused, ObjectMissing
from flagstone.types import WalId

_log = logging.getLogger("flagstone.spark")

CHECKPOINT_NAME: Final = "spark read"
"""The checkpoint of plain loads. Loads of one state share it; it is never deleted before it expires."""

OWNED_NAME: Final = "spark frame"
"""The checkpoint of one frame or one export, which deletes it at its end."""

_NO_ACCESS: Final = (
    "a DataFrame keeps its state with a checkpoint, which needs write access to the database; set snapshot to 'latest' "
    "to read without one"
)


@dataclass(frozen=True, slots=True)
class CheckpointRead:
    """The state of a database: that of a checkpoint, or with `pinned` one that no checkpoint keeps.

    With `renewed` tasks renew the checkpoint while they read. `table` is the stored schema of the rows under
    `table_prefix`, if they are read by it.
    """

    options: ReadOptions
    checkpoint: str | None
    pinned: PinnedState | None = None
    renewed: bool = False
    table: TableSchema | None = None
    table_prefix: bytes = b""

    def open(self) -> DbReader:
        """A reader of the state. It writes nothing and does not poll for newer manifests."""
        options = self.options
        operator, settings = options.load_merge_operator(), ReaderSettings(block_cache_bytes=0)
        if self.pinned is not None:
            return open_pinned(
                options.address.path,
                self.pinned,
                arguments=options.address.arguments,
                merge_operator=operator,
                settings=settings,
            )
        return open_reader(
            options.address.path,
            **options.address.arguments,
            checkpoint=self.checkpoint,
            as_of=options.as_of,
            mode="managed" if self.checkpoint else "latest",
            merge_operator=operator,
            settings=settings,
        )

    @property
    def option_values(self) -> dict[str, Any]:
        """The options with which another read shows the same state, and creates no checkpoint."""
        state = None if self.pinned is None else str(self.pinned)
        snapshot = None if self.checkpoint else "latest"
        return {
            "checkpoint": self.checkpoint,
            "as_of": self.options.as_of,
            "state": state,
            "snapshot": snapshot,
        }


def hold_checkpoint(options: ReadOptions, *, owned: bool = False) -> CheckpointRead:
    """Find the checkpoint that the options name, or one of the state they name; create it if there is none.

    Without `owned`, the result may be the checkpoint of an earlier load, if nothing has changed since: the caller must
    not delete it. A new checkpoint expires after `options.lifetime`, also when this process crashes. With snapshot
    "latest" nothing is written.

    Raises:
        InvalidRequest: there is no database or no such checkpoint, the state at `as_of` is not available, or the store
            refuses to write the checkpoint.

    """
    return _with_table(_hold(options, owned=owned))


def _with_table(held: CheckpointRead) -> CheckpointRead:
    """The same with the schema that the database has in this state."""
    if held.options.raw:
        return held
    with held.open() as reader:
        table, prefix = find_schema(reader, held.options.prefix)
    other = held.options.schema_of
    if table is None and other is not None:
        table, prefix = fetch_schema(replace(held.options.address, path=other)), b""
        if table is None:
            raise InvalidRequest(f"the database at {other!r}, which 'schema.of' names, stores no schema")
    return replace(held, table=table, table_prefix=prefix)


def _hold(options: ReadOptions, *, owned: bool) -> CheckpointRead:
    address = options.address
    options.load_merge_operator()
    if options.checkpoint is not None:
        now, now_s = address.admin().manifest().value, _now_s(address.clock)
        held = find_checkpoint(options.checkpoint, lambda: now, now_s=now_s, newest=True)
        require_live_checkpoint(now, held, now_s=now_s)
        return CheckpointRead(options, str(held))
    if options.state is not None:
        return CheckpointRead(options, None, options.state)
    if options.as_of is None and options.snapshot == "latest":
        return CheckpointRead(options, None, _find_state(options)[0])
    open_manifests(address).require_latest()  # a store that refuses reads is another problem
    try:
        if options.as_of is None:
            found = None if owned else _shared_checkpoint(options)
            if found is None:
                name = OWNED_NAME if owned else CHECKPOINT_NAME
                found = address.admin().create_checkpoint(options.lifetime, name=name)
            return CheckpointRead(options, str(found.id), renewed=not owned)
        return _held_as_of(options, owned=owned)
    except AccessRefused as refused:
        raise InvalidRequest(f"{_NO_ACCESS} ({refused})") from refused


def _held_as_of(options: ReadOptions, *, owned: bool) -> CheckpointRead:
    # The reader finds the manifest that shows this state, and the checkpoint that keeps the manifest, if any.
    address = options.address
    latest = options.snapshot == "latest"
    mode: Any = "latest" if latest else "managed"
    with open_reader(address.path, **address.arguments, as_of=options.as_of, mode=mode) as reader:
        status = reader.status()
        # By sequence number from here on, so that tasks need not translate a time again.
        exact = replace(options, as_of=status["last_seq"])
        if latest:
            return CheckpointRead(exact, None)
        created = address.admin().create_checkpoint(
            options.lifetime, source=status["checkpoint"], name=OWNED_NAME if owned else CHECKPOINT_NAME
        )
    return CheckpointRead(exact, str(created.id), renewed=not owned)


def _find_state(options: ReadOptions) -> tuple[PinnedState, Manifest]:
    store, _ = open_store(options.address)
    return find_state(open_manifests(options.address), store, open_wal_store(options.address, store))


def _shared_checkpoint(options: ReadOptions) -> Checkpoint | None:
    """The checkpoint of an earlier load that shows what is on the store now, renewed if half of its life is over."""
    clock, manifests = options.address.clock, open_manifests(options.address)
    state, newest = _find_state(options)
    found = reusable(newest, state.last_wal_id, manifests, now_s=_now_s(clock))
    if found is None or not is_due(found, options.lifetime, clock):
        return found
    try:
        return refresh_checkpoint(manifests, found.id, clock=clock, lifetime=options.lifetime)
    except InvalidRequest:
        return None  # collected just now


def reusable(
    newest: Manifest, last_wal_id: WalId, manifests: ManifestStore, *, now_s: int
) -> Checkpoint | None:
    """The youngest checkpoint of plain loads, if its state equals the newest one. Reads at most one manifest."""
    shared = [
        each for each in newest.checkpoints if each.name == CHECKPOINT_NAME and not is_expired(each, now_s)
    ]
    youngest = max(shared, key=lambda each: each.manifest_id, default=None)
    if youngest is None:
        return None
    try:
        kept = manifests.load(youngest.manifest_id)
    except ObjectMissing:
        return None
    same = same_data(kept, newest) and kept.wal_id_last_seen == last_wal_id
    return youngest if same else None


def is_due(checkpoint: Checkpoint, lifetime: timedelta, clock: Clock) -> bool:
    """Whether less than half of the lifetime is left."""
    if checkpoint.expires_s is None:
        return False
    return clock.now_ms() / 1000 >= checkpoint.expires_s - lifetime.total_seconds() / 2


class Renewal:
    """Renews the checkpoint of a read while a task reads.

    It never fails a task. If it cannot renew the checkpoint, the checkpoint expires.
    """

    def __init__(self, held: CheckpointRead, expires_s: int | None) -> None:
        self._held = held
        self._clock = held.options.address.clock
        self._half_ms = int(held.options.lifetime.total_seconds() * 500)
        self._due_ms: int | None = None
        if held.renewed and expires_s is not None:
            self._due_ms = expires_s * 1000 - self._half_ms
            self.step()

    def step(self) -> None:
        """Renew the checkpoint if less than half of its life is left."""
        now_ms = self._clock.now_ms()
        if self._due_ms is None or now_ms < self._due_ms:
            return
        self._due_ms = now_ms + self._half_ms
        assert self._held.checkpoint is not None, "only a checkpoint has a due time"
        options = self._held.options
        manifests = open_manifests(options.address)
        try:
            if is_due(_entry(manifests, self._held.checkpoint), options.lifetime, self._clock):
                refresh_checkpoint(
                    manifests, UUID(self._held.checkpoint), clock=self._clock, lifetime=options.lifetime
                )
        except (FlagstoneError, AccessRefused) as error:
            _log.warning(
                "could not renew the checkpoint of a read id=%s error=%s", self._held.checkpoint, error
            )


def _entry(manifests: ManifestStore, checkpoint: str) -> Checkpoint:
    # Another task may have renewed it.
    latest = manifests.require_latest().value
    return require_live_checkpoint(latest, UUID(checkpoint), now_s=0)


@contextmanager
def explained(held: CheckpointRead) -> Iterator[None]:
    """Explain the error of a read whose SSTs are gone because nothing keeps them any more."""
    try:
        yield
    except (SstGone, CorruptData) as error:
        gone = error if isinstance(error, SstGone) else error.__cause__
        if not isinstance(gone, SstGone) or _is_kept(held):
            raise
        advice = (
            "a read with snapshot 'latest' has no checkpoint: read again, read with a checkpoint, or raise the minimum "
            "age of garbage collection"
            if held.checkpoint is None
            else "its checkpoint has expired: use flagstone.spark.read, which renews it, or raise checkpoint_lifetime"
        )
        raise Unavailable(
            f"garbage collection has deleted {gone.path}, which this read needs; {advice}"
        ) from error


def _is_kept(held: CheckpointRead) -> bool:
    if held.checkpoint is None:
        return False
    try:
        latest = open_manifests(held.options.address).require_latest().value
        require_live_checkpoint(latest, UUID(held.checkpoint), now_s=_now_s(held.options.address.clock))
    except InvalidRequest:
        return False
    return True


def _now_s(clock: Clock) -> int:
    return clock.now_ms() // 1000
