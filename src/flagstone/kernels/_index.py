"""The two parts of an SST that have an entry per data block: the index and the statistics.

The index has the offset of each block, and a key that separates it from the block before. Both are FlatBuffers,
written by hand because the generic writer costs twenty times as much per entry. The layout equals the official
writer's to the byte: buffers grow from the back, each entry adds its key, its table and (when no earlier table
had the same shape) its vtable.

    SsTableIndex { block_meta: [BlockMeta] }      BlockMeta { offset: u64 = 0, first_key: [u8] }
    SstStats { puts, deletes, merges, key_bytes, value_bytes: u64, [BlockStats] }
    BlockStats { puts, deletes, merges: u16 }
"""

from __future__ import annotations

from typing import Any

import cython
from cython.cimports.flagstone.kernels._bytes import copy, get_little, put_little

from flagstone.errors import CorruptData

# Constants of more than 31 bits are declared, or compiled code would compute with them as Python integers.
SIGN_BIT = cython.declare(cython.longlong, 0x80000000)


@cython.cclass
class _Backwards:
    """A buffer filled from its end; `used` counts the bytes written so far."""

    buffer: bytearray
    out: cython.p_uchar
    capacity: cython.Py_ssize_t
    used: cython.Py_ssize_t

    def __init__(self, capacity: int) -> None:
        self.buffer = bytearray(capacity)
        self.out = self.buffer
        self.capacity = capacity
        self.used = 0

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def pad(self, extra: cython.Py_ssize_t, alignment: cython.Py_ssize_t) -> cython.void:
        """Leave zero bytes so that after `extra` more bytes the size is aligned."""
        self.used += -(self.used + extra) & (alignment - 1)

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def put(self, value: cython.ulonglong, size: cython.int) -> cython.void:
        """A little-endian integer in front of everything written so far."""
        self.used += size
        put_little(self.out, self.capacity - self.used, value, size)


def encode_index(offsets: list[Any], first_keys: list[Any]) -> bytes:
    """The FlatBuffers bytes of an index with these entries."""
    total: cython.Py_ssize_t = len(offsets)
    key_bytes: cython.Py_ssize_t = 0
    size: cython.Py_ssize_t
    key: bytes
    for key in first_keys:
        key_bytes += len(key)
    buffer: _Backwards = _Backwards(key_bytes + total * 56 + 64)
    # (shape, used) of the vtables written so far; there are at most a handful.
    shapes: dict = {}
    tables: list = []
    start: cython.Py_ssize_t
    key_used: cython.Py_ssize_t
    table_used: cython.Py_ssize_t
    table_size: cython.Py_ssize_t
    offset: cython.ulonglong
    alignment: cython.Py_ssize_t = 4
    index: cython.Py_ssize_t
    for index in range(total):
        key = first_keys[index]
        offset = offsets[index]
        size = len(key)
        buffer.pad(size, 4)
        buffer.used += size
        copy(buffer.out, buffer.capacity - buffer.used, key, 0, size)
        buffer.put(size, 4)
        key_used = buffer.used
        start = buffer.used
        if offset:
            alignment = 8
            buffer.pad(8, 8)
            buffer.put(offset, 8)
        buffer.put(buffer.used + 4 - key_used, 4)
        buffer.put(0, 4)
        table_used = buffer.used
        table_size = table_used - start
        tables.append(table_used)
        shape = (table_size, offset != 0)
        if shape not in shapes:
            buffer.put(4, 2)
            buffer.put(8 if offset else 0, 2)
            buffer.put(table_size, 2)
            buffer.put(8, 2)
            shapes[shape] = buffer.used
        _set_i32(buffer, table_used, shapes[shape] - table_used)
    buffer.pad(4 * total, 4)
    for index in range(total):
        buffer.put(buffer.used + 4 - cython.cast(cython.Py_ssize_t, tables[total - 1 - index]), 4)
    buffer.put(total, 4)
    key_used = buffer.used
    buffer.put(buffer.used + 4 - key_used, 4)
    buffer.put(0, 4)
    table_used = buffer.used
    buffer.put(4, 2)
    buffer.put(8, 2)
    buffer.put(6, 2)
    _set_i32(buffer, table_used, buffer.used - table_used)
    buffer.pad(4, alignment)
    buffer.put(buffer.used + 4 - table_used, 4)
    return bytes(buffer.buffer[buffer.capacity - buffer.used :])


