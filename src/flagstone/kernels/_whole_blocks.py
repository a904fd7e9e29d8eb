"""Reads blocks that an output of compaction may take as they are, without merging their rows.

A block stays as it is if a merge would write the same rows and no block so small that repeated compactions would fill
an SST with them. The keys are read for what the SST needs of its blocks: index keys, row counts, and the hash of every
key. Values are not touched.

A block that cannot stay is no error: the merge takes its rows, and finds what is wrong with them.
"""

from __future__ import annotations

from array import array

import cython
from cython.cimports.flagstone.kernels._block_notes import (
    Notes,
    forget_keys,
    free_notes,
    have_memory,
    mark_keys,
    new_notes,
    note_block,
    note_key,
    noted_blocks,
    take_notes,
)
from cython.cimports.flagstone.kernels._bytes import (
    MAX_KEY_BYTES,
    common_prefix,
    compare,
    copy,
    get_u16,
    get_u64,
    piece,
)
from cython.cimports.flagstone.kernels._memory import Buffer, free_buffer, new_buffer
from cython.cimports.flagstone.kernels._rows import (
    EXPIRE_FLAG,
    MERGE_KIND,
    TOMBSTONE_KIND,
    Entry,
    entries_end,
    expires_at,
    new_entry,
    read_first,
    read_flags,
    read_lengths,
)

# Room for one key. Two are kept: the last one read, and the last one of the last block that stays.
KEY_ROOM = cython.declare(cython.Py_ssize_t, 65_536 + 192)

# What became of a block.
_STAYS = cython.declare(cython.int, 0)
_MUST_MERGE = cython.declare(cython.int, 1)
_NO_MEMORY = cython.declare(cython.int, 2)


def is_full(size: cython.Py_ssize_t, rows: cython.Py_ssize_t, limit: cython.Py_ssize_t) -> bool:
    """Whether a block of `size` bytes is as full as blocks usually are: seven eighths, or no room for one more row."""
    return _is_full(size, rows, limit)


@cython.cfunc
@cython.inline
@cython.nogil
@cython.exceptval(check=False)
def _is_full(size: cython.Py_ssize_t, rows: cython.Py_ssize_t, limit: cython.Py_ssize_t) -> cython.bint:
    return 8 * size >= 7 * limit or rows * (limit - size) < size


