"""Values of a collection as bytes, and back. Pure."""

from __future__ import annotations

import json
from typing import Any, Final, Literal, Protocol

from flagstone.errors import CorruptData, InvalidRequest

Format = Literal["bytes", "json", "row"]

_WRITE: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class Values(Protocol):
    """Encodes the values of a collection. It has no state that changes."""

    def encode(self, value: Any) -> bytes: ...

    def decode(self, stored: bytes) -> Any: ...


class BytesValues:
    """Bytes as they are."""

    def encode(self, value: Any) -> bytes:
        if not isinstance(value, bytes | bytearray | memoryview):
            raise InvalidRequest(f"a value of this collection is bytes, not {type(value).__name__}")
        return bytes(value)

    def decode(self, stored: bytes) -> bytes:
        return stored


class JsonValues:
    """Any JSON document, in UTF-8."""

    def encode(self, value: Any) -> bytes:
        try:
            return _WRITE(value).encode()
        except (TypeError, ValueError, RecursionError) as problem:
            raise InvalidRequest(f"the value is no JSON document: {problem}") from None

    def decode(self, stored: bytes) -> Any:
        try:
            return json.loads(stored)
        except ValueError as problem:
            raise CorruptData(f"the value is not JSON: {problem}") from None


def plain_values(kind: Any) -> Values | None:
    """The codec of a type without columns: `bytes` and `"json"`. None for other types."""
    if kind is bytes:
        return BytesValues()
    if isinstance(kind, str):
        if kind != "json":
            raise InvalidRequest(f"the type of a value is a type, or 'json'; not {kind!r}")
        return JsonValues()
    return None
