"""Rows in Arrow columns, in groups that `WriterState.commit_columns` writes at once, without a Python object per row.

Imports PyArrow: only columnar code may import this module.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from flagstone.errors import InvalidRequest
from flagstone.kernels.columns import NOTHING, binaries, constant, fixed, present, strings, words
from flagstone.lsm.merge_operator import MergeOperator, check_operand
from flagstone.lsm.system_rows import SYSTEM_PREFIX
from flagstone.types import MAX_KEY_BYTES, MAX_VALUE_BYTES, MERGE, TOMBSTONE, VALUE
from flagstone.write.batch import BY_DEFAULT

GROUP_ROWS: Final = 4096
GROUP_BYTES: Final = 1024 * 1024
"""A group has at most this many rows, and at most about this many bytes of keys and values, but at least one row."""

_OPS: Final = ("put", "delete", "merge")
_OP_NAMES: Final = binaries([op.encode() for op in _OPS], pa.string())
_KINDS: Final = pa.Array.from_buffers(pa.uint8(), 3, [None, pa.py_buffer(bytes([VALUE, TOMBSTONE, MERGE]))])
_TAKEN: Final = {
    pa.string(): pa.large_string(),
    pa.string_view(): pa.large_string(),
    pa.binary(): pa.large_binary(),
    pa.binary_view(): pa.large_binary(),
}
"""As what the words of a dictionary are repeated: Arrow cannot take elements of views, and 2 GiB is too little."""

_Imported = TypeVar("_Imported")
_LONGEST_TTL_MS: Final = timedelta.max // timedelta(milliseconds=1)
_MAX_TIME_MS: Final = 2**63 - 1


class ColumnNames(NamedTuple):
    """The names of the columns; `op`, `ttl_ms` and `expires_ms` are None if there is no such column."""

    key: str
    value: str
    op: str | None = None
    ttl_ms: str | None = None
    expires_ms: str | None = None


class RowGroup:
    """Checked rows that are written at once. `times` are expiries, or with `relative` times to live."""

    __slots__ = (
        "_key_offsets",
        "_keys",
        "_kinds",
        "_relative",
        "_timed",
        "_times",
        "_value_offsets",
        "_values",
    )

    def __init__(
        self,
        keys: tuple[memoryview, memoryview],
        values: tuple[memoryview, memoryview],
        kinds: memoryview,
        times: pa.Array | None,
        *,
        relative: bool,
    ) -> None:
        self._key_offsets, self._keys = keys
        self._value_offsets, self._values = values
        self._kinds = kinds
        self._times = times
        self._timed = NOTHING if times is None else present(times)
        self._relative = relative

    def __len__(self) -> int:
        return len(self._key_offsets) - 1

    def keys(self) -> list[bytes]:
        """The keys in their order."""
        return [bytes(self._keys[start:stop]) for start, stop in _spans(self._key_offsets)]

    def check_operands(self, operator: MergeOperator | None) -> None:
        """Raise `InvalidRequest` if a row merges and there is no operator, or if the operator refuses an operand."""
        if MERGE not in self._kinds:
            return
        values = _spans(self._value_offsets)
        for kind, key, (start, stop) in zip(self._kinds, self.keys(), values, strict=True):
            if kind == MERGE:
                check_operand(operator, key, bytes(self._values[start:stop]))

    def insert(self, memtable: Any, seq: int, created_ms: int, default_ttl_ms: int | None) -> int:
        """Add the rows to a memtable; returns as `Memtable.insert_columns` does."""
        size: int = memtable.insert_columns(
            self._key_offsets,
            self._keys,
            self._value_offsets,
            self._values,
            self._kinds,
            self._expires(created_ms, default_ttl_ms),
            self._timed,
            seq,
            created_ms,
        )
        return size

    def _expires(self, created_ms: int, default_ttl_ms: int | None) -> memoryview:
        if self._times is None:
            expires_ms = BY_DEFAULT.resolve(created_ms, default_ttl_ms)
            return memoryview(array("q", () if expires_ms is None else (expires_ms,) * len(self)))
        times = pc.add(self._times, constant(created_ms, pa.int64())) if self._relative else self._times
        return words(times).cast("B").cast("q")


def row_groups(rows: Any, columns: ColumnNames) -> Iterator[RowGroup]:
    """The rows of anything that exports Arrow data, or of an iterable of such, in order.

    Raises:
        InvalidRequest: a column is missing or has another type, or a row is invalid. The message contains the column
            and the number of the row, counted from 0. The groups before that row have been yielded.

    """
    first_row = 0
    for given in _batches(rows):
        batch = _plain(given, columns)
        _check_columns(batch.schema, columns)
        for start in range(0, batch.num_rows, GROUP_ROWS):
            part = batch.slice(start, GROUP_ROWS)
            yield from _groups(part, columns, first_row + start)
        first_row += batch.num_rows


def _batches(rows: Any) -> Iterator[pa.RecordBatch]:
    if hasattr(rows, "__arrow_c_stream__"):
        yield from _imported(lambda: pa.RecordBatchReader.from_stream(rows), rows)
    elif hasattr(rows, "__arrow_c_array__"):
        yield _imported(lambda: pa.record_batch(rows), rows)
    elif hasattr(rows, "to_batches"):
        yield from rows.to_batches()
    elif isinstance(rows, Iterable) and not isinstance(rows, str | bytes | Mapping):
        for each in rows:
            yield from _batches(each)
    else:
        raise InvalidRequest(
            f"rows are Arrow data (an object with __arrow_c_stream__ or __arrow_c_array__) or an iterable of such, "
            f"not {type(rows).__name__}"
        )


def _imported(import_: Callable[[], _Imported], rows: Any) -> _Imported:
    try:
        return import_()
    except pa.ArrowInvalid as problem:
        raise InvalidRequest(
            f"rows are a table, not a single column ({type(rows).__name__}): {problem}"
        ) from None


def _plain(batch: pa.RecordBatch, columns: ColumnNames) -> pa.RecordBatch:
    """The batch with dictionaries, such as categories of Polars and pandas, as plain columns."""
    for name in {each for each in columns if each is not None}:
        index = batch.schema.get_field_index(name)
        if index >= 0 and pa.types.is_dictionary(batch.schema.field(index).type):
            column = batch.column(index)
            kind = column.type.value_type
            taken = column.dictionary.cast(_TAKEN.get(kind, kind)).take(column.indices)
            batch = batch.set_column(index, name, taken)
    return batch


def _check_columns(schema: pa.Schema, columns: ColumnNames) -> None:
    """Raise `InvalidRequest` if a column is missing or has a type that rows cannot have."""
    for role, name in columns._asdict().items():
        if name is None:
            continue
        index = schema.get_field_index(name)
        if index < 0:
            raise InvalidRequest(
                f"there is no single column {name!r}; there are {', '.join(schema.names) or 'none'}"
            )
        kind = schema.field(index).type
        if role in ("ttl_ms", "expires_ms"):
            if not pa.types.is_integer(kind):
                raise InvalidRequest(f"column {name!r} is {kind}; it must be a whole number of milliseconds")
        elif not _is_bytes(kind):
            raise InvalidRequest(
                f"column {name!r} is {kind}; it must be binary or string: cast it, or encode it"
            )


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return any(
        fits(kind)
        for fits in (
            types.is_binary,
            types.is_large_binary,
            types.is_binary_view,
            types.is_string,
            types.is_large_string,
            types.is_string_view,
            types.is_fixed_size_binary,
        )
    )


def _groups(part: pa.RecordBatch, columns: ColumnNames, first_row: int) -> Iterator[RowGroup]:
    """The rows of `part`, in one group unless they are large."""
    if columns.ttl_ms is not None and columns.expires_ms is not None:
        raise InvalidRequest("a row expires after a ttl or at a time: name ttl_ms or expires_ms, not both")
    keys, values = part[columns.key], part[columns.value]
    _check_present(keys, pc.is_null(keys), columns.key, first_row)
    kinds: memoryview = NOTHING
    missing = pc.is_null(values)
    if columns.op is not None:
        numbers = _kinds_of(part[columns.op], columns.op, first_row)
        kinds = fixed(numbers, 1)
        # A deletion needs no value.
        missing = pc.and_(missing, pc.not_equal(numbers, constant(TOMBSTONE, pa.uint8())))
    _check_present(values, missing, columns.value, first_row)
    keys, values = _binary(keys), _binary(values)
    _check_sizes(keys, 1, MAX_KEY_BYTES, columns.key, first_row)
    _check_free(keys, columns.key, first_row)
    _check_sizes(values, 0, MAX_VALUE_BYTES, columns.value, first_row)
    times = _times(part, columns, first_row)
    (key_offsets, key_data), (value_offsets, value_data) = strings(keys), strings(values)
    for start, stop in _cuts(key_offsets, value_offsets):
        yield RowGroup(
            (key_offsets[start : stop + 1], key_data),
            (value_offsets[start : stop + 1], value_data),
            kinds[start:stop],
            None if times is None else times[start:stop],
            relative=columns.ttl_ms is not None,
        )


def _binary(column: pa.Array) -> pa.Array:
    """The column as `large_binary`; binary and string columns share their bytes with it."""
    return column.cast(pa.large_binary())


def _check_present(column: pa.Array, missing: pa.Array, name: str, first_row: int) -> None:
    if column.null_count and missing.true_count:
        raise InvalidRequest(f"column {name!r} is null in row {first_row + _first(missing)}")


def _check_sizes(column: pa.Array, least: int, most: int, name: str, first_row: int) -> None:
    sizes = pc.binary_length(column)
    bounds = pc.min_max(sizes)
    if bounds["min"].as_py() is not None and (bounds["min"].as_py() < least or bounds["max"].as_py() > most):
        row = _first(_outside(sizes, least, most))
        raise InvalidRequest(
            f"column {name!r} has {sizes[row].as_py()} bytes in row {first_row + row}; it has {least} to {most}"
        )


def _check_free(keys: pa.Array, name: str, first_row: int) -> None:
    """Raise `InvalidRequest` for a key that is reserved for system rows."""
    reserved = pc.starts_with(keys, SYSTEM_PREFIX)
    if reserved.true_count:
        raise InvalidRequest(
            f"column {name!r} begins with {SYSTEM_PREFIX!r} in row {first_row + _first(reserved)}; such keys are "
            "reserved for schemas and the progress of streams"
        )


def _times(part: pa.RecordBatch, columns: ColumnNames, first_row: int) -> pa.Array | None:
    """The column of expiries or of times to live; a row with null never expires."""
    name = columns.expires_ms or columns.ttl_ms
    if name is None:
        return None
    least, most = (0, _MAX_TIME_MS) if columns.ttl_ms is None else (1, _LONGEST_TTL_MS)
    times = part[name]
    wrong = pc.fill_null(_outside(times, least, most), constant(False, pa.bool_()))
    if wrong.true_count:
        row = _first(wrong)
        raise InvalidRequest(
            f"column {name!r} is {times[row].as_py()} in row {first_row + row}; choose {least} to {most}, or null for "
            "a row that never expires"
        )
    return times.cast(pa.int64())


def _kinds_of(ops: pa.Array, name: str, first_row: int) -> pa.Array:
    """The kinds of the rows; null is a put."""
    filled = pc.fill_null(ops.cast(pa.string()), _OP_NAMES[0])
    positions = pc.index_in(filled, value_set=_OP_NAMES)
    if positions.null_count:
        row = _first(pc.is_null(positions))
        raise InvalidRequest(
            f"column {name!r} is {filled[row].as_py()!r} in row {first_row + row}; it is put, delete or merge"
        )
    return _KINDS.take(positions)


def _outside(numbers: pa.Array, least: int, most: int) -> pa.Array:
    return pc.or_(
        pc.less(numbers, constant(least, pa.int64())), pc.greater(numbers, constant(most, pa.int64()))
    )


def _first(mask: pa.Array) -> int:
    row: int = pc.index(mask, constant(True, pa.bool_())).as_py()
    return row


def _cuts(key_offsets: Sequence[int], value_offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The rows as half-open ranges, each of at most about `GROUP_BYTES`."""
    last = len(key_offsets) - 1
    start = 0
    if key_offsets[last] - key_offsets[0] + value_offsets[last] - value_offsets[0] > GROUP_BYTES:
        for row in range(1, last):
            ends = key_offsets[row + 1] + value_offsets[row + 1]
            if ends - key_offsets[start] - value_offsets[start] > GROUP_BYTES:
                yield start, row
                start = row
    yield start, last


def _spans(offsets: Sequence[int]) -> Iterator[tuple[int, int]]:
    return pairwise(offsets)
