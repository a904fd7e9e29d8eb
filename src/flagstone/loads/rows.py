"""The rows of a bulk load, read from the SSTs that its record keeps: in key order, piece by piece."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from flagstone.errors import InternalError, InvalidRequest
from flagstone.loads.edit import RECORD_LIFETIME_S, VisibleLoad
from flagstone.metadata.manifest import SsTable
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.pool import Future, IoPool
from flagstone.sst.cache import SstCache
from flagstone.sst.reader import INDEX, Sst
from flagstone.sst.requests import Need, need_index
from flagstone.sst.store import Pinned, SstGone, SstStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import EntryTuple, KeyRange

PIECE_BYTES: Final = 2 * 1024 * 1024
"""About how many stored bytes become one piece; the next piece is fetched meanwhile."""


_ALL_KEYS: Final = KeyRange()


def load_gone(seq: int) -> InvalidRequest:
    """The error for a load whose rows are gone."""
    return InvalidRequest(
        f"the rows of the bulk load with the sequence number {seq} are gone: without a retention checkpoint they are "
        f"kept for {RECORD_LIFETIME_S // 60} minutes; start over with a copy of the database"
    )


def fetch_load_ssts(manifests: ManifestStore, load: VisibleLoad) -> list[SsTable]:
    """The SSTs of a load in key order.

    Raises:
        InvalidRequest: they were not kept.

    """
    if load.deleted is not None:
        raise InternalError(f"the range delete {load.seq} has no rows")
    try:
        brought = manifests.load(load.manifest_id)
    except ObjectMissing:
        raise load_gone(load.seq) from None
    if load.id_prefix is None:
        return [brought.sst(view) for run in brought.tree.runs[:1] for view in run.views]
    found = [brought.sst(view) for view in brought.views if load.owns(view.sst_id)]
    return sorted(found, key=lambda sst: sst.info.first_entry or b"")


class LoadPiece(NamedTuple):
    """Blocks of one SST of a load, checked and still encoded."""

    sst: Sst
    numbers: range
    blocks: list[bytes]

    def rows(self) -> list[EntryTuple]:
        """Their rows. Raises `CorruptData` with object and block."""
        numbered = zip(self.numbers, self.blocks, strict=True)
        return [row for number, block in numbered for row in self.sst.rows_of(block, number)]


class LoadRows:
    """Reads SSTs of loads from one store, without a cache: each is read once."""

    def __init__(self, store: ObjectStore, paths: DbPaths, *, pool: IoPool) -> None:
        self._ssts = SstStore(store, paths, cache=SstCache(capacity_bytes=0), pool=pool)
        self._pool = pool

    def pieces(self, load: VisibleLoad, sst: SsTable) -> Iterator[list[EntryTuple]]:
        """The rows of one SST of the load, in pieces. Two pieces are in memory at most."""
        for piece in self.encoded(load, sst):
            yield piece.rows()

    def encoded(self, load: VisibleLoad, sst: SsTable, keys: KeyRange = _ALL_KEYS) -> Iterator[LoadPiece]:
        """`pieces` before their blocks are decoded; without the blocks that have no key in the range."""
        opened = self._ssts.open(sst.id, sst.info, format_version=sst.format_version)
        under_way: Future[Pinned] | None = None
        try:
            fetched = self._ssts.fetch_request(need_index(opened), admit=False)
            index = fetched[opened, INDEX]
            spans = _spans(index.offsets, index.stops, wanted_blocks(index.first_keys, keys))
            for at, span in enumerate(spans):
                whole = (opened, span[0]) in fetched
                if not whole and under_way is None:
                    under_way = self._request(opened, index, span)
                blocks = fetched if under_way is None else under_way.result()
                under_way = None
                if not whole and at + 1 < len(spans):
                    under_way = self._request(opened, index, spans[at + 1])
                yield LoadPiece(opened, span, [blocks[opened, number] for number in span])
        except SstGone:
            raise load_gone(load.seq) from None
        finally:
            if under_way is not None:
                under_way.cancel()
            self._ssts.drop([sst.id])

    def _request(self, sst: Sst, index: object, span: range) -> Future[Pinned]:
        return self._pool.submit(self._ssts.fetch_request, Need(sst, index, list(span)), admit=False)


def wanted_blocks(first_keys: Sequence[bytes], keys: KeyRange) -> range:
    """The numbers of the blocks that may have keys of the range, by the first keys of the blocks in the index. Pure."""
    first = 0 if keys.start is None else max(bisect_left(first_keys, keys.start) - 1, 0)
    return range(first, len(first_keys) if keys.stop is None else bisect_left(first_keys, keys.stop))


def _spans(offsets: list[int], stops: list[int], wanted: range) -> list[range]:
    """The numbers of the wanted blocks, cut so that each span is about a piece; at least one block each."""
    spans, first = [], wanted.start
    for number in wanted:
        if stops[number] - offsets[first] >= PIECE_BYTES or number == wanted.stop - 1:
            spans.append(range(first, number + 1))
            first = number + 1
    return spans
