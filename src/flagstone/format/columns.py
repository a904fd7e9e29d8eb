"""Data blocks as Arrow record batches, without a Python object per row.

The columns are `key`, `value` (binary), `seq` (uint64), `kind` (uint8, see `flagstone.types`), `created_ms` and
`expires_ms` (int64, null where the row has none).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from flagstone.errors import InvalidRequest
from flagstone.kernels import block_reader
from flagstone.kernels.columns import bitmap, room, view

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
    """All rows of some blocks (format version 2) as one batch, with or without values and times.

    Raises `CorruptData` with an offset inside the damaged block, and `InvalidRequest` when all keys or all values
    exceed 2 GiB: decode fewer blocks at a time.
    """
    blocks = list(raws)
    rows, key_bytes, value_bytes = block_reader.measure(blocks)
    if key_bytes > MAX_COLUMN_BYTES or (values and value_bytes > MAX_COLUMN_BYTES):
        raise InvalidRequest(
            f"{len(blocks)} blocks hold {key_bytes + value_bytes} bytes; decode fewer at a time"
        )
    key_offsets, keys = room(4 * (rows + 1)), room(key_bytes)
    value_offsets, value_data = room(4 * (rows + 1) if values else 0), room(value_bytes if values else 0)
    timed = rows if times else 0
    seqs, created, expires = (room(8 * timed) for _ in range(3))
    kinds, has_created, has_expires = (room(timed) for _ in range(3))
    block_reader.decode_columns(
        blocks,
        view(key_offsets, "i"),
        view(keys, "B"),
        view(value_offsets, "i"),
        view(value_data, "B"),
        view(seqs, "Q"),
        view(kinds, "B"),
        view(created, "q"),
        view(has_created, "B"),
        view(expires, "q"),
        view(has_expires, "B"),
    )
    columns: dict[str, pa.Array] = {
        "key": pa.Array.from_buffers(pa.binary(), rows, [None, key_offsets, keys])
    }
    if values:
        columns["value"] = pa.Array.from_buffers(pa.binary(), rows, [None, value_offsets, value_data])
    if times:
        columns["seq"] = pa.Array.from_buffers(pa.uint64(), rows, [None, seqs])
        columns["kind"] = pa.Array.from_buffers(pa.uint8(), rows, [None, kinds])
        columns["created_ms"] = pa.Array.from_buffers(pa.int64(), rows, [bitmap(has_created, rows), created])
        columns["expires_ms"] = pa.Array.from_buffers(pa.int64(), rows, [bitmap(has_expires, rows), expires])
    schema = pa.schema([field for field in SCHEMA if field.name in columns])
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)
