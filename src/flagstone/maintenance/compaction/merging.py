"""Merges one key range of a job, from its sources to uploaded tables.

Everything is deterministic but the ids of the tables: a run that is repeated writes the same rows, which is what
lets an interrupted one be continued behind its last finished table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flagstone.errors import CorruptData
from flagstone.kernels import merge
from flagstone.lsm.compaction_filter import CompactionFilter
from flagstone.lsm.retention import RetentionPolicy, condense
from flagstone.maintenance.compaction.filters import retain_and_filter
from flagstone.maintenance.compaction.inputs import Source
from flagstone.table.builder import EncodedTable
from flagstone.table.output import OutputWriter
from flagstone.types import EntryTuple


def merge_sources(
    sources: Sequence[Source],
    output: OutputWriter,
    *,
    policy: RetentionPolicy,
    chosen: CompactionFilter | None,
    common: int,
    finished: Callable[[EncodedTable], None],
    check: Callable[[], None],
) -> int:
    """Merge `sources`, newest first, and call `finished` with each table; returns how many rows had expired.

    All keys share their first `common` bytes. `check` is called between chunks and raises to stop.
    """
    if not sources:
        return 0
    merger = merge.Merger(
        len(sources),
        min_seq=policy.min_seq,
        clock_ms=policy.clock_ms,
        keep_tombstones=policy.keep_tombstones,
        has_operator=policy.merge_operator is not None,
        by_rows=chosen is not None,
        common=common,
    )

    def cut() -> None:
        table = output.finish()
        if table is not None:
            check()
            finished(table)

    for source in sources:
        source.start()
    for number, source in enumerate(sources):
        _feed(merger, number, source)
    versions: list[EntryTuple] = []
    status = merge.NEED
    while status != merge.DONE:
        check()
        status = _run(merger, sources)
        if status == merge.NEED:
            number = merger.waiting()
            _feed(merger, number, sources[number])
            continue
        stream = merger.take()
        at = 0
        while at < len(stream):
            at = output.write(stream, at)
            if output.full:
                cut()
        if status == merge.ROWS:
            versions += merger.rows()
            if merger.unfinished():
                versions = condense(versions, policy)
                continue
            for row in retain_and_filter(versions, policy, chosen):
                output.add_row(row)
                if output.full:
                    cut()
            versions = []
    cut()
    expired: int = merger.expired()
    return expired


def _feed(merger: merge.Merger, number: int, source: Source) -> None:
    chunk = source.next_chunk()
    if chunk is None:
        merger.end(number)
    else:
        merger.feed(number, chunk.data, chunk.bounds, chunk.low, chunk.high)


def _run(merger: merge.Merger, sources: Sequence[Source]) -> int:
    try:
        status: int = merger.run()
    except CorruptData as error:
        number, block = merger.failed_at()
        chunk = sources[number].last
        if chunk is None:
            raise
        raise chunk.damaged(error, block) from None
    return status
