"""Which keys of a read can pass its conditions: key ranges and single keys. Pure.

A selection may contain too many keys, never too few. The conditions for which it is exact need not be applied to its
rows; the functions return the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

import pyarrow as pa

from flagstone import keys
from flagstone.errors import InvalidRequest
from flagstone.spark.arrow_filter import Bound
from flagstone.spark.conditions import Comparison, OneOf, StartsWith
from flagstone.spark.row_mapping import RowMapping
from flagstone.types import MAX_KEY_BYTES, KeyRange

_MAX_COMBINATIONS: Final = 10_000
"""With more combinations of values of key columns, the remaining columns do not narrow the selection."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The keys that a read returns: a range, or single keys of it in ascending order.

    `ranges` are the parts of the range that can hold rows, ascending and disjoint; None means all of it.
    """

    keys: KeyRange = field(default_factory=KeyRange)
    points: tuple[bytes, ...] | None = None
    ranges: tuple[KeyRange, ...] | None = None

    @property
    def empty(self) -> bool:
        return self.keys.empty or self.points == () or self.ranges == ()

    @property
    def parts(self) -> tuple[KeyRange, ...]:
        """The ranges to scan."""
        return (self.keys,) if self.ranges is None else self.ranges

    def within(self, keys: KeyRange) -> Wanted:
        """The part of the selection that lies in `keys`."""
        both = self.keys.intersect(keys)
        points = None if self.points is None else tuple(key for key in self.points if key in both)
        ranges = None
        if self.ranges is not None:
            cut = (part.intersect(both) for part in self.ranges)
            ranges = tuple(part for part in cut if not part.empty)
        return Wanted(both, points, ranges)

    def among(self, points: Iterable[bytes]) -> Wanted:
        """The part of the selection that is one of `points`."""
        chosen = {key for key in points if any(key in part for part in self.parts)}
        if self.points is not None:
            chosen &= set(self.points)
        return replace(self, points=tuple(sorted(chosen)), ranges=None)

    def inside(self, ranges: Iterable[KeyRange]) -> Wanted:
        """The part of the selection that lies in one of the ranges, which may overlap and come in any order."""
        if self.points is not None:
            merged = merged_ranges(ranges)
            return replace(
                self, points=tuple(key for key in self.points if any(key in part for part in merged))
            )
        cut = [part.intersect(each) for each in merged_ranges(ranges) for part in self.parts]
        kept = tuple(part for part in cut if not part.empty)
        if len(kept) == 1:
            return Wanted(kept[0])
        hull = KeyRange(kept[0].start, kept[-1].stop) if kept else self.keys
        return Wanted(hull, None, kept)


def merged_ranges(ranges: Iterable[KeyRange]) -> list[KeyRange]:
    """The same keys in ascending ranges, of which no two touch."""
    merged: list[KeyRange] = []
    for each in sorted((one for one in ranges if not one.empty), key=lambda one: one.start or b""):
        before = merged[-1] if merged else None
        if before is not None and (before.stop is None or (each.start or b"") <= before.stop):
            stop = None if before.stop is None or each.stop is None else max(before.stop, each.stop)
            merged[-1] = KeyRange(before.start, stop)
        else:
            merged.append(each)
    return merged


def narrow_bytes(wanted: Wanted, condition: Bound) -> Wanted | None:
    """The exact part of `wanted` that passes a condition on the column `key`; None if keys cannot express it."""
    known = condition.condition
    if known.column != "key":
        return None
    values = [_as_bytes(scalar.as_py()) for scalar in condition.scalars]
    match known:
        case Comparison(sign="="):
            return wanted.among(values)
        case Comparison(sign="!="):
            return None
        case Comparison(sign=sign):
            return wanted.within(_beside(values[0], values[0] + b"\0", sign))
        case OneOf():
            return wanted.among(values)
        case StartsWith(prefix=prefix):
            return wanted.within(KeyRange.of_prefix(_as_bytes(prefix)))
    return None


def narrow_columns(
    wanted: Wanted, mapping: RowMapping, types: pa.Schema, conditions: Sequence[Bound]
) -> tuple[Wanted, tuple[Bound, ...]]:
    """The part of `wanted` that can pass conditions on the key columns, and the conditions to apply to its rows.

    Leading columns with `=` or `in` are combined; a comparison or a prefix of the next column narrows them further.
    """
    schema = keys.KeySchema.of(mapping.key_types(types))
    prefixes: list[tuple[Any, ...]] = [()]
    rest = list(conditions)
    for name in mapping.key_columns:
        on_column = [each for each in conditions if each.condition.column == name]
        values = _equal_values(on_column)
        if values is None or len(prefixes) * len(values) > _MAX_COMBINATIONS:
            found = _ranges(schema, prefixes, [each for each in on_column if _is_range(each)])
            if found is None:
                return _by_prefixes(wanted, mapping, _ranges(schema, prefixes, ()), conditions, rest)
            kept = [each for each in rest if each not in on_column or not _is_range(each)]
            whole = found == [KeyRange()]
            return wanted if whole else wanted.inside(_under(mapping.prefix, found)), tuple(kept)
        prefixes = [(*prefix, value) for prefix, value in product(prefixes, values)]
        rest = [each for each in rest if each not in on_column or not _is_equal(each)]
    points = [_key(schema, prefix) for prefix in prefixes]
    if None in points:
        return wanted, tuple(conditions)
    return wanted.among(mapping.prefix + key for key in points if key is not None), tuple(rest)


def _under(prefix: bytes, ranges: Iterable[KeyRange]) -> list[KeyRange]:
    """The ranges of keys that begin with the prefix, given those of the parts after it."""
    end = KeyRange.of_prefix(prefix).stop if prefix else None
    return [
        KeyRange(
            prefix + each.start if each.start else prefix or None,
            end if each.stop is None else prefix + each.stop,
        )
        for each in ranges
    ]


def _by_prefixes(
    wanted: Wanted,
    mapping: RowMapping,
    found: Sequence[KeyRange] | None,
    conditions: Sequence[Bound],
    rest: Sequence[Bound],
) -> tuple[Wanted, tuple[Bound, ...]]:
    """The selection by the leading columns alone. If no key can hold their values, the conditions decide."""
    if found is None:
        return wanted, tuple(conditions)
    return wanted.inside(_under(mapping.prefix, found)), tuple(rest)


def _is_equal(bound: Bound) -> bool:
    known = bound.condition
    return isinstance(known, OneOf) or (isinstance(known, Comparison) and known.sign == "=")


def _is_range(bound: Bound) -> bool:
    """Whether the rows that pass are one range of the column's values."""
    known = bound.condition
    if isinstance(known, StartsWith):
        return known.prefix not in ("", b"")
    return isinstance(known, Comparison) and known.sign != "!="


