"""Durations as people write them: ``100ms``, ``5s``, ``1h30m``, ``7days 30min``, ``2s+500ms``.

A duration is the sum of one or more numbers with a unit; spaces and ``+`` between them are optional. The units are
SlateDB's in upper or lower case, and their plurals. A month has 30 days and a year 365. A number without a unit is
refused: it could mean seconds or milliseconds, and a wrong guess is wrong by a factor of a thousand.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

from flagstone.errors import InvalidRequest

_SECOND: Final = 1_000_000_000
_UNITS: Final = {
    "ns nsec nanosecond": 1,
    "us µs μs usec microsecond": 1_000,
    "ms msec millisecond": 1_000_000,
    "s sec second": _SECOND,
    "m min minute": 60 * _SECOND,
    "h hr hour": 3_600 * _SECOND,
    "d day": 86_400 * _SECOND,
    "w week": 7 * 86_400 * _SECOND,
    "mon month": 30 * 86_400 * _SECOND,
    "y year": 365 * 86_400 * _SECOND,
}
_NANOSECONDS: Final = {unit: size for units, size in _UNITS.items() for unit in units.split()}
_TERM: Final = re.compile(r"([0-9]+)\s*([^\W\d_]*)(?:\s*\+\s*|\s*)")
_ANY: Final = timedelta.min
_EXAMPLES: Final = "write it like 100ms, 5s, 1h30m or 7days 30min"


def as_duration(value: object, name: str, *, minimum: timedelta = _ANY) -> timedelta:
    """The duration that a caller passed as the argument `name`: a timedelta, or a text.

    Raises:
        InvalidRequest: the value is neither, has no unit, or is shorter than `minimum`.

    """
    if isinstance(value, str):
        try:
            value = parse_duration(value)
        except InvalidRequest as error:
            raise InvalidRequest(f"{name}: {error}") from None
    if not isinstance(value, timedelta):
        raise InvalidRequest(f"{name}: {refusal(value)}")
    if value < minimum:
        what = "negative" if value < timedelta(0) else "too short"
        raise InvalidRequest(f"{name}: {value} is {what}; use at least {format_duration(minimum)}")
    return value


def refusal(value: object) -> str:
    """The error text for a value that is neither a timedelta nor a text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value!r} has no unit; use a timedelta or text such as '5s' or '100ms'"
    return f"{value!r} is not a duration; use a timedelta or text such as '5s'"


def parse_duration(text: str) -> timedelta:
    """The duration that `text` stands for.

    Raises:
        InvalidRequest: the text is not a duration, or is finer than a microsecond.

    """
    rest = text.strip()
    if not rest or rest.endswith("+"):
        raise InvalidRequest(f"{text!r} is not a duration; {_EXAMPLES}")
    total, at = 0, 0
    while at < len(rest):
        term = _TERM.match(rest, at)
        if term is None:
            raise InvalidRequest(f"{text!r} is not a duration; {_EXAMPLES}")
        number, unit = term[1], term[2].lower()
        if not unit:
            raise InvalidRequest(f"{text!r} is not a duration: {number} has no unit; {_EXAMPLES}")
        size = _NANOSECONDS.get(unit) or _NANOSECONDS.get(unit.removesuffix("s"))
        if size is None:
            known = ", ".join(units.split()[0] for units in _UNITS)
            raise InvalidRequest(f"{text!r} has the unknown unit {term[2]!r}; use one of {known}")
        total += int(number) * size
        at = term.end()
    if total % 1_000:
        raise InvalidRequest(f"{text!r} is finer than a microsecond; use whole microseconds")
    try:
        return timedelta(microseconds=total // 1_000)
    except OverflowError:
        raise InvalidRequest(f"{text!r} is longer than the limit of {timedelta.max.days} days") from None


def format_duration(duration: timedelta) -> str:
    """The shortest exact text in one unit, which SlateDB also reads: ``90s``, ``100ms`` or ``1500us``."""
    microseconds = duration // timedelta(microseconds=1)
    if microseconds % 1_000_000 == 0:
        return f"{microseconds // 1_000_000}s"
    if microseconds % 1_000 == 0:
        return f"{microseconds // 1_000}ms"
    return f"{microseconds}us"