@cython.cclass
class WholeBlocks:
    """Chooses blocks for an output with blocks of `block_bytes`, and collects what its SST needs of them.

    `min_seq`, `clock_ms` and `keep_tombstones` are those of `lsm.retention.RetentionPolicy`. Call `read`, and `take`
    if blocks stay. Used by one thread at a time.
    """

    limit: cython.Py_ssize_t
    min_seq: cython.ulonglong
    clock_ms: cython.longlong
    keep_tombstones: cython.bint
    notes: Notes
    keys: Buffer
    read_size: cython.Py_ssize_t
    last_size: cython.Py_ssize_t
    last_seq: cython.ulonglong
    first_key: bytes
    rows: cython.longlong
    key_bytes: cython.longlong
    value_bytes: cython.longlong

    def __init__(
        self,
        block_bytes: int,
        *,
        min_seq: int,
        clock_ms: int,
        keep_tombstones: bool,
        want_hashes: bool = True,
        want_keys: bool = False,
    ) -> None:
        self.limit = block_bytes
        self.min_seq = min_seq
        self.clock_ms = clock_ms
        self.keep_tombstones = keep_tombstones
        self.read_size = self.last_size = self.last_seq = self.rows = self.key_bytes = self.value_bytes = 0
        self.first_key = b""
        self.keys = new_buffer(2 * KEY_ROOM)
        self.notes = new_notes(want_hashes, want_keys)
        if not (self.keys.data and have_memory(cython.address(self.notes))):
            raise MemoryError

    def __dealloc__(self) -> None:
        if cython.compiled:
            free_buffer(cython.address(self.keys))
            free_notes(cython.address(self.notes))

    def read(
        self,
        chunk: cython.const[cython.uchar][::1],
        bounds: cython.const[cython.longlong][::1],
        first: int,
        stop: int,
        previous: bytes,
        opening: bool,
    ) -> int:
        """How many of the blocks `first` to `stop` - 1 stay as they are, from the first one on.

        `bounds` has begin and end of each block in the chunk, also of block `stop`. The output's last key is
        `previous`. If they are `opening` their SST, the first block gets the empty index key.
        """
        data: cython.p_const_uchar
        before: cython.p_const_uchar = previous
        begin: cython.Py_ssize_t = first
        end: cython.Py_ssize_t = stop
        number: cython.Py_ssize_t
        opens: cython.bint = opening
        status: cython.int = _STAYS
        entry: Entry = new_entry()
        if not 0 <= begin < end < len(bounds) // 2 or len(previous) > MAX_KEY_BYTES:
            raise ValueError("no such blocks, or no block behind them")
        for number in range(begin, end + 1):
            if not 0 <= bounds[2 * number] <= bounds[2 * number + 1] <= len(chunk):
                raise ValueError("a block lies outside its chunk")
        if len(chunk) == 0:
            return 0
        if cython.compiled:
            data = cython.address(chunk[0])
        else:
            data = chunk
        self.read_size = len(previous)
        copy(self.keys.data, 0, before, 0, self.read_size)
        number = begin
        with cython.nogil:
            while number < end:
                mark_keys(cython.address(self.notes))
                status = self._read_block(
                    data,
                    bounds[2 * number],
                    bounds[2 * number + 1],
                    bounds[2 * number + 2],
                    bounds[2 * number + 3],
                    opens,
                )
                if status != _STAYS:
                    forget_keys(cython.address(self.notes))
                    break
                opens = False
                number += 1
        if status == _NO_MEMORY:
            raise MemoryError
        if number > begin and read_first(
            data, bounds[2 * begin], bounds[2 * begin + 1], cython.address(entry)
        ):
            self.first_key = piece(data, entry.suffix_at, entry.value_at)
        return number - begin

    def take(self) -> tuple:
        """What the SST needs of the blocks that stay since the last call.

        `(index_keys, counts, hashes, keys, rows, key_bytes, value_bytes, first_key, last_key, last_seq)`. The first
        four are as those of `BlockWriter.take`.
        """
        bounds = array("q", bytes(16 * noted_blocks(cython.address(self.notes))))
        notes: tuple = take_notes(cython.address(self.notes), 0, bounds)
        totals = (
            self.rows,
            self.key_bytes,
            self.value_bytes,
            self.first_key,
            piece(self.keys.data, KEY_ROOM, KEY_ROOM + self.last_size),
            self.last_seq,
        )
        self.rows = self.key_bytes = self.value_bytes = 0
        return *notes[1:], *totals

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _read_block(
        self,
        data: cython.p_const_uchar,
        start: cython.Py_ssize_t,
        stop: cython.Py_ssize_t,
        next_start: cython.Py_ssize_t,
        next_stop: cython.Py_ssize_t,
        opens: cython.bint,
    ) -> cython.int:
        """Read the keys of one block, and note it if it stays. `next_start` is where the block behind it begins."""
        entry: Entry = new_entry()
        # A local name: as far as the C compiler knows, a byte written through it might change `self`.
        key: cython.p_uchar = self.keys.data
        key_size: cython.Py_ssize_t = self.read_size
        size: cython.Py_ssize_t
        common: cython.Py_ssize_t
        shorter: cython.Py_ssize_t
        index_at: cython.Py_ssize_t = 0
        index_size: cython.Py_ssize_t = 0
        at: cython.Py_ssize_t = start
        end: cython.Py_ssize_t = entries_end(data, start, stop)
        restarts: cython.Py_ssize_t
        rows: cython.Py_ssize_t = 0
        deletes: cython.Py_ssize_t = 0
        key_bytes: cython.longlong = 0
        value_bytes: cython.longlong = 0
        seq: cython.ulonglong
        newer: cython.ulonglong = 0
        if end < 0:
            return _MUST_MERGE
        restarts = get_u16(data, stop - 2)
        while at < end:
            if read_lengths(data, at, end, cython.address(entry)):
                return _MUST_MERGE
            size = entry.shared + entry.unshared
            if size == 0 or size > MAX_KEY_BYTES or read_flags(data, end, cython.address(entry)):
                return _MUST_MERGE
            shorter = size if size < key_size else key_size
            if rows & 15:
                common = entry.shared
                if common > shorter:
                    return _MUST_MERGE
            else:
                if (
                    entry.shared
                    or rows >> 4 >= restarts
                    or get_u16(data, end + (rows >> 3)) != at - start & 0xFFFF
                ):
                    return _MUST_MERGE
                common = common_prefix(key, 0, data, entry.suffix_at, shorter)
            seq = get_u64(data, entry.tail_at)
            if common < shorter:
                if data[entry.suffix_at + common - entry.shared] <= key[common]:
                    return _MUST_MERGE
            elif size < key_size or (
                size == key_size and (rows == 0 or seq >= newer or newer <= self.min_seq)
            ):
                # Out of order, or a version of the key before that no read needs.
                return _MUST_MERGE
            if entry.flags & MERGE_KIND:
                return _MUST_MERGE
            if entry.flags & TOMBSTONE_KIND:
                if entry.value_size or not self.keep_tombstones:
                    return _MUST_MERGE
                deletes += 1
            if entry.flags & EXPIRE_FLAG and expires_at(data, cython.address(entry)) <= self.clock_ms:
                return _MUST_MERGE
            copy(key, entry.shared, data, entry.suffix_at, entry.unshared)
            if rows == 0:
                # The shortest prefix above the key before. The first block of an SST needs none.
                index_at = entry.suffix_at
                index_size = common + 1 if common < size else size
                if opens:
                    index_size = 0
            if not note_key(cython.address(self.notes), key, 0, size):
                return _NO_MEMORY
            key_size = size
            newer = seq
            rows += 1
            key_bytes += size
            value_bytes += entry.value_size
            at = entry.stop
        size = stop - start
        if (
            restarts != (rows + 15) >> 4
            or not _is_full(size, rows, self.limit)
            or (size > self.limit and rows > 1)
            or not read_first(data, next_start, next_stop, cython.address(entry))
            or compare(key, 0, key_size, data, entry.suffix_at, entry.unshared) >= 0
        ):
            return _MUST_MERGE
        if not note_block(
            cython.address(self.notes), start, stop, data, index_at, index_size, rows - deletes, deletes, 0
        ):
            return _NO_MEMORY
        copy(key, KEY_ROOM, key, 0, key_size)
        self.read_size = self.last_size = key_size
        self.last_seq = newer
        self.rows += rows
        self.key_bytes += key_bytes
        self.value_bytes += value_bytes
        return _STAYS
