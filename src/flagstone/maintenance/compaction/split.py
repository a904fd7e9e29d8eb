"""Cuts a job into key ranges that are merged independently of each other. Pure, and the same as SlateDB's.

Every source table names a few keys, spread evenly over its bytes (anchors); boundaries are chosen among all of
them so that the bytes between two are about equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from flagstone.format.sst import BlockIndex
from flagstone.lsm.tree import BytesRange
from flagstone.types import KeyRange

MAX_ANCHORS: Final = 128
"""Per table."""

WHOLE: Final = (BytesRange(),)


@dataclass(frozen=True, slots=True)
class Anchor:
    """A key, and how many bytes of one table lie between it and the table's next anchor."""

    key: bytes
    size: int


@dataclass(frozen=True, slots=True)
class SampledView:
    """What is known of one source table: its size as schedulers count it, and its anchors."""

    size: int
    anchors: tuple[Anchor, ...]


def sample_view(index: BlockIndex, keys: KeyRange, size: int) -> SampledView:
    """The anchors of a table of which `keys` are visible."""
    stride = -(-len(index) // MAX_ANCHORS)
    anchors = []
    for first in range(0, len(index), stride):
        last = min(first + stride, len(index)) - 1
        # The first block has an empty key in the index, which is in no table's range.
        if index.first_keys[first] in keys:
            anchors.append(Anchor(index.first_keys[first], index.stops[last] - index.offsets[first]))
    return SampledView(size, tuple(anchors))


def plan_ranges(views: Sequence[SampledView], max_subcompactions: int) -> tuple[BytesRange, ...]:
    """Ranges that touch each other and cover all keys: one, or up to `max_subcompactions`."""
    anchors = sorted((anchor for view in views for anchor in view.anchors), key=lambda anchor: anchor.key)
    total = sum(anchor.size for anchor in anchors)
    if max_subcompactions <= 1 or not anchors:
        return WHOLE
    # A range smaller than a table would not read less: tables overlap all ranges alike.
    target = max(total // max_subcompactions, *(view.size for view in views))
    if target == 0 or target >= total:
        return WHOLE
    boundaries: list[bytes] = []
    threshold, passed, last = target, 0, anchors[0].key
    for anchor in anchors:
        if passed >= threshold and len(boundaries) < max_subcompactions - 1 and anchor.key > last:
            boundaries.append(anchor.key)
            last = anchor.key
            threshold += target
        passed += anchor.size
    edges = [None, *boundaries, None]
    return tuple(BytesRange.of(KeyRange(start, stop)) for start, stop in pairwise(edges))
