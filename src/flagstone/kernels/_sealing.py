"""Checksums of many blocks at once.

Compaction handles ten thousands of blocks at a time, so they are computed without the interpreter's lock.
"""

from __future__ import annotations

import zlib
from array import array
from typing import Any

import cython
from cython.cimports.flagstone.kernels._bytes import MASK32, get_big, get_u32, put_big

# Constants of more than 31 bits are declared, or compiled code would compute with them as Python integers.
POLYNOMIAL = cython.declare(cython.uint, 0xEDB88320)


def _crc_tables() -> array:
    """Sixteen tables of CRC-32: the n-th has what a byte becomes after n more bytes of zeros."""
    tables = array("I", bytes(4 * 16 * 256))
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
        tables[byte] = value
    for at in range(256, 16 * 256):
        tables[at] = tables[at - 256] >> 8 ^ tables[tables[at - 256] & 0xFF]
    return tables


_TABLES = _crc_tables() if cython.compiled else None


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _crc32(
    table: cython.p_const_uint, data: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t
) -> cython.uint:
    """The CRC-32 of zlib, sixteen bytes a step, without the lock."""
    crc: cython.uint
    one: cython.uint
    two: cython.uint
    three: cython.uint
    four: cython.uint
    stop: cython.Py_ssize_t = at + size
    if not cython.compiled:
        return zlib.crc32(data[at:stop])
    crc = MASK32
    while at + 16 <= stop:
        one = crc ^ get_u32(data, at)
        two = get_u32(data, at + 4)
        three = get_u32(data, at + 8)
        four = get_u32(data, at + 12)
        crc = (
            table[3840 + (one & 0xFF)]
            ^ table[3584 + ((one >> 8) & 0xFF)]
            ^ table[3328 + ((one >> 16) & 0xFF)]
            ^ table[3072 + (one >> 24)]
            ^ table[2816 + (two & 0xFF)]
            ^ table[2560 + ((two >> 8) & 0xFF)]
            ^ table[2304 + ((two >> 16) & 0xFF)]
            ^ table[2048 + (two >> 24)]
            ^ table[1792 + (three & 0xFF)]
            ^ table[1536 + ((three >> 8) & 0xFF)]
            ^ table[1280 + ((three >> 16) & 0xFF)]
            ^ table[1024 + (three >> 24)]
            ^ table[768 + (four & 0xFF)]
            ^ table[512 + ((four >> 8) & 0xFF)]
            ^ table[256 + ((four >> 16) & 0xFF)]
            ^ table[four >> 24]
        )
        at += 16
    while at < stop:
        crc = (crc >> 8) ^ table[(crc ^ data[at]) & 0xFF]
        at += 1
    return crc ^ cython.cast(cython.uint, MASK32)


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


def first_damaged(chunk: bytes, bounds: cython.const[cython.longlong][::1]) -> int:
    """The number of the first block whose checksum, the four bytes behind it, is wrong; -1 when all are right.

    `bounds` has begin and end of each block in the chunk. Does not hold the interpreter's lock.
    """
    data: cython.p_const_uchar = chunk
    tables: cython.const[cython.uint][::1]
    table: cython.p_const_uint
    blocks: cython.Py_ssize_t = len(bounds) // 2
    number: cython.Py_ssize_t
    stop: cython.Py_ssize_t
    expected: cython.uint
    found: cython.Py_ssize_t = -1
    if len(bounds) and bounds[len(bounds) - 1] + 4 > len(chunk):
        raise ValueError("a block reaches past its chunk")
    if cython.compiled:
        tables = _TABLES
        table = cython.address(tables[0])
    else:
        table = None
    with cython.nogil:
        for number in range(blocks):
            stop = bounds[2 * number + 1]
            expected = get_big(data, stop, 4)
            if _crc32(table, data, bounds[2 * number], stop - bounds[2 * number]) != expected:
                found = number
                break
    return found


def stamp(chunk: cython.uchar[::1], bounds: cython.const[cython.longlong][::1]) -> None:
    """Write the checksum of each block into the four bytes behind it. Does not hold the interpreter's lock."""
    data: cython.p_uchar
    tables: cython.const[cython.uint][::1]
    table: cython.p_const_uint
    blocks: cython.Py_ssize_t = len(bounds) // 2
    number: cython.Py_ssize_t
    stop: cython.Py_ssize_t
    crc: cython.uint
    if len(bounds) and bounds[len(bounds) - 1] + 4 > len(chunk):
        raise ValueError("a block reaches past its chunk")
    if len(bounds) == 0:
        return
    if cython.compiled:
        tables = _TABLES
        table = cython.address(tables[0])
        data = cython.address(chunk[0])
    else:
        table = None
        data = chunk
    with cython.nogil:
        for number in range(blocks):
            stop = bounds[2 * number + 1]
            crc = _crc32(table, data, bounds[2 * number], stop - bounds[2 * number])
            put_big(data, stop, crc, 4)
