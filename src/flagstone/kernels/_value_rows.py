"""Binary rows from value columns and back: `docs/keys.md` has the layout, `values/row` the walk over the types.

    content  = count(LEB128) nulls(ceil(count / 8) bytes, bit set = null) item*      of a row, a struct or a list
    item     = fixed number of bytes | length(LEB128) bytes                         nothing when it is null

Contents nest: what is a struct or a list in one column is a run of bytes to the column around it. Writing takes
two rounds: `measure_…` adds up what each row needs, `lay_out` gives each its place, `write_…` appends one item to
every row. Reading first locates one item of every row, then gathers the items into a column.

Nothing is raised for bad bytes: locating answers with the first row that is damaged, or -1. The loops are free of
Python, and run without its lock. A `valid` with no element means that no row is null.
"""

from __future__ import annotations

import cython
from cython.cimports.flagstone.kernels._bytes import MASK32, copy, get_length, put_varint, varint_size
from cython.cimports.flagstone.kernels._views import bytes_of, room_of

# Declared for C: an ordinary module constant would be looked up as a Python object in every row.
MAX_COLUMN_BYTES = cython.declare(cython.longlong, 0x7FFFFFFF)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _get_varint(data: cython.p_const_uchar, at: cython.longlong, end: cython.longlong) -> cython.longlong:
    """The number at `at`; -1 when it is damaged, or not in the shortest form that `varint_size` measures."""
    length: cython.longlong = get_length(data, at, end)
    value: cython.longlong = length & MASK32
    return value if length >= 0 and length >> 32 == varint_size(value) else -1


def measure_fixed(width: int, valid: cython.const[cython.uchar][::1], sizes: cython.longlong[::1]) -> None:
    """Add an item of `width` bytes to each row that has one."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(sizes)
    checked: cython.bint = len(valid) > 0
    size: cython.longlong = width
    if checked and len(valid) < rows:
        raise ValueError("a column has fewer rows than the sizes")
    with cython.nogil:
        for row in range(rows):
            if not checked or valid[row]:
                sizes[row] += size


def measure_delimited(
    offsets: cython.const[cython.longlong][::1],
    valid: cython.const[cython.uchar][::1],
    sizes: cython.longlong[::1],
) -> None:
    """Add a length and that many bytes to each row that has them."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(sizes)
    checked: cython.bint = len(valid) > 0
    size: cython.longlong
    if len(offsets) <= rows or (checked and len(valid) < rows):
        raise ValueError("a column has fewer rows than the sizes")
    with cython.nogil:
        for row in range(rows):
            if not checked or valid[row]:
                size = offsets[row + 1] - offsets[row]
                sizes[row] += size + varint_size(size)


def measure_lists(
    lists: cython.const[cython.longlong][::1],
    offsets: cython.const[cython.longlong][::1],
    sizes: cython.longlong[::1],
) -> None:
    """Add the content of a list to each row: elements `lists[row]` to `lists[row + 1]`, already written."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(sizes)
    count: cython.longlong
    if len(lists) <= rows or len(offsets) <= lists[rows]:
        raise ValueError("there are fewer elements than the lists have")
    with cython.nogil:
        for row in range(rows):
            count = lists[row + 1] - lists[row]
            sizes[row] += varint_size(count) + (count + 7) // 8
            sizes[row] += offsets[lists[row + 1]] - offsets[lists[row]]


def lay_out(sizes: cython.longlong[::1], offsets: cython.longlong[::1]) -> None:
    """Turn sizes into where each row begins, in place, and into offsets, of which there is one more."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(sizes)
    size: cython.longlong
    at: cython.longlong = 0
    if len(offsets) <= rows:
        raise ValueError("there are fewer offsets than rows")
    with cython.nogil:
        for row in range(rows):
            size = sizes[row]
            sizes[row] = offsets[row] = at
            at += size
        offsets[rows] = at


