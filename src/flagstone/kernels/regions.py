"""Memory for the rows of large memtables.

The C allocator keeps what is freed below other memory, and only gives it to the same threads again: after a load the
process had several hundred megabytes that no memtable used. A region goes back to the system, except for a few that
the next memtable gets, because fresh memory is slow.

Pages of 2 MiB were tried: they take a tenth of the time of small ones, but five times as long on virtual machines that
return free pages to their host.
"""

from __future__ import annotations

import mmap
from typing import Final

REGION_BYTES: Final = 8 << 20
DEFAULT_SPARE: Final = 4
"""How many regions are kept for the next memtable: half of what a memtable of the default size has."""


class Regions:
    """The regions of this process that no memtable uses, at most `limit`. Safe to use from many threads.

    A compiled memtable adds its regions to `free` when it is deleted. A region is the mapping itself, because the
    garbage collector releases a `memoryview` in a cycle before it deletes the memtable.
    """

    __slots__ = ("free", "limit")

    def __init__(self, limit: int = DEFAULT_SPARE) -> None:
        self.limit: int = limit
        # `append` and `pop` are atomic, so a plain list is enough.
        self.free: list[mmap.mmap] = []

    def take(self) -> mmap.mmap:
        """A region with any content. Raises `MemoryError` when there is none."""
        try:
            return self.free.pop()
        except IndexError:
            pass
        try:
            return mmap.mmap(-1, REGION_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no memory for {REGION_BYTES} bytes of rows") from error

    def keep_none(self) -> None:
        """Return all memory to the system at once, from now on: the process keeps to a memory budget."""
        self.limit = 0
        self.free.clear()


SHARED: Final = Regions()
