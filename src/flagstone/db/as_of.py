"""A reader of a former state: which manifest it begins with, what keeps that one, and how much log it adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Final, Protocol
from uuid import UUID

from flagstone.db.following import Following, LogTail
from flagstone.db.pins import Pin, check_readable, same_data
from flagstone.errors import InvalidRequest, Unavailable
from flagstone.metadata.manifest import Checkpoint, Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.read.view import ReadView
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.store.port import ObjectMissing
from flagstone.types import EntryTuple, WalId
from flagstone.views import checkpoint as checkpoints
from flagstone.views.history import Base, Moment, check_as_of, plan_base, readable_from
from flagstone.wal.encoding import decode_wal
from flagstone.wal.fetching import fetch_in_order
from flagstone.wal.listing import find_frontier
from flagstone.wal.replay import WalTruncated

_ATTEMPTS: Final = 5


class FrozenPin:
    """Shows one manifest for good, and holds it with a checkpoint of the reader's own, which it refreshes.

    Without a `checkpoint` it holds nothing: somebody else's does, or the reader takes its chances. A crash leaves the
    checkpoint behind, and it expires. `tend` is called whenever the reader polls.
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
        tend: Callable[[], None] = lambda: None,
    ) -> None:
        self.mode = mode
        self._tend = tend
        self._manifests = manifests
        self._manifest = manifest
        self._checkpoint = checkpoint
        self._lifetime = lifetime
        self._clock = clock

    def advance(self) -> Versioned[Manifest]:
        """The same manifest again. Raises `InvalidRequest` when its checkpoint is gone."""
        self._tend()
        held = self._checkpoint
        if held is not None and held.expires_s is not None and self._lifetime is not None:
            half_life_s = self._lifetime.total_seconds() / 2
            if self._clock.now_ms() / 1000 >= held.expires_s - half_life_s:
                self._checkpoint = checkpoints.refresh_checkpoint(
                    self._manifests, held.id, clock=self._clock, lifetime=self._lifetime
                )
        return self._manifest

    def log_end(self, manifest: Manifest) -> WalId | None:
        return manifest.wal_id_last_seen

    def lend(self, view: ReadView) -> ReadView:
        return view

    def release(self) -> None:
        """Delete the checkpoint. A store that does not answer keeps it until it expires."""
        held, self._checkpoint = self._checkpoint, None
        if held is not None:
            try:
                checkpoints.delete_checkpoint(self._manifests, held.id)
            except Unavailable:
                return

    def status(self) -> dict[str, Any]:
        held = self._checkpoint
        return {
            "checkpoint": None if held is None else str(held.id),
            "checkpoint_expires_s": None if held is None else held.expires_s,
        }


class FormerTail(LogTail):
    """The rows of the log between the tables of a base and a moment. Read once, at the first `follow`."""

    def __init__(self, like: LogTail, base: Base, moment: Moment) -> None:
        self._base = base
        self._moment = moment
        self._complete = False
        super().__init__(
            like.wal_store, like.paths, max_memtable_bytes=like.max_memtable_bytes, pool=like.pool
        )

    def restart(self) -> None:
        self._complete = False
        super().restart()

    def follow(self, manifest: Manifest, last: WalId | None) -> None:  # noqa: ARG002 - the moment says how far
        """Read the log up to the moment.

        Raises:
            InvalidRequest: the log does not reach that far, or a part of it is missing.

        """
        seq = self._moment.seq
        if self._complete or (seq is not None and seq <= manifest.last_l0_seq):
            return
        self._parts_up_to(manifest)
        self._complete = True

    def _parts_up_to(self, manifest: Manifest) -> None:
        seen, moment = int(manifest.last_l0_seq), self._moment
        for wal_id, rows in self._files(manifest):
            fresh = [row for row in rows if row[1] > manifest.last_l0_seq]
            if not fresh:
                continue
            shown = list(_until(fresh, moment))
            if not self._base.trusts_log and wal_id > manifest.wal_id_last_seen:
                # With the first row beyond the moment: what is missing before it may belong to the moment.
                _check_gapless(seen, fresh[: len(shown) + 1], moment)
            self._add(shown)
            if len(shown) < len(fresh) or shown[-1][1] == moment.seq:
                return
            seen = shown[-1][1]
        if not self._base.trusts_log:
            raise InvalidRequest(f"the log ends at sequence number {seen}, before {moment}: {_MISSING}")
        if moment.seq is not None:
            raise InvalidRequest(f"{moment} has not come yet: what is on the store ends at {seen}")

    def _files(self, manifest: Manifest) -> Iterator[tuple[WalId, list[EntryTuple]]]:
        after = manifest.replay_after_wal_id
        end = find_frontier(
            self.wal_store,
            self.paths,
            after,
            expected=max(after, manifest.wal_id_last_seen),
            pool=self.pool,
        )
        wal_ids = (WalId(wal_id) for wal_id in range(after + 1, end + 1))
        for wal_id, stored in fetch_in_order(self.wal_store, self.paths, wal_ids, pool=self.pool):
            if stored is None and self._base.trusts_log:
                raise WalTruncated(f"file {wal_id} of the log was collected: its rows are in tables by now")
            if stored is None:
                raise InvalidRequest(f"file {wal_id} of the log was collected: {_MISSING}")
            yield wal_id, decode_wal(stored, self.paths.wal(wal_id))


_MISSING: Final = (
    "what was written between the checkpoint and that moment is not kept any more; choose the moment of a checkpoint, "
    "and for others keep the log with a pin"
)


