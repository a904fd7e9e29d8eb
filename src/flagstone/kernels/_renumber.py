"""Writes another sequence number into every row of blocks. `_block_writer` has the layout of blocks.

A bulk load has one sequence number for all its rows. When the database has passed that number before the load is
added, its SSTs are copied with another one.
"""

from __future__ import annotations

import cython
from cython.cimports.flagstone.kernels._bytes import put_u64
from cython.cimports.flagstone.kernels._rows import Entry, entries_end, new_entry, read_flags, read_lengths

from flagstone.kernels.damage import damaged_entry


def renumber(chunk: cython.uchar[::1], bounds: cython.const[cython.longlong][::1], seq: int) -> int:
    """Write `seq` into every row of the raw blocks in `chunk`; returns how many rows there are.

    `bounds` has begin and end of each block. Raises `CorruptData` for a damaged block, with the offset in `chunk`; the
    rows before it have the new number by then. Does not hold the interpreter's lock.
    """
    data: cython.p_uchar
    number: cython.Py_ssize_t
    at: cython.Py_ssize_t = 0
    end: cython.Py_ssize_t
    rows: cython.Py_ssize_t = 0
    blocks: cython.Py_ssize_t = len(bounds) // 2
    value: cython.ulonglong = seq
    problem: cython.int = 0
    entry: Entry = new_entry()
    if len(bounds) and bounds[len(bounds) - 1] > len(chunk):
        raise ValueError("a block reaches past its chunk")
    if len(bounds) == 0:
        return 0
    if cython.compiled:
        data = cython.address(chunk[0])
    else:
        data = chunk
    with cython.nogil:
        for number in range(blocks):
            at = bounds[2 * number]
            end = entries_end(data, at, bounds[2 * number + 1])
            while at < end:
                problem = read_lengths(data, at, end, cython.address(entry))
                if problem == 0:
                    problem = read_flags(data, end, cython.address(entry))
                if problem:
                    break
                put_u64(data, entry.tail_at, value)
                rows += 1
                at = entry.stop
            if problem:
                break
    if problem:
        raise damaged_entry(problem, at, entry.tail_at + 8, entry.flags)
    return rows
