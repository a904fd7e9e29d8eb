"""Merges sorted sources into one stream of the rows that stay: the first half of compaction's inner loop.

A source is a run of raw blocks of format version 2, fed chunk by chunk. The smallest (key, then newest) row of all
sources is found with a tournament of losers, judged by the retention rules, and appended to the stream that
`_row_writer` makes blocks of:

    row = key_size(u16 LE) value_size(u32 LE) key value tail     tail = seq(u64 BE) flags(u8) [expire_ms] [create_ms]

All of that happens without Python objects and without the interpreter's lock, so that several mergers run at once
and nobody in the foreground waits for them. Two kinds of rows need Python: operands that must be folded, and
deletions that may turn out to be the oldest row of their key in the last run. Those come out as entry tuples,
together with the older versions of their keys. With `by_rows` all others go there, too, that no snapshot needs apart.

Everything read from a block is bounds-checked first. The stream is plain C memory, because only that can be
enlarged without the lock; interpreted, it is a byte array.

Written in Cython's pure-Python mode; see `_block_writer` for how that works.
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
    get_i64,
    get_u64,
    put_little,
)
from cython.cimports.flagstone.kernels._rows import (
    CREATE_FLAG,
    EXPIRE_FLAG,
    FLAGS_UNKNOWN,
    KIND_MASK,
    MERGE_KIND,
    TOMBSTONE_KIND,
    Entry,
    entries_end,
    new_entry,
    read_flags,
    read_lengths,
)
from cython.cimports.libc.stdlib import calloc, free, malloc, realloc

from flagstone.errors import CorruptData

# Room for one key. Not a power of two, or the keys of all sources would compete for the same cache lines.
STRIDE = cython.declare(cython.Py_ssize_t, 65_536 + 192)
# How many rows Python gets at once: as soon as a key is complete, and at the latest.
SOFT_ROWS = cython.declare(cython.Py_ssize_t, 512)
HARD_ROWS = cython.declare(cython.Py_ssize_t, 4096)

# What `run` answers. The caller looks at it once per chunk, so these are ordinary constants.
DONE = 0
NEED = 1
FULL = 2
ROWS = 3

# The same for C, and what else may happen in the loop.
_DONE = cython.declare(cython.int, 0)
_NEED = cython.declare(cython.int, 1)
_FULL = cython.declare(cython.int, 2)
_ROWS = cython.declare(cython.int, 3)
_FAILED = cython.declare(cython.int, 4)

_PROBLEMS = (
    "",
    "a block is too short for its restart points",
    "a length runs past the entries of the block or does not fit into 32 bits",
    "a key is empty or shares more bytes with the key before than that has",
    "a row runs past the entries of the block",
    "row flags are not a known combination",
    "a tombstone carries a value",
    "a key of more than 65,535 bytes, which SlateDB writes and this engine only reads: let SlateDB compact it",
)
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

    `min_seq`, `clock_ms` and `keep_tombstones` are those of `lsm.retention.RetentionPolicy`. All keys have their
    first `common` bytes in common, or a few more.
    """

    sources: cython.Py_ssize_t
    common: cython.Py_ssize_t
    soft_limit: cython.Py_ssize_t
    min_seq: cython.ulonglong
    clock_ms: cython.longlong
    keep_tombstones: cython.bint
    has_operator: cython.bint
    by_rows: cython.bint
    # Per source: where it stands in which chunk, and the row it stands on.
    held: list
    slab: cython.p_longlong
    data: cython.pp_uchar
    bounds: cython.pp_longlong
    lows: cython.pp_uchar
    highs: cython.pp_uchar
    low_sizes: cython.p_longlong
    high_sizes: cython.p_longlong
    block: cython.p_longlong
    blocks: cython.p_longlong
    begin: cython.p_longlong
    at: cython.p_longlong
    stop: cython.p_longlong
    shareable: cython.p_longlong
    key_sizes: cython.p_longlong
    value_at: cython.p_longlong
    value_sizes: cython.p_longlong
    flags: cython.p_longlong
    losers: cython.p_longlong
    seqs: cython.p_ulonglong
    heads: cython.p_ulonglong
    keys: cython.p_uchar
    # The tournament: who leads, and whether that row is used up.
    built: cython.bint
    winner: cython.Py_ssize_t
    consumed: cython.bint
    waiting_for: cython.Py_ssize_t
    # The key whose versions pass by; its bytes follow those of the sources in `keys`.
    group_size: cython.Py_ssize_t
    group_seq: cython.ulonglong
    group_begun: cython.bint
    group_closed: cython.bint
    collecting: cython.bint
    collected: list
    out: cython.p_uchar
    used: cython.Py_ssize_t
    room: cython.Py_ssize_t
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
        if sources < 1:
            raise ValueError("a merge needs a source")
        self.sources = total
        self.common = common
        self.soft_limit = soft_limit
        self.min_seq = min_seq
        self.clock_ms = clock_ms
        self.keep_tombstones = keep_tombstones
        self.has_operator = has_operator
        self.by_rows = by_rows
        self.held = [None] * total
        self.collected = []
        self.room = 2 * soft_limit + 256
        if not cython.compiled:
            self._lay_out(total)
            return
        self.slab = cython.cast(cython.p_longlong, calloc(19 * total, 8))
        self.keys = cython.cast(cython.p_uchar, malloc((total + 1) * STRIDE))
        self.out = cython.cast(cython.p_uchar, malloc(self.room))
        if self.slab == cython.NULL or self.keys == cython.NULL or self.out == cython.NULL:
            raise MemoryError
        self.low_sizes = self.slab
        self.high_sizes = self.slab + total
        self.block = self.slab + 2 * total
        self.blocks = self.slab + 3 * total
        self.begin = self.slab + 4 * total
        self.at = self.slab + 5 * total
        self.stop = self.slab + 6 * total
        self.shareable = self.slab + 7 * total
        self.key_sizes = self.slab + 8 * total
        self.value_at = self.slab + 9 * total
        self.value_sizes = self.slab + 10 * total
        self.flags = self.slab + 11 * total
        self.losers = self.slab + 12 * total
        self.seqs = cython.cast(cython.p_ulonglong, self.slab + 13 * total)
        self.heads = cython.cast(cython.p_ulonglong, self.slab + 14 * total)
        self.data = cython.cast(cython.pp_uchar, self.slab + 15 * total)
        self.bounds = cython.cast(cython.pp_longlong, self.slab + 16 * total)
        self.lows = cython.cast(cython.pp_uchar, self.slab + 17 * total)
        self.highs = cython.cast(cython.pp_uchar, self.slab + 18 * total)

    def _lay_out(self, total: int) -> None:
        """The interpreted form of the memory above, and the zeros that C objects begin with."""
        for name in (  # noqa: SIM905 - a third of the lines
            "low_sizes high_sizes block blocks begin at stop shareable key_sizes value_at value_sizes flags losers "
            "seqs heads data bounds lows highs"
        ).split():
            setattr(self, name, [0] * total)
        for name in (  # noqa: SIM905 - a third of the lines
            "winner consumed waiting_for built group_size group_seq group_begun group_closed collecting used error "
            "error_source error_at purged"
        ).split():
            setattr(self, name, 0)
        for name, size in (("keys", (total + 1) * STRIDE), ("out", self.room)):
            setattr(self, name, bytearray(size))

    def __dealloc__(self) -> None:
        if cython.compiled:
            free(self.slab)
            free(self.keys)
            free(self.out)

    def feed(self, source: int, chunk: bytes, bounds: array, low: bytes | None, high: bytes | None) -> None:
        """Give a source its next raw blocks: `bounds` has begin and end of each in the chunk.

        Rows with keys below `low`, or at or above `high`, are passed over.
        """
        number: cython.Py_ssize_t = source
        index: cython.Py_ssize_t
        pairs: cython.longlong[::1] = bounds
        if not 0 <= number < self.sources or len(bounds) == 0:
            raise ValueError("no such source, or no block for it")
        for index in range(0, len(bounds), 2):
            if not 0 <= pairs[index] <= pairs[index + 1] <= len(chunk):
                raise ValueError("a block lies outside its chunk")
        self.held[number] = (chunk, bounds, low, high)
        self.low_sizes[number] = 0
        self.high_sizes[number] = -1
        if cython.compiled:
            self.data[number] = cython.cast(cython.p_uchar, chunk)
            self.bounds[number] = cython.address(pairs[0])
            if low is not None:
                self.lows[number] = cython.cast(cython.p_uchar, low)
            if high is not None:
                self.highs[number] = cython.cast(cython.p_uchar, high)
        else:
            self.data[number], self.bounds[number] = chunk, bounds
            self.lows[number], self.highs[number] = low, high
        if low is not None:
            self.low_sizes[number] = len(low)
        if high is not None:
            self.high_sizes[number] = len(high)
        self.blocks[number] = len(bounds) // 2
        # It stands on no row, even if it did on one beyond the end of the last chunk.
        self.block[number] = self.at[number] = self.stop[number] = self.key_sizes[number] = 0

    def end(self, source: int) -> None:
        """The source `waiting` named has no more rows."""
        number: cython.Py_ssize_t = source
        self.held[number] = None
        self.key_sizes[number] = -1
        self.heads[number] = MASK64
        if self.built:
            self.consumed = False
            self._replay(number)

    def waiting(self) -> int:
        """The source that needs to be fed."""
        return self.waiting_for

    def rows(self) -> list:
        """Entry tuples for Python: the versions of one or more keys, from the first that the loop cannot judge on."""
        rows: list = self.collected
        self.collected = []
        return rows

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
            raise CorruptData(_PROBLEMS[self.error], offset=self.error_at)
        return code

    def take(self) -> memoryview | bytes:
        """The stream since the last call, valid until the next `run`."""
        size: cython.Py_ssize_t = self.used
        self.used = 0
        if cython.compiled:
            return PyMemoryView_FromMemory(cython.cast(cython.p_char, self.out), size, PyBUF_READ)
        return bytes(self.out[:size])

    def failed_at(self) -> tuple:
        """The source whose block raised `CorruptData`, and the block's number in its last chunk."""
        return self.error_source, self.block[self.error_source] - 1

    def expired(self) -> int:
        """How many of the rows that did not go to Python had expired."""
        return self.purged

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _fail(self, error: cython.int, source: cython.Py_ssize_t, at: cython.Py_ssize_t) -> cython.int:
        self.error = error
        self.error_source = source
        self.error_at = at - self.begin[source]
        return _FAILED

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _advance(self, source: cython.Py_ssize_t) -> cython.int:
        """Move a source to its next row: 0, `_NEED` or `_FAILED`."""
        data: cython.p_const_uchar = self.data[source]
        base: cython.Py_ssize_t = source * STRIDE
        entry: Entry = new_entry()
        at: cython.Py_ssize_t
        stop: cython.Py_ssize_t
        key_size: cython.Py_ssize_t
        problem: cython.int
        while True:
            at = self.at[source]
            if at >= self.stop[source]:
                if self.block[source] >= self.blocks[source]:
                    return _NEED
                at = self.bounds[source][2 * self.block[source]]
                stop = self.bounds[source][2 * self.block[source] + 1]
                self.block[source] += 1
                self.begin[source] = self.at[source] = at
                self.shareable[source] = 0
                self.stop[source] = entries_end(data, at, stop)
                if self.stop[source] < 0:
                    return self._fail(_BAD_BLOCK, source, at if stop - at < 2 else stop - 2)
                continue
            stop = self.stop[source]
            if read_lengths(data, at, stop, cython.address(entry)):
                return self._fail(_BAD_LENGTH, source, at)
            key_size = entry.shared + entry.unshared
            if entry.shared > self.shareable[source] or key_size == 0:
                return self._fail(_BAD_KEY, source, at)
            if key_size > MAX_KEY_BYTES:
                return self._fail(_LONG_KEY, source, at)
            problem = read_flags(data, stop, cython.address(entry))
            if problem:
                return self._fail(_BAD_FLAGS if problem == FLAGS_UNKNOWN else _BAD_END, source, at)
            if entry.flags & TOMBSTONE_KIND and entry.value_size:
                return self._fail(_BAD_TOMBSTONE, source, at)
            copy(self.keys, base + entry.shared, data, entry.suffix_at, entry.unshared)
            self.value_at[source] = entry.value_at
            self.shareable[source] = self.key_sizes[source] = key_size
            self.value_sizes[source] = entry.value_size
            self.flags[source] = entry.flags
            self.seqs[source] = get_u64(data, entry.tail_at)
            self.at[source] = entry.stop
            if entry.shared < self.common + 8:
                self.heads[source] = self._head(base + self.common, key_size - self.common)
            if self.low_sizes[source] > 0:
                if self._beside(base, source, self.lows[source], self.low_sizes[source]) < 0:
                    continue
                # In range as soon as one key is: they ascend.
                self.low_sizes[source] = 0
            if (
                self.high_sizes[source] >= 0
                and self._beside(base, source, self.highs[source], self.high_sizes[source]) >= 0
            ):
                self.at[source] = self.stop[source]
                self.block[source] = self.blocks[source]
                return _NEED
            return 0

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _beside(
        self,
        base: cython.Py_ssize_t,
        source: cython.Py_ssize_t,
        key: cython.p_const_uchar,
        size: cython.Py_ssize_t,
    ) -> cython.int:
        return compare(self.keys, base, self.key_sizes[source], key, 0, size)

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _head(self, base: cython.Py_ssize_t, size: cython.Py_ssize_t) -> cython.ulonglong:
        """Eight bytes of a key of which `size` are left, filled up with zeros, as a number that sorts like them."""
        if size >= 8:
            return get_u64(self.keys, base)
        value: cython.ulonglong = 0
        index: cython.Py_ssize_t
        for index in range(8):
            value <<= 8
            if index < size:
                value |= self.keys[base + index]
        return value

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _before(self, one: cython.Py_ssize_t, two: cython.Py_ssize_t) -> cython.bint:
        """Whether the row of source `one` comes before that of `two`."""
        order: cython.int
        if self.heads[one] != self.heads[two]:
            return self.heads[one] < self.heads[two]
        if self.key_sizes[one] < 0 or self.key_sizes[two] < 0:
            return self.key_sizes[two] < 0
        order = compare(
            self.keys, one * STRIDE, self.key_sizes[one], self.keys, two * STRIDE, self.key_sizes[two]
        )
        if order:
            return order < 0
        return self.seqs[one] > self.seqs[two] or (self.seqs[one] == self.seqs[two] and one < two)

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _replay(self, source: cython.Py_ssize_t) -> cython.void:
        """Let a source whose row changed play its way up again."""
        current: cython.Py_ssize_t = source
        other: cython.Py_ssize_t
        node: cython.Py_ssize_t = (source + self.sources) >> 1
        while node > 0:
            other = self.losers[node]
            if self._before(other, current):
                self.losers[node] = current
                current = other
            node >>= 1
        self.winner = current

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _build(self) -> cython.int:
        """The first row of each source, then the first tournament: 0, `_NEED` or `_FAILED`."""
        source: cython.Py_ssize_t
        current: cython.Py_ssize_t
        node: cython.Py_ssize_t
        code: cython.int
        for source in range(self.sources):
            if self.key_sizes[source] == 0:
                code = self._advance(source)
                if code:
                    self.waiting_for = source
                    return code
        for node in range(self.sources):
            self.losers[node] = -1
        for source in range(self.sources):
            current = source
            node = (source + self.sources) >> 1
            while node > 0 and current >= 0:
                if self.losers[node] < 0 or self._before(self.losers[node], current):
                    self.losers[node], current = current, self.losers[node]
                node >>= 1
            if current >= 0:
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
                self.waiting_for = self.winner
                return code
            self.consumed = False
            self._replay(self.winner)
        return 0

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _same_key(self, source: cython.Py_ssize_t) -> cython.bint:
        """Whether the source stands on another version of the key whose versions pass by."""
        size: cython.Py_ssize_t = self.key_sizes[source]
        base: cython.Py_ssize_t = source * STRIDE
        return (
            size == self.group_size
            and common_prefix(self.keys, base, self.keys, self.sources * STRIDE, size) == size
        )

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _begin_key(self, source: cython.Py_ssize_t) -> cython.void:
        self.group_size = self.key_sizes[source]
        copy(self.keys, self.sources * STRIDE, self.keys, source * STRIDE, self.group_size)
        self.group_begun = self.group_closed = False

    @cython.cfunc
    @cython.inline
    @cython.nogil
    @cython.exceptval(check=False)
    def _for_python(self, source: cython.Py_ssize_t) -> cython.bint:
        """Whether Python wants the row: to filter it, to fold it, or to say that it cannot."""
        if self.seqs[source] <= self.min_seq:
            return self.by_rows or self.flags[source] & MERGE_KIND != 0
        return not self.has_operator and self.flags[source] & MERGE_KIND != 0

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _run(self) -> cython.int:
        source: cython.Py_ssize_t
        code: cython.int
        kind: cython.int
        tail_at: cython.Py_ssize_t
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
            if self.key_sizes[source] < 0:
                return _DONE
            if self.used >= self.soft_limit:
                return _FULL
            if not self._same_key(source):
                self._begin_key(source)
            elif self.group_closed or (self.group_begun and self.seqs[source] == self.group_seq):
                # Older than anybody may look, or one row that came from two sources.
                self.consumed = True
                continue
            if self._for_python(source):
                return _ROWS
            kind = self.flags[source] & KIND_MASK
            tail_at = self.value_at[source] + self.value_sizes[source]
            expired = (
                self.flags[source] & EXPIRE_FLAG != 0
                and get_i64(self.data[source], tail_at + 9) <= self.clock_ms
            )
            if not self.keep_tombstones and (expired or kind == TOMBSTONE_KIND) and kind != MERGE_KIND:
                # Whether it is the oldest that stays, older rows decide; if none can stay, it has no purpose.
                if self.seqs[source] > self.min_seq:
                    return _ROWS
                code = 0
            elif not expired:
                code = self._append(source)
            elif kind != MERGE_KIND:
                code = self._append_tombstone(source, tail_at)
            if code:
                return code
            self.purged += expired
            self.group_seq = self.seqs[source]
            self.group_begun = True
            self.group_closed = kind != MERGE_KIND and self.seqs[source] <= self.min_seq
            self.consumed = True

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _begin_row(self, source: cython.Py_ssize_t, value_size: cython.longlong) -> cython.int:
        """Append sizes and key, with room for the rest behind them: 0 or `_FAILED`."""
        at: cython.Py_ssize_t = self.used
        size: cython.Py_ssize_t = self.key_sizes[source]
        room: cython.Py_ssize_t = self.room
        grown: cython.p_uchar
        out: cython.p_uchar
        while room < at + size + value_size + 32:
            room *= 2
        if room != self.room:
            if cython.compiled:
                grown = cython.cast(cython.p_uchar, realloc(self.out, room))
                if grown == cython.NULL:
                    return self._fail(_NO_MEMORY, source, 0)
                self.out = grown
            else:
                self.out.extend(bytes(room - self.room))
            self.room = room
        # By its own name: a byte written through it might be one of ours, as far as the C compiler knows.
        out = self.out
        put_little(out, at, size, 2)
        put_little(out, at + 2, value_size, 4)
        copy(out, at + 6, self.keys, source * STRIDE, size)
        self.used = at + 6 + size
        return 0

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _append(self, source: cython.Py_ssize_t) -> cython.int:
        """Append the row as it is: value and tail stand side by side already."""
        size: cython.Py_ssize_t = self.at[source] - self.value_at[source]
        if self._begin_row(source, self.value_sizes[source]):
            return _FAILED
        copy(self.out, self.used, self.data[source], self.value_at[source], size)
        self.used += size
        return 0

    @cython.cfunc
    @cython.nogil
    @cython.exceptval(check=False)
    def _append_tombstone(self, source: cython.Py_ssize_t, tail_at: cython.Py_ssize_t) -> cython.int:
        """An expired row becomes a tombstone and not nothing: an older version with a longer life may lie below."""
        if self._begin_row(source, 0):
            return _FAILED
        copy(self.out, self.used, self.data[source], tail_at, 8)
        self.out[self.used + 8] = TOMBSTONE_KIND | (self.flags[source] & CREATE_FLAG)
        self.used += 9
        if self.flags[source] & CREATE_FLAG:
            copy(self.out, self.used, self.data[source], tail_at + 17, 8)
            self.used += 8
        return 0

    @cython.cfunc
    @cython.exceptval(-1)
    def _collect(self) -> cython.int:
        """Take rows out for Python: all that decide about the keys at hand, while the keys need Python."""
        code: cython.int
        source: cython.Py_ssize_t
        flags: cython.int
        tail_at: cython.Py_ssize_t
        data: cython.p_const_uchar
        while True:
            code = self._step()
            if code:
                return code
            source = self.winner
            if self.key_sizes[source] < 0:
                break
            if len(self.collected) >= HARD_ROWS:
                return _ROWS
            if not self._same_key(source):
                if len(self.collected) >= SOFT_ROWS or not self._for_python(source):
                    break
                self._begin_key(source)
            elif self.group_closed or (self.group_begun and self.seqs[source] == self.group_seq):
                self.consumed = True
                continue
            data = self.data[source]
            flags = self.flags[source]
            tail_at = self.value_at[source] + self.value_sizes[source]
            self.collected.append(
                (
                    bytes(self.keys[source * STRIDE : source * STRIDE + self.key_sizes[source]]),
                    self.seqs[source],
                    flags & KIND_MASK,
                    bytes(data[self.value_at[source] : tail_at]),
                    get_i64(data, self.at[source] - 8) if flags & CREATE_FLAG else None,
                    get_i64(data, tail_at + 9) if flags & EXPIRE_FLAG else None,
                )
            )
            self.group_seq = self.seqs[source]
            self.group_begun = True
            self.group_closed = not flags & MERGE_KIND and self.seqs[source] <= self.min_seq
            self.consumed = True
        self.collecting = False
        return _ROWS
