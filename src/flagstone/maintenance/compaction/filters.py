"""Applies a user's compaction filter to the rows that retention has kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from flagstone.errors import InvalidRequest
from flagstone.lsm.compaction_filter import CompactionFilter, Decision, Outcome, Replace
from flagstone.lsm.retention import RetentionPolicy, apply_retention
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, Row

_Ask = Callable[[Row], Outcome]


def retain_and_filter(
    rows: Iterable[EntryTuple], policy: RetentionPolicy, chosen: CompactionFilter | None
) -> Iterator[EntryTuple]:
    """`lsm.retention.retain`, with the filter asked about every row that no snapshot needs apart."""
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
        question = ask.get(row[2])
        if question is None or row[1] > policy.min_seq:
            kept.append(row)
        elif (changed := _decided(row, question)) is not None:
            kept.append(changed)
    if not policy.keep_tombstones:
        # The filter may have uncovered some, or made them.
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
        f"the compaction filter answered {outcome!r} for key {key!r}; it must return Decision.KEEP, "
        "Decision.DROP, Decision.TOMBSTONE or Replace(bytes)"
    )
