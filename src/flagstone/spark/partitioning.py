"""Cuts the keys of a read into ranges of about equal bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from flagstone.maintenance.compaction.split import Anchor
from flagstone.types import KeyRange


def plan_count(total_bytes: int, *, partitions: int | None, partition_bytes: int) -> int:
    """How many partitions: as asked for, or as many as make each about `partition_bytes`."""
    return partitions if partitions is not None else max(1, -(-total_bytes // partition_bytes))


def plan_partitions(anchors: Iterable[Anchor], keys: KeyRange, count: int) -> list[KeyRange]:
    """Ranges that touch each other and together are `keys`: `count`, or fewer where there are too few anchors.

    An anchor says how many bytes begin at its key; those of all tables of all levels count together.
    """
    inside = sorted((anchor for anchor in anchors if anchor.key in keys), key=lambda anchor: anchor.key)
    total = sum(anchor.size for anchor in inside)
    boundaries: list[bytes] = []
    passed, last = 0, keys.start or b""
    for anchor in inside:
        if len(boundaries) == count - 1:
            break
        if anchor.key > last and passed * count >= total * (len(boundaries) + 1):
            boundaries.append(anchor.key)
            last = anchor.key
        passed += anchor.size
    edges = [keys.start, *boundaries, keys.stop]
    return [KeyRange(start, stop) for start, stop in pairwise(edges)]


def split_points(points: Sequence[bytes], count: int) -> list[tuple[bytes, ...]]:
    """The keys in `count` groups of neighbours, none empty."""
    groups = max(1, min(count, len(points)))
    edges = [len(points) * at // groups for at in range(groups + 1)]
    return [tuple(points[start:stop]) for start, stop in pairwise(edges) if stop > start]
