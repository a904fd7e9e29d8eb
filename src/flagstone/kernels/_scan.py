"""Turns stored rows into what a scan shows: of each key the newest version a reader may see, or nothing.

Rows come in key order, the versions of a key from new to old, as whole blocks of format version 2 or as entry
tuples, mixed as the merge above likes. State is carried from call to call, because the versions of a key may
continue in the next block. Blocks are walked here and not through `_block_reader`: only within one module does
the C compiler melt reading, choosing and building into one loop, and this one makes millions of rows a second.
Everything read from a block is bounds-checked first, as there.

Written in Cython's pure-Python mode; see `_block_writer` for how that works.
"""

from __future__ import annotations

from typing import Any

import cython
from cython.cimports.libc.string import memcmp, memcpy

from flagstone.errors import CorruptData

# Constants of more than 31 bits are declared, or compiled code would compute with them as Python integers.
MAX_LENGTH = cython.declare(cython.longlong, 0xFFFFFFFF)
TOMBSTONE_KIND = cython.declare(cython.int, 0x01)
EXPIRE_FLAG = cython.declare(cython.int, 0x02)
CREATE_FLAG = cython.declare(cython.int, 0x04)
MERGE_KIND = cython.declare(cython.int, 0x08)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _get_u64(data: cython.p_const_uchar, at: cython.Py_ssize_t) -> cython.ulonglong:
    value: cython.ulonglong = 0
    index: cython.int
    for index in range(8):
        value = (value << 8) | data[at + index]
    return value


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _get_i64(data: cython.p_const_uchar, at: cython.Py_ssize_t) -> cython.longlong:
    value: cython.ulonglong = _get_u64(data, at)
    if not cython.compiled and value >= 1 << 63:
        return value - (1 << 64)
    return cython.cast(cython.longlong, value)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _differ(
    one: cython.p_const_uchar,
    one_at: cython.Py_ssize_t,
    two: cython.p_const_uchar,
    two_at: cython.Py_ssize_t,
    size: cython.Py_ssize_t,
) -> cython.int:
    """0 when the bytes are equal; otherwise below or above 0, as the first are below or above the second."""
    left: object
    right: object
    if cython.compiled:
        return memcmp(one + one_at, two + two_at, size)
    left = bytes(one[one_at : one_at + size])
    right = bytes(two[two_at : two_at + size])
    return (left > right) - (left < right)


