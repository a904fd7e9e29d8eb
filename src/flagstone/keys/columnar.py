"""Encodes Arrow columns to a column of keys and decodes them, without a Python object per row.

The bytes equal those of `tuples`. The kernels only find the first wrong row; `tuples` and `schema` then raise the
detailed error for that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from flagstone.errors import CorruptData, InternalError, InvalidRequest
from flagstone.kernels import tuple_reader, tuple_writer
from flagstone.kernels.columns import bitmap, present, room, strings, view, words, zeros
from flagstone.keys.schema import KeySchema, KeyType, arrow_type_name
from flagstone.keys.tuples import BINARY, DATE, FALSE, FLOAT, INSTANT, LOCAL_TIME, NEGATIVE, POSITIVE, TEXT
from flagstone.types import MAX_KEY_BYTES

_SIMPLE: Final = {
    "bool": pa.bool_(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "string": pa.string(),
    "binary": pa.binary(),
}
_CODES: Final = {
    "bool": FALSE,
    "int": NEGATIVE,
    "uint": POSITIVE,
    "float": FLOAT,
    "date": DATE,
    "timestamp": INSTANT,
    "timestamp_ntz": LOCAL_TIME,
    "string": TEXT,
    "binary": BINARY,
}


class _Part(Protocol):
    """One column, prepared for the two passes of the kernel."""

    def measure(self, sizes: memoryview) -> None: ...

    def write(self, cursors: memoryview, out: memoryview) -> None: ...


def arrow_schema(schema: KeySchema) -> Any:
    """The Arrow schema of the columns that `decode_arrow` returns for a key schema."""
    return pa.schema(
        [(name, _arrow_type(kind)) for name, kind in zip(schema.names, schema.types, strict=True)]
    )


def encode_arrow(columns: Any) -> Any:
    """One key per row, as `pa.binary()` without nulls, from a record batch or from arrays of equal length.

    Raises:
        InvalidRequest: a column's type cannot be part of a key, its times have nanoseconds that would be lost, a key
            would be longer than 65,535 bytes, or all keys together larger than 2 GiB: encode fewer at a time.

    """
    names, arrays = _named(columns)
    rows = len(arrays[0])
    if any(len(array) != rows for array in arrays):
        raise InvalidRequest(
            f"columns of a key must have equal lengths, not {', '.join(str(len(a)) for a in arrays)}"
        )
    parts = [_part(name, array) for name, array in zip(names, arrays, strict=True)]
    cursors = zeros(rows)
    for part in parts:
        part.measure(cursors)
    offsets = room(4 * (rows + 1))
    bad = tuple_writer.lay_out(cursors, view(offsets, "i"))
    if bad >= 0:
        raise InvalidRequest(_explain_size(bad, cursors[bad], names, parts, rows))
    data = room(view(offsets, "i")[rows])
    out = view(data, "B")
    for part in parts:
        part.write(cursors, out)
    return pa.Array.from_buffers(pa.binary(), rows, [None, offsets, data])


def decode_arrow(keys: Any, schema: Any) -> list[Any]:
    """The columns of an array of keys, with the types of an Arrow schema or a `KeySchema`.

    Raises:
        CorruptData: the bytes are not a key; `offset` is where the wrong part begins.
        InvalidRequest: a key has other columns than the schema, or a key is null.

    """
    array = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
    if array.null_count:
        raise InvalidRequest(f"{array.null_count} of the keys are null; remove the nulls")
    if not _is_binary(array.type):
        raise InvalidRequest(f"keys are binary, not {array.type}")
    arrow = arrow_schema(schema) if isinstance(schema, KeySchema) else schema
    reader = _Reader(array, KeySchema.of(arrow))
    columns = []
    for kind, field in zip(reader.schema.types, arrow, strict=True):
        try:
            columns.append(reader.column(kind).cast(field.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
            raise InvalidRequest(
                f"column {field.name!r} has a value that does not fit into {field.type}: {problem}"
            ) from None
    reader.finish()
    return columns


def _named(columns: Any) -> tuple[list[str], list[Any]]:
    if isinstance(columns, (pa.RecordBatch, pa.Table)):
        names, given = columns.schema.names, columns.columns
    elif isinstance(columns, Sequence):
        names, given = [f"columns[{index}]" for index in range(len(columns))], columns
    else:
        raise InvalidRequest(f"give a record batch or a list of arrays, not a {type(columns).__name__}")
    if not names:
        raise InvalidRequest("a key needs at least one column")
    return list(names), [one.combine_chunks() if isinstance(one, pa.ChunkedArray) else one for one in given]


def _is_binary(kind: Any) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def _arrow_type(kind: KeyType) -> Any:
    if kind.kind == "decimal":
        return pa.decimal128(kind.size, kind.scale)
    return _SIMPLE.get(str(kind)) or pa.type_for_alias(str(kind))


class _Numbers:
    def __init__(self, code: int, values: memoryview, valid: memoryview) -> None:
        self._arguments = code, values, valid

    def measure(self, sizes: memoryview) -> None:
        tuple_writer.measure_numbers(*self._arguments, sizes)

    def write(self, cursors: memoryview, out: memoryview) -> None:
        tuple_writer.write_numbers(*self._arguments, cursors, out)


class _Decimals:
    def __init__(self, scale: int, values: memoryview, valid: memoryview) -> None:
        self._arguments = scale, values, valid

    def measure(self, sizes: memoryview) -> None:
        tuple_writer.measure_decimals(*self._arguments, sizes)

    def write(self, cursors: memoryview, out: memoryview) -> None:
        tuple_writer.write_decimals(*self._arguments, cursors, out)


class _Strings:
    def __init__(self, code: int, offsets: memoryview, data: memoryview, valid: memoryview) -> None:
        self._code = code
        self._arguments = offsets, data, valid

    def measure(self, sizes: memoryview) -> None:
        tuple_writer.measure_bytes(*self._arguments, sizes)

    def write(self, cursors: memoryview, out: memoryview) -> None:
        tuple_writer.write_bytes(self._code, *self._arguments, cursors, out)


def _part(name: str, column: Any) -> _Part:
    if pa.types.is_null(column.type):
        column = column.cast(pa.bool_())
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = KeyType.parse(arrow_type_name(name, column.type))
    valid = present(column)
    try:
        if kind.kind in {"string", "binary"}:
            offsets, data = strings(column)
            return _Strings(_CODES[kind.kind], offsets, data, valid)
        if kind.kind == "decimal":
            return _Decimals(kind.scale, words(column.cast(_arrow_type(kind))), valid)
        return _Numbers(_CODES[kind.kind], words(_widened(column, kind)), valid)
    except pa.ArrowInvalid as problem:
        raise InvalidRequest(f"column {name!r} cannot be part of a key: {problem}") from None


def _widened(column: Any, kind: KeyType) -> Any:
    """The numbers in 64 bits, as the kernel expects them."""
    if kind.kind == "float":
        return column.cast(pa.float64())
    if kind.kind == "uint":
        return column.cast(pa.uint64())
    if kind.kind == "date":
        return column.cast(pa.date32()).cast(pa.int32()).cast(pa.int64())
    if kind.kind in {"timestamp", "timestamp_ntz"}:
        return column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
    return column.cast(pa.int64())


def _explain_size(row: int, size: int, names: list[str], parts: list[_Part], rows: int) -> str:
    if size <= MAX_KEY_BYTES:
        return f"{rows} keys are larger than 2 GiB: encode fewer at a time"
    shares = []
    for part in parts:
        sizes = zeros(rows)
        part.measure(sizes)
        shares.append(sizes[row])
    largest = shares.index(max(shares))
    return (
        f"row {row}: the key has {size} bytes and may have {MAX_KEY_BYTES}; column {names[largest]!r} alone has "
        f"{shares[largest]}: shorten or hash it"
    )


class _Reader:
    """Reads one column after the other from all keys; `_cursors` has the position in each key."""

    def __init__(self, keys: Any, schema: KeySchema) -> None:
        self.schema = schema
        self._keys = keys
        self._rows = len(keys)
        self._offsets, self._data = strings(keys)
        self._cursors = (
            memoryview(bytearray(self._offsets[: self._rows])).cast("q") if self._rows else zeros(0)
        )

    def column(self, kind: KeyType) -> Any:
        if kind.kind in {"string", "binary"}:
            return self._strings(kind)
        if kind.kind == "decimal":
            return self._decimals(kind)
        return self._numbers(kind)

    def finish(self) -> None:
        """Raise an error unless every key was read to its end."""
        if bytes(self._cursors) == bytes(self._offsets[1 : self._rows + 1]):
            return
        ends = zip(self._cursors, self._offsets[1:], strict=False)
        self._explain(next(row for row, (cursor, end) in enumerate(ends) if cursor != end))

    def _numbers(self, kind: KeyType) -> Any:
        values, flags = room(8 * self._rows), room(self._rows)
        limit = kind.bounds[1] if kind.kind in {"int", "uint"} else 0
        self._check(
            tuple_reader.read_numbers(
                _CODES[kind.kind],
                limit,
                self._offsets,
                self._data,
                self._cursors,
                view(values, "Q"),
                view(flags, "B"),
            )
        )
        buffers = [bitmap(flags, self._rows), values]
        if kind.kind == "float":
            return self._narrowed(pa.Array.from_buffers(pa.float64(), self._rows, buffers), kind)
        wide = pa.uint64() if kind.kind == "uint" else pa.int64()
        column = pa.Array.from_buffers(wide, self._rows, buffers)
        if kind.kind == "date":
            column = column.cast(pa.int32())
        return column.cast(_arrow_type(kind))

    def _narrowed(self, column: Any, kind: KeyType) -> Any:
        if kind.size == 64:
            return column
        narrow = column.cast(pa.float32())
        same = pc.equal(narrow.cast(pa.float64()).view(pa.int64()), column.view(pa.int64()))
        self._check(pc.index(same, value=False).as_py())
        return narrow

    def _decimals(self, kind: KeyType) -> Any:
        values, flags = room(16 * self._rows), room(self._rows)
        self._check(
            tuple_reader.read_decimals(
                kind.size,
                kind.scale,
                self._offsets,
                self._data,
                self._cursors,
                view(values, "Q"),
                view(flags, "B"),
            )
        )
        return pa.Array.from_buffers(_arrow_type(kind), self._rows, [bitmap(flags, self._rows), values])

    def _strings(self, kind: KeyType) -> Any:
        offsets, flags = room(4 * (self._rows + 1)), room(self._rows)
        found, valid = view(offsets, "i"), view(flags, "B")
        self._check(
            tuple_reader.find_bytes(_CODES[kind.kind], self._offsets, self._data, self._cursors, found, valid)
        )
        data = room(found[self._rows])
        tuple_reader.read_bytes(self._data, self._cursors, found, valid, view(data, "B"))
        column = pa.Array.from_buffers(pa.binary(), self._rows, [bitmap(flags, self._rows), offsets, data])
        try:
            return column.cast(_arrow_type(kind))
        except pa.ArrowInvalid:
            for row in range(self._rows):
                self.schema.decode(self._keys[row].as_py())
            raise

    def _check(self, bad: int) -> None:
        if bad >= 0:
            self._explain(bad)

    def _explain(self, row: int) -> None:
        """Raise the error of one key."""
        try:
            self.schema.decode(self._keys[row].as_py())
        except (CorruptData, InvalidRequest) as problem:
            problem.add_note(f"in key {row} of {self._rows}")
            raise
        raise InternalError(f"key {row} can be decoded alone, but not in a column; please report it")
