"""Which versions of a key a flush or compaction keeps, and which one a read sees.

Both go through the rows of one key from new to old. A value or tombstone is a barrier: it hides everything older. Merge
operands are above a barrier and are folded onto it. A row has expired when the clock reaches its `expires_ms`. An
expired value acts as a tombstone; an expired operand is ignored.

No read misses a row that retention drops, as long as reads are at `min_seq` or later and the clock does not go back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from flagstone.errors import InvalidRequest
from flagstone.lsm.merge_operator import NO_OPERATOR, MergeOperator, fold, fold_from_nothing
from flagstone.types import MERGE, TOMBSTONE, VALUE, EntryTuple, Row


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """What a flush or a compaction may drop.

    `min_seq` is the smallest sequence number that a read may use: of the versions up to it only the newest is kept.
    Rows that expired at or before `clock_ms` are dropped. `keep_tombstones` is False only if no older data of the same
    keys is below the output (the last run of its tree). With `keep_unfoldable`, merge rows stay as they are if there is
    no operator or it raises. A flush needs that: otherwise one bad row would prevent recovery.
    """

    min_seq: int
    clock_ms: int
    keep_tombstones: bool
    merge_operator: MergeOperator | None = None
    keep_unfoldable: bool = False


def retain(rows: Iterable[EntryTuple], policy: RetentionPolicy) -> Iterator[EntryTuple]:
    """The rows that stay. `rows` are ordered by key, then from new to old, without two of one key and sequence number.

    A merge row without an operator raises `InvalidRequest`, unless the policy has `keep_unfoldable`.
    """
    versions: list[EntryTuple] = []
    for row in rows:
        if versions and row[0] != versions[0][0]:
            yield from apply_retention(versions, policy)
            versions = []
        versions.append(row)
    if versions:
        yield from apply_retention(versions, policy)


def apply_retention(versions: Sequence[EntryTuple], policy: RetentionPolicy) -> Sequence[EntryTuple]:
    """The versions of one key that stay, from new to old. The order of the steps is SlateDB's."""
    if len(versions) == 1 and versions[0][2] == VALUE and versions[0][5] is None:
        return versions
    kept: list[EntryTuple] = []
    for row in _fold_operands(versions, policy):
        key, seq, kind, _, created_ms, expires_ms = row
        if expires_ms is not None and expires_ms <= policy.clock_ms:
            if kind == MERGE:
                continue
            # Without a tombstone, an older version that expires later would become visible again.
            kind = TOMBSTONE
            row = (key, seq, TOMBSTONE, b"", created_ms, None)  # noqa: PLW2901
        kept.append(row)
        if kind != MERGE and seq <= policy.min_seq:
            break
    if not policy.keep_tombstones:
        while kept and kept[-1][2] == TOMBSTONE:
            kept.pop()
    return kept


def condense(versions: Sequence[EntryTuple], policy: RetentionPolicy) -> list[EntryTuple]:
    """The versions of a key so far, from new to old, with those operands folded that retention would fold anyway.

    Retention gives the same result with or without this step, because operators are associative. It bounds the memory
    for a key with a million operands.
    """
    condensed: list[EntryTuple] = []
    at = 0
    while at < len(versions):
        end = at + 1
        row = versions[at]
        if policy.merge_operator is not None and row[2] == MERGE and row[1] <= policy.min_seq:
            while end < len(versions) and _joins(versions[end], row):
                end += 1
            row = _folded(versions[at:end], policy.merge_operator, policy.clock_ms)
        condensed.append(row)
        at = end
    return condensed


def visible_value(
    versions: Iterable[EntryTuple],
    *,
    max_seq: int,
    now_ms: int,
    include_expired: bool = False,
    merge_operator: MergeOperator | None = None,
) -> Row | None:
    """The row of one key that a read at `max_seq` sees, or None.

    `versions` come from new to old, and are used up to the first barrier. A row that is folded from several has the
    sequence number of the newest, the latest creation time and the earliest expiry. With `include_expired` expiry is
    ignored, as in SlateDB's reads. Operands without an operator raise `InvalidRequest`.
    """
    operands: list[EntryTuple] = []
    base: EntryTuple | None = None
    for row in versions:
        _, seq, kind, _, _, expires_ms = row
        if seq > max_seq:
            continue
        expired = not include_expired and expires_ms is not None and expires_ms <= now_ms
        if kind != MERGE:
            if kind == VALUE and not expired:
                base = row
            break
        if not expired:
            operands.append(row)
    if not operands:
        return None if base is None else Row(base[0], base[3], base[1], base[4], base[5])
    key, newest_seq = operands[0][:2]
    if merge_operator is None:
        raise InvalidRequest(f"{key!r} has merge operands and {NO_OPERATOR}")
    values = [row[3] for row in reversed(operands)]
    if base is None:
        value = fold_from_nothing(merge_operator, key, values)
    else:
        value = fold(merge_operator, key, base[3], values)
        operands.append(base)
    expiries = [row[5] for row in operands if row[5] is not None]
    return Row(key, value, newest_seq, _latest_creation(operands), min(expiries, default=None))


def _fold_operands(versions: Sequence[EntryTuple], policy: RetentionPolicy) -> Iterator[EntryTuple]:
    """The versions, with operands up to `min_seq` folded together, and onto their base if it is among the versions.

    Only rows with the same expiry are folded, so that each row still expires at its own time.
    """
    at = 0
    while at < len(versions):
        row = versions[at]
        if row[2] != MERGE:
            yield row
            at += 1
            continue
        if policy.merge_operator is None and not policy.keep_unfoldable:
            raise InvalidRequest(f"cannot compact {row[0]!r}: it has merge operands and {NO_OPERATOR}")
        if policy.merge_operator is None or row[1] > policy.min_seq:
            yield row
            at += 1
            continue
        end = _end_of_group(versions, at)
        group = list(versions[at:end])
        try:
            group = [_folded(group, policy.merge_operator, policy.clock_ms)]
        except Exception:
            if not policy.keep_unfoldable:
                raise
        yield from group
        at = end


def _end_of_group(versions: Sequence[EntryTuple], start: int) -> int:
    """The end of the operands with the same expiry as the one at `start`, including their base."""
    expires_ms = versions[start][5]
    end = start + 1
    while end < len(versions) and versions[end][5] == expires_ms:
        end += 1
        if versions[end - 1][2] != MERGE:
            break
    return end


def _joins(row: EntryTuple, newer: EntryTuple) -> bool:
    return row[2] == MERGE and row[0] == newer[0] and row[5] == newer[5]


def _folded(group: Sequence[EntryTuple], operator: MergeOperator, clock_ms: int) -> EntryTuple:
    """One row for a group of operands, newest first, which may end with their base."""
    key, seq, _, _, _, expires_ms = group[0]
    has_base = group[-1][2] != MERGE
    if len(group) == 1:
        return group[0]
    operands = [row[3] for row in reversed(group) if row[2] == MERGE]
    if expires_ms is not None and expires_ms <= clock_ms:
        value = b""  # the next step drops the row, so its value is not computed
    elif not has_base:
        value = fold(operator, key, None, operands)
    elif group[-1][2] == TOMBSTONE:
        value = fold_from_nothing(operator, key, operands)
    else:
        value = fold(operator, key, group[-1][3], operands)
    return (key, seq, VALUE if has_base else MERGE, value, _latest_creation(group), expires_ms)


def _latest_creation(rows: Sequence[EntryTuple]) -> int | None:
    return max((row[4] for row in rows if row[4] is not None), default=None)
