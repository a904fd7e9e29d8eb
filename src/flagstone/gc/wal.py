"""Garbage among the WAL files.

Replay of the latest manifest begins after `replay_after_wal_id`, which never decreases; that file itself is kept, as in
SlateDB. Readers of a checkpoint replay the files after its manifest's `replay_after_wal_id` up to its
`wal_id_last_seen`. A retention checkpoint (`changes/retention.py`) keeps WAL files in the same way.

Fences, the empty files, are a kind of their own: a fence stops a former writer. Once the fence is deleted, only the
former writer's own read of the manifest can stop it (see `wal/writer.py`), which it repeats within a time limit.
So fences are never deleted before `MIN_FENCE_AGE_MS`, whatever the settings are. SlateDB's writers do not read the
manifest again: if one of them may stall for longer than the minimum age, keep the fences, as the default settings do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from flagstone.gc.plan import Kind, Plan, Verdict, drop, keep
from flagstone.metadata.manifest import Manifest
from flagstone.store.port import ObjectMeta
from flagstone.types import WalId

_LARGEST_FENCE: Final = 10
"""WAL files of up to this many bytes hold no rows."""


class WalObject(NamedTuple):
    """One WAL file."""

    id: WalId
    meta: ObjectMeta

    @property
    def kind(self) -> Kind:
        return "wal_fence" if self.meta.size <= _LARGEST_FENCE else "wal"


@dataclass(frozen=True, slots=True)
class Kept:
    """WAL files in (`after`, `last`] are needed, for the reason given; without a `last`, all after `after`."""

    after: int
    last: int | None
    reason: str

    def __contains__(self, wal_id: object) -> bool:
        return isinstance(wal_id, int) and wal_id > self.after and (self.last is None or wal_id <= self.last)


def kept_ranges(latest: Manifest, checkpointed: Iterable[Manifest]) -> list[Kept]:
    """The WAL files that the latest manifest and the manifests that checkpoints name need."""
    ranges = [Kept(latest.replay_after_wal_id - 1, None, "needed to open the database")]
    ranges += [
        Kept(manifest.replay_after_wal_id, manifest.wal_id_last_seen, "needed by a checkpoint")
        for manifest in checkpointed
    ]
    return list(dict.fromkeys(ranges))


def plan_wal(kind: Kind, listed: Iterable[WalObject], kept: Sequence[Kept]) -> Plan:
    """Plan the listed files of one kind, `wal` or `wal_fence`."""

    def judge(file: WalObject) -> Verdict:
        for needed in kept:
            if file.id in needed:
                return keep(file.meta, file.id, needed.reason)
        return drop(
            file.meta, file.id, "its rows are in SSTs" if kind == "wal" else "before the start of replay"
        )

    return Plan(kind, tuple(judge(file) for file in listed if file.kind == kind))
