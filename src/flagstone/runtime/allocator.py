"""The C allocator of this process, and when it returns memory to the system.

The allocator of glibc keeps freed memory, in one heap for every few threads: a process with a thousand threads had
three times as much memory as it used. Other systems have other allocators, which are left as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_SMALLEST_LIMIT: Final = 128 * 1024
_LARGEST_LIMIT: Final = 2 * 1024 * 1024
_HEAPS: Final = 2
_MUCH_BYTES: Final = 32 * 1024 * 1024
"""So much free memory is worth the time to return it: what is needed again costs a page fault for every 4 KiB."""


def bound(total_bytes: int) -> None:
    """Return large blocks to the system when they are freed, and use at most two heaps. Holds for the whole process.

    A block is large from 1/128 of the budget on, at most 2 MiB, and a heap keeps twice as much at its end. Buffers of a
    few hundred kilobytes come and go with every step of a merge: returned each time, their pages took half of the
    processor time of a load. By default the limits grow with what is freed.
    """
    libc = _libc()
    if hasattr(libc, "mallopt"):
        limit = min(max(total_bytes // 128, _SMALLEST_LIMIT), _LARGEST_LIMIT)
        libc.mallopt(_M_MMAP_THRESHOLD, limit)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * limit)
        libc.mallopt(_M_ARENA_MAX, _HEAPS)


def trim() -> None:
    """Return free pages between small blocks to the system. Takes milliseconds, without the interpreter's lock."""
    libc = _libc()
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def trim_much() -> None:
    """`trim`, if the allocator keeps much free memory.

    The allocator raises its own limit, from 256 KiB for each heap to 64 MiB, when large blocks are freed.
    """
    libc = _libc()
    if hasattr(libc, "mallinfo2") and _free_bytes(libc.mallinfo2) >= _MUCH_BYTES:
        trim()


def _free_bytes(mallinfo2: Callable[[], Any]) -> int:
    """The free bytes of all heaps: the ninth of ten numbers."""
    import ctypes  # noqa: PLC0415

    class Numbers(ctypes.Structure):
        _fields_ = (("all", ctypes.c_size_t * 10),)

    mallinfo2.restype = Numbers  # type: ignore[attr-defined]
    free: int = mallinfo2().all[8]
    return free


def _libc() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    # Imported here, because only a process with a memory budget or large memtables needs it.
    import ctypes  # noqa: PLC0415

    return ctypes.CDLL(None)
