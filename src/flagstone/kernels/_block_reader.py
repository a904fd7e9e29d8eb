"""Reads data blocks of format version 2: one row, all rows, or columns. `_block_writer` has the layout.

Everything read from a block is bounds-checked first, because damaged bytes must end in `CorruptData` with
an offset inside the block, never in a crash of the interpreter. Rows are entry tuples (see `flagstone.types`).
"""

from __future__ import annotations

from typing import Any

import cython
from cython.cimports.libc.string import memcpy

from flagstone.errors import CorruptData

# Declared for C: an ordinary module constant would be looked up as a Python object in every row.
# Constants of more than 31 bits are declared, or compiled code would compute with them as Python integers.
MAX_LENGTH = cython.declare(cython.longlong, 0xFFFFFFFF)
TOMBSTONE_FLAG = cython.declare(cython.int, 0x01)
EXPIRE_FLAG = cython.declare(cython.int, 0x02)
CREATE_FLAG = cython.declare(cython.int, 0x04)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _get_u64(data: cython.p_const_uchar, at: cython.Py_ssize_t) -> cython.ulonglong:
    value: cython.ulonglong = 0
    index: cython.int
    for index in range(8):
        value = (value << 8) | data[at + index]
    return value


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _get_i64(data: cython.p_const_uchar, at: cython.Py_ssize_t) -> cython.longlong:
    value: cython.ulonglong = _get_u64(data, at)
    if not cython.compiled and value >= 1 << 63:
        return value - (1 << 64)
    return cython.cast(cython.longlong, value)


