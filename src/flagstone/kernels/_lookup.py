"""Lookups of many ascending keys at once: which blocks have them, and where in the blocks their values are.

Keys are a run of bytes with their offsets, without duplicates. A search goes through each block once, from restart
point to restart point, for all keys that fall into it. Like `_scan.ColumnSieve` it raises nothing for damage: the
caller then reads the same keys one by one, which raises the detailed error.
"""

from __future__ import annotations

from array import array
from typing import Any

import cython
from cython.cimports.flagstone.kernels._bytes import MASK32, compare, copy, get_u16, get_u64
from cython.cimports.flagstone.kernels._rows import (
    EXPIRE_FLAG,
    MERGE_KIND,
    TOMBSTONE_KIND,
    Entry,
    entries_end,
    expires_at,
    new_entry,
    read_flags,
    read_lengths,
)
from cython.cimports.flagstone.kernels._siphash import siphash

MISSING = 0
FOUND = 1
HIDDEN = 2
"""The newest version is a tombstone, or has expired."""
OPEN = 3
"""The newest version is a merge operand: the caller must read the key in the ordinary way."""


def lower_bound(
    offsets: cython.const[cython.longlong][::1], data: cython.const[cython.uchar][::1], key: bytes
) -> int:
    """How many of the ascending keys are below `key`."""
    low: cython.Py_ssize_t = 0
    high: cython.Py_ssize_t = len(offsets) - 1
    middle: cython.Py_ssize_t
    keys: cython.p_const_uchar = _start(data)
    wanted: cython.p_const_uchar = key
    size: cython.Py_ssize_t = len(key)
    while low < high:
        middle = (low + high) >> 1
        if compare(keys, offsets[middle], offsets[middle + 1] - offsets[middle], wanted, 0, size) < 0:
            low = middle + 1
        else:
            high = middle
    return low


def may_contain(
    bloom: bytes,
    offsets: cython.const[cython.longlong][::1],
    data: cython.const[cython.uchar][::1],
    positions: cython.const[cython.longlong][::1],
) -> array[int]:
    """Those of the positions whose keys the bloom filter, which begins with its number of probes, does not exclude."""
    kept = array("q", bytes(8 * len(positions)))
    out: cython.longlong[::1] = kept
    bits: cython.p_const_uchar = bloom
    keys: cython.p_const_uchar = _start(data)
    count: cython.Py_ssize_t = 0
    index: cython.Py_ssize_t
    row: cython.longlong
    hashed: cython.ulonglong
    modulus: cython.ulonglong = 8 * (len(bloom) - 2) if len(bloom) > 2 else 0
    turns: cython.int = get_u16(bits, 0) if modulus else 0
    step: cython.int
    place: cython.ulonglong
    stride: cython.ulonglong
    passes: cython.bint
    if modulus == 0:
        return array("q")
    for index in range(len(positions)):
        row = positions[index]
        hashed = siphash(keys, offsets[row], offsets[row + 1] - offsets[row])
        place = (hashed & MASK32) % modulus
        stride = (hashed >> 32) % modulus
        passes = True
        for step in range(turns):
            stride = (stride + step) % modulus
            if not (bits[2 + (place >> 3)] >> (place & 7)) & 1:
                passes = False
                break
            place += stride
            if place >= modulus:
                place -= modulus
        if passes:
            out[count] = row
            count += 1
    return kept[:count]


