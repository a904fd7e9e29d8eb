"""Structured values: the columns of a row as the bytes of one value. `docs/keys.md` is the specification.

    codec = values.codec("row", pa.schema([("name", pa.string()), ("price", pa.decimal128(10, 2))]))
    codec.decode(codec.encode({"name": "flag", "price": Decimal("1.20")}))
    codec.decode_arrow(codec.encode_arrow(batch))          # a record batch, to a column of values, and back

`row` is compact and fast and needs the schema to be read; `json` can be read by anything. There is no format of
Arrow's own: its messages are made for thousands of rows and take hundreds of bytes for one. `row` has Arrow's types.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from flagstone.errors import InvalidRequest

__all__ = ["FORMATS", "codec"]

FORMATS: Final = ("row", "json")
_CODECS: Final = {
    "row": ("flagstone.values.row_codec", "RowCodec"),
    "json": ("flagstone.values.json_codec", "JsonCodec"),
}


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


class ValueCodec(ABC):
    """Turns the columns of rows into values, and values into columns.

    Columns may be added at the end of a schema: what was written before has nulls there. Any other change needs the
    values to be written anew.
    """

    def __init__(self, schema: Any) -> None:
        names = schema.names
        if not names:
            raise InvalidRequest("a value needs at least one column")
        if len(set(names)) < len(names):
            raise InvalidRequest(f"each column may be part of a value once, not {', '.join(names)}")
        self.schema: Any = pa.schema(list(schema))
        for field in self.schema:
            self._check_type(field.name, field.type)

    def encode_arrow(self, batch: Any) -> Any:
        """One value per row of a record batch that has the schema's columns, in any order, maybe among others.

        Returns `pa.binary()` without nulls. Raises `InvalidRequest` when a column is missing or of another type, or
        when the values take more than 2 GiB: encode fewer at a time.
        """
        missing = [name for name in self.schema.names if name not in batch.schema.names]
        if missing:
            raise InvalidRequest(
                f"rows lack the columns {', '.join(missing)}; they have {', '.join(batch.schema.names)}"
            )
        columns = []
        for field in self.schema:
            column = batch.column(field.name)
            if column.type != field.type:
                raise InvalidRequest(
                    f"column {field.name!r} is of type {column.type}; the schema says {field.type}"
                )
            columns.append(column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column)
        return self._encode(columns, batch.num_rows)

    def decode_arrow(self, values: Any) -> Any:
        """A record batch of the schema's columns. A null value, as deletes have it, gives a row of nulls.

        Raises `CorruptData` saying which value is damaged and where, and `InvalidRequest` when the values are those
        of another schema and that can be told.
        """
        array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        if not (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
            raise InvalidRequest(f"values are binary, not {array.type}")
        return pa.RecordBatch.from_arrays(self._decode(array), schema=self.schema)

    def encode(self, row: Mapping[str, Any]) -> bytes:
        """The value of one row. A column that is not given is null. Raises as `encode_arrow` does."""
        strange = [name for name in row if name not in self.schema.names]
        if strange:
            raise InvalidRequest(
                f"there is no column {', '.join(strange)}; columns are {', '.join(self.schema.names)}"
            )
        columns = []
        for field in self.schema:
            try:
                columns.append(pa.array([row.get(field.name)], field.type))
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as problem:
                raise InvalidRequest(f"column {field.name!r} is of type {field.type}: {problem}") from None
        value: bytes = self._encode(columns, 1)[0].as_py()
        return value

    def decode(self, value: bytes) -> dict[str, Any]:
        """The columns of one value.

        Raises as `decode_arrow` does, and `InvalidRequest` for a date or time that Python's cannot hold.
        """
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise InvalidRequest(f"a value is bytes, not {type(value).__name__}")
        batch = self.decode_arrow(pa.array([bytes(value)], pa.binary()))
        try:
            row: dict[str, Any] = batch.to_pylist()[0]
        except (OverflowError, ValueError) as problem:
            raise InvalidRequest(
                f"a column holds what Python has no value for: {problem}: use decode_arrow"
            ) from None
        return row

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, ValueCodec) and self.schema == other.schema

    def __hash__(self) -> int:
        return hash((type(self), tuple(self.schema.names)))

    def __repr__(self) -> str:
        columns = ", ".join(f"{field.name}: {field.type}" for field in self.schema)
        return f"{type(self).__name__}({columns})"

    @abstractmethod
    def _check_type(self, path: str, kind: Any) -> None:
        """Raise `InvalidRequest` when the format has no place for the type."""

    @abstractmethod
    def _encode(self, columns: list[Any], rows: int) -> Any: ...

    @abstractmethod
    def _decode(self, values: Any) -> list[Any]: ...
