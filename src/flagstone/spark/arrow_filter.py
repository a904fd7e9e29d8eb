"""Conditions evaluated on Arrow batches, with Spark's answers. Pure.

`bind` fits a condition to the type of its column. It returns None where Arrow and Spark could differ: a literal that
Spark would cast, a float that is not exact, a column of another type. Spark then applies the condition itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from flagstone.spark.conditions import Comparison, Condition, NullTest, OneOf, StartsWith

_COMPARE: Final[dict[str, Any]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_MAX_INT: Final = 2**63


@dataclass(frozen=True, slots=True)
class Bound:
    """A condition whose column exists with this exact name, and whose literals have a type that Arrow compares."""

    condition: Condition
    scalars: tuple[pa.Scalar, ...] = ()

    def mask(self, column: Any) -> Any:
        """Which rows pass; null where the answer is unknown, as in Spark."""
        match self.condition:
            case Comparison(sign=sign):
                return _compared(column, sign, self.scalars[0])
            case OneOf():
                values = pa.array([scalar.as_py() for scalar in self.scalars], self.scalars[0].type)
                return pc.is_in(column.cast(values.type), value_set=values)
            case StartsWith(prefix=prefix):
                pattern = prefix if isinstance(prefix, bytes) else prefix.encode()
                return pc.starts_with(column.cast(pa.binary()), pattern=pattern)
            case NullTest(negated=negated):
                return pc.is_valid(column) if negated else pc.is_null(column)


def bind(condition: Condition, schema: pa.Schema) -> Bound | None:
    """The condition for a column of `schema`; None if only Spark can apply it. Names match as in Spark."""
    names = [name for name in schema.names if name.lower() == condition.column.lower()]
    if len(names) != 1:
        return None
    [name], kind = names, schema.field(names[0]).type
    match condition:
        case Comparison(_, sign, value):
            scalar = _scalar(kind, value)
            if scalar is None or (pa.types.is_boolean(kind) and sign not in ("=", "!=")):
                return None
            return Bound(Comparison(name, sign, value), (scalar,))
        case OneOf(_, values):
            scalars = [_scalar(kind, value) for value in values]
            if not scalars or None in scalars or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
                return None
            return Bound(OneOf(name, values), tuple(scalars))
        case StartsWith(_, prefix):
            return (
                Bound(StartsWith(name, prefix))
                if _scalar(kind, prefix) is not None and _is_text(kind)
                else None
            )
        case NullTest(_, negated):
            return Bound(NullTest(name, negated))


def split(conditions: Sequence[Condition], schema: pa.Schema) -> tuple[tuple[Bound, ...], bool]:
    """The conditions that can be evaluated here, and whether these are all."""
    bound = [bind(each, schema) for each in conditions]
    return tuple(each for each in bound if each is not None), None not in bound


def apply(batch: pa.RecordBatch, conditions: Sequence[Bound]) -> pa.RecordBatch:
    """The rows that pass all conditions."""
    mask = None
    for each in conditions:
        found = each.mask(batch.column(batch.schema.get_field_index(each.condition.column)))
        mask = found if mask is None else pc.and_kleene(mask, found)
    if mask is None or mask.true_count == len(mask):
        return batch
    return batch.filter(mask)


def _compared(column: Any, sign: str, scalar: pa.Scalar) -> Any:
    found = _COMPARE[sign](column, scalar)
    if sign in (">", ">=") and pa.types.is_floating(column.type):
        # To Spark NaN is above all numbers; to Arrow no comparison with it is true.
        return pc.or_(found, pc.is_nan(column))
    return found


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _scalar(kind: pa.DataType, value: Any) -> pa.Scalar | None:
    """The literal as Spark compares it with such a column; None if Spark would cast the column, or round."""
    if isinstance(value, bool):
        return pa.scalar(value) if pa.types.is_boolean(kind) else None
    if isinstance(value, str):
        return _of_text(kind, value.encode())
    if isinstance(value, bytes):
        return _of_text(kind, value)
    if isinstance(value, datetime):
        if not pa.types.is_timestamp(kind) or (kind.tz is None) != (value.tzinfo is None):
            return None
        return pa.scalar(value, kind)
    if isinstance(value, date):
        return pa.scalar(value, pa.date32()) if pa.types.is_date32(kind) else None
    if isinstance(value, int) and pa.types.is_integer(kind):
        return pa.scalar(value, pa.int64()) if -_MAX_INT <= value < _MAX_INT else None
    if pa.types.is_floating(kind):
        return _of_float(kind, value)
    if pa.types.is_decimal(kind) and isinstance(value, int | Decimal):
        return _of_decimal(Decimal(value))
    return None


def _of_text(kind: pa.DataType, value: bytes) -> pa.Scalar | None:
    if pa.types.is_binary(kind):
        return pa.scalar(value, pa.binary())
    if not pa.types.is_string(kind):
        return None
    try:
        return pa.scalar(value.decode(), pa.string())
    except UnicodeDecodeError:
        return None


def _of_float(kind: pa.DataType, value: Any) -> pa.Scalar | None:
    as_float = float(value)
    if math.isnan(as_float) or (isinstance(value, int) and int(as_float) != value):
        return None
    narrow = pa.scalar(as_float, pa.float32()).as_py()
    # A literal that 32 bits cannot hold is compared in 64, or the column is cast: Spark decides.
    if kind == pa.float32() and narrow != as_float:
        return None
    return pa.scalar(as_float, kind)


def _of_decimal(value: Decimal) -> pa.Scalar | None:
    digits = value.as_tuple()
    exponent = digits.exponent
    if not isinstance(exponent, int) or exponent > 0 or len(digits.digits) - exponent > 18:
        return None
    return pa.scalar(value, pa.decimal128(max(len(digits.digits), 1 - exponent), -exponent))
