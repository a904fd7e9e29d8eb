"""The format `json`: each value is an object with the columns' names. `docs/keys.md` says how each type is written.

Types that JSON lacks become strings without loss: decimals with all their digits, times in ISO 8601, binaries in
base64. The format is for exchange with other programs; `row` is many times as fast.

`pyarrow.json` cannot replace this module: it reads no base64, no NaN, no dates as text, no maps and no durations, skips
empty values, and PyArrow has no JSON writer.
"""

from __future__ import annotations

import binascii
import json
import math
from base64 import b64decode, b64encode
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any, Final, TypeVar

import pyarrow as pa

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.values import ValueCodec, is_list

_WRITE: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_DIGITS: Final = {"s": 0, "ms": 3, "us": 6, "ns": 9}
Wanted = TypeVar("Wanted")
_FLOATS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonCodec(ValueCodec):
    """Objects in UTF-8. A missing member is null; members that the schema lacks are ignored."""

    format = "json"

    def _check_type(self, path: str, kind: Any) -> None:
        if pa.types.is_struct(kind) and len({field.name for field in kind}) < kind.num_fields:
            raise InvalidRequest(f"column {path!r} has two fields of one name; rename one")
        super()._check_type(path, kind)

    def _stores(self, kind: Any) -> bool:
        return _parser(kind) is not None

    def _encode(self, columns: list[Any], rows: int) -> Any:
        names = self.schema.names
        plain = [_plain(column) for column in columns]
        texts = [_WRITE(dict(zip(names, row, strict=True))).encode() for row in zip(*plain, strict=True)]
        if sum(map(len, texts)) >= 2**31:
            raise InvalidRequest(f"{rows} values are larger than 2 GiB: encode fewer at a time")
        return pa.array(texts, pa.binary())

    def _decode(self, values: Any) -> list[Any]:
        objects = [_parsed(row, raw) for row, raw in enumerate(values.to_pylist())]
        columns = []
        for field in self.schema:
            members = [one.get(field.name) for one in objects]
            try:
                columns.append(_column(members, field.type))
            except _NOT_OF_THE_TYPE as problem:
                raise InvalidRequest(_explain(members, field, problem)) from None
        return columns


_NOT_OF_THE_TYPE: Final = (
    pa.ArrowException,
    TypeError,
    ValueError,
    OverflowError,
    InvalidOperation,
    AttributeError,
)


def _parsed(row: int, raw: bytes | None) -> dict[str, Any]:
    if raw is None:
        return {}
    try:
        found = json.loads(raw)
    except json.JSONDecodeError as problem:
        raise CorruptData(f"value {row} is not JSON: {problem.msg}", offset=problem.pos) from None
    except (ValueError, RecursionError) as problem:
        raise CorruptData(f"value {row} is not JSON: {problem}", offset=0) from None
    if not isinstance(found, dict):
        raise CorruptData(f"value {row} is JSON, but not an object", offset=0)
    return found


def _explain(members: list[Any], field: Any, problem: Exception) -> str:
    for row, member in enumerate(members):
        try:
            _column([member], field.type)
        except _NOT_OF_THE_TYPE as alone:
            return f"value {row}: column {field.name!r} is not a {field.type}: {alone}"
    return f"column {field.name!r} is not a {field.type}: {problem}"


def _is_binary(kind: Any) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
        or pa.types.is_fixed_size_binary(kind)
    )


def _counts(kind: Any) -> bool:
    """Whether JSON has an integer for this type: a time of day or a duration."""
    return bool(pa.types.is_time(kind) or pa.types.is_duration(kind))


def _plain(column: Any) -> list[Any]:
    """The rows of a column as values for the JSON encoder."""
    kind = column.type
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        children = [_plain(child) for child in column.flatten()]
        rows = zip(*children, strict=True) if children else iter([()] * len(column))
        valid = column.is_valid().to_pylist()
        return [
            dict(zip(names, row, strict=True)) if there else None
            for there, row in zip(valid, rows, strict=True)
        ]
    if is_list(kind) or pa.types.is_map(kind):
        return _plain_lists(column)
    if pa.types.is_floating(kind):
        return [_plain_float(value) for value in column.cast(pa.float64()).to_pylist()]
    if pa.types.is_decimal(kind):
        return [None if value is None else str(value) for value in column.to_pylist()]
    if _is_binary(kind):
        return [None if value is None else b64encode(value).decode() for value in column.to_pylist()]
    if pa.types.is_date(kind):
        days = column.cast(pa.date32()).cast(pa.int32()).to_pylist()
        return [None if day is None else _plain_date(day) for day in days]
    if pa.types.is_timestamp(kind):
        digits, zone = _DIGITS[kind.unit], "" if kind.tz is None else "Z"
        return [
            None if at is None else _plain_time(at, digits, zone)
            for at in column.cast(pa.int64()).to_pylist()
        ]
    if _counts(kind):
        return column.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist()  # type: ignore[no-any-return]
    return column.to_pylist()  # type: ignore[no-any-return]


def _plain_lists(column: Any) -> list[Any]:
    ends = column.offsets.to_pylist()
    first, last = (ends[0], ends[-1]) if ends else (0, 0)
    inner = column.values.slice(first, last - first)
    if pa.types.is_map(column.type):
        # Pairs instead of an object, because keys may be other than strings.
        pairs = [_plain(child) for child in inner.flatten()]
        elements: list[Any] = [list(pair) for pair in zip(*pairs, strict=True)]
    else:
        elements = _plain(inner)
    valid = column.is_valid().to_pylist()
    return [
        elements[ends[row] - first : ends[row + 1] - first] if there else None
        for row, there in enumerate(valid)
    ]


