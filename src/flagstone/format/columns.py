"""Blocks as Arrow columns: record batches without a Python object per row.

The columns are `key`, `value` (binary), `seq` (uint64), `kind` (uint8, see `flagstone.types`), `created_ms` and
`expires_ms` (int64, null where the row has none).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from flagstone.errors import InvalidRequest
from flagstone.kernels import block_reader

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


def _room(size: int) -> Any:
    return pa.allocate_buffer(size)


def _view(buffer: Any, code: str) -> memoryview:
    return memoryview(buffer).cast("B").cast(code)  # type: ignore[call-overload, no-any-return]


def _bitmap(flags: Any, rows: int) -> Any:
    """One bit per row from one byte per row; None when every row is valid."""
    valid = pa.Array.from_buffers(pa.uint8(), rows, [None, flags]).cast(pa.bool_())
    return None if valid.true_count == rows else valid.buffers()[1]