def write_headers(header: bytes, cursors: cython.longlong[::1], out: cython.uchar[::1]) -> None:
    """Append the same bytes to each row: the count and an empty bitmap, which the items then fill."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(cursors)
    size: cython.longlong = len(header)
    source: cython.p_const_uchar = header
    if rows == 0:
        return
    target: cython.p_uchar = room_of(out)
    with cython.nogil:
        for row in range(rows):
            copy(target, cursors[row], source, 0, size)
            cursors[row] += size


def write_fixed(
    field: int,
    stride: int,
    width: int,
    values: cython.const[cython.uchar][::1],
    valid: cython.const[cython.uchar][::1],
    bitmaps: cython.const[cython.longlong][::1],
    cursors: cython.longlong[::1],
    out: cython.uchar[::1],
) -> None:
    """Append the low `width` bytes of its number to each row; numbers lie `stride` bytes apart.

    A null is marked in the row's bitmap, if there are `bitmaps`, at bit `field`.
    """
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(cursors)
    checked: cython.bint = len(valid) > 0
    marking: cython.bint = len(bitmaps) > 0
    step: cython.longlong = stride
    size: cython.longlong = width
    byte: cython.longlong = field >> 3
    bit: cython.int = 1 << (field & 7)
    if len(values) < step * rows or (checked and len(valid) < rows) or (marking and len(bitmaps) < rows):
        raise ValueError("a column has fewer rows than the cursors")
    if rows == 0:
        return
    source: cython.p_const_uchar = bytes_of(values)
    target: cython.p_uchar = room_of(out)
    with cython.nogil:
        for row in range(rows):
            if not checked or valid[row]:
                copy(target, cursors[row], source, row * step, size)
                cursors[row] += size
            elif marking:
                target[bitmaps[row] + byte] |= bit


def write_delimited(
    field: int,
    offsets: cython.const[cython.longlong][::1],
    data: cython.const[cython.uchar][::1],
    valid: cython.const[cython.uchar][::1],
    bitmaps: cython.const[cython.longlong][::1],
    cursors: cython.longlong[::1],
    out: cython.uchar[::1],
) -> None:
    """Append a length and that many bytes to each row; nulls as in `write_fixed`."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(cursors)
    checked: cython.bint = len(valid) > 0
    marking: cython.bint = len(bitmaps) > 0
    byte: cython.longlong = field >> 3
    bit: cython.int = 1 << (field & 7)
    at: cython.longlong
    size: cython.longlong
    if len(offsets) <= rows or (checked and len(valid) < rows) or (marking and len(bitmaps) < rows):
        raise ValueError("a column has fewer rows than the cursors")
    if rows == 0:
        return
    source: cython.p_const_uchar = bytes_of(data)
    target: cython.p_uchar = room_of(out)
    with cython.nogil:
        for row in range(rows):
            if not checked or valid[row]:
                size = offsets[row + 1] - offsets[row]
                at = put_varint(target, cursors[row], size)
                copy(target, at, source, offsets[row], size)
                cursors[row] = at + size
            elif marking:
                target[bitmaps[row] + byte] |= bit


