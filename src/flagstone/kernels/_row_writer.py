"""Fills the blocks of tables: from the stream of a merge or a memtable, or from the columns of a bulk load.

It writes the same blocks as `_block_writer` and keeps beside them what a table needs besides: a separator, row
counts per block, and the hash of every key. Unlike that one it works without the interpreter's lock, for which
everything that grows is plain C memory (interpreted: byte arrays and lists).

Written in Cython's pure-Python mode; see `_block_writer` for how that works.
"""

from __future__ import annotations

from array import array

import cython
from cython.cimports.cpython.buffer import PyBUF_WRITE
from cython.cimports.cpython.memoryview import PyMemoryView_FromMemory
from cython.cimports.flagstone.kernels._bytes import (
    MAX_KEY_BYTES,
    common_prefix,
    compare,
    copy,
    get_little,
    get_u64,
    put_u64,
    put_varint,
    varint_size,
)
from cython.cimports.flagstone.kernels._rows import (
    CREATE_FLAG,
    EXPIRE_FLAG,
    TOMBSTONE_KIND,
)
from cython.cimports.flagstone.kernels._siphash import siphash
from cython.cimports.libc.stdlib import free, malloc, realloc
from cython.cimports.libc.string import memmove

from flagstone.errors import CorruptData, InvalidRequest

# Room for one key. Three are kept: the last one written, the first of the block, the first of the table.
STRIDE = cython.declare(cython.Py_ssize_t, 65_536 + 192)
# A block of 64 KiB has room for fewer; a larger one has a single row.
MAX_RESTARTS = cython.declare(cython.Py_ssize_t, 512)
RECORD = cython.declare(cython.Py_ssize_t, 6)

_BAD_ORDER = cython.declare(cython.int, 1)
_NO_MEMORY = cython.declare(cython.int, 2)
_BAD_ROW = cython.declare(cython.int, 3)


