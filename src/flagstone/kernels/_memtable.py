"""The memtable: recent rows in commit order, found by hash, sorted only when somebody wants order.

Rows are appended to chunks of memory that never move, so what a reader found stays valid while others write:

    entry = link(8) seq(8) expire_ms(8) create_ms(8) value_len(4) key_len(2) flags(1) key value

Walking the chunks gives commit order, which is what the log wants. The first entry of a key is its anchor: the
hash table and the sorted runs name anchors only. An anchor links to the key's newest entry, every newer entry
to the next older one, so that versions are read from new to old:

    anchor.link -> newest -> … -> second -> anchor          (0: the anchor is the only version)

Order is kept as in a log-structured tree: anchors not yet sorted are sorted into a run when a scan or a flush needs
them, and runs of similar size are merged. Loading costs no comparison at all.

Writers must exclude each other; readers need nothing, because every method runs under one lock: the interpreter's,
or where the kernel is interpreted one that stands for it (see `cython_stub`).

An exception may still be raised inside a method: `MemoryError` anywhere, Ctrl-C where the kernel is interpreted, and a
garbage collection may run other code in the middle of one. So what readers use (links, slots, sorted runs) is replaced
by single assignments of things that are complete. A write that is cut off leaves `newest_seq` above the number the
caller counts as written; the caller then goes on with `copy_through`. Written in Cython's pure-Python mode; see
`_block_writer` for how that works.
"""

from __future__ import annotations

from array import array

import cython
from cython.cimports.libc.string import memcmp, memcpy

HEADER = cython.declare(cython.Py_ssize_t, 39)
CHUNK_BYTES = cython.declare(cython.Py_ssize_t, 1 << 18)
ANCHOR_FLAG = cython.declare(cython.int, 0x80)
EXPIRE_FLAG = cython.declare(cython.int, 0x02)
CREATE_FLAG = cython.declare(cython.int, 0x04)
MERGE_FLAG = cython.declare(cython.int, 0x08)
WARM_STEP = cython.declare(cython.Py_ssize_t, 64)
SORT_STEP = cython.declare(cython.Py_ssize_t, 1 << 14)
# An address is a chunk's number, from 1 on, and an offset: every entry begins in the first CHUNK_BYTES of its chunk.
# Above it a slot of the hash table keeps the low bits of the hash: they spare most wrong comparisons, and the table
# grows without looking at a single key. Constants of more than 31 bits are declared, or compiled code would compute
# with them as Python integers.
OFFSET_BITS = cython.declare(cython.int, 18)
ADDRESS_BITS = cython.declare(cython.int, 38)
OFFSET_MASK = cython.declare(cython.ulonglong, (1 << 18) - 1)
ADDRESS_MASK = cython.declare(cython.ulonglong, (1 << 38) - 1)
TAG_MASK = cython.declare(cython.ulonglong, (1 << 26) - 1)
ANY_SEQ = cython.declare(cython.ulonglong, 0xFFFFFFFFFFFFFFFF)
LONG_AGO = cython.declare(cython.longlong, -(1 << 63))


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _get(data: cython.p_const_uchar, at: cython.Py_ssize_t, size: cython.int) -> cython.ulonglong:
    value: cython.ulonglong = 0
    index: cython.int
    if not cython.compiled:
        return int.from_bytes(data[at : at + size], "little")
    for index in range(size):
        value |= cython.cast(cython.ulonglong, data[at + index]) << (8 * index)
    return value


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _get_time(data: cython.p_const_uchar, at: cython.Py_ssize_t) -> cython.longlong:
    value: cython.ulonglong = _get(data, at, 8)
    if not cython.compiled and value >= 1 << 63:
        return value - (1 << 64)
    return cython.cast(cython.longlong, value)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _put(
    out: cython.p_uchar, at: cython.Py_ssize_t, value: cython.ulonglong, size: cython.int
) -> cython.void:
    index: cython.int
    if not cython.compiled:
        # In one step: a reader that follows a link must never find half of it.
        out[at : at + size] = (value & ANY_SEQ).to_bytes(8, "little")[:size]
        return
    for index in range(size):
        out[at + index] = (value >> (8 * index)) & 0xFF


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _put_high_first(out: cython.p_uchar, at: cython.Py_ssize_t, value: cython.ulonglong) -> cython.void:
    index: cython.int
    for index in range(8):
        out[at + index] = (value >> (56 - 8 * index)) & 0xFF


@cython.cfunc
@cython.inline
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


@cython.cfunc
@cython.inline
def _piece(data: cython.p_const_uchar, start: cython.Py_ssize_t, stop: cython.Py_ssize_t) -> bytes:
    """A part of the memory as bytes. Compiled, a slice is that already, and `bytes()` would cost as much again."""
    if cython.compiled:
        return data[start:stop]
    return bytes(data[start:stop])


