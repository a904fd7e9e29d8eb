"""The inputs of a merged scan: each gives rows in key order, a piece at a time.

A source buffers rows in ascending order up to its `frontier`. Forward, every row of the source with a key below the
frontier is in the buffer or was taken; backward, every row with a key above it. A key that equals the frontier may have
further versions in the next piece.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import Final

from flagstone.format.sst import FORMAT_V2, BlockIndex
from flagstone.read.read_ahead import LayerBlocks, PrefixProbe, ReadAhead
from flagstone.read.view import Layer, MemtableCursor
from flagstone.runtime.pool import Future
from flagstone.sst.reader import INDEX, Sst
from flagstone.sst.requests import Need
from flagstone.sst.store import Pinned
from flagstone.types import MAX_KEY_BYTES, EntryTuple

LOWEST: Final = b""
HIGHEST: Final = b"\xff" * (MAX_KEY_BYTES + 1)
"""No key equals either: keys are not empty and not that long."""

MEMTABLE_ROWS: Final = 256
MERGED_BLOCKS: Final = 8
"""Blocks per step of a merge, if they are in memory; a scan starts with one."""

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

    A block leaves `pinned` when it is used.
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
        self._layer = LayerBlocks(layer, start, stop, pinned, prefix_probe)
        self._pinned = pinned
        self._max_bytes = read_ahead_bytes
        self.read_ahead: ReadAhead = ReadAhead(self._layer, reverse=reverse)
        self._blocks_now = 1
        super().__init__(HIGHEST if reverse else LOWEST, reverse=reverse)
        positions = self._layer.positions
        self._at = positions.stop if reverse else positions.start - 1
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
                return self.read_ahead.pending(self._at, INDEX) or self._layer.need_index(self._at)
            if self._next in self._blocks:
                break
            self._next_sst()
        if self.ended or self._layer.has(self._at, self._next):
            return None
        pending = self.read_ahead.pending(self._at, self._next)
        return pending or self.read_ahead.need(self._at, self._next, self._max_bytes)

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
        if passable == end - 1 and self._layer.ends_below(self._at, limit):
            passable = end
        passable = min(passable, number + max_blocks)
        raws: list[bytes] = []
        while number + len(raws) < passable:
            # First what was fetched for this scan: it may be in the cache, too, and must not stay in `pinned`.
            raw = self._pinned.pop((self._sst, number + len(raws)), None)
            held = self._sst.held_blocks(number + len(raws), passable) if raw is None else [raw]
            if not held:
                break
            raws += held
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

    def note_position(self) -> bool:
        """Let the read-ahead go of what the scan has passed; whether there may be more to plan."""
        opened = self._index is not None and self._next in self._blocks
        return self.read_ahead.pass_to(self._at, self._next if opened else None)

    def _next_sst(self) -> None:
        if self._index is not None:
            self._layer.release(self._at)
            self._index = None
        self._at += -1 if self.reverse else 1
        if self._at not in self._layer.positions:
            self.frontier = LOWEST if self.reverse else HIGHEST
            return
        self._sst = self._layer.sst(self._at)
        self._low, self._high = self._layer.bounds(self._at)
        if self.reverse:
            # The SST before may end with a version of the first key of this one. No row is above the end of this one.
            self.frontier = min(self.frontier, self._high)
        else:
            self.frontier = max(self.frontier, self._low)

    def _open(self) -> bool:
        """Find the blocks of the range; False if the index is not in memory."""
        opened = self._layer.open(self._at)
        if opened is None:
            return False
        self._index, self._blocks = opened
        self._next = self._blocks[-1 if self.reverse else 0] if self._blocks else self._blocks.start
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

    def _take_block(self, number: int) -> bytes | None:
        raw: bytes | None = self._pinned.pop((self._sst, number), None)
        return self._sst.held_block(number) if raw is None else raw
