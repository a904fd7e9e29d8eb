"""Bulk loads among the changes: where they stand, and how long their rows are kept for whom. Pure.

The rows of a load are in tables and never were in the log. The manifest version that brings a load also has its mark,
a checkpoint of that very version: whoever follows the changes finds there what the log lacks, and no collector takes
the tables away. A mark lives for fifteen minutes, for consumers that nobody knows of, and as long as there is a pin
that has yet to pass the load. So whoever adds a load, and whoever sets, moves or releases a pin, settles the marks with
the same manifest version: nobody can pass between the two.

A load that replaces all that was there cannot be told as changes: nobody knows which keys it took away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from flagstone.errors import InvalidRequest
from flagstone.metadata.hand_over import HeldMark, LoadMark, LoadPlace, held_marks
from flagstone.metadata.manifest import Manifest, add_checkpoint, remove_checkpoint
from flagstone.types import ManifestId, Seq
from flagstone.wal.changes import Position

MARK_LIFETIME_S: Final = 15 * 60
"""How long the rows of a load, or what it replaced, are kept when no pin needs them: as after a compaction."""

_SPARE_MARKS: Final = 16
"""How many marks stay that no pin needs: a stream into a database makes one with each of its micro-batches."""


class ToldLoad(NamedTuple):
    """A load that consumers of changes can find: its number, its place, and the version that has its tables."""

    seq: Seq
    place: LoadPlace
    manifest_id: ManifestId
    replaces: bool


class Waiting(NamedTuple):
    """A pin: where its consumer stands, and until when it is waited for; None for ever."""

    position: Position
    expires_s: int | None


def is_ahead(position: Position, seq: int, place: LoadPlace) -> bool:
    """Whether a consumer has yet to pass the load of that number and place.

    Who began at a file of the log and has seen nothing yet gets the loads that came behind the file before that one.
    """
    if position.after_seq >= 0:
        return seq > position.after_seq
    return place.wal_id >= position.next_id - 1


def next_load(manifest: Manifest, position: Position, *, below: int | None = None) -> ToldLoad | None:
    """The first load that a consumer has yet to pass and whose number is less than `below`."""
    ahead = (load for load in _told(manifest) if is_ahead(position, load.seq, load.place))
    return min((load for load in ahead if below is None or load.seq < below), default=None)


def find_load(manifest: Manifest, seq: int) -> ToldLoad | None:
    """The load of that number; None when its mark is not there any more."""
    return next((load for load in _told(manifest) if load.seq == seq), None)


def check_told(load: ToldLoad, after_seq: int) -> None:
    """Raise unless a consumer that has everything up to `after_seq` can be given the load next."""
    if load.replaces:
        raise InvalidRequest(
            f"a bulk load with the sequence number {load.seq} has replaced everything that was in the database, which "
            "cannot be told as changes; begin anew with a copy of the database"
        )
    check_gapless(after_seq, load.place.seq + 1)


def check_gapless(seen_seq: int, first_seq: int) -> None:
    """Refuse a step in sequence numbers: what happened there is not in the log, and a copy would lack it."""
    if 0 < seen_seq < first_seq - 1:
        raise InvalidRequest(
            f"sequence numbers {seen_seq + 1} to {first_seq - 1} are not in the log: rows came from a writer without a "
            "log, or by a bulk load that replaced everything or was not kept for this consumer, or an older state was "
            "restored; begin anew with a copy of the database (where writers choose their numbers themselves, follow "
            "with allow_gaps)"
        )


def gone(seq: int) -> InvalidRequest:
    """What to say of a load whose rows cannot be found any more."""
    return InvalidRequest(
        f"the rows of the bulk load with the sequence number {seq} are gone: without a pin they are kept for "
        f"{MARK_LIFETIME_S // 60} minutes; begin anew with a copy of the database"
    )


def settle_marks(manifest: Manifest, pins: Sequence[Waiting], *, now_s: int) -> Manifest:
    """The manifest whose `done` marks live as long as somebody may need them. Applied twice it changes nothing."""
    spare: list[HeldMark] = []
    for held in held_marks(manifest):
        if held.mark.state != "done":
            continue
        entry, needed_s = held.checkpoint, _needed_until(held.mark, pins)
        expires_s = None if needed_s is None else max(needed_s, entry.created_s + MARK_LIFETIME_S)
        # One that has expired never lives again: its tables may be gone.
        if _is_over(entry.expires_s, now_s) or _is_over(expires_s, now_s):
            manifest = remove_checkpoint(manifest, entry.id)
            continue
        manifest = add_checkpoint(manifest, replace(entry, expires_s=expires_s))
        if needed_s == 0 and not held.mark.replaces:
            spare.append(held)
    for held in sorted(spare, key=lambda held: held.mark.seq)[:-_SPARE_MARKS]:
        manifest = remove_checkpoint(manifest, held.checkpoint.id)
    return manifest


def _needed_until(mark: LoadMark, pins: Sequence[Waiting]) -> int | None:
    """Until when pins need the load: None for ever, 0 not at all."""
    place = mark.place
    if place is None or mark.replaces:
        return 0
    ends = [pin.expires_s for pin in pins if is_ahead(pin.position, mark.seq, place)]
    known = [end for end in ends if end is not None]
    return None if len(known) < len(ends) else max(known, default=0)


def _is_over(expires_s: int | None, now_s: int) -> bool:
    return expires_s is not None and expires_s <= now_s


def _told(manifest: Manifest) -> Iterator[ToldLoad]:
    for checkpoint, mark in held_marks(manifest):
        if mark.state == "done" and mark.place is not None:
            yield ToldLoad(mark.seq, mark.place, checkpoint.manifest_id, mark.replaces)
