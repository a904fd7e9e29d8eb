"""Rows of the WAL whose keys are longer than a memtable takes: SlateDB writes them, and they must be read.

There are hardly ever any, so plain sorted lists do. A table of them is a memtable to its readers and never changes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from flagstone.types import MAX_KEY_BYTES, MERGE, EntryTuple


def is_long(row: EntryTuple) -> bool:
    """Whether a row has a key that memtables do not take."""
    return len(row[0]) > MAX_KEY_BYTES


class LongKeyTable:
    """Rows with long keys, in any order, as a memtable: see `read.view.Memtable`."""

    def __init__(self, rows: Iterable[EntryTuple] = ()) -> None:
        self.rows: tuple[EntryTuple, ...] = tuple(rows)
        self._by_key: dict[bytes, list[EntryTuple]] = {}
        for row in sorted(self.rows, key=lambda row: (row[0], -row[1])):
            self._by_key.setdefault(row[0], []).append(row)
        self._keys = list(self._by_key)

    def get(self, key: bytes, max_seq: int) -> EntryTuple | None:
        """The newest version up to `max_seq`."""
        return next(iter(self.versions(key, max_seq)), None)

    def get_value(self, key: bytes, max_seq: int) -> EntryTuple | None:
        """The same: its readers judge the row."""
        return self.get(key, max_seq)

    def versions(self, key: bytes, max_seq: int) -> list[EntryTuple]:
        """All versions up to `max_seq`, newest first."""
        return [row for row in self._by_key.get(key, ()) if row[1] <= max_seq]

    def scan(self, start: bytes | None, stop: bytes | None, max_seq: int, reverse: bool) -> LongKeyCursor:
        """The rows with keys in [start, stop), each key down to its first version that is no operand."""
        first = 0 if start is None else bisect_left(self._keys, start)
        end = len(self._keys) if stop is None else bisect_left(self._keys, stop)
        keys = self._keys[first:end]
        return LongKeyCursor(
            [self.versions(key, max_seq) for key in (reversed(keys) if reverse else keys)], reverse=reverse
        )


class LongKeyCursor:
    """Hands out the rows of a scan, whole keys at a time."""

    def __init__(self, groups: list[list[EntryTuple]], *, reverse: bool) -> None:
        self._groups = [group for group in groups if group]
        self._reverse = reverse

    def next_rows(self, limit: int) -> list[EntryTuple]:
        """At least one key's rows, about `limit` of them; none at the end."""
        rows: list[EntryTuple] = []
        while self._groups and len(rows) < limit:
            for row in self._groups.pop(0):
                rows.append(row)
                if row[2] != MERGE:
                    break
        return rows

    def seek(self, key: bytes) -> None:
        """Go on at `key`, or the next one in the direction of the scan."""
        self._groups = [
            group for group in self._groups if (group[0][0] <= key if self._reverse else group[0][0] >= key)
        ]
