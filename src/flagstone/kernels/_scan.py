"""Turns stored rows into what a scan shows: of each key the newest version a reader may see, or nothing.

Rows come in key order, the versions of a key from new to old, as whole blocks or as entry tuples, in any mixture. State
is carried from call to call, because the versions of a key may continue in the next block. Everything read from a block
is bounds-checked first.
"""

from __future__ import annotations

from typing import Any

import cython
from cython.cimports.flagstone.kernels._bytes import (
    copy,
    differ,
    get_u64,
    piece,
)
from cython.cimports.flagstone.kernels._rows import (
    CREATE_FLAG,
    EXPIRE_FLAG,
    MERGE_KIND,
    TOMBSTONE_KIND,
    Entry,
    created_at,
    entries_end,
    expires_at,
    new_entry,
    read_flags,
    read_lengths,
    row_of,
)
from cython.cimports.flagstone.kernels._views import bytes_of

from flagstone.errors import CorruptData
from flagstone.kernels.damage import damaged_entry


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
        """Skip all versions of `key`: another source has decided what is visible of it."""
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
    @cython.exceptval(-1)
    def _add_block(self, block: bytes, start: bytes | None, stop: bytes | None, out: list) -> cython.int:
        data: cython.p_const_uchar = block
        known: cython.p_uchar = self.key
        low: cython.p_const_uchar = b"" if start is None else start
        high: cython.p_const_uchar = b"" if stop is None else stop
        low_size: cython.Py_ssize_t = 0 if start is None else len(start)
        high_size: cython.Py_ssize_t = -1 if stop is None else len(stop)
        size: cython.Py_ssize_t = len(block)
        at: cython.Py_ssize_t = 0
        end: cython.Py_ssize_t
        entry: Entry = new_entry()
        key_size: cython.Py_ssize_t
        count: cython.Py_ssize_t
        order: cython.int
        problem: cython.int
        seq: cython.ulonglong
        # In range as soon as one key was: they ascend.
        inside: cython.bint = low_size == 0
        if size < 2:
            raise CorruptData(f"block of {size} bytes, too short for its restart count", offset=0)
        end = entries_end(data, 0, size)
        if end < 0:
            raise CorruptData(f"restart points do not fit a block of {size} bytes", offset=size - 2)
        while at < end:
            problem = read_lengths(data, at, end, cython.address(entry))
            if problem:
                raise damaged_entry(problem, at, 0, 0)
            # The first entry of a block shares nothing: the key before may come from another block.
            if entry.shared > self.key_size or (at == 0 and entry.shared):
                raise CorruptData(
                    f"a key of {entry.unshared} bytes shares {entry.shared} with the key before", offset=at
                )
            problem = read_flags(data, end, cython.address(entry))
            if problem:
                raise damaged_entry(problem, at, entry.tail_at + 8, entry.flags)
            at = entry.stop
            key_size = entry.shared + entry.unshared
            if key_size != self.key_size or differ(
                known, entry.shared, data, entry.suffix_at, entry.unshared
            ):
                # A new key: all versions of the key before were read.
                if self.operands is not None:
                    self._fold(out)
                if key_size > len(self.key):
                    self.key.extend(bytes(key_size))
                    known = self.key
                copy(known, entry.shared, data, entry.suffix_at, entry.unshared)
                self.key_size = key_size
                self.decided = False
                if high_size >= 0:
                    count = high_size if high_size < key_size else key_size
                    order = differ(known, 0, high, 0, count)
                    if order > 0 or (order == 0 and key_size >= high_size):
                        # Not a key of this source: another one may still show it.
                        self.key_size = 0
                        self.decided = True
                        return 0
            elif self.decided:
                continue
            if not inside:
                count = low_size if low_size < key_size else key_size
                order = differ(known, 0, low, 0, count)
                inside = order > 0 or (order == 0 and key_size >= low_size)
                if not inside:
                    self.decided = True
                    continue
            seq = get_u64(data, entry.tail_at)
            if seq > self.max_seq:
                continue
            if self.operands is None and not entry.flags & (MERGE_KIND | EXPIRE_FLAG | TOMBSTONE_KIND):
                self.decided = True
                if not self.whole_rows:
                    # The usual row, built at once.
                    out.append((piece(known, 0, key_size), piece(data, entry.value_at, entry.tail_at)))
                    continue
            self._add_entry(data, cython.address(entry), out)
        return 0

    @cython.cfunc
    def _add_entry(
        self,
        data: cython.p_const_uchar,
        entry: cython.pointer(Entry),
        out: list,
    ) -> object:
        """One visible version of the current key that is not a plain value without an end."""
        row: tuple = row_of(data, entry, piece(self.key, 0, self.key_size))
        if self.operands is not None or entry.flags & MERGE_KIND:
            self._collect(row, out)
            return None
        self.decided = True
        if entry.flags & TOMBSTONE_KIND or (
            self.hide_expired and entry.flags & EXPIRE_FLAG and expires_at(data, entry) <= self.now_ms
        ):
            return None
        out.append((row[0], row[3], row[1], row[4], row[5]) if self.whole_rows else (row[0], row[3]))
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

    Keeps no state between calls but `decided_key`, and works without the interpreter's lock. It does not raise for
    damage: `Sieve` then reads the same blocks, and raises the detailed error.
    """

    max_seq: cython.ulonglong
    now_ms: cython.longlong
    hide_expired: cython.bint
    rows: cython.Py_ssize_t
    key_bytes: cython.longlong
    value_bytes: cython.longlong
    decided: bytes

    def __init__(self, max_seq: int, now_ms: int, hide_expired: bool) -> None:
        self.max_seq = max_seq
        self.now_ms = now_ms
        self.hide_expired = hide_expired
        self.rows = 0
        self.key_bytes = self.value_bytes = 0
        self.decided = b""

    def decided_key(self) -> bytes:
        """The last key of the last `fill`, if what is visible of it was decided; b"" while that is open."""
        return self.decided

    def measure(
        self, chunk: cython.const[cython.uchar][::1], bounds: cython.const[cython.longlong][::1]
    ) -> tuple | None:
        """Rows, key bytes and value bytes of blocks, whose begins and ends `bounds` has; None when one is damaged."""
        blocks: cython.Py_ssize_t = len(bounds) // 2
        sound: cython.bint
        if blocks == 0:
            return 0, 0, 0
        if len(chunk) == 0 or not _inside(bounds, blocks, len(chunk)):
            return None
        data: cython.p_const_uchar = bytes_of(chunk)
        with cython.nogil:
            sound = self._measure(data, bounds, blocks)
        return (self.rows, self.key_bytes, self.value_bytes) if sound else None

    def fill(
        self,
        chunk: cython.const[cython.uchar][::1],
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
        if room == 0 or blocks == 0:
            return 0
        if len(chunk) == 0:
            return -1
        return self._fill(
            chunk, bounds, blocks, decided, low, high, stop is not None, room, key_offsets, keys, value_offsets, values,
            seqs, created, has_created, expires, has_expires,
        )  # fmt: skip

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
        at: cython.Py_ssize_t
        end: cython.Py_ssize_t
        entry: Entry = new_entry()
        rows: cython.Py_ssize_t = 0
        key_bytes: cython.longlong = 0
        value_bytes: cython.longlong = 0
        previous_size: cython.Py_ssize_t
        for number in range(blocks):
            previous_size = 0
            at = bounds[2 * number]
            end = entries_end(data, at, bounds[2 * number + 1])
            if end < 0:
                return False
            while at < end:
                # Checked here already: the caller allocates the key bytes that a damaged share would claim.
                if (
                    read_lengths(data, at, end, cython.address(entry))
                    or read_flags(data, end, cython.address(entry))
                    or entry.shared > previous_size
                ):
                    return False
                rows += 1
                previous_size = entry.shared + entry.unshared
                key_bytes += previous_size
                value_bytes += entry.value_size
                at = entry.stop
        self.rows = rows
        self.key_bytes = key_bytes
        self.value_bytes = value_bytes
        return True

    @cython.cfunc
    @cython.exceptval(-2)
    def _fill(
        self,
        chunk: cython.const[cython.uchar][::1],
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
        data: cython.p_const_uchar = bytes_of(chunk)
        low: cython.p_const_uchar = start
        high: cython.p_const_uchar = stop
        # The key before: the one decided last, or the last in the column, or a hidden one behind it.
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
        number: cython.Py_ssize_t
        end: cython.Py_ssize_t
        entry: Entry = new_entry()
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
                at = bounds[2 * number]
                end = entries_end(data, at, bounds[2 * number + 1])
                if end < 0:
                    outcome = -1
                    break
                first = True
                while at < end:
                    if (
                        read_lengths(data, at, end, cython.address(entry))
                        or read_flags(data, end, cython.address(entry))
                        or entry.shared > before_size
                        or (first and entry.shared)
                    ):
                        outcome = -1
                        break
                    first = False
                    at = entry.stop
                    key_size = entry.shared + entry.unshared
                    if key_size != before_size or differ(
                        before, before_at + entry.shared, data, entry.suffix_at, entry.unshared
                    ):
                        if key_at + key_size > key_room:
                            outcome = -1
                            break
                        if before is not key_out or before_at != key_at:
                            copy(key_out, key_at, before, before_at, entry.shared)
                        copy(key_out, key_at + entry.shared, data, entry.suffix_at, entry.unshared)
                        before = key_out
                        before_at = key_at
                        before_size = key_size
                        known = False
                        if not inside:
                            size = low_size if low_size < key_size else key_size
                            order = differ(key_out, key_at, low, 0, size)
                            inside = order > 0 or (order == 0 and key_size >= low_size)
                        if stops:
                            size = high_size if high_size < key_size else key_size
                            order = differ(key_out, key_at, high, 0, size)
                            if order > 0 or (order == 0 and key_size >= high_size):
                                over = True
                                break
                    if known or not inside:
                        continue
                    seq = get_u64(data, entry.tail_at)
                    if seq > self.max_seq:
                        continue
                    if entry.flags & MERGE_KIND:
                        outcome = -1
                        break
                    known = True
                    if entry.flags & TOMBSTONE_KIND:
                        continue
                    time = expires_at(data, cython.address(entry))
                    if entry.flags & EXPIRE_FLAG and self.hide_expired and time <= self.now_ms:
                        continue
                    if row >= room or (with_values and value_at + entry.value_size > value_room):
                        outcome = -1
                        break
                    if with_values:
                        copy(value_out, value_at, data, entry.value_at, entry.value_size)
                        value_at += entry.value_size
                        value_offsets[row + 1] = value_at
                    if with_seqs:
                        seqs[row] = seq
                    if with_expires:
                        expires[row] = time
                        has_expires[row] = (entry.flags & EXPIRE_FLAG) >> 1
                    if with_created:
                        created[row] = created_at(data, cython.address(entry))
                        has_created[row] = (entry.flags & CREATE_FLAG) >> 2
                    key_at += key_size
                    row += 1
                    key_offsets[row] = key_at
                if outcome or over:
                    break
        if outcome:
            return outcome
        # A key at or behind `stop` is not in the range, and one without a version old enough is still open.
        self.decided = b"" if over or not known else piece(before, before_at, before_at + before_size)
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
