"""Read-ahead: which blocks a scan fetches before it needs them.

A scan fetches at most twice as much ahead as it has reached, and four times as much once that is a longer read, so one
that is stopped early has not read far ahead. Up to a megabyte it makes one request, which takes hardly longer than a
request for a block. Beyond that it makes several at once, because one connection has a limited bandwidth.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import Final

from flagstone.format.filter import Filters, PrefixExtractor
from flagstone.format.sst import BlockIndex
from flagstone.read.view import Layer
from flagstone.runtime.grants import Grant
from flagstone.runtime.pool import Future
from flagstone.sst.reader import FILTERS, INDEX, META, Sst
from flagstone.sst.requests import Need, need_index
from flagstone.sst.store import Pinned

FIRST_READ_BYTES: Final = 16 * 1024
"""The size of a scan's first request for blocks."""

SHORT_READ_BYTES: Final = 64 * 1024
"""Up to this size a stretch counts as reached when the scan has used a block of it, beyond when it comes to it."""

MIN_PARALLEL_BYTES: Final = 1024 * 1024
"""Smaller requests are not split: the first byte takes longer than the rest."""

MAX_REQUEST_BYTES: Final = 4 * 1024 * 1024
MAX_REQUESTS: Final = 8
"""Requests of one scan under way at a time."""

PrefixProbe = tuple[PrefixExtractor, bytes]
"""An extractor and the prefix that it extracts from every key of the scan: SSTs whose filters lack it are skipped."""


def plan_window(reached: int) -> int:
    """How much a scan fetches ahead. Each step takes a round trip, so few steps lead to the full bandwidth."""
    return (2 if reached < SHORT_READ_BYTES else 4) * reached


