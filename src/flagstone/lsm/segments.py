"""Segments: all keys with one prefix are in a tree of their own.

An extractor finds the prefix of every key that is written. No prefix begins with another, so a key has at most one
segment. All functions here take the prefixes in ascending order.
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

    It must find a prefix in every key that is written, return that prefix for the prefix itself, and never return a
    prefix that begins with another one. Its name is stored in the database and must be the same at every opening.
    """


def route(extractor: SegmentExtractor, key: bytes) -> bytes:
    """The segment of a key that is written. Raises `InvalidRequest` if the extractor finds none."""
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
    """The prefixes with a new one, sorted. Raises `InvalidRequest` if it overlaps another one."""
    at = bisect_left(prefixes, prefix)
    if at < len(prefixes) and prefixes[at] == prefix:
        return tuple(prefixes)
    grown = (*prefixes[:at], prefix, *prefixes[at:])
    # A string that begins with a prefix sorts directly after it, so only the neighbours can overlap.
    overlap = _find_overlap(grown[max(at - 1, 0) : at + 2])
    if overlap is not None:
        raise InvalidRequest(
            f"the segment extractor gives both {overlap[0]!r} and {overlap[1]!r}; "
            "no prefix may begin with another"
        )
    return grown


def check_segments(prefixes: Iterable[bytes]) -> None:
    """Raise `CorruptData` unless the stored prefixes ascend and none begins with another."""
    held = tuple(prefixes)
    if any(left >= right for left, right in pairwise(held)):
        raise CorruptData("the segments are not in ascending order of their prefixes")
    overlap = _find_overlap(held)
    if overlap is not None:
        raise CorruptData(f"the segments {overlap[0]!r} and {overlap[1]!r} overlap")


def check_extractor(
    extractor: SegmentExtractor | None, *, stored_name: str | None, prefixes: Iterable[bytes]
) -> None:
    """Raise `InvalidRequest` if the extractor is not the one that the database was created with."""
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
    """The segment of `key`; None if no segment can hold it."""
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
