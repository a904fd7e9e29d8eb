"""Encodes one tuple to bytes and decodes it. `docs/keys.md` has the layout; `columnar` does the same for columns.

Equal values of one type have equal bytes: -0.0 is stored as 0.0, every NaN as the same NaN, a decimal without trailing
zeros, a datetime with a time zone in UTC. Decoding accepts only bytes that encoding writes, so each tuple has exactly
one key.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Final

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.types import MAX_KEY_BYTES

KeyPart = bool | int | float | Decimal | date | datetime | str | bytes | None
"""The types that a tuple may contain. A datetime without a time zone is a local time."""

NULL: Final = 0x05
FALSE: Final = 0x10
TRUE: Final = 0x11
NEGATIVE: Final = 0x28
"""Integers below 0: 0x28 minus the number of bytes that follow, down to 0x20."""
POSITIVE: Final = 0x29
"""Integers from 0 on: 0x29 plus the number of bytes that follow, up to 0x31."""
FLOAT: Final = 0x38
DECIMAL_NEGATIVE: Final = 0x40
DECIMAL_ZERO: Final = 0x41
DECIMAL_POSITIVE: Final = 0x42
DATE: Final = 0x48
LOCAL_TIME: Final = 0x50
INSTANT: Final = 0x51
TEXT: Final = 0x58
BINARY: Final = 0x59

AFTER: Final = b"\xff"
"""No part begins with this byte, so it sorts after every continuation of a key."""

MAX_INT_BYTES: Final = 8
MIN_INT: Final = -(2**63)
MAX_DIGITS: Final = 38
EXPONENT_BIAS: Final = 0x8000

_EPOCH_DAY: Final = date(1970, 1, 1).toordinal()
_EPOCH: Final = datetime(1970, 1, 1)
_EPOCH_UTC: Final = datetime(1970, 1, 1, tzinfo=UTC)
_SIGN64: Final = 1 << 63
_MASK64: Final = 2**64 - 1
_NAN: Final = 0x7FF8_0000_0000_0000
_ESCAPED: Final = re.compile(rb"(?:[^\x01]|\x01[\x01\x02])*", re.DOTALL)
_KINDS: Final = "None, bool, int, float, Decimal, date, datetime, str or bytes"


def encode(*parts: KeyPart | Sequence[KeyPart]) -> bytes:
    """The key of a tuple, given as one tuple or part by part.

    Keys sort like their tuples, part by part: None first, then booleans, integers, floats, decimals, dates, times,
    strings and binaries, each type in its usual order. The key of a tuple is a prefix of the keys of exactly those
    tuples that begin with it.

    Raises:
        InvalidRequest: a part has another type or is out of range, or the key is longer than 65,535 bytes.

    """
    chosen = parts[0] if len(parts) == 1 and isinstance(parts[0], (tuple, list)) else parts
    try:
        key = b"".join([_ENCODERS[type(part)](part) for part in chosen])
    except (KeyError, InvalidRequest):
        key = b"".join([_encode_part(part, f"parts[{index}]") for index, part in enumerate(chosen)])
    if len(key) > MAX_KEY_BYTES:
        sizes = [len(_encode_part(part, f"parts[{index}]")) for index, part in enumerate(chosen)]
        largest = sizes.index(max(sizes))
        raise InvalidRequest(
            f"the key has {len(key)} bytes and may have {MAX_KEY_BYTES}; parts[{largest}], a "
            f"{type(chosen[largest]).__name__}, alone has {sizes[largest]}: shorten or hash it"
        )
    return key


def decode(key: bytes) -> tuple[KeyPart, ...]:
    """The tuple of a key. Datetimes with a time zone are in UTC; decimals have no trailing zeros after the point.

    Raises:
        CorruptData: the bytes are not a key that `encode` writes; `offset` is where the wrong part begins.
        InvalidRequest: a date or time is outside Python's years 1 to 9999; `decode_arrow` can read it.

    """
    raw = key if type(key) is bytes else _as_bytes(key)
    parts: list[KeyPart] = []
    at = 0
    while at < len(raw):
        part, at = _decode_part(raw, at)
        parts.append(part)
    return tuple(parts)


def key_range(*parts: KeyPart | Sequence[KeyPart]) -> tuple[bytes, bytes]:
    """The start (inclusive) and stop (exclusive) of the keys of all tuples that begin with these parts.

    Raises `InvalidRequest` as `encode` does.
    """
    start = encode(*parts)
    return start, start + AFTER


def successor(*parts: KeyPart | Sequence[KeyPart]) -> bytes:
    """A bound after a tuple and all tuples that begin with it: the stop of `<=`, the start of `>`.

    It is not a key itself. Raises `InvalidRequest` as `encode` does.
    """
    return encode(*parts) + AFTER


def _as_bytes(key: object) -> bytes:
    if not isinstance(key, (bytes, bytearray, memoryview)):
        raise InvalidRequest(f"a key is bytes, not {type(key).__name__}")
    return bytes(key)


def _encode_part(part: object, name: str) -> bytes:
    encoder = _ENCODERS.get(type(part)) or next(
        (encoder for kind, encoder in _ENCODERS.items() if isinstance(part, kind)), None
    )
    if encoder is None:
        raise InvalidRequest(f"{name} is a {type(part).__name__}; a key consists of {_KINDS}")
    try:
        return encoder(part)
    except InvalidRequest as problem:
        raise InvalidRequest(f"{name}: {problem}") from None


def _encode_none(_: None) -> bytes:
    return bytes([NULL])


def _encode_bool(value: bool) -> bytes:
    return bytes([TRUE if value else FALSE])


def _encode_int(value: int) -> bytes:
    if value >= 0:
        size = (value.bit_length() + 7) >> 3
        if size > MAX_INT_BYTES:
            raise InvalidRequest(f"the largest integer is 2^64 - 1; {_shown(value)} is above it")
        return bytes([POSITIVE + size]) + value.to_bytes(size, "big")
    if value < MIN_INT:
        raise InvalidRequest(f"the smallest integer is -2^63; {_shown(value)} is below it")
    size = ((~value).bit_length() + 7) >> 3
    return bytes([NEGATIVE - size]) + (value + (1 << (8 * size))).to_bytes(size, "big")


def _shown(value: int) -> str:
    return str(value) if value.bit_length() < 200 else f"an integer of {value.bit_length()} bits"


def _encode_float(value: float) -> bytes:
    # Adding 0.0 turns -0.0 into 0.0. NaN is the only value that differs from itself.
    bits: int = _NAN if value != value else struct.unpack(">Q", struct.pack(">d", value + 0.0))[0]  # noqa: PLR0124
    return struct.pack(">BQ", FLOAT, bits ^ (_MASK64 if bits & _SIGN64 else _SIGN64))


def _encode_decimal(value: Decimal) -> bytes:
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise InvalidRequest(f"a decimal must be a number, not {value}")
    text = "".join(map(str, digits)).lstrip("0")
    point = len(text) + exponent
    text = text.rstrip("0")
    if not text:
        return bytes([DECIMAL_ZERO])
    if len(text) > MAX_DIGITS:
        raise InvalidRequest(f"decimals have up to {MAX_DIGITS} digits; this one has {len(text)}")
    if not 0 <= point + EXPONENT_BIAS <= 0xFFFF:
        raise InvalidRequest("decimals must be between 1e-32769 and 1e32767")
    text += "0" * (len(text) & 1)
    pairs = bytes(int(text[at : at + 2]) + 1 for at in range(0, len(text), 2))
    body = struct.pack(">H", point + EXPONENT_BIAS) + pairs + b"\0"
    if sign:
        return bytes([DECIMAL_NEGATIVE]) + bytes(byte ^ 0xFF for byte in body)
    return bytes([DECIMAL_POSITIVE]) + body


def _encode_date(value: date) -> bytes:
    return struct.pack(">BI", DATE, value.toordinal() - _EPOCH_DAY + (1 << 31))


def _encode_datetime(value: datetime) -> bytes:
    if getattr(value, "nanosecond", 0):
        raise InvalidRequest(f"{value} has nanoseconds, which would be lost; use whole microseconds")
    zoned = value.utcoffset() is not None
    since = value - (_EPOCH_UTC if zoned else _EPOCH.replace(tzinfo=value.tzinfo))
    micros = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return struct.pack(">BQ", INSTANT if zoned else LOCAL_TIME, micros + _SIGN64)


def _encode_str(value: str) -> bytes:
    # A string ends with 0x00. Inside, 0x00 is written 0x01 0x01, and 0x01 is written 0x01 0x02.
    try:
        raw = value.encode()
    except UnicodeEncodeError as problem:
        raise InvalidRequest(f"the string is not Unicode text: {problem.reason}") from None
    return b"\x58" + raw.replace(b"\x01", b"\x01\x02").replace(b"\x00", b"\x01\x01") + b"\x00"


def _encode_bytes(value: bytes) -> bytes:
    return b"\x59" + bytes(value).replace(b"\x01", b"\x01\x02").replace(b"\x00", b"\x01\x01") + b"\x00"


# The order matters for subclasses: bool is a subclass of int, and datetime of date.
_ENCODERS: Final[dict[type, Callable[[Any], bytes]]] = {
    type(None): _encode_none,
    bool: _encode_bool,
    int: _encode_int,
    float: _encode_float,
    Decimal: _encode_decimal,
    datetime: _encode_datetime,
    date: _encode_date,
    str: _encode_str,
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    memoryview: _encode_bytes,
}


def _decode_part(key: bytes, at: int) -> tuple[KeyPart, int]:
    """The part that begins at `at`, and the position of the next part."""
    code = key[at]
    if code in {TEXT, BINARY}:
        return _decode_string(key, at)
    if NEGATIVE - MAX_INT_BYTES <= code <= POSITIVE + MAX_INT_BYTES:
        return _decode_int(key, at)
    if code == NULL:
        return None, at + 1
    if code in {TRUE, FALSE}:
        return code == TRUE, at + 1
    if code == FLOAT:
        return _decode_float(key, at), at + 9
    if code == DATE:
        return _decode_date(key, at), at + 5
    if code in {INSTANT, LOCAL_TIME}:
        return _decode_datetime(key, at), at + 9
    if code == DECIMAL_ZERO:
        return Decimal(0), at + 1
    if code in {DECIMAL_POSITIVE, DECIMAL_NEGATIVE}:
        return _decode_decimal(key, at)
    raise CorruptData(f"no part of a key begins with 0x{code:02x}", offset=at)


def _fixed(key: bytes, at: int, size: int) -> int:
    if at + 1 + size > len(key):
        raise CorruptData(f"the key ends inside a part of {size + 1} bytes", offset=at)
    return int.from_bytes(key[at + 1 : at + 1 + size], "big")


def _decode_string(key: bytes, at: int) -> tuple[str | bytes, int]:
    end = key.find(b"\0", at + 1)
    if end < 0:
        raise CorruptData("the key ends inside a string", offset=at)
    raw = key[at + 1 : end]
    if b"\x01" in raw:
        if not _ESCAPED.fullmatch(raw):
            raise CorruptData("a string has an escape that does not exist", offset=at)
        raw = raw.replace(b"\x01\x01", b"\x00").replace(b"\x01\x02", b"\x01")
    if key[at] == BINARY:
        return raw, end + 1
    try:
        return raw.decode(), end + 1
    except UnicodeDecodeError as problem:
        raise CorruptData(f"a string is not UTF-8: {problem.reason}", offset=at) from None


def _decode_int(key: bytes, at: int) -> tuple[int, int]:
    code = key[at]
    negative = code <= NEGATIVE
    size = NEGATIVE - code if negative else code - POSITIVE
    value = _fixed(key, at, size)
    if negative:
        value -= 1 << (8 * size)
    if ((~value if negative else value).bit_length() + 7) >> 3 != size or value < MIN_INT:
        raise CorruptData(f"an integer of {size} bytes is not in its shortest form", offset=at)
    return value, at + 1 + size


def _decode_float(key: bytes, at: int) -> float:
    bits = _fixed(key, at, 8)
    bits ^= _SIGN64 if bits & _SIGN64 else _MASK64
    value: float = struct.unpack(">d", struct.pack(">Q", bits))[0]
    if bits == _SIGN64 or (value != value and bits != _NAN):  # noqa: PLR0124 - NaN
        raise CorruptData("a float is a form of zero or NaN that is never written", offset=at)
    return value


def _decode_date(key: bytes, at: int) -> date:
    days = _fixed(key, at, 4) - (1 << 31)
    if not date.min.toordinal() <= days + _EPOCH_DAY <= date.max.toordinal():
        raise InvalidRequest(f"Python has no date {days} days from 1970-01-01: use decode_arrow")
    return date.fromordinal(days + _EPOCH_DAY)


def _decode_datetime(key: bytes, at: int) -> datetime:
    micros = _fixed(key, at, 8) - _SIGN64
    try:
        return (_EPOCH_UTC if key[at] == INSTANT else _EPOCH) + timedelta(microseconds=micros)
    except OverflowError:
        raise InvalidRequest(f"Python has no time {micros} µs from 1970: use decode_arrow") from None


def _decode_decimal(key: bytes, at: int) -> tuple[Decimal, int]:
    negative = key[at] == DECIMAL_NEGATIVE
    end = key.find(b"\xff" if negative else b"\0", at + 3)
    if end < 0:
        raise CorruptData("the key ends inside a decimal", offset=at)
    body = bytes(byte ^ 0xFF for byte in key[at + 1 : end]) if negative else key[at + 1 : end]
    pairs = [byte - 1 for byte in body[2:]]
    if not pairs or max(pairs) > 99 or pairs[0] < 10 or pairs[-1] == 0:
        raise CorruptData("a decimal has digits that are never written", offset=at)
    text = "".join(f"{pair:02d}" for pair in pairs).rstrip("0")
    if len(text) > MAX_DIGITS:
        raise CorruptData(f"a decimal has {len(text)} digits", offset=at)
    exponent = int.from_bytes(body[:2], "big") - EXPONENT_BIAS - len(text)
    if 0 < exponent <= MAX_DIGITS - len(text):
        text, exponent = text + "0" * exponent, 0
    return Decimal((int(negative), tuple(map(int, text)), exponent)), end + 1
