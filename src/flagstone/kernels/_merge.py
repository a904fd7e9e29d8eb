"""Merges sorted sources into one stream of the rows that stay: the first half of compaction's inner loop.

A source is a run of raw blocks, fed chunk by chunk. The merger finds the smallest (key, then newest) row of all sources
with a tournament of losers, applies the retention rules, and appends the row to a stream, which `_block_writer` cuts
into blocks. `_rows` has the layout of blocks and streams.

The merger needs neither Python objects nor the interpreter's lock, so that several mergers run at once and foreground
threads do not wait. Two kinds of rows need Python: operands that must be folded, and tombstones that may be the oldest
row of their key in the last run. They come out as entry tuples, together with the older versions of their keys. With
`by_rows` every row that no snapshot needs on its own goes to Python, too.

Blocks of a source that end before the next row of every other source are offered as a whole, without reading their
rows: `_whole_blocks` decides whether they may stay as they are.

Everything read from a block is bounds-checked first. The stream is plain C memory, because only that can grow without
the lock; interpreted, it is a byte array.
"""

from __future__ import annotations

from array import array

import cython
from cython.cimports.cpython.buffer import PyBUF_READ
from cython.cimports.cpython.memoryview import PyMemoryView_FromMemory
from cython.cimports.flagstone.kernels._bytes import (
    MASK64,
    MAX_KEY_BYTES,
    common_prefix,
    compare,
    copy,
    get_u64,
    piece,
    prefetch,
    put_little,
)
from cython.cimports.flagstone.kernels._memory import Buffer, free_buffer, grow_buffer, new_buffer
from cython.cimports.flagstone.kernels._merge_source import KEY_ROOM, Source, head_of
from cython.cimports.flagstone.kernels._rows import (
    CREATE_FLAG,
    EXPIRE_FLAG,
    FLAGS_UNKNOWN,
    KIND_MASK,
    MERGE_KIND,
    TOMBSTONE_KIND,
    Entry,
    entries_end,
    expires_at,
    new_entry,
    read_first,
    read_flags,
    read_lengths,
    row_of,
)
from cython.cimports.libc.stdlib import calloc, free, malloc

from flagstone.errors import CorruptData
from flagstone.kernels.damage import MERGE_PROBLEMS

# A run of blocks with fewer bytes is merged, because an offer costs as much as merging several blocks.
SHORTEST_RUN = cython.declare(cython.Py_ssize_t, 1 << 16)
# After refused offers, the most blocks for which a source offers none: a refused one costs as much as a few rows.
LONGEST_PAUSE = cython.declare(cython.Py_ssize_t, 64)

# How many rows Python gets at once: as soon as a key is complete, and at the latest.
SOFT_ROWS = cython.declare(cython.Py_ssize_t, 512)
HARD_ROWS = cython.declare(cython.Py_ssize_t, 4096)

# What `run` answers. The caller looks at it once per chunk, so these are ordinary constants.
DONE = 0
NEED = 1
FULL = 2
ROWS = 3
BLOCKS = 4

# The same for C, and what else may happen in the loop.
_DONE = cython.declare(cython.int, 0)
_NEED = cython.declare(cython.int, 1)
_FULL = cython.declare(cython.int, 2)
_ROWS = cython.declare(cython.int, 3)
_BLOCKS = cython.declare(cython.int, 4)
_FAILED = cython.declare(cython.int, 5)

# Positions in `damage.MERGE_PROBLEMS`.
_BAD_BLOCK = cython.declare(cython.int, 1)
_BAD_LENGTH = cython.declare(cython.int, 2)
_BAD_KEY = cython.declare(cython.int, 3)
_BAD_END = cython.declare(cython.int, 4)
_BAD_FLAGS = cython.declare(cython.int, 5)
_BAD_TOMBSTONE = cython.declare(cython.int, 6)
_LONG_KEY = cython.declare(cython.int, 7)
_NO_MEMORY = cython.declare(cython.int, 8)