def _check_gapless(seen: int, rows: Iterable[EntryTuple], moment: Moment) -> None:
    for row in rows:
        if row[1] > seen + 1:
            raise InvalidRequest(
                f"sequence numbers {seen + 1} to {row[1] - 1} are not in the log, so the state at {moment} cannot be "
                "told: they came by a bulk load or without a log, or an older state was restored; choose the moment of "
                "a checkpoint"
            )
        seen = row[1]


def _until(rows: Iterable[EntryTuple], moment: Moment) -> Iterator[EntryTuple]:
    """The rows up to the moment; a batch has one number and one time, so it is in or out as a whole."""
    for row in rows:
        _, seq, _, _, created_ms, _ = row
        if moment.seq is not None and seq > moment.seq:
            return
        if moment.time_ms is not None:
            if created_ms is None:
                raise InvalidRequest(
                    f"row {seq} of the log has no time; choose a sequence number, not {moment}"
                )
            if created_ms > moment.time_ms:
                return
        yield row


class Follow(Protocol):
    """Makes the part of a reader that follows, or in this case stays."""

    def __call__(self, pin: Pin, tail: LogTail | None, *, max_seq: int | None) -> Following: ...


class FormerState:
    """Finds the stored state that shows a moment, holds it and opens it."""

    def __init__(self, manifests: ManifestStore, moment: Moment, *, clock: Clock, ids: Ids) -> None:
        self._manifests = manifests
        self._moment = moment
        self._clock = clock
        self._ids = ids

    def open(
        self, follow: Follow, tail: LogTail, *, only: UUID | None, lifetime: timedelta | None, hold: bool
    ) -> Following:
        """A reader's state at the moment; `hold` pins it for as long as the reader is open.

        `only` names a checkpoint to use instead of the latest manifest and all checkpoints.
        """
        for _ in range(_ATTEMPTS):
            latest = self._manifests.require_latest()
            check_readable(latest.value)
            base, moment = plan_base(self._bases(latest, only), self._moment)
            held = self._held(base, lifetime) if hold else None
            pin = FrozenPin(
                self._manifests,
                base.manifest,
                None if held is None else held[0],
                mode="as_of",
                lifetime=lifetime,
                clock=self._clock,
            )
            if held is not None and base.trusts_log and not same_data(base.manifest.value, held[1]):
                pin.release()  # what was flushed in the meantime may have dropped versions of that moment
                continue
            following = follow(pin, FormerTail(tail, base, moment), max_seq=moment.seq)
            try:
                following.start()
            except WalTruncated:
                continue
            if self._still_trusted(base, moment):
                return following
            following.close()
        raise Unavailable("the database is flushed faster than a former state can be read; try again")

    def _held(self, base: Base, lifetime: timedelta | None) -> tuple[Checkpoint, Manifest]:
        checkpoint, written = checkpoints.create_checkpoint(
            self._manifests, clock=self._clock, ids=self._ids, lifetime=lifetime, source=base.checkpoint
        )
        return checkpoint, written.value

    def _still_trusted(self, base: Base, moment: Moment) -> bool:
        """Whether what was read of the log continues the tables: nobody has put rows into tables since."""
        flushed = base.manifest.value.last_l0_seq
        if not base.trusts_log or (moment.seq is not None and moment.seq <= flushed):
            return True
        return self._manifests.require_latest().value.last_l0_seq == flushed

    def _bases(self, latest: Versioned[Manifest], only: UUID | None) -> Iterator[Base]:
        """Newest first; each manifest is loaded when it is asked for."""
        now_s = self._clock.now_ms() // 1000
        if only is None:
            yield Base(latest, None)
            wanted = [entry for entry in latest.value.checkpoints if not checkpoints.is_expired(entry, now_s)]
        else:
            wanted = [checkpoints.require_checkpoint(latest.value, only)]
        # Of several that name one manifest the one that lives longest.
        by_manifest = {entry.manifest_id: entry for entry in sorted(wanted, key=_expiry)}
        for manifest_id in sorted(by_manifest, reverse=True):
            try:
                manifest = self._manifests.load(manifest_id)
            except ObjectMissing:
                continue  # collected since we looked
            if manifest.initialized:  # a pin of the log is not, and shows nothing
                yield Base(Versioned(manifest_id, manifest), by_manifest[manifest_id].id)


def _expiry(checkpoint: Checkpoint) -> float:
    return math.inf if checkpoint.expires_s is None else checkpoint.expires_s


def check_kept(as_of: int, committed_seq: int, manifest: Manifest, frozen_seqs: Iterable[int]) -> int:
    """The number itself, if a writer can show it exactly and, from now on, keep it.

    Memtables on their way into tables may be losing versions already, so the number must not lie in one of them.
    """
    if not isinstance(as_of, int):
        raise InvalidRequest(
            f"a snapshot is taken at a sequence number, not {as_of!r}; open_reader takes times"
        )
    moment = check_as_of(as_of, now_ms=0)
    assert moment.seq is not None, "it is a number"
    if moment.seq > committed_seq:
        raise InvalidRequest(f"{moment} has not come yet: the database is at {committed_seq}")
    lowest = max([int(readable_from(manifest)), *frozen_seqs])
    if moment.seq < lowest:
        raise InvalidRequest(
            f"the open database shows nothing before sequence number {lowest}, and so not {moment}; "
            "flagstone.open_reader(..., as_of=...) finds it where checkpoints and the log are kept"
        )
    return moment.seq
