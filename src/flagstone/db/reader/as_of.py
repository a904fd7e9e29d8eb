"""Former states: which sequence number was current when, and which stored state shows a sequence number exactly.

Every flush and every compaction drops versions that no read can need: of the versions up to some sequence number, its
barrier, it keeps the newest per key. The manifest records the barriers: none is above its `recent_snapshot_min_seq`,
which never decreases. So the SSTs of a manifest show every sequence number from there up to `last_l0_seq` exactly;
smaller ones may have lost versions. Every row above `last_l0_seq` is in the WAL, which is never rewritten: the SSTs
plus the WAL up to a sequence number show it exactly, if no part of the WAL is missing. In short:

    a manifest shows sequence number s exactly if   readable_from(manifest) <= s
                                     and, above its last_l0_seq, the WAL after it is complete

The latest manifest and those of checkpoints are such states. If two of them can show s, the newer one has less WAL to
read. WAL files that did not exist when a manifest was written are used only if their sequence numbers have no gap:
rows that never were in the WAL (a bulk load, a writer without a WAL) or a restored state leave a gap.

What a compaction filter removes is gone for every sequence number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from flagstone.clones import checkpoint as checkpoints
from flagstone.db.reader.follower import Follower, ReaderParts, WalTail
from flagstone.db.reader.reader_checkpoint import (
    FormerCheckpoint,
    check_readable,
    same_data,
)
from flagstone.errors import InvalidRequest, Unavailable
from flagstone.lsm.sequence import Rounding
from flagstone.metadata.manifest import NO_CLOCK_TICK, Checkpoint, Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.store.port import ObjectMissing
from flagstone.types import MAX_SEQ, EntryTuple, Seq, WalId
from flagstone.wal.frontier import find_frontier
from flagstone.wal.replay import WalTruncated, decode_wal, fetch_in_order

AsOf = int | datetime
"""A sequence number, or a moment with its time zone."""

_ATTEMPTS: Final = 5
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ROUNDINGS: Final = ("down", "up")


@dataclass(frozen=True, slots=True)
class Moment:
    """What a reader has to show: everything up to a sequence number, or everything created up to a time."""

    seq: int | None = None
    time_ms: int | None = None

    def __str__(self) -> str:
        if self.time_ms is None:
            return f"sequence number {self.seq}"
        return datetime.fromtimestamp(self.time_ms / 1000, UTC).isoformat()


@dataclass(frozen=True, slots=True)
class Base:
    """A stored state to begin with: a manifest, and the checkpoint that holds it (None: it is the latest)."""

    manifest: Versioned[Manifest]
    checkpoint: UUID | None

    @property
    def wal_complete(self) -> bool:
        """Whether all rows above its SSTs are in the WAL for certain: no flush came after it."""
        return self.checkpoint is None


def sequence_at(manifest: Manifest, time: datetime, rounding: Rounding = "down") -> int | None:
    """The sequence number that was current at `time`: the last known one before it (`up`: the first after it).

    The manifest keeps at most one point per minute, and fewer for the distant past. None if it has none on that side.
    """
    seconds = (require_aware(time) - _EPOCH).total_seconds()
    # The tracker stores whole seconds: rounding down drops a part of a second, rounding up completes it.
    whole = int(seconds // 1) if _checked(rounding) == "down" else -int(-seconds // 1)
    return manifest.sequence_tracker.sequence_at(whole, rounding)


def time_of(manifest: Manifest, sequence: int, rounding: Rounding = "down") -> datetime | None:
    """When `sequence` was current: the time of the last known sequence number up to it (`up`: the first from it on)."""
    if isinstance(sequence, bool) or not isinstance(sequence, int) or not 0 <= sequence <= MAX_SEQ:
        raise InvalidRequest(f"a sequence number is an integer from 0 to 2**64 - 1, not {sequence!r}")
    second = manifest.sequence_tracker.time_of(sequence, _checked(rounding))
    return None if second is None else datetime.fromtimestamp(second, UTC)


def require_aware(time: datetime) -> datetime:
    """The time itself. Raises `InvalidRequest` if it has no time zone, because it is then ambiguous."""
    if not isinstance(time, datetime):
        raise InvalidRequest(f"a moment is a datetime with a time zone, not {time!r}")
    if time.tzinfo is None:
        raise InvalidRequest(f"{time!r} has no time zone; add one, for instance tzinfo=datetime.UTC")
    return time


def check_as_of(as_of: AsOf, *, now_ms: int) -> Moment:
    """The moment of an `as_of` argument. Raises `InvalidRequest` if it is neither kind, or in the future."""
    if isinstance(as_of, datetime):
        time_ms = int((require_aware(as_of) - _EPOCH).total_seconds() * 1000 // 1)
        if time_ms > now_ms:
            raise InvalidRequest(
                f"{as_of.isoformat()} has not come yet; read without as_of to see what is new"
            )
        return Moment(time_ms=time_ms)
    if isinstance(as_of, bool) or not isinstance(as_of, int) or not 0 <= as_of <= MAX_SEQ:
        raise InvalidRequest(f"as_of is a sequence number or a datetime with a time zone, not {as_of!r}")
    return Moment(seq=as_of)


def readable_from(manifest: Manifest) -> Seq:
    """The smallest sequence number that the SSTs of a manifest show exactly."""
    barrier, flushed = manifest.recent_snapshot_min_seq, manifest.last_l0_seq
    # A union has zero, which bounds nothing: its SSTs come from databases with sequence numbers of their own.
    return barrier if 0 < barrier <= flushed else flushed


def plan_base(bases: Iterable[Base], moment: Moment) -> tuple[Base, Moment]:
    """The state to begin with, and the moment as it applies to it. Raises `InvalidRequest` if no state shows it.

    `bases` come newest first, and only as many as needed are taken. If a time is before everything in the SSTs of all
    states, the sequence tracker translates it to a sequence number.
    """
    known: list[Base] = []
    if moment.time_ms is not None:
        for base in bases:
            known.append(base)
            if _created_by(base.manifest.value, moment.time_ms):
                return base, moment
        moment, bases = _tracked(moment, known), known
    assert moment.seq is not None, "a moment is a sequence number or a time"
    known = []
    for base in bases:
        known.append(base)
        if readable_from(base.manifest.value) <= moment.seq:
            return base, moment
    raise InvalidRequest(
        f"{moment} cannot be shown: versions of that age may have been dropped; {_what_is_left(known)}"
    )


def _tracked(moment: Moment, bases: Sequence[Base]) -> Moment:
    """The last sequence number that is known to have been current at a time."""
    assert moment.time_ms is not None, "a time is asked for"
    # A point was taken at some time in its second: it is not later than the moment only if that second was over.
    second = (moment.time_ms - 999) // 1000
    found = bases[0].manifest.value.sequence_tracker.sequence_at(second) if bases else None
    if found is None:
        raise InvalidRequest(f"no sequence number is known for {moment}; {_what_is_left(bases)}")
    return Moment(found)


def _created_by(manifest: Manifest, time_ms: int) -> bool:
    """Whether everything in the SSTs was created by then. Unknown for a union, which starts without a clock."""
    if manifest.last_l0_clock_tick == NO_CLOCK_TICK:
        return manifest.last_l0_seq == 0
    return manifest.last_l0_clock_tick <= time_ms


def _what_is_left(bases: Sequence[Base]) -> str:
    if not bases:
        return "there is no state to begin with"
    first = min(readable_from(base.manifest.value) for base in bases)
    return (
        f"what is kept begins at sequence number {first}: keep older states with checkpoints, and the WAL with a "
        "retention checkpoint (WalReader(pin=...))"
    )


def _checked(rounding: str) -> Rounding:
    if rounding not in _ROUNDINGS:
        raise InvalidRequest(f"round 'down' or 'up', not {rounding!r}")
    return rounding  # type: ignore[return-value]


class FormerTail(WalTail):
    """The rows of the WAL between the SSTs of a base and a moment. Read once, at the first `follow`."""

    def __init__(self, like: WalTail, base: Base, moment: Moment) -> None:
        self._base = base
        self._moment = moment
        self._complete = False
        super().__init__(
            like.wal_store, like.paths, max_memtable_bytes=like.max_memtable_bytes, pool=like.pool
        )

    def restart(self) -> None:
        self._complete = False
        super().restart()

    def follow(self, manifest: Manifest, last: WalId | None) -> None:  # noqa: ARG002 - the moment is the end
        """Read the WAL up to the moment.

        Raises:
            InvalidRequest: the WAL ends before the moment, or a part of it is missing.

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
            if not self._base.wal_complete and wal_id > manifest.wal_id_last_seen:
                # Includes the first row after the moment: a row missing before it may belong to the moment.
                _check_gapless(seen, fresh[: len(shown) + 1], moment)
            self._add(shown)
            if len(shown) < len(fresh) or shown[-1][1] == moment.seq:
                return
            seen = shown[-1][1]
        if not self._base.wal_complete:
            raise InvalidRequest(f"the WAL ends at sequence number {seen}, before {moment}: {_MISSING}")
        if moment.seq is not None:
            raise InvalidRequest(
                f"{moment} has not come yet: the last sequence number on the store is {seen}"
            )

    def _files(self, manifest: Manifest) -> Iterator[tuple[WalId, list[EntryTuple]]]:
        after = manifest.replay_after_wal_id
        end = find_frontier(self.wal_store, self.paths, manifest, pool=self.pool)
        wal_ids = (WalId(wal_id) for wal_id in range(after + 1, end + 1))
        for wal_id, stored in fetch_in_order(self.wal_store, self.paths, wal_ids, pool=self.pool):
            if stored is None and self._base.wal_complete:
                raise WalTruncated(f"WAL file {wal_id} was collected: its rows are in SSTs by now")
            if stored is None:
                raise InvalidRequest(f"WAL file {wal_id} was collected: {_MISSING}")
            yield wal_id, decode_wal(stored, self.paths.wal(wal_id))


