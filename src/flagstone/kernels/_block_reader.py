"""Reads data blocks of format version 2: one row, all rows, or columns. `_block_writer` has the layout.

Everything read from a block is bounds-checked first, because damaged bytes must end in `CorruptData` with
an offset inside the block, never in a crash of the interpreter. Rows are entry tuples (see `flagstone.types`).
"""

from __future__ import annotations

from typing import Any

import cython
from cython.cimports.flagstone.kernels._bytes import (
    MASK64,
    common_prefix,
    compare,
    copy,
    get_u16,
    get_u64,
    piece,
)
from cython.cimports.flagstone.kernels._rows import (
    CREATE_FLAG,
    EXPIRE_FLAG,
    KIND_MASK,
    TOMBSTONE_KIND,
    Entry,
    created_at,
    expires_at,
    new_entry,
    read_flags,
    read_lengths,
    row_of,
)

from flagstone.errors import CorruptData
from flagstone.kernels.damage import damaged_entry


@cython.cclass
class _Cursor:
    """Walks the entries of one block. After `step()` it stands on `entry`, which begins at `entry_at`.

    The cursor keeps the block alive; `data` is its memory. It does not check `entry.shared`, because only the caller
    knows the key before.
    """

    block: bytes
    data: cython.p_const_uchar
    size: cython.Py_ssize_t
    end: cython.Py_ssize_t
    restarts: cython.Py_ssize_t
    at: cython.Py_ssize_t
    entry_at: cython.Py_ssize_t
    entry: Entry

    @cython.cfunc
    @cython.exceptval(-1)
    def open(self, block: bytes, start: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.int:
        """Stand before the first entry of the block at byte `start` of `block`."""
        self.block = block
        self.data = block
        if cython.compiled:
            self.data = self.data + start
        elif start or size < len(block):
            self.data = block[start : start + size]
        self.size = size
        self.at = 0
        self.entry = new_entry()
        if self.size < 2:
            raise CorruptData(f"block of {self.size} bytes, too short for its restart count", offset=0)
        self.restarts = get_u16(self.data, self.size - 2)
        self.end = self.size - 2 - 2 * self.restarts
        if self.restarts == 0 and self.end == 0:
            raise CorruptData("block without a row", offset=0)
        if self.end <= 0 or self.restarts == 0:
            raise CorruptData(
                f"{self.restarts} restart points do not fit a block of {self.size} bytes",
                offset=self.size - 2,
            )
        return 0

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def step(self) -> cython.int:
        """Stand on the next entry and return 1, or return 0 at the end of the block."""
        problem: cython.int
        if self.at >= self.end:
            return 0
        self.entry_at = self.at
        problem = read_lengths(self.data, self.at, self.end, cython.address(self.entry))
        if problem == 0:
            problem = read_flags(self.data, self.end, cython.address(self.entry))
        if problem:
            raise damaged_entry(problem, self.entry_at, self.entry.tail_at + 8, self.entry.flags)
        if self.entry.flags & TOMBSTONE_KIND and self.entry.value_size:
            raise CorruptData(
                f"a tombstone carries {self.entry.value_size} bytes of value", offset=self.entry_at
            )
        self.at = self.entry.stop
        return 1

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def step_checked(self, number: cython.Py_ssize_t, before: cython.Py_ssize_t) -> cython.int:
        """As `step` for a reader of the whole block, which relies on restart points and shared prefixes.

        `number` is that of the next entry, and `before` the size of the key before it.
        """
        restart_at: cython.Py_ssize_t
        if not self.step():
            if self.restarts != (number + 15) >> 4:
                raise CorruptData(f"{self.restarts} restart points for {number} rows", offset=self.size - 2)
            return 0
        if number & 15 == 0:
            restart_at = self.end + 2 * (number >> 4)
            if (
                restart_at + 2 > self.size - 2
                or get_u16(self.data, restart_at) != self.entry_at
                or self.entry.shared
            ):
                raise CorruptData(
                    f"entry {number} is not the restart point it should be", offset=self.entry_at
                )
        elif self.entry.shared > before:
            raise CorruptData(
                f"a key shares {self.entry.shared} bytes with one of {before}", offset=self.entry_at
            )
        return 1

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def seq(self) -> cython.ulonglong:
        return get_u64(self.data, self.entry.tail_at)

    @cython.cfunc
    def row(self, key: bytes) -> tuple:
        """The entry tuple under the cursor, whose whole key the caller knows."""
        return row_of(self.data, cython.address(self.entry), key)

    @cython.cfunc
    @cython.exceptval(-1)
    def seek_before(self, key: bytes) -> cython.int:
        """Stand before the last restart point whose key is below `key`, or before the first entry."""
        low: cython.Py_ssize_t = 0
        high: cython.Py_ssize_t = self.restarts
        middle: cython.Py_ssize_t
        found: cython.Py_ssize_t = 0
        restart: cython.Py_ssize_t
        target: cython.p_const_uchar = key
        while low < high:
            middle = (low + high) // 2
            restart = get_u16(self.data, self.end + 2 * middle)
            if restart >= self.end or self.data[restart] != 0:
                raise CorruptData(
                    f"restart point {middle} does not name an entry with a whole key",
                    offset=self.end + 2 * middle,
                )
            self.at = restart
            self.step()
            if compare(self.data, self.entry.suffix_at, self.entry.unshared, target, 0, len(key)) < 0:
                found = restart
                low = middle + 1
            else:
                high = middle
        self.at = found
        return 0


@cython.cfunc
def _cursor(block: bytes) -> _Cursor:
    """A cursor before the first entry. Without `__init__`, whose call would cost more than a lookup's search."""
    cursor: _Cursor = _Cursor.__new__(_Cursor)
    cursor.open(block, 0, len(block))
    return cursor


def decode_rows(block: bytes) -> list[Any]:
    """All rows of a block, as entry tuples in stored order."""
    cursor: _Cursor = _cursor(block)
    rows: list = []
    previous: bytes = b""
    count: cython.Py_ssize_t = 0
    key: bytes
    while cursor.step_checked(count, len(previous)):
        key = piece(cursor.data, cursor.entry.suffix_at, cursor.entry.value_at)
        if cursor.entry.shared:
            key = previous[: cursor.entry.shared] + key
        rows.append(cursor.row(key))
        previous = key
        count += 1
    return rows


def check_rows(chunk: bytes, bounds: cython.const[cython.longlong][::1]) -> tuple[int, int, int, int]:
    """The number of rows in some blocks, the smallest and the largest sequence number, the size of the longest key.

    `bounds` has begin and end of each block in the chunk. Checks what `decode_rows` checks, and makes no rows. The
    offset of an error is inside its block. Without blocks all four numbers are 0.
    """
    cursor: _Cursor = _Cursor.__new__(_Cursor)
    rows: cython.Py_ssize_t = 0
    block: cython.Py_ssize_t
    start: cython.Py_ssize_t
    stop: cython.Py_ssize_t
    number: cython.Py_ssize_t
    key_size: cython.Py_ssize_t
    longest: cython.Py_ssize_t = 0
    seq: cython.ulonglong
    smallest: cython.ulonglong = MASK64
    largest: cython.ulonglong = 0
    for block in range(len(bounds) // 2):
        start = bounds[2 * block]
        stop = bounds[2 * block + 1]
        if start < 0 or stop < start or stop > len(chunk):
            raise ValueError("a block reaches past its chunk")
        cursor.open(chunk, start, stop - start)
        number = key_size = 0
        while cursor.step_checked(number, key_size):
            key_size = cursor.entry.shared + cursor.entry.unshared
            if key_size > longest:
                longest = key_size
            seq = cursor.seq()
            if seq < smallest:
                smallest = seq
            if seq > largest:
                largest = seq
            number += 1
        rows += number
    return rows, smallest if rows else 0, largest, longest


def seq_range(rows: list[Any]) -> tuple[int, int]:
    """The smallest and the largest sequence number of some entry tuples; there must be one."""
    row: tuple
    seq: cython.ulonglong
    smallest: cython.ulonglong = rows[0][1]
    largest: cython.ulonglong = smallest
    for row in rows:
        seq = row[1]
        if seq < smallest:
            smallest = seq
        elif seq > largest:
            largest = seq
    return smallest, largest


def lookup(block: bytes, key: bytes, max_seq: int) -> tuple[Any, ...] | None:
    """The newest row of `key` with seq <= `max_seq` in this block, as an entry tuple, or None.

    Versions of one key may continue in the next block; None therefore means "not in this block".
    """
    return _search(block, key, max_seq, None, False)


def lookup_value(block: bytes, key: bytes, max_seq: int) -> Any:
    """As `lookup`, but where the row is a plain value without an expiry only the value, as `bytes`."""
    return _search(block, key, max_seq, None, True)


def lookup_versions(block: bytes, key: bytes, max_seq: int) -> list[Any]:
    """Every row of `key` with seq <= `max_seq` in this block, newest first."""
    found: list = []
    _search(block, key, max_seq, found, False)
    return found


@cython.cfunc
def _search(
    block: bytes, key: bytes, max_seq: cython.ulonglong, collect: list | None, simple: cython.bint
) -> object:
    cursor: _Cursor = _cursor(block)
    target: cython.p_const_uchar = key
    size: cython.Py_ssize_t = len(key)
    # The leading bytes of the current key that equal the target's. A key that shares more than this
    # with its predecessor differs from the target where the predecessor did, and needs no comparison.
    matched: cython.Py_ssize_t = 0
    limit: cython.Py_ssize_t
    index: cython.Py_ssize_t
    cursor.seek_before(key)
    while cursor.step():
        if cursor.entry.shared > matched:
            continue
        limit = size - cursor.entry.shared
        if limit > cursor.entry.unshared:
            limit = cursor.entry.unshared
        index = common_prefix(cursor.data, cursor.entry.suffix_at, target, cursor.entry.shared, limit)
        matched = cursor.entry.shared + index
        if matched == size and index == cursor.entry.unshared:
            if cursor.seq() <= max_seq:
                if simple and not cursor.entry.flags & (KIND_MASK | EXPIRE_FLAG):
                    return piece(cursor.data, cursor.entry.value_at, cursor.entry.tail_at)
                if collect is None:
                    return cursor.row(key)
                collect.append(cursor.row(key))
        elif matched == size or (
            index < cursor.entry.unshared and cursor.data[cursor.entry.suffix_at + index] > target[matched]
        ):
            return None
    return None


def measure(blocks: list[Any]) -> tuple[int, int, int]:
    """How many rows, key bytes and value bytes the blocks hold: what `decode_columns` needs room for."""
    rows: cython.longlong = 0
    key_bytes: cython.longlong = 0
    value_bytes: cython.longlong = 0
    previous_size: cython.longlong
    cursor: _Cursor
    for block in blocks:
        cursor = _cursor(block)
        previous_size = 0
        while cursor.step():
            rows += 1
            # Checked here already: what a damaged length claims would be allocated before `decode_columns` sees it.
            if cursor.entry.shared > previous_size:
                raise CorruptData(
                    f"a key shares {cursor.entry.shared} bytes with one of {previous_size}",
                    offset=cursor.entry_at,
                )
            previous_size = cursor.entry.shared + cursor.entry.unshared
            key_bytes += previous_size
            value_bytes += cursor.entry.value_size
    return rows, key_bytes, value_bytes


def decode_columns(
    blocks: list[Any],
    key_offsets: cython.int[::1],
    keys: cython.uchar[::1],
    value_offsets: cython.int[::1],
    values: cython.uchar[::1],
    seqs: cython.ulonglong[::1],
    kinds: cython.uchar[::1],
    created: cython.longlong[::1],
    has_created: cython.uchar[::1],
    expires: cython.longlong[::1],
    has_expires: cython.uchar[::1],
) -> int:
    """Write all rows of the blocks into columns sized by `measure`; returns the number of rows.

    The offsets have one element more than there are rows. An empty `value_offsets` leaves the values out, an
    empty `seqs` everything but keys and values.
    """
    cursor: _Cursor
    room: cython.Py_ssize_t = len(key_offsets) - 1
    with_values: cython.bint = len(value_offsets) > 0
    with_times: cython.bint = len(seqs) > 0
    row: cython.Py_ssize_t = 0
    key_at: cython.Py_ssize_t = 0
    value_at: cython.Py_ssize_t = 0
    previous_at: cython.Py_ssize_t
    previous_size: cython.Py_ssize_t
    times: cython.Py_ssize_t = min(len(kinds), len(created), len(has_created), len(expires), len(has_expires))
    if (with_values and len(value_offsets) <= room) or (with_times and min(len(seqs), times) < room):
        raise ValueError("a column is shorter than key_offsets")
    key_offsets[0] = 0
    if with_values:
        value_offsets[0] = 0
    for block in blocks:
        cursor = _cursor(block)
        previous_at = previous_size = 0
        while cursor.step():
            if cursor.entry.shared > previous_size:
                raise CorruptData(
                    f"a key shares {cursor.entry.shared} bytes with one of {previous_size}",
                    offset=cursor.entry_at,
                )
            if row >= room or key_at + cursor.entry.shared + cursor.entry.unshared > len(keys):
                raise ValueError("the columns are smaller than measure() returned")
            if cython.compiled:
                if cursor.entry.shared:
                    copy(
                        cython.address(keys[key_at]),
                        0,
                        cython.address(keys[previous_at]),
                        0,
                        cursor.entry.shared,
                    )
            else:
                copy(keys, key_at, keys, previous_at, cursor.entry.shared)
            _fill(
                keys, key_at + cursor.entry.shared, cursor.data, cursor.entry.suffix_at, cursor.entry.unshared
            )
            previous_at = key_at
            previous_size = cursor.entry.shared + cursor.entry.unshared
            key_at += previous_size
            if with_values:
                if value_at + cursor.entry.value_size > len(values):
                    raise ValueError("the columns are smaller than measure() returned")
                _fill(values, value_at, cursor.data, cursor.entry.value_at, cursor.entry.value_size)
                value_at += cursor.entry.value_size
                value_offsets[row + 1] = value_at
            if with_times:
                seqs[row] = cursor.seq()
                kinds[row] = cursor.entry.flags & KIND_MASK
                expires[row] = expires_at(cursor.data, cython.address(cursor.entry))
                created[row] = created_at(cursor.data, cython.address(cursor.entry))
                has_expires[row] = (cursor.entry.flags & EXPIRE_FLAG) >> 1
                has_created[row] = (cursor.entry.flags & CREATE_FLAG) >> 2
            row += 1
            key_offsets[row] = key_at
    return row


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _fill(
    out: cython.uchar[::1],
    at: cython.Py_ssize_t,
    data: cython.p_const_uchar,
    start: cython.Py_ssize_t,
    size: cython.Py_ssize_t,
) -> cython.void:
    if not cython.compiled:
        copy(out, at, data, start, size)
    elif size:
        copy(cython.address(out[at]), 0, data, start, size)
