"""How long an open load lives: its record expires minutes after the last sign of life of its driver or tasks. Pure.

A load record that is open keeps the SSTs of its load and the manifest with which it began. A killed driver renews
nothing, so its record expires, and garbage collection removes the record and the SSTs.

A record that expired and was removed may be added again, for a load whose first task starts late. It then gets another
tag: garbage collection may be deleting the SSTs with the former one. The commit accepts SSTs of the present tag only.
A cancelled load keeps its record for a while, as `refused`, so that no task adds it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final
from uuid import UUID

from flagstone.metadata.annotations import HeldLoad, LoadRecord, encode_load, held_loads
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint, remove_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.types import ManifestId

LIFETIME_S: Final = 5 * 60
"""How long the record of a load lives after it was renewed."""

RENEW_BELOW_S: Final = LIFETIME_S // 2
"""A record that would live for less than this is renewed."""

_CANCELLED_S: Final = 15 * 60
"""How long the record of a cancelled load stays."""

CANCELLED: Final = "cancelled"
"""`LoadRecord.reason` of a load that was cancelled."""


def find_load_record(manifest: Manifest, load_id: UUID) -> HeldLoad | None:
    """The record of that load; None when it was removed."""
    return next((held for held in held_loads(manifest) if held.checkpoint.id == load_id), None)


def add_record(now: Versioned[Manifest], load_id: UUID, record: LoadRecord, *, now_s: int) -> Manifest:
    """The manifest with a load record that lives for `LIFETIME_S`."""
    entry = Checkpoint(load_id, ManifestId(now.next_id), now_s, now_s + LIFETIME_S, encode_load(record))
    return add_checkpoint(now.value, entry)


def renew_record(manifest: Manifest, load_id: UUID, *, now_s: int) -> Manifest | None:
    """The manifest with a longer life of an open load; None if it lives long enough, or is not open."""
    held = find_load_record(manifest, load_id)
    if held is None or not held.record.open or not needs_renewal(held, now_s):
        return None
    return add_checkpoint(manifest, replace(held.checkpoint, expires_s=now_s + LIFETIME_S))


def needs_renewal(held: HeldLoad, now_s: int) -> bool:
    """Whether the record is older than half its life."""
    expires_s = held.checkpoint.expires_s
    return expires_s is not None and expires_s - now_s < RENEW_BELOW_S


def cancel_record(manifest: Manifest, load_id: UUID, *, now_s: int) -> Manifest | None:
    """The manifest in which an open load is cancelled; None if it is not open."""
    held = find_load_record(manifest, load_id)
    if held is None or not held.record.open:
        return None
    name = encode_load(replace(held.record, state="refused", reason=CANCELLED))
    return add_checkpoint(manifest, replace(held.checkpoint, name=name, expires_s=now_s + _CANCELLED_S))


def dead_loads(manifest: Manifest, now_s: int) -> Iterator[HeldLoad]:
    """The open loads of which no sign of life came in time."""
    for held in held_loads(manifest):
        expires_s = held.checkpoint.expires_s
        if held.record.open and expires_s is not None and expires_s <= now_s:
            yield held


def without_loads(manifest: Manifest, loads: Iterator[HeldLoad] | list[HeldLoad]) -> Manifest:
    """The manifest without these load records; itself if there are none."""
    for held in list(loads):
        manifest = remove_checkpoint(manifest, held.checkpoint.id)
    return manifest


def removed_loads(before: Manifest, after: Manifest) -> list[LoadRecord]:
    """The open loads of a manifest whose records a later one does not have."""
    left = {held.checkpoint.id for held in held_loads(after)}
    return [held.record for held in held_loads(before) if held.record.open and held.checkpoint.id not in left]


def open_loads_of(manifest: Manifest, owner: str) -> Iterator[HeldLoad]:
    """The open loads of that owner; none for the owner ""."""
    for held in held_loads(manifest):
        if owner and held.record.open and held.record.owner == owner:
            yield held
