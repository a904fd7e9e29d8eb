"""Identifiers, key ranges and rows.

Rows have two forms. `Row` is what callers see. Inside the engine a row is a plain tuple, because the engine creates a
million of them per second:

    EntryTuple = (key, seq, kind, value, created_ms, expires_ms)

`kind` is one of `VALUE`, `TOMBSTONE`, `MERGE`, and equals the flag bits of the stored row. A tombstone has
the value ``b""``. Times are milliseconds since the epoch, or None if the row has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, NewType

ManifestId = NewType("ManifestId", int)
CompactionsId = NewType("CompactionsId", int)
WalId = NewType("WalId", int)
RunId = NewType("RunId", int)
Seq = NewType("Seq", int)
Ulid = NewType("Ulid", int)
"""A 128-bit integer: 48 bits of milliseconds, then 80 random bits. Text form: `runtime.ids.ulid_text`."""

VALUE: Final = 0x00
TOMBSTONE: Final = 0x01
MERGE: Final = 0x08

MAX_KEY_BYTES: Final = 65_535
MAX_VALUE_BYTES: Final = 2**32 - 1
MAX_SEQ: Final = 2**64 - 1

EntryTuple = tuple[bytes, int, int, bytes, int | None, int | None]


class Row(NamedTuple):
    """One visible row, as callers see it."""

    key: bytes
    value: bytes
    seq: int
    created_ms: int | None
    expires_ms: int | None


@dataclass(frozen=True, slots=True)
class KeyRange:
    """A range of keys: `start` inclusive, `stop` exclusive; None leaves that side open."""

    start: bytes | None = None
    stop: bytes | None = None

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, bytes):
            return False
        return (self.start is None or key >= self.start) and (self.stop is None or key < self.stop)

    @property
    def empty(self) -> bool:
        """Whether the range contains no key."""
        return self.start is not None and self.stop is not None and self.start >= self.stop

    def intersect(self, other: KeyRange) -> KeyRange:
        """The keys in both ranges; `empty` if there are none."""
        starts = [start for start in (self.start, other.start) if start is not None]
        stops = [stop for stop in (self.stop, other.stop) if stop is not None]
        return KeyRange(max(starts, default=None), min(stops, default=None))

    @classmethod
    def of_prefix(cls, prefix: bytes) -> KeyRange:
        """Exactly the keys that start with `prefix`."""
        trimmed = prefix.rstrip(b"\xff")
        stop = trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else None
        return cls(prefix or None, stop)
