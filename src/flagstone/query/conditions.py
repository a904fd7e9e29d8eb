"""The conditions of a query, and the key ranges that can have matching rows. Pure.

The ranges contain every row for which a condition is true, and may contain others: the caller applies the whole
condition to the rows of the ranges again. So a condition that says nothing about keys is `Unknown`, which no range
excludes, and no rule here depends on how an engine treats null, NaN or a cast, as long as the ranges are not too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Final, Literal, NamedTuple, Protocol

from flagstone.errors import InvalidRequest
from flagstone.keys.schema import KeySchema
from flagstone.types import KeyRange

Comparison = Literal["=", "<", "<=", ">", ">="]

_NEGATED: Final[dict[Comparison, Comparison]] = {"<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_MAX_RANGES: Final = 10_000
"""With more ranges than this, further key columns are not narrowed."""


@dataclass(frozen=True, slots=True)
class Compare:
    """A column compared with a literal that is not null."""

    column: str
    comparison: Comparison
    value: Any


@dataclass(frozen=True, slots=True)
class OneOf:
    """A column equal to one of some literals, or null if None is one of them."""

    column: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class StartsWith:
    """A column of strings or binaries that begin with `prefix`."""

    column: str
    prefix: str | bytes


@dataclass(frozen=True, slots=True)
class Every:
    """All of the parts are true."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """At least one of the parts is true."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """One of the parts, which another condition chooses per row."""

    parts: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The part is false. Like the part, it is null where the part is null."""

    part: Condition


@dataclass(frozen=True, slots=True)
class Constant:
    """True, false or null for every row."""

    value: bool | None


@dataclass(frozen=True, slots=True)
class Unknown:
    """A condition that the planner does not understand."""


Condition = Compare | OneOf | StartsWith | Every | Either | Chosen | Not | Constant | Unknown


class KeySpace(Protocol):
    """How the values of key columns become bytes of keys."""

    names: tuple[str, ...]

    def span(self, parts: Sequence[Any], value: Any) -> tuple[bytes, bytes]:
        """Start and stop of the keys with these values in the first columns and `value` in the next one.

        Raises `InvalidRequest` if no key can have the value.
        """
        ...

    def rough(self, column: int) -> bool:
        """Whether the column has floats: a literal may be rounded, and engines treat NaN differently."""
        ...


class RawKeys:
    """Keys without columns: one column of bytes, or of text, which sorts like its UTF-8 bytes."""

    names: tuple[str, ...] = ("key",)

    def span(self, parts: Sequence[Any], value: Any) -> tuple[bytes, bytes]:  # noqa: ARG002 - there is one column
        if isinstance(value, str):
            value = value.encode()
        elif not isinstance(value, bytes):
            raise InvalidRequest(f"a key is bytes, not {type(value).__name__}")
        return value, value + b"\0"

    def rough(self, column: int) -> bool:  # noqa: ARG002 - there is one column
        return False


class TupleKeys:
    """Keys of `flagstone.keys` with the columns of a schema, all behind one prefix."""

    def __init__(self, schema: KeySchema, prefix: bytes = b"") -> None:
        self.names: tuple[str, ...] = schema.names
        self._schema = schema
        self._prefix = prefix

    def span(self, parts: Sequence[Any], value: Any) -> tuple[bytes, bytes]:
        if getattr(value, "nanosecond", 0):
            raise InvalidRequest("keys have microseconds")
        start, stop = self._schema.range(*parts, value)
        return self._prefix + start, self._prefix + stop

    def rough(self, column: int) -> bool:
        return self._schema.types[column].kind == "float"


class Span(NamedTuple):
    """A range of keys. With `values` it has exactly the keys with these values in the first key columns."""

    start: bytes
    stop: bytes | None
    values: tuple[Any, ...] | None = None

    @property
    def empty(self) -> bool:
        return self.stop is not None and self.start >= self.stop


def key_ranges(condition: Condition, space: KeySpace, within: KeyRange) -> list[KeyRange]:
    """The parts of `within` that can have rows for which the condition is true: ascending and disjoint."""
    found = [Span(b"", None, ())]
    for column in range(len(space.names)):
        narrowed: list[Span] = []
        for span in found:
            narrowed += [span] if span.values is None else _matching(condition, _Leaves(space, span, column))
        if column and len(narrowed) > _MAX_RANGES:
            break
        found = narrowed
    ranges = (
        # A value for every column: one key at most.
        KeyRange(
            span.start or None,
            span.start + b"\0" if span.values and len(span.values) == len(space.names) else span.stop,
        )
        for span in found
    )
    return [both for each in ranges if not (both := each.intersect(within)).empty]


def is_single_key(keys: KeyRange) -> bool:
    """Whether one key at most can be in the range."""
    return keys.start is not None and keys.stop == keys.start + b"\0"


