"""Memory for one purpose: a limit, and the grants of its users.

A user holds memory as an object, not as a number: if an exception ends it at any point, the object goes, and the memory
counts as free. The lock here is a leaf: no other lock is taken while it is held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from weakref import WeakSet

from flagstone.runtime.sync import Lock, Waiters

_RETRY_S: Final = 1.0


class MemoryPart:
    """The grants for one purpose, and the limit of all of them together. Safe to use from many threads.

    `Grant.grow` never waits: a refused user continues with less. `take` waits for the grants of others, but one that
    is alone gets what it asks for, so that it always makes progress. A user may exceed the limit by assigning
    `Grant.size`; then others get nothing until it holds less.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes: int = limit_bytes
        self._lock = Lock()
        self._changed = Waiters(self._lock)
        self._grants: WeakSet[Grant] = WeakSet()

    @property
    def held_bytes(self) -> int:
        """The bytes of all grants."""
        with self._lock:
            return self._sum()

    def resize(self, limit_bytes: int) -> None:
        """Change the limit. Grants that exist stay as they are."""
        with self._lock:
            self._changed.notify_all()
            self.limit_bytes = limit_bytes

    def open(self) -> Grant:
        """A grant of no bytes."""
        grant = Grant(self)
        with self._lock:
            self._grants.add(grant)
        return grant

    def take(self, size: int, check: Callable[[], object] = lambda: None) -> Grant:
        """A grant of that size. Waits while others leave less, unless there is no other.

        At least once a second while it waits it calls `check`, which raises to end the wait.
        """
        grant = Grant(self)
        grant.size = size

        def granted() -> bool:
            fits = not len(self._grants) or self._sum() + size <= self.limit_bytes
            if fits:
                self._grants.add(grant)
            return fits

        # With a limit: a grant that an exception dropped wakes no thread.
        while not self._changed.wait_for(granted, timeout=_RETRY_S):
            check()
        return grant

    def give_back(self, grant: Grant) -> None:
        """End a grant, and wake those that wait in `take`. A second call changes nothing."""
        with self._lock:
            self._changed.notify_all()
            self._grants.discard(grant)

    def grow(self, grant: Grant, size: int) -> bool:
        """See `Grant.grow`."""
        with self._lock:
            if self._sum() + size > self.limit_bytes:
                return False
            grant.size += size
            return True

    def _sum(self) -> int:
        return sum(grant.size for grant in self._grants)


class Grant:
    """The bytes of one user, as long as the object exists.

    The user assigns `size` when it needs less, or must exceed the limit.
    """

    __slots__ = ("__weakref__", "_part", "size")

    def __init__(self, part: MemoryPart) -> None:
        self._part = part
        self.size: int = 0

    def grow(self, size: int) -> bool:
        """Add `size` bytes; False, and no change, if the part does not have them."""
        return self._part.grow(self, size)
