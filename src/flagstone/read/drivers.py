"""Point reads, and the loops that drive a read to its end: probe memory, fetch what is missing, probe again.

A probe never blocks and changes nothing, so it may be repeated. What was fetched is passed back as `pinned`, so that a
read ends even if the cache is too small for what it needs. Each loop has a blocking and an awaitable form; a read from
memory needs no thread, no lock and no turn of the event loop. Only the awaitable forms import asyncio, which takes
eleven megabytes.

A fetch that fails ends the read with its error; repeating the read is always safe. `SstGone` means that garbage
collection has deleted an SST of the view; a scan then continues in a newer view if its request has `renew`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from flagstone.kernels import bloom as bloom_kernel
from flagstone.kernels import probe as probe_kernel
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.retention import visible_value
from flagstone.read.scan_cursor import Chunk, Lacking, ScanCursor
from flagstone.read.view import ReadView
from flagstone.runtime.grants import Grant
from flagstone.sst.reader import META, Sst
from flagstone.sst.requests import Need, plan_requests
from flagstone.sst.store import Pinned, SstGone, SstStore
from flagstone.types import EntryTuple, Row

Found = EntryTuple | list[EntryTuple] | None
"""The newest row of a key. If that is a merge operand, a list down to the first row that is none. None: no row."""

_find: Final = probe_kernel.find


def probe(view: ReadView, key: bytes, max_seq: int, pinned: Pinned | None = None) -> Found | Need:
    """The newest row of `key` with seq <= `max_seq`, or what must be fetched to find it.

    Tombstones and expired rows are returned as they are; `visible_row` hides them. Raises `CorruptData` with the
    object's path if a block is damaged.
    """
    layers = view.forest.layers_of(key) if view.segmented else view.layers
    found: Found | Need = _find(view.memtables, layers, key, max_seq, pinned)
    return found


def probe_many(
    view: ReadView,
    keys: Sequence[bytes],
    max_seq: int,
    answers: list[Found | Need],
    pinned: Pinned | None = None,
) -> list[tuple[bytes, Need]]:
    """`probe` every key whose answer is still a `Need`, or all of them while `answers` is empty.

    Fills in `answers`, one per key, and returns the keys without an answer and what they lack, so that one round of
    concurrent requests serves all of them.
    """
    if not answers:
        answers[:] = [probe(view, key, max_seq, pinned) for key in keys]
    else:
        for at, answer in enumerate(answers):
            if isinstance(answer, Need):
                answers[at] = probe(view, keys[at], max_seq, pinned)
    return [(key, answer) for key, answer in zip(keys, answers, strict=True) if isinstance(answer, Need)]


def plan_fetch(view: ReadView, lacking: Sequence[tuple[bytes, Need]], pinned: Pinned) -> list[Need]:
    """What to fetch for keys and what each of them lacks.

    A key that lacks an index gets the indexes and filters of all SSTs that may hold it. A read that fetches them one by
    one would wait for as many round trips as there are layers.

    Of several keys each gets the blocks of all SSTs whose filters do not exclude it. Among many keys some filter is
    nearly always wrong, and all of them would wait for another round trip.
    """
    indexes: dict[Sst, None] = {}
    blocks: list[Need] = []
    for key, need in lacking:
        if need.numbers:
            blocks.append(need)
            if len(lacking) > 1:
                blocks += [
                    other for sst in view.forest.ssts_of(key) if (other := _block_of(sst, key, pinned))
                ]
        else:
            absent = (sst for sst in view.forest.ssts_of(key) if not sst.holds(META))
            indexes.update((sst, None) for sst in absent if (sst, META) not in pinned)
    return blocks + [Need(sst, None, []) for sst in indexes]


def _block_of(sst: Sst, key: bytes, pinned: Pinned) -> Need | None:
    """The block that has the key if the SST has it; None if a filter excludes the key or the block is in memory."""
    meta = pinned.get((sst, META)) or (None if sst.meta is None else sst.meta.pinned)
    if meta is None:
        return None
    index, first_keys, bloom = meta
    number = max(bisect_left(first_keys, key) - 1, 0)
    if sst.holds(number) or (sst, number) in pinned:
        return None
    if bloom is not None and not bloom_kernel.may_contain_key(bloom, key):
        return None
    return Need(sst, index, [number])


def visible_row(
    found: Found,
    *,
    max_seq: int,
    now_ms: int,
    include_expired: bool = False,
    merge_operator: MergeOperator | None = None,
) -> Row | None:
    """The row that a caller sees: None for tombstones and expired rows, merge operands folded."""
    if found is None:
        return None
    return visible_value(
        found if isinstance(found, list) else (found,),
        max_seq=max_seq,
        now_ms=now_ms,
        include_expired=include_expired,
        merge_operator=merge_operator,
    )


def get(ssts: SstStore, view: ReadView, key: bytes, max_seq: int) -> Found:
    """The newest row of `key`; see `probe`."""
    found = probe(view, key, max_seq)
    if not isinstance(found, Need):
        return found
    pinned: Pinned = {}
    with ssts.reading["get"].measure():
        while isinstance(found, Need):
            pinned.update(ssts.fetch(plan_fetch(view, [(key, found)], pinned)))
            found = probe(view, key, max_seq, pinned)
    return found


def get_newest_first(ssts: SstStore, view: ReadView, key: bytes, max_seq: int) -> Found:
    """`get` for a key that probably is in one of the newest SSTs: it asks one after the other, and no older one."""
    found = probe(view, key, max_seq)
    if not isinstance(found, Need):
        return found
    pinned: Pinned = {}
    with ssts.reading["get"].measure():
        while isinstance(found, Need):
            pinned.update(ssts.fetch([found]))
            found = probe(view, key, max_seq, pinned)
    return found


async def get_async(ssts: SstStore, view: ReadView, key: bytes, max_seq: int) -> Found:
    """`get` for an event loop."""
    found = probe(view, key, max_seq)
    if not isinstance(found, Need):
        return found
    pinned: Pinned = {}
    with ssts.reading["get"].measure():
        while isinstance(found, Need):
            pinned.update(await fetch_async(ssts, plan_fetch(view, [(key, found)], pinned)))
            found = probe(view, key, max_seq, pinned)
    return found


def multi_get(ssts: SstStore, view: ReadView, keys: Sequence[bytes], max_seq: int) -> list[Found]:
    """`get` of many keys, in their order. Keys share blocks, and the requests of each round run concurrently.

    With nothing in memory that is one round for all indexes and filters, and one for all blocks.
    """
    answers: list[Found | Need] = []
    pinned: Pinned = {}
    lacking = probe_many(view, keys, max_seq, answers, pinned)
    if lacking:
        with ssts.reading["multi_get"].measure():
            while lacking:
                pinned.update(ssts.fetch(plan_fetch(view, lacking, pinned)))
                lacking = probe_many(view, keys, max_seq, answers, pinned)
    return _settled(answers)


async def multi_get_async(ssts: SstStore, view: ReadView, keys: Sequence[bytes], max_seq: int) -> list[Found]:
    """`multi_get` for an event loop."""
    answers: list[Found | Need] = []
    pinned: Pinned = {}
    lacking = probe_many(view, keys, max_seq, answers, pinned)
    if lacking:
        with ssts.reading["multi_get"].measure():
            while lacking:
                pinned.update(await fetch_async(ssts, plan_fetch(view, lacking, pinned)))
                lacking = probe_many(view, keys, max_seq, answers, pinned)
    return _settled(answers)


def next_chunk(ssts: SstStore, cursor: ScanCursor) -> Chunk | None:
    """The next rows of a scan, or None at its end. Starts to fetch the blocks after them."""
    while isinstance(chunk := cursor.probe_chunk(), Lacking):
        try:
            with ssts.reading["scan"].measure():
                if chunk.needs:
                    cursor.accept(ssts.fetch(chunk.needs, admit=cursor.cache_blocks))
                for future in chunk.pending:
                    future.exception()  # waits; `settle` raises its error
                    cursor.settle(future)
        except SstGone as gone:
            cursor.renew(gone)
    _read_ahead(ssts, cursor)
    return chunk


async def next_chunk_async(ssts: SstStore, cursor: ScanCursor) -> Chunk | None:
    """`next_chunk` for an event loop."""
    import asyncio  # noqa: PLC0415

    while isinstance(chunk := cursor.probe_chunk(), Lacking):
        try:
            with ssts.reading["scan"].measure():
                if chunk.needs:
                    cursor.accept(await fetch_async(ssts, chunk.needs, admit=cursor.cache_blocks))
                for future in chunk.pending:
                    await asyncio.wait([asyncio.wrap_future(future)])
                    cursor.settle(future)
        except SstGone as gone:
            await asyncio.to_thread(cursor.renew, gone)
    _read_ahead(ssts, cursor)
    return chunk


async def fetch_async(ssts: SstStore, needs: Sequence[Need], *, admit: bool = True) -> Pinned:
    """`SstStore.fetch` for an event loop: each request runs on a thread of the pool."""
    import asyncio  # noqa: PLC0415

    futures = [ssts.pool.submit(ssts.fetch_request, need, admit=admit) for need in plan_requests(needs)]
    fetched: Pinned = {}
    for part in await asyncio.gather(*map(asyncio.wrap_future, futures)):
        fetched.update(part)
    return fetched


def _read_ahead(ssts: SstStore, cursor: ScanCursor) -> None:
    for stretch in cursor.plan_ahead(ssts.read_ahead):
        stretch.future = ssts.pool.submit(
            _fetch_ahead, ssts, stretch.need, cursor.grant, admit=cursor.cache_blocks
        )


def _fetch_ahead(ssts: SstStore, need: Need, _grant: Grant | None, *, admit: bool) -> Pinned:
    """A request of the read-ahead. It holds the grant: its bytes take memory although the scan may be gone."""
    return ssts.fetch_request(need, admit=admit)


def _settled(answers: list[Found | Need]) -> list[Found]:
    return [answer for answer in answers if not isinstance(answer, Need)]
