"""Fills data blocks of format version 2 from rows or from the stream of a memtable.

    block  = entry* restart(u16 BE)* count(u16 BE)
    entry  = shared unshared value_len (LEB128 u32 each) key_suffix value seq(u64 BE) flags(u8)
             [expire_ms(i64 BE)] [create_ms(i64 BE)]

Every sixteenth entry is a restart point: its key is stored whole, so that a search can begin there. All
other entries share a prefix with their predecessor. A block is closed when the next entry would push it past
its size; an entry larger than a block gets a block of its own.

Written in Cython's pure-Python mode: the file runs as it is, and compiles to C. A `bytes` object assigned to
a name annotated as a C pointer is that pointer when compiled and stays the object when interpreted; indexing
means the same in both.
"""

from __future__ import annotations

import cython
from cython.cimports.libc.string import memcpy

from flagstone.errors import InvalidRequest

# Declared for C: an ordinary module constant would be looked up as a Python object in every row.
TOMBSTONE_FLAG = cython.declare(cython.int, 0x01)
EXPIRE_FLAG = cython.declare(cython.int, 0x02)
CREATE_FLAG = cython.declare(cython.int, 0x04)
MAX_KEY_BYTES = cython.declare(cython.Py_ssize_t, 65_535)
MAX_VALUE_BYTES = cython.declare(cython.longlong, 0xFFFFFFFF)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _varint_size(value: cython.Py_ssize_t) -> cython.Py_ssize_t:
    if value < 0x80:
        return 1
    if value < 0x4000:
        return 2
    if value < 0x200000:
        return 3
    if value < 0x10000000:
        return 4
    return 5


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _put_varint(out: cython.p_uchar, at: cython.Py_ssize_t, value: cython.Py_ssize_t) -> cython.Py_ssize_t:
    while value >= 0x80:
        out[at] = (value & 0x7F) | 0x80
        value >>= 7
        at += 1
    out[at] = value
    return at + 1


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _get_little(data: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.int) -> cython.ulonglong:
    value: cython.ulonglong = 0
    index: cython.int
    for index in range(size):
        value |= cython.cast(cython.ulonglong, data[at + index]) << (8 * index)
    return value


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
def _put_u64(out: cython.p_uchar, at: cython.Py_ssize_t, value: cython.ulonglong) -> cython.Py_ssize_t:
    index: cython.int
    for index in range(8):
        out[at + index] = (value >> (56 - 8 * index)) & 0xFF
    return at + 8


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _put_bytes(
    out: cython.p_uchar,
    at: cython.Py_ssize_t,
    source: cython.p_const_uchar,
    start: cython.Py_ssize_t,
    size: cython.Py_ssize_t,
) -> cython.Py_ssize_t:
    if cython.compiled:
        memcpy(out + at, source + start, size)
    else:
        out[at : at + size] = source[start : start + size]
    return at + size


