"""Filters that Spark pushes down, as key ranges and keys. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pyspark.sql.datasource import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from flagstone.types import KeyRange

SCANS_ARE_APART: Final = hasattr(DataSourceReader, "pushLimit")
"""Whether Spark keeps a filter to the scan that it was pushed to.

Up to 4.3 it keeps the last read it planned with the DataFrame: once a filter was pushed down for one use of it, other
uses, with other filters or none, read only what that filter had left, also within one query. The release whose readers
have `pushLimit` keeps scans apart.
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The keys a read is about: a range, or some of its keys by name (ascending)."""

    keys: KeyRange = field(default_factory=KeyRange)
    points: tuple[bytes, ...] | None = None

    @property
    def empty(self) -> bool:
        return self.keys.empty or self.points == ()

    def within(self, keys: KeyRange) -> Wanted:
        """What of it lies in `keys`."""
        both = self.keys.intersect(keys)
        points = None if self.points is None else tuple(key for key in self.points if key in both)
        return Wanted(both, points)

    def among(self, points: Iterable[bytes]) -> Wanted:
        """What of it is one of `points`."""
        named = {key for key in points if key in self.keys}
        if self.points is not None:
            named &= set(self.points)
        return replace(self, points=tuple(sorted(named)))


def narrow(wanted: Wanted, condition: Filter) -> Wanted | None:
    """What is left of `wanted` under a filter, exactly; None for a filter that is not about keys."""
    if getattr(condition, "attribute", None) != ("key",):
        return None
    if isinstance(condition, In):
        keys = [as_key(value) for value in condition.value if value is not None]
        return None if None in keys else wanted.among(key for key in keys if key is not None)
    key = as_key(getattr(condition, "value", None))
    if key is None:
        return None
    match condition:
        case EqualTo() | EqualNullSafe():
            return wanted.among((key,))
        case GreaterThanOrEqual():
            return wanted.within(KeyRange(key, None))
        case GreaterThan():
            return wanted.within(KeyRange(key + b"\0", None))
        case LessThan():
            return wanted.within(KeyRange(None, key))
        case LessThanOrEqual():
            return wanted.within(KeyRange(None, key + b"\0"))
    return None


def as_key(value: Any) -> bytes | None:
    """The key that a literal means; texts compare by their UTF-8, as in Spark."""
    if isinstance(value, str):
        return value.encode()
    return bytes(value) if isinstance(value, bytes | bytearray) else None
