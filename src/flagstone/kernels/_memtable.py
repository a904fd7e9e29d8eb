"""The memtable: recent rows in commit order, found by hash, and sorted when a scan or a flush needs order.

Rows are appended to chunks of memory that never move (`_entries` has the layout), so that a row which a reader found
stays valid while other threads write. Walking the chunks gives commit order, as the WAL needs it. The hash table and
the sorted runs name only anchors, the first entries of keys; links lead to the other versions.

Order is kept as in a log-structured tree: a scan or a flush sorts the anchors that are in no run yet into a new run,
and runs of similar size are merged (see `_key_runs`). Inserting compares no keys.

Writers must exclude each other. Readers need no lock, because every method runs under one: the interpreter's, or where
the kernel is interpreted the lock of `cython_stub`. Only sorting gives the interpreter's lock back for a while. It
reads nothing but rows that were complete before, and each of two threads that sort at once shows a complete order.

An exception may still be raised inside a method: `MemoryError` anywhere, Ctrl-C where the kernel is interpreted. A
garbage collection may also run other code in the middle of a method. Therefore what readers use (links, slots, sorted
runs) is complete before one assignment makes it visible. A write that an exception cuts off leaves `newest_seq` above
the sequence number that the caller counts as written; the caller then continues with `copy_through`.
"""

from __future__ import annotations

from array import array
from typing import Any

import cython
from cython.cimports.flagstone.kernels._bytes import (
    MASK64,
    MAX_KEY_BYTES,
    compare,
    copy,
    differ,
    get_u64,
    piece,
    prefetch,
)
from cython.cimports.flagstone.kernels._entries import (
    ANCHOR_FLAG,
    CHUNK_BYTES,
    address_of,
    chunk_of,
    compare_keys,
    entry_flags,
    entry_key,
    entry_link,
    entry_row,
    entry_seq,
    entry_size,
    flags_for,
    header_size,
    key_size,
    key_start,
    newest,
    offset_of,
    put_header,
    put_link,
    value_size,
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
)

from flagstone.kernels.regions import REGION_BYTES, SHARED

from ._key_runs import merged_run, next_run
from ._memtable_streams import sorted_stream, wal_stream

# The first chunk is small, because a process may have many memtables with few rows; each is twice as large as the one
# before, up to `CHUNK_BYTES`.
FIRST_CHUNK_BYTES = cython.declare(cython.Py_ssize_t, 1 << 14)
PREFETCHED = cython.declare(cython.Py_ssize_t, 192)
SMALL_CHUNKS = cython.declare(cython.Py_ssize_t, 4)
REGIONS_FROM = cython.declare(cython.Py_ssize_t, 1 << 20)  # from here on, chunks are cut from regions
# How many keys are sorted at a time: interpreted, other threads wait for so many.
SORT_STEP = cython.declare(cython.Py_ssize_t, 1 << 20 if cython.compiled else 1 << 14)
# Above the address of an anchor a slot of the hash table keeps the low bits of the hash. They avoid most comparisons
# with other keys, and the hash table grows without reading a single key.
ADDRESS_BITS = cython.declare(cython.int, 38)
ADDRESS_MASK = cython.declare(cython.ulonglong, (1 << 38) - 1)
TAG_MASK = cython.declare(cython.ulonglong, (1 << 26) - 1)


