"""The inputs of a merged scan: each gives rows in key order, a piece at a time.

A source buffers rows in ascending order up to its `frontier`. Forward, every row of the source with a key below the
frontier is in the buffer or was taken; backward, every row with a key above it. A key that equals the frontier may have
further versions in the next piece.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import Final

from flagstone.format.filter import Filters, PrefixExtractor
from flagstone.format.sst import FORMAT_V2, BlockIndex
from flagstone.kernels import probe as probe_kernel
from flagstone.read.view import Layer, MemtableCursor
from flagstone.runtime.pool import Future
from flagstone.sst.reader import FILTERS, META, Sst
from flagstone.sst.store import Pinned
from flagstone.types import MAX_KEY_BYTES, EntryTuple

Need = probe_kernel.Need

LOWEST: Final = b""
HIGHEST: Final = b"\xff" * (MAX_KEY_BYTES + 1)
"""No key equals either: keys are not empty and not that long."""

FIRST_READ_BYTES: Final = 16 * 1024
"""The size of a scan's first request. Each further request doubles it, up to the caller's bound."""

MEMTABLE_ROWS: Final = 256
MERGED_BLOCKS: Final = 8
"""Blocks per step of a merge, if they are in memory; a scan starts with one."""

PrefixProbe = tuple[PrefixExtractor, bytes]
"""An extractor and the prefix that it extracts from every key of the scan: SSTs whose filters lack it are skipped."""

Missing = Need | Future[Pinned] | None
"""What a scan lacks: something to fetch, a fetch in progress, or nothing."""

_key_of = itemgetter(0)


class Source:
    """The buffer and frontier of one input; `reverse` decides what they mean."""

    rows: list[EntryTuple]
    frontier: bytes

    def __init__(self, frontier: bytes, *, reverse: bool) -> None:
        self.reverse = reverse
        self.rows = []
        self.frontier = frontier

    def take(self, edge: bytes) -> list[EntryTuple]:
        """Remove the rows before `edge` in the direction of the scan, and return them in ascending order."""
        rows = self.rows
        if self.reverse:
            at = bisect_right(rows, edge, key=_key_of)
            self.rows = rows[:at]
            return rows[at:]
        if rows and rows[-1][0] < edge:
            self.rows = []
            return rows
        at = bisect_left(rows, edge, key=_key_of)
        self.rows = rows[at:]
        return rows[:at]

    @property
    def head(self) -> bytes:
        """Forward: no further row has a key below this."""
        return self.rows[0][0] if self.rows else self.frontier

    @property
    def ended(self) -> bool:
        return self.frontier == (LOWEST if self.reverse else HIGHEST)

    def missing(self) -> Missing:
        """What must be fetched, or awaited, before `extend`; None if everything is in memory."""
        return None

    def extend(self) -> Missing:
        """Buffer the next piece and move the frontier, or return what is missing."""
        raise NotImplementedError


class MemtableSource(Source):
    """The rows of one memtable."""

    rows: list[EntryTuple]
    frontier: bytes

    def __init__(self, cursor: MemtableCursor, *, reverse: bool) -> None:
        super().__init__(HIGHEST if reverse else LOWEST, reverse=reverse)
        self._cursor = cursor

    def seek(self, key: bytes) -> None:
        """Skip the rows before `key`."""
        self._cursor.seek(key)
        if self.reverse:
            self.rows = self.rows[: bisect_right(self.rows, key, key=_key_of)]
        else:
            self.rows = self.rows[bisect_left(self.rows, key, key=_key_of) :]

    def extend(self) -> Missing:
        rows = self._cursor.next_rows(MEMTABLE_ROWS)
        last = rows[-1][0] if len(rows) >= MEMTABLE_ROWS else None
        if self.reverse:
            rows.sort(key=_key_of)  # stable: versions stay in their order
            self.rows = rows + self.rows
            self.frontier = LOWEST if last is None else last
        else:
            self.rows += rows
            self.frontier = HIGHEST if last is None else last
        return None


class LayerSource(Source):
    """The rows of an L0 SST or of a sorted run, block by block, with read-ahead.

    All sources of a scan share `pinned`, which holds what was fetched for the scan; a block leaves it when it is used.
    """

    rows: list[EntryTuple]
    frontier: bytes

    def __init__(
        self,
        layer: Layer,
        start: bytes,
        stop: bytes,
        pinned: Pinned,
        *,
        reverse: bool,
        read_ahead_bytes: int,
        prefix_probe: PrefixProbe | None,
    ) -> None:
        self._starts, self._stops, self._ssts = layer.parts()
        self._start = start
        self._stop = stop
        self._pinned = pinned
        self._prefix_probe = prefix_probe
        self._max_window = read_ahead_bytes
        self._window = min(FIRST_READ_BYTES, read_ahead_bytes)
        self._pending: Future[Pinned] | None = None
        self._blocks_now = 1
        first = max(bisect_left(self._starts, start) - 1, 0)
        end = bisect_left(self._starts, stop)
        while first < end and self._stops[first] is not None and self._stops[first] <= start:
            first += 1
        self._first, self._end = first, end
        super().__init__(HIGHEST if reverse else LOWEST, reverse=reverse)
        self._at = end if reverse else first - 1
        self._index: BlockIndex | None = None
        self._next_sst()

    def extend(self) -> Missing:
        missing = self.missing()
        if missing is not None or self.ended:
            return missing
        raw = self._take_block(self._next)
        if raw is None:  # evicted since
            return self.missing()
        left = self._blocks_now
        while raw is not None:
            self._buffer(self._sst.rows_of(raw, self._next))
            left -= 1
            if left == 0 or self._index is None:
                break
            raw = self._take_block(self._next)
        self._blocks_now = min(2 * self._blocks_now, MERGED_BLOCKS)
        return None

    def _buffer(self, rows: list[EntryTuple]) -> None:
        """Add the rows of the next block to the buffer, and advance to the block after it."""
        if rows and rows[0][0] < self._low:
            rows = rows[bisect_left(rows, self._low, key=_key_of) :]
        if rows and rows[-1][0] >= self._high:
            rows = rows[: bisect_left(rows, self._high, key=_key_of)]
        if self.reverse:
            self.rows = rows + self.rows
            self._next -= 1
        else:
            self.rows += rows
            self._next += 1
        self._move_frontier()

    def missing(self) -> Missing:
        """As above. Opens the next SST if its index is in memory."""
        while not self.ended:
            if self._index is None and not self._open():
                return self._pending or Need(self._sst, None, [])
            if self._next in self._blocks:
                break
            self._next_sst()
        if self.ended or self._has_block(self._next):
            return None
        return self._pending or self._plan(self._next)

    def pass_blocks(self, limit: bytes, max_blocks: int) -> tuple[list[bytes], bytes, bytes] | None:
        """Forward: whole blocks that end below `limit`, with the bounds of the visible keys.

        None if the next block reaches `limit` or is not in memory, or rows are already buffered.
        """
        index = self._index
        if self.rows or index is None or self._sst.format_version != FORMAT_V2:
            return None
        number, end = self._next, self._blocks.stop
        # Keys of a block do not exceed the separator after it, but may equal it.
        passable = bisect_left(index.first_keys, limit, number, end) - 1
        if passable == end - 1 and self._sst_ends_below(limit):
            passable = end
        passable = min(passable, number + max_blocks)
        raws = self._sst.held_blocks(number, passable)
        while number + len(raws) < passable and (self._sst, number + len(raws)) in self._pinned:
            raws.append(self._pinned.pop((self._sst, number + len(raws))))
        if not raws:
            return None
        self._next += len(raws)
        bounds = raws, self._low, self._high
        self._move_frontier()
        return bounds

    @property
    def next_block(self) -> tuple[Sst, int]:
        """The SST and the number of the next block, after `missing` has returned None."""
        return self._sst, self._next

    @property
    def horizon(self) -> bytes:
        """The end of the next block, if known: the scan will soon need other sources up to there."""
        if self._index is None or self._next not in self._blocks:
            return self.frontier
        at = self._next if self.reverse else self._next + 1
        return self._index.first_keys[at] if at in self._blocks else self.frontier

    def plan_ahead(self) -> Need | None:
        """What to fetch in advance; None if nothing is missing or enough is fetched already.

        The caller passes the future of that fetch to `expect`.
        """
        if self._pending is not None or self._asked == 0 or self.ended or self._index is None:
            return None
        if self.reverse:
            ahead, following, inside = self._next - self._fetched_to, self._at - 1, self._at > self._first
        else:
            ahead, following, inside = self._fetched_to - self._next, self._at + 1, self._at + 1 < self._end
        if ahead * 2 > self._asked:
            return None
        if self._fetched_to in self._blocks:
            return self._plan(self._fetched_to)
        if inside:
            sst: Sst = self._ssts[following]
            if not sst.holds(META) and (sst, META) not in self._pinned:
                return Need(sst, None, [])
        return None

    def expect(self, future: Future[Pinned]) -> None:
        """A fetch for this source has started."""
        self._pending = future

    def settle(self, future: Future[Pinned]) -> None:
        """The fetch has ended, with a result or an error."""
        if self._pending is future:
            self._pending = None

    def _next_sst(self) -> None:
        self._index = None
        self._asked = 0
        self._at += -1 if self.reverse else 1
        if not self._first <= self._at < self._end:
            self.frontier = LOWEST if self.reverse else HIGHEST
            return
        self._sst: Sst = self._ssts[self._at]
        self._low = max(self._start, self._starts[self._at])
        stop = self._stops[self._at]
        self._high = self._stop if stop is None else min(self._stop, stop)
        if self.reverse:
            # The SST before may end with a version of the first key of this one. No row is above the end of this one.
            self.frontier = min(self.frontier, self._high)
        else:
            self.frontier = max(self.frontier, self._low)

    def _open(self) -> bool:
        """Find the blocks of the range; False if the index is not in memory."""
        sst = self._sst
        index: BlockIndex | None = sst.held_index()
        if index is None:
            pinned = self._pinned.get((sst, META))
            if pinned is None:
                return False
            index = pinned[0]
        first = max(bisect_left(index.first_keys, self._low) - 1, 0)
        end = bisect_left(index.first_keys, self._high)
        if self._prefix_probe is not None:
            # One request fetched them with the index; the cache may have evicted them since.
            filters: Filters | None = sst.filters or self._pinned.get((sst, FILTERS))
            extractor, prefix = self._prefix_probe
            if filters is not None and not filters.may_contain_prefix(prefix, extractor):
                end = first
        self._index = index
        self._blocks = range(first, end)
        self._next = end - 1 if self.reverse else first
        self._fetched_to = self._next
        return True

    def _move_frontier(self) -> None:
        """After a piece was taken: to the separator before the next one, or to the next SST."""
        index = self._index
        assert index is not None, "a piece was taken from an open SST"
        if self._next not in self._blocks:
            if self.reverse:
                self.frontier = min(self.frontier, self._low)
            self._next_sst()
        elif self.reverse:
            self.frontier = min(self.frontier, index.first_keys[self._next + 1])
        else:
            self.frontier = max(self.frontier, index.first_keys[self._next])

    def _sst_ends_below(self, limit: bytes) -> bool:
        if self._at + 1 < self._end:
            return bool(self._starts[self._at + 1] < limit)
        return self._high <= limit

    def _has_block(self, number: int) -> bool:
        return self._sst.holds(number) or (self._sst, number) in self._pinned

    def _take_block(self, number: int) -> bytes | None:
        raw: bytes | None = self._pinned.pop((self._sst, number), None)
        return self._sst.held_block(number) if raw is None else raw

    def _plan(self, number: int) -> Need | None:
        """Blocks from `number` on that are not in memory, as many as the window takes; None if all are in memory."""
        index = self._index
        assert index is not None, "blocks are planned in an open SST"
        numbers: list[int] = []
        left = self._window
        step = -1 if self.reverse else 1
        while number in self._blocks and (left > 0 or not numbers):
            left -= index.stops[number] - index.offsets[number]
            if not self._has_block(number):
                numbers.append(number)
            number += step
        self._window = min(2 * self._window, self._max_window)
        self._asked = max(len(numbers), 1)
        self._fetched_to = number
        return Need(self._sst, index, numbers) if numbers else None
