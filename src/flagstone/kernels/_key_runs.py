"""Brings the keys of a memtable in order: sorted runs of anchors, merged when they are of similar size.

A run is a tuple `(anchors, prefixes, skip)`. All keys of a run share their first `skip` bytes: keys of one kind begin
alike, and only what follows distinguishes them. A prefix is the eight bytes behind the first `skip` as a number that
sorts like them, so that most comparisons read no key.

`chunks` is the memory of the memtable, see `_entries`.
"""

from __future__ import annotations

from array import array

import cython
from cython.cimports.flagstone.kernels._bytes import common_prefix, get_u64
from cython.cimports.flagstone.kernels._entries import (
    ANCHOR_FLAG,
    address_of,
    chunk_of,
    compare_keys,
    entry_flags,
    entry_key,
    entry_size,
    key_size,
    key_start,
    offset_of,
)

MAX_SKIP = cython.declare(cython.Py_ssize_t, 0xFFFF)
# An insertion sort of so few is faster than anything else.
FEW = cython.declare(cython.Py_ssize_t, 24)
# So many times keys that agree in eight bytes are sorted by the next eight, before they are compared as a whole.
MAX_DEPTH = cython.declare(cython.int, 24)


def next_run(
    chunks: cython.ulonglong[::1],
    ends: cython.longlong[::1],
    chunk: cython.Py_ssize_t,
    at: cython.Py_ssize_t,
    room: cython.Py_ssize_t,
) -> tuple:
    """A run of at most `room` anchors from offset `at` of a chunk on: `(run, next chunk, next offset)`.

    `ends` has the end of the rows of each chunk. The run is None when there is no anchor left. Does not hold the
    interpreter's lock.
    """
    anchors: cython.ulonglong[::1] = _numbers(room)
    prefixes: cython.ulonglong[::1] = _numbers(room)
    spare: cython.ulonglong[::1] = _numbers(room)
    spare_prefixes: cython.ulonglong[::1] = _numbers(room)
    counts: cython.ulonglong[::1] = _numbers(8 * 256)
    count: cython.Py_ssize_t = 0
    before: cython.Py_ssize_t
    # The prefixes up to here are those of a longer `skip`.
    stale: cython.Py_ssize_t = 0
    skip: cython.Py_ssize_t = MAX_SKIP
    shared: cython.Py_ssize_t
    last: cython.Py_ssize_t = len(ends) - 1
    data: cython.p_const_uchar
    with cython.nogil:
        while chunk <= last and count < room:
            data = chunk_of(chunks, address_of(chunk, 0))
            before = count
            while at < ends[chunk] and count < room:
                if entry_flags(data, at) & ANCHOR_FLAG:
                    anchors[count] = address_of(chunk, at)
                    count += 1
                at += entry_size(data, at)
            # Now, because the chunk is in the processor's cache.
            shared = _all_shared(chunks, anchors, 0, before, count, skip)
            if shared < skip:
                skip = shared
                stale = before
            _fill_prefixes(chunks, anchors, prefixes, before, count, skip)
            if at < ends[chunk] or chunk == last:
                break
            chunk += 1
            at = 0
        _fill_prefixes(chunks, anchors, prefixes, 0, stale, skip)
        if cython.compiled:
            _sort(chunks, anchors, prefixes, spare, spare_prefixes, counts, 0, count, skip, 0)
    if count == 0:
        return None, chunk, at
    if not cython.compiled:
        anchors = array(
            "Q",
            sorted(
                anchors[:count], key=lambda anchor: entry_key(chunk_of(chunks, anchor), offset_of(anchor))
            ),
        )
        _fill_prefixes(chunks, anchors, prefixes, 0, count, skip)
    return (anchors[:count], prefixes[:count], skip), chunk, at


def merged_run(chunks: cython.ulonglong[::1], one: tuple, two: tuple) -> tuple:
    """One run of two. Does not hold the interpreter's lock."""
    total: cython.Py_ssize_t = len(one[0]) + len(two[0])
    anchors: cython.ulonglong[::1] = _numbers(total)
    prefixes: cython.ulonglong[::1] = _numbers(total)
    skip: cython.Py_ssize_t = _shared(chunks, one[0][0], two[0][0], min(one[2], two[2]))
    ones: cython.ulonglong[::1] = one[0]
    twos: cython.ulonglong[::1] = two[0]
    one_prefixes: cython.ulonglong[::1] = one[1] if one[2] == skip else _prefixes(chunks, ones, skip)
    two_prefixes: cython.ulonglong[::1] = two[1] if two[2] == skip else _prefixes(chunks, twos, skip)
    with cython.nogil:
        _merge(
            chunks,
            ones, one_prefixes, 0, len(ones),
            twos, two_prefixes, 0, len(twos),
            anchors, prefixes, 0,
        )  # fmt: skip
    return anchors, prefixes, skip


