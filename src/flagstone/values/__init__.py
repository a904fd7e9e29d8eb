"""Structured values: the columns of a row as the bytes of one value. `docs/keys.md` is the specification.

    codec = values.codec("row", pa.schema([("name", pa.string()), ("price", pa.decimal128(10, 2))]))
    codec.decode(codec.encode({"name": "flag", "price": Decimal("1.20")}))
    codec.decode_arrow(codec.encode_arrow(batch))          # a record batch, to a column of values, and back

`row` is compact and fast and needs the schema to be read; `json` can be read by anything. There is no format of
Arrow's own: its messages are made for thousands of rows and take hundreds of bytes for one. `row` has Arrow's types.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from flagstone.errors import InvalidRequest

if TYPE_CHECKING:
    from flagstone.values.value_codec import ValueCodec

__all__ = ["FORMATS", "codec"]

FORMATS: Final = ("row", "json")
_CODECS: Final = {"row": ("flagstone.values.row", "RowCodec"), "json": ("flagstone.values.text", "JsonCodec")}


def codec(name: str, schema: Any) -> ValueCodec:
    """The codec of a format for the columns of an Arrow schema; it pickles, and any thread may use it.

    Raises `InvalidRequest` when there is no such format, or it has no place for a column's type.
    """
    if name not in _CODECS:
        hint = (
            " (rows in Arrow's own format take hundreds of bytes each: use 'row')" if name == "arrow" else ""
        )
        raise InvalidRequest(f"there is no value format {name!r}{hint}; formats are {', '.join(FORMATS)}")
    module, kind = _CODECS[name]
    made: ValueCodec = getattr(importlib.import_module(module), kind)(schema)
    return made