@cython.cclass
class Memtable:
    """Rows by key and sequence number. `bytes` is what they and their headers occupy."""

    chunks: list
    bases: cython.ulonglong[::1]
    ends: list
    chunk: bytearray
    chunk_used: cython.Py_ssize_t
    chunk_size: cython.Py_ssize_t
    slots: cython.ulonglong[::1]
    keys: cython.Py_ssize_t
    entries: cython.Py_ssize_t
    total_bytes: cython.Py_ssize_t
    lookups: cython.Py_ssize_t
    largest_seq: cython.ulonglong
    order: tuple
    has_merges: cython.bint
    touched: cython.uint

    def __init__(self) -> None:
        self.chunks = []
        self.bases = array("Q", bytes(8 * 16))
        self.ends = []
        self.chunk = bytearray()
        self.chunk_used = self.chunk_size = 0
        self.slots = array("Q", bytes(8 * 256))
        self.keys = self.entries = self.total_bytes = self.lookups = 0
        self.largest_seq = 0
        # (sorted runs, chunk and offset up to which anchors are in them), replaced as a whole.
        self.order = ((), 0, 0)
        self.has_merges = False
        self.touched = 0

    def __len__(self) -> int:
        """The number of rows, every version counted."""
        return self.entries

    def size(self) -> int:
        """Bytes occupied by rows and their headers."""
        return self.total_bytes

    def asked(self) -> int:
        """How often `get_value` was called. Counted here because here it costs nothing."""
        return self.lookups

    def merges(self) -> bool:
        """Whether any row is a merge operand."""
        return self.has_merges

    def newest_seq(self) -> int:
        """The largest sequence number that was ever given to a row here, also to one that was cut off."""
        return self.largest_seq

    @cython.ccall
    def insert(
        self,
        key: bytes,
        seq: cython.ulonglong,
        kind: cython.int,
        value: bytes,
        created: object,
        expires: object,
    ) -> cython.Py_ssize_t:
        """Add one row under a new sequence number; returns `size()`.

        Returns -1, and adds nothing, when `seq` is not above `newest_seq()`: an exception has cut a write off.
        """
        if seq <= self.largest_seq:
            return -1
        # First of all: whatever is raised from here on, the number tells that this row may be half made.
        self.largest_seq = seq
        self._add(key, seq, kind, value, created, expires)
        return self.total_bytes

    def insert_batch(self, rows: list, seq: cython.ulonglong, created: object) -> cython.Py_ssize_t:
        """Add rows `(key, kind, value, expires)` under one new sequence number; returns as `insert` does."""
        row: tuple
        if seq <= self.largest_seq:
            return -1
        self.largest_seq = seq
        for row in rows:
            self._add(row[0], seq, row[1], row[2], created, row[3])
        return self.total_bytes

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def _add(
        self,
        key: bytes,
        seq: cython.ulonglong,
        kind: cython.int,
        value: bytes,
        created: object,
        expires: object,
    ) -> cython.int:
        size: cython.Py_ssize_t = HEADER + len(key) + len(value)
        out: cython.p_uchar
        at: cython.Py_ssize_t
        flags: cython.int = kind
        address: cython.ulonglong
        anchor: cython.ulonglong
        hashed: cython.ulonglong = _hash(key)
        slot: cython.ulonglong
        newest: cython.ulonglong
        # All memory before the first change: there may be none.
        if self.chunk_used + size > self.chunk_size:
            self._new_chunk(size)
        if (self.keys + 1) * 4 > (len(self.slots) - 1) * 3:
            self._grow()
        at = self.chunk_used
        out = self.chunk
        address = _address(len(self.chunks), at)
        _put(out, at + 8, seq, 8)
        if expires is not None:
            flags |= EXPIRE_FLAG
            _put(out, at + 16, cython.cast(cython.ulonglong, cython.cast(cython.longlong, expires)), 8)
        if created is not None:
            flags |= CREATE_FLAG
            _put(out, at + 24, cython.cast(cython.ulonglong, cython.cast(cython.longlong, created)), 8)
        if kind == MERGE_FLAG:
            self.has_merges = True
        _put(out, at + 32, len(value), 4)
        _put(out, at + 36, len(key), 2)
        _copy(out, at + HEADER, key, 0, len(key))
        _copy(out, at + HEADER + len(key), value, 0, len(value))
        slot = self._find(key, hashed)
        anchor = self.slots[slot] & ADDRESS_MASK
        # The row is complete; one assignment makes it the newest of its key.
        if anchor:
            newest = self._link(anchor)
            _put(out, at, newest if newest else anchor, 8)
            out[at + 38] = flags
            self._set_link(anchor, address)
        else:
            _put(out, at, 0, 8)
            out[at + 38] = flags | ANCHOR_FLAG
            self.slots[slot] = ((hashed & TAG_MASK) << ADDRESS_BITS) | address
            self.keys += 1
        # The row counts only now: a reader that walks the chunks never meets half a row.
        self.chunk_used = at + size
        self.ends[len(self.chunks) - 1] = at + size
        self.entries += 1
        self.total_bytes += size
        return 0

    def copy_through(self, last_seq: cython.ulonglong) -> Memtable:
        """A memtable of the rows up to `last_seq`, at the same positions. Rows must have come in ascending order.

        What a write that was cut off has left behind is not in it.
        """
        twin: Memtable = Memtable()
        chunk: cython.Py_ssize_t
        at: cython.Py_ssize_t
        end: cython.Py_ssize_t
        data: cython.p_const_uchar
        entry: cython.ulonglong
        for chunk in range(len(self.chunks)):
            data = self._chunk_of(_address(chunk + 1, 0))
            end = self.ends[chunk]
            at = 0
            while at < end:
                if _get(data, at + 8, 8) > last_seq:
                    return twin
                entry = _address(chunk + 1, at)
                row: tuple = self._row(entry, self._key(entry))
                twin._add(row[0], row[1], row[2], row[3], row[4], row[5])
                twin.largest_seq = row[1]
                at += HEADER + _get(data, at + 36, 2) + _get(data, at + 32, 4)
        return twin

    def insert_rows(self, rows: list) -> tuple:
        """Add entry tuples in their order, under the numbers they have.

        Returns the largest seq and the latest creation among them.
        """
        row: tuple
        seq: cython.ulonglong
        largest: cython.ulonglong = 0
        latest: object = None
        for row in rows:
            seq = row[1]
            self._add(row[0], seq, row[2], row[3], row[4], row[5])
            if seq > largest:
                largest = seq
            if seq > self.largest_seq:
                self.largest_seq = seq
            if row[4] is not None and (latest is None or row[4] > latest):
                latest = row[4]
        return largest, latest

    def get(self, key: bytes, max_seq: cython.ulonglong) -> object:
        """The newest row of `key` with seq <= `max_seq` as an entry tuple, or None."""
        entry: cython.ulonglong = self._newest(
            self.slots[self._find(key, _hash(key))] & ADDRESS_MASK, max_seq
        )
        return self._row(entry, key) if entry else None

    def get_value(self, key: bytes, max_seq: cython.ulonglong) -> object:
        """The value of `key` where that is simple, as `bytes`; None when there is no row.

        A row that needs thought (a tombstone, an operand, a value that expires) comes as its entry tuple.
        """
        entry: cython.ulonglong = self._newest(
            self.slots[self._find(key, _hash(key))] & ADDRESS_MASK, max_seq
        )
        data: cython.p_const_uchar
        at: cython.Py_ssize_t
        self.lookups += 1
        if entry == 0:
            return None
        data = self._chunk_of(entry)
        at = entry & OFFSET_MASK
        if data[at + 38] & 0x0B:
            return self._row(entry, key)
        at += HEADER + len(key)
        return _piece(data, at, at + _get(data, at - HEADER - len(key) + 32, 4))

    def versions(self, key: bytes, max_seq: cython.ulonglong) -> list:
        """Every row of `key` with seq <= `max_seq`, newest first."""
        found: list = []
        anchor: cython.ulonglong = self.slots[self._find(key, _hash(key))] & ADDRESS_MASK
        entry: cython.ulonglong = self._newest(anchor, max_seq)
        while entry:
            found.append(self._row(entry, key))
            entry = 0 if entry == anchor else self._link(entry)
        return found

    def sort_some(self) -> bool:
        """Bring a few thousand more keys in order, in a millisecond or two; False when all are."""
        return self._sort_step() != 0

    def sort(self) -> tuple:
        """Bring all rows in order; returns the sorted runs, whose first element is an array of anchors."""
        while self._sort_step():
            pass
        return self.order[0]

    def sort_completely(self) -> tuple:
        """All rows in order as one run, for `sorted_stream` and `versions_at`. May be slow once, is free afterwards."""
        self.sort()
        order: tuple = self.order
        runs: tuple = order[0]
        while len(runs) > 1:
            runs = (*runs[:-2], self._merged(runs[len(runs) - 2], runs[len(runs) - 1]))
            self.order = (runs, order[1], order[2])
        return runs[0] if runs else (array("Q"), array("Q"), 0)

    def scan(self, start: bytes | None, stop: bytes | None, max_seq: int, reverse: bool) -> MemtableScan:
        """A cursor over the keys in [start, stop) as they are now; rows added later are not seen."""
        return MemtableScan(self, start, stop, max_seq, reverse)

    def versions_at(self, run: tuple, index: int) -> list:
        """All rows of the `index`-th key of a sorted run, newest first."""
        anchor: cython.ulonglong = run[0][index]
        return self.versions(self._key(anchor), ANY_SEQ)

    def sorted_stream(
        self,
        run: tuple,
        start: cython.Py_ssize_t,
        stream: bytearray,
        min_seq: cython.ulonglong,
        now_ms: cython.longlong,
    ) -> tuple:
        """Fill `stream` with rows in key order from the `start`-th key of `run` on, as `RowWriter.write` takes them.

        Applies what a flush may leave out: values expired at `now_ms` become
        tombstones, and of each key only versions above `min_seq` and the newest one not above it are kept. Stops
        before a key with merge operands, which need the operator. Returns `(next key, bytes used)`; the stream grows
        when the versions of a key do not fit into it.
        """
        anchors: cython.ulonglong[::1] = run[0]
        total: cython.Py_ssize_t = len(anchors)
        out: cython.p_uchar = stream
        room: cython.Py_ssize_t = len(stream)
        enough: cython.Py_ssize_t = room // 2
        used: cython.Py_ssize_t = 0
        before: cython.Py_ssize_t
        index: cython.Py_ssize_t = start
        entry: cython.ulonglong
        data: cython.p_const_uchar
        at: cython.Py_ssize_t
        size: cython.Py_ssize_t
        while index < total and used < enough:
            if (index - start) % WARM_STEP == 0:
                self._warm(anchors, index, min(index + WARM_STEP, total))
            before = used
            entry = self._newest(anchors[index], ANY_SEQ)
            while entry:
                data = self._chunk_of(entry)
                at = entry & OFFSET_MASK
                if data[at + 38] & MERGE_FLAG:
                    return index, before
                # A header here is larger than all that a row of the stream has besides key and value.
                size = HEADER + _get(data, at + 36, 2) + _get(data, at + 32, 4)
                if used + size > room:
                    room = used + size
                    stream.extend(bytes(room - len(stream)))
                    out = stream
                used = self._append(out, used, data, at, now_ms)
                if _get(data, at + 8, 8) <= min_seq or entry == anchors[index]:
                    break
                entry = _get(data, at, 8)
            index += 1
        return index, used

    def position(self) -> tuple:
        """The end of the rows so far, for `log_stream`."""
        if len(self.chunks) == 0:
            return (0, 0)
        return (len(self.chunks) - 1, self.chunk_used)

    def log_stream(self, position: tuple, end: tuple, stream: bytearray) -> tuple:
        """Fill `stream` with rows in commit order from one `position()` to another (`(0, 0)` is the beginning).

        Returns `(next position, bytes used)`: all rows were given when that is `end`. The stream grows when a row does
        not fit into it.
        """
        out: cython.p_uchar = stream
        room: cython.Py_ssize_t = len(stream)
        enough: cython.Py_ssize_t = room // 2
        chunk: cython.Py_ssize_t = position[0]
        at: cython.Py_ssize_t = position[1]
        used: cython.Py_ssize_t = 0
        size: cython.Py_ssize_t
        data: cython.p_const_uchar
        last: cython.Py_ssize_t = end[0]
        last_at: cython.Py_ssize_t = end[1]
        while used < enough and (chunk < last or (chunk == last and at < last_at)):
            if at >= self.ends[chunk]:
                chunk += 1
                at = 0
                continue
            data = cython.cast(bytearray, self.chunks[chunk])
            size = HEADER + _get(data, at + 36, 2) + _get(data, at + 32, 4)
            if used + size > room:
                room = used + size
                stream.extend(bytes(room - len(stream)))
                out = stream
            # The log has every row as it was written, expired or not.
            used = self._append(out, used, data, at, LONG_AGO)
            at += size
        return (chunk, at), used

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _append(
        self,
        out: cython.p_uchar,
        used: cython.Py_ssize_t,
        data: cython.p_const_uchar,
        at: cython.Py_ssize_t,
        now_ms: cython.longlong,
    ) -> cython.Py_ssize_t:
        """Append the entry at `at` of a chunk as a row of a stream (see `_merge`); returns the end of it."""
        key_size: cython.Py_ssize_t = _get(data, at + 36, 2)
        value_size: cython.Py_ssize_t = _get(data, at + 32, 4)
        flags: cython.int = data[at + 38] & 0x0F
        if flags & EXPIRE_FLAG and flags & 0x09 == 0 and _get_time(data, at + 16) <= now_ms:
            flags = (flags & CREATE_FLAG) | 0x01
            value_size = 0
        _put(out, used, key_size, 2)
        _put(out, used + 2, value_size, 4)
        _copy(out, used + 6, data, at + HEADER, key_size + value_size)
        used += 6 + key_size + value_size
        _put_high_first(out, used, _get(data, at + 8, 8))
        out[used + 8] = flags
        used += 9
        if flags & EXPIRE_FLAG:
            _put_high_first(out, used, _get(data, at + 16, 8))
            used += 8
        if flags & CREATE_FLAG:
            _put_high_first(out, used, _get(data, at + 24, 8))
            used += 8
        return used

    @cython.cfunc
    @cython.exceptval(check=False)
    def _warm(
        self, anchors: cython.ulonglong[::1], start: cython.Py_ssize_t, stop: cython.Py_ssize_t
    ) -> cython.void:
        """Touch rows that will be needed next.

        Rows in key order lie all over memory. A loop that does nothing but touch them keeps many cache misses in
        flight at once; the loop that copies them would wait for each in turn, which is three times as slow.
        """
        row: cython.Py_ssize_t
        at: cython.Py_ssize_t
        data: cython.p_const_uchar
        touched: cython.uint = self.touched
        if cython.compiled:
            for row in range(start, stop):
                data = self._chunk_of(anchors[row])
                at = anchors[row] & OFFSET_MASK
                # No chunk is smaller, so none of these lies outside.
                if at + 192 < CHUNK_BYTES:
                    touched += data[at] + data[at + 64] + data[at + 128]
            self.touched = touched

    @cython.cfunc
    @cython.exceptval(-1)
    def _new_chunk(self, size: cython.Py_ssize_t) -> cython.int:
        room: cython.Py_ssize_t = size if size > CHUNK_BYTES else CHUNK_BYTES
        chunk: bytearray = bytearray(room)
        if len(self.chunks) == len(self.bases):
            self.bases = _doubled(self.bases)
        if cython.compiled:
            base: cython.p_uchar = chunk
            self.bases[len(self.chunks)] = cython.cast(cython.ulonglong, base)
        # The end before the chunk: who walks the chunks looks up the end of each.
        self.ends.append(0)
        self.chunks.append(chunk)
        self.chunk = chunk
        self.chunk_used = 0
        self.chunk_size = room
        return 0

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _chunk_of(self, entry: cython.ulonglong) -> cython.p_uchar:
        """The chunk an entry lies in; by its address, because asking a list costs more than reading the row."""
        if cython.compiled:
            return cython.cast(cython.p_uchar, self.bases[(entry >> OFFSET_BITS) - 1])
        return self.chunks[(entry >> OFFSET_BITS) - 1]

    @cython.cfunc
    @cython.exceptval(check=False)
    def _find(self, key: bytes, hashed: cython.ulonglong) -> cython.ulonglong:
        """The slot that holds the key's anchor, or the free one where it would go."""
        mask: cython.ulonglong = len(self.slots) - 1
        slot: cython.ulonglong = hashed & mask
        held: cython.ulonglong = self.slots[slot]
        wanted: cython.p_const_uchar = key
        data: cython.p_const_uchar
        at: cython.Py_ssize_t
        size: cython.Py_ssize_t = len(key)
        while held:
            if held >> ADDRESS_BITS == hashed & TAG_MASK:
                data = self._chunk_of(held & ADDRESS_MASK)
                at = held & OFFSET_MASK
                if cython.cast(cython.Py_ssize_t, _get(data, at + 36, 2)) == size:
                    at += HEADER
                    if cython.compiled:
                        if memcmp(data + at, wanted, size) == 0:
                            return slot
                    elif data[at : at + size] == key:
                        return slot
            slot = (slot + 1) & mask
            held = self.slots[slot]
        return slot

    @cython.cfunc
    @cython.exceptval(-1)
    def _grow(self) -> cython.int:
        """Double the hash table. The new one is filled before anyone can look into it."""
        old: cython.ulonglong[::1] = self.slots
        mask: cython.ulonglong = 2 * len(old) - 1
        grown: cython.ulonglong[::1] = array("Q", bytes(8)) * (mask + 1)
        index: cython.Py_ssize_t
        slot: cython.ulonglong
        hashed: cython.ulonglong
        for index in range(len(old)):
            if old[index]:
                hashed = old[index] >> ADDRESS_BITS
                if mask > TAG_MASK:
                    hashed = _hash(self._key(old[index] & ADDRESS_MASK))
                slot = hashed & mask
                while grown[slot]:
                    slot = (slot + 1) & mask
                grown[slot] = old[index]
        self.slots = grown
        return 0

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _link(self, entry: cython.ulonglong) -> cython.ulonglong:
        return _get(self._chunk_of(entry), entry & OFFSET_MASK, 8)

    @cython.cfunc
    @cython.inline
    @cython.exceptval(check=False)
    def _set_link(self, entry: cython.ulonglong, link: cython.ulonglong) -> cython.void:
        _put(self._chunk_of(entry), entry & OFFSET_MASK, link, 8)

    @cython.cfunc
    @cython.exceptval(check=False)
    def _newest(self, anchor: cython.ulonglong, max_seq: cython.ulonglong) -> cython.ulonglong:
        """The newest version with seq <= `max_seq` of the anchor's key, or 0."""
        entry: cython.ulonglong
        data: cython.p_const_uchar
        at: cython.Py_ssize_t
        if anchor == 0:
            return 0
        entry = self._link(anchor)
        if entry == 0:
            entry = anchor
        while True:
            data = self._chunk_of(entry)
            at = entry & OFFSET_MASK
            if _get(data, at + 8, 8) <= max_seq:
                return entry
            if entry == anchor:
                return 0
            entry = _get(data, at, 8)

    @cython.cfunc
    def _key(self, entry: cython.ulonglong) -> bytes:
        data: cython.p_const_uchar = self._chunk_of(entry)
        at: cython.Py_ssize_t = entry & OFFSET_MASK
        return _piece(data, at + HEADER, at + HEADER + _get(data, at + 36, 2))

    @cython.cfunc
    def _row(self, entry: cython.ulonglong, key: bytes) -> tuple:
        data: cython.p_const_uchar = self._chunk_of(entry)
        at: cython.Py_ssize_t = entry & OFFSET_MASK
        flags: cython.int = data[at + 38]
        value_at: cython.Py_ssize_t = at + HEADER + len(key)
        return (
            key,
            _get(data, at + 8, 8),
            flags & 0x09,
            _piece(data, value_at, value_at + _get(data, at + 32, 4)),
            _get_time(data, at + 24) if flags & CREATE_FLAG else None,
            _get_time(data, at + 16) if flags & EXPIRE_FLAG else None,
        )

    @cython.cfunc
    @cython.exceptval(check=False)
    def _shared(
        self, one: cython.ulonglong, two: cython.ulonglong, limit: cython.Py_ssize_t
    ) -> cython.Py_ssize_t:
        """How many leading bytes the keys of two entries have in common, at most `limit`."""
        one_data: cython.p_const_uchar = self._chunk_of(one)
        two_data: cython.p_const_uchar = self._chunk_of(two)
        one_at: cython.Py_ssize_t = one & OFFSET_MASK
        two_at: cython.Py_ssize_t = two & OFFSET_MASK
        end: cython.Py_ssize_t = min(limit, _get(one_data, one_at + 36, 2), _get(two_data, two_at + 36, 2))
        at: cython.Py_ssize_t = 0
        while at < end and one_data[one_at + HEADER + at] == two_data[two_at + HEADER + at]:
            at += 1
        return at

    @cython.cfunc
    def _prefixes(self, anchors: cython.ulonglong[::1], skip: cython.Py_ssize_t) -> array:
        """Of each key the eight bytes behind the first `skip`, as numbers that sort like them."""
        prefixes = array("Q", bytes(8 * len(anchors)))
        out: cython.ulonglong[::1] = prefixes
        data: cython.p_const_uchar
        at: cython.Py_ssize_t
        size: cython.Py_ssize_t
        row: cython.Py_ssize_t
        index: cython.Py_ssize_t
        value: cython.ulonglong
        for row in range(len(anchors)):
            data = self._chunk_of(anchors[row])
            at = anchors[row] & OFFSET_MASK
            size = _get(data, at + 36, 2)
            value = 0
            for index in range(skip, skip + 8):
                value <<= 8
                if index < size:
                    value |= data[at + HEADER + index]
            out[row] = value
        return prefixes

    @cython.cfunc
    @cython.exceptval(check=False)
    def _compare(self, one: cython.ulonglong, two: cython.ulonglong) -> cython.int:
        """Negative, zero or positive as the keys of two entries compare."""
        if not cython.compiled:
            left, right = self._key(one), self._key(two)
            return (left > right) - (left < right)
        one_data: cython.p_const_uchar = self._chunk_of(one)
        two_data: cython.p_const_uchar = self._chunk_of(two)
        one_at: cython.Py_ssize_t = one & OFFSET_MASK
        two_at: cython.Py_ssize_t = two & OFFSET_MASK
        one_size: cython.Py_ssize_t = _get(one_data, one_at + 36, 2)
        two_size: cython.Py_ssize_t = _get(two_data, two_at + 36, 2)
        shortest: cython.Py_ssize_t = one_size if one_size < two_size else two_size
        order: cython.int = memcmp(one_data + one_at + HEADER, two_data + two_at + HEADER, shortest)
        if order == 0:
            return 1 if one_size > two_size else -1 if one_size < two_size else 0
        return order

    @cython.cfunc
    @cython.exceptval(-1)
    def _sort_step(self) -> cython.int:
        """Sort the next few thousand anchors into a run, merge runs of similar size; 0 when none is left."""
        anchors: cython.ulonglong[::1] = array("Q", bytes(8 * SORT_STEP))
        order: tuple = self.order
        runs: list = list(order[0])
        chunk: cython.Py_ssize_t = order[1]
        at: cython.Py_ssize_t = order[2]
        chunks: cython.Py_ssize_t = len(self.chunks)
        count: cython.Py_ssize_t = 0
        data: cython.p_const_uchar
        end: cython.Py_ssize_t
        while chunk < chunks and count < SORT_STEP:
            end = self.ends[chunk]
            data = self._chunk_of(_address(chunk + 1, 0))
            while at < end and count < SORT_STEP:
                if data[at + 38] & ANCHOR_FLAG:
                    anchors[count] = _address(chunk + 1, at)
                    count += 1
                at += HEADER + _get(data, at + 36, 2) + _get(data, at + 32, 4)
            if at < end or chunk + 1 == chunks:
                break
            chunk += 1
            at = 0
        if count:
            runs.append(self._sorted(anchors[:count]))
        while len(runs) > 1 and len(runs[len(runs) - 2][0]) <= 2 * len(runs[len(runs) - 1][0]):
            newer: tuple = runs.pop()
            runs.append(self._merged(runs.pop(), newer))
        # Sorted aside and shown at once: code that a garbage collection runs in between still finds every row.
        self.order = (tuple(runs), chunk, at)
        return 1 if count else 0

    @cython.cfunc
    def _sorted(self, anchors: cython.ulonglong[::1]) -> tuple:
        """A run `(anchors, prefixes, skip)`: merge sort, bottom up, on prefixes and, where they tie, on keys.

        All keys of a run share their first `skip` bytes, which are left out of the prefixes: keys of one kind
        begin alike, and only what follows tells them apart.
        """
        total: cython.Py_ssize_t = len(anchors)
        source: cython.ulonglong[::1] = anchors
        target: cython.ulonglong[::1] = array("Q", bytes(8 * total))
        width: cython.Py_ssize_t = 16
        at: cython.Py_ssize_t
        skip: cython.Py_ssize_t = 0xFFFF
        for at in range(total):
            skip = self._shared(source[0], source[at], skip)
        source_prefixes: cython.ulonglong[::1] = self._prefixes(source, skip)
        target_prefixes: cython.ulonglong[::1] = array("Q", bytes(8 * total))
        for at in range(0, total, width):
            self._sort_few(source, source_prefixes, at, min(at + width, total))
        while width < total:
            for at in range(0, total, 2 * width):
                self._merge(
                    source, source_prefixes, at, min(at + width, total),
                    source, source_prefixes, min(at + width, total), min(at + 2 * width, total),
                    target, target_prefixes, at,
                )  # fmt: skip
            source, target = target, source
            source_prefixes, target_prefixes = target_prefixes, source_prefixes
            width *= 2
        return source, source_prefixes, skip

    @cython.cfunc
    def _sort_few(
        self,
        anchors: cython.ulonglong[::1],
        prefixes: cython.ulonglong[::1],
        start: cython.Py_ssize_t,
        stop: cython.Py_ssize_t,
    ) -> cython.void:
        """Insertion sort, which beats merging while the numbers are small."""
        index: cython.Py_ssize_t
        at: cython.Py_ssize_t
        anchor: cython.ulonglong
        prefix: cython.ulonglong
        for index in range(start + 1, stop):
            anchor = anchors[index]
            prefix = prefixes[index]
            at = index
            while at > start and (
                prefixes[at - 1] > prefix
                or (prefixes[at - 1] == prefix and self._compare(anchors[at - 1], anchor) > 0)
            ):
                anchors[at] = anchors[at - 1]
                prefixes[at] = prefixes[at - 1]
                at -= 1
            anchors[at] = anchor
            prefixes[at] = prefix

    @cython.cfunc
    def _merged(self, one: tuple, two: tuple) -> tuple:
        """One run of two."""
        total: cython.Py_ssize_t = len(one[0]) + len(two[0])
        anchors, prefixes = array("Q", bytes(8 * total)), array("Q", bytes(8 * total))
        skip = self._shared(one[0][0], two[0][0], min(one[2], two[2]))
        one_prefixes = one[1] if one[2] == skip else self._prefixes(one[0], skip)
        two_prefixes = two[1] if two[2] == skip else self._prefixes(two[0], skip)
        self._merge(
            one[0], one_prefixes, 0, len(one[0]), two[0], two_prefixes, 0, len(two[0]), anchors, prefixes, 0
        )
        return anchors, prefixes, skip

    @cython.cfunc
    def _merge(
        self,
        one: cython.ulonglong[::1],
        one_prefixes: cython.ulonglong[::1],
        one_at: cython.Py_ssize_t,
        one_end: cython.Py_ssize_t,
        two: cython.ulonglong[::1],
        two_prefixes: cython.ulonglong[::1],
        two_at: cython.Py_ssize_t,
        two_end: cython.Py_ssize_t,
        out: cython.ulonglong[::1],
        out_prefixes: cython.ulonglong[::1],
        at: cython.Py_ssize_t,
    ) -> cython.void:
        first: cython.bint
        while one_at < one_end or two_at < two_end:
            if one_at == one_end:
                first = False
            elif two_at == two_end:
                first = True
            elif one_prefixes[one_at] != two_prefixes[two_at]:
                first = one_prefixes[one_at] < two_prefixes[two_at]
            else:
                first = self._compare(one[one_at], two[two_at]) < 0
            if first:
                out[at] = one[one_at]
                out_prefixes[at] = one_prefixes[one_at]
                one_at += 1
            else:
                out[at] = two[two_at]
                out_prefixes[at] = two_prefixes[two_at]
                two_at += 1
            at += 1

    @cython.cfunc
    @cython.exceptval(check=False)
    def _lower_bound(self, run: cython.ulonglong[::1], key: bytes) -> cython.Py_ssize_t:
        """How many anchors of a run have keys below `key`."""
        low: cython.Py_ssize_t = 0
        high: cython.Py_ssize_t = len(run)
        middle: cython.Py_ssize_t
        while low < high:
            middle = (low + high) // 2
            if self._key(run[middle]) < key:
                low = middle + 1
            else:
                high = middle
        return low


