"""Reads that show one moment for as long as they are open: of a database, a reader or an address."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from uuid import UUID

from flagstone.clones import checkpoint as checkpoints
from flagstone.config import ReaderSettings
from flagstone.db.collections.collection import Collection
from flagstone.db.read_methods import ReadContext, Reads
from flagstone.db.reader.as_of import AsOf
from flagstone.db.reader.follower import ReaderParts
from flagstone.db.reader.reader import DbReader, ReaderMode, open_reader, prepare_reader
from flagstone.db.reader.reader_checkpoint import FormerCheckpoint, NoCheckpoint, ReaderCheckpoint
from flagstone.db.writer.database import Db
from flagstone.db.writer.transaction import Snapshot
from flagstone.errors import InvalidRequest
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.segments import SegmentExtractor
from flagstone.read.view import ReadView
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.store.remote_options import OptionValue
from flagstone.store.resolve import StoreLike
from flagstone.wal.frontier import find_frontier


class FrozenReads(Reads):
    """The reads of one view at one sequence number. A managed reader keeps the SSTs of the view while it is in use."""

    def __init__(self, reader: DbReader) -> None:
        self._reader = reader  # dropping the reader would close it
        self._context: ReadContext = reader._context  # noqa: SLF001 - reads of the same handle
        self._view, self._seq = reader._read_point(durable_only=False, dirty=False)  # noqa: SLF001

    @property
    def seq(self) -> int:
        """The sequence number of all reads."""
        return self._seq

    def _read_point(self, *, durable_only: bool, dirty: bool) -> tuple[ReadView, int]:  # noqa: ARG002 - all is durable
        self._reader._read_point(durable_only=False, dirty=False)  # noqa: SLF001 - raises if the reader is closed
        return self._view, self._seq

    def _refresh_read_point(self, seq: int, *, durable_only: bool, dirty: bool) -> tuple[ReadView, int]:  # noqa: ARG002
        return self._renewed(seq, self._view), seq

    def _renewed(self, seq: int, lost: ReadView) -> ReadView:
        self._view = super()._renewed(seq, lost)
        return self._view


def freeze(source: object) -> tuple[Reads, Callable[[], None]]:
    """Reads of the present moment of an open handle, and the call that releases what they hold.

    A database takes a snapshot of its own. A reader keeps its view. A snapshot is used as it is, and stays open.

    Raises:
        InvalidRequest: `source` is none of these.

    """
    match source:
        case Db():
            snapshot = source.snapshot(timeout=timedelta.max)
            return snapshot, snapshot.close
        case Snapshot():
            return source, _nothing
        case DbReader():
            return FrozenReads(source), _nothing
        case Collection():
            return freeze(source._handle)  # noqa: SLF001 - what it was declared with
    raise InvalidRequest(
        f"give the address of a database, or an open Db, DbReader, Snapshot or Collection, not {type(source).__name__}"
    )


def _nothing() -> None:
    pass


def open_frozen(
    path: str | os.PathLike[str],
    *,
    store: StoreLike | None = None,
    store_options: Mapping[str, OptionValue] | None = None,
    wal_store: StoreLike | None = None,
    checkpoint: UUID | str | None = None,
    as_of: AsOf | None = None,
    mode: ReaderMode = "managed",
    merge_operator: MergeOperator | None = None,
    segment_extractor: SegmentExtractor | None = None,
    settings: ReaderSettings | Mapping[str, Any] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    ids: Ids = SYSTEM_IDS,
) -> DbReader:
    """`open_reader`, but the reader shows the moment of its opening and does not follow the database.

    With `managed` it creates a checkpoint, refreshes it while it is open, and deletes it when it is closed; a crash
    leaves the checkpoint behind, and it expires. With `latest`, a `checkpoint` or an `as_of` in mode `latest` it writes
    nothing.
    """
    if mode not in ("managed", "latest"):
        raise InvalidRequest(f"mode is 'managed' or 'latest', not {mode!r}")
    stores: dict[str, Any] = {"store": store, "store_options": store_options, "wal_store": wal_store}
    others: dict[str, Any] = {
        "merge_operator": merge_operator,
        "segment_extractor": segment_extractor,
        "clock": clock,
        "ids": ids,
    }
    settings = ReaderSettings.of(settings)
    if checkpoint is not None or as_of is not None:
        return open_reader(
            path, **stores, checkpoint=checkpoint, as_of=as_of, mode=mode, settings=settings, **others
        )
    parts = prepare_reader(path, **stores, settings=settings, **others)
    shown: ReaderCheckpoint = NoCheckpoint(parts.manifests) if mode == "latest" else _hold(parts)
    tail = None if settings.skip_wal_replay else parts.tail
    follower = parts.follow(shown, tail, polls=mode == "managed")
    follower.start()
    return DbReader(follower, parts)


def _hold(parts: ReaderParts) -> FormerCheckpoint:
    """A new checkpoint of everything that is on the store now. An interrupt leaves it behind, and it expires."""
    latest = parts.manifests.require_latest().value
    frontier = find_frontier(parts.tail.wal_store, parts.paths, latest, pool=parts.tail.pool)
    lifetime = parts.settings.checkpoint_lifetime
    created, written = checkpoints.create_checkpoint(
        parts.manifests, clock=parts.clock, ids=parts.ids, lifetime=lifetime, last_wal_id=frontier
    )
    return FormerCheckpoint(
        parts.manifests, written, created, mode="frozen", lifetime=lifetime, clock=parts.clock
    )