def locate(
    first_keys: list[Any],
    offsets: cython.const[cython.longlong][::1],
    data: cython.const[cython.uchar][::1],
    positions: cython.const[cython.longlong][::1],
) -> tuple[array[int], array[int], list[int]]:
    """The probes for the keys at some ascending positions: `(rows, slots, blocks)`.

    Probe `i` looks for key `rows[i]` in block `blocks[slots[i]]`. A key that equals the separator of two blocks has two
    probes: its versions may begin in the first.
    """
    total: cython.Py_ssize_t = len(positions)
    count: cython.Py_ssize_t = len(first_keys)
    # Each separator equals at most one key.
    rows = array("q", bytes(8 * (total + count)))
    slots = array("q", bytes(8 * (total + count)))
    rows_out: cython.longlong[::1] = rows
    slots_out: cython.longlong[::1] = slots
    keys: cython.p_const_uchar = _start(data)
    blocks: list = []
    probes: cython.Py_ssize_t = 0
    slot: cython.Py_ssize_t = -1
    last: cython.Py_ssize_t = -1
    number: cython.Py_ssize_t = 0
    low: cython.Py_ssize_t
    high: cython.Py_ssize_t
    middle: cython.Py_ssize_t
    step: cython.Py_ssize_t
    index: cython.Py_ssize_t
    row: cython.longlong
    at: cython.Py_ssize_t
    size: cython.Py_ssize_t
    for index in range(total):
        row = positions[index]
        at = offsets[row]
        size = offsets[row + 1] - at
        # Of the separators behind `number` the first that is not below the key; keys ascend, so it is near.
        low = number
        step = 1
        while low + step < count and _order(cython.cast(bytes, first_keys[low + step]), keys, at, size) < 0:
            low += step
            step *= 2
        high = min(low + step, count)
        while low + 1 < high:
            middle = (low + high) >> 1
            if _order(cython.cast(bytes, first_keys[middle]), keys, at, size) < 0:
                low = middle
            else:
                high = middle
        number = low
        while True:
            if number != last:
                blocks.append(number)
                last = number
                slot += 1
            rows_out[probes] = row
            slots_out[probes] = slot
            probes += 1
            if number + 1 >= count or _order(cython.cast(bytes, first_keys[number + 1]), keys, at, size) != 0:
                break
            number += 1
        number = low
    return rows[:probes], slots[:probes], blocks


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _order(
    separator: bytes, keys: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.Py_ssize_t
) -> cython.int:
    """Below 0, 0 or above 0, as the separator is below, equal to or above the key."""
    return compare(separator, 0, len(separator), keys, at, size)


