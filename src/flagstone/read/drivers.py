"""Drives probes to their end: fetch what is missing, probe again. Each driver in a blocking and an awaitable form.

What is in memory is answered without a thread, a lock or a turn of the event loop. A fetch that fails ends the
read with its error and leaves nothing half done; reading again is always safe. `TableGone` tells the engine that
the view is older than garbage collection allows; a scan goes on in a newer one, if the engine gave it a way to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from flagstone.kernels import probe as probe_kernel
from flagstone.read.probe import Found, probe, probe_many
from flagstone.read.scan import Chunk, Lacking, ScanCursor
from flagstone.read.view import ReadView
from flagstone.table.table_store import Pinned, TableGone, TableStore, plan_requests

Need = probe_kernel.Need


def get(tables: TableStore, view: ReadView, key: bytes, max_seq: int) -> Found:
    """What the newest source that has `key` says of it; see `read.probe.probe`."""
    found = probe(view, key, max_seq)
    pinned: Pinned = {}
    while isinstance(found, Need):
        pinned.update(tables.fetch([found]))
        found = probe(view, key, max_seq, pinned)
    return found


async def get_async(tables: TableStore, view: ReadView, key: bytes, max_seq: int) -> Found:
    """`get`, awaiting what it would wait for."""
    found = probe(view, key, max_seq)
    pinned: Pinned = {}
    while isinstance(found, Need):
        pinned.update(await fetch_async(tables, [found]))
        found = probe(view, key, max_seq, pinned)
    return found


def multi_get(tables: TableStore, view: ReadView, keys: Sequence[bytes], max_seq: int) -> list[Found]:
    """`get` of many keys, in their order. Keys share blocks, and the requests of each round overlap."""
    answers: list[Found | Need] = []
    pinned: Pinned = {}
    while needs := probe_many(view, keys, max_seq, answers, pinned):
        pinned.update(tables.fetch(needs))
    return _settled(answers)


async def multi_get_async(
    tables: TableStore, view: ReadView, keys: Sequence[bytes], max_seq: int
) -> list[Found]:
    """`multi_get`, awaiting what it would wait for."""
    answers: list[Found | Need] = []
    pinned: Pinned = {}
    while needs := probe_many(view, keys, max_seq, answers, pinned):
        pinned.update(await fetch_async(tables, needs))
    return _settled(answers)


def next_chunk(tables: TableStore, cursor: ScanCursor) -> Chunk | None:
    """The next rows of a scan, or None at its end. Begins to fetch what comes after them."""
    while isinstance(chunk := cursor.probe_chunk(), Lacking):
        try:
            if chunk.needs:
                cursor.accept(tables.fetch(chunk.needs, admit=cursor.cache_blocks))
            for future in chunk.pending:
                future.exception()  # waits; what it raised is raised by `settle`
                cursor.settle(future)
        except TableGone as gone:
            cursor.renew(gone)
    _read_ahead(tables, cursor)
    return chunk


async def next_chunk_async(tables: TableStore, cursor: ScanCursor) -> Chunk | None:
    """`next_chunk`, awaiting what it would wait for."""
    while isinstance(chunk := cursor.probe_chunk(), Lacking):
        try:
            if chunk.needs:
                cursor.accept(await fetch_async(tables, chunk.needs, admit=cursor.cache_blocks))
            for future in chunk.pending:
                await asyncio.wait([asyncio.wrap_future(future)])
                cursor.settle(future)
        except TableGone as gone:
            await asyncio.to_thread(cursor.renew, gone)
    _read_ahead(tables, cursor)
    return chunk


async def fetch_async(tables: TableStore, needs: Sequence[Need], *, admit: bool = True) -> Pinned:
    """`TableStore.fetch`, each request on a thread of its own, awaited together."""
    futures = [tables.pool.submit(tables.fetch_request, need, admit=admit) for need in plan_requests(needs)]
    fetched: Pinned = {}
    for part in await asyncio.gather(*map(asyncio.wrap_future, futures)):
        fetched.update(part)
    return fetched


def _read_ahead(tables: TableStore, cursor: ScanCursor) -> None:
    for source, need in cursor.plan_ahead():
        source.expect(tables.pool.submit(tables.fetch_request, need, admit=cursor.cache_blocks))


def _settled(answers: list[Found | Need]) -> list[Found]:
    return [answer for answer in answers if not isinstance(answer, Need)]
