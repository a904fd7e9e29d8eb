"""The writes of a transaction as its own reads see them: a memtable of its own above all others.

Kept up to date key by key. It is changed only while nobody reads it (see `Transaction`), so a scan that has begun
shows the writes there were when it began.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from flagstone.types import EntryTuple

_FEW: Final = 16
"""New keys are put in their places one by one while they are fewer than one in so many; otherwise all are sorted."""


class OwnWrites:
    """At most one row per key. Has the reading methods of a memtable; the sequence number makes no difference."""

    __slots__ = ("_keys", "_rows", "_unsorted")

    def __init__(self) -> None:
        self._rows: dict[bytes, EntryTuple] = {}
        self._keys: list[bytes] = []
        self._unsorted: list[bytes] = []

    def copy(self) -> OwnWrites:
        """The same rows, to be changed independently."""
        twin = OwnWrites()
        twin._rows = self._rows.copy()
        twin._keys = self._keys.copy()
        twin._unsorted = self._unsorted.copy()
        return twin

    def __len__(self) -> int:
        return len(self._rows)

    def set(self, row: EntryTuple) -> None:
        """Put in a row, instead of the one its key had."""
        if row[0] not in self._rows:
            self._unsorted.append(row[0])
        self._rows[row[0]] = row

    def get(self, key: bytes, max_seq: int) -> EntryTuple | None:  # noqa: ARG002 - own writes are always visible
        return self._rows.get(key)

    get_value = get
    """Always the row and never a plain value: it may be an operand, or one that expires."""

    def versions(self, key: bytes, max_seq: int) -> list[EntryTuple]:  # noqa: ARG002
        row = self._rows.get(key)
        return [] if row is None else [row]

    def scan(
        self,
        start: bytes | None,
        stop: bytes | None,
        max_seq: int,  # noqa: ARG002
        reverse: bool,
    ) -> OwnWritesScan:
        keys = self._sorted()
        low = 0 if start is None else bisect_left(keys, start)
        high = len(keys) if stop is None else bisect_left(keys, stop)
        return OwnWritesScan(self._rows, keys, low, max(low, high), reverse=reverse)

    def _sorted(self) -> list[bytes]:
        if self._unsorted:
            if len(self._unsorted) * _FEW < len(self._keys):
                for key in self._unsorted:
                    at = bisect_left(self._keys, key)
                    # It is there already where an exception has cut this off before.
                    if self._keys[at : at + 1] != [key]:
                        self._keys.insert(at, key)
            else:
                self._keys = sorted({*self._keys, *self._unsorted})
            self._unsorted.clear()
        return self._keys


class OwnWritesScan:
    """A cursor over the keys from `low` up to `high`, in ascending or descending order."""

    __slots__ = ("_high", "_keys", "_low", "_reverse", "_rows")

    def __init__(
        self, rows: dict[bytes, EntryTuple], keys: list[bytes], low: int, high: int, *, reverse: bool
    ) -> None:
        self._rows = rows
        self._keys = keys
        self._low = low
        self._high = high
        self._reverse = reverse

    def next_rows(self, limit: int) -> list[EntryTuple]:
        """The rows of the next keys, `limit` of them unless the end is reached."""
        rows = self._rows
        if self._reverse:
            first = max(self._low, self._high - limit)
            taken = self._keys[first : self._high]
            taken.reverse()
            self._high = first
        else:
            end = min(self._high, self._low + limit)
            taken = self._keys[self._low : end]
            self._low = end
        return [rows[key] for key in taken]

    def seek(self, key: bytes) -> None:
        """Go on at `key`, or where the cursor already is beyond it."""
        if self._reverse:
            self._high = max(self._low, min(self._high, bisect_left(self._keys, key + b"\0")))
        else:
            self._low = min(self._high, max(self._low, bisect_left(self._keys, key)))