def find(
    chunk: bytes,
    bounds: cython.const[cython.longlong][::1],
    rows: cython.const[cython.longlong][::1],
    slots: cython.const[cython.longlong][::1],
    first_slot: cython.Py_ssize_t,
    offsets: cython.const[cython.longlong][::1],
    data: cython.const[cython.uchar][::1],
    max_seq: cython.ulonglong,
    now_ms: cython.longlong,
    hide_expired: cython.bint,
    status: cython.uchar[::1],
    places: cython.longlong[::1],
    sizes: cython.longlong[::1],
) -> int:
    """Look for the keys of some probes in the blocks of a chunk, of which the first has the slot `first_slot`.

    For every key that is there writes its status, and for `FOUND` where its value is in the chunk. Returns the bytes of
    all values found, or -1 if a block is damaged. Does not hold the interpreter's lock.
    """
    probes: cython.Py_ssize_t = len(rows)
    blocks: cython.Py_ssize_t = len(bounds) // 2
    keys: cython.p_const_uchar = _start(data)
    raw: cython.p_const_uchar = chunk
    longest: cython.Py_ssize_t = 0
    slot: cython.Py_ssize_t
    block: cython.Py_ssize_t = -1
    index: cython.Py_ssize_t
    row: cython.longlong
    at: cython.Py_ssize_t = 0
    end: cython.Py_ssize_t = 0
    key_at: cython.Py_ssize_t
    key_size: cython.Py_ssize_t
    entry: Entry = new_entry()
    mark: Entry = new_entry()
    restarts: cython.Py_ssize_t = 0
    restart: cython.Py_ssize_t = 0
    restart_at: cython.Py_ssize_t
    size: cython.Py_ssize_t = 0
    standing: cython.bint = False
    order: cython.int
    total: cython.Py_ssize_t = 0
    sound: cython.bint = True
    if len(slots) != probes or len(places) < len(status) or len(sizes) < len(status):
        raise ValueError("the arrays of a lookup do not fit")
    for index in range(blocks):
        if not 0 <= bounds[2 * index] <= bounds[2 * index + 1] <= len(chunk):
            raise ValueError("a block reaches past its chunk")
        longest = max(longest, bounds[2 * index + 1] - bounds[2 * index])
    for index in range(probes):
        if not first_slot <= slots[index] < first_slot + blocks or not 0 <= rows[index] < len(status):
            raise ValueError("a probe is outside of its chunk")
    held: bytearray = bytearray(longest + 1)
    known: cython.p_uchar = held
    with cython.nogil:
        for index in range(probes):
            slot = slots[index] - first_slot
            row = rows[index]
            if slot != block:
                block = slot
                at = bounds[2 * block]
                end = entries_end(raw, at, bounds[2 * block + 1])
                if end < 0:
                    sound = False
                    break
                restarts = get_u16(raw, bounds[2 * block + 1] - 2)
                restart = 0
                size = 0
                standing = False
            if status[row]:
                continue
            key_at = offsets[row]
            key_size = offsets[row + 1] - key_at
            # Skip to the last restart point whose key is below the wanted one.
            while restart + 1 < restarts:
                restart_at = bounds[2 * block] + get_u16(raw, end + 2 * (restart + 1))
                if (
                    restart_at >= end
                    or read_lengths(raw, restart_at, end, cython.address(mark))
                    or mark.shared
                    or mark.value_at > end
                ):
                    sound = False
                    break
                if compare(raw, mark.suffix_at, mark.unshared, keys, key_at, key_size) >= 0:
                    break
                restart += 1
                if restart_at > at:
                    at = restart_at
                    size = 0
                    standing = False
            if not sound:
                break
            while standing or at < end:
                if not standing:
                    if (
                        read_lengths(raw, at, end, cython.address(entry))
                        or read_flags(raw, end, cython.address(entry))
                        or entry.shared > size
                        or entry.shared + entry.unshared > longest
                    ):
                        sound = False
                        break
                    copy(known, entry.shared, raw, entry.suffix_at, entry.unshared)
                    size = entry.shared + entry.unshared
                    standing = True
                order = compare(known, 0, size, keys, key_at, key_size)
                if order > 0:
                    break
                if order == 0 and get_u64(raw, entry.tail_at) <= max_seq:
                    if entry.flags & MERGE_KIND:
                        status[row] = 3
                    elif entry.flags & TOMBSTONE_KIND or (
                        hide_expired
                        and entry.flags & EXPIRE_FLAG
                        and expires_at(raw, cython.address(entry)) <= now_ms
                    ):
                        status[row] = 2
                    else:
                        status[row] = 1
                        places[row] = entry.value_at
                        sizes[row] = entry.value_size
                        total += entry.value_size
                    break
                at = entry.stop
                standing = False
            if not sound:
                break
    return total if sound else -1


def gather(
    chunk: bytes,
    rows: cython.const[cython.longlong][::1],
    status: cython.const[cython.uchar][::1],
    places: cython.const[cython.longlong][::1],
    sizes: cython.longlong[::1],
    found: cython.longlong[::1],
    ends: cython.int[::1],
    values: cython.uchar[::1],
) -> int:
    """Copy the values that `find` found for the probes into one column; returns how many there are.

    `found` gets their rows, each once, and `ends` the offsets of the column. The size of a copied value becomes -1, so
    that the next chunk leaves it out.
    """
    raw: cython.p_const_uchar = chunk
    out: cython.p_uchar
    count: cython.Py_ssize_t = 0
    at: cython.Py_ssize_t = 0
    index: cython.Py_ssize_t
    row: cython.longlong
    if cython.compiled:
        out = cython.address(values[0])
    else:
        out = values
    ends[0] = 0
    for index in range(len(rows)):
        row = rows[index]
        if status[row] != 1 or sizes[row] < 0:
            continue
        if places[row] + sizes[row] > len(chunk) or at + sizes[row] > len(values) or count >= len(found):
            raise ValueError("a value reaches past its chunk")
        copy(out, at, raw, places[row], sizes[row])
        at += sizes[row]
        sizes[row] = -1
        found[count] = row
        count += 1
        ends[count] = at
    return count


@cython.cfunc
@cython.inline
def _start(data: cython.const[cython.uchar][::1]) -> cython.p_const_uchar:
    """The address of the first byte; of nothing, none is read."""
    if not cython.compiled:
        return data
    return cython.address(data[0]) if len(data) else cython.NULL
