"""Taking the log over: an empty file under the next id, which the former writer can then never use.

The epoch in the manifest says who owns the database, but a writer that was replaced does not look there before
every flush. It does need the next free id of the log; creating that file first is what stops it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flagstone.errors import Unavailable
from flagstone.metadata.manifest import Manifest
from flagstone.runtime.pool import IoPool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectExists, ObjectStore
from flagstone.types import WalId
from flagstone.wal.listing import find_frontier

FENCE: Final = b""
_ATTEMPTS: Final = 10_000


def write_fence(
    wal_store: ObjectStore,
    paths: DbPaths,
    candidate: WalId,
    claimed: Manifest,
    *,
    refresh: Callable[[], Manifest],
    pool: IoPool | None = None,
) -> WalId:
    """Create the fence and return its id: the log ends there for every former writer.

    `candidate` is the first id to try, found before the claim; `claimed` is the manifest that carries the claim.
    An id at or below its `replay_after_wal_id` is history that replay passes over, so a fence there would stop
    nobody: the end is then searched again. Where another file comes first, `refresh` reads the manifest anew
    and raises `Closed` (reason "fenced") if somebody else has claimed the database since; otherwise the file
    is the former writer's last flush or another claimant's fence, and the next id is tried.

    A crash afterwards leaves an empty file that replay reads as no rows. A former writer that creates files faster
    than they can be fenced ends this with `Unavailable`.
    """
    manifest = claimed
    for _ in range(_ATTEMPTS):
        if candidate <= manifest.replay_after_wal_id:
            frontier = find_frontier(
                wal_store,
                paths,
                manifest.replay_after_wal_id,
                expected=manifest.wal_id_last_seen,
                pool=pool,
            )
            candidate = WalId(frontier + 1)
        try:
            wal_store.put_if_absent(paths.wal(candidate), FENCE)
        except ObjectExists:
            manifest = refresh()
            candidate = WalId(candidate + 1)
        else:
            return candidate
    raise Unavailable(
        f"the WAL of {paths.root!r} could not be fenced: the next id was taken {_ATTEMPTS} times, the last was "
        f"{candidate - 1}; stop the former writer and try again"
    )
