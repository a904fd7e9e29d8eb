"""Former states: which sequence number was current when, and which stored state shows a sequence number exactly.

Every flush and every compaction drops versions that nobody reads any more: of those up to some number, its barrier,
it keeps the newest per key. The manifest says what barriers were used: none above its `recent_snapshot_min_seq`,
which never shrinks. So the tables of a manifest show every number from that one on exactly, up to `last_l0_seq`;
numbers below may have lost versions. From `last_l0_seq` on the log has everything, and nobody ever rewrites it: tables
plus the log up to a number are that number exactly, provided that the log is all there. That is the whole rule:

    state s is shown exactly by a manifest with   readable_from(manifest) <= s
                                     and, above its last_l0_seq, by the log behind it

The latest manifest and those that checkpoints pin are such states. Of two that will do, the newer one has less log to
read. Log that a manifest had not seen when it was written is used only if it is without gaps in sequence numbers:
rows that never were in the log (a bulk load, a writer without a log) or a state that was restored show as a gap.

A compaction filter is beyond this: what it removes is gone for every number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from flagstone.errors import InvalidRequest
from flagstone.lsm.sequence import Rounding
from flagstone.metadata.manifest import NO_CLOCK_TICK, Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.types import MAX_SEQ, Seq

AsOf = int | datetime
"""A sequence number, or a moment with its time zone."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_ROUNDINGS: Final = ("down", "up")


@dataclass(frozen=True, slots=True)
class Moment:
    """What a reader shall show: everything up to a sequence number, or everything created up to a time."""

    seq: int | None = None
    time_ms: int | None = None

    def __str__(self) -> str:
        if self.time_ms is None:
            return f"sequence number {self.seq}"
        return datetime.fromtimestamp(self.time_ms / 1000, UTC).isoformat()


@dataclass(frozen=True, slots=True)
class Base:
    """A stored state to begin with: a manifest, and the checkpoint that pins it (None: it is the latest)."""

    manifest: Versioned[Manifest]
    checkpoint: UUID | None

    @property
    def trusts_log(self) -> bool:
        """Whether all rows behind its tables are in the log for certain: nobody flushed any since."""
        return self.checkpoint is None


def sequence_at(manifest: Manifest, time: datetime, rounding: Rounding = "down") -> int | None:
    """The sequence number that was current at `time`: the last known one before it (`up`: the first after it).

    A point is kept every minute at most, and less often in the distant past. None when there is none on that side.
    """
    seconds = (require_aware(time) - _EPOCH).total_seconds()
    # The tracker knows whole seconds: a part of one is past for those that look back, not yet for those ahead.
    whole = int(seconds // 1) if _checked(rounding) == "down" else -int(-seconds // 1)
    return manifest.sequence_tracker.sequence_at(whole, rounding)


def time_of(manifest: Manifest, sequence: int, rounding: Rounding = "down") -> datetime | None:
    """When `sequence` was current: the time of the last known number up to it (`up`: of the first from it on)."""
    if isinstance(sequence, bool) or not isinstance(sequence, int) or not 0 <= sequence <= MAX_SEQ:
        raise InvalidRequest(f"a sequence number is an integer from 0 to 2**64 - 1, not {sequence!r}")
    second = manifest.sequence_tracker.time_of(sequence, _checked(rounding))
    return None if second is None else datetime.fromtimestamp(second, UTC)


def require_aware(time: datetime) -> datetime:
    """The time itself; refuses one without a time zone, which could be any of twenty-four moments."""
    if not isinstance(time, datetime):
        raise InvalidRequest(f"a moment is a datetime with a time zone, not {time!r}")
    if time.tzinfo is None:
        raise InvalidRequest(f"{time!r} has no time zone; say which, for instance with tzinfo=datetime.UTC")
    return time


def check_as_of(as_of: AsOf, *, now_ms: int) -> Moment:
    """The moment that is meant. Raises `InvalidRequest` for one that is none, or that is yet to come."""
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
    """The smallest sequence number that the tables of a manifest show exactly."""
    barrier, flushed = manifest.recent_snapshot_min_seq, manifest.last_l0_seq
    # Zero says nothing: a union has it, whose tables come from histories with numbers of their own.
    return barrier if 0 < barrier <= flushed else flushed


def plan_base(bases: Iterable[Base], moment: Moment) -> tuple[Base, Moment]:
    """The state to begin with, and the moment in terms of it. Raises `InvalidRequest` when none shows the moment.

    `bases` come newest first, and are taken only as far as needed. A time that lies before everything in the tables
    of all states is looked up in the sequence tracker instead.
    """
    known: list[Base] = []
    if moment.time_ms is not None:
        for base in bases:
            known.append(base)
            if _created_by(base.manifest.value, moment.time_ms):
                return base, moment
        moment, bases = _tracked(moment, known), known
    assert moment.seq is not None, "a moment is a number or a time"
    known = []
    for base in bases:
        known.append(base)
        if readable_from(base.manifest.value) <= moment.seq:
            return base, moment
    raise InvalidRequest(
        f"{moment} is no longer to be had, versions of that age are being dropped; {_what_is_left(known)}"
    )


def _tracked(moment: Moment, bases: Sequence[Base]) -> Moment:
    """The last sequence number that is known to have been current at a time."""
    assert moment.time_ms is not None, "a time is asked for"
    # A point is from somewhere in its second; only if that was over by then, it was not later.
    second = (moment.time_ms - 999) // 1000
    found = bases[0].manifest.value.sequence_tracker.sequence_at(second) if bases else None
    if found is None:
        raise InvalidRequest(f"nothing is known of {moment}; {_what_is_left(bases)}")
    return Moment(found)


def _created_by(manifest: Manifest, time_ms: int) -> bool:
    """Whether everything in the tables was created by then. A union starts without a clock, so nobody knows."""
    if manifest.last_l0_clock_tick == NO_CLOCK_TICK:
        return manifest.last_l0_seq == 0
    return manifest.last_l0_clock_tick <= time_ms


def _what_is_left(bases: Sequence[Base]) -> str:
    if not bases:
        return "there is no state to begin with"
    first = min(readable_from(base.manifest.value) for base in bases)
    return f"what is kept begins at sequence number {first}: keep older states with checkpoints, and the log with a pin"


def _checked(rounding: str) -> Rounding:
    if rounding not in _ROUNDINGS:
        raise InvalidRequest(f"round 'down' or 'up', not {rounding!r}")
    return rounding  # type: ignore[return-value]
