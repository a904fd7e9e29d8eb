"""Filters that Spark pushes down, translated to key ranges and keys. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import pyarrow as pa
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

from flagstone import keys
from flagstone.errors import InvalidRequest
from flagstone.spark.row_mapping import RowMapping
from flagstone.types import KeyRange

SCANS_ARE_APART: Final = hasattr(DataSourceReader, "pushLimit")
"""Whether this Spark applies a pushed filter only to the scan for which it was pushed.

Up to 4.3 Spark stores the last planned read with the DataFrame: after it pushed a filter for one use of the DataFrame,
other uses, with other filters or none, read only the rows that passed the first filter, even within one query. The
release whose readers have `pushLimit` keeps scans apart.
"""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The keys that a read returns: a range, or single keys of it in ascending order."""

    keys: KeyRange = field(default_factory=KeyRange)
    points: tuple[bytes, ...] | None = None

    @property
    def empty(self) -> bool:
        return self.keys.empty or self.points == ()

    def within(self, keys: KeyRange) -> Wanted:
        """The part of the selection that lies in `keys`."""
        both = self.keys.intersect(keys)
        points = None if self.points is None else tuple(key for key in self.points if key in both)
        return Wanted(both, points)

    def among(self, points: Iterable[bytes]) -> Wanted:
        """The part of the selection that is one of `points`."""
        chosen = {key for key in points if key in self.keys}
        if self.points is not None:
            chosen &= set(self.points)
        return replace(self, points=tuple(sorted(chosen)))


def narrow(wanted: Wanted, condition: Filter) -> Wanted | None:
    """The exact part of `wanted` that passes a filter; None if the filter does not restrict keys."""
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
    """A literal as a key; strings compare by their UTF-8 bytes, as in Spark."""
    if isinstance(value, str):
        return value.encode()
    return bytes(value) if isinstance(value, bytes | bytearray) else None


def narrow_range(mapping: RowMapping, types: pa.Schema, filters: Sequence[Filter]) -> KeyRange:
    """The key range of the rows that can pass: equal leading key columns, then comparisons of the next one.

    Rows inside the range may still fail a filter, so Spark must apply all filters again.
    """
    found = _parts_range(mapping, types, filters)
    start = None if found.start is None else mapping.prefix + found.start
    return KeyRange(start, None if found.stop is None else mapping.prefix + found.stop)


def _parts_range(mapping: RowMapping, types: pa.Schema, filters: Sequence[Filter]) -> KeyRange:
    """The range of the parts of the keys, without the prefix."""
    schema = keys.KeySchema.of(mapping.key_types(types))
    equal: Mapping[str, Any] = {
        each.attribute[0]: each.value
        for each in filters
        if isinstance(each, EqualTo) and len(each.attribute) == 1 and each.value is not None
    }
    parts: list[Any] = []
    for name in mapping.key_columns:
        if name not in equal:
            break
        parts.append(equal[name])
    try:
        found = KeyRange(*schema.range(*parts)) if parts else KeyRange()
        if len(parts) == len(mapping.key_columns):
            return found
        for each in filters:
            if getattr(each, "attribute", None) != (mapping.key_columns[len(parts)],):
                continue
            found = found.intersect(_compared(schema, parts, each))
    except InvalidRequest:
        return KeyRange()  # no key can hold the literal: Spark applies the filter
    return found


def _compared(schema: keys.KeySchema, parts: Sequence[Any], condition: Filter) -> KeyRange:
    value = getattr(condition, "value", None)
    if value is None:
        return KeyRange()
    at, after = schema.range(*parts, value)
    match condition:
        case GreaterThanOrEqual():
            return KeyRange(at, None)
        case GreaterThan():
            return KeyRange(after, None)
        case LessThan():
            return KeyRange(None, at)
        case LessThanOrEqual():
            return KeyRange(None, after)
    return KeyRange()
