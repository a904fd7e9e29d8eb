"""`flagstone.open_feed`: a whole database first, then every change to it, without a gap and without an overlap.

One manifest version brings both: a checkpoint, which shows the database at one sequence number, and the pin of the
consumer, which keeps the log behind the last file that this checkpoint shows. So what is committed later is in the
log that is kept, or in a bulk load that is, and what the consumer gets although the copy has it is told by its number.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn

from flagstone.config import ReaderSettings
from flagstone.db.as_of import FrozenPin
from flagstone.db.reader import DbReader, ReaderParts, prepare_reader
from flagstone.errors import InvalidRequest
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.segments import SegmentExtractor
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.store.remote_options import OptionValue
from flagstone.store.resolve import StoreLike
from flagstone.types import ManifestId, WalId
from flagstone.views import checkpoint as checkpoints
from flagstone.wal.changes import Position
from flagstone.wal.tail import WalReader


class ChangeFeed(WalReader):
    """What a consumer needs to keep a copy of a database: a snapshot when it begins, and all changes after it.

    Made by `flagstone.open_feed`. A consumer that comes for the first time finds `snapshot`, a reader that shows one
    moment; it copies what it wants of it and calls `copied`. Then, and whenever it comes back, `follow` brings every
    change after that moment in commit order. What was told with `commit` does not come again, what was not is kept.
    """

    _snapshot: DbReader | None = None

    @property
    def snapshot(self) -> DbReader | None:
        """The database at one moment, to be copied; None once the consumer has done that."""
        return self._snapshot

    @property
    def seq(self) -> int:
        """The sequence number up to which the consumer has everything, or will have when it has copied the snapshot."""
        if self._snapshot is not None:
            return int(self._snapshot.status()["last_seq"])
        position = self._pinned().position
        return 0 if position is None else max(position.after_seq, 0)

    def copied(self) -> None:
        """The snapshot was copied, and the copy is safe: from now on there are changes only.

        A consumer that crashes before this returns finds a new snapshot when it comes back.
        """
        if self._snapshot is None:
            return
        self._pinned().reach(self.seq)
        self._snapshot.close()
        self._snapshot = None

    def close(self) -> None:
        """Tell the store what was committed and let go of the snapshot; the pin stays. Closing twice is fine."""
        if self._snapshot is not None:
            self._snapshot.close()
        super().close()

    def __getstate__(self) -> NoReturn:
        raise InvalidRequest("a feed belongs to one process; open it where it is needed")

    def _prepare(self, parts: ReaderParts, *, ids: Ids) -> None:
        """Find the consumer's position, or prepare a snapshot for it."""
        clock, lifetime = parts.clock, parts.settings.checkpoint_lifetime
        checkpoint_id = ids.uuid()

        def decide(now: Versioned[Manifest], held: Position | None) -> tuple[Manifest, Position]:
            if held is not None and held.copied:
                return now.value, held
            checkpoints.require_initialized(now.value)
            now_s = clock.now_ms() // 1000
            expires_s = checkpoints.expiry(now_s, lifetime)
            pinned = Checkpoint(checkpoint_id, ManifestId(now.next_id), now_s, expires_s)
            shown = max(now.value.wal_id_last_seen, now.value.replay_after_wal_id)
            begins = Position(WalId(shown + 1), now.value.last_l0_seq, copied=False)
            return add_checkpoint(now.value, pinned), begins

        position, written = self._pinned().place(decide)
        if position.copied:
            return
        held = checkpoints.require_checkpoint(written.value, checkpoint_id)
        pin = FrozenPin(
            parts.manifests,
            written,
            held,
            mode="snapshot",
            lifetime=lifetime,
            clock=clock,
            tend=self._pinned().tend,
        )
        following = parts.follow(pin, parts.tail)
        following.start()
        self._snapshot = parts.reader(following)


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
    settings: ReaderSettings | None = None,
    clock: Clock = SYSTEM_CLOCK,
    ids: Ids = SYSTEM_IDS,
) -> ChangeFeed:
    """Begin, or go on, copying a database and following its changes under the name `consumer`.

    Addresses are those of `flagstone.open`. The log is kept for the consumer from here on, by every garbage
    collector, SlateDB's included, also while it is away: for `lifetime`, or until `release`. Two processes must not
    use one name at the same time.

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
        settings=settings or ReaderSettings(),
        clock=clock,
        ids=ids,
    )
    options: dict[str, Any] = {"store": store, "store_options": store_options, "wal_store": wal_store}
    feed = ChangeFeed(path, pin=consumer, pin_lifetime=lifetime, clock=clock, ids=ids, **options)
    feed._prepare(parts, ids=ids)  # noqa: SLF001 - the second half of making it
    return feed