@cython.cfunc
@cython.inline
def _piece(data: cython.p_const_uchar, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> bytes:
    """A part of the memory as bytes. Compiled, a slice is that already, and `bytes()` would cost as much again."""
    if cython.compiled:
        return data[start:stop]
    return bytes(data[start:stop])


@cython.cclass
class Sieve:
    """Chooses the visible rows at sequence number `max_seq` and appends them to the caller's list.

    Rows are `(key, value)`, with `whole_rows` `(key, value, seq, created_ms, expires_ms)`. With `hide_expired` a
    value whose time has come at `now_ms` hides its key. Operands are collected and handed to `fold`, a function
    from rows of one key, newest first, to such a whole row, or to None when there is nothing to see.
    """

    max_seq: cython.ulonglong
    now_ms: cython.longlong
    hide_expired: cython.bint
    whole_rows: cython.bint
    fold: Any
    key: bytearray
    key_size: cython.Py_ssize_t
    decided: cython.bint
    operands: list | None
    finished_blocks: cython.Py_ssize_t
    entry_at: cython.Py_ssize_t
    at: cython.Py_ssize_t

    def __init__(self, max_seq: int, now_ms: int, hide_expired: bool, whole_rows: bool, fold: Any) -> None:
        self.max_seq = max_seq
        self.now_ms = now_ms
        self.hide_expired = hide_expired
        self.whole_rows = whole_rows
        self.fold = fold
        self.key = bytearray(65_536)
        # No key is empty, so at the beginning no row equals the one before.
        self.key_size = 0
        self.decided = True
        self.operands = None
        self.finished_blocks = 0
        self.entry_at = self.at = 0

    def blocks_done(self) -> int:
        """How many blocks of the last `add_blocks` were read without finding damage."""
        return self.finished_blocks

    def decided_key(self) -> bytes:
        """The last key, if what is visible of it was already decided; b"" while that is open."""
        return bytes(self.key[: self.key_size]) if self.decided else b""

    def collecting(self) -> bool:
        """Whether operands of the last key still wait for its older versions."""
        return self.operands is not None

    def pass_over(self, key: bytes) -> None:
        """Know that all visible versions of `key` were dealt with elsewhere."""
        self.key[: len(key)] = key
        self.key_size = len(key)
        self.decided = True

    def add_blocks(self, blocks: list, start: bytes | None, stop: bytes | None, out: list) -> None:
        """Take the rows with keys in [start, stop) of some blocks. Raises `CorruptData`, see `blocks_done`."""
        block: bytes
        self.finished_blocks = 0
        for block in blocks:
            self._add_block(block, start, stop, out)
            self.finished_blocks += 1

    def add_rows(self, rows: list, out: list) -> None:
        """Take entry tuples."""
        row: tuple
        key: bytes
        previous: bytes = bytes(self.key[: self.key_size])
        kind: cython.int
        for row in rows:
            key = row[0]
            if key != previous:
                if self.operands is not None:
                    self._fold(out)
                previous = key
                self.decided = False
            elif self.decided:
                continue
            if row[1] > self.max_seq:
                continue
            kind = row[2]
            if self.operands is not None or kind == MERGE_KIND:
                self._collect(row, out)
                continue
            self.decided = True
            if kind == TOMBSTONE_KIND or (self.hide_expired and row[5] is not None and row[5] <= self.now_ms):
                continue
            out.append((key, row[3], row[1], row[4], row[5]) if self.whole_rows else (key, row[3]))
        self.key[: len(previous)] = previous
        self.key_size = len(previous)

    def finish(self, out: list) -> None:
        """No more versions of the last key will come."""
        if self.operands is not None:
            self._fold(out)
        self.key_size = 0
        self.decided = True

    @cython.cfunc
    def _collect(self, row: tuple, out: list) -> object:
        if self.operands is None:
            self.operands = []
        self.operands.append(row)
        if row[2] != MERGE_KIND:
            self._fold(out)
        return None

    @cython.cfunc
    def _fold(self, out: list) -> object:
        operands: list | None = self.operands
        self.operands = None
        self.decided = True
        row = self.fold(operands)
        if row is not None:
            out.append(row if self.whole_rows else (row[0], row[1]))
        return None

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def _length(self, data: cython.p_const_uchar, end: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """The LEB128 u32 at `self.at`, which moves behind it."""
        value: cython.longlong = 0
        shift: cython.int = 0
        byte: cython.int
        while shift < 35:
            if self.at >= end:
                raise CorruptData("a length runs past the entries of the block", offset=self.entry_at)
            byte = data[self.at]
            self.at += 1
            value |= cython.cast(cython.longlong, byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        if shift == 35 or value > MAX_LENGTH:
            raise CorruptData("a length does not fit into 32 bits", offset=self.entry_at)
        return value

    @cython.cfunc
    @cython.exceptval(-1)
    def _add_block(self, block: bytes, start: bytes | None, stop: bytes | None, out: list) -> cython.int:
        data: cython.p_const_uchar = block
        known: cython.p_uchar = self.key
        low: cython.p_const_uchar = b"" if start is None else start
        high: cython.p_const_uchar = b"" if stop is None else stop
        low_size: cython.Py_ssize_t = 0 if start is None else len(start)
        high_size: cython.Py_ssize_t = -1 if stop is None else len(stop)
        size: cython.Py_ssize_t = len(block)
        end: cython.Py_ssize_t
        shared: cython.Py_ssize_t
        unshared: cython.Py_ssize_t
        value_size: cython.Py_ssize_t
        value_at: cython.Py_ssize_t
        suffix_at: cython.Py_ssize_t
        flags_at: cython.Py_ssize_t
        count: cython.Py_ssize_t
        order: cython.int
        flags: cython.int
        seq: cython.ulonglong
        # In range as soon as one key was: they ascend.
        inside: cython.bint = low_size == 0
        first: cython.bint = True
        if size < 2:
            raise CorruptData(f"block of {size} bytes, too short for its restart count", offset=0)
        end = size - 2 - 2 * ((data[size - 2] << 8) | data[size - 1])
        if end <= 0:
            raise CorruptData(f"restart points do not fit a block of {size} bytes", offset=size - 2)
        self.at = 0
        while self.at < end:
            self.entry_at = self.at
            if self.at + 3 <= end and (data[self.at] | data[self.at + 1] | data[self.at + 2]) < 0x80:
                shared = data[self.at]
                unshared = data[self.at + 1]
                value_size = data[self.at + 2]
                self.at += 3
            else:
                shared = self._length(data, end)
                unshared = self._length(data, end)
                value_size = self._length(data, end)
            if shared > self.key_size or (first and shared):
                raise CorruptData(
                    f"a key of {unshared} bytes shares {shared} with the key before", offset=self.entry_at
                )
            first = False
            suffix_at = self.at
            value_at = suffix_at + unshared
            flags_at = value_at + value_size + 8
            if flags_at >= end:
                raise CorruptData("a row runs past the entries of the block", offset=self.entry_at)
            flags = data[flags_at]
            if flags & 0xF0 or flags & 0x09 == 0x09:
                raise CorruptData(f"row flags 0x{flags:02x} are not a known combination", offset=flags_at)
            self.at = flags_at + 1 + 8 * (((flags & EXPIRE_FLAG) >> 1) + ((flags & CREATE_FLAG) >> 2))
            if self.at > end:
                raise CorruptData("a row runs past the entries of the block", offset=self.entry_at)
            if shared + unshared != self.key_size or _differ(known, shared, data, suffix_at, unshared):
                # A new key. The old one is complete, whatever is still to be said about it.
                if self.operands is not None:
                    self._fold(out)
                if shared + unshared > len(self.key):
                    self.key.extend(bytes(shared + unshared))
                    known = self.key
                if cython.compiled:
                    memcpy(known + shared, data + suffix_at, unshared)
                else:
                    known[shared : shared + unshared] = data[suffix_at:value_at]
                self.key_size = shared + unshared
                self.decided = False
                if high_size >= 0:
                    count = high_size if high_size < self.key_size else self.key_size
                    order = _differ(known, 0, high, 0, count)
                    if order > 0 or (order == 0 and self.key_size >= high_size):
                        # Not a key of this source: another one may still show it.
                        self.key_size = 0
                        self.decided = True
                        return 0
            elif self.decided:
                continue
            if not inside:
                count = low_size if low_size < self.key_size else self.key_size
                order = _differ(known, 0, low, 0, count)
                inside = order > 0 or (order == 0 and self.key_size >= low_size)
                if not inside:
                    self.decided = True
                    continue
            seq = _get_u64(data, value_at + value_size)
            if seq > self.max_seq:
                continue
            if self.operands is None and not flags & (MERGE_KIND | EXPIRE_FLAG | TOMBSTONE_KIND):
                self.decided = True
                if not self.whole_rows:
                    # The usual row, without any detour.
                    out.append(
                        (_piece(known, 0, self.key_size), _piece(data, value_at, value_at + value_size))
                    )
                    continue
            self._add_entry(data, value_at, value_size, flags, seq, out)
        return 0

    @cython.cfunc
    def _add_entry(
        self,
        data: cython.p_const_uchar,
        value_at: cython.Py_ssize_t,
        value_size: cython.Py_ssize_t,
        flags: cython.int,
        seq: cython.ulonglong,
        out: list,
    ) -> object:
        """One visible version of the current key that is not the plainest kind."""
        kind: cython.int = flags & 0x09
        key: bytes = _piece(self.key, 0, self.key_size)
        value: bytes = _piece(data, value_at, value_at + value_size)
        expires = _get_i64(data, value_at + value_size + 9) if flags & EXPIRE_FLAG else None
        created = _get_i64(data, self.at - 8) if flags & CREATE_FLAG else None
        if self.operands is not None or kind == MERGE_KIND:
            self._collect((key, seq, kind, value, created, expires), out)
            return None
        self.decided = True
        if kind == TOMBSTONE_KIND or (self.hide_expired and expires is not None and expires <= self.now_ms):
            return None
        out.append((key, value, seq, created, expires) if self.whole_rows else (key, value))
        return None


@cython.cclass
class ChunkIterator:
    """Iterates over the rows of one chunk after the other; `refill()` gives the next, or None at the end."""

    refill: Any
    chunk: list
    at: cython.Py_ssize_t
    ended: cython.bint

    def __init__(self, refill: Any) -> None:
        self.refill = refill
        self.chunk = []
        self.at = 0
        self.ended = False

    def __iter__(self) -> ChunkIterator:
        return self

    def __next__(self) -> Any:
        chunk: object
        while self.at >= len(self.chunk):
            chunk = None if self.ended else self.refill()
            self.at = 0
            if chunk is None:
                self.chunk = []
                self.ended = True
                raise StopIteration
            self.chunk = chunk
        row = self.chunk[self.at]
        self.at += 1
        return row

    def rest(self) -> list:
        """The rows of the chunk at hand that were not handed out yet."""
        return self.chunk[self.at :]

    def replace(self, rows: list) -> None:
        """Go on with these rows instead, then with further chunks."""
        self.chunk = rows
        self.at = 0
        self.ended = False

    def end(self) -> None:
        """Hand out no more rows."""
        self.chunk = []
        self.at = 0
        self.ended = True


@cython.cclass
class ColumnSieve:
    """Chooses like `Sieve`, and writes what is visible into columns; for blocks that hold no operands.

    Stateless between calls but for `decided_key`, and without the interpreter's lock. Damage is not told here but left
    to `Sieve`, which words it for everybody.
    """

    max_seq: cython.ulonglong
    now_ms: cython.longlong
    hide_expired: cython.bint
    shared: cython.Py_ssize_t
    unshared: cython.Py_ssize_t
    value_size: cython.Py_ssize_t
    flags: cython.int
    at: cython.Py_ssize_t
    rows: cython.Py_ssize_t
    key_bytes: cython.longlong
    value_bytes: cython.longlong
    decided: bytes

    def __init__(self, max_seq: int, now_ms: int, hide_expired: bool) -> None:
        self.max_seq = max_seq
        self.now_ms = now_ms
        self.hide_expired = hide_expired
        self.shared = self.unshared = self.value_size = self.at = self.rows = 0
        self.flags = 0
        self.key_bytes = self.value_bytes = 0
        self.decided = b""

    def decided_key(self) -> bytes:
        """The last key of the last `fill`, if what is visible of it was decided; b"" while that is open."""
        return self.decided

    def measure(self, chunk: bytes, bounds: cython.const[cython.longlong][::1]) -> tuple | None:
        """Rows, key bytes and value bytes of blocks, whose begins and ends `bounds` has; None when one is damaged."""
        data: cython.p_const_uchar = chunk
        blocks: cython.Py_ssize_t = len(bounds) // 2
        sound: cython.bint
        if blocks and not _inside(bounds, blocks, len(chunk)):
            return None
        with cython.nogil:
            sound = self._measure(data, bounds, blocks)
        return (self.rows, self.key_bytes, self.value_bytes) if sound else None

    def fill(
        self,
        chunk: bytes,
        bounds: cython.const[cython.longlong][::1],
        decided: bytes,
        start: bytes | None,
        stop: bytes | None,
        key_offsets: cython.int[::1],
        keys: cython.uchar[::1],
        value_offsets: cython.int[::1],
        values: cython.uchar[::1],
        seqs: cython.ulonglong[::1],
        created: cython.longlong[::1],
        has_created: cython.uchar[::1],
        expires: cython.longlong[::1],
        has_expires: cython.uchar[::1],
    ) -> int:
        """Write the visible rows with keys in [start, stop) into columns sized by `measure`; returns their number.

        All of `decided`, the key before the first, was dealt with already. Offsets have one element more than there are
        rows. What of values, numbers and times is not wanted is empty. -1 when there is a visible operand, or damage:
        then `Sieve` must take these blocks.
        """
        blocks: cython.Py_ssize_t = len(bounds) // 2
        room: cython.Py_ssize_t = len(key_offsets) - 1
        low: bytes = b"" if start is None else start
        high: bytes = b"" if stop is None else stop
        if blocks and not _inside(bounds, blocks, len(chunk)):
            return -1
        for size in (
            len(value_offsets) - 1,
            len(seqs),
            len(created),
            len(has_created),
            len(expires),
            len(has_expires),
        ):
            if 0 < size < room:
                raise ValueError("a column is shorter than key_offsets")
        key_offsets[0] = 0
        if len(value_offsets):
            value_offsets[0] = 0
        if room == 0:
            return 0
        return self._fill(
            chunk, bounds, blocks, decided, low, high, stop is not None, room, key_offsets, keys, value_offsets, values,
            seqs, created, has_created, expires, has_expires,
        )  # fmt: skip

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _step(self, data: cython.p_const_uchar, end: cython.Py_ssize_t) -> cython.bint:
        """Read the lengths and flags of the entry at `self.at`, which moves behind the lengths; False when damaged."""
        at: cython.Py_ssize_t = self.at
        flags_at: cython.Py_ssize_t
        rest: cython.Py_ssize_t
        if at + 3 <= end and (data[at] | data[at + 1] | data[at + 2]) < 0x80:
            self.shared = data[at]
            self.unshared = data[at + 1]
            self.value_size = data[at + 2]
            self.at = at = at + 3
        else:
            self.shared = self._length(data, end)
            self.unshared = self._length(data, end)
            self.value_size = self._length(data, end)
            if self.shared < 0 or self.unshared < 0 or self.value_size < 0:
                return False
            at = self.at
        flags_at = at + self.unshared + self.value_size + 8
        if flags_at >= end:
            return False
        self.flags = data[flags_at]
        rest = end - flags_at - 1
        return (
            not self.flags & 0xF0
            and self.flags & 0x09 != 0x09
            and rest >= 8 * (((self.flags & EXPIRE_FLAG) >> 1) + ((self.flags & CREATE_FLAG) >> 2))
        )

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _length(self, data: cython.p_const_uchar, end: cython.Py_ssize_t) -> cython.Py_ssize_t:
        """The LEB128 u32 at `self.at`, which moves behind it; -1 when there is none."""
        value: cython.longlong = 0
        shift: cython.int = 0
        byte: cython.int
        while shift < 35:
            if self.at >= end:
                return -1
            byte = data[self.at]
            self.at += 1
            value |= cython.cast(cython.longlong, byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        return -1 if shift == 35 or value > MAX_LENGTH else value

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _measure(
        self,
        data: cython.p_const_uchar,
        bounds: cython.const[cython.longlong][::1],
        blocks: cython.Py_ssize_t,
    ) -> cython.bint:
        number: cython.Py_ssize_t
        end: cython.Py_ssize_t
        rows: cython.Py_ssize_t = 0
        key_bytes: cython.longlong = 0
        value_bytes: cython.longlong = 0
        previous_size: cython.Py_ssize_t
        for number in range(blocks):
            previous_size = 0
            self.at = bounds[2 * number]
            end = _entries_end(data, self.at, bounds[2 * number + 1])
            if end < 0:
                return False
            while self.at < end:
                # A share that cannot be is damage, and would be allocated before `fill` sees it.
                if not self._step(data, end) or self.shared > previous_size:
                    return False
                rows += 1
                previous_size = self.shared + self.unshared
                key_bytes += previous_size
                value_bytes += self.value_size
                self.at += self.unshared + self.value_size + 9
                self.at += 8 * (((self.flags & EXPIRE_FLAG) >> 1) + ((self.flags & CREATE_FLAG) >> 2))
        self.rows = rows
        self.key_bytes = key_bytes
        self.value_bytes = value_bytes
        return True

    @cython.cfunc
    @cython.exceptval(-2)
    def _fill(
        self,
        chunk: bytes,
        bounds: cython.const[cython.longlong][::1],
        blocks: cython.Py_ssize_t,
        decided: bytes,
        start: bytes,
        stop: bytes,
        stops: cython.bint,
        room: cython.Py_ssize_t,
        key_offsets: cython.int[::1],
        keys: cython.uchar[::1],
        value_offsets: cython.int[::1],
        values: cython.uchar[::1],
        seqs: cython.ulonglong[::1],
        created: cython.longlong[::1],
        has_created: cython.uchar[::1],
        expires: cython.longlong[::1],
        has_expires: cython.uchar[::1],
    ) -> cython.Py_ssize_t:
        data: cython.p_const_uchar = chunk
        low: cython.p_const_uchar = start
        high: cython.p_const_uchar = stop
        # The key before: the one decided last, or the last in the column, or behind that one that is not to be seen.
        before: cython.p_const_uchar = decided
        before_at: cython.Py_ssize_t = 0
        before_size: cython.Py_ssize_t = len(decided)
        key_out: cython.p_uchar
        value_out: cython.p_uchar
        key_room: cython.Py_ssize_t = len(keys)
        value_room: cython.Py_ssize_t = len(values)
        with_values: cython.bint = len(value_offsets) > 0
        with_seqs: cython.bint = len(seqs) > 0
        with_created: cython.bint = len(created) > 0
        with_expires: cython.bint = len(expires) > 0
        low_size: cython.Py_ssize_t = len(start)
        high_size: cython.Py_ssize_t = len(stop)
        inside: cython.bint = low_size == 0
        known: cython.bint = True
        over: cython.bint = False
        first: cython.bint
        row: cython.Py_ssize_t = 0
        key_at: cython.Py_ssize_t = 0
        key_size: cython.Py_ssize_t
        value_at: cython.Py_ssize_t = 0
        at: cython.Py_ssize_t
        tail_at: cython.Py_ssize_t
        number: cython.Py_ssize_t
        end: cython.Py_ssize_t
        size: cython.Py_ssize_t
        order: cython.int
        seq: cython.ulonglong
        time: cython.longlong
        outcome: cython.Py_ssize_t = 0
        if key_room == 0:
            return -1
        if cython.compiled:
            key_out = cython.address(keys[0])
            value_out = cython.address(values[0]) if value_room else key_out
        else:
            key_out = keys
            value_out = values
        with cython.nogil:
            for number in range(blocks):
                self.at = bounds[2 * number]
                end = _entries_end(data, self.at, bounds[2 * number + 1])
                if end < 0:
                    outcome = -1
                    break
                first = True
                while self.at < end:
                    if not self._step(data, end) or self.shared > before_size or (first and self.shared):
                        outcome = -1
                        break
                    first = False
                    at = self.at
                    tail_at = at + self.unshared + self.value_size
                    self.at = tail_at + 9
                    self.at += 8 * (((self.flags & EXPIRE_FLAG) >> 1) + ((self.flags & CREATE_FLAG) >> 2))
                    key_size = self.shared + self.unshared
                    if key_size != before_size or not _equal(
                        before, before_at + self.shared, data, at, self.unshared
                    ):
                        if key_at + key_size > key_room:
                            outcome = -1
                            break
                        if before is not key_out or before_at != key_at:
                            _copy(key_out, key_at, before, before_at, self.shared)
                        _copy(key_out, key_at + self.shared, data, at, self.unshared)
                        before = key_out
                        before_at = key_at
                        before_size = key_size
                        known = False
                        if not inside:
                            size = low_size if low_size < key_size else key_size
                            order = _order(key_out, key_at, low, size)
                            inside = order > 0 or (order == 0 and key_size >= low_size)
                        if stops:
                            size = high_size if high_size < key_size else key_size
                            order = _order(key_out, key_at, high, size)
                            if order > 0 or (order == 0 and key_size >= high_size):
                                over = True
                                break
                    if known or not inside:
                        continue
                    seq = _get_u64(data, tail_at)
                    if seq > self.max_seq:
                        continue
                    if self.flags & MERGE_KIND:
                        outcome = -1
                        break
                    known = True
                    if self.flags & TOMBSTONE_KIND:
                        continue
                    time = 0
                    if self.flags & EXPIRE_FLAG:
                        time = _get_i64(data, tail_at + 9)
                        if self.hide_expired and time <= self.now_ms:
                            continue
                    if row >= room or (with_values and value_at + self.value_size > value_room):
                        outcome = -1
                        break
                    if with_values:
                        _copy(value_out, value_at, data, at + self.unshared, self.value_size)
                        value_at += self.value_size
                        value_offsets[row + 1] = value_at
                    if with_seqs:
                        seqs[row] = seq
                    if with_expires:
                        expires[row] = time
                        has_expires[row] = (self.flags & EXPIRE_FLAG) >> 1
                    if with_created:
                        created[row] = _get_i64(data, self.at - 8) if self.flags & CREATE_FLAG else 0
                        has_created[row] = (self.flags & CREATE_FLAG) >> 2
                    key_at += key_size
                    row += 1
                    key_offsets[row] = key_at
                if outcome or over:
                    break
        if outcome:
            return outcome
        # A key at or behind `stop` belongs to others, and one without a version old enough is still open.
        self.decided = b"" if over or not known else _piece(before, before_at, before_at + before_size)
        return row


@cython.cfunc
@cython.exceptval(check=False)
def _inside(
    bounds: cython.const[cython.longlong][::1], blocks: cython.Py_ssize_t, size: cython.Py_ssize_t
) -> cython.bint:
    """Whether all blocks lie within a chunk of that size."""
    number: cython.Py_ssize_t
    for number in range(blocks):  # noqa: SIM110 - a generator would not compile to a loop
        if not 0 <= bounds[2 * number] <= bounds[2 * number + 1] <= size:
            return False
    return True


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _entries_end(
    data: cython.p_const_uchar, start: cython.Py_ssize_t, stop: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """Where the entries of the block from `start` to `stop` end; -1 when its restart points do not fit."""
    end: cython.Py_ssize_t
    if stop - start < 2:
        return -1
    end = stop - 2 - 2 * ((data[stop - 2] << 8) | data[stop - 1])
    return end if end > start else -1


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _order(
    one: cython.p_const_uchar, at: cython.Py_ssize_t, two: cython.p_const_uchar, size: cython.Py_ssize_t
) -> cython.int:
    """`_differ` from the beginning of the second, without the interpreter's lock."""
    if cython.compiled:
        return memcmp(one + at, two, size)
    return _differ(one, at, two, 0, size)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _equal(
    one: cython.p_const_uchar,
    one_at: cython.Py_ssize_t,
    two: cython.p_const_uchar,
    two_at: cython.Py_ssize_t,
    size: cython.Py_ssize_t,
) -> cython.bint:
    if cython.compiled:
        return memcmp(one + one_at, two + two_at, size) == 0
    return _differ(one, one_at, two, two_at, size) == 0


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _copy(
    out: cython.p_uchar,
    at: cython.Py_ssize_t,
    source: cython.p_const_uchar,
    start: cython.Py_ssize_t,
    size: cython.Py_ssize_t,
) -> cython.void:
    if cython.compiled:
        memcpy(out + at, source + start, size)
    else:
        out[at : at + size] = source[start : start + size]