def _equal_values(conditions: Sequence[Bound]) -> list[Any] | None:
    """The only values of a column that can pass; None if no condition lists them."""
    found: list[Any] | None = None
    for each in conditions:
        if _is_equal(each):
            values = [scalar.as_py() for scalar in each.scalars]
            found = values if found is None else [value for value in found if value in values]
    return found


def _ranges(
    schema: keys.KeySchema, prefixes: Sequence[tuple[Any, ...]], conditions: Sequence[Bound]
) -> list[KeyRange] | None:
    """The exact ranges of the rows that pass; None if a literal does not fit the type of the key column."""
    ranges = []
    try:
        for prefix in prefixes:
            found = KeyRange(*schema.range(*prefix)) if prefix else KeyRange()
            if conditions:
                found = found.intersect(KeyRange(schema.range(*prefix, None)[1], None))  # null passes none
            for each in conditions:
                found = found.intersect(_compared(schema, prefix, each))
            ranges.append(found)
    except InvalidRequest:
        return None
    return ranges


def _compared(schema: keys.KeySchema, prefix: tuple[Any, ...], bound: Bound) -> KeyRange:
    condition = bound.condition
    if isinstance(condition, StartsWith):
        kind = schema.types[len(prefix)].kind
        given = condition.prefix
        text: Any = _as_text(given) if kind == "string" else _as_bytes(given)
        # Without its last byte, which ends the text.
        return KeyRange.of_prefix(schema.encode(*prefix, text)[:-1])
    assert isinstance(condition, Comparison), "the others are no ranges"
    at, after = schema.range(*prefix, bound.scalars[0].as_py())
    return _beside(at, after, condition.sign)


def _beside(at: bytes, after: bytes, sign: str) -> KeyRange:
    match sign:
        case ">=":
            return KeyRange(at, None)
        case ">":
            return KeyRange(after, None)
        case "<":
            return KeyRange(None, at)
        case "<=":
            return KeyRange(None, after)
    return KeyRange(at, after)


def _key(schema: keys.KeySchema, parts: tuple[Any, ...]) -> bytes | None:
    try:
        key = schema.encode(*parts)
    except InvalidRequest:
        return None
    return key if len(key) <= MAX_KEY_BYTES else None


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _as_text(value: str | bytes) -> str:
    try:
        return value if isinstance(value, str) else value.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("these bytes are no text") from None