def _plain_float(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"  # noqa: PLR0124


def _plain_date(day: int) -> str | int:
    """ISO 8601 for the years 1 to 9999, otherwise days since 1970."""
    ordinal = day + _EPOCH_DAY
    return date.fromordinal(ordinal).isoformat() if 1 <= ordinal <= date.max.toordinal() else day


def _plain_time(at: int, digits: int, zone: str) -> str | int:
    """ISO 8601 for the years 1 to 9999, otherwise units since 1970."""
    seconds, fraction = divmod(at, 10**digits)
    try:
        whole = (_EPOCH + timedelta(seconds=seconds)).replace(tzinfo=None).isoformat()
    except OverflowError:
        return at
    return f"{whole}.{fraction:0{digits}d}{zone}" if digits else f"{whole}{zone}"


def _column(members: list[Any], kind: Any) -> Any:
    """The column with these parsed members; raises one of `_NOT_OF_THE_TYPE` if a member does not fit."""
    if pa.types.is_struct(kind):
        children = [
            _column([None if one is None else _member(one, field.name) for one in members], field.type)
            for field in kind
        ]
        mask = pa.array([one is None for one in members], pa.bool_())
        if not children:
            return pa.array([None if one is None else {} for one in members], kind)
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    if is_list(kind) or pa.types.is_map(kind):
        return _list_column(members, kind)
    if pa.types.is_null(kind):
        return pa.array(members, pa.null())
    parse = _parser(kind)
    assert parse is not None, "the codec has checked its types"
    parsed = [None if one is None else parse(one) for one in members]
    if pa.types.is_date(kind):
        return pa.array(parsed, pa.int32()).cast(pa.date32()).cast(kind)
    if pa.types.is_timestamp(kind):
        return pa.array(parsed, pa.int64()).cast(kind)
    if _counts(kind):
        return pa.array(parsed, pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)
    if pa.types.is_floating(kind):
        return pa.array(parsed, pa.float64()).cast(kind)
    return pa.array(parsed, kind)


def _list_column(members: list[Any], kind: Any) -> Any:
    offsets, elements = [0], []
    for one in members:
        if one is not None:
            if not isinstance(one, list):
                raise TypeError(f"{one!r} is not an array")
            elements += one
        offsets.append(len(elements))
    mask = pa.array([one is None for one in members], pa.bool_())
    if pa.types.is_map(kind):
        keys = _column([key for key, _ in elements], kind.key_type)
        items = _column([item for _, item in elements], kind.item_type)
        return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, items, type=kind, mask=mask)
    large = pa.types.is_large_list(kind)
    build = pa.LargeListArray if large else pa.ListArray
    bounds = pa.array(offsets, pa.int64() if large else pa.int32())
    return build.from_arrays(bounds, _column(elements, kind.value_type), type=kind, mask=mask)


def _member(one: Any, name: str) -> Any:
    if not isinstance(one, dict):
        raise TypeError(f"{one!r} is not an object")
    return one.get(name)


def _parser(kind: Any) -> Callable[[Any], Any] | None:
    """The function that converts a member to a value of the type; None if the format cannot store the type."""
    if pa.types.is_boolean(kind):
        return lambda one: _of(bool, one)
    if pa.types.is_integer(kind) or _counts(kind):
        return _integer
    if pa.types.is_floating(kind):
        return _float
    if pa.types.is_decimal(kind):
        return lambda one: Decimal(_of(str, one)) if isinstance(one, str) else Decimal(repr(_number(one)))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return lambda one: _of(str, one)
    if _is_binary(kind):
        return _binary
    if pa.types.is_date(kind):
        return _date
    if pa.types.is_timestamp(kind):
        return lambda one: _time(one, _DIGITS[kind.unit], zoned=kind.tz is not None)
    return None


def _of(wanted: type[Wanted], one: Any) -> Wanted:
    if type(one) is not wanted:
        raise TypeError(f"{one!r} is not a {wanted.__name__}")
    return one


def _number(one: Any) -> int | float:
    if type(one) is not int and type(one) is not float:
        raise TypeError(f"{one!r} is not a number")
    return one


def _integer(one: Any) -> int:
    return _of(int, one)


def _float(one: Any) -> float:
    return _FLOATS[one] if isinstance(one, str) and one in _FLOATS else float(_number(one))


def _binary(one: Any) -> bytes:
    try:
        return b64decode(_of(str, one), validate=True)
    except binascii.Error as problem:
        raise ValueError(f"{one!r} is not base64: {problem}") from None


def _date(one: Any) -> int:
    return one if type(one) is int else date.fromisoformat(_of(str, one)).toordinal() - _EPOCH_DAY


def _time(one: Any, digits: int, *, zoned: bool) -> int:
    """Units since 1970. The fraction may have fewer digits than the unit, and more only if they are zero."""
    if type(one) is int:
        return one
    text, _, fraction = _of(str, one).removesuffix("Z").partition(".")
    whole = datetime.fromisoformat(text)
    if whole.tzinfo is not None or text.endswith("Z") or one.endswith("Z") != zoned:
        raise ValueError(f"{one!r} must {'end' if zoned else 'not end'} in Z and have no other time zone")
    if not (fraction.isdigit() or not fraction) or fraction[digits:].strip("0"):
        raise ValueError(f"{one!r} has a finer fraction than the type")
    since = whole.replace(tzinfo=UTC) - _EPOCH
    seconds = since.days * 86_400 + since.seconds
    return seconds * int(10**digits) + int(fraction[:digits].ljust(digits, "0") or 0)
