"""Conditions as the text of an option, from the driver to the tasks. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final, get_args

from flagstone.errors import InvalidRequest
from flagstone.spark.conditions import (
    Comparator,
    Comparison,
    Condition,
    NullTest,
    OneOf,
    StartsWith,
    require_complete,
)

_SIGNS: Final = frozenset(get_args(Comparator))


def parse_option(text: str) -> tuple[Condition, ...]:
    """The conditions of the option `where`: SQL, or what `encode` writes."""
    return decode(text) if text.startswith("[") else require_complete(text)


def encode(conditions: Iterable[Condition]) -> str:
    """The conditions as text, for an option of the data source; `decode` reads it."""
    return json.dumps([_encoded(each) for each in conditions])


def decode(text: str) -> tuple[Condition, ...]:
    """The conditions that `encode` wrote."""
    try:
        return tuple(_decoded(each) for each in json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidRequest(
            "this is not what flagstone.spark.read writes; write a condition in SQL"
        ) from None


def _encoded(condition: Condition) -> list[Any]:
    match condition:
        case Comparison(column, sign, value):
            return ["compare", column, sign, _packed(value)]
        case OneOf(column, values):
            return ["in", column, [_packed(value) for value in values]]
        case StartsWith(column, prefix):
            return ["prefix", column, _packed(prefix)]
        case NullTest(column, negated):
            return ["null", column, negated]


def _decoded(packed: list[Any]) -> Condition:
    match packed:
        case ["compare", str(column), str(sign), value] if sign in _SIGNS:
            return Comparison(column, sign, _unpacked(value))  # type: ignore[arg-type]
        case ["in", str(column), list(values)]:
            return OneOf(column, tuple(_unpacked(value) for value in values))
        case ["prefix", str(column), prefix]:
            return StartsWith(column, _unpacked(prefix))
        case ["null", str(column), bool(negated)]:
            return NullTest(column, negated)
    raise ValueError(packed)


def _packed(value: Any) -> dict[str, Any]:
    match value:
        case bool():
            return {"bool": value}
        case int():
            return {"int": str(value)}
        case float():
            return {"float": value.hex()}
        case Decimal():
            return {"decimal": str(value)}
        case str():
            return {"text": value}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case datetime():
            return {"time": value.isoformat()}
        case date():
            return {"date": value.isoformat()}
    raise InvalidRequest(f"a condition cannot compare with a {type(value).__name__}")


def _unpacked(packed: dict[str, Any]) -> Any:
    [(kind, value)] = packed.items()
    unpack: dict[str, Any] = {
        "bool": bool,
        "int": int,
        "float": float.fromhex,
        "decimal": Decimal,
        "text": str,
        "bytes": base64.b64decode,
        "time": datetime.fromisoformat,
        "date": date.fromisoformat,
    }
    return unpack[kind](value)
