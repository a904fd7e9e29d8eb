"""Conditions on columns: what `where` of a read understands of a SQL text. Pure.

A condition is a conjunction. Each conjunct compares one column with literals: `=`, `<>`, `<`, `<=`, `>`, `>=`,
`between`, `in`, `like 'x%'`, `startswith`, `is null` and `is not null`. `parse` returns the conjuncts that it
understands, and says whether there are others, which Spark has to apply. It never guesses: a text with an escape, a
qualified name or a function is left to Spark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final, Literal, NamedTuple

from flagstone.errors import InvalidRequest

Comparator = Literal["=", "!=", "<", "<=", ">", ">="]

_FLIPPED: Final[dict[str, Comparator]] = {
    "=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="
}  # fmt: skip
_SIGNS: Final[dict[str, Comparator]] = {
    "=": "=", "!=": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "==": "=", "<>": "!=",
    # With a literal that is not null, `<=>` selects the same rows as `=`.
    "<=>": "=",
}  # fmt: skip
_TOKEN: Final = re.compile(
    r"""\s*(?:
      (?P<binary>[xX]'(?P<hex>[0-9a-fA-F]*)')
    | (?P<number>\d+\.\d*(?:[eE][+-]?\d+)?(?:[dDfF]|BD|bd)?|\.\d+(?:[eE][+-]?\d+)?(?:[dDfF]|BD|bd)?
        |\d+(?:[eE][+-]?\d+)?(?:[dDfF]|BD|bd|[lLsSyY])?)(?![\w.])
    | '(?P<string>[^'\\]*)'(?!')
    | `(?P<quoted>[^`]+)`(?!`)
    | (?P<word>[A-Za-z_]\w*)
    | (?P<sign><=>|<=|>=|<>|!=|==|[-=<>(),])
    | (?P<other>.)
    )""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A column compared with a literal, which is not null."""

    column: str
    sign: Comparator
    value: Any


@dataclass(frozen=True, slots=True)
class OneOf:
    """A column whose value is one of several literals, none of them null."""

    column: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class StartsWith:
    """A column of text or bytes that begins with a literal."""

    column: str
    prefix: str | bytes


@dataclass(frozen=True, slots=True)
class NullTest:
    """A column that is null, or with `negated` one that is not."""

    column: str
    negated: bool


Condition = Comparison | OneOf | StartsWith | NullTest


class Parsed(NamedTuple):
    """The conjuncts that were understood. If not `complete`, there are others.

    `names` are all names in the text; `*` stands for names that may be hidden from this parser.
    """

    conditions: tuple[Condition, ...]
    complete: bool
    names: frozenset[str]


class _Token(NamedTuple):
    kind: str
    value: Any

    def is_word(self, *words: str) -> bool:
        return self.kind == "word" and self.value.lower() in words

    def is_sign(self, *signs: str) -> bool:
        return self.kind == "sign" and self.value in signs


class _Unknown(Exception):
    """A conjunct of a form that only Spark understands."""


def parse(text: str) -> Parsed:
    """The conjuncts of a condition in SQL. A part that is not understood makes the result incomplete."""
    tokens = _tokens(text)
    names = frozenset(str(token.value) for token in tokens if token.kind in ("word", "name"))
    if any(token.kind == "other" for token in tokens):
        # After a quote or an escape that this parser does not know, a name may have been taken for text.
        names |= {"*"}
    found: list[Condition] = []
    complete = _collect(tokens, found)
    return Parsed(tuple(found), complete, names)


def require_complete(text: str) -> tuple[Condition, ...]:
    """The conjuncts of a condition. Raises `InvalidRequest` if a part of it is not understood."""
    parsed = parse(text)
    if not parsed.complete:
        raise InvalidRequest(
            "use comparisons of a column with a literal, between, in, like 'x%', is null, and `and`; "
            "flagstone.spark.read(where=...) takes any condition"
        )
    return parsed.conditions


def _tokens(text: str) -> list[_Token]:
    found = []
    for match in _TOKEN.finditer(text.rstrip()):
        kind = match.lastgroup or "other"
        if kind == "hex":
            kind = "binary"
        match kind:
            case "binary":
                digits = match["hex"]
                value: Any = bytes.fromhex(digits) if len(digits) % 2 == 0 else None
                found.append(_Token("literal", value) if value is not None else _Token("other", digits))
            case "number":
                found.append(_Token("literal", _number(match["number"])))
            case "string":
                found.append(_Token("literal", match["string"]))
            case "quoted":
                found.append(_Token("name", match["quoted"]))
            case _:
                found.append(_Token(kind, match[kind]))
    return found


def _number(text: str) -> Any:
    """The literal as Spark types it: a whole number, a decimal, or a double."""
    plain = text.lower()
    if plain.endswith("bd"):
        return Decimal(plain[:-2])
    if plain.endswith("f"):
        return _Float(plain)
    if plain.endswith("d"):
        return float(plain[:-1])
    if "e" in plain:
        return float(plain)
    if "." in plain:
        return Decimal(plain)
    return int(plain.rstrip("lsy"))


class _Float(str):
    """A literal of 32 bits, which no condition takes: Spark rounds it in its own way."""

    __slots__ = ()


def _collect(tokens: Sequence[_Token], found: list[Condition]) -> bool:
    """Add the conjuncts of `tokens` that are understood; return whether all are."""
    parts = _conjuncts(tokens)
    if parts is None:
        return False
    complete = True
    for part in parts:
        inner = _unwrapped(part)
        if len(inner) < len(part):
            complete = _collect(inner, found) and complete
            continue
        try:
            found.extend(_conjunct(inner))
        except _Unknown:
            complete = False
    return complete


def _conjuncts(tokens: Sequence[_Token]) -> list[Sequence[_Token]] | None:
    """The parts between `and`; None if there is an `or`, an unknown character, or parentheses do not match."""
    parts: list[Sequence[_Token]] = []
    start = depth = 0
    between = False
    for at, token in enumerate(tokens):
        if token.kind == "other" or (token.kind == "literal" and isinstance(token.value, _Float)):
            # A comment, an operator or an escape may change the meaning of everything beside it.
            return None
        if token.is_sign("-") and at and tokens[at - 1].is_sign("-"):
            return None  # a comment up to the end of the line
        if token.is_sign("("):
            depth += 1
        elif token.is_sign(")"):
            depth -= 1
            if depth < 0:
                return None
        elif depth == 0 and token.kind == "word":
            if token.is_word("or", "case"):
                return None
            if token.is_word("between"):
                between = True
            elif token.is_word("and") and between:
                between = False
            elif token.is_word("and"):
                parts.append(tokens[start:at])
                start = at + 1
    if depth or not tokens:
        return None
    parts.append(tokens[start:])
    return parts if all(parts) else None


def _unwrapped(tokens: Sequence[_Token]) -> Sequence[_Token]:
    """The tokens without one pair of parentheses around all of them."""
    if not (tokens[0].is_sign("(") and tokens[-1].is_sign(")")):
        return tokens
    depth = 0
    for at, token in enumerate(tokens):
        depth += token.is_sign("(") - token.is_sign(")")
        if depth == 0 and at < len(tokens) - 1:
            return tokens
    return tokens[1:-1] or tokens


class _Cursor:
    """Takes tokens one after the other. Raises `_Unknown` for what the grammar does not have."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._at = 0

    def next(self) -> _Token:
        if self._at >= len(self._tokens):
            raise _Unknown
        self._at += 1
        return self._tokens[self._at - 1]

    def take_word(self, *words: str) -> bool:
        if self._at < len(self._tokens) and self._tokens[self._at].is_word(*words):
            self._at += 1
            return True
        return False

    def take_sign(self, *signs: str) -> str | None:
        if self._at < len(self._tokens) and self._tokens[self._at].is_sign(*signs):
            self._at += 1
            return str(self._tokens[self._at - 1].value)
        return None

    def require(self, found: object) -> None:
        if not found:
            raise _Unknown

    def end(self) -> None:
        self.require(self._at == len(self._tokens))

    def literal(self) -> Any:
        """A literal, with its sign or its type."""
        if self.take_sign("-"):
            token = self.next()
            self.require(token.kind == "literal" and isinstance(token.value, int | float | Decimal))
            return -token.value
        token = self.next()
        if token.kind == "literal":
            return token.value
        if token.is_word("true", "false"):
            return token.value.lower() == "true"
        if token.is_word("date", "timestamp", "timestamp_ntz"):
            return _moment(token.value.lower(), self.next())
        if token.is_word("cast"):
            self.require(self.take_sign("("))
            text = self.next()
            self.require(text.kind == "literal" and isinstance(text.value, str))
            self.require(self.take_word("as") and self.take_word("binary") and self.take_sign(")"))
            return text.value.encode()
        raise _Unknown

    def is_literal(self) -> bool:
        """Whether a literal comes next; the position stays."""
        before = self._at
        try:
            self.literal()
        except _Unknown:
            return False
        finally:
            self._at = before
        return True

    def column(self) -> str:
        token = self.next()
        self.require(token.kind == "name" or (token.kind == "word" and not token.is_word(*_KEYWORDS)))
        return str(token.value)