def write_lists(
    lists: cython.const[cython.longlong][::1],
    offsets: cython.const[cython.longlong][::1],
    data: cython.const[cython.uchar][::1],
    valid: cython.const[cython.uchar][::1],
    cursors: cython.longlong[::1],
    out: cython.uchar[::1],
) -> None:
    """Append the content of a list to each row, see `measure_lists`; `valid` has a 0 for each null element."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(cursors)
    checked: cython.bint = len(valid) > 0
    at: cython.longlong
    count: cython.longlong
    element: cython.longlong
    bits: cython.int
    if len(lists) <= rows or len(offsets) <= lists[rows] or (checked and len(valid) < lists[rows]):
        raise ValueError("there are fewer elements than the lists have")
    if rows == 0:
        return
    source: cython.p_const_uchar = bytes_of(data)
    target: cython.p_uchar = room_of(out)
    with cython.nogil:
        for row in range(rows):
            count = lists[row + 1] - lists[row]
            at = put_varint(target, cursors[row], count)
            bits = 0
            for element in range(count):
                if checked and not valid[lists[row] + element]:
                    bits |= 1 << (element & 7)
                if element & 7 == 7 or element == count - 1:
                    target[at] = bits
                    at += 1
                    bits = 0
            count = offsets[lists[row + 1]] - offsets[lists[row]]
            copy(target, at, source, offsets[lists[row]], count)
            cursors[row] = at + count


def read_versions(
    data: cython.const[cython.uchar][::1],
    starts: cython.const[cython.longlong][::1],
    stops: cython.const[cython.longlong][::1],
    valid: cython.const[cython.uchar][::1],
    versions: cython.longlong[::1],
) -> int:
    """The schema version that each value names: 0 for layout 1, -1 for an empty value, -2 for a null one.

    Returns how the versions differ: the version that all rows have, or -4 when there are several; -3 is damage, or
    another layout, which is also the version of such a row.
    """
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(versions)
    checked: cython.bint = len(valid) > 0
    at: cython.longlong
    found: cython.longlong
    same: cython.longlong = -2
    if min(len(starts), len(stops)) < rows or (checked and len(valid) < rows):
        raise ValueError("a column has fewer rows than the versions")
    source: cython.p_const_uchar = bytes_of(data)
    with cython.nogil:
        for row in range(rows):
            at = starts[row]
            if checked and not valid[row]:
                found = -2
            elif at >= stops[row]:
                found = -1
            elif source[at] == 2:
                found = _get_varint(source, at + 1, stops[row])
                if found < 1:
                    found = -3
            elif source[at] == 1:
                found = 0
            else:
                found = -3
            versions[row] = found
            if row == 0:
                same = found
            elif found != same:
                same = -4
    return same


def read_headers(
    lead: bytes,
    data: cython.const[cython.uchar][::1],
    starts: cython.const[cython.longlong][::1],
    stops: cython.const[cython.longlong][::1],
    valid: cython.const[cython.uchar][::1],
    counts: cython.longlong[::1],
    bitmaps: cython.longlong[::1],
    cursors: cython.longlong[::1],
) -> int:
    """Take count and bitmap of each content, behind the bytes `lead`. A null one has no items.

    Returns -1, or the first row that is damaged.
    """
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(cursors)
    checked: cython.bint = len(valid) > 0
    size: cython.longlong = len(lead)
    first: cython.p_const_uchar = lead
    bad: cython.Py_ssize_t = -1
    at: cython.longlong
    index: cython.longlong
    count: cython.longlong
    if min(len(starts), len(stops), len(counts), len(bitmaps)) < rows or (checked and len(valid) < rows):
        raise ValueError("a column has fewer rows than the cursors")
    source: cython.p_const_uchar = bytes_of(data)
    with cython.nogil:
        for row in range(rows):
            at = starts[row]
            cursors[row] = bitmaps[row] = at
            counts[row] = 0
            if checked and not valid[row]:
                cursors[row] = stops[row]
                continue
            bad = row
            if size:
                if size > stops[row] - at:
                    break
                index = 0
                while index < size and source[at + index] == first[index]:
                    index += 1
                if index < size:
                    break
                at += size
            count = _get_varint(source, at, stops[row])
            if count < 0:
                break
            at += varint_size(count)
            if (count + 7) // 8 > stops[row] - at:
                break
            counts[row] = count
            bitmaps[row] = at
            cursors[row] = at + (count + 7) // 8
        else:
            bad = -1
    return bad


def locate_items(
    field: int,
    width: int,
    data: cython.const[cython.uchar][::1],
    stops: cython.const[cython.longlong][::1],
    counts: cython.const[cython.longlong][::1],
    bitmaps: cython.const[cython.longlong][::1],
    cursors: cython.longlong[::1],
    item_starts: cython.longlong[::1],
    item_stops: cython.longlong[::1],
    valid: cython.uchar[::1],
) -> int:
    """Step over item `field` of each row: `width` bytes, or a length and that many when `width` is 0.

    A row that ends before that field has a null there. Returns -1, or the first row that is damaged.
    """
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(cursors)
    number: cython.longlong = field
    byte: cython.longlong = field >> 3
    bit: cython.int = 1 << (field & 7)
    fixed: cython.longlong = width
    bad: cython.Py_ssize_t = -1
    at: cython.longlong
    size: cython.longlong
    if min(len(stops), len(counts), len(bitmaps), len(item_starts), len(item_stops), len(valid)) < rows:
        raise ValueError("a column has fewer rows than the cursors")
    source: cython.p_const_uchar = bytes_of(data)
    with cython.nogil:
        for row in range(rows):
            item_starts[row] = item_stops[row] = 0
            valid[row] = 0
            if number >= counts[row] or source[bitmaps[row] + byte] & bit:
                continue
            bad = row
            at = cursors[row]
            size = fixed
            if fixed == 0:
                size = _get_varint(source, at, stops[row])
                if size < 0:
                    break
                at += varint_size(size)
            if size > stops[row] - at:
                break
            valid[row] = 1
            item_starts[row] = at
            item_stops[row] = cursors[row] = at + size
        else:
            bad = -1
    return bad


def locate_elements(
    width: int,
    data: cython.const[cython.uchar][::1],
    stops: cython.const[cython.longlong][::1],
    counts: cython.const[cython.longlong][::1],
    bitmaps: cython.const[cython.longlong][::1],
    cursors: cython.longlong[::1],
    item_starts: cython.longlong[::1],
    item_stops: cython.longlong[::1],
    valid: cython.uchar[::1],
) -> int:
    """Step over all items of each row, one after the other: a list. Returns as `locate_items` does."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(cursors)
    fixed: cython.longlong = width
    bad: cython.Py_ssize_t = -1
    at: cython.longlong
    size: cython.longlong
    index: cython.longlong
    element: cython.longlong = 0
    room: cython.longlong = min(len(item_starts), len(item_stops), len(valid))
    if min(len(stops), len(counts), len(bitmaps)) < rows:
        raise ValueError("a column has fewer rows than the cursors")
    source: cython.p_const_uchar = bytes_of(data)
    with cython.nogil:
        for row in range(rows):
            bad = row
            at = cursors[row]
            for index in range(counts[row]):
                if element >= room:
                    at = -1
                    break
                item_starts[element] = item_stops[element] = 0
                valid[element] = (source[bitmaps[row] + (index >> 3)] >> (index & 7)) & 1 ^ 1
                if valid[element]:
                    size = fixed
                    if fixed == 0:
                        size = _get_varint(source, at, stops[row])
                        at += varint_size(size)
                    if size < 0 or size > stops[row] - at:
                        at = -1
                        break
                    item_starts[element] = at
                    at += size
                    item_stops[element] = at
                element += 1
            if at < 0:
                break
            cursors[row] = at
        else:
            bad = -1
    return bad


