"""Merges one key range of a job, from its sources to uploaded SSTs, and applies retention and the user's filter.

Everything except the ids of the SSTs is deterministic: a repeated merge writes the same rows. So an interrupted merge
can continue after its last finished SST.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from flagstone.compaction.inputs import Source
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.codec import Codec
from flagstone.kernels import merge
from flagstone.lsm.compaction_filter import CompactionFilter, Decision, Outcome, Replace
from flagstone.lsm.retention import RetentionPolicy, apply_retention, condense
from flagstone.sst.builder import BuiltSst, SstBuilder
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, Row


def merge_sources(
    sources: Sequence[Source],
    output: SstBuilder,
    *,
    policy: RetentionPolicy,
    chosen: CompactionFilter | None,
    common: int,
    finished: Callable[[BuiltSst], None],
    check: Callable[[], None],
) -> int:
    """Merge `sources`, newest first, and call `finished` with each SST; returns how many rows had expired.

    Blocks that a merge would not change go into the output as they are stored. All keys share their first `common`
    bytes. `check` is called between chunks and raises to stop the merge.
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
    choice = output.choose_blocks(
        min_seq=policy.min_seq, clock_ms=policy.clock_ms, keep_tombstones=policy.keep_tombstones
    )

    def cut() -> None:
        sst = output.finish_if_any()
        if sst is not None:
            check()
            finished(sst)

    for source in sources:
        source.start()
    for number, source in enumerate(sources):
        _feed(merger, number, source, output.options.codec)
    versions: list[EntryTuple] = []
    status = merge.NEED
    while status != merge.DONE:
        check()
        status = _run(merger, sources)
        if status == merge.NEED:
            number = merger.waiting()
            _feed(merger, number, sources[number], output.options.codec)
            continue
        stream = merger.take()
        at = 0
        while at < len(stream):
            at = output.write(stream, at)
            if output.full:
                cut()
        if status == merge.BLOCKS:
            number, first, stop = merger.offered()
            chunk = sources[number].last
            assert chunk is not None, "an offering source was fed"
            merger.passed(output.take_blocks(choice, chunk, first, stop))
            if output.full:
                cut()
        elif status == merge.ROWS:
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


def _feed(merger: merge.Merger, number: int, source: Source, codec: Codec) -> None:
    chunk = source.next_chunk()
    if chunk is None:
        merger.end(number)
    else:
        merger.feed(number, chunk.data, chunk.bounds, chunk.low, chunk.high, chunk.stored_with(codec))


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


_Ask = Callable[[Row], Outcome]


def retain_and_filter(
    rows: Iterable[EntryTuple], policy: RetentionPolicy, chosen: CompactionFilter | None
) -> Iterator[EntryTuple]:
    """`lsm.retention.retain`, and the filter applied to every row that no snapshot needs."""
    ask = None if chosen is None else {VALUE: chosen.filter, MERGE: getattr(chosen, "filter_operand", None)}
    versions: list[EntryTuple] = []
    for row in rows:
        if versions and row[0] != versions[0][0]:
            yield from _kept(versions, policy, ask)
            versions = []
        versions.append(row)
    if versions:
        yield from _kept(versions, policy, ask)


def _kept(
    versions: list[EntryTuple], policy: RetentionPolicy, ask: dict[int, _Ask | None] | None
) -> Iterable[EntryTuple]:
    retained = apply_retention(versions, policy)
    if ask is None:
        return retained
    kept = []
    for row in retained:
        decide = ask.get(row[2])
        if decide is None or row[1] > policy.min_seq:
            kept.append(row)
        elif (changed := _decided(row, decide)) is not None:
            kept.append(changed)
    if not policy.keep_tombstones:
        # The filter may have uncovered tombstones, or made them.
        while kept and kept[-1][2] == TOMBSTONE:
            kept.pop()
    return kept


def _decided(row: EntryTuple, ask: _Ask) -> EntryTuple | None:
    key, seq, kind, value, created_ms, expires_ms = row
    try:
        outcome = ask(Row(key, value, seq, created_ms, expires_ms))
    except Exception as error:
        error.add_note(f"raised by the compaction filter for key {key!r}")
        raise
    match outcome:
        case Decision.KEEP:
            return row
        case Decision.DROP:
            return None
        case Decision.TOMBSTONE:
            return (key, seq, TOMBSTONE, b"", created_ms, None)
        case Replace(bytes() as replaced):
            return (key, seq, kind, replaced, created_ms, expires_ms)
    raise InvalidRequest(
        f"the compaction filter returned {outcome!r} for key {key!r}; it must return Decision.KEEP, "
        "Decision.DROP, Decision.TOMBSTONE or Replace(bytes)"
    )