@cython.cclass
class Merger:
    """Merges `sources` sources, numbered from new to old. Used by one thread at a time.

    Feed every source, then call `run` until it answers `DONE`:

    * `NEED`: source `waiting` has no rows left; `feed` it more, or `end` it.
    * `FULL`: the stream has grown to `soft_limit`; `take` it.
    * `ROWS`: `rows` has rows for Python, which belong behind what `take` gives.
    * `BLOCKS`: `offered` has whole blocks, which belong there, too; answer with `passed`.

    `min_seq`, `clock_ms` and `keep_tombstones` are those of `lsm.retention.RetentionPolicy`. All keys have their
    first `common` bytes in common, or a few more.
    """

    count: cython.Py_ssize_t
    common: cython.Py_ssize_t
    soft_limit: cython.Py_ssize_t
    min_seq: cython.ulonglong
    clock_ms: cython.longlong
    keep_tombstones: cython.bint
    has_operator: cython.bint
    by_rows: cython.bint
    sources: cython.pointer(Source)
    # What keeps the memory alive that the sources point to.
    held: list
    # The tournament: the source whose row is next, and whether that row is used up.
    built: cython.bint
    winner: cython.pointer(Source)
    consumed: cython.bint
    waiting_for: cython.Py_ssize_t
    # The key whose versions are being read. Its bytes follow those of the sources in `keys`.
    keys: cython.p_uchar
    group_key: cython.p_uchar
    group_size: cython.Py_ssize_t
    group_seq: cython.ulonglong
    group_begun: cython.bint
    group_closed: cython.bint
    collecting: cython.bint
    collected: list
    offered_blocks: cython.Py_ssize_t
    out: Buffer
    error: cython.int
    error_source: cython.Py_ssize_t
    error_at: cython.Py_ssize_t
    purged: cython.longlong

    def __init__(
        self,
        sources: int,
        *,
        min_seq: int,
        clock_ms: int,
        keep_tombstones: bool,
        has_operator: bool,
        by_rows: bool = False,
        common: int = 0,
        soft_limit: int = 1 << 18,
    ) -> None:
        total: cython.Py_ssize_t = sources
        number: cython.Py_ssize_t
        if sources < 1:
            raise ValueError("a merge needs a source")
        self.count = total
        self.common = common
        self.soft_limit = soft_limit
        self.min_seq = min_seq
        self.clock_ms = clock_ms
        self.keep_tombstones = keep_tombstones
        self.has_operator = has_operator
        self.by_rows = by_rows
        self.held = [None] * total
        self.collected = []
        self.out = new_buffer(2 * soft_limit + 256)
        self.built = self.consumed = self.group_begun = self.group_closed = self.collecting = False
        self.waiting_for = self.group_size = self.error_source = self.error_at = self.offered_blocks = 0
        self.group_seq = self.error = self.purged = 0
        if not cython.compiled:
            self.sources = [Source(number) for number in range(total)]
            self.group_key = bytearray(KEY_ROOM)
            return
        self.sources = cython.cast(cython.pointer(Source), calloc(total, cython.sizeof(Source)))
        self.keys = cython.cast(cython.p_uchar, malloc((total + 1) * KEY_ROOM))
        if not (self.sources and self.keys and self.out.data):
            raise MemoryError
        for number in range(total):
            self.sources[number].number = number
            self.sources[number].key = self.keys + number * KEY_ROOM
        self.group_key = self.keys + total * KEY_ROOM

    def __dealloc__(self) -> None:
        if cython.compiled:
            free(self.sources)
            free(self.keys)
            free_buffer(cython.address(self.out))

    def feed(
        self,
        source: int,
        chunk: bytes | memoryview,
        bounds: array,
        low: bytes | None,
        high: bytes | None,
        sealed: bool = False,
    ) -> None:
        """Give a source its next raw blocks: `bounds` has begin and end of each in the chunk.

        The source passes over rows with keys below `low`, or at or above `high`. Only `sealed` blocks are offered. The
        memory of the chunk before is no longer used, and that of this one must not change until the next call.
        """
        number: cython.Py_ssize_t = source
        index: cython.Py_ssize_t
        pairs: cython.longlong[::1] = bounds
        data: cython.const[cython.uchar][::1] = chunk
        fed: cython.pointer(Source)
        if not 0 <= number < self.count or len(bounds) == 0:
            raise ValueError("no such source, or no block for it")
        for index in range(0, len(bounds), 2):
            if not 0 <= pairs[index] <= pairs[index + 1] <= len(data):
                raise ValueError("a block lies outside its chunk")
        self.held[number] = (memoryview(chunk), bounds, low, high)  # a view: memory stays at its place
        fed = cython.address(self.sources[number])
        if cython.compiled:
            fed.data = cython.address(data[0]) if len(data) else cython.NULL
            fed.bounds = cython.address(pairs[0])
        else:
            fed.data = data
            fed.bounds = bounds
        fed.low_size = 0
        fed.high_size = -1
        if low is not None:
            fed.low = low
            fed.low_size = len(low)
        if high is not None:
            fed.high = high
            fed.high_size = len(high)
        fed.blocks = len(bounds) // 2
        fed.sealed = sealed and not self.by_rows
        # It stands on no row, even if it did on one beyond the end of the last chunk.
        fed.block = fed.at = fed.stop = fed.key_size = 0

    def end(self, source: int) -> None:
        """The source `waiting` named has no more rows."""
        number: cython.Py_ssize_t = source
        self.held[number] = None
        self.sources[number].key_size = -1
        self.sources[number].head = MASK64
        if self.built:
            self.consumed = False
            self._replay(cython.address(self.sources[number]))

    def waiting(self) -> int:
        """The source that needs to be fed."""
        return self.waiting_for

    def rows(self) -> list:
        """Entry tuples for Python: the versions of one or more keys, from the first that the loop cannot judge on."""
        rows: list = self.collected
        self.collected = []
        return rows

    def offered(self) -> tuple:
        """A source, and its first and last + 1 block, by their numbers in its chunk. Another block follows them."""
        first: cython.Py_ssize_t = self.winner.block - 1
        return self.winner.number, first, first + self.offered_blocks

    def passed(self, blocks: int) -> None:
        """The first `blocks` of those offered are in the output: go on behind them.

        The last key in them must be below the first one of the next block.
        """
        source: cython.pointer(Source) = self.winner
        count: cython.Py_ssize_t = blocks
        if not 0 <= count <= self.offered_blocks:
            raise ValueError("more blocks than were offered")
        self.offered_blocks = 0
        if count:
            source.next_pause = 0
            source.block += count - 1
            source.at = source.stop
            self.consumed = True
        else:
            source.next_pause = min(2 * source.next_pause + 1, LONGEST_PAUSE)
            source.pause = source.next_pause

    def unfinished(self) -> bool:
        """Whether older versions of the last key in `rows` are still to come, as the first of the next `rows`."""
        return self.collecting

    def run(self) -> int:
        """Go on until something is needed. Raises `CorruptData` about a block: see `failed_at`."""
        code: cython.int = _ROWS
        if not self.collecting:
            with cython.nogil:
                code = self._run()
            self.collecting = code == _ROWS
        if self.collecting:
            code = self._collect()
        if code == _FAILED:
            if self.error == _NO_MEMORY:
                raise MemoryError
            raise CorruptData(MERGE_PROBLEMS[self.error], offset=self.error_at)
        return code

    def take(self) -> memoryview | bytes:
        """The stream since the last call, valid until the next `run`."""
        size: cython.Py_ssize_t = self.out.used
        self.out.used = 0
        if cython.compiled:
            return PyMemoryView_FromMemory(cython.cast(cython.p_char, self.out.data), size, PyBUF_READ)
        return bytes(self.out.data[:size])

    def failed_at(self) -> tuple:
        """The source whose block raised `CorruptData`, and the block's number in its last chunk."""
        return self.error_source, self.sources[self.error_source].block - 1

    def expired(self) -> int:
        """How many of the rows that did not go to Python had expired."""
        return self.purged

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _fail(self, error: cython.int, source: cython.pointer(Source), at: cython.Py_ssize_t) -> cython.int:
        self.error = error
        self.error_source = source.number
        self.error_at = at - source.begin
        return _FAILED

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _advance(self, source: cython.pointer(Source)) -> cython.int:
        """Move a source to its next row: 0, `_NEED` or `_FAILED`."""
        data: cython.p_const_uchar = source.data
        # Not the source's own: as far as the C compiler knows, copying the key might change that.
        entry: Entry = new_entry()
        at: cython.Py_ssize_t
        stop: cython.Py_ssize_t
        key_size: cython.Py_ssize_t
        problem: cython.int
        while True:
            at = source.at
            if at >= source.stop:
                if source.block >= source.blocks:
                    return _NEED
                at = source.bounds[2 * source.block]
                stop = source.bounds[2 * source.block + 1]
                source.block += 1
                source.begin = source.at = at
                source.shareable = 0
                if source.block < source.blocks:
                    # The end of the next block is read first. By then it is in the processor's cache.
                    prefetch(data, source.bounds[2 * source.block + 1] - 2, 1)
                source.stop = entries_end(data, at, stop)
                if source.stop < 0:
                    return self._fail(_BAD_BLOCK, source, at if stop - at < 2 else stop - 2)
                continue
            if read_lengths(data, at, source.stop, cython.address(entry)):
                return self._fail(_BAD_LENGTH, source, at)
            key_size = entry.shared + entry.unshared
            if entry.shared > source.shareable or key_size == 0:
                return self._fail(_BAD_KEY, source, at)
            if key_size > MAX_KEY_BYTES:
                return self._fail(_LONG_KEY, source, at)
            problem = read_flags(data, source.stop, cython.address(entry))
            if problem:
                return self._fail(_BAD_FLAGS if problem == FLAGS_UNKNOWN else _BAD_END, source, at)
            if entry.flags & TOMBSTONE_KIND and entry.value_size:
                return self._fail(_BAD_TOMBSTONE, source, at)
            copy(source.key, entry.shared, data, entry.suffix_at, entry.unshared)
            source.first_row = source.shareable == 0
            source.shareable = source.key_size = key_size
            source.entry = entry
            source.seq = get_u64(data, entry.tail_at)
            source.at = entry.stop
            # While other sources take their turns, both ends of the next row arrive, if it is as long as this one.
            prefetch(data, entry.stop, 1)
            prefetch(data, 2 * entry.stop - at - 16, 1)
            if entry.shared < self.common + 8:
                source.head = head_of(source, self.common)
            if source.low_size > 0:
                if compare(source.key, 0, key_size, source.low, 0, source.low_size) < 0:
                    continue
                # In range as soon as one key is: they ascend.
                source.low_size = 0
            if (
                source.high_size >= 0
                and compare(source.key, 0, key_size, source.high, 0, source.high_size) >= 0
            ):
                source.at = source.stop
                source.block = source.blocks
                return _NEED
            return 0

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _before(self, one: cython.pointer(Source), two: cython.pointer(Source)) -> cython.bint:
        """Whether the row of source `one` comes before that of `two`."""
        order: cython.int
        if one.head != two.head:
            return one.head < two.head
        if one.key_size < 0 or two.key_size < 0:
            return two.key_size < 0
        order = compare(one.key, 0, one.key_size, two.key, 0, two.key_size)
        if order:
            return order < 0
        return one.seq > two.seq or (one.seq == two.seq and one.number < two.number)

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _replay(self, source: cython.pointer(Source)) -> cython.void:
        """Let a source whose row changed play its way up again."""
        current: cython.pointer(Source) = source
        other: cython.pointer(Source)
        node: cython.Py_ssize_t = (source.number + self.count) >> 1
        while node > 0:
            other = self.sources[node].loser
            if self._before(other, current):
                self.sources[node].loser = current
                current = other
            node >>= 1
        self.winner = current

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _build(self) -> cython.int:
        """The first row of each source, then the first tournament: 0, `_NEED` or `_FAILED`."""
        number: cython.Py_ssize_t
        current: cython.pointer(Source)
        other: cython.pointer(Source)
        node: cython.Py_ssize_t
        code: cython.int
        for number in range(self.count):
            if self.sources[number].key_size == 0:
                code = self._advance(cython.address(self.sources[number]))
                if code:
                    self.waiting_for = number
                    return code
        for number in range(self.count):
            self.sources[number].loser = cython.NULL
        for number in range(self.count):
            current = cython.address(self.sources[number])
            node = (number + self.count) >> 1
            while node > 0 and current:
                other = self.sources[node].loser
                if not other or self._before(other, current):
                    self.sources[node].loser = current
                    current = other
                node >>= 1
            if current:
                self.winner = current
        self.built = True
        return 0

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _step(self) -> cython.int:
        """Find the next row, `winner`, once the one before is consumed: 0, `_NEED`, `_FAILED`."""
        code: cython.int
        if self.consumed:
            code = self._advance(self.winner)
            if code:
                self.waiting_for = self.winner.number
                return code
            self.consumed = False
            self._replay(self.winner)
        return 0

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _same_key(self, source: cython.pointer(Source)) -> cython.bint:
        """Whether the source stands on another version of the key whose versions are being read."""
        size: cython.Py_ssize_t = source.key_size
        return size == self.group_size and common_prefix(source.key, 0, self.group_key, 0, size) == size

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _begin_key(self, source: cython.pointer(Source)) -> cython.void:
        self.group_size = source.key_size
        copy(self.group_key, 0, source.key, 0, source.key_size)
        self.group_begun = self.group_closed = False

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _end_row(self, source: cython.pointer(Source)) -> cython.void:
        """Note that the row was used; below a row that is no operand, and that all snapshots see, none is needed."""
        self.group_seq = source.seq
        self.group_begun = True
        self.group_closed = not source.entry.flags & MERGE_KIND and source.seq <= self.min_seq
        self.consumed = True

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _repeated(self, source: cython.pointer(Source)) -> cython.bint:
        """Whether no reader needs the row: it is too old, or the same row came from another source."""
        return self.group_closed or (self.group_begun and source.seq == self.group_seq)

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _for_python(self, source: cython.pointer(Source)) -> cython.bint:
        """Whether Python must get the row: to filter it, to fold it, or to raise that there is no operator."""
        if source.seq <= self.min_seq:
            return self.by_rows or source.entry.flags & MERGE_KIND != 0
        return not self.has_operator and source.entry.flags & MERGE_KIND != 0

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _offers(self, source: cython.pointer(Source)) -> cython.bint:
        """Whether blocks from the one on whose first row the source stands end before the rows of all other sources."""
        # No key of a block is above the first one of the next.
        following: cython.Py_ssize_t = source.block
        entry: Entry = new_entry()
        node: cython.Py_ssize_t = (source.number + self.count) >> 1
        rival: cython.pointer(Source) = cython.NULL
        if source.pause > 0:
            source.pause -= 1
            return False
        while node > 0:
            if not rival or self._before(self.sources[node].loser, rival):
                rival = self.sources[node].loser
            node >>= 1
        while following < source.blocks and read_first(
            source.data, source.bounds[2 * following], source.bounds[2 * following + 1], cython.address(entry)
        ):
            if (
                rival
                and rival.key_size > 0
                and compare(source.data, entry.suffix_at, entry.unshared, rival.key, 0, rival.key_size) > 0
            ):
                break
            if (
                source.high_size >= 0
                and compare(source.data, entry.suffix_at, entry.unshared, source.high, 0, source.high_size)
                > 0
            ):
                break
            following += 1
        self.offered_blocks = following - source.block
        if self.offered_blocks and source.bounds[2 * following - 1] - source.begin >= SHORTEST_RUN:
            return True
        # The rows that ended this run end it also for the blocks in it.
        source.pause = self.offered_blocks
        return False

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _run(self) -> cython.int:
        source: cython.pointer(Source)
        code: cython.int
        kind: cython.int
        expired: cython.bint
        if not self.built:
            code = self._build()
            if code:
                return code
        while True:
            code = self._step()
            if code:
                return code
            source = self.winner
            if source.key_size < 0:
                return _DONE
            if self.out.used >= self.soft_limit:
                return _FULL
            if not self._same_key(source):
                if source.first_row and source.sealed and self._offers(source):
                    return _BLOCKS
                self._begin_key(source)
            elif self._repeated(source):
                self.consumed = True
                continue
            if self._for_python(source):
                return _ROWS
            kind = source.entry.flags & KIND_MASK
            expired = (
                source.entry.flags & EXPIRE_FLAG != 0
                and expires_at(source.data, cython.address(source.entry)) <= self.clock_ms
            )
            if not self.keep_tombstones and (expired or kind == TOMBSTONE_KIND) and kind != MERGE_KIND:
                # Older rows decide whether it is the oldest row that stays. If none can stay, it has no purpose.
                if source.seq > self.min_seq:
                    return _ROWS
            elif not expired:
                code = self._append(source)
            elif kind != MERGE_KIND:
                code = self._append_tombstone(source)
            if code:
                return code
            self.purged += expired
            self._end_row(source)

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _begin_row(self, source: cython.pointer(Source), value_size: cython.Py_ssize_t) -> cython.int:
        """Append sizes and key, with room for the rest behind them: 0 or `_FAILED`."""
        at: cython.Py_ssize_t = self.out.used
        room: cython.Py_ssize_t = self.out.room
        out: cython.p_uchar
        while room < at + source.key_size + value_size + 32:
            room *= 2
        if room != self.out.room and not grow_buffer(cython.address(self.out), room):
            return self._fail(_NO_MEMORY, source, 0)
        # A local name: as far as the C compiler knows, a byte written through `data` might change `self`.
        out = self.out.data
        put_little(out, at, source.key_size, 2)
        put_little(out, at + 2, value_size, 4)
        copy(out, at + 6, source.key, 0, source.key_size)
        self.out.used = at + 6 + source.key_size
        return 0

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _append(self, source: cython.pointer(Source)) -> cython.int:
        """Append the row as it is: value and tail stand side by side already."""
        size: cython.Py_ssize_t = source.at - source.entry.value_at
        if self._begin_row(source, source.entry.tail_at - source.entry.value_at):
            return _FAILED
        copy(self.out.data, self.out.used, source.data, source.entry.value_at, size)
        self.out.used += size
        return 0

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _append_tombstone(self, source: cython.pointer(Source)) -> cython.int:
        """Append a tombstone for an expired row: an older version that lives longer may lie below."""
        if self._begin_row(source, 0):
            return _FAILED
        copy(self.out.data, self.out.used, source.data, source.entry.tail_at, 8)
        self.out.data[self.out.used + 8] = TOMBSTONE_KIND | (source.entry.flags & CREATE_FLAG)
        self.out.used += 9
        if source.entry.flags & CREATE_FLAG:
            copy(self.out.data, self.out.used, source.data, source.entry.tail_at + 17, 8)
            self.out.used += 8
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def _collect(self) -> cython.int:
        """Take rows out for Python: all that decide about the keys at hand, while the keys need Python."""
        code: cython.int
        source: cython.pointer(Source)
        while True:
            code = self._step()
            if code:
                return code
            source = self.winner
            if source.key_size < 0:
                break
            if len(self.collected) >= HARD_ROWS:
                return _ROWS
            if not self._same_key(source):
                if len(self.collected) >= SOFT_ROWS or not self._for_python(source):
                    break
                self._begin_key(source)
            elif self._repeated(source):
                self.consumed = True
                continue
            self.collected.append(
                row_of(source.data, cython.address(source.entry), piece(source.key, 0, source.key_size))
            )
            self._end_row(source)
        self.collecting = False
        return _ROWS