@cython.cfunc
@cython.inline
def _piece(data: cython.p_const_uchar, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> bytes:
    """A part of the memory as bytes. Compiled, a slice is that already, and `bytes()` would cost as much again."""
    if cython.compiled:
        return data[start:stop]
    return bytes(data[start:stop])


@cython.cclass
class _Cursor:
    """Walks the entries of one block. After `step()` the fields describe the entry it stands on.

    The cursor keeps the block alive; `data` is its memory. `shared` is unchecked, because only the caller
    knows the key before.
    """

    block: bytes
    data: cython.p_const_uchar
    size: cython.Py_ssize_t
    end: cython.Py_ssize_t
    restarts: cython.Py_ssize_t
    at: cython.Py_ssize_t
    entry_at: cython.Py_ssize_t
    shared: cython.Py_ssize_t
    unshared: cython.Py_ssize_t
    suffix_at: cython.Py_ssize_t
    value_at: cython.Py_ssize_t
    value_size: cython.Py_ssize_t
    flags: cython.int

    @cython.cfunc
    @cython.exceptval(-1)
    def open(self, block: bytes) -> cython.int:
        """Stand before the first entry of a block."""
        self.block = block
        self.data = block
        self.size = len(block)
        self.at = 0
        if self.size < 2:
            raise CorruptData(f"block of {self.size} bytes, too short for its restart count", offset=0)
        self.restarts = (self.data[self.size - 2] << 8) | self.data[self.size - 1]
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
    def length(self) -> cython.Py_ssize_t:
        """The LEB128 u32 under the cursor, which moves behind it."""
        value: cython.longlong = 0
        shift: cython.int = 0
        byte: cython.int
        while shift < 35:
            if self.at >= self.end:
                raise CorruptData("a length runs past the entries of the block", offset=self.entry_at)
            byte = self.data[self.at]
            self.at += 1
            value |= cython.cast(cython.longlong, byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        if shift == 35 or value > MAX_LENGTH:
            raise CorruptData("a length does not fit into 32 bits", offset=self.entry_at)
        return value

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def step(self) -> cython.int:
        """Stand on the next entry and return 1, or return 0 at the end of the block."""
        flags_at: cython.Py_ssize_t
        if self.at >= self.end:
            return 0
        self.entry_at = self.at
        self.shared = self.length()
        self.unshared = self.length()
        self.value_size = self.length()
        self.suffix_at = self.at
        self.value_at = self.suffix_at + self.unshared
        flags_at = self.value_at + self.value_size + 8
        if flags_at >= self.end:
            raise CorruptData("a row runs past the entries of the block", offset=self.entry_at)
        self.flags = self.data[flags_at]
        if self.flags & 0xF0 or self.flags & 0x09 == 0x09:
            raise CorruptData(f"row flags 0x{self.flags:02x} are not a known combination", offset=flags_at)
        if self.flags & TOMBSTONE_FLAG and self.value_size:
            raise CorruptData(f"a tombstone carries {self.value_size} bytes of value", offset=self.entry_at)
        self.at = flags_at + 1 + 8 * (((self.flags & EXPIRE_FLAG) >> 1) + ((self.flags & CREATE_FLAG) >> 2))
        if self.at > self.end:
            raise CorruptData("a row runs past the entries of the block", offset=self.entry_at)
        return 1

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def seq(self) -> cython.ulonglong:
        return _get_u64(self.data, self.value_at + self.value_size)

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def expires(self) -> cython.longlong:
        return _get_i64(self.data, self.value_at + self.value_size + 9) if self.flags & EXPIRE_FLAG else 0

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def created(self) -> cython.longlong:
        return _get_i64(self.data, self.at - 8) if self.flags & CREATE_FLAG else 0

    @cython.cfunc
    def row(self, key: bytes) -> tuple:
        """The entry tuple under the cursor, whose whole key the caller knows."""
        return (
            key,
            self.seq(),
            self.flags & 0x09,
            _piece(self.data, self.value_at, self.value_at + self.value_size),
            self.created() if self.flags & CREATE_FLAG else None,
            self.expires() if self.flags & EXPIRE_FLAG else None,
        )

    @cython.cfunc
    @cython.exceptval(-1)
    def seek_before(self, key: bytes) -> cython.int:
        """Stand before the last restart point whose key is below `key`, or before the first entry."""
        low: cython.Py_ssize_t = 0
        high: cython.Py_ssize_t = self.restarts
        middle: cython.Py_ssize_t
        found: cython.Py_ssize_t = 0
        restart: cython.Py_ssize_t
        index: cython.Py_ssize_t
        limit: cython.Py_ssize_t
        target: cython.p_const_uchar = key
        while low < high:
            middle = (low + high) // 2
            restart = (self.data[self.end + 2 * middle] << 8) | self.data[self.end + 2 * middle + 1]
            if restart >= self.end or self.data[restart] != 0:
                raise CorruptData(
                    f"restart point {middle} does not name an entry with a whole key",
                    offset=self.end + 2 * middle,
                )
            self.at = restart
            self.step()
            limit = self.unshared if self.unshared < len(key) else len(key)
            index = 0
            while index < limit and self.data[self.suffix_at + index] == target[index]:
                index += 1
            if index < len(key) and (
                index == self.unshared or self.data[self.suffix_at + index] < target[index]
            ):
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
    cursor.open(block)
    return cursor


def decode_rows(block: bytes) -> list[Any]:
    """All rows of a block, as entry tuples in stored order."""
    cursor: _Cursor = _cursor(block)
    rows: list = []
    previous: bytes = b""
    count: cython.Py_ssize_t = 0
    restart_at: cython.Py_ssize_t
    key: bytes
    while cursor.step():
        if count & 15 == 0:
            restart_at = cursor.end + 2 * (count >> 4)
            if (
                restart_at + 2 > cursor.size - 2
                or ((cursor.data[restart_at] << 8) | cursor.data[restart_at + 1]) != cursor.entry_at
                or cursor.shared
            ):
                raise CorruptData(
                    f"entry {count} is not the restart point it should be", offset=cursor.entry_at
                )
        elif cursor.shared > len(previous):
            raise CorruptData(
                f"a key shares {cursor.shared} bytes with one of {len(previous)}", offset=cursor.entry_at
            )
        key = _piece(cursor.data, cursor.suffix_at, cursor.value_at)
        if cursor.shared:
            key = previous[: cursor.shared] + key
        rows.append(cursor.row(key))
        previous = key
        count += 1
    if cursor.restarts != (count + 15) >> 4:
        raise CorruptData(f"{cursor.restarts} restart points for {count} rows", offset=cursor.size - 2)
    return rows


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
    return _search(block, key, max_seq, None)


def lookup_versions(block: bytes, key: bytes, max_seq: int) -> list[Any]:
    """Every row of `key` with seq <= `max_seq` in this block, newest first."""
    found: list = []
    _search(block, key, max_seq, found)
    return found


@cython.cfunc
def _search(block: bytes, key: bytes, max_seq: cython.ulonglong, collect: list | None) -> tuple | None:
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
        if cursor.shared > matched:
            continue
        limit = size - cursor.shared
        if limit > cursor.unshared:
            limit = cursor.unshared
        index = 0
        while index < limit and cursor.data[cursor.suffix_at + index] == target[cursor.shared + index]:
            index += 1
        matched = cursor.shared + index
        if matched == size and index == cursor.unshared:
            if cursor.seq() <= max_seq:
                if collect is None:
                    return cursor.row(key)
                collect.append(cursor.row(key))
        elif matched == size or (
            index < cursor.unshared and cursor.data[cursor.suffix_at + index] > target[matched]
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
            if cursor.shared > previous_size:
                raise CorruptData(
                    f"a key shares {cursor.shared} bytes with one of {previous_size}", offset=cursor.entry_at
                )
            previous_size = cursor.shared + cursor.unshared
            key_bytes += previous_size
            value_bytes += cursor.value_size
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
            if cursor.shared > previous_size:
                raise CorruptData(
                    f"a key shares {cursor.shared} bytes with one of {previous_size}", offset=cursor.entry_at
                )
            if row >= room or key_at + cursor.shared + cursor.unshared > len(keys):
                raise ValueError("the columns are smaller than measure() said")
            if cython.compiled:
                if cursor.shared:
                    memcpy(cython.address(keys[key_at]), cython.address(keys[previous_at]), cursor.shared)
            else:
                keys[key_at : key_at + cursor.shared] = keys[previous_at : previous_at + cursor.shared]
            _fill(keys, key_at + cursor.shared, cursor.data, cursor.suffix_at, cursor.unshared)
            previous_at = key_at
            previous_size = cursor.shared + cursor.unshared
            key_at += previous_size
            if with_values:
                if value_at + cursor.value_size > len(values):
                    raise ValueError("the columns are smaller than measure() said")
                _fill(values, value_at, cursor.data, cursor.value_at, cursor.value_size)
                value_at += cursor.value_size
                value_offsets[row + 1] = value_at
            if with_times:
                seqs[row] = cursor.seq()
                kinds[row] = cursor.flags & 0x09
                expires[row] = cursor.expires()
                created[row] = cursor.created()
                has_expires[row] = (cursor.flags & EXPIRE_FLAG) >> 1
                has_created[row] = (cursor.flags & CREATE_FLAG) >> 2
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
    if cython.compiled:
        if size:
            memcpy(cython.address(out[at]), data + start, size)
    else:
        out[at : at + size] = data[start : start + size]