def encode_stats(totals: tuple[Any, ...], counts: list[Any]) -> bytes:
    """The FlatBuffers bytes of the statistics: five totals, and three counts of each block."""
    total: cython.Py_ssize_t = len(counts) // 3
    buffer: _Backwards = _Backwards(total * 28 + 96)
    # Where the vtable of a shape lies. Tables with the same fields may differ in size: the size includes padding, which
    # depends on the position.
    vtables: dict = {}
    tables: list = []
    fields: tuple
    count: cython.int
    block: cython.Py_ssize_t
    start: cython.Py_ssize_t
    table_used: cython.Py_ssize_t
    vtable_used: cython.Py_ssize_t
    vector_used: cython.Py_ssize_t
    shape: cython.Py_ssize_t
    last_shape: cython.Py_ssize_t = -1
    slot: cython.int
    present: cython.int
    ends: list  # of the fields of a table: how much was written when each was done; 0 without it
    vtable_used = 0
    for block in range(total):
        start = buffer.used
        present = 0
        for slot in range(2, -1, -1):
            count = counts[3 * block + slot]
            if count:
                buffer.put(count, 2)
                present |= 1 << slot
        buffer.pad(4, 4)
        buffer.put(0, 4)
        table_used = buffer.used
        tables.append(table_used)
        shape = 8 * (table_used - start) + present
        if shape != last_shape:
            if shape not in vtables:
                fields = _block_fields(present, table_used - start)
                _put_vtable(buffer, fields, len(fields), table_used - start)
                vtables[shape] = buffer.used
            vtable_used = vtables[shape]
            last_shape = shape
        _set_i32(buffer, table_used, vtable_used - table_used)
    buffer.pad(4 * total, 4)
    for table_used in reversed(tables):
        buffer.put(buffer.used + 4 - table_used, 4)
    buffer.put(total, 4)
    vector_used = start = buffer.used
    ends = [0, 0, 0, 0, 0, 0]
    alignment: cython.Py_ssize_t = 4
    for slot in range(4, -1, -1):
        if totals[slot]:
            alignment = 8
            buffer.pad(8, 8)
            buffer.put(totals[slot], 8)
            ends[slot] = buffer.used
    buffer.put(buffer.used + 4 - vector_used, 4)
    ends[5] = buffer.used
    buffer.put(0, 4)
    table_used = buffer.used
    fields = tuple([table_used - end if end else 0 for end in ends])
    _put_vtable(buffer, fields, 6, table_used - start)
    _set_i32(buffer, table_used, buffer.used - table_used)
    buffer.pad(4, alignment)
    buffer.put(buffer.used + 4 - table_used, 4)
    return bytes(buffer.buffer[buffer.capacity - buffer.used :])


@cython.cfunc
def _block_fields(present: cython.int, table_size: cython.Py_ssize_t) -> tuple:
    """Where the counts of a block lie in its table, up to the last one that it has; 0 for those it does not have."""
    places: list = []
    place: cython.Py_ssize_t = table_size
    slot: cython.int
    # They were written from the last to the first.
    for slot in range(2, -1, -1):
        if present & (1 << slot):
            place -= 2
            places.insert(0, place)
        elif places:
            places.insert(0, 0)
    return tuple(places)


@cython.cfunc
def _put_vtable(
    buffer: _Backwards, fields: tuple, slots: cython.int, table_size: cython.Py_ssize_t
) -> cython.void:
    """Where the first `slots` fields of a table lie; 0 for those it does not have."""
    slot: cython.int
    for slot in range(slots - 1, -1, -1):
        buffer.put(fields[slot], 2)
    buffer.put(table_size, 2)
    buffer.put(4 + 2 * slots, 2)


@cython.cfunc
@cython.exceptval(check=False)
def _set_i32(buffer: _Backwards, used: cython.Py_ssize_t, value: cython.longlong) -> cython.void:
    """Fill in the table's signed distance to its vtable, left open when the table was written."""
    put_little(buffer.out, buffer.capacity - used, cython.cast(cython.ulonglong, value), 4)


@cython.cclass
class _Bounded:
    """Little-endian reads that never leave the buffer."""

    raw: bytes
    data: cython.p_const_uchar
    size: cython.Py_ssize_t

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.data = raw
        self.size = len(raw)

    @cython.cfunc
    @cython.exceptval(check=True)
    def get(self, at: cython.Py_ssize_t, size: cython.int) -> cython.ulonglong:
        if at < 0 or at + size > self.size:
            raise CorruptData(
                f"index names byte {at} of {self.size}", offset=0 if at < 0 else min(at, self.size)
            )
        return get_little(self.data, at, size)

    @cython.cfunc
    @cython.exceptval(-2)
    def field(self, table: cython.Py_ssize_t, slot: cython.int) -> cython.Py_ssize_t:
        """Where the field of a table lies, or -1 when it is absent."""
        distance: cython.longlong = self.get(table, 4)
        vtable: cython.Py_ssize_t
        offset: cython.Py_ssize_t
        if distance >= SIGN_BIT:
            distance -= 2 * SIGN_BIT
        vtable = table - distance
        if self.get(vtable, 2) < 6 + 2 * slot:
            return -1
        offset = self.get(vtable + 4 + 2 * slot, 2)
        return table + offset if offset else -1


def decode_index(raw: bytes) -> tuple[Any, Any]:
    """The block offsets and first keys of an index. Raises `CorruptData` with an offset inside `raw`."""
    buffer: _Bounded = _Bounded(raw)
    offsets: list = []
    first_keys: list = []
    at: cython.Py_ssize_t = buffer.get(0, 4)
    vector: cython.Py_ssize_t = buffer.field(at, 0)
    total: cython.longlong
    index: cython.Py_ssize_t
    table: cython.Py_ssize_t
    size: cython.Py_ssize_t
    key_bytes: cython.Py_ssize_t = 0
    if vector < 0:
        raise CorruptData("index without its list of blocks", offset=at)
    vector += buffer.get(vector, 4)
    total = buffer.get(vector, 4)
    if total * 4 > buffer.size - vector - 4:
        raise CorruptData(f"index claims {total} blocks in {buffer.size} bytes", offset=vector)
    for index in range(total):
        table = vector + 4 + 4 * index
        table += buffer.get(table, 4)
        at = buffer.field(table, 0)
        offsets.append(buffer.get(at, 8) if at >= 0 else 0)
        at = buffer.field(table, 1)
        if at < 0:
            raise CorruptData(f"entry {index} of the index has no key", offset=table)
        at += buffer.get(at, 4)
        size = buffer.get(at, 4)
        # No two entries share their key, so all keys together fit; without this a small damaged index could
        # unfold into gigabytes.
        key_bytes += size
        if size > buffer.size - at - 4 or key_bytes > buffer.size:
            raise CorruptData(f"key of entry {index} of the index runs past its end", offset=at)
        first_keys.append(raw[at + 4 : at + 4 + size])
    return offsets, first_keys
