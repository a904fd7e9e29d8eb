"""Checksums of many blocks at once.

Compaction handles ten thousands of blocks at a time, so they are computed without the interpreter's lock.
"""

from __future__ import annotations

from array import array
from typing import Any

import cython
from cython.cimports.flagstone.kernels._bytes import get_big, put_big
from cython.cimports.flagstone.kernels._crc32 import crc32, prepare_crc32

prepare_crc32()


def checksum(data: bytes) -> int:
    """The CRC-32 of zlib, several times as fast. Does not hold the interpreter's lock."""
    at: cython.p_const_uchar = data
    size: cython.Py_ssize_t = len(data)
    crc: cython.uint
    with cython.nogil:
        crc = crc32(at, 0, size)
    return crc


def bounds_within(offsets: list[Any], stops: list[Any], first: int, last: int, trailer: int) -> array[int]:
    """Begin and end of the blocks `first` to `last` in what is read from the first one's offset on.

    Ends are `trailer` bytes before the stops.
    """
    number: cython.Py_ssize_t
    at: cython.Py_ssize_t = 0
    base: cython.longlong = offsets[first]
    begin: cython.Py_ssize_t = first
    end: cython.Py_ssize_t = last + 1
    tail: cython.longlong = trailer
    bounds = array("q", bytes(16 * (end - begin)))
    out: cython.longlong[::1] = bounds
    for number in range(begin, end):
        out[at] = cython.cast(cython.longlong, offsets[number]) - base
        out[at + 1] = cython.cast(cython.longlong, stops[number]) - base - tail
        at += 2
    return bounds


def first_damaged(chunk: cython.const[cython.uchar][::1], bounds: cython.const[cython.longlong][::1]) -> int:
    """The number of the first block whose checksum, the four bytes behind it, is wrong; -1 when all are right.

    `bounds` has begin and end of each block in the chunk. Does not hold the interpreter's lock.
    """
    data: cython.p_const_uchar
    blocks: cython.Py_ssize_t = len(bounds) // 2
    number: cython.Py_ssize_t
    stop: cython.Py_ssize_t
    expected: cython.uint
    found: cython.Py_ssize_t = -1
    if len(bounds) and bounds[len(bounds) - 1] + 4 > len(chunk):
        raise ValueError("a block reaches past its chunk")
    if len(bounds) == 0:
        return found
    if cython.compiled:
        data = cython.address(chunk[0])
    else:
        data = chunk
    with cython.nogil:
        for number in range(blocks):
            stop = bounds[2 * number + 1]
            expected = get_big(data, stop, 4)
            if crc32(data, bounds[2 * number], stop - bounds[2 * number]) != expected:
                found = number
                break
    return found


def stamp(chunk: cython.uchar[::1], bounds: cython.const[cython.longlong][::1]) -> None:
    """Write the checksum of each block into the four bytes behind it. Does not hold the interpreter's lock."""
    data: cython.p_uchar
    blocks: cython.Py_ssize_t = len(bounds) // 2
    number: cython.Py_ssize_t
    stop: cython.Py_ssize_t
    crc: cython.uint
    if len(bounds) and bounds[len(bounds) - 1] + 4 > len(chunk):
        raise ValueError("a block reaches past its chunk")
    if len(bounds) == 0:
        return
    if cython.compiled:
        data = cython.address(chunk[0])
    else:
        data = chunk
    with cython.nogil:
        for number in range(blocks):
            stop = bounds[2 * number + 1]
            crc = crc32(data, bounds[2 * number], stop - bounds[2 * number])
            put_big(data, stop, crc, 4)
