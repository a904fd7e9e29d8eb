"""How a new owner ends the WAL of a writer that may have several files under way.

A writer with a limit of P sends file k only when every file up to k - P is on the store, and reports rows as durable in
the order of the files. So if another process creates file F, the former writer reports nothing from F on, and has sent
nothing above F + P - 1. The new owner creates a fence at the first free id F, and then a void file at each of the P - 1
ids after it. From then on no id up to F + P - 1 is free, and the former writer uses none above.

Some of these ids may hold files of the former writer, which were created although a file before them was not. No caller
was informed that their rows are durable, and rows before them are lost. They must not count: the new owner replaces
them by void files, before it writes rows itself. It replaces a file that exists, so a request of the former writer
that arrives late finds the id taken.

An owner that crashes after its first fence leaves such files behind. The record in the manifest
(`flagstone.metadata.parallel_wal`) says up to where the WAL is in order; the first empty file after that is the fence
F of the crashed owner, and the files with rows among the P - 1 after it are the ones that do not count.

Until the new owner is done, a reader stops at the first empty file above the end of order (`settled_end`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from flagstone.metadata.annotations import ParallelWal
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.parallel_wal import find_parallel_wal
from flagstone.runtime.pool import IoPool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectExists, ObjectStore
from flagstone.types import WalId
from flagstone.wal.frontier import VOID, before_hole, write_fence

_log = logging.getLogger("flagstone.wal")


class EndedWal(NamedTuple):
    """The fences of a new owner: rows before `first` count, and its own files come after `last`."""

    first: WalId
    last: WalId


def end_wal(
    wal_store: ObjectStore,
    paths: DbPaths,
    candidate: WalId,
    claimed: Manifest,
    *,
    refresh: Callable[[], Manifest],
    pool: IoPool,
) -> EndedWal:
    """Fence every former writer; see `write_fence` for the arguments.

    After a crash in here the next owner does the same again.
    """
    record = find_parallel_wal(claimed)
    if record is not None:
        # The caller may have found the candidate by a manifest that did not allow holes yet.
        candidate = WalId(before_hole(wal_store, paths, claimed, WalId(candidate - 1), pool=pool) + 1)
    first = write_fence(wal_store, paths, candidate, claimed, refresh=refresh, pool=pool)
    if record is None:
        return EndedWal(first, first)
    last = WalId(first + record.limit - 1)
    # One after the other: a crash between them leaves no hole, which the next owner would have to look for.
    following = (WalId(wal_id) for wal_id in range(first + 1, last + 1))
    void = [wal_id for wal_id in following if _is_taken(wal_store, paths, wal_id)]
    if void:
        refresh()
    if claimed.writer_epoch - record.settled_epoch > 1:
        # An owner between the last complete takeover and this one may have crashed after its fence.
        void += plan_void(record, _list_sizes(wal_store, paths, record, first), first)
    for wal_id in void:
        _make_void(wal_store, paths.wal(wal_id))
    return EndedWal(first, last)


def plan_void(record: ParallelWal, sizes: Mapping[WalId, int], end: WalId) -> list[WalId]:
    """The files with rows that do not count because a file before them was never created. Pure.

    `sizes` are those of the files from the end of order up to the new fence `end`.
    """
    if record.through is None:
        return []
    start = record.through
    fence = min((wal_id for wal_id, size in sizes.items() if start < wal_id < end and not size), default=None)
    if fence is None:
        return []
    zone = range(fence + 1, min(fence + record.limit, end))
    return [WalId(wal_id) for wal_id in zone if sizes.get(WalId(wal_id), 0) > len(VOID)]


def _is_taken(wal_store: ObjectStore, paths: DbPaths, wal_id: WalId) -> bool:
    try:
        wal_store.put_if_absent(paths.wal(wal_id), VOID)
    except ObjectExists:
        return True
    return False


def _make_void(wal_store: ObjectStore, path: str) -> None:
    size = wal_store.head(path).size
    if size > len(VOID):
        _log.warning("dropped a WAL file after a hole path=%s size=%d", path, size)
        wal_store.put(path, VOID)


def _list_sizes(wal_store: ObjectStore, paths: DbPaths, record: ParallelWal, end: WalId) -> dict[WalId, int]:
    if record.through is None:
        return {}
    sizes: dict[WalId, int] = {}
    for meta in wal_store.list(paths.wal_folder, after=paths.wal(record.through)):
        wal_id = paths.parse_wal(meta.path)
        if wal_id is not None and wal_id < end:
            sizes[wal_id] = meta.size
    return sizes