_MISSING: Final = (
    "what was written between the checkpoint and that moment is no longer stored; choose the moment of a checkpoint, "
    "and keep the WAL with a retention checkpoint (WalReader(pin=...)) to read other moments"
)


def _check_gapless(seen: int, rows: Iterable[EntryTuple], moment: Moment) -> None:
    for row in rows:
        if row[1] > seen + 1:
            raise InvalidRequest(
                f"sequence numbers {seen + 1} to {row[1] - 1} are not in the WAL, so the state at {moment} is unknown: "
                "a bulk load or a writer without a WAL wrote them, or an older state was restored; choose the moment "
                "of a checkpoint"
            )
        seen = row[1]


def _until(rows: Iterable[EntryTuple], moment: Moment) -> Iterator[EntryTuple]:
    """The rows up to the moment. All rows of a batch share sequence number and time, so no batch is split."""
    for row in rows:
        _, seq, _, _, created_ms, _ = row
        if moment.seq is not None and seq > moment.seq:
            return
        if moment.time_ms is not None:
            if created_ms is None:
                raise InvalidRequest(
                    f"the WAL row with sequence number {seq} has no time; choose a sequence number instead of {moment}"
                )
            if created_ms > moment.time_ms:
                return
        yield row


class FormerState:
    """Finds the stored state that shows a moment, holds it and opens it."""

    def __init__(self, parts: ReaderParts, moment: Moment) -> None:
        self._parts = parts
        self._manifests = parts.manifests
        self._moment = moment

    def open(self, *, only: UUID | None, hold: bool) -> Follower:
        """A started follower that shows the moment; `hold` adds a reader checkpoint for as long as it is open.

        `only` names a checkpoint to use instead of the latest manifest and all checkpoints.
        """
        parts = self._parts
        for _ in range(_ATTEMPTS):
            latest = self._manifests.require_latest()
            check_readable(latest.value)
            base, moment = plan_base(self._bases(latest, only), self._moment)
            held = self._held(base) if hold else None
            checkpoint = FormerCheckpoint(
                self._manifests,
                base.manifest,
                None if held is None else held[0],
                mode="as_of",
                lifetime=parts.settings.checkpoint_lifetime,
                clock=parts.clock,
            )
            if held is not None and base.wal_complete and not same_data(base.manifest.value, held[1]):
                checkpoint.release()  # a flush since then may have dropped versions of that moment
                continue
            follower = parts.follow(checkpoint, FormerTail(parts.tail, base, moment), max_seq=moment.seq)
            try:
                follower.start()
            except WalTruncated:
                continue
            if self._wal_still_complete(base, moment):
                return follower
            follower.close()
        raise Unavailable("the writer flushes faster than a former state can be read; try again")

    def _held(self, base: Base) -> tuple[Checkpoint, Manifest]:
        checkpoint, written = checkpoints.create_checkpoint(
            self._manifests,
            clock=self._parts.clock,
            ids=self._parts.ids,
            lifetime=self._parts.settings.checkpoint_lifetime,
            source=base.checkpoint,
        )
        return checkpoint, written.value

    def _wal_still_complete(self, base: Base, moment: Moment) -> bool:
        """Whether the WAL rows that were read continue the SSTs: no flush has moved rows to SSTs since."""
        flushed = base.manifest.value.last_l0_seq
        if not base.wal_complete or (moment.seq is not None and moment.seq <= flushed):
            return True
        return self._manifests.require_latest().value.last_l0_seq == flushed

    def _bases(self, latest: Versioned[Manifest], only: UUID | None) -> Iterator[Base]:
        """The states to choose from, newest first. Each manifest is loaded when the iteration reaches it."""
        now_s = self._parts.clock.now_ms() // 1000
        if only is None:
            yield Base(latest, None)
            wanted = [entry for entry in latest.value.checkpoints if not checkpoints.is_expired(entry, now_s)]
        else:
            wanted = [checkpoints.require_checkpoint(latest.value, only)]
        # Of several checkpoints of one manifest, take the one that expires last.
        by_manifest = {entry.manifest_id: entry for entry in sorted(wanted, key=_expiry)}
        for manifest_id in sorted(by_manifest, reverse=True):
            try:
                manifest = self._manifests.load(manifest_id)
            except ObjectMissing:
                continue  # collected since the latest manifest was read
            if manifest.initialized:  # the manifest of a retention checkpoint is not, and shows nothing
                yield Base(Versioned(manifest_id, manifest), by_manifest[manifest_id].id)


def _expiry(checkpoint: Checkpoint) -> float:
    return math.inf if checkpoint.expires_s is None else checkpoint.expires_s


def check_kept(as_of: int, committed_seq: int, manifest: Manifest, frozen_seqs: Iterable[int]) -> int:
    """The sequence number itself, if a writer can show it exactly and, from now on, keep it.

    A flush in progress may already drop versions, so the number must not lie in a frozen memtable.
    """
    if not isinstance(as_of, int):
        raise InvalidRequest(
            f"a snapshot is taken at a sequence number, not {as_of!r}; open_reader takes times"
        )
    moment = check_as_of(as_of, now_ms=0)
    assert moment.seq is not None, "an integer gives a sequence number"
    if moment.seq > committed_seq:
        raise InvalidRequest(f"{moment} has not come yet: the database is at {committed_seq}")
    lowest = max([int(readable_from(manifest)), *frozen_seqs])
    if moment.seq < lowest:
        raise InvalidRequest(
            f"the open database cannot show {moment}, only sequence number {lowest} and later; "
            "flagstone.open_reader(..., as_of=...) can, if a checkpoint or the WAL of that time is kept"
        )
    return moment.seq
