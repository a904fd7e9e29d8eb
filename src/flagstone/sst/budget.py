"""The memory that scans may use to read ahead: one budget for all scans of a database.

A scan asks here before it fetches blocks that it does not need yet. What it needs next it fetches in any case, so a
scan always makes progress: when the budget is spent, scans read ahead less.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakSet

from flagstone.runtime.sync import Lock

DEFAULT_READ_AHEAD_BUDGET: Final = 128 * 1024 * 1024
"""Four scans at full speed, each with the default of `read_ahead_bytes`."""


class ReadAheadBudget:
    """Bounds the bytes that the scans of one database hold before they need them. Safe to use from many threads.

    It adds up the shares that exist, so a scan that is dropped or fails gives its bytes back without a call.
    """

    def __init__(self, *, capacity_bytes: int = DEFAULT_READ_AHEAD_BUDGET) -> None:
        self.capacity_bytes: Final[int] = capacity_bytes
        self._lock = Lock()
        self._shares: WeakSet[Share] = WeakSet()

    @property
    def held_bytes(self) -> int:
        """The bytes of all shares."""
        with self._lock:
            return sum(share.held_bytes for share in self._shares)

    def open_share(self) -> Share:
        """A share of no bytes, for one scan."""
        share = Share(self)
        with self._lock:
            self._shares.add(share)
        return share

    def grow(self, share: Share, size: int) -> bool:
        """Add `size` bytes to a share; False, and no change, if the budget does not have them."""
        with self._lock:
            if sum(each.held_bytes for each in self._shares) + size > self.capacity_bytes:
                return False
            share.held_bytes += size
            return True


class Share:
    """The bytes of one scan. The scan assigns `held_bytes` when it has used some of them, or must exceed the budget."""

    __slots__ = ("__weakref__", "_budget", "held_bytes")

    def __init__(self, budget: ReadAheadBudget) -> None:
        self._budget: ReadAheadBudget = budget
        self.held_bytes: int = 0

    def grow(self, size: int) -> bool:
        """Add `size` bytes; False, and no change, if the budget does not have them."""
        return self._budget.grow(self, size)