@cython.cfunc
def _numbers(count: cython.Py_ssize_t) -> array:
    """Memory for so many numbers."""
    return array("Q", bytes(8)) * count


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _shared(
    chunks: cython.ulonglong[::1], one: cython.ulonglong, two: cython.ulonglong, limit: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """How many leading bytes the keys of two entries have in common, at most `limit`."""
    one_data: cython.p_const_uchar = chunk_of(chunks, one)
    two_data: cython.p_const_uchar = chunk_of(chunks, two)
    one_at: cython.Py_ssize_t = offset_of(one)
    two_at: cython.Py_ssize_t = offset_of(two)
    size: cython.Py_ssize_t = min(limit, key_size(one_data, one_at), key_size(two_data, two_at))
    return common_prefix(one_data, key_start(one_data, one_at), two_data, key_start(two_data, two_at), size)


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _all_shared(
    chunks: cython.ulonglong[::1],
    anchors: cython.ulonglong[::1],
    one: cython.Py_ssize_t,
    start: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    limit: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    """How many leading bytes the key of anchor `one` has in common with all those from `start` to `stop`."""
    row: cython.Py_ssize_t
    for row in range(start, stop):
        limit = _shared(chunks, anchors[one], anchors[row], limit)
    return limit


@cython.cfunc
def _prefixes(
    chunks: cython.ulonglong[::1], anchors: cython.ulonglong[::1], skip: cython.Py_ssize_t
) -> array:
    prefixes = _numbers(len(anchors))
    _fill_prefixes(chunks, anchors, prefixes, 0, len(anchors), skip)
    return prefixes


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _fill_prefixes(
    chunks: cython.ulonglong[::1],
    anchors: cython.ulonglong[::1],
    prefixes: cython.ulonglong[::1],
    start: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    skip: cython.Py_ssize_t,
) -> cython.void:
    """Of each key the eight bytes behind the first `skip`, as numbers that sort like them."""
    data: cython.p_const_uchar
    at: cython.Py_ssize_t
    size: cython.Py_ssize_t
    row: cython.Py_ssize_t
    index: cython.Py_ssize_t
    value: cython.ulonglong
    for row in range(start, stop):
        data = chunk_of(chunks, anchors[row])
        at = offset_of(anchors[row])
        size = key_size(data, at)
        at = key_start(data, at)
        if size >= skip + 8:
            prefixes[row] = get_u64(data, at + skip)
            continue
        value = 0
        for index in range(skip, skip + 8):
            value <<= 8
            if index < size:
                value |= data[at + index]
        prefixes[row] = value


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _sort(
    chunks: cython.ulonglong[::1],
    anchors: cython.ulonglong[::1],
    prefixes: cython.ulonglong[::1],
    spare: cython.ulonglong[::1],
    spare_prefixes: cython.ulonglong[::1],
    counts: cython.ulonglong[::1],
    start: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    skip: cython.Py_ssize_t,
    depth: cython.int,
) -> cython.void:
    """Sort the anchors from `start` to `stop`, and with them their prefixes, the bytes behind the first `skip`."""
    row: cython.Py_ssize_t
    end: cython.Py_ssize_t
    at: cython.Py_ssize_t
    inner: cython.Py_ssize_t
    prefix: cython.ulonglong
    if stop - start <= FEW:
        _sort_few(chunks, anchors, prefixes, start, stop)
        return
    if depth == MAX_DEPTH:
        _sort_by_comparing(chunks, anchors, prefixes, spare, spare_prefixes, start, stop)
        return
    _sort_by_prefix(anchors, prefixes, spare, spare_prefixes, counts, start, stop)
    row = start
    while row < stop:
        prefix = prefixes[row]
        end = row + 1
        while end < stop and prefixes[end] == prefix:
            end += 1
        if end - row > 1:
            # A key that ends within its prefix shares less, but the prefix is filled up with zeros.
            inner = _all_shared(chunks, anchors, row, row, end, MAX_SKIP)
            if inner < skip + 8:
                inner = skip + 8
            _fill_prefixes(chunks, anchors, prefixes, row, end, inner)
            _sort(chunks, anchors, prefixes, spare, spare_prefixes, counts, row, end, inner, depth + 1)
            for at in range(row, end):
                prefixes[at] = prefix
        row = end


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _sort_by_prefix(
    anchors: cython.ulonglong[::1],
    prefixes: cython.ulonglong[::1],
    spare: cython.ulonglong[::1],
    spare_prefixes: cython.ulonglong[::1],
    counts: cython.ulonglong[::1],
    start: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
) -> cython.void:
    """Radix sort: distribute them by the last byte of the prefix, then by the one before, up to the first.

    The sort is stable, so each pass keeps the order of the passes before. A byte that all prefixes share needs no pass.
    """
    row: cython.Py_ssize_t
    byte: cython.Py_ssize_t
    place: cython.ulonglong
    below: cython.ulonglong
    prefix: cython.ulonglong
    bucket: cython.Py_ssize_t
    moved: cython.bint = False
    for bucket in range(8 * 256):
        counts[bucket] = 0
    for row in range(start, stop):
        prefix = prefixes[row]
        for byte in range(8):
            counts[256 * byte + ((prefix >> (8 * byte)) & 0xFF)] += 1
    for byte in range(8):
        bucket = 256 * byte + ((prefixes[start] >> (8 * byte)) & 0xFF)
        if counts[bucket] == cython.cast(cython.ulonglong, stop - start):
            continue
        below = start
        for bucket in range(256 * byte, 256 * byte + 256):
            place = below
            below += counts[bucket]
            counts[bucket] = place
        if moved:
            _distribute(spare, spare_prefixes, anchors, prefixes, counts, start, stop, byte)
        else:
            _distribute(anchors, prefixes, spare, spare_prefixes, counts, start, stop, byte)
        moved = not moved
    if moved:
        for row in range(start, stop):
            anchors[row] = spare[row]
            prefixes[row] = spare_prefixes[row]


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _distribute(
    source: cython.ulonglong[::1],
    source_prefixes: cython.ulonglong[::1],
    target: cython.ulonglong[::1],
    target_prefixes: cython.ulonglong[::1],
    places: cython.ulonglong[::1],
    start: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
    byte: cython.Py_ssize_t,
) -> cython.void:
    """One pass: each anchor goes to the next place of its bucket."""
    row: cython.Py_ssize_t
    place: cython.ulonglong
    bucket: cython.ulonglong
    prefix: cython.ulonglong
    for row in range(start, stop):
        prefix = source_prefixes[row]
        bucket = 256 * byte + ((prefix >> (8 * byte)) & 0xFF)
        place = places[bucket]
        places[bucket] = place + 1
        target[place] = source[row]
        target_prefixes[place] = prefix


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _sort_by_comparing(
    chunks: cython.ulonglong[::1],
    anchors: cython.ulonglong[::1],
    prefixes: cython.ulonglong[::1],
    spare: cython.ulonglong[::1],
    spare_prefixes: cython.ulonglong[::1],
    start: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
) -> cython.void:
    """Merge sort, bottom up."""
    width: cython.Py_ssize_t = FEW
    at: cython.Py_ssize_t
    at = start
    while at < stop:
        _sort_few(chunks, anchors, prefixes, at, min(at + width, stop))
        at += width
    while width < stop - start:
        at = start
        while at < stop:
            _merge(
                chunks,
                anchors, prefixes, at, min(at + width, stop),
                anchors, prefixes, min(at + width, stop), min(at + 2 * width, stop),
                spare, spare_prefixes, at,
            )  # fmt: skip
            at += 2 * width
        for at in range(start, stop):
            anchors[at] = spare[at]
            prefixes[at] = spare_prefixes[at]
        width *= 2


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _sort_few(
    chunks: cython.ulonglong[::1],
    anchors: cython.ulonglong[::1],
    prefixes: cython.ulonglong[::1],
    start: cython.Py_ssize_t,
    stop: cython.Py_ssize_t,
) -> cython.void:
    """Insertion sort, which is faster than merging while there are few."""
    index: cython.Py_ssize_t
    at: cython.Py_ssize_t
    anchor: cython.ulonglong
    prefix: cython.ulonglong
    for index in range(start + 1, stop):
        anchor = anchors[index]
        prefix = prefixes[index]
        at = index
        while at > start and (
            prefixes[at - 1] > prefix
            or (prefixes[at - 1] == prefix and compare_keys(chunks, anchors[at - 1], anchor) > 0)
        ):
            anchors[at] = anchors[at - 1]
            prefixes[at] = prefixes[at - 1]
            at -= 1
        anchors[at] = anchor
        prefixes[at] = prefix


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _merge(
    chunks: cython.ulonglong[::1],
    one: cython.ulonglong[::1],
    one_prefixes: cython.ulonglong[::1],
    one_at: cython.Py_ssize_t,
    one_end: cython.Py_ssize_t,
    two: cython.ulonglong[::1],
    two_prefixes: cython.ulonglong[::1],
    two_at: cython.Py_ssize_t,
    two_end: cython.Py_ssize_t,
    out: cython.ulonglong[::1],
    out_prefixes: cython.ulonglong[::1],
    at: cython.Py_ssize_t,
) -> cython.void:
    first: cython.bint
    while one_at < one_end or two_at < two_end:
        if one_at == one_end:
            first = False
        elif two_at == two_end:
            first = True
        elif one_prefixes[one_at] != two_prefixes[two_at]:
            first = one_prefixes[one_at] < two_prefixes[two_at]
        else:
            first = compare_keys(chunks, one[one_at], two[two_at]) < 0
        if first:
            out[at] = one[one_at]
            out_prefixes[at] = one_prefixes[one_at]
            one_at += 1
        else:
            out[at] = two[two_at]
            out_prefixes[at] = two_prefixes[two_at]
            two_at += 1
        at += 1
