"""Columns from order-preserving keys: reads one part of every row per call. See `_tuple_writer`.

Nothing is raised for bad bytes: reading answers with the first row that is not what was asked for, or -1, and the
caller explains it from that row alone. That keeps the loops free of Python, and they run without its lock.
"""

from __future__ import annotations

import cython
from cython.cimports.flagstone.kernels._bytes import MASK32, MASK64, get_big
from cython.cimports.flagstone.kernels._key_codes import (
    BIAS,
    BOOLEAN,
    DATE,
    DECIMAL_NEGATIVE,
    DECIMAL_POSITIVE,
    DECIMAL_ZERO,
    FALSE,
    FLOAT,
    INFINITY_BITS,
    MAX_COLUMN_BYTES,
    NAN_BITS,
    NEGATIVE,
    NULL_CODE,
    POSITIVE,
    SIGN32,
    SIGN64,
    SIGNED,
    UNSIGNED,
    number_width,
)
from cython.cimports.flagstone.kernels._views import bytes_of


def read_numbers(
    code: int,
    limit: int,
    offsets: cython.const[cython.longlong][::1],
    data: cython.const[cython.uchar][::1],
    cursors: cython.longlong[::1],
    values: cython.ulonglong[::1],
    valid: cython.uchar[::1],
) -> int:
    """Take one number of each row. Integers above `limit`, or below `-limit - 1`, do not fit and are refused.

    Returns -1, or the first row that has something else; its cursor and those behind it are unmoved.
    """
    kind: cython.int = code
    most: cython.ulonglong = limit
    bad: cython.Py_ssize_t = -1
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(cursors)
    at: cython.longlong
    room: cython.longlong
    bits: cython.ulonglong
    plain: cython.ulonglong
    found: cython.int
    width: cython.int
    negative: cython.bint
    if len(offsets) <= rows or len(values) < rows or len(valid) < rows:
        raise ValueError("a column has fewer rows than the cursors")
    source: cython.p_const_uchar = bytes_of(data)
    with cython.nogil:
        for row in range(rows):
            at = cursors[row]
            room = offsets[row + 1] - at - 1
            bad = row
            if room < 0:
                break
            found = source[at]
            at += 1
            values[row] = 0
            valid[row] = found != NULL_CODE
            if found == NULL_CODE:
                cursors[row] = at
                continue
            if kind in (SIGNED, UNSIGNED):
                negative = found <= NEGATIVE
                width = NEGATIVE - found if negative else found - POSITIVE
                if width > 8 or width < 0 or width > room or (negative and kind == UNSIGNED):
                    break
                bits = get_big(source, at, width)
                plain = bits
                if negative:
                    if width < 8:
                        bits |= (MASK64 << (8 * width)) & MASK64
                    plain = bits ^ MASK64
                if plain > most or number_width(plain) != width:
                    break
            elif kind == BOOLEAN:
                width = 0
                bits = found - FALSE if found >= FALSE else 2
                if bits > 1:
                    break
            elif found != kind:
                break
            elif kind == DATE:
                width = 4
                if room < width:
                    break
                bits = get_big(source, at, 4) ^ SIGN32
                if bits & SIGN32:
                    bits |= MASK64 ^ MASK32
            else:
                width = 8
                if room < width:
                    break
                bits = get_big(source, at, 8)
                if kind != FLOAT or bits & SIGN64:
                    bits ^= SIGN64
                else:
                    bits ^= MASK64
                if kind == FLOAT and (
                    bits == SIGN64 or (bits & (MASK64 ^ SIGN64) > INFINITY_BITS and bits != NAN_BITS)
                ):
                    break
            values[row] = bits
            cursors[row] = at + width
        else:
            bad = -1
    return bad


def find_bytes(
    code: int,
    offsets: cython.const[cython.longlong][::1],
    data: cython.const[cython.uchar][::1],
    cursors: cython.const[cython.longlong][::1],
    found: cython.int[::1],
    valid: cython.uchar[::1],
) -> int:
    """Lay out a column for one string of each row: `found` gets its offsets. The cursors stay.

    Returns -1, or the first row that has something else.
    """
    kind: cython.int = code
    bad: cython.Py_ssize_t = -1
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(cursors)
    at: cython.longlong
    end: cython.longlong
    size: cython.longlong = 0
    if len(offsets) <= rows or len(found) <= rows or len(valid) < rows:
        raise ValueError("a column has fewer rows than the cursors")
    source: cython.p_const_uchar = bytes_of(data)
    found[0] = 0
    with cython.nogil:
        for row in range(rows):
            at = cursors[row]
            end = offsets[row + 1]
            bad = row
            if at >= end or (source[at] != kind and source[at] != NULL_CODE):
                break
            valid[row] = source[at] == kind
            at += 1
            if valid[row]:
                while at < end and source[at] != 0:
                    if source[at] == 1:
                        at += 1
                        if at == end or source[at] == 0 or source[at] > 2:
                            at = end
                            break
                    size += 1
                    at += 1
                if at >= end or size > MAX_COLUMN_BYTES:
                    break
            found[row + 1] = size
        else:
            bad = -1
    return bad