@cython.cclass
class MemtableScan:
    """A cursor over the keys of a memtable, in ascending or descending order."""

    table: Memtable
    runs: list
    places: list
    start: bytes | None
    stop: bytes | None
    max_seq: cython.ulonglong
    reverse: cython.bint

    def __init__(
        self, table: Memtable, start: bytes | None, stop: bytes | None, max_seq: int, reverse: bool
    ) -> None:
        self.table = table
        self.runs = [run[0] for run in table.sort()]
        self.start = start
        self.stop = stop
        self.max_seq = max_seq
        self.reverse = reverse
        self.places = []
        for run in self.runs:
            if reverse:
                self.places.append((len(run) if stop is None else table._lower_bound(run, stop)) - 1)
            else:
                self.places.append(0 if start is None else table._lower_bound(run, start))

    def seek(self, key: bytes) -> None:
        """Go on with the first key at or behind `key` in the direction of the scan; never goes back."""
        index: cython.Py_ssize_t
        place: cython.Py_ssize_t
        for index in range(len(self.runs)):
            if self.reverse:
                place = self.table._lower_bound(self.runs[index], key + b"\0") - 1
                self.places[index] = min(self.places[index], place)
            else:
                place = self.table._lower_bound(self.runs[index], key)
                self.places[index] = max(self.places[index], place)

    def next_rows(self, limit: int) -> list:
        """The rows of the next keys, at least `limit` unless the scan ends; [] at the end.

        Of each key the newest version not above the scan's sequence number; behind a merge operand also the
        older ones, down to the first that is none.
        """
        rows: list = []
        best: cython.Py_ssize_t
        index: cython.Py_ssize_t
        order: cython.int
        anchor: cython.ulonglong
        entry: cython.ulonglong
        found: cython.ulonglong
        key: bytes
        place: cython.Py_ssize_t
        while len(rows) < limit:
            best = -1
            anchor = 0
            for index in range(len(self.runs)):
                place = self.places[index]
                if 0 <= place < len(self.runs[index]):
                    found = self.runs[index][place]
                    if best >= 0:
                        order = self.table._compare(found, anchor)
                        if (order > 0) != self.reverse:
                            continue
                    best = index
                    anchor = found
            if best < 0:
                break
            key = self.table._key(anchor)
            if (
                (self.stop is not None and key >= self.stop)
                if not self.reverse
                else (self.start is not None and key < self.start)
            ):
                self.runs = []
                break
            self.places[best] += -1 if self.reverse else 1
            entry = self.table._newest(anchor, self.max_seq)
            while entry:
                row: tuple = self.table._row(entry, key)
                rows.append(row)
                if row[2] != 0x08 or entry == anchor:
                    break
                entry = self.table._link(entry)
        return rows


@cython.cfunc
def _doubled(numbers: cython.ulonglong[::1]) -> array:
    """The same numbers with as much room again."""
    grown = array("Q", bytes(16 * len(numbers)))
    out: cython.ulonglong[::1] = grown
    index: cython.Py_ssize_t
    for index in range(len(numbers)):
        out[index] = numbers[index]
    return grown


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _address(chunk: cython.Py_ssize_t, at: cython.Py_ssize_t) -> cython.ulonglong:
    return (cython.cast(cython.ulonglong, chunk) << OFFSET_BITS) | cython.cast(cython.ulonglong, at)


@cython.cfunc
@cython.inline
@cython.exceptval(check=False)
def _hash(key: bytes) -> cython.ulonglong:
    """The interpreter's own hash: seeded against crafted keys, and remembered by the key object."""
    if not cython.compiled:
        return hash(key) & ANY_SEQ
    return cython.cast(cython.ulonglong, hash(key))
