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
from cython.cimports.flagstone.kernels._entries import HEADER, chunk_of, compare_keys, key_size, offset_of

MAX_SKIP = cython.declare(cython.Py_ssize_t, 0xFFFF)


def sorted_run(chunks: cython.ulonglong[::1], anchors: cython.ulonglong[::1]) -> tuple:
    """A run of these anchors: merge sort, bottom up. Uses `anchors` as its memory."""
    total: cython.Py_ssize_t = len(anchors)
    source: cython.ulonglong[::1] = anchors
    target: cython.ulonglong[::1] = array("Q", bytes(8 * total))
    width: cython.Py_ssize_t = 16
    at: cython.Py_ssize_t
    skip: cython.Py_ssize_t = MAX_SKIP
    for at in range(total):
        skip = _shared(chunks, source[0], source[at], skip)
    source_prefixes: cython.ulonglong[::1] = _prefixes(chunks, source, skip)
    target_prefixes: cython.ulonglong[::1] = array("Q", bytes(8 * total))
    for at in range(0, total, width):
        _sort_few(chunks, source, source_prefixes, at, min(at + width, total))
    while width < total:
        for at in range(0, total, 2 * width):
            _merge(
                chunks,
                source, source_prefixes, at, min(at + width, total),
                source, source_prefixes, min(at + width, total), min(at + 2 * width, total),
                target, target_prefixes, at,
            )  # fmt: skip
        source, target = target, source
        source_prefixes, target_prefixes = target_prefixes, source_prefixes
        width *= 2
    return source, source_prefixes, skip


def merged_run(chunks: cython.ulonglong[::1], one: tuple, two: tuple) -> tuple:
    """One run of two."""
    total: cython.Py_ssize_t = len(one[0]) + len(two[0])
    anchors, prefixes = array("Q", bytes(8 * total)), array("Q", bytes(8 * total))
    skip = _shared(chunks, one[0][0], two[0][0], min(one[2], two[2]))
    one_prefixes = one[1] if one[2] == skip else _prefixes(chunks, one[0], skip)
    two_prefixes = two[1] if two[2] == skip else _prefixes(chunks, two[0], skip)
    _merge(
        chunks,
        one[0], one_prefixes, 0, len(one[0]),
        two[0], two_prefixes, 0, len(two[0]),
        anchors, prefixes, 0,
    )  # fmt: skip
    return anchors, prefixes, skip


@cython.cfunc
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
    return common_prefix(one_data, one_at + HEADER, two_data, two_at + HEADER, size)


@cython.cfunc
def _prefixes(
    chunks: cython.ulonglong[::1], anchors: cython.ulonglong[::1], skip: cython.Py_ssize_t
) -> array:
    """Of each key the eight bytes behind the first `skip`, as numbers that sort like them."""
    prefixes = array("Q", bytes(8 * len(anchors)))
    out: cython.ulonglong[::1] = prefixes
    data: cython.p_const_uchar
    at: cython.Py_ssize_t
    size: cython.Py_ssize_t
    row: cython.Py_ssize_t
    index: cython.Py_ssize_t
    value: cython.ulonglong
    for row in range(len(anchors)):
        data = chunk_of(chunks, anchors[row])
        at = offset_of(anchors[row])
        size = key_size(data, at)
        at += HEADER
        if size >= skip + 8:
            out[row] = get_u64(data, at + skip)
            continue
        value = 0
        for index in range(skip, skip + 8):
            value <<= 8
            if index < size:
                value |= data[at + index]
        out[row] = value
    return prefixes


@cython.cfunc
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
