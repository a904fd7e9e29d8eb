"""Looks for the bulk loads that a consumer of changes has yet to pass, with as few requests as it takes."""

from __future__ import annotations

import math
from typing import Final

from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.wal.changes import Position
from flagstone.wal.load_marks import ToldLoad, next_load

_ABSENT_S: Final = 30.0
"""How often a log that belongs to no database yet is looked at again."""


class LoadFinder:
    """Asks the manifests of one database. Not for several threads at once."""

    def __init__(self, manifests: ManifestStore, clock: Clock) -> None:
        self._manifests = manifests
        self._clock = clock
        self._known: Versioned[Manifest] | None = None
        self._absent_until = -math.inf

    def find(self, position: Position, below: int | None) -> ToldLoad | None:
        """The first load that the position has yet to pass, and whose number is less than `below`.

        With `below`, the number of a row that is in the log, the answer is final: what came before that row was in
        the manifest before it. Without, a load may be found a minute later than it could be (`ManifestStore.poll`).
        """
        # Tables that have the row, or one after it: so that manifest has all loads before it.
        if below is not None and self._known is not None and self._known.value.last_l0_seq >= below:
            return next_load(self._known.value, position, below=below)
        latest = self._look(final=False)
        found = None if latest is None else next_load(latest, position, below=below)
        if found is None and below is not None:
            latest = self._look(final=True)
            found = None if latest is None else next_load(latest, position, below=below)
        return found

    def _look(self, *, final: bool) -> Manifest | None:
        now = self._clock.monotonic()
        if now < self._absent_until:
            return None
        self._known = self._manifests.latest() if final or self._known is None else self._manifests.poll()
        if self._known is None:
            self._absent_until = now + _ABSENT_S
            return None
        return self._known.value
