"""Keys outside the range of a projected database are refused when they are written, and when they are read.

A row written there would be in the database, but not in the range that was cut out of its parent: the next projection
or union would silently leave it out. A read there would say that a key does not exist, although another database
holds it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from flagstone.errors import InvalidRequest
from flagstone.types import KeyRange
from flagstone.write.segment_gate import KeyGate


class KeyRanges:
    """The keys that a projection was cut out for: some ranges, in ascending order, that do not touch."""

    __slots__ = ("_ranges", "_starts")

    def __init__(self, ranges: Sequence[KeyRange]) -> None:
        self._starts = [keys.start or b"" for keys in ranges]
        self._ranges = tuple(ranges)

    def __contains__(self, key: bytes) -> bool:
        at = bisect_right(self._starts, key) - 1
        return at >= 0 and key in self._ranges[at]

    def check_read(self, *keys: bytes) -> None:
        """Return if every key is inside. Otherwise raise `InvalidRequest` that names the key and the ranges."""
        for key in keys:
            if key not in self:
                raise InvalidRequest(
                    f"the key {key[:40]!r} is outside of what this clone was cut out for, {self}; "
                    "read it from the database that holds its range"
                )

    def check_scan(self, keys: KeyRange) -> None:
        """Return if some key of `keys` is inside, or if `keys` is empty; otherwise raise `InvalidRequest`."""
        if not keys.empty and all(keys.intersect(inside).empty for inside in self._ranges):
            raise InvalidRequest(
                f"the scan of {_text(keys)} is outside of what this clone was cut out for, {self}; "
                "scan the database that holds this range"
            )

    def __str__(self) -> str:
        return " and ".join(map(_text, self._ranges)) or "no key at all"


class RangeGate:
    """Admits the keys of some ranges, as far as `inner` admits them, too."""

    def __init__(self, ranges: KeyRanges, inner: KeyGate | None = None) -> None:
        self._ranges = ranges
        self._inner = inner

    def admit(self, keys: Iterable[bytes]) -> None:
        """Return if every key is in a range. Otherwise raise `InvalidRequest`, and none of them counts."""
        held = list(keys)
        for key in held:
            if key not in self._ranges:
                raise InvalidRequest(
                    f"the key {key[:40]!r} is outside of what this clone was cut out for, {self._ranges}; "
                    "write it to the database that holds its range"
                )
        if self._inner is not None:
            self._inner.admit(held)


def _text(keys: KeyRange) -> str:
    start = "the start" if keys.start is None else repr(keys.start)
    return f"{start} up to {'the end' if keys.stop is None else repr(keys.stop)}"
