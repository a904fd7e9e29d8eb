"""`flagstone.open_feed`: first a snapshot of the database, then every change to it, without a gap or an overlap.

One manifest adds both a reader checkpoint, which shows the database at one sequence number, and the consumer's
retention checkpoint, which keeps the WAL files after the last one that the reader checkpoint shows. Every later commit
is therefore in a WAL file or bulk load that is kept. Changes that the snapshot already contains are skipped by their
sequence numbers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

from flagstone.changes.reader import WalReader
from flagstone.clones import checkpoint as checkpoints
from flagstone.config import ReaderSettings
from flagstone.db.opening import suggests_options
from flagstone.db.reader.follower import ReaderParts
from flagstone.db.reader.reader import DbReader, prepare_reader
from flagstone.db.reader.reader_checkpoint import FormerCheckpoint
from flagstone.errors import InvalidRequest
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.segments import SegmentExtractor
from flagstone.metadata.annotations import Position
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.store.remote_options import OptionValue
from flagstone.store.resolve import StoreLike
from flagstone.types import ManifestId, WalId


class ChangeFeed(WalReader):
    """A snapshot when a consumer begins, and then all changes after it: enough to keep a copy of a database.

    Made by `flagstone.open_feed`. A new consumer finds `snapshot`, a reader that shows one moment; it copies what it
    needs and calls `copied`. From then on, also after a restart, `follow` yields every change after that moment in
    commit order. Batches passed to `commit` are not yielded again; all others are kept.
    """

    _snapshot: DbReader | None = None

    @property
    def snapshot(self) -> DbReader | None:
        """The database at one moment, to be copied; None once the consumer has copied it."""
        return self._snapshot

    @property
    def seq(self) -> int:
        """The sequence number up to which the consumer has all changes, or will have after copying the snapshot."""
        if self._snapshot is not None:
            return int(self._snapshot.status()["last_seq"])
        position = self._require_consumer().position
        return 0 if position is None else max(position.after_seq, 0)

    def copied(self) -> None:
        """Record that the copy of the snapshot is stored: from now on the consumer receives changes only.

        A consumer that crashes before this returns finds a new snapshot when it restarts.
        """
        if self._snapshot is None:
            return
        self._require_consumer().reach(self.seq)
        self._snapshot.close()
        self._snapshot = None

    def close(self) -> None:
        """Store what was committed and close the snapshot. The retention checkpoint stays. Closing twice is fine."""
        if self._snapshot is not None:
            self._snapshot.close()
        super().close()

    def __getstate__(self) -> NoReturn:
        raise InvalidRequest(
            "a feed belongs to one process and does not pickle; open it in the process that uses it"
        )

    def _prepare(self, parts: ReaderParts) -> None:
        """Find the consumer's position, or prepare a snapshot for it."""
        clock, lifetime = parts.clock, parts.settings.checkpoint_lifetime
        checkpoint_id = parts.ids.uuid()

        def decide(now: Versioned[Manifest], held: Position | None) -> tuple[Manifest, Position]:
            if held is not None and held.copied:
                return now.value, held
            checkpoints.require_initialized(now.value)
            now_s = clock.now_ms() // 1000
            expires_s = checkpoints.expiry(now_s, lifetime)
            created = Checkpoint(checkpoint_id, ManifestId(now.next_id), now_s, expires_s)
            shown = max(now.value.wal_id_last_seen, now.value.replay_after_wal_id)
            begins = Position(WalId(shown + 1), now.value.last_l0_seq, copied=False)
            return add_checkpoint(now.value, created), begins

        position, written = self._require_consumer().set(decide)
        if position.copied:
            return
        held = checkpoints.require_checkpoint(written.value, checkpoint_id)
        checkpoint = FormerCheckpoint(
            parts.manifests,
            written,
            held,
            mode="snapshot",
            lifetime=lifetime,
            clock=clock,
            on_poll=self._require_consumer().tend,
        )
        follower = parts.follow(checkpoint, parts.tail)
        follower.start()
        self._snapshot = DbReader(follower, parts)


@suggests_options("flagstone.open_feed")
def open_feed(
    path: str | os.PathLike[str],
    consumer: str,
    *,
    store: StoreLike | None = None,
    store_options: Mapping[str, OptionValue] | None = None,
    wal_store: StoreLike | None = None,
    lifetime: timedelta | str | None = None,
    merge_operator: MergeOperator | None = None,
    segment_extractor: SegmentExtractor | None = None,
    include_system: bool = False,
    settings: ReaderSettings | Mapping[str, Any] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    ids: Ids = SYSTEM_IDS,
) -> ChangeFeed:
    """Begin, or continue, to copy a database and to follow its changes under the name `consumer`.

    Addresses are those of `flagstone.open`. A retention checkpoint keeps the WAL for the consumer from now on, also
    while it is not running, for `lifetime` or until `release`; every garbage collector, SlateDB's included, respects
    it. Two processes must not use one name at the same time. The changes leave
    system rows out unless `include_system`; a scan of the snapshot has an argument of that name.

    Raises:
        InvalidRequest: there is no database, or an argument does not fit it.
        Unavailable: the store did not answer.

    """
    parts = prepare_reader(
        path,
        store=store,
        store_options=store_options,
        wal_store=wal_store,
        merge_operator=merge_operator,
        segment_extractor=segment_extractor,
        settings=ReaderSettings.of(settings),
        clock=clock,
        ids=ids,
    )
    options: dict[str, Any] = {
        "store": store,
        "store_options": store_options,
        "wal_store": wal_store,
        "include_system": include_system,
    }
    feed = ChangeFeed(path, pin=consumer, pin_lifetime=lifetime, clock=clock, ids=ids, **options)
    feed._prepare(parts)  # noqa: SLF001 - the second half of making it
    return feed
