"""Structured keys: tuples as bytes that sort like the tuples. `docs/keys.md` specifies the format.

    key = keys.encode("eu", 42)                      # also keys.encode(("eu", 42))
    keys.decode(key)                                 # ("eu", 42)
    db.scan(prefix=keys.encode("eu"))                # every tuple that begins with "eu", and no "europe"
    db.scan(*keys.range("eu"))                       # the same as a range
    db.scan(keys.encode("eu", 10), keys.successor("eu", 20))       # "eu" with 10 to 20, both included

The bytes contain the type of each part, so decoding needs no schema. A `KeySchema` adds what the bytes do not contain:
column names, the width of numbers, the scale of decimals. `encode_arrow` and `decode_arrow` do the same for columns,
at millions of parts per second. They need PyArrow, which is imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from flagstone.keys.schema import KeySchema
from flagstone.keys.tuples import KeyPart, decode, encode, successor
from flagstone.keys.tuples import key_range as range  # noqa: A004 - read as keys.range

if TYPE_CHECKING:
    from flagstone.keys.columnar import arrow_schema, decode_arrow, encode_arrow

__all__ = [
    "KeyPart",
    "KeySchema",
    "arrow_schema",
    "decode",
    "decode_arrow",
    "encode",
    "encode_arrow",
    "range",
    "successor",
]


def __getattr__(name: str) -> object:
    if name not in {"arrow_schema", "decode_arrow", "encode_arrow"}:
        raise AttributeError(f"module 'flagstone.keys' has no attribute {name!r}")
    return getattr(importlib.import_module("flagstone.keys.columnar"), name)
