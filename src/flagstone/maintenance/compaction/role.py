"""The role of coordinator: how it is claimed, and when one that was lost is free again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from flagstone.errors import FlagstoneError, Unavailable
from flagstone.maintenance.compaction.board import Board
from flagstone.maintenance.compaction.lifecycle import is_released, release_role, reset_jobs
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.fencing import Fence, claim_compactions, claim_compactor
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import SequencedConflict
from flagstone.metadata.stores import CompactionsStore
from flagstone.runtime.ids import Ids, ulid_ms
from flagstone.types import Ulid

_log = logging.getLogger("flagstone.compaction")

_ATTEMPTS: Final = 100


def claim_role(board: Board) -> Fence:
    """Claim the manifest first, then the compactions file, then reset its jobs: one version each, as SlateDB does.

    A crash in between costs an epoch; whoever comes next begins anew.

    Raises:
        Closed: somebody claimed it at the same time, and owns it.

    """
    fence, claimed = claim_compactor(board.manifests)
    board.note_manifest(claimed)
    board.publish(claimed)
    current = claim_compactions(board.compactions, fence)
    for _ in range(_ATTEMPTS):
        fence.check(current.value)
        try:
            current = board.compactions.create_next(reset_jobs(current.value), current)
            break
        except SequencedConflict:
            current = board.compactions.require_latest()
    else:
        raise Unavailable(f"lost {_ATTEMPTS} races for the compactions file; try again")
    board.note_jobs(current)
    _log.info("became compaction coordinator epoch=%d", fence.epoch)
    return fence


def mint_job(jobs: Compactions, ids: Ids) -> Ulid:
    """An id for a new job: not older than any there is."""
    newest = jobs.newest_job
    return ids.ulid(0 if newest is None else ulid_ms(newest))


def release_taken_role(compactions: CompactionsStore, epoch: int, *, ids: Ids, now_ms: int) -> None:
    """After a manifest took the role under `epoch` for a moment: say that it is free for the coordinator that had it.

    What the store cannot be told costs a restart of that coordinator.
    """
    with suppress(FlagstoneError):
        if compactions.latest() is not None:
            fence = Fence("compactor", epoch)
            claim_compactions(compactions, fence)
            compactions.update(
                fence.guard(
                    lambda now: release_role(now.value, lambda jobs: mint_job(jobs, ids), now_ms=now_ms)
                )
            )


class RoleWatch:
    """Watches the coordinator that took over. Its role is free when it says that it left, or when it must have left:
    writes wait for a compaction (`stalled`), and for `patience_s` nobody has touched the jobs.
    """

    def __init__(self, stalled: Callable[[Manifest], bool], *, patience_s: float) -> None:
        self._stalled = stalled
        self._patience_s = patience_s
        self._idle_since = 0.0
        self._version = 0

    def begin(self, now: float) -> None:
        """The role was lost at this moment."""
        self._idle_since = now

    def sees_it_free(self, board: Board, now: float) -> bool:
        """Look once, which costs a request."""
        jobs, manifest = board.fetch_jobs(), board.manifest
        if jobs is None or manifest is None:
            return False
        if is_released(jobs.value):
            return True
        if jobs.id != self._version or not self._stalled(manifest.value):
            self._version, self._idle_since = jobs.id, now
        return now - self._idle_since >= self._patience_s
