"""Which files of the log nobody can need any more.

Replay of the latest manifest begins behind `replay_after_wal_id`, which never goes back; that file itself stays,
as it does with SlateDB. A checkpoint's readers replay what lies between the two numbers of its manifest; log pins
(`wal/pins.py`) are checkpoints, too.

Fences, the empty files, are judged apart: a fence is what a writer that was replaced runs into. Once it is gone, only
the writer's own look at the manifest can stop it (see `wal/ownership.py`), and that look has a time limit. So
fences are never deleted before `MIN_FENCE_AGE_MS`, whatever the settings say. SlateDB's writers do not look at all:
where one of them may stall for longer than the minimum age, leave fences alone, as the settings do by default.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from flagstone.maintenance.gc.plan import Kind, Plan, Verdict, drop, keep
from flagstone.metadata.manifest import Manifest
from flagstone.store.port import ObjectMeta
from flagstone.types import WalId

MIN_FENCE_AGE_MS: Final = 60_000
"""Several times the longest a writer goes without asking whether it still is the writer."""

_LARGEST_FENCE: Final = 10
"""Files up to this many bytes hold no rows."""


class WalObject(NamedTuple):
    """One file of the log."""

    id: WalId
    meta: ObjectMeta

    @property
    def kind(self) -> Kind:
        return "wal_fence" if self.meta.size <= _LARGEST_FENCE else "wal"


@dataclass(frozen=True, slots=True)
class Kept:
    """Files (`after`, `last`] are needed, for the reason given; without a `last`, all behind `after`."""

    after: int
    last: int | None
    reason: str

    def __contains__(self, wal_id: object) -> bool:
        return isinstance(wal_id, int) and wal_id > self.after and (self.last is None or wal_id <= self.last)


def kept_ranges(latest: Manifest, pinned: Iterable[Manifest]) -> list[Kept]:
    """What the latest manifest and those that checkpoints name need of the log."""
    ranges = [Kept(latest.replay_after_wal_id - 1, None, "needed to open the database")]
    ranges += [
        Kept(manifest.replay_after_wal_id, manifest.wal_id_last_seen, "needed by a checkpoint")
        for manifest in pinned
    ]
    return list(dict.fromkeys(ranges))


def plan_wal(kind: Kind, listed: Iterable[WalObject], kept: Sequence[Kept]) -> Plan:
    """Judge the listed files of one kind, `wal` or `wal_fence`."""

    def judge(file: WalObject) -> Verdict:
        for needed in kept:
            if file.id in needed:
                return keep(file.meta, file.id, needed.reason)
        return drop(
            file.meta, file.id, "its rows are in tables" if kind == "wal" else "behind the log's start"
        )

    return Plan(kind, tuple(judge(file) for file in listed if file.kind == kind))