def _matching(condition: Condition, leaves: _Leaves, *, negated: bool = False) -> list[Span]:
    """The spans that can have rows for which the condition is true, or with `negated` false."""
    match condition:
        case Not(part):
            return _matching(part, leaves, negated=not negated)
        case Constant(value):
            return leaves.all if value is not None and value != negated else []
        case Chosen(parts):
            return _union(span for part in parts for span in _matching(part, leaves, negated=negated))
        case Every(parts) | Either(parts):
            found = [_matching(part, leaves, negated=negated) for part in parts]
            if isinstance(condition, Every) != negated:
                return reduce(_intersection, found, leaves.all)
            return _union(span for spans in found for span in spans)
        case Compare(column, comparison, value):
            wanted = _NEGATED.get(comparison) if negated else comparison
            return leaves.all if wanted is None else leaves.compared(column, wanted, value)
        case OneOf(column, values) if not negated:
            return leaves.among(column, values)
        case StartsWith(column, prefix) if not negated and prefix:
            return leaves.prefixed(column, prefix)
    return leaves.all


class _Leaves:
    """What conditions on single columns leave of `whole`, whose keys share the values of the columns before."""

    def __init__(self, space: KeySpace, whole: Span, column: int) -> None:
        self._space = space
        self._whole = whole
        self._column = column
        self.all = [Span(whole.start, whole.stop)]

    def compared(self, name: str, comparison: Comparison, value: Any) -> list[Span]:
        if comparison == "=":
            return self.among(name, (value,))
        if isinstance(value, float) and math.isnan(value):
            return (
                self.all
            )  # for some engines NaN is the largest number, for others `<` and `>=` are both false

        def spans(parts: tuple[Any, ...], column: int) -> list[Span]:
            at, after = self._space.span(parts, value)
            rough = self._space.rough(column)
            behind = comparison in (("<=", "<") if rough else ("<=", ">"))
            edge = after if behind else at
            found = Span(b"", edge) if comparison in ("<", "<=") else Span(edge, None)
            return [found, *self._not_a_number(parts, column)]

        return self._decided(name, spans)

    def among(self, name: str, values: tuple[Any, ...]) -> list[Span]:
        def spans(parts: tuple[Any, ...], column: int) -> list[Span]:
            found = [Span(*self._space.span(parts, value), (*parts, value)) for value in values]
            return [*found, *self._not_a_number(parts, column)]

        return self._decided(name, spans)

    def prefixed(self, name: str, prefix: str | bytes) -> list[Span]:
        def spans(parts: tuple[Any, ...], column: int) -> list[Span]:  # noqa: ARG001
            beyond = _after_prefix(prefix)
            stop = None if beyond is None else self._space.span(parts, beyond)[0]
            return [Span(self._space.span(parts, prefix)[0], stop)]

        return self._decided(name, spans)

    def _not_a_number(self, parts: tuple[Any, ...], column: int) -> list[Span]:
        """The keys with NaN: engines disagree about what it equals and where it sorts."""
        if not self._space.rough(column):
            return []
        return [Span(*self._space.span(parts, math.nan), (*parts, math.nan))]

    def _decided(self, name: str, spans: Callable[[tuple[Any, ...], int], list[Span]]) -> list[Span]:
        if name not in self._space.names or (column := self._space.names.index(name)) > self._column:
            return self.all
        whole = self._whole
        assert whole.values is not None, "only such spans are narrowed"
        try:
            found = _union(spans(whole.values[:column], column))
        except (InvalidRequest, UnicodeEncodeError):
            return self.all  # no key has the literal's type: the engine decides how they compare
        if column == self._column:
            return _intersection(found, self.all)
        # An earlier column, whose value all keys of the span share: the condition holds for all of them or for none.
        start = whole.start
        inside = any(each.start <= start and (each.stop is None or start < each.stop) for each in found)
        return self.all if inside else []


def _after_prefix(prefix: str | bytes) -> str | bytes | None:
    """A value above everything that begins with `prefix`, and not above anything larger; None if there is none."""
    if isinstance(prefix, bytes):
        kept = prefix.rstrip(b"\xff")
        return kept[:-1] + bytes([kept[-1] + 1]) if kept else None
    text = prefix.rstrip("\U0010ffff")
    if not text:
        return None
    code = ord(text[-1]) + 1
    return text[:-1] + chr(0xE000 if 0xD800 <= code < 0xE000 else code)


def _union(found: Iterable[Span]) -> list[Span]:
    """Everything in at least one span: ascending and disjoint."""
    merged: list[Span] = []
    for span in sorted((span for span in found if not span.empty), key=_start):
        last = merged[-1] if merged else None
        if last is None or (last.stop is not None and span.start >= last.stop):
            merged.append(span)
        elif last.stop is not None and (span.stop is None or span.stop > last.stop):
            merged[-1] = span if span.start == last.start else Span(last.start, span.stop)
    return merged


def _start(span: Span) -> bytes:
    return span.start


def _intersection(one: list[Span], other: list[Span]) -> list[Span]:
    """Everything in both lists, each ascending and disjoint."""
    return list(_overlaps(one, other))


def _overlaps(one: list[Span], other: list[Span]) -> Iterator[Span]:
    first = second = 0
    while first < len(one) and second < len(other):
        a, b = one[first], other[second]
        start = max(a.start, b.start)
        stop = b.stop if a.stop is None else a.stop if b.stop is None else min(a.stop, b.stop)
        if stop is None or start < stop:
            whole = next((each.values for each in (a, b) if each[:2] == (start, stop) and each.values), None)
            yield Span(start, stop, whole)
        if stop == a.stop:
            first += 1
        if stop == b.stop:
            second += 1