def plan_request_bytes(window: int) -> int:
    """The size of the requests that fetch a window: as many as allowed, but none too small or too large."""
    return min(max(window // MAX_REQUESTS, MIN_PARALLEL_BYTES), MAX_REQUEST_BYTES)


class LayerBlocks:
    """The blocks of one layer that a scan of [start, stop) reads. SSTs are named by their position in the layer.

    All layers of a scan share `pinned`, which holds what was fetched for the scan.
    """

    def __init__(
        self, layer: Layer, start: bytes, stop: bytes, pinned: Pinned, prefix_probe: PrefixProbe | None
    ) -> None:
        self._starts, self._stops, self._ssts = layer.parts()
        self._start, self._stop = start, stop
        self._pinned = pinned
        self._prefix_probe = prefix_probe
        # Of the SSTs in use. The cache may evict an index while the scan is in its SST.
        self._opened: dict[int, tuple[BlockIndex, range]] = {}
        first = max(bisect_left(self._starts, start) - 1, 0)
        end = bisect_left(self._starts, stop)
        while first < end and self._stops[first] is not None and self._stops[first] <= start:
            first += 1
        self.positions: range = range(first, end)

    def sst(self, at: int) -> Sst:
        """The SST at a position."""
        sst: Sst = self._ssts[at]
        return sst

    def bounds(self, at: int) -> tuple[bytes, bytes]:
        """The first key, and the key after the last one, that the scan reads from an SST."""
        stop = self._stops[at]
        return max(self._start, self._starts[at]), self._stop if stop is None else min(self._stop, stop)

    def ends_below(self, at: int, limit: bytes) -> bool:
        """Whether all keys of an SST are below `limit`."""
        if at + 1 in self.positions:
            return bool(self._starts[at + 1] < limit)
        return self.bounds(at)[1] <= limit

    def open(self, at: int) -> tuple[BlockIndex, range] | None:
        """The index of an SST and the numbers of its blocks in the range; None if the index is not in memory."""
        if at in self._opened:
            return self._opened[at]
        sst = self.sst(at)
        index: BlockIndex | None = sst.held_index()
        if index is None:
            index = self._index_alone(sst)
            if index is None:
                return None
        low, high = self.bounds(at)
        first = max(bisect_left(index.first_keys, low) - 1, 0)
        end = bisect_left(index.first_keys, high)
        if self._prefix_probe is not None:
            # They were fetched with the index; the cache may have evicted them since.
            filters: Filters | None = sst.filters or self._pinned.get((sst, FILTERS))
            extractor, prefix = self._prefix_probe
            if filters is not None and not filters.may_contain_prefix(prefix, extractor):
                end = first
        self._opened[at] = index, range(first, end)
        return self._opened[at]

    def _index_alone(self, sst: Sst) -> BlockIndex | None:
        """The index, whether the cache has the filters or not, unless the scan needs these, too."""
        fetched: BlockIndex | None = self._pinned.get((sst, INDEX))
        if fetched is not None:
            return fetched
        return sst.use_index() if self._prefix_probe is None else None

    def has(self, at: int, number: int) -> bool:
        """Whether a block is in memory."""
        sst = self.sst(at)
        return sst.holds(number) or (sst, number) in self._pinned

    def has_index(self, at: int) -> bool:
        """Whether everything that `open` needs is in memory."""
        sst = self.sst(at)
        return sst.holds(META) or self._index_alone(sst) is not None

    def need_index(self, at: int) -> Need:
        """What to fetch before `open`: the index, and for a scan that tests a prefix the filters with it."""
        sst = self.sst(at)
        return need_index(sst) if self._prefix_probe is None else Need(sst, None, [])

    def release(self, at: int) -> None:
        """The scan has left an SST: its index and filters stay in memory only if the cache keeps them."""
        sst = self.sst(at)
        self._opened.pop(at, None)
        for part in (META, FILTERS, INDEX):
            self._pinned.pop((sst, part), None)


class Stretch:
    """Consecutive blocks of one SST, or its index, that a scan will need.

    `need` names what of it was not in memory, and `future` is the fetch of that. Without a future everything is in
    memory, or the scan fetches it when it needs it.
    """

    __slots__ = ("at", "first", "future", "last", "need", "size")

    def __init__(self, at: int, first: int, last: int, size: int, need: Need) -> None:
        self.at: int = at
        self.first: int = first
        self.last: int = last
        self.size: int = size
        self.need: Need = need
        self.future: Future[Pinned] | None = None


class ReadAhead:
    """The stretches of one layer, from the position of the scan to the end of what was planned, without a gap.

    It plans nothing before the scan has lacked a block: a scan of blocks in memory does not read ahead.
    """

    def __init__(self, blocks: LayerBlocks, *, reverse: bool) -> None:
        self._blocks = blocks
        self._step = -1 if reverse else 1
        self._stretches: deque[Stretch] = deque()
        self._indexes: dict[int, Stretch] = {}
        # Where the next stretch begins: an SST, and its blocks that are not planned yet, in the order of the scan.
        self._at = -1
        self._index: BlockIndex | None = None
        self._rest: range | None = None
        self._entered: Stretch | None = None
        self._reached_bytes = 0
        self.held_bytes: int = 0
        """The size of all stretches that the scan has not passed."""

    @property
    def started(self) -> bool:
        """Whether the scan has lacked a block."""
        return bool(self._stretches) or self._entered is not None

    @property
    def under_way(self) -> int:
        """How many requests have not ended."""
        stretches = (*self._stretches, *self._indexes.values())
        return sum(1 for each in stretches if each.future is not None and not each.future.done())

    def landed_indexes(self) -> list[Future[Pinned]]:
        """Fetches of indexes that have ended without an error."""
        futures = (each.future for each in self._indexes.values())
        return [each for each in futures if each is not None and each.done() and each.exception() is None]

    def pending(self, at: int, number: int) -> Future[Pinned] | None:
        """The fetch under way that brings a block (`INDEX`: the index)."""
        stretch = self._indexes.get(at) if number == INDEX else self._containing(at, number)
        return None if stretch is None else stretch.future

    def need(self, at: int, number: int, max_bytes: int) -> Need:
        """What to fetch at once: the scan lacks that block, and no fetch under way brings it."""
        stretch = self._containing(at, number)
        if stretch is None:
            self._restart(at, number)
            size = min(max(self._reached_bytes, FIRST_READ_BYTES), MIN_PARALLEL_BYTES, max_bytes)
            return self._plan_stretch(size).need
        # The fetch of the stretch has failed, or the cache has evicted the block since it was planned.
        rest = range(number, stretch.last + self._step, self._step)
        need = stretch.need
        return Need(need.sst, need.index, [each for each in rest if not self._blocks.has(at, each)])

    def plan(self, *, max_bytes: int, max_requests: int, grant: Grant) -> list[Stretch]:
        """Requests to make now, within these bounds and the budget."""
        if self._entered is None or not self._stretches or self._stretches[0] is not self._entered:
            return []
        window = min(plan_window(self._reached_bytes), max_bytes - self._entered.size)
        size = plan_request_bytes(window)
        waiting = self.held_bytes - self._entered.size
        planned: list[Stretch] = []
        while len(planned) < max_requests and self._open_next():
            wanted = min(size, window - waiting)
            if wanted <= 0 or (wanted < size and waiting) or not grant.grow(wanted):
                break
            stretch = self._plan_stretch(wanted)
            waiting += stretch.size
            if stretch.need.numbers:
                planned.append(stretch)
        return planned + self._plan_indexes(2 * window - waiting, max_requests - len(planned))

    def pass_to(self, at: int, number: int | None) -> bool:
        """The scan is at that block, or has not opened that SST: it does not need the stretches before any more.

        Whether it has reached another stretch, so that there may be more to plan.
        """
        while self._stretches and self._ends_before(self._stretches[0], at, number):
            passed = self._stretches.popleft()
            self.held_bytes -= passed.size
            if passed is not self._entered:
                self._reached_bytes += passed.size  # the scan has used all of it in one step
        if not self._stretches:
            if self._entered is not None:
                # The scan has passed blocks in memory beyond the last stretch.
                self._restart(at, number)
            return False
        head = self._stretches[0]
        # A scan that has read this far reads on; a shorter one may end with the stretch before.
        if head is self._entered or (head.size < SHORT_READ_BYTES and number in (None, head.first)):
            return False
        self._entered = head
        self._reached_bytes += head.size
        return True

    def settle(self, future: Future[Pinned]) -> None:
        """A fetch has ended, with a result or an error."""
        for stretch in self._stretches:
            if stretch.future is future:
                stretch.future = None
        self._indexes = {at: each for at, each in self._indexes.items() if each.future is not future}

    def _containing(self, at: int, number: int) -> Stretch | None:
        for stretch in self._stretches:
            if stretch.at == at and not self._ends_before(stretch, at, number):
                return stretch
        return None

    def _ends_before(self, stretch: Stretch, at: int, number: int | None) -> bool:
        if stretch.at != at or number is None:
            return (stretch.at - at) * self._step < 0
        return (stretch.last - number) * self._step < 0

    def _restart(self, at: int, number: int | None) -> None:
        """Plan from there on, as if nothing was planned."""
        self._stretches.clear()
        self.held_bytes = 0
        self._at, self._rest = at, None
        if number is not None and self._open_next() and self._rest is not None:
            self._rest = self._rest[self._rest.index(number) :]

    def _open_next(self) -> bool:
        """Go to the next SST if all blocks of the present one are planned; False at the end, or without its index."""
        while not self._rest:
            if self._rest is not None:
                self._at += self._step
                self._rest = None
            opened = self._blocks.open(self._at) if self._at in self._blocks.positions else None
            if opened is None:
                return False
            self._index, numbers = opened
            self._rest = numbers[:: self._step]
        return True

    def _plan_stretch(self, size: int) -> Stretch:
        """The next stretch, of about `size` bytes and at least one block."""
        index, rest = self._index, self._rest
        assert index is not None, "the SST is open"
        assert rest, "the SST has blocks to plan"
        count = found = 0
        while found < size and count < len(rest):
            found += index.stops[rest[count]] - index.offsets[rest[count]]
            count += 1
        numbers, self._rest = rest[:count], rest[count:]
        lacking = [number for number in numbers if not self._blocks.has(self._at, number)]
        need = Need(self._blocks.sst(self._at), index, lacking)
        stretch = Stretch(self._at, numbers[0], numbers[-1], found, need)
        self._stretches.append(stretch)
        self.held_bytes += found
        return stretch

    def _plan_indexes(self, reach: int, max_requests: int) -> list[Stretch]:
        """Requests for the indexes of SSTs that begin within `reach` bytes after the last stretch."""
        at = self._at
        planned: list[Stretch] = []
        if self._rest is not None:
            at += self._step
            if self._rest and self._index is not None:
                reach -= abs(self._index.offsets[self._rest[-1]] - self._index.offsets[self._rest[0]])
        while reach > 0 and len(planned) < max_requests and at in self._blocks.positions:
            sst = self._blocks.sst(at)
            if at not in self._indexes and not self._blocks.has_index(at):
                self._indexes[at] = Stretch(at, INDEX, INDEX, 0, self._blocks.need_index(at))
                planned.append(self._indexes[at])
            reach -= sst.info.estimated_size
            at += self._step
        return planned
