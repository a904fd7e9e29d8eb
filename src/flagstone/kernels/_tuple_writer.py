"""Order-preserving keys from columns: `docs/keys.md` has the layout, `keys/scalars` the same for one tuple.

Encoding takes two rounds over the columns: `measure_…` adds up what each row needs, `lay_out` gives each its place,
`write_…` appends one part to every row. `cursors` has the place of each row; it is the only state.

Numbers travel as 64-bit patterns (`Q`), whatever they mean. A `valid` with no element means that no row is null. The
loops are free of Python, and run without its lock. `_tuple_reader` reads the keys.
"""

from __future__ import annotations

import cython
from cython.cimports.flagstone.kernels._bytes import MASK32, MASK64, MAX_KEY_BYTES, copy, put_big
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
from cython.cimports.flagstone.kernels._views import bytes_of, room_of

# The digits of the largest magnitude, rounded up to whole chunks.
DIGITS = cython.declare(cython.int, 40)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _number_size(kind: cython.int, bits: cython.ulonglong) -> cython.int:
    if kind == SIGNED:
        return 1 + number_width(bits ^ MASK64 if bits & SIGN64 else bits)
    if kind == UNSIGNED:
        return 1 + number_width(bits)
    if kind == BOOLEAN:
        return 1
    return 5 if kind == DATE else 9


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _put_number(
    kind: cython.int, bits: cython.ulonglong, out: cython.p_uchar, at: cython.longlong
) -> cython.longlong:
    """Write one part; returns where it ends."""
    width: cython.int
    if kind == SIGNED and bits & SIGN64:
        width = number_width(bits ^ MASK64)
        out[at] = NEGATIVE - width
        put_big(out, at + 1, bits, width)
        return at + 1 + width
    if kind in (SIGNED, UNSIGNED):
        width = number_width(bits)
        out[at] = POSITIVE + width
        put_big(out, at + 1, bits, width)
        return at + 1 + width
    if kind == BOOLEAN:
        out[at] = FALSE + (bits & 1)
        return at + 1
    out[at] = kind
    if kind == DATE:
        put_big(out, at + 1, bits ^ SIGN32, 4)
        return at + 5
    if kind == FLOAT:
        if bits & (MASK64 ^ SIGN64) > INFINITY_BITS:
            bits = NAN_BITS
        elif bits == SIGN64:
            bits = 0
        if bits & SIGN64:
            bits ^= MASK64
        else:
            bits ^= SIGN64
    else:
        bits ^= SIGN64
    put_big(out, at + 1, bits, 8)
    return at + 9


def measure_numbers(
    code: int,
    values: cython.const[cython.ulonglong][::1],
    valid: cython.const[cython.uchar][::1],
    sizes: cython.longlong[::1],
) -> None:
    """Add to each row's size what its number takes; `code` is the kind of the numbers."""
    kind: cython.int = code
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(sizes)
    checked: cython.bint = len(valid) > 0
    if len(values) < rows or (checked and len(valid) < rows):
        raise ValueError("a column has fewer rows than the sizes")
    with cython.nogil:
        for row in range(rows):
            if checked and not valid[row]:
                sizes[row] += 1
            else:
                sizes[row] += _number_size(kind, values[row])


def write_numbers(
    code: int,
    values: cython.const[cython.ulonglong][::1],
    valid: cython.const[cython.uchar][::1],
    cursors: cython.longlong[::1],
    out: cython.uchar[::1],
) -> None:
    """Append its number to each row. The room must be what `measure_numbers` added up."""
    kind: cython.int = code
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(cursors)
    checked: cython.bint = len(valid) > 0
    if len(values) < rows or (checked and len(valid) < rows):
        raise ValueError("a column has fewer rows than the cursors")
    if rows == 0:
        return
    target: cython.p_uchar = room_of(out)
    with cython.nogil:
        for row in range(rows):
            if checked and not valid[row]:
                target[cursors[row]] = NULL_CODE
                cursors[row] += 1
            else:
                cursors[row] = _put_number(kind, values[row], target, cursors[row])


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _escapes(data: cython.p_const_uchar, start: cython.longlong, stop: cython.longlong) -> cython.longlong:
    """How many of the bytes take two."""
    count: cython.longlong = 0
    at: cython.longlong
    for at in range(start, stop):
        count += data[at] < 2
    return count


