"""Structured values: the columns of a row as the bytes of one value. `docs/keys.md` specifies the formats.

    codec = values.codec("row", pa.schema([("name", pa.string()), ("price", pa.decimal128(10, 2))]))
    codec.decode(codec.encode({"name": "flag", "price": Decimal("1.20")}))
    codec.decode_arrow(codec.encode_arrow(batch))          # a record batch, to a column of values, and back

`row` is compact and fast, and reading it needs the schema; any program can read `json`. Arrow's own format is not
offered: its messages are made for thousands of rows and have hundreds of bytes for one. `row` has Arrow's types.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import pyarrow as pa

from flagstone.errors import InvalidRequest
from flagstone.values.exact import refuse_loss

__all__ = ["FORMATS", "codec"]

FORMATS: Final = ("row", "json")
_CODECS: Final = {
    "row": ("flagstone.values.row_codec", "RowCodec"),
    "json": ("flagstone.values.json_codec", "JsonCodec"),
}


def codec(name: str, schema: Any) -> ValueCodec:
    """The codec of a format for the columns of an Arrow schema. It pickles, and any thread may use it.

    Raises `InvalidRequest` if there is no such format, or if it cannot store the type of a column.
    """
    if name not in _CODECS:
        hint = " (a row in Arrow's own format has hundreds of bytes: use 'row')" if name == "arrow" else ""
        raise InvalidRequest(f"there is no value format {name!r}{hint}; formats are {', '.join(FORMATS)}")
    module, kind = _CODECS[name]
    made: ValueCodec = getattr(importlib.import_module(module), kind)(schema)
    return made


class ValueCodec(ABC):
    """Encodes the columns of rows to values, and decodes values to columns.

    A schema may get new columns at its end: older values have nulls there. After any other change, write all values
    again.
    """

    format: ClassVar[str]
    """The name of the format."""

    def __init__(self, schema: Any) -> None:
        names = schema.names
        if not names:
            raise InvalidRequest("a value needs at least one column")
        if len(set(names)) < len(names):
            raise InvalidRequest(f"a value has two columns of one name: {', '.join(names)}; rename one")
        self.schema: Any = pa.schema(list(schema))
        for field in self.schema:
            self._check_type(field.name, field.type)

    def encode_arrow(self, batch: Any) -> Any:
        """One value per row of a record batch, as `pa.binary()` without nulls.

        The batch must have the schema's columns, in any order; other columns are ignored. Raises `InvalidRequest` if a
        column is missing or has another type, or if the values are larger than 2 GiB: encode fewer at a time.
        """
        missing = [name for name in self.schema.names if name not in batch.schema.names]
        if missing:
            raise InvalidRequest(
                f"the rows lack the columns {', '.join(missing)}; they have {', '.join(batch.schema.names)}"
            )
        columns = []
        for field in self.schema:
            column = batch.column(field.name)
            if column.type != field.type:
                raise InvalidRequest(
                    f"column {field.name!r} has the type {column.type}; in the schema it is {field.type}"
                )
            columns.append(column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column)
        return self._encode(columns, batch.num_rows)

    def decode_arrow(self, values: Any) -> Any:
        """A record batch of the schema's columns. A null value, as of a delete, becomes a row of nulls.

        Raises `CorruptData` with the number of the damaged value and the offset in it. Raises `InvalidRequest` if the
        values are recognisably of another schema.
        """
        array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        if not (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
            raise InvalidRequest(f"values are binary, not {array.type}")
        return pa.RecordBatch.from_arrays(self._decode(array), schema=self.schema)

    def encode(self, row: Mapping[str, Any]) -> bytes:
        """The value of one row. A missing column is null.

        Raises as `encode_arrow` does, and `InvalidRequest` for a part that the column cannot hold without loss: 1.5 in
        a column of whole numbers, a time without a time zone in one of moments.
        """
        unknown = [name for name in row if name not in self.schema.names]
        if unknown:
            raise InvalidRequest(
                f"there is no column {', '.join(unknown)}; columns are {', '.join(self.schema.names)}"
            )
        columns = []
        for field in self.schema:
            try:
                refuse_loss(row.get(field.name), field.type)
                columns.append(pa.array([row.get(field.name)], field.type))
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as problem:
                raise InvalidRequest(f"column {field.name!r} has the type {field.type}: {problem}") from None
        value: bytes = self._encode(columns, 1)[0].as_py()
        return value

    def decode(self, value: bytes) -> dict[str, Any]:
        """The columns of one value.

        Raises as `decode_arrow` does, and `InvalidRequest` for a date or time that Python cannot represent.
        """
        if not isinstance(value, (bytes, bytearray, memoryview)):
            raise InvalidRequest(f"a value is bytes, not {type(value).__name__}")
        batch = self.decode_arrow(pa.array([bytes(value)], pa.binary()))
        try:
            row: dict[str, Any] = batch.to_pylist()[0]
        except (OverflowError, ValueError) as problem:
            raise InvalidRequest(
                f"Python cannot represent the value of a column: {problem}: use decode_arrow"
            ) from None
        return row

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, ValueCodec) and self.schema == other.schema

    def __hash__(self) -> int:
        return hash((type(self), tuple(self.schema.names)))

    def __repr__(self) -> str:
        columns = ", ".join(f"{field.name}: {field.type}" for field in self.schema)
        return f"{type(self).__name__}({columns})"

    def _check_type(self, path: str, kind: Any) -> None:
        """Raise `InvalidRequest` if the format cannot store the type."""
        if pa.types.is_struct(kind):
            for field in kind:
                self._check_type(f"{path}.{field.name}", field.type)
        elif is_list(kind):
            self._check_type(f"{path}[]", kind.value_type)
        elif pa.types.is_map(kind):
            self._check_type(f"{path}.key", kind.key_type)
            self._check_type(f"{path}.value", kind.item_type)
        elif not (pa.types.is_null(kind) or self._stores(kind)):
            raise InvalidRequest(
                f"column {path!r} has the type {kind}, which the format {self.format!r} cannot store: cast it"
            )

    @abstractmethod
    def _stores(self, kind: Any) -> bool:
        """Whether the format can store this type, which is neither null nor nested."""

    @abstractmethod
    def _encode(self, columns: list[Any], rows: int) -> Any: ...

    @abstractmethod
    def _decode(self, values: Any) -> list[Any]: ...


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is a list of elements, but not a map."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
