"""The rows of a bulk load, read from the tables that its mark keeps: in the order of their keys, piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flagstone.metadata.manifest import SsTable
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.pool import Future, IoPool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.table.cache import TableCache
from flagstone.table.reader import META, Table
from flagstone.table.table_store import Need, Pinned, TableGone, TableStore
from flagstone.types import EntryTuple, WalId
from flagstone.wal.changes import Change, ChangeBatch, Position, change_of
from flagstone.wal.load_marks import ToldLoad, gone

PIECE_BYTES: Final = 2 * 1024 * 1024
"""About how many stored bytes become one batch; the next ones are fetched meanwhile."""


def fetch_load_tables(manifests: ManifestStore, load: ToldLoad) -> list[SsTable]:
    """The tables of a load in the order of their keys.

    Raises:
        InvalidRequest: nobody has kept them.

    """
    try:
        brought = manifests.load(load.manifest_id)
    except ObjectMissing:
        raise gone(load.seq) from None
    return [brought.table(view) for run in brought.tree.runs[:1] for view in run.views]


class LoadRows:
    """Reads tables of loads from one store, past every cache: each is read once."""

    def __init__(self, store: ObjectStore, paths: DbPaths, *, pool: IoPool) -> None:
        self._tables = TableStore(store, paths, cache=TableCache(capacity_bytes=0), pool=pool)
        self._pool = pool

    def batches(
        self, load: ToldLoad, tables: list[SsTable], next_id: WalId, *, skip: int = 0
    ) -> Iterator[ChangeBatch]:
        """The load as changes, without its first `skip` rows. Not all of it is in memory at any time.

        The position of a consumer stays before the load, with a count of rows, until the last batch was used.
        """
        used = 0
        held: list[Change] = []
        for table in tables:
            for rows in self.pieces(load, table):
                fresh = rows[max(skip - used, 0) :]
                used += len(rows)
                if not fresh:
                    continue
                if held:
                    stands = Position(next_id, load.place.seq, used - len(fresh))
                    yield ChangeBatch(None, held, stands)
                held = [change_of(row, None) for row in fresh]
        if held:
            yield ChangeBatch(None, held, Position(next_id, load.seq))

    def pieces(self, load: ToldLoad, table: SsTable) -> Iterator[list[EntryTuple]]:
        """The rows of one table of the load, in pieces."""
        opened = self._tables.open(table.id, table.info, format_version=table.format_version)
        under_way: Future[Pinned] | None = None
        try:
            fetched = self._tables.fetch_request(Need(opened, None, []), admit=False)
            index = fetched[opened, META][0]
            spans = _spans(index.offsets, index.stops)
            for at, span in enumerate(spans):
                whole = (opened, span[0]) in fetched
                if not whole and under_way is None:
                    under_way = self._ask(opened, index, span)
                blocks = fetched if under_way is None else under_way.result()
                under_way = None
                if not whole and at + 1 < len(spans):
                    under_way = self._ask(opened, index, spans[at + 1])
                yield [row for number in span for row in opened.rows_of(blocks[opened, number], number)]
        except TableGone:
            raise gone(load.seq) from None
        finally:
            if under_way is not None:
                under_way.cancel()
            self._tables.drop([table.id])

    def _ask(self, table: Table, index: object, span: range) -> Future[Pinned]:
        return self._pool.submit(self._tables.fetch_request, Need(table, index, list(span)), admit=False)


def _spans(offsets: list[int], stops: list[int]) -> list[range]:
    """The numbers of all blocks, cut so that each span is about a piece. At least one block each."""
    spans, first = [], 0
    for number, stop in enumerate(stops):
        if stop - offsets[first] >= PIECE_BYTES or number == len(stops) - 1:
            spans.append(range(first, number + 1))
            first = number + 1
    return spans
