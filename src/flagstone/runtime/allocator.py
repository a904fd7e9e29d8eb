"""The C allocator of this process, and when it returns memory to the system.

The allocator of glibc keeps freed memory, in one heap for every few threads: a process with a thousand threads had
three times as much memory as it used. Other systems have other allocators, which are left as they are.
"""

from __future__ import annotations

import sys
from typing import Any, Final

_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_LARGE_BYTES: Final = 128 * 1024
"""Freed blocks of this size go back to the system at once. By default the limit grows with what is freed."""
_HEAPS: Final = 2


def bound() -> None:
    """Return large blocks to the system when they are freed, and use at most two heaps. Holds for the whole process."""
    libc = _libc()
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        libc.mallopt(_M_ARENA_MAX, _HEAPS)


def trim() -> None:
    """Return free pages between small blocks to the system. Takes milliseconds, without the interpreter's lock."""
    libc = _libc()
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def _libc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    # Imported here, because only a process with a memory budget needs it.
    import ctypes  # noqa: PLC0415

    return ctypes.CDLL(None)
