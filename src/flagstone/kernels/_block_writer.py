"""Cuts rows into the blocks of SSTs: from tuples, from the stream of a merge or a memtable, or from columns.

Beside the blocks the writer keeps what an SST needs of them: an index key and row counts per block, and the hash of
every key. A block is closed when the next entry would push it past its size; an entry larger than a block gets a block
of its own. `_rows` has the layout of blocks and streams.

Streams and columns are written without the interpreter's lock. Therefore everything that grows is plain C memory;
interpreted, it is byte arrays and lists.
"""

from __future__ import annotations

from array import array
from typing import Any

import cython
from cython.cimports.cpython.buffer import PyBUF_WRITE
from cython.cimports.cpython.memoryview import PyMemoryView_FromMemory
from cython.cimports.flagstone.kernels._block_notes import (
    Notes,
    free_notes,
    have_memory,
    new_notes,
    note_block,
    note_key,
    noted_blocks,
    take_notes,
)
from cython.cimports.flagstone.kernels._bytes import (
    MASK32,
    MAX_KEY_BYTES,
    common_prefix,
    compare,
    copy,
    get_little,
    get_u64,
    piece,
    put_u16,
    put_u64,
    put_varint,
    varint_size,
)
from cython.cimports.flagstone.kernels._memory import (
    Buffer,
    Numbers,
    free_buffer,
    free_numbers,
    grow_buffer,
    new_buffer,
    new_numbers,
)
from cython.cimports.flagstone.kernels._rows import (
    CREATE_FLAG,
    EXPIRE_FLAG,
    KIND_MASK,
    TOMBSTONE_KIND,
    known_flags,
    times_size,
)
from cython.cimports.libc.string import memmove

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.kernels.invalid_rows import invalid_column_row, invalid_row

# Room for one key. Three are kept: the last one written, the first of the block, the first of the SST.
KEY_ROOM = cython.declare(cython.Py_ssize_t, 65_536 + 192)
# A block of 64 KiB has room for fewer; a larger one has a single row.
MAX_RESTARTS = cython.declare(cython.Py_ssize_t, 512)
# Room behind the last entry for the restart points of its block and for lengths.
SLACK = cython.declare(cython.Py_ssize_t, 2 * 512 + 64)

_BAD_KEY = cython.declare(cython.int, 1)
_BAD_SEQ = cython.declare(cython.int, 2)
_BAD_ROW = cython.declare(cython.int, 3)
_NO_MEMORY = cython.declare(cython.int, 4)


