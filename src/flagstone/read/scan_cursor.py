"""Range scans: memtables and SSTs merged into the rows that a read sees, forward or backward.

Like a point probe, a cursor returns rows from memory, or what must be fetched. If only one source has keys up to some
bound, which is the usual case, its blocks pass through whole. Otherwise buffered rows are merged: a newer source never
holds an older version of a key than an older source, so a stable sort by key alone, newest source first, puts the
versions of each key in order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple, Protocol

from flagstone.errors import CorruptData
from flagstone.kernels import scan as scan_kernel
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.retention import visible_value
from flagstone.lsm.system_rows import SYSTEM_STOP, visible_ranges
from flagstone.read.read_ahead import MAX_REQUESTS, PrefixProbe, Stretch
from flagstone.read.sources import HIGHEST, LOWEST, LayerSource, MemtableSource, Missing, Source
from flagstone.read.view import ReadView
from flagstone.runtime.grants import Grant, MemoryPart
from flagstone.runtime.pool import Future
from flagstone.sst.requests import Need
from flagstone.sst.store import Pinned, SstGone
from flagstone.types import EntryTuple, KeyRange, Row

DEFAULT_READ_AHEAD_BYTES: Final = 32 * 1024 * 1024
"""Eight requests of four megabytes: enough for the bandwidth of a machine, not only of a connection."""

BLOCKS_AT_ONCE: Final = 32
"""Blocks per chunk: about a thousand rows of a hundred bytes. Longer lists do not fit the processor's caches."""

Chunk = list[Any]
"""Visible rows: `(key, value)` tuples, or with `whole_rows` `(key, value, seq, created_ms, expires_ms)`."""

_key_of = itemgetter(0)


Renew = Callable[[ReadView], ReadView]
"""From a view that has lost an SST to a newer one that shows the same rows at the scan's sequence number. Blocks.

Raises `Unavailable` if no view shows them any more.
"""

