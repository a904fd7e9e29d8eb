"""Which keys a database accepts. A write of any other key is refused:

- A key that fits no segment: once such a row is in the WAL, its memtable can never be flushed, and no opening gets
  past it.
- A key outside the writable range of a clone: the next projection or union would leave the row out. Reads there are
  refused as well, because another database holds the key.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Protocol

from flagstone.errors import InvalidRequest
from flagstone.lsm.segments import SegmentExtractor, add_prefix, route
from flagstone.types import KeyRange


class KeyCheck(Protocol):
    """Decides which keys may be written."""

    def admit(self, keys: Iterable[bytes]) -> None:
        """Return if every key may be written. Otherwise raise `InvalidRequest` and remember none of them."""
        ...


class SegmentCheck:
    """The segments of the manifest, and those that later writes have begun. For one thread at a time."""

    def __init__(self, extractor: SegmentExtractor, prefixes: Iterable[bytes] = ()) -> None:
        self._extractor = extractor
        self._prefixes = tuple(prefixes)

    def admit(self, keys: Iterable[bytes]) -> None:
        """Return if every key has a segment. Otherwise raise `InvalidRequest` and remember none of them."""
        prefixes = self._prefixes
        for key in keys:
            prefixes = add_prefix(prefixes, route(self._extractor, key))
        self._prefixes = prefixes


class KeyRanges:
    """The writable range of a projection or union: ranges in ascending order that are not adjacent."""

    __slots__ = ("_ranges", "_starts")

    def __init__(self, ranges: Sequence[KeyRange]) -> None:
        self._starts = [keys.start or b"" for keys in ranges]
        self._ranges = tuple(ranges)

    def __contains__(self, key: bytes) -> bool:
        at = bisect_right(self._starts, key) - 1
        return at >= 0 and key in self._ranges[at]

    def check_read(self, *keys: bytes) -> None:
        """Return if every key is inside. Otherwise raise `InvalidRequest` with the key and the ranges."""
        for key in keys:
            if key not in self:
                raise InvalidRequest(
                    f"the key {key[:40]!r} is outside the writable range of this clone, {self}; "
                    "read it from the database that holds its range"
                )

    def check_scan(self, keys: KeyRange) -> None:
        """Return if some key of `keys` is inside, or if `keys` is empty; otherwise raise `InvalidRequest`."""
        if self._is_outside(keys):
            raise InvalidRequest(
                f"the scan of {_text(keys)} is outside the writable range of this clone, {self}; "
                "scan the database that holds this range"
            )

    def check_delete(self, keys: KeyRange) -> None:
        """Return if some key of `keys` is inside, or if `keys` is empty; otherwise raise `InvalidRequest`."""
        if self._is_outside(keys):
            raise InvalidRequest(
                f"the keys {_text(keys)} are outside the writable range of this clone, {self}; "
                "delete them in the database that holds this range"
            )

    def _is_outside(self, keys: KeyRange) -> bool:
        return not keys.empty and all(keys.intersect(inside).empty for inside in self._ranges)

    def __str__(self) -> str:
        return " and ".join(map(_text, self._ranges)) or "no key at all"


class WritableRangeCheck:
    """Admits the keys inside the writable range that `inner` admits, too."""

    def __init__(self, ranges: KeyRanges, inner: KeyCheck | None = None) -> None:
        self._ranges = ranges
        self._inner = inner

    def admit(self, keys: Iterable[bytes]) -> None:
        """Return if every key is in a range and `inner` admits it. Otherwise raise `InvalidRequest`."""
        held = list(keys)
        for key in held:
            if key not in self._ranges:
                raise InvalidRequest(
                    f"the key {key[:40]!r} is outside the writable range of this clone, {self._ranges}; "
                    "write it to the database that holds its range"
                )
        if self._inner is not None:
            self._inner.admit(held)


def _text(keys: KeyRange) -> str:
    start = "the start" if keys.start is None else repr(keys.start)
    return f"{start} up to {'the end' if keys.stop is None else repr(keys.stop)}"