@cython.cclass
class BlockWriter:
    """Takes rows in order and cuts them into blocks, and blocks into SSTs where the caller calls `finish_sst`.

    With `ordered` rows must be sorted by key, then by descending sequence number, and the index key of a block
    separates it from the block before. Without it rows come in commit order, as in a WAL file, and the index key of a
    block is its first sequence number.

    Behind each block `gap` bytes are left free, for a checksum. Rows up to `resume_seq` of `resume_key`, with which an
    interrupted run ended, are not written again. `want_hashes` and `want_keys` keep the hashes of keys and the keys.
    """

    limit: cython.Py_ssize_t
    soft_limit: cython.Py_ssize_t
    gap: cython.Py_ssize_t
    ordered: cython.bint
    resuming: cython.bint
    resume_key: bytes
    resume_at: cython.p_const_uchar
    resume_size: cython.Py_ssize_t
    resume_seq: cython.ulonglong
    # The block being filled, behind the finished ones.
    out: Buffer
    taken: cython.Py_ssize_t
    block_start: cython.Py_ssize_t
    restarts: Numbers
    count: cython.Py_ssize_t
    puts: cython.longlong
    deletes: cython.longlong
    merges: cython.longlong
    keys: Buffer
    previous_size: cython.Py_ssize_t
    previous_seq: cython.ulonglong
    first_size: cython.Py_ssize_t
    index_size: cython.Py_ssize_t
    lead_size: cython.Py_ssize_t
    # The SST it belongs to.
    blocks: cython.longlong
    rows: cython.longlong
    key_bytes: cython.longlong
    value_bytes: cython.longlong
    # What `take` hands out.
    notes: Notes
    # Room for the tail of a row that comes as a tuple or in columns.
    tail: bytearray
    error: cython.int

    def __init__(
        self,
        block_bytes: int,
        gap: int = 0,
        *,
        ordered: bool = True,
        want_hashes: bool = True,
        want_keys: bool = False,
        resume_key: bytes = b"",
        resume_seq: int = 0,
        soft_limit: int = 1 << 18,
    ) -> None:
        self.limit = block_bytes
        self.soft_limit = soft_limit
        self.gap = gap
        self.ordered = ordered
        # No key is empty.
        self.resuming = resume_key != b""
        self.resume_key = resume_key
        self.resume_at = self.resume_key
        self.resume_size = len(resume_key)
        self.resume_seq = resume_seq
        self.taken = self.block_start = self.count = self.error = 0
        self.puts = self.deletes = self.merges = 0
        self.previous_size = self.previous_seq = self.first_size = self.index_size = self.lead_size = 0
        self.blocks = self.rows = self.key_bytes = self.value_bytes = 0
        self.out = new_buffer(block_bytes + SLACK)
        self.restarts = new_numbers(MAX_RESTARTS)
        self.keys = new_buffer(3 * KEY_ROOM)
        self.tail = bytearray(25)
        self.notes = new_notes(want_hashes, want_keys)
        if not (
            self.out.data
            and self.restarts.data
            and self.keys.data
            and have_memory(cython.address(self.notes))
        ):
            raise MemoryError

    def __dealloc__(self) -> None:
        if cython.compiled:
            free_buffer(cython.address(self.out))
            free_numbers(cython.address(self.restarts))
            free_buffer(cython.address(self.keys))
            free_notes(cython.address(self.notes))

    def add_rows(self, rows: list) -> None:
        """Append entry tuples. Raises `InvalidRequest` for one that is no row or out of order."""
        row: tuple
        self._drop_taken()
        for row in rows:
            self._add_tuple(row)
            if self.error == _BAD_KEY:
                raise InvalidRequest(f"row {self.rows}: its key is below the one before; rows must be sorted")
            if self.error == _BAD_SEQ:
                raise InvalidRequest(f"row {self.rows}: versions of a key must be in descending order of seq")
            if self.error:
                self._raise()

    def add_row(self, row: tuple) -> None:
        """Append one entry tuple that comes from a merge. Raises `CorruptData` when rows do not ascend, as `write`."""
        self._drop_taken()
        self._add_tuple(row)
        if self.error:
            self._raise()

    def write(self, stream: cython.const[cython.uchar][::1], start: int, room: int) -> int:
        """Append the rows of a stream from byte `start` on; returns where it stopped.

        That is the end, or the row after which more than `room` bytes of blocks, or simply enough, were finished since
        the last `take`. Raises `CorruptData` when rows do not ascend.
        """
        data: cython.p_const_uchar
        at: cython.Py_ssize_t = start
        size: cython.Py_ssize_t = len(stream)
        allowed: cython.Py_ssize_t = room if room < self.soft_limit else self.soft_limit
        key_size: cython.Py_ssize_t
        value_size: cython.Py_ssize_t
        tail_at: cython.Py_ssize_t
        tail_size: cython.Py_ssize_t
        self._drop_taken()
        if at >= size:
            return at
        if cython.compiled:
            data = cython.address(stream[0])
        else:
            data = stream
        with cython.nogil:
            while at < size and self.block_start <= allowed:
                key_size = get_little(data, at, 2)
                value_size = get_little(data, at + 2, 4)
                at += 6
                tail_at = at + key_size + value_size
                tail_size = 9 + times_size(data[tail_at + 8])
                if self._add(data, at, key_size, data, at + key_size, value_size, data, tail_at, tail_size):
                    break
                at = tail_at + tail_size
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
        key_limit: cython.Py_ssize_t = len(keys)
        value_limit: cython.Py_ssize_t = len(values)
        tail: cython.p_uchar = self.tail
        at: cython.Py_ssize_t = start
        stop: cython.Py_ssize_t = total
        allowed: cython.Py_ssize_t = room if room < self.soft_limit else self.soft_limit
        number: cython.ulonglong = seq
        created: cython.longlong = created_ms
        key_at: cython.Py_ssize_t
        key_size: cython.Py_ssize_t
        value_at: cython.Py_ssize_t
        value_size: cython.Py_ssize_t
        tail_size: cython.Py_ssize_t
        flags: cython.int
        kind: cython.int = 0
        with_kinds: cython.bint = len(kinds) > 0
        ending: cython.bint = len(expires) > 0
        some_end: cython.bint = len(has_expires) > 0
        if min(len(key_offsets), len(value_offsets)) <= total:
            raise InvalidRequest(f"a column has fewer than {total} rows")
        for size in (len(kinds), len(expires), len(has_expires)):
            if 0 < size < total:
                raise InvalidRequest(f"a column has {size} rows instead of {total}")
        self._drop_taken()
        if cython.compiled:
            if key_limit:
                key_data = cython.address(keys[0])
            if value_limit:
                value_data = cython.address(values[0])
        else:
            key_data = keys
            value_data = values
        with cython.nogil:
            put_u64(tail, 0, number)
            while at < stop and self.block_start <= allowed:
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
                    or kind == KIND_MASK
                    or (kind == TOMBSTONE_KIND and value_size)
                ):
                    self.error = _BAD_ROW
                    break
                flags = kind | CREATE_FLAG
                tail_size = 17
                if ending and (not some_end or has_expires[at]):
                    flags |= EXPIRE_FLAG
                    tail_size = 25
                    put_u64(tail, 9, cython.cast(cython.ulonglong, expires[at]))
                tail[8] = flags
                put_u64(tail, tail_size - 8, cython.cast(cython.ulonglong, created))
                if self._add(
                    key_data, key_at, key_size, value_data, value_at, value_size, tail, 0, tail_size
                ):
                    break
                at += 1
        if self.error == _BAD_ROW:
            key_size = key_offsets[at + 1] - key_offsets[at]
            value_size = value_offsets[at + 1] - value_offsets[at]
            raise invalid_column_row(self.rows, key_size, value_size, kinds[at] if with_kinds else 0)
        if self.error == _BAD_KEY or self.error == _BAD_SEQ:
            raise InvalidRequest(f"row {self.rows} of the SST: its key is not above the one before")
        if self.error:
            self._raise()
        return at

    def row_count(self) -> int:
        """How many rows the SST has so far."""
        return self.rows

    def finished(self) -> int:
        """How many bytes of blocks are finished since the last `take`."""
        return self.block_start - self.taken

    def take(self, base: int) -> tuple:
        """What is finished since the last call: `(data, bounds, offsets, index_keys, counts, hashes, keys)`.

        `data` may be written to, and is valid until the next call of any method. `bounds` is an array of begin and
        end of each block in it, `offsets` has the begins plus `base`, `counts` three numbers per block (puts, deletes
        and merges), `hashes` and `keys`, where wanted, one 64-bit number and one key per row.
        """
        bounds = array("q", bytes(16 * noted_blocks(cython.address(self.notes))))
        self._drop_taken()
        notes: tuple = take_notes(cython.address(self.notes), base, bounds)
        if cython.compiled:
            data = PyMemoryView_FromMemory(
                cython.cast(cython.p_char, self.out.data), self.block_start, PyBUF_WRITE
            )
        else:
            data = self.out.data[: self.block_start]
        self.taken = self.block_start
        return data, bounds, *notes

    @cython.cfunc
    @cython.exceptval(check=False)
    def _drop_taken(self) -> cython.void:
        """Reuse the memory of what `take` handed out, which is valid until the next call."""
        rest: cython.Py_ssize_t = self.out.used - self.taken
        if self.taken == 0:
            return
        if cython.compiled:
            memmove(self.out.data, self.out.data + self.taken, rest)
        else:
            self.out.data[:rest] = self.out.data[self.taken : self.out.used]
        self.out.used = rest
        self.block_start -= self.taken
        self.taken = 0

    def open_block(self) -> tuple:
        """How many bytes the open block would have if it were closed now, and how many rows."""
        return self.out.used - self.block_start + 2 * self.restarts.used + 2 if self.count else 0, self.count

    def last_key(self) -> bytes:
        """The key of the last row, also if that is in an SST before; empty before the first row."""
        return piece(self.keys.data, 0, self.previous_size)

    def close_block(self) -> None:
        """Close the open block, if there is one."""
        self._drop_taken()
        if self.count and self._close():
            self._raise()

    def count_blocks(
        self,
        blocks: int,
        rows: int,
        key_bytes: int,
        value_bytes: int,
        first_key: bytes,
        last_key: bytes,
        seq: int,
    ) -> None:
        """Go on behind finished blocks that the caller has. Their last row has `last_key` and `seq`; none is open."""
        key: cython.p_const_uchar = first_key
        if self.blocks == 0:
            self.lead_size = len(first_key)
            copy(self.keys.data, 2 * KEY_ROOM, key, 0, self.lead_size)
        self.blocks += blocks
        self.rows += rows
        self.key_bytes += key_bytes
        self.value_bytes += value_bytes
        key = last_key
        self.previous_size = len(last_key)
        self.previous_seq = seq
        copy(self.keys.data, 0, key, 0, self.previous_size)

    def finish_sst(self) -> tuple:
        """Close the open block and begin another SST: `(rows, key_bytes, value_bytes, first_entry, last_key)`.

        `take` afterwards. The first entry is the first key, or without `ordered` the first sequence number. Both are
        empty when there is no row.
        """
        self.close_block()
        totals = (
            self.rows,
            self.key_bytes,
            self.value_bytes,
            piece(self.keys.data, 2 * KEY_ROOM, 2 * KEY_ROOM + self.lead_size) if self.rows else b"",
            piece(self.keys.data, 0, self.previous_size) if self.rows else b"",
        )
        self.rows = self.blocks = self.key_bytes = self.value_bytes = 0
        return totals

    def finish_blocks(self) -> list[Any]:
        """Close the open block and return all blocks since the last `take`, without gaps."""
        self.finish_sst()
        data, bounds = self.take(0)[:2]
        return [bytes(data[bounds[at] : bounds[at + 1]]) for at in range(0, len(bounds), 2)]

    @cython.cfunc
    @cython.exceptval(-1)
    def _raise(self) -> cython.int:
        if self.error == _NO_MEMORY:
            raise MemoryError
        raise CorruptData("rows do not ascend by key, then descend by sequence number")

    @cython.cfunc
    @cython.exceptval(-1)
    def _add_tuple(self, row: tuple) -> cython.int:
        out: cython.p_uchar = self.tail
        key: bytes = row[0]
        value: bytes = row[3]
        flags: cython.int = row[2]
        time: cython.longlong
        size: cython.Py_ssize_t = 9
        if (
            len(key) < 1
            or len(key) > MAX_KEY_BYTES
            or cython.cast(cython.ulonglong, len(value)) > MASK32
            or not known_flags(flags)
            or (flags & TOMBSTONE_KIND and len(value))
        ):
            raise invalid_row(self.rows, len(key), len(value), flags)
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
        return self._add(key, 0, len(key), value, 0, len(value), out, 0, size)

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
        kind: cython.int = tail[tail_at + 8] & KIND_MASK
        if self.resuming and self._written_before(key, key_at, key_size, seq):
            return 0
        common = common_prefix(self.keys.data, 0, key, key_at, size)
        # No key is empty, so before the first row there is none to compare with.
        if self.ordered and self.previous_size:
            if common < size:
                if key[key_at + common] < self.keys.data[common]:
                    self.error = _BAD_KEY
            elif key_size < self.previous_size:
                self.error = _BAD_KEY
            elif key_size == self.previous_size and seq >= self.previous_seq:
                self.error = _BAD_SEQ
            if self.error:
                return self.error
        while True:
            shared = common if self.count & 15 else 0
            size = varint_size(shared) + varint_size(key_size - shared) + varint_size(value_size)
            size += key_size - shared + value_size + tail_size
            at = self.out.used - self.block_start + 2 * self.restarts.used + 2 + size
            if self.count & 15 == 0:
                at += 2
            if self.count == 0 or at <= self.limit:
                break
            if self._close():
                return self.error
        if (
            self.out.used + size + SLACK > self.out.room
            and not grow_buffer(cython.address(self.out), 2 * (self.out.used + size + SLACK))
        ) or not note_key(cython.address(self.notes), key, key_at, key_size):
            self.error = _NO_MEMORY
            return self.error
        if self.count == 0:
            self._begin_block(key, key_at, key_size, common, seq)
        at = self.out.used
        if self.count & 15 == 0:
            self.restarts.data[self.restarts.used] = at - self.block_start
            self.restarts.used += 1
        # A local name: as far as the C compiler knows, a byte written through `data` might change `self`.
        out = self.out.data
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
        self.out.used = at + value_size + tail_size
        copy(self.keys.data, common, key, key_at + common, key_size - common)
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
    def _begin_block(
        self,
        key: cython.p_const_uchar,
        key_at: cython.Py_ssize_t,
        key_size: cython.Py_ssize_t,
        common: cython.Py_ssize_t,
        seq: cython.ulonglong,
    ) -> cython.void:
        """Keep the first entry of a block; its first `index_size` bytes are the index key."""
        if self.ordered:
            copy(self.keys.data, KEY_ROOM, key, key_at, key_size)
            self.first_size = key_size
            # The shortest prefix above the key before. The first block needs none.
            self.index_size = common + 1 if common < key_size else key_size
            if self.blocks == 0:
                self.index_size = 0
        else:
            put_u64(self.keys.data, KEY_ROOM, seq)
            self.first_size = self.index_size = 8
        if self.blocks == 0:
            self.lead_size = self.first_size
            copy(self.keys.data, 2 * KEY_ROOM, self.keys.data, KEY_ROOM, self.first_size)

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _close(self) -> cython.int:
        """End the block: its entries, then the restart points and their number. 0, or the error."""
        at: cython.Py_ssize_t = self.out.used
        index: cython.Py_ssize_t
        for index in range(self.restarts.used):
            put_u16(self.out.data, at, self.restarts.data[index])
            at += 2
        put_u16(self.out.data, at, self.restarts.used)
        at += 2
        if not note_block(
            cython.address(self.notes), self.block_start, at, self.keys.data, KEY_ROOM, self.index_size,
            self.puts, self.deletes, self.merges,
        ):  # fmt: skip
            self.error = _NO_MEMORY
            return self.error
        self.blocks += 1
        self.out.used = self.block_start = at + self.gap
        self.restarts.used = self.count = 0
        self.puts = self.deletes = self.merges = 0
        return 0
