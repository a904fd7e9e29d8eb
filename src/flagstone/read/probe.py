"""Point reads from memory: answers at once, or says what is missing. Never blocks.

A read is "probe, fetch, probe again": probing changes nothing, so it may be repeated, and what was fetched is
handed back as `pinned`, so that a cache too small for it cannot keep a read from coming to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flagstone.kernels import probe as probe_kernel
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.retention import visible_value
from flagstone.read.view import ReadView
from flagstone.table.table_store import Pinned
from flagstone.types import EntryTuple, Row

Need = probe_kernel.Need
Found = EntryTuple | list[EntryTuple] | None
"""The newest row of a key; a list when that is a merge operand, down to the first row that is none; None."""

_find: Final = probe_kernel.find


def probe(view: ReadView, key: bytes, max_seq: int, pinned: Pinned | None = None) -> Found | Need:
    """What the newest source that has `key` with seq <= `max_seq` says, or what must be fetched to know it.

    Tombstones and expired rows come back as they are; `visible_row` tells what a caller sees of them. Raises
    `CorruptData` naming the object when a block turns out to be damaged.
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
) -> list[Need]:
    """`probe` every key whose answer is still a `Need`, or all of them while `answers` is empty.

    Fills in `answers`, one per key, and returns what is still missing, so that one round of overlapping requests
    serves all keys.
    """
    if not answers:
        answers[:] = [probe(view, key, max_seq, pinned) for key in keys]
    else:
        for at, answer in enumerate(answers):
            if isinstance(answer, Need):
                answers[at] = probe(view, keys[at], max_seq, pinned)
    return [answer for answer in answers if isinstance(answer, Need)]


def visible_row(
    found: Found,
    *,
    max_seq: int,
    now_ms: int,
    include_expired: bool = False,
    merge_operator: MergeOperator | None = None,
) -> Row | None:
    """What a caller sees of what was found: nothing for tombstones and expired rows, operands folded."""
    if found is None:
        return None
    return visible_value(
        found if isinstance(found, list) else (found,),
        max_seq=max_seq,
        now_ms=now_ms,
        include_expired=include_expired,
        merge_operator=merge_operator,
    )
