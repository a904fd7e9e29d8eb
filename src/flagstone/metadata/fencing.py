"""Epochs: of two processes that claim a role, the one that claimed it later owns it.

A claim raises the role's epoch in the manifest. Every manifest that the previous owner reads from then on shows that it
was replaced, and none of its edits goes through, because each checks the epoch of the manifest it is applied to.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Literal, TypeVar

from flagstone.errors import Closed, InternalError
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.destruction import require_not_destroyed
from flagstone.metadata.manifest import Manifest, renew_repeated_view_ids
from flagstone.metadata.parallel_wal import note_claim
from flagstone.metadata.sequenced import SequencedConflict, Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.types import ManifestId

Role = Literal["writer", "compactor"]
T = TypeVar("T", Manifest, Compactions)


class Fence:
    """One process's claim to a role. Lost once, it stays lost."""

    def __init__(self, role: Role, epoch: int) -> None:
        self.role: Role = role
        self.epoch = epoch
        self._newer: int | None = None

    def check(self, stored: Manifest | Compactions) -> None:
        """Raise `Closed` with reason "fenced" if `stored` has a newer owner, or any earlier one had, or if its
        database is destroyed: the destroyer claims both roles.
        """
        if isinstance(stored, Manifest):
            require_not_destroyed(stored)
        if self.role == "compactor":
            self._check_epoch(stored.compactor_epoch)
        elif isinstance(stored, Manifest):
            self._check_epoch(stored.writer_epoch)
        else:
            raise InternalError("a writer has no claim to the compactions file")

    def guard(self, edit: Callable[[Versioned[T]], T | None]) -> Callable[[Versioned[T]], T | None]:
        """The same edit; it raises `Closed` when a newer owner has written the version it is applied to."""

        def guarded(current: Versioned[T]) -> T | None:
            self.check(current.value)
            return edit(current)

        return guarded

    def lose_to(self, epoch: int) -> None:
        """Record that `epoch` owns the role; every later check fails."""
        self._newer = max(epoch, self._newer or 0)

    def _check_epoch(self, stored: int) -> None:
        if stored > self.epoch:
            self.lose_to(stored)
        if self._newer is not None:
            raise Closed(
                f"a newer {self.role} (epoch {self._newer}) has replaced this one (epoch {self.epoch})",
                reason="fenced",
            )


def claim_writer(manifests: ManifestStore, *, parallel_wal: int = 1) -> tuple[Fence, Versioned[Manifest]]:
    """Become the writer: raise the writer epoch, however many races for the next manifest are lost.

    `parallel_wal` is how many WAL files the writer will send at once. A crash afterwards costs only an epoch.
    """

    def claim(now: Versioned[Manifest]) -> Manifest:
        raised = replace(renew_repeated_view_ids(now.value), writer_epoch=now.value.writer_epoch + 1)
        return note_claim(now.value, raised, limit=parallel_wal, manifest_id=ManifestId(now.next_id))

    claimed = manifests.update(claim)
    return Fence("writer", claimed.value.writer_epoch), claimed


def claim_compactor(manifests: ManifestStore) -> tuple[Fence, Versioned[Manifest]]:
    """Claim the role of the compaction coordinator in the manifest; see `claim_compactions`."""
    claimed = manifests.update(
        lambda now: replace(renew_repeated_view_ids(now.value), compactor_epoch=now.value.compactor_epoch + 1)
    )
    return Fence("compactor", claimed.value.compactor_epoch), claimed


def claim_compactions(compactions: CompactionsStore, fence: Fence) -> Versioned[Compactions]:
    """Take over the compactions file, creating it if it does not exist, with the epoch claimed in the manifest.

    Raises `Closed` with reason "fenced" when the file already has that epoch or a newer one: another coordinator has
    claimed it, which claimed the manifest after this one.
    """
    if compactions.latest() is None:
        # Another coordinator may create it at the same time; the claim below decides between the two.
        with suppress(SequencedConflict):
            compactions.create_next(Compactions(), None)

    def claim(now: Versioned[Compactions]) -> Compactions:
        if now.value.compactor_epoch >= fence.epoch:
            fence.lose_to(now.value.compactor_epoch)
        fence.check(now.value)
        return replace(now.value, compactor_epoch=fence.epoch)

    return compactions.update(claim)