_RENEWALS: Final = 3
"""How many new views in a row may lack an SST. More than one is a rare race; more than these is damage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanRequest:
    """What a scan has to show. It adds blocks to the cache only with `cache_blocks`.

    It fetches at most `read_ahead_bytes` before it needs them, all SSTs together.

    With `renew` the scan outlives its view: if an SST of it is gone, the scan continues at its key in a newer view.

    Only with `include_system` does it show system rows (`flagstone.lsm.system_rows`).
    """

    keys: KeyRange = field(default_factory=KeyRange)
    max_seq: int
    now_ms: int
    reverse: bool = False
    limit: int | None = None
    include_expired: bool = False
    include_system: bool = False
    whole_rows: bool = False
    merge_operator: MergeOperator | None = None
    read_ahead_bytes: int = DEFAULT_READ_AHEAD_BYTES
    cache_blocks: bool = False
    prefix_probe: PrefixProbe | None = None
    renew: Renew | None = None


class Lacking(NamedTuple):
    """What a cursor waits for: requests to make, and requests already under way."""

    needs: list[Need]
    pending: list[Future[Pinned]]


class Sink(Protocol):
    """Where rows go, in key order, the versions of a key from new to old."""

    def add_blocks(
        self, blocks: list[bytes], start: bytes | None, stop: bytes | None, out: Chunk
    ) -> None: ...

    def blocks_done(self) -> int: ...

    def add_rows(self, rows: list[EntryTuple], out: Chunk) -> None: ...

    def finish(self, out: Chunk) -> None: ...

    def resume_at(self, head: bytes, out: Chunk) -> bytes:
        """The key at which another view continues; see the function `resume_at`."""
        ...


def make_sieve(request: ScanRequest) -> scan_kernel.Sieve:
    """The sink that selects the rows that the request may see."""
    fold: Callable[[list[EntryTuple]], Row | None] = partial(
        visible_value,
        max_seq=request.max_seq,
        now_ms=request.now_ms,
        include_expired=request.include_expired,
        merge_operator=request.merge_operator,
    )
    return scan_kernel.Sieve(
        request.max_seq, request.now_ms, not request.include_expired, request.whole_rows, fold
    )


def resume_at(sieve: scan_kernel.Sieve, head: bytes, out: Chunk) -> bytes:
    """The key at which another view continues. `head` is the first key that the sieve has not received yet.

    Complete rows that the sieve has buffered go to `out`. If more versions of the key at the head may follow, they stay
    hidden if the key was decided; otherwise all of its versions are read again.
    """
    decided: bytes = sieve.decided_key()
    rest: Chunk = []
    sieve.finish(rest)
    if rest and rest[0][0] < head:
        out += rest
    return decided + b"\0" if decided and decided >= head else head


class ScanCursor:
    """A position in a merged scan. One thread at a time. It keeps its view alive.

    `probe_chunk` never blocks. If it returns `Lacking`, fetch what that names and pass it to `accept`. A scan writes
    nothing: one that is abandoned leaves nothing behind. With a caller's `sink`, a chunk is what the sink appends, and
    the cursor can neither seek nor count rows towards a limit.
    """

    def __init__(
        self,
        view: ReadView,
        request: ScanRequest,
        *,
        sink: Sink | None = None,
        blocks_at_once: int = BLOCKS_AT_ONCE,
    ) -> None:
        self._view = view
        self._request = request
        self._blocks_at_once = blocks_at_once
        # Starts small: a short scan must not decode the chunk of a long one.
        self._blocks_now = 1
        self._seekable = sink is None
        if sink is None:
            sieve = make_sieve(request)
            self._sink: Sink | scan_kernel.Sieve = sieve
            self._resume_at: Callable[[bytes, Chunk], bytes] = partial(resume_at, sieve)
        else:
            self._sink, self._resume_at = sink, sink.resume_at
        self._left = request.limit
        self._reverse = request.reverse
        self._end = LOWEST if request.reverse else HIGHEST
        self._spare: Chunk = []
        self._pinned: Pinned = {}
        self._grant: Grant | None = None
        self._held_back = False
        # The parts of the range between system rows, which are scanned one after the other.
        parts = (request.keys,) if request.include_system else visible_ranges(request.keys)
        if len(parts) > 1 and not has_low_keys(view, request.max_seq):
            parts = parts[1:]
        self._later = list(parts if self._reverse else reversed(parts))
        self._keys = self._later.pop() if parts else request.keys
        self._finished = self._keys.empty or not parts
        self._renewals = 0
        # Forward: all keys below were shown; backward: all keys above.
        self._consumed: bytes | None = None
        self._open_part()

    def probe_chunk(self) -> Chunk | Lacking | None:
        """The next rows (at least one), what is lacking, or None at the end of the scan."""
        if self._left == 0:
            return None
        out, self._spare = self._spare, []
        while not out:
            if self._finished:
                return None
            lacking = self._step(out)
            if lacking is not None:
                return lacking
        if self._left is not None:
            # Rows beyond the limit are kept: a seek may return some of the limit.
            self._spare = out[self._left :]
            del out[self._left :]
            self._left -= len(out)
        self._renewals = 0
        if self._seekable and not self._reverse:
            # Blocks that passed through were not merged: the last row is the end of what was shown.
            self._consumed = max(self._consumed or LOWEST, out[-1][0] + b"\0")
        return out

    @property
    def cache_blocks(self) -> bool:
        """Whether blocks fetched for this scan go into the cache."""
        return self._request.cache_blocks

    def accept(self, fetched: Pinned) -> None:
        """Take what was fetched for this cursor."""
        self._pinned.update(fetched)

    def plan_ahead(self, memory: MemoryPart) -> list[Stretch]:
        """What to fetch in the background; assign the future of each fetch to its stretch.

        Sources that have the least ahead come first: the one that the scan reads fastest must not take all of the
        budget.
        """
        sources = [source for source in self._layers if not source.ended]
        if self._left == 0 or not any(source.read_ahead.started for source in sources):
            return []
        if self._grant is None:
            self._grant = memory.open()
        due = self._held_back
        for source in sources:
            due |= source.note_position()
            for future in source.read_ahead.landed_indexes():
                self.settle(future)
                due = True
        if not due:
            return []
        ahead = sorted((source.read_ahead for source in sources), key=lambda each: each.held_bytes)
        held = self._grant.size = sum(each.held_bytes for each in ahead)
        requests = MAX_REQUESTS - sum(each.under_way for each in ahead)
        planned: list[Stretch] = []
        for each in ahead:
            before = each.held_bytes
            planned += each.plan(
                max_bytes=self._request.read_ahead_bytes - held + before,
                max_requests=requests - len(planned),
                grant=self._grant,
            )
            held += each.held_bytes - before
        # When requests end, more can be made, wherever the scan is.
        self._held_back = len(planned) >= requests
        return planned

    @property
    def grant(self) -> Grant | None:
        """The memory that the read-ahead of this scan takes from the budget."""
        return self._grant

    def settle(self, future: Future[Pinned]) -> None:
        """A background fetch has ended: take its result, or raise its error."""
        for source in self._layers:
            source.read_ahead.settle(future)
        self.accept(future.result())

    def seek(self, key: bytes) -> None:
        """Continue at `key`: forward with the first key not below it, backward with the first not above it.

        The cursor never goes back: a key that was passed, or is before the range, changes nothing.
        """
        self._spare = rows_from(self._spare, key, reverse=self._reverse)
        if self._spare:
            return
        # Not before what was merged: memtables have given their rows up to there, and would no longer hide older ones.
        while self._later and self._is_beyond(self._not_before_consumed(key)):
            self._next_part()
        key = self._not_before_consumed(key)
        start, stop = self._keys.start, self._keys.stop
        if self._reverse:
            stop = key + b"\0" if stop is None else min(stop, key + b"\0")
        else:
            start = key if start is None else max(start, key)
        self._consumed = key
        self._finished = self._finished or KeyRange(start, stop).empty
        for memtable in self._memtables:
            memtable.seek(key)
        self._sink.finish([])
        self._pinned.clear()
        self._open_layers(start, stop)

    def give_back(self, count: int) -> None:
        """A seek skipped `count` rows of the last chunk: they do not count towards the limit."""
        if self._left is not None:
            self._left += count

    def renew(self, gone: SstGone) -> None:
        """Continue in a newer view, at the same sequence number and key, because this one has lost `gone`. Blocks.

        Raises:
            Unavailable: the rows that the scan shows are no longer kept, or the request has no `renew`.
            CorruptData: newer views lack SSTs, too.

        """
        request = self._request
        if request.renew is None:
            raise gone
        if self._renewals == _RENEWALS:
            raise CorruptData("missing, but the newest manifest refers to it", object=gone.path) from gone
        self._renewals += 1
        view = request.renew(self._view)
        start, stop = self._keys.start, self._keys.stop
        if self._reverse:
            # Merged keys are complete, and all keys above the last edge were merged.
            if self._consumed is not None:
                stop = self._consumed + b"\0" if stop is None else min(stop, self._consumed + b"\0")
        else:
            head = min((source.head for source in self._sources), default=HIGHEST)
            self._consumed = max(start or LOWEST, self._resume_at(head, self._spare))
            start = self._consumed or None
        self._view = view
        self._pinned.clear()
        if self._later and KeyRange(start, stop).empty:
            self._next_part()
            return
        self._finished = self._finished or KeyRange(start, stop).empty
        self._memtables = self._scan_memtables(start, stop)
        self._open_layers(start, stop)

    def _not_before_consumed(self, key: bytes) -> bytes:
        if self._consumed is None:
            return key
        return min(key, self._consumed) if self._reverse else max(key, self._consumed)

    def _is_beyond(self, key: bytes) -> bool:
        """Whether no key of this part of the range is at or behind `key`."""
        return key < (self._keys.start or LOWEST) if self._reverse else key >= (self._keys.stop or HIGHEST)

    def _next_part(self) -> None:
        self._keys = self._later.pop()
        self._consumed = self._keys.stop if self._reverse else self._keys.start
        self._open_part()

    def _open_part(self) -> None:
        """Position all sources at the start of this part of the range."""
        self._memtables = self._scan_memtables(self._keys.start, self._keys.stop)
        self._open_layers(self._keys.start, self._keys.stop)

    def _scan_memtables(self, start: bytes | None, stop: bytes | None) -> list[MemtableSource]:
        request = self._request
        return [
            MemtableSource(
                memtable.scan(start, stop, request.max_seq, request.reverse), reverse=request.reverse
            )
            for memtable in self._view.memtables
        ]

    def _open_layers(self, start: bytes | None, stop: bytes | None) -> None:
        """Position the SSTs at the start of a range; the memtables stay where they are."""
        request = self._request
        self._layers = [
            LayerSource(
                layer,
                start or LOWEST,
                HIGHEST if stop is None else stop,
                self._pinned,
                reverse=self._reverse,
                read_ahead_bytes=request.read_ahead_bytes,
                prefix_probe=request.prefix_probe,
            )
            for layer in self._view.forest.scan_layers
        ]
        self._sources: list[Source] = [*self._memtables, *self._layers]

    def _step(self, out: Chunk) -> Lacking | None:
        """Add rows to `out`, or advance one source."""
        sources = self._sources
        edge_source = sources[0] if len(sources) == 1 else self._slowest(sources)
        edge = LOWEST if edge_source is None else edge_source.frontier
        ready = [rows for source in sources if source.rows and (rows := source.take(edge))]
        if ready:
            self._merge(ready, out)
            self._consumed = edge
        elif edge_source is None or edge == self._end:
            self._sink.finish(out)
            if self._later:
                self._next_part()
            else:
                self._finished = True
        else:
            missing = edge_source.missing()
            if missing is None and not self._pass_blocks(edge_source, out):
                missing = edge_source.extend()
            if missing is not None:
                return self._lacking(edge_source, missing)
            if edge_source.ended and not edge_source.rows:
                self._sources = [source for source in sources if source is not edge_source]
        return None

    def _slowest(self, sources: list[Source]) -> Source | None:
        """The source that is least far: no row at or beyond its frontier can be shown yet."""
        choose = max if self._reverse else min
        return choose(sources, key=lambda source: source.frontier, default=None)

    def _merge(self, ready: list[list[EntryTuple]], out: Chunk) -> None:
        rows = ready[0]
        if len(ready) > 1:
            rows = [row for part in ready for row in part]
            rows.sort(key=_key_of)
        self._sink.add_rows(rows, out)
        # `rows` contains all versions of these keys.
        self._sink.finish(out)
        if self._reverse:
            out.reverse()

    def _pass_blocks(self, source: Source, out: Chunk) -> bool:
        """Pass whole blocks to the sink if no other source has keys between theirs."""
        if self._reverse or not isinstance(source, LayerSource):
            return False
        limit = min((other.head for other in self._sources if other is not source), default=HIGHEST)
        sst, first = source.next_block
        passed = source.pass_blocks(limit, self._blocks_now)
        if passed is None:
            return False
        blocks, start, stop = passed
        try:
            self._sink.add_blocks(blocks, start or None, None if stop == HIGHEST else stop, out)
        except CorruptData as error:
            if error.object is not None:
                raise
            raise sst.damaged(first + self._sink.blocks_done(), error) from None
        self._blocks_now = min(2 * self._blocks_now, self._blocks_at_once)
        if self._left is not None:
            rows_per_block = max(len(out) // len(blocks), 1)
            self._blocks_now = min(self._blocks_now, self._left // rows_per_block + 1)
        return True

    def _lacking(self, source: Source, missing: Missing) -> Lacking:
        """What the source lacks, and what other sources will lack as soon as it has advanced."""
        found = [missing]
        if isinstance(source, LayerSource):
            horizon = source.horizon
            for other in self._sources:
                near = other.frontier >= horizon if self._reverse else other.frontier <= horizon
                if other is not source and near and not other.rows:
                    found.append(other.missing())
        needs = [entry for entry in found if isinstance(entry, Need)]
        return Lacking(needs, [entry for entry in found if isinstance(entry, Future)])


def has_low_keys(view: ReadView, max_seq: int) -> bool:
    """Whether there may be keys below those of system rows, or system rows. Most databases have neither."""
    for layer in view.forest.scan_layers:
        starts, _, _ = layer.parts()
        if starts and starts[0] < SYSTEM_STOP:
            return True
    return any(memtable.scan(None, SYSTEM_STOP, max_seq, False).next_rows(1) for memtable in view.memtables)


def rows_from(rows: Chunk, key: bytes, *, reverse: bool) -> Chunk:
    """The rows of a chunk that a seek to `key` keeps."""
    if reverse:
        return rows[bisect_left(rows, True, key=lambda row: row[0] <= key) :]
    return rows[bisect_left(rows, key, key=_key_of) :]