_KEYWORDS: Final = ("not", "null", "true", "false", "exists", "interval", "current_date", "current_timestamp")


def _moment(kind: str, token: _Token) -> date | datetime:
    """A literal of a date or a time. A time without a zone depends on the session, so Spark has to apply it."""
    if token.kind != "literal" or not isinstance(token.value, str):
        raise _Unknown
    try:
        if kind == "date":
            return date.fromisoformat(token.value)
        found = datetime.fromisoformat(token.value)
    except ValueError:
        raise _Unknown from None
    if (found.tzinfo is None) != (kind == "timestamp_ntz"):
        raise _Unknown
    return found


def _conjunct(tokens: Sequence[_Token]) -> list[Condition]:
    cursor = _Cursor(tokens)
    if cursor.is_literal():
        value = cursor.literal()
        sign = cursor.take_sign(*_SIGNS)
        cursor.require(sign)
        column = cursor.column()
        cursor.end()
        return [compared(column, _FLIPPED[_plain(str(sign))], value)]
    if cursor.take_word("startswith"):
        cursor.require(cursor.take_sign("("))
        column = cursor.column()
        cursor.require(cursor.take_sign(","))
        prefix = cursor.literal()
        cursor.require(cursor.take_sign(")"))
        cursor.end()
        return [_prefixed(column, prefix)]
    column = cursor.column()
    if cursor.take_word("is"):
        negated = cursor.take_word("not")
        cursor.require(cursor.take_word("null"))
        cursor.end()
        return [NullTest(column, negated)]
    if cursor.take_word("between"):
        low = cursor.literal()
        cursor.require(cursor.take_word("and"))
        high = cursor.literal()
        cursor.end()
        return [compared(column, ">=", low), compared(column, "<=", high)]
    if cursor.take_word("in"):
        cursor.require(cursor.take_sign("("))
        values = [cursor.literal()]
        while cursor.take_sign(","):
            values.append(cursor.literal())
        cursor.require(cursor.take_sign(")"))
        cursor.end()
        return [one_of(column, values)]
    if cursor.take_word("like"):
        pattern = cursor.literal()
        cursor.end()
        prefix = pattern[:-1] if isinstance(pattern, str) and pattern.endswith("%") else ""
        if not prefix or "%" in prefix or "_" in prefix:
            raise _Unknown
        return [StartsWith(column, prefix)]
    sign = cursor.take_sign(*_SIGNS)
    cursor.require(sign)
    value = cursor.literal()
    cursor.end()
    return [compared(column, _plain(str(sign)), value)]


def _plain(sign: str) -> Comparator:
    return _SIGNS[sign]


def compared(column: str, sign: Comparator, value: Any) -> Condition:
    """The comparison of a column with a literal."""
    return Comparison(column, sign, value)


def one_of(column: str, values: Iterable[Any]) -> Condition:
    """The condition that a column has one of some values, each once, in their order."""
    kept = {(type(value), value): value for value in values}
    return OneOf(column, tuple(kept.values()))


def _prefixed(column: str, prefix: Any) -> Condition:
    if not isinstance(prefix, str | bytes):
        raise _Unknown
    return StartsWith(column, prefix)