def gather_fixed(
    width: int,
    stride: int,
    data: cython.const[cython.uchar][::1],
    starts: cython.const[cython.longlong][::1],
    valid: cython.const[cython.uchar][::1],
    out: cython.uchar[::1],
) -> None:
    """Copy located items of `width` bytes into a column `stride` bytes wide, extending the sign. Nulls become 0."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(starts)
    size: cython.longlong = width
    step: cython.longlong = stride
    at: cython.longlong
    index: cython.longlong
    fill: cython.int
    if len(valid) < rows or len(out) < step * rows:
        raise ValueError("a column has fewer rows than the items")
    if rows == 0:
        return
    source: cython.p_const_uchar = bytes_of(data)
    target: cython.p_uchar = room_of(out)
    with cython.nogil:
        for row in range(rows):
            at = row * step
            index = 0
            fill = 0
            if valid[row]:
                copy(target, at, source, starts[row], size)
                index = size
                if size < step and target[at + size - 1] & 0x80:
                    fill = 0xFF
            while index < step:
                target[at + index] = fill
                index += 1


def gather_bytes(
    data: cython.const[cython.uchar][::1],
    starts: cython.const[cython.longlong][::1],
    stops: cython.const[cython.longlong][::1],
    offsets: cython.int[::1],
    out: cython.uchar[::1],
) -> None:
    """Copy located items behind each other, where `measure_items` has given each its place."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(starts)
    if len(stops) < rows or len(offsets) <= rows or len(out) < offsets[rows]:
        raise ValueError("a column has fewer rows than the items")
    if rows == 0 or offsets[rows] == 0:
        return
    source: cython.p_const_uchar = bytes_of(data)
    target: cython.p_uchar = room_of(out)
    with cython.nogil:
        for row in range(rows):
            copy(target, offsets[row], source, starts[row], stops[row] - starts[row])


def measure_items(
    starts: cython.const[cython.longlong][::1],
    stops: cython.const[cython.longlong][::1],
    offsets: cython.int[::1],
) -> int:
    """Fill the offsets of a column for located items; returns its size, or -1 when that passes 2 GiB."""
    row: cython.Py_ssize_t
    rows: cython.Py_ssize_t = len(starts)
    size: cython.longlong = 0
    if len(stops) < rows or len(offsets) <= rows:
        raise ValueError("a column has fewer rows than the items")
    offsets[0] = 0
    with cython.nogil:
        for row in range(rows):
            size += stops[row] - starts[row]
            if size > MAX_COLUMN_BYTES:
                size = -1
                break
            offsets[row + 1] = size
    return size