@cython.cclass
class RowWriter:
    """Takes rows in order and cuts them into blocks, and blocks into tables where the caller says so.

    Behind each block `gap` bytes are left free, for a checksum. Rows up to `resume_seq` of `resume_key`, with which
    an interrupted run ended, are not written again. With `want_keys` the keys are kept, too.
    """

    limit: cython.Py_ssize_t
    soft_limit: cython.Py_ssize_t
    gap: cython.Py_ssize_t
    want_keys: cython.bint
    resuming: cython.bint
    resume_key: bytes
    resume_at: cython.p_const_uchar
    resume_size: cython.Py_ssize_t
    resume_seq: cython.ulonglong
    # The block being filled, behind the finished ones.
    out: cython.p_uchar
    used: cython.Py_ssize_t
    taken: cython.Py_ssize_t
    room: cython.Py_ssize_t
    block_start: cython.Py_ssize_t
    restarts: cython.p_longlong
    restart_count: cython.Py_ssize_t
    count: cython.Py_ssize_t
    puts: cython.longlong
    deletes: cython.longlong
    merges: cython.longlong
    keys: cython.p_uchar
    previous_size: cython.Py_ssize_t
    previous_seq: cython.ulonglong
    first_size: cython.Py_ssize_t
    separator_size: cython.Py_ssize_t
    lead_size: cython.Py_ssize_t
    # The table it belongs to.
    blocks: cython.longlong
    rows: cython.longlong
    key_bytes: cython.longlong
    value_bytes: cython.longlong
    # What `take` hands out.
    records: cython.p_longlong
    done: cython.Py_ssize_t
    record_room: cython.Py_ssize_t
    separators: cython.p_uchar
    separators_used: cython.Py_ssize_t
    separators_room: cython.Py_ssize_t
    hashes: cython.p_ulonglong
    hashed: cython.Py_ssize_t
    hash_room: cython.Py_ssize_t
    column: cython.p_uchar
    column_used: cython.Py_ssize_t
    column_room: cython.Py_ssize_t
    error: cython.int

    def __init__(
        self,
        block_bytes: int,
        gap: int,
        *,
        want_keys: bool = False,
        resume_key: bytes = b"",
        resume_seq: int = 0,
        soft_limit: int = 1 << 18,
    ) -> None:
        self.limit = block_bytes
        self.soft_limit = soft_limit
        self.gap = gap
        self.want_keys = want_keys
        # No key is empty.
        self.resuming = resume_key != b""
        self.resume_key = resume_key
        self.resume_at = self.resume_key
        self.resume_size = len(resume_key)
        self.resume_seq = resume_seq
        self.room = 2 * (soft_limit + block_bytes)
        self.record_room = 256
        self.separators_room = 1 << 17
        self.hash_room = 1 << 13
        self.column_room = 1 << 17
        if not cython.compiled:
            self._lay_out()
            return
        self.out = cython.cast(cython.p_uchar, malloc(self.room))
        self.restarts = cython.cast(cython.p_longlong, malloc(MAX_RESTARTS * 8))
        self.keys = cython.cast(cython.p_uchar, malloc(3 * STRIDE))
        self.records = cython.cast(cython.p_longlong, malloc(self.record_room * RECORD * 8))
        self.separators = cython.cast(cython.p_uchar, malloc(self.separators_room))
        self.hashes = cython.cast(cython.p_ulonglong, malloc(self.hash_room * 8))
        self.column = cython.cast(cython.p_uchar, malloc(self.column_room))
        if (
            self.out == cython.NULL
            or self.restarts == cython.NULL
            or self.keys == cython.NULL
            or self.records == cython.NULL
            or self.separators == cython.NULL
            or self.hashes == cython.NULL
            or self.column == cython.NULL
        ):
            raise MemoryError

    def _lay_out(self) -> None:
        """The interpreted form of the memory above, and the zeros that C objects begin with."""
        for name, size in (
            ("out", self.room),
            ("separators", self.separators_room),
            ("keys", 3 * STRIDE),
            ("column", self.column_room),
        ):
            setattr(self, name, bytearray(size))
        for name, size in (
            ("restarts", MAX_RESTARTS),
            ("hashes", self.hash_room),
            ("records", RECORD * self.record_room),
        ):
            setattr(self, name, [0] * size)
        for name in (  # noqa: SIM905 - a third of the lines
            "used taken block_start restart_count count puts deletes merges previous_size previous_seq first_size "
            "separator_size lead_size blocks rows key_bytes value_bytes done separators_used hashed column_used error"
        ).split():
            setattr(self, name, 0)

    def __dealloc__(self) -> None:
        if cython.compiled:
            free(self.out)
            free(self.restarts)
            free(self.keys)
            free(self.records)
            free(self.separators)
            free(self.hashes)
            free(self.column)

    def write(self, stream: cython.const[cython.uchar][::1], start: int, room: int) -> int:
        """Append the rows of a stream from byte `start` on; returns where it stopped.

        That is the end, or the row after which more than `room` bytes of blocks, or simply enough, were finished
        since the last `take`. Raises `CorruptData` when rows do not ascend.
        """
        data: cython.p_const_uchar
        at: cython.Py_ssize_t = start
        size: cython.Py_ssize_t = len(stream)
        allowed: cython.Py_ssize_t = room if room < self.soft_limit else self.soft_limit
        self._drop_taken()
        if at >= size:
            return at
        if cython.compiled:
            data = cython.address(stream[0])
        else:
            data = stream
        with cython.nogil:
            at = self._write(data, at, size, allowed)
        if self.error:
            self._raise()
        return at

    def write_columns(
        self,
        start: int,
        total: int,
        key_offsets: cython.const[cython.int][::1],
        keys: cython.const[cython.uchar][::1],
        value_offsets: cython.const[cython.int][::1],
        values: cython.const[cython.uchar][::1],
        kinds: cython.const[cython.uchar][::1],
        expires: cython.const[cython.longlong][::1],
        has_expires: cython.const[cython.uchar][::1],
        seq: int,
        created_ms: int,
        room: int,
    ) -> int:
        """Append the rows from number `start` on of `total` in columns; returns where it stopped, as `write` does.

        Keys and values are Arrow-style: `offsets[i]` to `offsets[i + 1]` of one run of bytes. All rows have the same
        sequence number and time of creation. Empty `kinds` mean values only, empty `expires` rows without end, an empty
        `has_expires` one in every row. Raises `InvalidRequest` for what is no row, and when keys do not ascend.
        """
        nothing: bytes = b"\0"
        key_data: cython.p_const_uchar = nothing
        value_data: cython.p_const_uchar = nothing
        tail: bytearray = bytearray(25)
        at: cython.Py_ssize_t = start
        allowed: cython.Py_ssize_t = room if room < self.soft_limit else self.soft_limit
        if min(len(key_offsets), len(value_offsets)) <= total:
            raise InvalidRequest(f"a column has fewer than {total} rows")
        for size in (len(kinds), len(expires), len(has_expires)):
            if 0 < size < total:
                raise InvalidRequest(f"a column has {size} rows instead of {total}")
        self._drop_taken()
        if cython.compiled:
            if len(keys):
                key_data = cython.address(keys[0])
            if len(values):
                value_data = cython.address(values[0])
        else:
            key_data = keys
            value_data = values
        at = self._write_columns(
            at,
            total,
            key_offsets,
            key_data,
            len(keys),
            value_offsets,
            value_data,
            len(values),
            kinds,
            expires,
            has_expires,
            seq,
            created_ms,
            tail,
            allowed,
        )
        if self.error == _BAD_ROW:
            key_size = key_offsets[at + 1] - key_offsets[at]
            value_size = value_offsets[at + 1] - value_offsets[at]
            raise InvalidRequest(
                f"row {self.rows} of the table has a key of {key_size} bytes, a value of {value_size}, and kind "
                f"{kinds[at] if len(kinds) else 0}; a key has 1 to {MAX_KEY_BYTES} bytes, and a deletion no value"
            )
        if self.error == _BAD_ORDER:
            raise InvalidRequest(f"row {self.rows} of the table: its key is not above the one before")
        if self.error:
            self._raise()
        return at

    def add_row(self, row: tuple) -> None:
        """Append one entry tuple."""
        tail: bytearray = bytearray(25)
        out: cython.p_uchar = tail
        key: bytes = row[0]
        value: bytes = row[3]
        flags: cython.int = row[2]
        time: cython.longlong
        size: cython.Py_ssize_t = 9
        self._drop_taken()
        put_u64(out, 0, row[1])
        if row[5] is not None:
            flags |= EXPIRE_FLAG
            time = row[5]
            put_u64(out, size, cython.cast(cython.ulonglong, time))
            size += 8
        if row[4] is not None:
            flags |= CREATE_FLAG
            time = row[4]
            put_u64(out, size, cython.cast(cython.ulonglong, time))
            size += 8
        out[8] = flags
        self._add(key, 0, len(key), value, 0, len(value), out, 0, size)
        if self.error:
            self._raise()

    def finished(self) -> int:
        """How many bytes of blocks are finished since the last `take`."""
        return self.block_start - self.taken

    def take(self, base: int) -> tuple:
        """What is finished since the last call: `(data, bounds, offsets, separators, counts, hashes, keys)`.

        `data` may be written to, and is valid until the next call of any method. `bounds` is an array of begin and
        end of each block in it, `offsets` has the begins plus `base`, `counts` puts, deletes and merges per block,
        `hashes` one 64-bit number and `keys` (if wanted) one key per row.
        """
        index: cython.Py_ssize_t
        at: cython.Py_ssize_t = 0
        size: cython.Py_ssize_t
        start: cython.longlong = base
        bounds = array("q", bytes(16 * self.done))
        pairs: cython.longlong[::1] = bounds
        offsets: list = []
        separators: list = []
        counts: list = []
        keys: list = []
        self._drop_taken()
        for index in range(self.done):
            pairs[2 * index] = self.records[RECORD * index]
            pairs[2 * index + 1] = self.records[RECORD * index + 1]
            offsets.append(start + self.records[RECORD * index])
            size = self.records[RECORD * index + 2]
            separators.append(bytes(self.separators[at : at + size]))
            at += size
            counts.append(
                (
                    self.records[RECORD * index + 3],
                    self.records[RECORD * index + 4],
                    self.records[RECORD * index + 5],
                )
            )
        at = 0
        while at < self.column_used:
            size = (self.column[at] << 8) | self.column[at + 1]
            keys.append(bytes(self.column[at + 2 : at + 2 + size]))
            at += 2 + size
        if cython.compiled:
            hashes = bytes(cython.cast(cython.p_uchar, self.hashes)[: 8 * self.hashed])
            data = PyMemoryView_FromMemory(
                cython.cast(cython.p_char, self.out), self.block_start, PyBUF_WRITE
            )
        else:
            hashes = array("Q", self.hashes[: self.hashed]).tobytes()
            data = self.out[: self.block_start]
        self.taken = self.block_start
        self.done = self.separators_used = self.hashed = self.column_used = 0
        return data, bounds, offsets, separators, counts, hashes, keys

    @cython.cfunc
    @cython.exceptval(check=False)
    def _drop_taken(self) -> cython.void:
        """Make room of what was handed out: only now is nobody using it any more."""
        if self.taken == 0:
            return
        if cython.compiled:
            memmove(self.out, self.out + self.taken, self.used - self.taken)
        else:
            self.out[: self.used - self.taken] = self.out[self.taken : self.used]
        self.used -= self.taken
        self.block_start -= self.taken
        self.taken = 0

    def finish_table(self) -> tuple:
        """Close the open block and begin another table: `(rows, key_bytes, value_bytes, first_key, last_key)`.

        `take` afterwards. The keys are empty when there is no row.
        """
        self._drop_taken()
        if self.count and self._close():
            self._raise()
        totals = (
            self.rows,
            self.key_bytes,
            self.value_bytes,
            bytes(self.keys[2 * STRIDE : 2 * STRIDE + self.lead_size]) if self.rows else b"",
            bytes(self.keys[: self.previous_size]) if self.rows else b"",
        )
        self.rows = self.blocks = self.key_bytes = self.value_bytes = 0
        return totals

    @cython.cfunc
    @cython.exceptval(-1)
    def _raise(self) -> cython.int:
        if self.error == _NO_MEMORY:
            raise MemoryError
        raise CorruptData("rows do not ascend by key, then descend by sequence number")

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _write(
        self,
        data: cython.p_const_uchar,
        at: cython.Py_ssize_t,
        stop: cython.Py_ssize_t,
        room: cython.Py_ssize_t,
    ) -> cython.Py_ssize_t:
        key_size: cython.Py_ssize_t
        value_size: cython.Py_ssize_t
        tail_at: cython.Py_ssize_t
        tail_size: cython.Py_ssize_t
        while at < stop:
            key_size = data[at] | (data[at + 1] << 8)
            value_size = get_little(data, at + 2, 4)
            tail_at = at + 6 + key_size + value_size
            tail_size = 9
            if data[tail_at + 8] & EXPIRE_FLAG:
                tail_size += 8
            if data[tail_at + 8] & CREATE_FLAG:
                tail_size += 8
            if self._add(
                data, at + 6, key_size, data, at + 6 + key_size, value_size, data, tail_at, tail_size
            ):
                break
            at = tail_at + tail_size
            if self.block_start > room:
                break
        return at

    @cython.cfunc
    @cython.exceptval(check=False)
    def _write_columns(
        self,
        at: cython.Py_ssize_t,
        stop: cython.Py_ssize_t,
        key_offsets: cython.const[cython.int][::1],
        keys: cython.p_const_uchar,
        key_limit: cython.Py_ssize_t,
        value_offsets: cython.const[cython.int][::1],
        values: cython.p_const_uchar,
        value_limit: cython.Py_ssize_t,
        kinds: cython.const[cython.uchar][::1],
        expires: cython.const[cython.longlong][::1],
        has_expires: cython.const[cython.uchar][::1],
        seq: cython.ulonglong,
        created_ms: cython.longlong,
        tail: cython.p_uchar,
        room: cython.Py_ssize_t,
    ) -> cython.Py_ssize_t:
        key_at: cython.Py_ssize_t
        key_size: cython.Py_ssize_t
        value_at: cython.Py_ssize_t
        value_size: cython.Py_ssize_t
        kind: cython.int = 0
        with_kinds: cython.bint = len(kinds) > 0
        ending: cython.bint = len(expires) > 0
        some_end: cython.bint = len(has_expires) > 0
        with cython.nogil:
            put_u64(tail, 0, seq)
            while at < stop:
                key_at = key_offsets[at]
                key_size = key_offsets[at + 1] - key_at
                value_at = value_offsets[at]
                value_size = value_offsets[at + 1] - value_at
                if with_kinds:
                    kind = kinds[at]
                if (
                    key_at < 0
                    or key_size < 1
                    or key_size > MAX_KEY_BYTES
                    or key_at + key_size > key_limit
                    or value_at < 0
                    or value_size < 0
                    or value_at + value_size > value_limit
                    or kind & 0xF6
                    or kind == 0x09
                    or (kind == TOMBSTONE_KIND and value_size)
                ):
                    self.error = _BAD_ROW
                    break
                if ending and (not some_end or has_expires[at]):
                    tail[8] = kind | EXPIRE_FLAG | CREATE_FLAG
                    put_u64(tail, 9, cython.cast(cython.ulonglong, expires[at]))
                    put_u64(tail, 17, cython.cast(cython.ulonglong, created_ms))
                    if self._add(keys, key_at, key_size, values, value_at, value_size, tail, 0, 25):
                        break
                else:
                    tail[8] = kind | CREATE_FLAG
                    put_u64(tail, 9, cython.cast(cython.ulonglong, created_ms))
                    if self._add(keys, key_at, key_size, values, value_at, value_size, tail, 0, 17):
                        break
                at += 1
                if self.block_start > room:
                    break
        return at

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _written_before(
        self,
        key: cython.p_const_uchar,
        key_at: cython.Py_ssize_t,
        key_size: cython.Py_ssize_t,
        seq: cython.ulonglong,
    ) -> cython.bint:
        """Whether an interrupted run has written this row."""
        order: cython.int = compare(key, key_at, key_size, self.resume_at, 0, self.resume_size)
        if order > 0:
            self.resuming = False
        return order < 0 or (order == 0 and seq >= self.resume_seq)

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _add(
        self,
        key: cython.p_const_uchar,
        key_at: cython.Py_ssize_t,
        key_size: cython.Py_ssize_t,
        value: cython.p_const_uchar,
        value_at: cython.Py_ssize_t,
        value_size: cython.Py_ssize_t,
        tail: cython.p_const_uchar,
        tail_at: cython.Py_ssize_t,
        tail_size: cython.Py_ssize_t,
    ) -> cython.int:
        """Append one row, closing the block before it when it does not fit: 0, or the error."""
        common: cython.Py_ssize_t
        shared: cython.Py_ssize_t
        size: cython.Py_ssize_t = self.previous_size if self.previous_size < key_size else key_size
        at: cython.Py_ssize_t
        out: cython.p_uchar
        seq: cython.ulonglong = get_u64(tail, tail_at)
        kind: cython.int = tail[tail_at + 8] & 0x09
        if self.resuming and self._written_before(key, key_at, key_size, seq):
            return 0
        common = common_prefix(self.keys, 0, key, key_at, size)
        # No key is empty, so before the first row there is none to compare with.
        if self.previous_size and (
            (key_size < self.previous_size or (key_size == self.previous_size and seq >= self.previous_seq))
            if common == size
            else key[key_at + common] < self.keys[common]
        ):
            self.error = _BAD_ORDER
            return self.error
        while True:
            shared = common if self.count & 15 else 0
            size = varint_size(shared) + varint_size(key_size - shared) + varint_size(value_size)
            size += key_size - shared + value_size + tail_size
            at = self.used - self.block_start + 2 * self.restart_count + 2 + size
            if self.count & 15 == 0:
                at += 2
            if self.count == 0 or at <= self.limit:
                break
            if self._close():
                return self.error
        if self._reserve(size, key_size):
            return self.error
        if self.count == 0:
            copy(self.keys, STRIDE, key, key_at, key_size)
            self.first_size = key_size
            self.separator_size = common + 1 if common < key_size else key_size
        at = self.used
        if self.count & 15 == 0:
            self.restarts[self.restart_count] = at - self.block_start
            self.restart_count += 1
        # By its own name: a byte written through it might be one of ours, as far as the C compiler knows.
        out = self.out
        at = put_varint(out, at, shared)
        at = put_varint(out, at, key_size - shared)
        at = put_varint(out, at, value_size)
        copy(out, at, key, key_at + shared, key_size - shared)
        at += key_size - shared
        if value is tail and tail_at == value_at + value_size:
            copy(out, at, value, value_at, value_size + tail_size)
        else:
            copy(out, at, value, value_at, value_size)
            copy(out, at + value_size, tail, tail_at, tail_size)
        self.used = at + value_size + tail_size
        self.hashes[self.hashed] = siphash(key, key_at, key_size)
        self.hashed += 1
        if self.want_keys:
            self.column[self.column_used] = key_size >> 8
            self.column[self.column_used + 1] = key_size & 0xFF
            copy(self.column, self.column_used + 2, key, key_at, key_size)
            self.column_used += 2 + key_size
        copy(self.keys, common, key, key_at + common, key_size - common)
        self.previous_size = key_size
        self.previous_seq = seq
        self.count += 1
        if kind == 0:
            self.puts += 1
        elif kind == TOMBSTONE_KIND:
            self.deletes += 1
        else:
            self.merges += 1
        self.rows += 1
        self.key_bytes += key_size
        self.value_bytes += value_size
        return 0

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _close(self) -> cython.int:
        """End the block: its entries, then the restart points and their number. 0, or the error."""
        at: cython.Py_ssize_t = self.used
        index: cython.Py_ssize_t
        record: cython.Py_ssize_t = RECORD * self.done
        for index in range(self.restart_count):
            self.out[at] = (self.restarts[index] >> 8) & 0xFF
            self.out[at + 1] = self.restarts[index] & 0xFF
            at += 2
        self.out[at] = (self.restart_count >> 8) & 0xFF
        self.out[at + 1] = self.restart_count & 0xFF
        at += 2
        if self.blocks == 0:
            # The first block needs no separator, and begins with the first key of the table.
            self.separator_size = 0
            self.lead_size = self.first_size
            copy(self.keys, 2 * STRIDE, self.keys, STRIDE, self.first_size)
        if self._reserve_record():
            return self.error
        copy(self.separators, self.separators_used, self.keys, STRIDE, self.separator_size)
        self.separators_used += self.separator_size
        self.records[record] = self.block_start
        self.records[record + 1] = at
        self.records[record + 2] = self.separator_size
        self.records[record + 3] = self.puts
        self.records[record + 4] = self.deletes
        self.records[record + 5] = self.merges
        self.done += 1
        self.blocks += 1
        self.used = self.block_start = at + self.gap
        self.restart_count = self.count = 0
        self.puts = self.deletes = self.merges = 0
        return 0

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _reserve(self, size: cython.Py_ssize_t, key_size: cython.Py_ssize_t) -> cython.int:
        """Room for one more row of `size` bytes and the end of its block: 0, or the error."""
        if self.used + size + 2 * MAX_RESTARTS + 64 > self.room:
            self._grow_out(size)
        if self.hashed == self.hash_room:
            self._grow_hashes()
        if self.want_keys and self.column_used + key_size + 2 > self.column_room:
            self._grow_column()
        return self.error

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _reserve_record(self) -> cython.int:
        """Room for one more block's separator and counts: 0, or the error."""
        larger: cython.p_longlong
        text: cython.p_uchar
        if self.done == self.record_room:
            if cython.compiled:
                larger = cython.cast(
                    cython.p_longlong, realloc(self.records, 2 * self.record_room * RECORD * 8)
                )
                if larger == cython.NULL:
                    self.error = _NO_MEMORY
                    return self.error
                self.records = larger
            else:
                self.records.extend([0] * (RECORD * self.record_room))
            self.record_room *= 2
        # One doubling is always enough: twice the room of at least 128 KiB has place for a key.
        if self.separators_used + self.separator_size > self.separators_room:
            if cython.compiled:
                text = cython.cast(cython.p_uchar, realloc(self.separators, 2 * self.separators_room))
                if text == cython.NULL:
                    self.error = _NO_MEMORY
                    return self.error
                self.separators = text
            else:
                self.separators.extend(bytes(self.separators_room))
            self.separators_room *= 2
        return 0

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _grow_out(self, size: cython.Py_ssize_t) -> cython.void:
        room: cython.Py_ssize_t = 2 * (self.used + size + 2 * MAX_RESTARTS + 64)
        grown: cython.p_uchar
        if cython.compiled:
            grown = cython.cast(cython.p_uchar, realloc(self.out, room))
            if grown == cython.NULL:
                self.error = _NO_MEMORY
                return
            self.out = grown
        else:
            self.out.extend(bytes(room - self.room))
        self.room = room

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _grow_hashes(self) -> cython.void:
        grown: cython.p_ulonglong
        if cython.compiled:
            grown = cython.cast(cython.p_ulonglong, realloc(self.hashes, 2 * self.hash_room * 8))
            if grown == cython.NULL:
                self.error = _NO_MEMORY
                return
            self.hashes = grown
        else:
            self.hashes.extend([0] * self.hash_room)
        self.hash_room *= 2

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _grow_column(self) -> cython.void:
        grown: cython.p_uchar
        if cython.compiled:
            grown = cython.cast(cython.p_uchar, realloc(self.column, 2 * self.column_room))
            if grown == cython.NULL:
                self.error = _NO_MEMORY
                return
            self.column = grown
        else:
            self.column.extend(bytes(self.column_room))
        self.column_room *= 2