def read_bytes(
    data: cython.const[cython.uchar][::1],
    cursors: cython.longlong[::1],
    found: cython.const[cython.int][::1],
    valid: cython.const[cython.uchar][::1],
    out: cython.uchar[::1],
) -> None:
    """Take one string of each row, as `find_bytes` has just laid them out."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(cursors)
    at: cython.longlong
    spot: cython.longlong
    if len(found) <= rows or len(valid) < rows or len(out) < found[rows]:
        raise ValueError("the columns are smaller than find_bytes() found")
    source: cython.p_const_uchar = bytes_of(data)
    with cython.nogil:
        for row in range(rows):
            at = cursors[row] + 1
            if valid[row]:
                for spot in range(found[row], found[row + 1]):
                    if source[at] == 1:
                        at += 1
                        out[spot] = source[at] - 1
                    else:
                        out[spot] = source[at]
                    at += 1
                at += 1
            cursors[row] = at


def read_decimals(
    precision: int,
    scale: int,
    offsets: cython.const[cython.longlong][::1],
    data: cython.const[cython.uchar][::1],
    cursors: cython.longlong[::1],
    values: cython.ulonglong[::1],
    valid: cython.uchar[::1],
) -> int:
    """Take one decimal of each row, as a 128-bit integer of two words, low word first.

    Returns -1, or the first row that has something else, or more digits than the precision and scale have.
    """
    bad: cython.Py_ssize_t = -1
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(cursors)
    most: cython.int = precision
    shift: cython.int = scale
    at: cython.longlong
    end: cython.longlong
    places: cython.int
    flip: cython.int
    pair: cython.int
    factor: cython.int
    low: cython.ulonglong
    high: cython.ulonglong
    part: cython.ulonglong
    if len(offsets) <= rows or len(values) < 2 * rows or len(valid) < rows:
        raise ValueError("a column has fewer rows than the cursors")
    source: cython.p_const_uchar = bytes_of(data)
    with cython.nogil:
        for row in range(rows):
            at = cursors[row]
            end = offsets[row + 1]
            bad = row
            if at >= end:
                break
            pair = source[at]
            at += 1
            valid[row] = pair != NULL_CODE
            values[2 * row] = 0
            values[2 * row + 1] = 0
            if pair in (NULL_CODE, DECIMAL_ZERO):
                cursors[row] = at
                continue
            if pair != DECIMAL_NEGATIVE and pair != DECIMAL_POSITIVE:
                break
            flip = 0xFF if pair == DECIMAL_NEGATIVE else 0
            if end - at < 4:
                break
            # The digits that the integer has, still to come.
            places = (((source[at] ^ flip) << 8) | (source[at + 1] ^ flip)) - BIAS + shift
            at += 2
            if places > most or places < 1:
                break
            low = high = 0
            factor = 100
            pair = (source[at] ^ flip) - 1
            # No zero leads.
            if pair < 10:
                break
            while at < end and source[at] != flip:
                pair = (source[at] ^ flip) - 1
                at += 1
                factor = 100
                if places == 1 and pair % 10 == 0:
                    pair //= 10
                    factor = 10
                elif places < 2:
                    pair = 100
                if pair > 99:
                    break
                places -= 2 if factor == 100 else 1
                part = (low & MASK32) * factor + pair
                low = (low >> 32) * factor + (part >> 32)
                high = (high * factor + (low >> 32)) & MASK64
                low = ((low << 32) & MASK64) | (part & MASK32)
            # A last pair of zeros would be a second way to write the same number.
            if pair > 99 or pair == 0 or at >= end:
                break
            while places > 0:
                part = (low & MASK32) * 10
                low = (low >> 32) * 10 + (part >> 32)
                high = (high * 10 + (low >> 32)) & MASK64
                low = ((low << 32) & MASK64) | (part & MASK32)
                places -= 1
            if flip:
                low ^= MASK64
                high ^= MASK64
                low = (low + 1) & MASK64
                if low == 0:
                    high = (high + 1) & MASK64
            values[2 * row] = low
            values[2 * row + 1] = high
            cursors[row] = at + 1
        else:
            bad = -1
    return bad