def measure_bytes(
    offsets: cython.const[cython.longlong][::1],
    data: cython.const[cython.uchar][::1],
    valid: cython.const[cython.uchar][::1],
    sizes: cython.longlong[::1],
) -> None:
    """Add to each row's size what its string takes: a code, the escaped bytes, an end."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(sizes)
    checked: cython.bint = len(valid) > 0
    if len(offsets) <= rows or (checked and len(valid) < rows):
        raise ValueError("a column has fewer rows than the sizes")
    source: cython.p_const_uchar = bytes_of(data)
    with cython.nogil:
        for row in range(rows):
            if checked and not valid[row]:
                sizes[row] += 1
            else:
                sizes[row] += 2 + offsets[row + 1] - offsets[row]
                sizes[row] += _escapes(source, offsets[row], offsets[row + 1])


def write_bytes(
    code: int,
    offsets: cython.const[cython.longlong][::1],
    data: cython.const[cython.uchar][::1],
    valid: cython.const[cython.uchar][::1],
    cursors: cython.longlong[::1],
    out: cython.uchar[::1],
) -> None:
    """Append its string to each row. The room must be what `measure_bytes` added up."""
    kind: cython.int = code
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(cursors)
    checked: cython.bint = len(valid) > 0
    at: cython.longlong
    spot: cython.longlong
    start: cython.longlong
    stop: cython.longlong
    byte: cython.int
    if len(offsets) <= rows or (checked and len(valid) < rows):
        raise ValueError("a column has fewer rows than the cursors")
    if rows == 0:
        return
    source: cython.p_const_uchar = bytes_of(data)
    target: cython.p_uchar = room_of(out)
    with cython.nogil:
        for row in range(rows):
            at = cursors[row]
            if checked and not valid[row]:
                target[at] = NULL_CODE
                cursors[row] = at + 1
                continue
            start = offsets[row]
            stop = offsets[row + 1]
            target[at] = kind
            at += 1
            if _escapes(source, start, stop) == 0:
                copy(target, at, source, start, stop - start)
                at += stop - start
            else:
                for spot in range(start, stop):
                    byte = source[spot]
                    if byte < 2:
                        target[at] = 1
                        at += 1
                        byte += 1
                    target[at] = byte
                    at += 1
            target[at] = 0
            cursors[row] = at + 1


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _spell(low: cython.ulonglong, high: cython.ulonglong, digits: cython.p_uchar) -> cython.int:
    """The decimal digits of a 128-bit number, the last in `digits[DIGITS - 1]`; returns where they begin.

    Eight at a time, by long division in 32-bit limbs while the number is large. The divisor is a literal: for that
    the C compiler knows something quicker than dividing.
    """
    limb: cython.ulonglong
    rest: cython.ulonglong
    first: cython.int = DIGITS
    index: cython.int
    while low or high:
        if high:
            limb = high & MASK32
            high = high >> 32
            rest = ((high % 100_000_000) << 32) | limb
            high = ((high // 100_000_000) << 32) | (rest // 100_000_000)
            limb = low & MASK32
            rest = ((rest % 100_000_000) << 32) | (low >> 32)
            low = rest // 100_000_000
            rest = ((rest % 100_000_000) << 32) | limb
            low = (low << 32) | (rest // 100_000_000)
            rest = rest % 100_000_000
        else:
            rest = low % 100_000_000
            low = low // 100_000_000
        for index in range(8):
            digits[first - 1 - index] = rest % 10
            rest = rest // 10
        first -= 8
    while first < DIGITS and digits[first] == 0:
        first += 1
    return first


@cython.cfunc
@cython.nogil
@cython.exceptval(check=False)
def _put_decimal(
    low: cython.ulonglong,
    high: cython.ulonglong,
    scale: cython.int,
    digits: cython.p_uchar,
    out: cython.p_uchar,
    at: cython.longlong,
    writing: cython.bint,
) -> cython.longlong:
    """Write one part, or with `writing` False only measure it; returns where it ends. `digits` is scratch."""
    negative: cython.bint = high & SIGN64 != 0
    first: cython.int
    last: cython.int = DIGITS - 1
    index: cython.int
    flip: cython.int = 0xFF if negative else 0
    pair: cython.int
    if negative:
        low = (low ^ MASK64) + 1
        high ^= MASK64
        if not cython.compiled:
            high += low >> 64
            low &= MASK64
        elif low == 0:
            high += 1
    if low == 0 and high == 0:
        if writing:
            out[at] = DECIMAL_ZERO
        return at + 1
    first = _spell(low, high, digits)
    while digits[last] == 0:
        last -= 1
    if not writing:
        return at + 4 + (last - first + 2) // 2
    out[at] = DECIMAL_NEGATIVE if negative else DECIMAL_POSITIVE
    index = BIAS + DIGITS - first - scale
    out[at + 1] = (index >> 8) ^ flip
    out[at + 2] = (index & 0xFF) ^ flip
    at += 3
    index = first
    while index <= last:
        pair = 10 * digits[index] + (digits[index + 1] if index < last else 0)
        out[at] = (pair + 1) ^ flip
        at += 1
        index += 2
    out[at] = flip
    return at + 1


def measure_decimals(
    scale: int,
    values: cython.const[cython.ulonglong][::1],
    valid: cython.const[cython.uchar][::1],
    sizes: cython.longlong[::1],
) -> None:
    """Add to each row's size what its decimal takes: 128-bit integers of two words, low word first."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(sizes)
    checked: cython.bint = len(valid) > 0
    shift: cython.int = scale
    scratch: bytearray = bytearray(DIGITS)
    digits: cython.p_uchar = scratch
    if len(values) < 2 * rows or (checked and len(valid) < rows):
        raise ValueError("a column has fewer rows than the sizes")
    with cython.nogil:
        for row in range(rows):
            if checked and not valid[row]:
                sizes[row] += 1
            else:
                sizes[row] += _put_decimal(
                    values[2 * row], values[2 * row + 1], shift, digits, digits, 0, False
                )


