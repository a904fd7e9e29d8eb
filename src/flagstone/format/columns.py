"""Rows as Arrow columns: blocks to record batches and back, without a Python object per row.

The columns are `key`, `value` (binary), `seq` (uint64), `kind` (uint8, see `flagstone.types`), `created_ms` and
`expires_ms` (int64, null where the row has none).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from flagstone.errors import InvalidRequest
from flagstone.kernels import block_reader, block_writer

SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("seq", pa.uint64(), nullable=False),
        pa.field("kind", pa.uint8(), nullable=False),
        pa.field("created_ms", pa.int64()),
        pa.field("expires_ms", pa.int64()),
    ]
)
MAX_COLUMN_BYTES: Final = 2**31 - 1
_NOTHING: Final = memoryview(b"")
_NO_I64: Final = _NOTHING.cast("q")


class KeyColumn(NamedTuple):
    """Keys in one run of bytes: key `i` is `data[offsets[i] : offsets[i + 1]]`."""

    total: int
    offsets: memoryview
    data: memoryview


def decode_columns(raws: Sequence[bytes], *, values: bool = True, times: bool = True) -> pa.RecordBatch:
    """All rows of some blocks (format version 2) as one batch; leave out what is not needed.

    Raises `CorruptData` with an offset inside the damaged block, and `InvalidRequest` when keys or values
    together pass 2 GiB: decode fewer blocks at a time.
    """
    blocks = list(raws)
    rows, key_bytes, value_bytes = block_reader.measure(blocks)
    if key_bytes > MAX_COLUMN_BYTES or (values and value_bytes > MAX_COLUMN_BYTES):
        raise InvalidRequest(
            f"{len(blocks)} blocks hold {key_bytes + value_bytes} bytes; decode fewer at a time"
        )
    key_offsets, keys = _room(4 * (rows + 1)), _room(key_bytes)
    value_offsets, value_data = _room(4 * (rows + 1) if values else 0), _room(value_bytes if values else 0)
    timed = rows if times else 0
    seqs, created, expires = (_room(8 * timed) for _ in range(3))
    kinds, has_created, has_expires = (_room(timed) for _ in range(3))
    block_reader.decode_columns(
        blocks,
        _view(key_offsets, "i"),
        _view(keys, "B"),
        _view(value_offsets, "i"),
        _view(value_data, "B"),
        _view(seqs, "Q"),
        _view(kinds, "B"),
        _view(created, "q"),
        _view(has_created, "B"),
        _view(expires, "q"),
        _view(has_expires, "B"),
    )
    columns: dict[str, pa.Array] = {
        "key": pa.Array.from_buffers(pa.binary(), rows, [None, key_offsets, keys])
    }
    if values:
        columns["value"] = pa.Array.from_buffers(pa.binary(), rows, [None, value_offsets, value_data])
    if times:
        columns["seq"] = pa.Array.from_buffers(pa.uint64(), rows, [None, seqs])
        columns["kind"] = pa.Array.from_buffers(pa.uint8(), rows, [None, kinds])
        columns["created_ms"] = pa.Array.from_buffers(pa.int64(), rows, [_bitmap(has_created, rows), created])
        columns["expires_ms"] = pa.Array.from_buffers(pa.int64(), rows, [_bitmap(has_expires, rows), expires])
    schema = pa.schema([field for field in SCHEMA if field.name in columns])
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)


def add_columns(
    writer: block_writer.BlockWriter,
    batch: pa.RecordBatch,
    *,
    seq: int | None = None,
    created_ms: int | None = None,
) -> KeyColumn:
    """Append the rows of a batch to a block writer; returns its keys, for the filters.

    `seq` and `created_ms` hold for every row when the batch has no such column. Raises `InvalidRequest` for
    nulls, empty or oversized keys, and (from an ordered writer) rows out of order.
    """
    names = batch.schema.names
    keys = key_column(batch)
    value_offsets, values = _binary(batch, "value")
    if "seq" in names:
        seqs = _numbers(batch, "seq", pa.uint64(), "Q")
    elif seq is not None:
        seqs = memoryview(struct.pack("=Q", seq)).cast("Q")
    else:
        raise InvalidRequest("rows need a sequence number: a `seq` column, or seq=")
    kinds = _numbers(batch, "kind", pa.uint8(), "B") if "kind" in names else _NOTHING
    created, has_created = _times(batch, "created_ms")
    if "created_ms" not in names and created_ms is not None:
        created = memoryview(struct.pack("=q", created_ms)).cast("q")
    expires, has_expires = _times(batch, "expires_ms")
    writer.add_columns(
        batch.num_rows,
        keys.offsets,
        keys.data,
        value_offsets,
        values,
        seqs,
        kinds,
        created,
        has_created,
        expires,
        has_expires,
    )
    return keys


def key_column(batch: pa.RecordBatch) -> KeyColumn:
    """The keys of a batch as the kernels take them."""
    offsets, data = _binary(batch, "key")
    return KeyColumn(batch.num_rows, offsets, data)


def _room(size: int) -> Any:
    return pa.allocate_buffer(size)


def _view(buffer: Any, code: str) -> memoryview:
    return memoryview(buffer).cast("B").cast(code)  # type: ignore[call-overload, no-any-return]


def _bitmap(flags: Any, rows: int) -> Any:
    """One bit per row from one byte per row; None when every row is valid."""
    valid = pa.Array.from_buffers(pa.uint8(), rows, [None, flags]).cast(pa.bool_())
    return None if valid.true_count == rows else valid.buffers()[1]


def _binary(batch: pa.RecordBatch, name: str) -> tuple[memoryview, memoryview]:
    """Offsets and bytes of a column, sliced so that row 0 is the batch's first."""
    column = _column(batch, name).cast(pa.large_binary())
    _, offsets, data = column.buffers()
    return _slice(offsets, column.offset, len(column) + 1, "q"), _NOTHING if data is None else memoryview(
        data
    ).cast("B")


def _numbers(batch: pa.RecordBatch, name: str, kind: pa.DataType, code: str) -> memoryview:
    column = _column(batch, name).cast(kind)
    return _slice(column.buffers()[1], column.offset, len(column), code)


def _times(batch: pa.RecordBatch, name: str) -> tuple[memoryview, memoryview]:
    if name not in batch.schema.names:
        return _NO_I64, _NOTHING
    column = batch.column(name).cast(pa.int64())
    present = _NOTHING
    if column.null_count:
        valid = pc.is_valid(column).cast(pa.uint8())
        present = _slice(valid.buffers()[1], valid.offset, len(valid), "B")
    return _slice(column.buffers()[1], column.offset, len(column), "q"), present


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    if name not in batch.schema.names:
        raise InvalidRequest(f"rows need a column {name!r}; there are {', '.join(batch.schema.names)}")
    column = batch.column(name)
    if column.null_count:
        raise InvalidRequest(f"column {name!r} has {column.null_count} nulls; every row needs one")
    return column


def _slice(buffer: Any, offset: int, length: int, code: str) -> memoryview:
    if buffer is None or length == 0:
        return _NOTHING.cast("B").cast(code)  # type: ignore[call-overload, no-any-return]
    return memoryview(buffer).cast("B").cast(code)[offset : offset + length]  # type: ignore[call-overload, no-any-return]
