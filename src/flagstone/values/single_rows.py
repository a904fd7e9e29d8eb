"""Fast path: encodes and decodes a single row of the format `row` without Arrow, in microseconds instead of 0.1 ms.

It handles the most common types, and only valid values. In every other case it returns None, and the slow path
through Arrow columns encodes the row or raises the error. A property test checks that both give the same results.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple

import pyarrow as pa

Reader = Callable[[bytes], Any]
Writer = Callable[[Any], bytes]

_EPOCH: Final = datetime(1970, 1, 1)
_EPOCH_UTC: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_NUMBERS: Final = {
    pa.int8(): "<b",
    pa.int16(): "<h",
    pa.int32(): "<i",
    pa.int64(): "<q",
    pa.uint8(): "<B",
    pa.uint16(): "<H",
    pa.uint32(): "<I",
    pa.uint64(): "<Q",
    pa.float32(): "<f",
    pa.float64(): "<d",
}
_NOT_HANDLED: Final = (struct.error, ValueError, TypeError, IndexError, OverflowError)


class _Column(NamedTuple):
    name: str
    width: int
    kind: type
    read: Reader
    write: Writer


class SingleRows:
    """Encodes and decodes single rows of a schema."""

    def __init__(self, columns: list[_Column], lead: bytes) -> None:
        self._columns = columns
        self._nulls = (len(columns) + 7) // 8
        self._head = lead + bytes((len(columns),))
        self._start = len(self._head) + self._nulls

    @classmethod
    def of(cls, schema: Any, lead: bytes, width: Callable[[Any], int]) -> SingleRows | None:
        """None if a type is not handled. Rows begin with `lead`.

        `width` is the size of an item of a type; 0 if it begins with its length.
        """
        columns = []
        for field in schema:
            known = _known(field.type, width(field.type))
            if known is None:
                return None
            columns.append(_Column(field.name, width(field.type), *known))
        # From 128 columns on, the count of columns has two bytes.
        return cls(columns, lead) if len(columns) < 0x80 else None

    def encode(self, row: Mapping[str, Any]) -> bytes | None:
        """The value of a row; None if a part is not handled here."""
        nulls = 0
        items = []
        try:
            for number, (name, width, kind, _, write) in enumerate(self._columns):
                part = row.get(name)
                if part is None:
                    nulls |= 1 << number
                    continue
                if type(part) is not kind:
                    return None
                item = write(part)
                if not width:
                    if len(item) > 0x7F:
                        items.append(_length(len(item)))
                    else:
                        items.append(bytes((len(item),)))
                items.append(item)
        except _NOT_HANDLED:
            return None
        return self._head + nulls.to_bytes(self._nulls, "little") + b"".join(items)

    def decode(self, value: bytes) -> dict[str, Any] | None:
        """The columns of a value; None if a part is not handled here."""
        if len(value) < self._start or not value.startswith(self._head):
            return None
        at = self._start
        nulls = int.from_bytes(value[at - self._nulls : at], "little")
        row: dict[str, Any] = {}
        try:
            for name, width, _, read, _ in self._columns:
                if nulls & 1:
                    row[name] = None
                else:
                    size = width
                    if not width:
                        size = value[at]
                        at += 1
                        if size > 0x7F:
                            size |= value[at] << 7
                            size -= 0x80
                            at += 1
                            if not 0x80 <= size <= 0x3FFF:
                                return None
                    end = at + size
                    if end > len(value):
                        return None
                    row[name] = read(value[at:end])
                    at = end
                nulls >>= 1
        except _NOT_HANDLED:
            return None
        return row if at == len(value) else None


def _length(size: int) -> bytes:
    if size > 0x3FFF:
        raise ValueError("lengths of three bytes are not handled here")
    return bytes((size & 0x7F | 0x80, size >> 7))


def _known(kind: Any, width: int) -> tuple[type, Reader, Writer] | None:
    if kind in _NUMBERS:
        number = struct.Struct(_NUMBERS[kind])
        wanted = float if pa.types.is_floating(kind) else int
        return wanted, lambda raw: number.unpack(raw)[0], number.pack
    if kind == pa.string():
        return str, bytes.decode, str.encode
    if kind == pa.binary():
        return bytes, bytes, bytes
    if kind == pa.bool_():
        return bool, lambda raw: raw != b"\0", lambda part: b"\1" if part else b"\0"
    if kind == pa.date32():
        return (
            date,
            lambda raw: date.fromordinal(int.from_bytes(raw, "little", signed=True) + _EPOCH_DAY),
            lambda part: (part.toordinal() - _EPOCH_DAY).to_bytes(4, "little", signed=True),
        )
    if kind == pa.timestamp("us"):
        return datetime, _read_local, _write_local
    if kind == pa.timestamp("us", tz="UTC"):
        return datetime, _read_moment, _write_moment
    if pa.types.is_decimal128(kind) and kind.scale >= 0:
        return Decimal, _decimal_reader(kind), _decimal_writer(kind, width)
    return None


def _read_local(raw: bytes) -> datetime:
    return _EPOCH + timedelta(microseconds=int.from_bytes(raw, "little", signed=True))


def _read_moment(raw: bytes) -> datetime:
    return _EPOCH_UTC + timedelta(microseconds=int.from_bytes(raw, "little", signed=True))


def _write_local(part: datetime) -> bytes:
    # With a time zone this raises TypeError, and the slow path raises the detailed error.
    return _micros(part - _EPOCH)


def _write_moment(part: datetime) -> bytes:
    return _micros(part - _EPOCH_UTC)


def _micros(since: timedelta) -> bytes:
    micros = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return micros.to_bytes(8, "little", signed=True)


def _decimal_reader(kind: Any) -> Reader:
    scale, most = kind.scale, 10**kind.precision

    def read(raw: bytes) -> Decimal:
        number = int.from_bytes(raw, "little", signed=True)
        if not -most < number < most:
            raise ValueError("more digits than the type has")
        return Decimal((int(number < 0), tuple(map(int, str(abs(number)))), -scale))

    return read


def _decimal_writer(kind: Any, width: int) -> Writer:
    scale, most = kind.scale, 10**kind.precision

    def write(part: Decimal) -> bytes:
        sign, digits, exponent = part.as_tuple()
        if not isinstance(exponent, int) or not 0 <= scale + exponent <= 76:
            raise ValueError("not a number of this scale")
        number = int("".join(map(str, digits))) * 10 ** (scale + exponent)
        if number >= most:
            raise ValueError("more digits than the type has")
        return int(-number if sign else number).to_bytes(width, "little", signed=True)

    return write