def write_decimals(
    scale: int,
    values: cython.const[cython.ulonglong][::1],
    valid: cython.const[cython.uchar][::1],
    cursors: cython.longlong[::1],
    out: cython.uchar[::1],
) -> None:
    """Append its decimal to each row. The room must be what `measure_decimals` added up."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(cursors)
    checked: cython.bint = len(valid) > 0
    shift: cython.int = scale
    scratch: bytearray = bytearray(DIGITS)
    digits: cython.p_uchar = scratch
    at: cython.longlong
    if len(values) < 2 * rows or (checked and len(valid) < rows):
        raise ValueError("a column has fewer rows than the cursors")
    if rows == 0:
        return
    target: cython.p_uchar = room_of(out)
    with cython.nogil:
        for row in range(rows):
            at = cursors[row]
            if checked and not valid[row]:
                target[at] = NULL_CODE
                cursors[row] = at + 1
            else:
                cursors[row] = _put_decimal(
                    values[2 * row], values[2 * row + 1], shift, digits, target, at, True
                )


def lay_out(sizes: cython.longlong[::1], offsets: cython.int[::1]) -> int:
    """Turn sizes into where each row begins, in place, and fill the offsets of an Arrow column.

    Returns -1, or the first row that is no key because it is too long or does not fit into one column any more.
    """
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(sizes)
    bad: cython.Py_ssize_t = -1
    size: cython.longlong
    at: cython.longlong = 0
    if len(offsets) <= rows:
        raise ValueError("there are fewer offsets than rows")
    offsets[0] = 0
    with cython.nogil:
        for row in range(rows):
            size = sizes[row]
            sizes[row] = at
            at += size
            if size > MAX_KEY_BYTES or at > MAX_COLUMN_BYTES:
                sizes[row] = size
                bad = row
                break
            offsets[row + 1] = at
    return bad
