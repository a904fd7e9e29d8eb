"""Segments: keys with a common prefix live in a tree of their own.

An extractor cuts the prefix of every key that is written. The prefixes form an antichain: none begins with
another, so at most one of them leads to a given key. Everywhere here they are passed in ascending order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.filter import PrefixExtractor
from flagstone.types import KeyRange


class SegmentExtractor(PrefixExtractor, Protocol):
    """Decides the segment of a key: a part of its beginning that is not empty.

    It must give a prefix to every key that is written, give that prefix for the prefix itself, and never give one
    that begins with another. Its name is stored with the database and must be the same at every opening.
    """


def route(extractor: SegmentExtractor, key: bytes) -> bytes:
    """The segment that a write of `key` belongs to. A key the extractor cannot place is refused."""
    prefix = extractor.prefix(key)
    if not prefix:
        raise InvalidRequest(f"the segment extractor {extractor.name!r} finds no prefix in the key {key!r}")
    if not key.startswith(prefix):
        raise InvalidRequest(
            f"the segment extractor {extractor.name!r} gives {prefix!r} for the key {key!r}, "
            "which does not begin with it"
        )
    return prefix


def add_prefix(prefixes: Sequence[bytes], prefix: bytes) -> tuple[bytes, ...]:
    """The prefixes with a new one in its place. One that leads to keys of another is refused."""
    at = bisect_left(prefixes, prefix)
    if at < len(prefixes) and prefixes[at] == prefix:
        return tuple(prefixes)
    grown = (*prefixes[:at], prefix, *prefixes[at:])
    # Whatever begins with a prefix follows it directly, so the neighbours tell it all.
    overlap = _find_overlap(grown[max(at - 1, 0) : at + 2])
    if overlap is not None:
        raise InvalidRequest(
            f"the segment extractor gives both {overlap[0]!r} and {overlap[1]!r}; "
            "no prefix may begin with another"
        )
    return grown


def check_segments(prefixes: Iterable[bytes]) -> None:
    """Raise CorruptData unless the stored prefixes ascend and none begins with another."""
    held = tuple(prefixes)
    if any(left >= right for left, right in pairwise(held)):
        raise CorruptData("the segments are not in ascending order of their prefixes")
    overlap = _find_overlap(held)
    if overlap is not None:
        raise CorruptData(f"the segments {overlap[0]!r} and {overlap[1]!r} overlap")


def check_extractor(
    extractor: SegmentExtractor | None, *, stored_name: str | None, prefixes: Iterable[bytes]
) -> None:
    """Refuse to open a database with another extractor than the one its segments were made by."""
    name = None if extractor is None else extractor.name
    if name != stored_name:
        has = "has no segments" if stored_name is None else f"has the segment extractor {stored_name!r}"
        given = "none was given" if name is None else f"{name!r} was given"
        raise InvalidRequest(f"the database {has}, but {given}; it cannot be changed after creation")
    if extractor is None:
        return
    for prefix in prefixes:
        if extractor.prefix(prefix) != prefix:
            raise InvalidRequest(
                f"the segment extractor {name!r} gives {extractor.prefix(prefix)!r} for the segment "
                f"{prefix!r}: it is not the one that made it"
            )


def segment_of(key: bytes, prefixes: Sequence[bytes]) -> bytes | None:
    """The prefix that leads to `key`; None when no segment can hold it."""
    at = bisect_right(prefixes, key) - 1
    return prefixes[at] if at >= 0 and key.startswith(prefixes[at]) else None


def segments_in(keys: KeyRange, prefixes: Sequence[bytes]) -> Sequence[bytes]:
    """The prefixes of the segments that can hold keys of the range, in ascending order."""
    if keys.empty:
        return ()
    first, last = 0, len(prefixes)
    if keys.start is not None:
        first = bisect_right(prefixes, keys.start)
        if first and keys.start.startswith(prefixes[first - 1]):
            first -= 1
    if keys.stop is not None:
        last = bisect_left(prefixes, keys.stop)
    return prefixes[first:last]


def _find_overlap(prefixes: Sequence[bytes]) -> tuple[bytes, bytes] | None:
    return next(((left, right) for left, right in pairwise(prefixes) if right.startswith(left)), None)