@cython.cfunc
@cython.inline
def _piece(data: cython.p_const_uchar, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> bytes:
    """A part of the memory as bytes. Compiled, a slice is that already, and `bytes()` would cost as much again."""
    if cython.compiled:
        return data[start:stop]
    return bytes(data[start:stop])


@cython.cclass
class BlockWriter:
    """Takes rows in order and cuts them into blocks.

    A finished block is a tuple `(raw, first_key, last_key, first_seq, puts, deletes, merges)`. With `ordered`,
    rows must come sorted by key, then by descending sequence number; `InvalidRequest` names one that does not.
    """

    blocks: list
    restarts: list
    buffer: bytearray
    first_key: bytes
    first_seq: cython.ulonglong
    previous: bytearray
    previous_size: cython.Py_ssize_t
    previous_seq: cython.ulonglong
    limit: cython.Py_ssize_t
    ordered: cython.bint
    used: cython.Py_ssize_t
    count: cython.Py_ssize_t
    puts: cython.Py_ssize_t
    deletes: cython.Py_ssize_t
    merges: cython.Py_ssize_t
    rows: cython.longlong
    key_bytes: cython.longlong
    value_bytes: cython.longlong

    def __init__(self, block_size: int, ordered: bool) -> None:
        self.blocks = []
        self.restarts = []
        self.buffer = bytearray(block_size + 1024)
        self.first_key = b""
        self.first_seq = 0
        self.previous = bytearray(256)
        self.previous_size = 0
        self.previous_seq = 0
        self.limit = block_size
        self.ordered = ordered
        self.used = self.count = self.puts = self.deletes = self.merges = 0
        self.rows = self.key_bytes = self.value_bytes = 0

    def add_rows(self, rows: list) -> None:
        """Append entry tuples (see `flagstone.types`)."""
        flags: cython.int
        created: cython.longlong
        expires: cython.longlong
        row: tuple
        key: bytes
        value: bytes
        for row in rows:
            key = row[0]
            value = row[3]
            flags = row[2]
            created = expires = 0
            if row[5] is not None:
                flags |= EXPIRE_FLAG
                expires = row[5]
            if row[4] is not None:
                flags |= CREATE_FLAG
                created = row[4]
            self._add(key, 0, len(key), value, 0, len(value), row[1], flags, created, expires)

    def add_stream(self, stream: cython.const[cython.uchar][::1]) -> None:
        """Append the rows of a memtable's stream (see `_merge` for its form)."""
        data: cython.p_const_uchar
        at: cython.Py_ssize_t = 0
        size: cython.Py_ssize_t = len(stream)
        key_at: cython.Py_ssize_t
        value_at: cython.Py_ssize_t
        tail_at: cython.Py_ssize_t
        seq: cython.ulonglong
        flags: cython.int
        created: cython.ulonglong
        expires: cython.ulonglong
        if size == 0:
            return
        if cython.compiled:
            data = cython.address(stream[0])
        else:
            data = stream
        while at < size:
            key_at = at + 6
            value_at = key_at + _get_little(data, at, 2)
            tail_at = value_at + _get_little(data, at + 2, 4)
            seq = _get_u64(data, tail_at)
            flags = data[tail_at + 8]
            at = tail_at + 9
            created = expires = 0
            if flags & EXPIRE_FLAG:
                expires = _get_u64(data, at)
                at += 8
            if flags & CREATE_FLAG:
                created = _get_u64(data, at)
                at += 8
            self._add(
                data,
                key_at,
                value_at - key_at,
                data,
                value_at,
                tail_at - value_at,
                seq,
                flags,
                created,
                expires,
            )

    def take(self) -> list:
        """The blocks finished since the last call."""
        blocks: list = self.blocks
        self.blocks = []
        return blocks

    def finish(self) -> list:
        """Close the block that is still open, and `take`."""
        if self.count:
            self._close()
        return self.take()

    def totals(self) -> tuple:
        """Rows, key bytes and value bytes so far."""
        return self.rows, self.key_bytes, self.value_bytes

    @cython.cfunc
    @cython.exceptval(-1)
    def _add(
        self,
        key: cython.p_const_uchar,
        key_at: cython.Py_ssize_t,
        key_size: cython.Py_ssize_t,
        value: cython.p_const_uchar,
        value_at: cython.Py_ssize_t,
        value_size: cython.Py_ssize_t,
        seq: cython.ulonglong,
        flags: cython.int,
        created: cython.longlong,
        expires: cython.longlong,
    ) -> cython.int:
        """Append one row, closing the block before it when it does not fit."""
        out: cython.p_uchar
        previous: cython.p_uchar = self.previous
        common: cython.Py_ssize_t = 0
        shortest: cython.Py_ssize_t = self.previous_size if self.previous_size < key_size else key_size
        shared: cython.Py_ssize_t
        unshared: cython.Py_ssize_t
        size: cython.Py_ssize_t
        at: cython.Py_ssize_t
        kind: cython.int = flags & 0x09
        if key_size < 1 or key_size > MAX_KEY_BYTES:
            raise InvalidRequest(
                f"row {self.rows}: a key has 1 to {MAX_KEY_BYTES} bytes, this one has {key_size}"
            )
        if value_size > MAX_VALUE_BYTES:
            raise InvalidRequest(
                f"row {self.rows}: a value has at most {MAX_VALUE_BYTES} bytes, not {value_size}"
            )
        if kind == 0x09 or flags & 0xF0 or (kind == TOMBSTONE_FLAG and value_size):
            raise InvalidRequest(
                f"row {self.rows}: kind {kind} with a value of {value_size} bytes is not a row"
            )
        # The common prefix is needed twice: to check the order, and (except at restarts) to leave it out.
        while common < shortest and previous[common] == key[key_at + common]:
            common += 1
        if self.ordered and self.rows:
            if common == shortest:
                if key_size < self.previous_size:
                    raise InvalidRequest(
                        f"row {self.rows}: its key is below the one before; rows must be sorted"
                    )
                if key_size == self.previous_size and seq >= self.previous_seq:
                    raise InvalidRequest(
                        f"row {self.rows}: versions of a key must be in descending order of seq"
                    )
            elif key[key_at + common] < previous[common]:
                raise InvalidRequest(f"row {self.rows}: its key is below the one before; rows must be sorted")
        while True:
            shared = common if self.count & 15 else 0
            unshared = key_size - shared
            size = (
                _varint_size(shared)
                + _varint_size(unshared)
                + _varint_size(value_size)
                + unshared
                + value_size
                + 9
            )
            if flags & EXPIRE_FLAG:
                size += 8
            if flags & CREATE_FLAG:
                size += 8
            at = self.used + 2 * len(self.restarts) + 2 + size
            if self.count & 15 == 0:
                at += 2
            if self.count == 0 or at <= self.limit:
                break
            self._close()
        if at > len(self.buffer):
            self.buffer.extend(bytes(at - len(self.buffer)))
        out = self.buffer
        if self.count == 0:
            self.first_key = _piece(key, key_at, key_at + key_size)
            self.first_seq = seq
        at = self.used
        if self.count & 15 == 0:
            self.restarts.append(at)
        at = _put_varint(out, at, shared)
        at = _put_varint(out, at, unshared)
        at = _put_varint(out, at, value_size)
        at = _put_bytes(out, at, key, key_at + shared, unshared)
        at = _put_bytes(out, at, value, value_at, value_size)
        at = _put_u64(out, at, seq)
        out[at] = flags
        at += 1
        if flags & EXPIRE_FLAG:
            at = _put_u64(out, at, cython.cast(cython.ulonglong, expires))
        if flags & CREATE_FLAG:
            at = _put_u64(out, at, cython.cast(cython.ulonglong, created))
        self.used = at
        self.count += 1
        if kind == 0:
            self.puts += 1
        elif kind == TOMBSTONE_FLAG:
            self.deletes += 1
        else:
            self.merges += 1
        self.rows += 1
        self.key_bytes += key_size
        self.value_bytes += value_size
        if key_size > len(self.previous):
            self.previous = bytearray(2 * key_size)
        _put_bytes(self.previous, 0, key, key_at, key_size)
        self.previous_size = key_size
        self.previous_seq = seq
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def _close(self) -> cython.int:
        """End the block: its entries, then the restart points and their number."""
        at: cython.Py_ssize_t = self.used
        out: cython.p_uchar = self.buffer
        previous: cython.p_uchar = self.previous
        offset: cython.Py_ssize_t
        for offset in self.restarts:
            out[at] = (offset >> 8) & 0xFF
            out[at + 1] = offset & 0xFF
            at += 2
        out[at] = (len(self.restarts) >> 8) & 0xFF
        out[at + 1] = len(self.restarts) & 0xFF
        last_key: bytes = _piece(previous, 0, self.previous_size)
        self.blocks.append(
            (
                _piece(out, 0, at + 2),
                self.first_key,
                last_key,
                self.first_seq,
                self.puts,
                self.deletes,
                self.merges,
            )
        )
        self.restarts = []
        self.used = self.count = self.puts = self.deletes = self.merges = 0
        return 0
