"""The rows of a memtable as streams (see `_rows`): in key order for a flush, in commit order for a WAL file.

Both functions fill about half of the caller's buffer and return where they stopped, so that other threads run between
two calls. `chunks` is the memory of the memtable, see `_entries`.
"""

from __future__ import annotations

import cython
from cython.cimports.flagstone.kernels._bytes import MASK64, copy, prefetch, put_little, put_u64
from cython.cimports.flagstone.kernels._entries import (
    address_of,
    chunk_of,
    entry_created,
    entry_expires,
    entry_flags,
    entry_link,
    entry_seq,
    entry_size,
    key_size,
    key_start,
    newest,
    offset_of,
    value_size,
)
from cython.cimports.flagstone.kernels._rows import (
    CREATE_FLAG,
    EXPIRE_FLAG,
    KIND_MASK,
    MERGE_KIND,
    TOMBSTONE_KIND,
)

# How many rows ahead memory is asked for.
AHEAD = cython.declare(cython.Py_ssize_t, 16)
PREFETCHED = cython.declare(cython.Py_ssize_t, 256)
# What a row of a stream has besides key and value: two lengths, sequence number, flags and two times.
MOST_BESIDES = cython.declare(cython.Py_ssize_t, 31)
LONG_AGO = cython.declare(cython.longlong, -0x7FFFFFFFFFFFFFFF - 1)


def sorted_stream(
    chunks: cython.ulonglong[::1],
    anchors: cython.ulonglong[::1],
    start: cython.Py_ssize_t,
    stream: bytearray,
    min_seq: cython.ulonglong,
    now_ms: cython.longlong,
) -> tuple:
    """Fill `stream` with rows in key order from the `start`-th anchor of a sorted run on.

    Leaves out what a flush need not keep: values expired at `now_ms` become tombstones, and of each key only versions
    above `min_seq` and the newest one not above it are kept. Stops before a key with merge operands, which need the
    operator. Returns `(next key, bytes used)`. The stream grows when the versions of a key do not fit into it. Does not
    hold the interpreter's lock, so no rows may be added meanwhile.
    """
    total: cython.Py_ssize_t = len(anchors)
    out: cython.p_uchar = stream
    room: cython.Py_ssize_t = len(stream)
    enough: cython.Py_ssize_t = room // 2
    needed: cython.Py_ssize_t = 0
    used: cython.Py_ssize_t = 0
    before: cython.Py_ssize_t
    size: cython.Py_ssize_t
    index: cython.Py_ssize_t = start
    entry: cython.ulonglong
    data: cython.p_const_uchar
    at: cython.Py_ssize_t
    stopped: cython.bint = False
    while True:
        with cython.nogil:
            while index < total and used < enough:
                if index + AHEAD < total:
                    # Rows in key order lie all over memory.
                    entry = anchors[index + AHEAD]
                    prefetch(chunk_of(chunks, entry), offset_of(entry), PREFETCHED)
                before = used
                entry = newest(chunks, anchors[index], MASK64)
                while entry:
                    data = chunk_of(chunks, entry)
                    at = offset_of(entry)
                    size = MOST_BESIDES + key_size(data, at) + value_size(data, at)
                    if used + size > room:
                        needed = used + size
                    stopped = needed > room or entry_flags(data, at) & MERGE_KIND != 0
                    if stopped:
                        break
                    used = _append(out, used, data, at, now_ms)
                    if entry_seq(data, at) <= min_seq or entry == anchors[index]:
                        break
                    entry = entry_link(data, at)
                if stopped:
                    used = before
                    break
                index += 1
        if needed <= room or used:
            return index, used
        room = 2 * needed
        stream.extend(bytes(room - len(stream)))
        out = stream


def wal_stream(
    chunks: cython.ulonglong[::1], ends: list, position: tuple, end: tuple, stream: bytearray
) -> tuple:
    """Fill `stream` with rows in commit order from one `Memtable.position()` to another; `(0, 0)` is the beginning.

    `ends` has the end of the rows of each chunk. Returns `(next position, bytes used)`; when the next position is `end`
    the stream has all rows. It grows when a row does not fit into it.
    """
    out: cython.p_uchar = stream
    room: cython.Py_ssize_t = len(stream)
    enough: cython.Py_ssize_t = room // 2
    chunk: cython.Py_ssize_t = position[0]
    at: cython.Py_ssize_t = position[1]
    used: cython.Py_ssize_t = 0
    size: cython.Py_ssize_t
    data: cython.p_const_uchar
    last: cython.Py_ssize_t = end[0]
    last_at: cython.Py_ssize_t = end[1]
    while used < enough and (chunk < last or (chunk == last and at < last_at)):
        if at >= ends[chunk]:
            chunk += 1
            at = 0
            continue
        data = chunk_of(chunks, address_of(chunk, 0))
        size = MOST_BESIDES + key_size(data, at) + value_size(data, at)
        if used + size > room:
            room = used + size
            stream.extend(bytes(room - len(stream)))
            out = stream
        # The WAL has every row as it was written, expired or not.
        used = _append(out, used, data, at, LONG_AGO)
        at += entry_size(data, at)
    return (chunk, at), used


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _append(
    out: cython.p_uchar,
    used: cython.Py_ssize_t,
    data: cython.p_const_uchar,
    at: cython.Py_ssize_t,
    now_ms: cython.longlong,
) -> cython.Py_ssize_t:
    """Append the entry at `at` of a chunk as a row of a stream; returns its end."""
    key_bytes: cython.Py_ssize_t = key_size(data, at)
    value_bytes: cython.Py_ssize_t = value_size(data, at)
    flags: cython.int = entry_flags(data, at) & 0x0F
    if flags & EXPIRE_FLAG and flags & KIND_MASK == 0 and entry_expires(data, at) <= now_ms:
        flags = (flags & CREATE_FLAG) | TOMBSTONE_KIND
        value_bytes = 0
    put_little(out, used, key_bytes, 2)
    put_little(out, used + 2, value_bytes, 4)
    copy(out, used + 6, data, key_start(data, at), key_bytes + value_bytes)
    used += 6 + key_bytes + value_bytes
    put_u64(out, used, entry_seq(data, at))
    out[used + 8] = flags
    used += 9
    if flags & EXPIRE_FLAG:
        put_u64(out, used, cython.cast(cython.ulonglong, entry_expires(data, at)))
        used += 8
    if flags & CREATE_FLAG:
        put_u64(out, used, cython.cast(cython.ulonglong, entry_created(data, at)))
        used += 8
    return used
