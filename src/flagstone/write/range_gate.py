"""Keys outside the range of a projected database are refused when they are written.

They would be in the database, but not in the range that was cut out of its parent: the next projection or union
would silently leave them out.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from flagstone.errors import InvalidRequest
from flagstone.types import KeyRange
from flagstone.write.segment_gate import KeyGate


class RangeGate:
    """Admits the keys of some ranges, given in ascending order, as far as `inner` admits them, too."""

    def __init__(self, ranges: Sequence[KeyRange], inner: KeyGate | None = None) -> None:
        self._starts = [keys.start or b"" for keys in ranges]
        self._ranges = tuple(ranges)
        self._inner = inner

    def admit(self, keys: Iterable[bytes]) -> None:
        """Return if every key is in a range. Otherwise raise `InvalidRequest`, and none of them counts."""
        held = list(keys)
        for key in held:
            at = bisect_right(self._starts, key) - 1
            if at < 0 or key not in self._ranges[at]:
                raise InvalidRequest(
                    f"the key {key[:40]!r} is outside of what this clone was cut out for, {self._text()}; "
                    "write it to the database that holds its range"
                )
        if self._inner is not None:
            self._inner.admit(held)

    def _text(self) -> str:
        return (
            " and ".join(
                f"{'the start' if keys.start is None else repr(keys.start)} up to "
                f"{'the end' if keys.stop is None else repr(keys.stop)}"
                for keys in self._ranges
            )
            or "no key at all"
        )
