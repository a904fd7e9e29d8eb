"""Python objects that Arrow would convert to a column type by losing a part of them. Pure.

`pyarrow.array([1.5], pyarrow.int64())` is 1, a `datetime` becomes a date without its time, and one without a time zone
is taken for UTC. A row that is encoded alone is refused instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime, time, timedelta
from decimal import Decimal
from numbers import Real
from typing import Any, Final

import pyarrow as pa

_MICROS: Final = {"s": 1_000_000, "ms": 1_000}
"""The microseconds of a unit of time that is coarser than Python's."""


def refuse_loss(value: Any, kind: Any) -> None:
    """Raise `ValueError` or `TypeError` if `kind` cannot hold all of `value`. Arrow itself refuses other types."""
    if value is None:
        return
    types = pa.types
    if types.is_integer(kind):
        if isinstance(value, Real | Decimal) and math.isfinite(value) and value != math.floor(value):
            raise ValueError(f"{value!r} is not a whole number")
    elif types.is_floating(kind) and isinstance(value, bool):
        raise ValueError(f"{value!r} is no number")
    elif _is_text(kind) and isinstance(value, bytes | bytearray):
        raise ValueError(f"{value!r} is bytes, and the column has text: decode it")
    elif _is_bytes(kind) and isinstance(value, str):
        raise ValueError(f"{value!r} is text, and the column has bytes: encode it")
    elif types.is_float32(kind) or types.is_float16(kind):
        if isinstance(value, Real) and math.isfinite(value) and not math.isfinite(_narrow(value, kind)):
            raise ValueError(f"{value!r} is too large")
    elif types.is_temporal(kind):
        _refuse_loss_of_time(value, kind)
    elif types.is_struct(kind):
        if isinstance(value, Mapping):
            for at in range(kind.num_fields):
                field = kind.field(at)
                refuse_loss(value.get(field.name), field.type)
    elif types.is_map(kind):
        for one, other in value.items() if isinstance(value, Mapping) else _pairs(value):
            refuse_loss(one, kind.key_type)
            refuse_loss(other, kind.item_type)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if isinstance(value, str | bytes):
            raise ValueError(f"{value!r} is a text, and not a list")
        if isinstance(value, Iterable):
            for each in value:
                refuse_loss(each, kind.value_type)


def _is_text(kind: Any) -> bool:
    types = pa.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_bytes(kind: Any) -> bool:
    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )


def _narrow(value: Any, kind: Any) -> float:
    return float(pa.scalar(float(value), pa.float64()).cast(kind, safe=False).as_py())


def _pairs(value: Any) -> list[Any]:
    return [pair for pair in value if isinstance(pair, tuple) and len(pair) == 2]


def _refuse_loss_of_time(value: Any, kind: Any) -> None:
    types = pa.types
    if isinstance(value, int | float):
        raise TypeError(f"{value!r} has no unit: use the classes of datetime")
    if types.is_date(kind):
        if isinstance(value, datetime) and (value.tzinfo is not None or value.time() != time()):
            raise ValueError(f"{value.isoformat()} is a time, and the column has dates: use its date()")
    elif types.is_timestamp(kind) and isinstance(value, datetime):
        if kind.tz is not None and value.tzinfo is None:
            raise ValueError(f"{value.isoformat()} has no time zone, and the column has moments: give it one")
        if kind.tz is None and value.tzinfo is not None:
            raise ValueError(
                f"{value.isoformat()} has a time zone, and the column has local times: remove it"
            )
    coarse = _MICROS.get(getattr(kind, "unit", "us"))
    micros = _micros(value)
    # The classes of pandas are those of datetime, with nanoseconds.
    nanos = getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0)
    if (coarse is not None and micros % coarse) or (nanos and getattr(kind, "unit", "us") != "ns"):
        raise ValueError(
            f"{value!r} is more precise than the column: round it to {getattr(kind, 'unit', 'us')}"
        )


def _micros(value: Any) -> int:
    """The microseconds of a time or duration, after its whole seconds; 0 for everything else."""
    if isinstance(value, timedelta):
        return value.microseconds
    return value.microsecond if isinstance(value, datetime | time) else 0
