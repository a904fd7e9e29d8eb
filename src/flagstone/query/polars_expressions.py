"""Polars predicates as conditions.

A predicate has no public structure, but Polars writes it as JSON. That form may change with a release; the caller then
gets `Unknown`, reads all keys, and Polars applies the whole predicate, as always.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any, Final

import polars as pl

from flagstone.query.conditions import (
    Compare,
    Comparison,
    Condition,
    Constant,
    Either,
    Every,
    Not,
    OneOf,
    StartsWith,
    Unknown,
)

_COMPARISONS: Final[dict[str, Comparison]] = {
    "Eq": "=",
    "EqValidity": "=",
    "Lt": "<",
    "LtEq": "<=",
    "Gt": ">",
    "GtEq": ">=",
}
_SWAPPED: Final[dict[Comparison, Comparison]] = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_BETWEEN: Final[dict[str, tuple[Comparison, Comparison]]] = {
    "Both": (">=", "<="),
    "Left": (">=", "<"),
    "Right": (">", "<="),
    "None": (">", "<"),
}


def read_predicate(predicate: pl.Expr) -> Condition:
    """Take a predicate apart. Parts that say nothing about columns and literals become `Unknown`."""
    try:
        return _condition(json.loads(predicate.meta.serialize(format="json")))
    except (LookupError, RecursionError, TypeError, ValueError, pl.exceptions.PolarsError):
        return Unknown()


def _condition(node: Any) -> Condition:
    match node:
        case {"BinaryExpr": {"left": left, "op": "And" | "LogicalAnd", "right": right}}:
            return Every((_condition(left), _condition(right)))
        case {"BinaryExpr": {"left": left, "op": "Or" | "LogicalOr", "right": right}}:
            return Either((_condition(left), _condition(right)))
        case {"BinaryExpr": {"left": left, "op": op, "right": right}} if op in _COMPARISONS:
            return _comparison(_COMPARISONS[op], left, right)
        case {"Function": {"input": list(inputs), "function": function}}:
            return _function(inputs, function)
        case {"Literal": _}:
            found = _values(node)
            value = found[0] if found is not None and len(found) == 1 else ...
            return Constant(value) if value is None or isinstance(value, bool) else Unknown()
    return Unknown()


def _function(inputs: Sequence[Any], function: Any) -> Condition:
    match function, inputs:
        case {"Boolean": "Not"}, [part]:
            return Not(_condition(part))
        case {"Boolean": {"IsBetween": {"closed": closed}}}, [column, low, high]:
            above, below = _BETWEEN[closed]
            return Every((_comparison(above, column, low), _comparison(below, column, high)))
        case {"Boolean": {"IsIn": _}}, [{"Column": name}, values]:
            found = _values(values)
            if found is not None and len(found) == 1 and isinstance(found[0], list):
                found = found[0]
            return Unknown() if found is None else OneOf(name, tuple(found))
        case (({"StringExpr": "StartsWith"} | {"BinaryExpr": "StartsWith"}), [{"Column": name}, prefix]):
            found = _values(prefix)
            if found is not None and len(found) == 1 and isinstance(found[0], str | bytes):
                return StartsWith(name, found[0])
    return Unknown()


def _comparison(comparison: Comparison, left: Any, right: Any) -> Condition:
    if "Literal" in left:
        comparison, left, right = _SWAPPED[comparison], right, left
    found = _values(right) if "Column" in left else None
    if found is None or len(found) != 1 or found[0] is None:
        return Unknown()
    return Compare(left["Column"], comparison, found[0])


def _values(node: Any) -> list[Any] | None:
    """The values of a literal; None if the node is another expression."""
    if not isinstance(node, dict) or "Literal" not in node:
        return None
    literal = pl.Expr.deserialize(io.BytesIO(json.dumps(node).encode()), format="json")
    found: list[Any] = pl.select(literal).to_series().to_list()
    return found