@cython.cclass
class Memtable:
    """Rows by key and sequence number. `bytes` is what they and their headers occupy."""

    chunks: list
    bases: cython.ulonglong[::1]
    ends: list
    spare: Any
    regions: list
    region_used: cython.Py_ssize_t
    chunk_used: cython.Py_ssize_t
    chunk_size: cython.Py_ssize_t
    slots: cython.ulonglong[::1]
    keys: cython.Py_ssize_t
    entries: cython.Py_ssize_t
    total_bytes: cython.Py_ssize_t
    header_bytes: cython.Py_ssize_t
    lookups: cython.Py_ssize_t
    largest_seq: cython.ulonglong
    order: tuple
    has_merges: cython.bint

    def __init__(self) -> None:
        self.chunks = []
        # Where the chunks are; interpreted, the chunks themselves.
        self.bases = array("Q", bytes(8 * 16)) if cython.compiled else self.chunks
        self.ends = []
        self.spare, self.regions, self.region_used = SHARED, [], REGION_BYTES
        self.chunk_used = self.chunk_size = 0
        self.slots = array("Q", bytes(8 * 256))
        self.keys = self.entries = self.total_bytes = self.header_bytes = self.lookups = 0
        self.largest_seq = 0
        # (sorted runs, chunk and offset up to which anchors are in them), replaced as a whole.
        self.order = ((), 0, 0)
        self.has_merges = False

    def __dealloc__(self) -> None:
        # No Python code runs here: an interrupt of it would be lost.
        if cython.compiled and self.regions is not None and self.chunks is not None:
            self.chunks.clear()
            while len(self.regions) and len(self.spare.free) < self.spare.limit:
                self.spare.free.append(self.regions.pop())

    def __len__(self) -> int:
        """The number of rows, every version counted."""
        return self.entries

    def size(self) -> int:
        """Bytes occupied by rows and their headers."""
        return self.total_bytes

    def headers(self) -> int:
        """How many of these bytes are headers."""
        return self.header_bytes

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
        # First of all: if anything is raised from here on, the sequence number shows that this row may be incomplete.
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

    def insert_columns(
        self,
        key_offsets: cython.const[cython.longlong][::1],
        keys: cython.const[cython.uchar][::1],
        value_offsets: cython.const[cython.longlong][::1],
        values: cython.const[cython.uchar][::1],
        kinds: cython.const[cython.uchar][::1],
        expires: cython.const[cython.longlong][::1],
        has_expires: cython.const[cython.uchar][::1],
        seq: cython.ulonglong,
        created: cython.longlong,
    ) -> cython.Py_ssize_t:
        """Add the rows of columns under `seq` and the numbers after it; returns as `insert` does.

        Row `i` is `data[offsets[i] : offsets[i + 1]]` of each column; the caller has checked the sizes. Empty `kinds`
        mean values only, empty `expires` rows without end, an empty `has_expires` an end of every row.

        As in a batch, the keys of one sequence number ascend. A key that is not above the key before it takes the next
        number. So a key that occurs twice gets two versions, and `newest_seq()` is the last number.
        """
        nothing: bytes = b"\0"
        key_data: cython.p_const_uchar = nothing
        value_data: cython.p_const_uchar = nothing
        count: cython.Py_ssize_t = len(key_offsets) - 1
        row: cython.Py_ssize_t
        at: cython.Py_ssize_t
        size: cython.Py_ssize_t
        before: cython.Py_ssize_t = 0
        before_size: cython.Py_ssize_t = 0
        value_bytes: cython.Py_ssize_t
        flags: cython.int
        ends: cython.longlong
        if seq <= self.largest_seq:
            return -1
        self.largest_seq = seq
        if cython.compiled:
            if len(keys):
                key_data = cython.address(keys[0])
            if len(values):
                value_data = cython.address(values[0])
        else:
            key_data = keys
            value_data = values
        for row in range(count):
            at = key_offsets[row]
            size = key_offsets[row + 1] - at
            if row and compare(key_data, before, before_size, key_data, at, size) >= 0:
                self.largest_seq = self.largest_seq + 1
            before = at
            before_size = size
            flags = CREATE_FLAG
            if len(kinds):
                flags |= kinds[row]
            value_bytes = value_offsets[row + 1] - value_offsets[row]
            ends = 0
            if flags & TOMBSTONE_KIND:
                value_bytes = 0
            elif len(expires) and (not len(has_expires) or has_expires[row]):
                flags |= EXPIRE_FLAG
                ends = expires[row]
            self._append(
                piece(key_data, at, at + size),
                self.largest_seq,
                flags,
                value_data,
                value_offsets[row],
                value_bytes,
                created,
                ends,
            )
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
        flags: cython.int = kind
        created_ms: cython.longlong = 0
        expires_ms: cython.longlong = 0
        if expires is not None:
            flags |= EXPIRE_FLAG
            expires_ms = expires
        if created is not None:
            flags |= CREATE_FLAG
            created_ms = created
        return self._append(key, seq, flags, value, 0, len(value), created_ms, expires_ms)

    @cython.cfunc
    @cython.inline
    @cython.exceptval(-1)
    def _append(
        self,
        key: bytes,
        seq: cython.ulonglong,
        flags: cython.int,
        value: cython.p_const_uchar,
        value_at: cython.Py_ssize_t,
        value_bytes: cython.Py_ssize_t,
        created: cython.longlong,
        expires: cython.longlong,
    ) -> cython.int:
        """Add the row of `key` and the given part of `value`."""
        all_flags: cython.int = flags_for(flags, seq, created, value_bytes)
        head: cython.Py_ssize_t = header_size(all_flags)
        size: cython.Py_ssize_t = head + len(key) + value_bytes
        out: cython.p_uchar
        at: cython.Py_ssize_t
        address: cython.ulonglong
        anchor: cython.ulonglong
        hashed: cython.ulonglong = _hash(key)
        slot: cython.ulonglong
        link: cython.ulonglong
        # All memory before the first change: there may be none.
        if self.chunk_used + size > self.chunk_size:
            self._new_chunk(size)
        if (self.keys + 1) * 4 > (len(self.slots) - 1) * 3:
            self._grow()
        at = self.chunk_used
        address = address_of(len(self.chunks) - 1, at)
        out = chunk_of(self.bases, address)
        if flags & MERGE_KIND:
            self.has_merges = True
        copy(out, at + head, key, 0, len(key))
        copy(out, at + head + len(key), value, value_at, value_bytes)
        slot = self._find(key, hashed)
        anchor = self.slots[slot] & ADDRESS_MASK
        # The row is complete; one assignment makes it the newest of its key.
        if anchor:
            link = self._link(anchor)
            if not link:
                link = anchor
            put_header(out, at, link, len(key), all_flags, seq, value_bytes, created, expires)
            put_link(chunk_of(self.bases, anchor), offset_of(anchor), address)
        else:
            all_flags |= ANCHOR_FLAG
            put_header(out, at, 0, len(key), all_flags, seq, value_bytes, created, expires)
            self.slots[slot] = ((hashed & TAG_MASK) << ADDRESS_BITS) | address
            self.keys += 1
        # The row counts only now: a reader that walks the chunks never meets half a row.
        self.chunk_used = at + size
        self.ends[len(self.chunks) - 1] = at + size
        self.entries += 1
        self.total_bytes += size
        self.header_bytes += head
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
        for chunk in range(len(self.chunks)):
            data = chunk_of(self.bases, address_of(chunk, 0))
            end = self.ends[chunk]
            at = 0
            while at < end:
                if entry_seq(data, at) > last_seq:
                    return twin
                row: tuple = entry_row(data, at, entry_key(data, at))
                twin._add(row[0], row[1], row[2], row[3], row[4], row[5])
                twin.largest_seq = row[1]
                at += entry_size(data, at)
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

    def insert_blocks(
        self, chunk: bytes, bounds: cython.const[cython.longlong][::1], after_seq: cython.ulonglong
    ) -> tuple:
        """Add the rows of data blocks above `after_seq`, in their order, under the numbers they have.

        `bounds` has begin and end of each block in the chunk. The caller has checked them with
        `block_reader.check_rows`, and no key is too long. Returns as `insert_rows` does.
        """
        data: cython.p_const_uchar = chunk
        block: cython.Py_ssize_t
        at: cython.Py_ssize_t
        stop: cython.Py_ssize_t
        end: cython.Py_ssize_t
        entry: Entry = new_entry()
        room: bytearray = bytearray(64)
        # The key before, whose first bytes the next key may share.
        key: cython.p_uchar = room
        key_bytes: cython.Py_ssize_t
        seq: cython.ulonglong
        created: cython.longlong
        largest: cython.ulonglong = 0
        latest: cython.longlong = 0
        any_created: cython.bint = False
        for block in range(len(bounds) // 2):
            at = bounds[2 * block]
            stop = bounds[2 * block + 1]
            key_bytes = 0
            end = -1
            if at >= 0 and stop <= len(chunk):
                end = entries_end(data, at, stop)
            if end < 0:
                raise ValueError("a block that was not checked")
            while at < end:
                if (
                    read_lengths(data, at, end, cython.address(entry))
                    or read_flags(data, end, cython.address(entry))
                    or entry.shared > key_bytes
                    or entry.shared + entry.unshared > MAX_KEY_BYTES
                ):
                    raise ValueError("a block that was not checked, or a key that is too long")
                key_bytes = entry.shared + entry.unshared
                if key_bytes > len(room):
                    room.extend(bytes(key_bytes))
                    key = room
                copy(key, entry.shared, data, entry.suffix_at, entry.unshared)
                at = entry.stop
                seq = get_u64(data, entry.tail_at)
                if seq <= after_seq:
                    continue
                created = created_at(data, cython.address(entry))
                self._append(
                    piece(key, 0, key_bytes),
                    seq,
                    entry.flags,
                    data,
                    entry.value_at,
                    entry.value_size,
                    created,
                    expires_at(data, cython.address(entry)),
                )
                if seq > largest:
                    largest = seq
                if seq > self.largest_seq:
                    self.largest_seq = seq
                if entry.flags & CREATE_FLAG and (not any_created or created > latest):
                    latest = created
                    any_created = True
        return largest, latest if any_created else None

    def get(self, key: bytes, max_seq: cython.ulonglong) -> object:
        """The newest row of `key` with seq <= `max_seq` as an entry tuple, or None."""
        entry: cython.ulonglong = newest(
            self.bases, self.slots[self._find(key, _hash(key))] & ADDRESS_MASK, max_seq
        )
        return self._row(entry, key) if entry else None

    def get_value(self, key: bytes, max_seq: cython.ulonglong) -> object:
        """The value of `key` where that is simple, as `bytes`; None when there is no row.

        A row that needs thought (a tombstone, an operand, a value that expires) comes as its entry tuple.
        """
        entry: cython.ulonglong = newest(
            self.bases, self.slots[self._find(key, _hash(key))] & ADDRESS_MASK, max_seq
        )
        data: cython.p_const_uchar
        at: cython.Py_ssize_t
        self.lookups += 1
        if entry == 0:
            return None
        data = chunk_of(self.bases, entry)
        at = offset_of(entry)
        if entry_flags(data, at) & 0x0B:
            return entry_row(data, at, key)
        value_at: cython.Py_ssize_t = key_start(data, at) + len(key)
        return piece(data, value_at, value_at + value_size(data, at))

    def versions(self, key: bytes, max_seq: cython.ulonglong) -> list:
        """Every row of `key` with seq <= `max_seq`, newest first."""
        found: list = []
        anchor: cython.ulonglong = self.slots[self._find(key, _hash(key))] & ADDRESS_MASK
        entry: cython.ulonglong = newest(self.bases, anchor, max_seq)
        while entry:
            found.append(self._row(entry, key))
            entry = 0 if entry == anchor else self._link(entry)
        return found

    def sort_some(self) -> bool:
        """Bring more keys in order; False when all are. Compiled, other threads run meanwhile."""
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
            runs = (*runs[: len(runs) - 2], merged_run(self.bases, runs[len(runs) - 2], runs[len(runs) - 1]))
            self.order = (runs, order[1], order[2])
        return runs[0] if runs else (array("Q"), array("Q"), 0)

    def scan(self, start: bytes | None, stop: bytes | None, max_seq: int, reverse: bool) -> MemtableScan:
        """A cursor over the keys in [start, stop) as they are now; rows added later are not seen."""
        return MemtableScan(self, start, stop, max_seq, reverse)

    def versions_at(self, run: tuple, index: int) -> list:
        """All rows of the `index`-th key of a sorted run, newest first."""
        anchor: cython.ulonglong = run[0][index]
        return self.versions(self._key(anchor), MASK64)

    def sorted_stream(self, run: tuple, start: int, stream: bytearray, min_seq: int, now_ms: int) -> tuple:
        """Fill `stream` with rows in key order, for a flush: see `_memtable_streams.sorted_stream`."""
        return sorted_stream(self.bases, run[0], start, stream, min_seq, now_ms)

    def position(self) -> tuple:
        """The end of the rows so far, for `wal_stream`."""
        if len(self.chunks) == 0:
            return (0, 0)
        return (len(self.chunks) - 1, self.chunk_used)

    def wal_stream(self, position: tuple, end: tuple, stream: bytearray) -> tuple:
        """Fill `stream` with rows in commit order, for a WAL file: see `_memtable_streams.wal_stream`."""
        return wal_stream(self.bases, self.ends, position, end, stream)

    @cython.cfunc
    @cython.exceptval(-1)
    def _new_chunk(self, size: cython.Py_ssize_t) -> cython.int:
        room: cython.Py_ssize_t = CHUNK_BYTES
        if len(self.chunks) < SMALL_CHUNKS:
            room = FIRST_CHUNK_BYTES << len(self.chunks)
        room = max(room, size)
        if room == CHUNK_BYTES and self.total_bytes >= REGIONS_FROM:
            if self.region_used == REGION_BYTES:
                self.regions.append(self.spare.take())
                self.region_used = 0
            end: cython.Py_ssize_t = self.region_used + room
            chunk: object = memoryview(self.regions[len(self.regions) - 1])[self.region_used : end]
            self.region_used = end
        else:
            chunk = bytearray(room)
        if cython.compiled:
            if len(self.chunks) == len(self.bases):
                self.bases = _doubled(self.bases)
            memory: cython.uchar[::1] = chunk
            self.bases[len(self.chunks)] = cython.cast(cython.ulonglong, cython.address(memory[0]))
        # The end before the chunk: a reader that walks the chunks looks up the end of each.
        self.ends.append(0)
        self.chunks.append(chunk)
        self.chunk_used = 0
        self.chunk_size = room
        return 0

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
                data = chunk_of(self.bases, held & ADDRESS_MASK)
                at = offset_of(held)
                # All of a short row at once, not its value after its key.
                prefetch(data, at, PREFETCHED)
                if key_size(data, at) == size and differ(data, key_start(data, at), wanted, 0, size) == 0:
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
        return entry_link(chunk_of(self.bases, entry), offset_of(entry))

    @cython.cfunc
    def _key(self, entry: cython.ulonglong) -> bytes:
        return entry_key(chunk_of(self.bases, entry), offset_of(entry))

    @cython.cfunc
    def _row(self, entry: cython.ulonglong, key: bytes) -> tuple:
        return entry_row(chunk_of(self.bases, entry), offset_of(entry), key)

    @cython.cfunc
    @cython.exceptval(-1)
    def _sort_step(self) -> cython.int:
        """Sort the next anchors into a run, merge runs of similar size; 0 when none is left."""
        order: tuple = self.order
        runs: list = list(order[0])
        # A name of its own: other threads may write, and enlarge it, while the kernel sorts.
        bases: cython.ulonglong[::1] = self.bases
        rest: cython.Py_ssize_t = self.keys
        for run in runs:
            rest -= len(run[0])
        chunk, at = order[1], order[2]
        added: tuple | None = None
        if rest > 0:
            ends: cython.longlong[::1] = array("q", self.ends[: len(self.chunks)])
            added, chunk, at = next_run(bases, ends, chunk, at, min(rest, SORT_STEP))
        if added is not None:
            runs.append(added)
        while len(runs) > 1 and len(runs[len(runs) - 2][0]) <= 2 * len(runs[len(runs) - 1][0]):
            newer: tuple = runs.pop()
            runs.append(merged_run(bases, runs.pop(), newer))
        # Sorted aside and shown at once: code that a garbage collection runs in between still finds every row.
        self.order = (tuple(runs), chunk, at)
        return added is not None

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
                        order = compare_keys(self.table.bases, found, anchor)
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
            entry = newest(self.table.bases, anchor, self.max_seq)
            while entry:
                row: tuple = self.table._row(entry, key)
                rows.append(row)
                if row[2] != MERGE_KIND or entry == anchor:
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
def _hash(key: bytes) -> cython.ulonglong:
    """The interpreter's own hash: seeded against crafted keys, and remembered by the key object."""
    if not cython.compiled:
        return hash(key) & MASK64
    return cython.cast(cython.ulonglong, hash(key))
