"""Conditions in a `Column` of Spark, of a session in this process or of Spark Connect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.types import DateType, TimestampType

from flagstone.errors import InvalidRequest
from flagstone.spark.conditions import (
    Comparator,
    Comparison,
    Condition,
    NullTest,
    Parsed,
    StartsWith,
    one_of,
    parse,
)

if TYPE_CHECKING:
    from pyspark.sql import Column

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SIGNS: Final[dict[str, Comparator]] = {
    "=": "=", "==": "=", "<=>": "=", "!=": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">=",
}  # fmt: skip
_FLIPPED: Final[dict[str, Comparator]] = {
    "=": "=", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<=",
}  # fmt: skip


class Name(str):
    """The name of a column in an expression."""

    __slots__ = ()


class Call:
    """A function applied to arguments, each a `Name`, a `Call`, a `Text` or a `Value`."""

    def __init__(self, name: str, arguments: Sequence[Any]) -> None:
        self.name = name
        self.arguments = arguments


class Value:
    """A literal. `known` is False for one that no condition takes."""

    def __init__(self, value: Any, *, known: bool = True) -> None:
        self.value = value
        self.known = known


class Text(str):
    """An expression in SQL."""

    __slots__ = ()


def conditions_of(where: str | Column | Sequence[str | Column] | None) -> Parsed:
    """The conjuncts of all conditions that are understood; see `conditions.parse`."""
    parts = (
        [] if where is None else [where] if isinstance(where, str) or not _is_several(where) else list(where)
    )
    parsed = [parse(part) if isinstance(part, str) else _parse_column(part) for part in parts]
    return Parsed(
        tuple(condition for each in parsed for condition in each.conditions),
        all(each.complete for each in parsed),
        frozenset(name for each in parsed for name in each.names),
    )


def apply_to(frame: Any, where: Any) -> Any:
    """The frame with all conditions applied by Spark."""
    for part in [where] if isinstance(where, str) or not _is_several(where) else where:
        frame = frame.where(part)
    return frame


def _is_several(where: Any) -> bool:
    return isinstance(where, list | tuple)


def _parse_column(column: Any) -> Parsed:
    if hasattr(column, "_jc"):
        tree = _classic(column._jc.node())  # noqa: SLF001 - Spark has no interface for this
    elif hasattr(column, "_expr"):
        tree = _connect(column._expr)  # noqa: SLF001
    else:
        raise InvalidRequest(f"where is a SQL text or a Column, not a {type(column).__name__}")
    found: list[Condition] = []
    names: set[str] = set()
    complete = _collect(tree, found)
    if not _names(tree, names):
        names = {"*"}  # an expression that hides its columns: it may need all of them
    return Parsed(tuple(found), complete, frozenset(names))


def _collect(tree: Any, found: list[Condition]) -> bool:
    if isinstance(tree, Text):
        parsed = parse(tree)
        found.extend(parsed.conditions)
        return parsed.complete
    if isinstance(tree, Call) and tree.name.lower() == "and":
        understood = [_collect(part, found) for part in tree.arguments]
        return all(understood)
    condition = _condition(tree)
    if condition is not None:
        found.append(condition)
    return condition is not None


def _condition(tree: Any) -> Condition | None:
    if not isinstance(tree, Call) or not tree.arguments:
        return None
    name, column, rest = tree.name.lower(), tree.arguments[0], tree.arguments[1:]
    if name in _SIGNS and len(rest) == 1 and isinstance(rest[0], Name):
        literal = _literal(column)
        return None if literal is None else Comparison(rest[0], _FLIPPED[_SIGNS[name]], literal)
    if not isinstance(column, Name):
        return None
    if name in ("isnull", "isnotnull") and not rest:
        return NullTest(str(column), negated=name == "isnotnull")
    values = [_literal(each) for each in rest]
    if not values or None in values:
        return None
    if name == "in":
        return one_of(str(column), values)
    if len(values) > 1:
        return None
    value = values[0]
    if name == "startswith" and isinstance(value, str | bytes):
        return StartsWith(str(column), value)
    if name == "like" and isinstance(value, str):
        prefix = value.removesuffix("%")
        plain = prefix and prefix != value and not set(prefix) & set("%_\\")
        return StartsWith(str(column), prefix) if plain else None
    return Comparison(str(column), _SIGNS[name], value) if name in _SIGNS else None


def _literal(tree: Any) -> Any:
    return tree.value if isinstance(tree, Value) and tree.known else None


def _names(tree: Any, names: set[str]) -> bool:
    """Collect the names of columns; False if the tree has a part that may hide some."""
    match tree:
        case Name():
            names.add(str(tree))
            return True
        case Text():
            names |= parse(tree).names
            return True
        case Value():
            return True
        case Call():
            collected = [_names(part, names) for part in tree.arguments]
            return all(collected)
    return False


def _classic(node: Any) -> Any:
    kind = node.getClass().getSimpleName()
    if kind == "UnresolvedFunction":
        children = node.children()
        arguments = [_classic(children.apply(at)) for at in range(children.length())]
        return Call(str(node.functionName()), arguments)
    if kind == "UnresolvedAttribute":
        parts = node.nameParts()
        return Name(parts.apply(0)) if parts.length() == 1 else None
    if kind == "SqlExpression":
        return Text(node.expression())
    return _classic_literal(node.value()) if kind == "Literal" else None


def _classic_literal(value: Any) -> Value:
    if not hasattr(value, "getClass"):
        return Value(bytes(value) if isinstance(value, bytearray) else value, known=_is_plain(value))
    readers: dict[str, Callable[[Any], Any]] = {
        "LocalDate": lambda java: date.fromisoformat(java.toString()),
        "Date": lambda java: date.fromisoformat(java.toString()),
        "Timestamp": lambda java: _at(java.getTime() // 1000 * 1_000_000 + java.getNanos() // 1000),
        "Instant": lambda java: _at(java.getEpochSecond() * 1_000_000 + java.getNano() // 1000),
        "LocalDateTime": lambda java: datetime.fromisoformat(java.toString()),
    }
    read = readers.get(value.getClass().getSimpleName())
    return Value(None, known=False) if read is None else Value(read(value))


def _connect(expression: Any) -> Any:
    match type(expression).__name__:
        case "UnresolvedFunction":
            return Call(expression._name, [_connect(each) for each in expression._args])  # noqa: SLF001
        case "ColumnReference":
            name = expression._unparsed_identifier  # noqa: SLF001
            quoted = name.startswith("`") and name.endswith("`") and name.count("`") == 2
            return Name(name.strip("`")) if quoted or name.isidentifier() else None
        case "SQLExpression":
            return Text(expression._expr)  # noqa: SLF001
        case "LiteralExpression":
            value, kind = expression._value, expression._dataType  # noqa: SLF001
            if isinstance(kind, DateType) and isinstance(value, int):
                return Value(_EPOCH.date() + timedelta(days=value))
            if isinstance(kind, TimestampType) and isinstance(value, int):
                return Value(_at(value))
            return Value(bytes(value) if isinstance(value, bytearray) else value, known=_is_plain(value))
    return None


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, bool | int | float | str | bytes | bytearray) or type(value).__name__ == "Decimal"
    )


def _at(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)
