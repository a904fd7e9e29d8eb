"""Adding a bulk load to the manifest so that consumers of changes can find it. Pure."""

from __future__ import annotations

from dataclasses import replace

from flagstone.metadata.hand_over import HeldMark, LoadPlace, encode_mark
from flagstone.metadata.loads import Load, apply_load, is_applied
from flagstone.metadata.manifest import NO_WAL, Manifest, add_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.types import ManifestId, WalId
from flagstone.wal.pins import settle_loads


def apply_told_load(
    now: Versioned[Manifest], load: Load, held: HeldMark, *, now_s: int, last_wal_id: WalId = NO_WAL
) -> Manifest:
    """The manifest after `now` with the load and with its mark, which says `done`; `now` itself if it has the load.

    Everything before the load is in tables and in the log up to `last_wal_id`, or as far as the manifest knows it.
    The mark pins the version that this becomes: there the load is the newest run. If the load replaces something it
    pins the version before instead, for those who still read what was replaced.
    """
    before = now.value
    if is_applied(before, load):
        return before
    replaces = load.replaces_all and not before.tree.empty
    place = LoadPlace(
        before.last_l0_seq, max(last_wal_id, before.wal_id_last_seen, before.replay_after_wal_id)
    )
    mark = replace(held.mark, state="done", place=place, replaces=replaces)
    entry = replace(
        held.checkpoint,
        manifest_id=ManifestId(now.id if replaces else now.next_id),
        created_s=now_s,
        expires_s=None,  # settled below
        name=encode_mark(mark),
    )
    return settle_loads(add_checkpoint(apply_load(before, load), entry), now_s=now_s)
