"""Filters that Spark pushes down, as conditions. Pure."""

from __future__ import annotations

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
    StringStartsWith,
)

from flagstone.spark.conditions import Comparator, Comparison, Condition, StartsWith, one_of

SCANS_ARE_APART: Final = hasattr(DataSourceReader, "pushLimit")
"""Whether this Spark applies a pushed filter only to the scan for which it was pushed.

Up to 4.3 Spark stores the last planned read with the DataFrame: after it pushed a filter for one use of the DataFrame,
other uses, with other filters or none, read only the rows that passed the first filter, even within one query. The
release whose readers have `pushLimit` keeps scans apart.
"""

_SIGNS: Final[dict[type, Comparator]] = {
    EqualTo: "=",
    EqualNullSafe: "=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}


def condition_of(pushed: Filter) -> Condition | None:
    """The same condition; None if it has another form, or compares with null."""
    attribute: tuple[str, ...] = getattr(pushed, "attribute", ())
    if len(attribute) != 1:
        return None
    column = attribute[0]
    if isinstance(pushed, In):
        values = [_plain(value) for value in pushed.value if value is not None]
        return one_of(column, values) if values else None
    value = _plain(getattr(pushed, "value", None))
    if value is None:
        return None
    if isinstance(pushed, StringStartsWith):
        return StartsWith(column, value)
    sign = _SIGNS.get(type(pushed))
    return None if sign is None else Comparison(column, sign, value)


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, bytearray) else value
