"""Changes as Arrow columns, decoded block by block: no Python object is made for a row.

Blocks of WAL files and of bulk loads hold rows in the same form, and one kernel decodes both. WAL files are often
small, so the blocks of several files are decoded together. `CHANGE_COLUMNS` are the columns of a change.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from flagstone.changes.step import check_gapless
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.columns import decode_columns
from flagstone.format.sst import FORMAT_V2
from flagstone.loads.rows import LoadPiece
from flagstone.lsm.system_rows import SYSTEM_KEYS, SYSTEM_START, SYSTEM_STOP
from flagstone.types import MERGE, TOMBSTONE, EntryTuple, KeyRange, WalId
from flagstone.wal.replay import WalRows

CHANGE_COLUMNS: Final = pa.schema(
    [
        pa.field("op", pa.string(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("value", pa.binary()),
        pa.field("seq", pa.int64(), nullable=False),
        pa.field("created_ms", pa.int64()),
        pa.field("expires_ms", pa.int64()),
        pa.field("wal_id", pa.int64()),
    ]
)
"""`value` is the operand of a merge and null for a delete; `wal_id` is null for a row of a bulk load."""

_BYTES_TOGETHER: Final = 2 * 1024 * 1024
"""About how many stored bytes become one batch: small enough for the caches of a processor, large enough for Arrow."""

_OPERATIONS: Final = pa.array(
    [{TOMBSTONE: "delete", MERGE: "merge"}.get(kind, "put") for kind in range(MERGE + 1)]
)
"""The operation by the kind of a row."""

_TOMBSTONE: Final = pa.scalar(TOMBSTONE, pa.uint8())


class FileRows(NamedTuple):
    """The rows of one WAL file, checked and still encoded."""

    wal_id: WalId
    rows: WalRows


def file_batches(files: Iterable[FileRows]) -> Iterator[pa.RecordBatch]:
    """The changes of WAL files in commit order: several small files in one batch, a large file in several.

    A file must have been checked: `WalRows` does so when it is made.
    """
    held: list[FileRows] = []
    size = 0
    for file in files:
        if held and size + file.rows.size > _BYTES_TOGETHER:
            yield _decode_files(held)
            held, size = [], 0
        if file.rows.size > _BYTES_TOGETHER:
            yield from _decode_large(file)
        elif file.rows.count:
            held.append(file)
            size += file.rows.size
    if held:
        yield _decode_files(held)


def _decode_files(files: Sequence[FileRows]) -> pa.RecordBatch:
    blocks: list[bytes] = []
    for _, content in files:
        found = content.blocks()
        if found is None:  # an older format: its rows were decoded when the file was checked
            return _of_rows((row, wal_id) for wal_id, rows in files for row in rows.decode())
        blocks += found
    ids = array("q")
    for wal_id, content in files:
        ids += array("q", (wal_id,)) * content.count
    return _changes(
        decode_columns(blocks), pa.Array.from_buffers(pa.int64(), len(ids), [None, pa.py_buffer(ids)])
    )


def _decode_large(file: FileRows) -> Iterator[pa.RecordBatch]:
    blocks = file.rows.blocks() or []
    first = size = 0
    for at, block in enumerate(blocks):
        size += len(block)
        if size < _BYTES_TOGETHER and at + 1 < len(blocks):
            continue
        decoded = decode_columns(blocks[first : at + 1])
        first, size = at + 1, 0
        yield _changes(decoded, pa.repeat(pa.scalar(file.wal_id, pa.int64()), decoded.num_rows))


def decode_load(piece: LoadPiece) -> pa.RecordBatch:
    """A piece of a bulk load as changes. Raises `CorruptData` with object and block."""
    if piece.sst.format_version == FORMAT_V2:
        try:
            decoded = decode_columns(piece.blocks)
        except (CorruptData, InvalidRequest):
            pass  # decoding the rows below names the damaged block
        else:
            return _changes(decoded, pa.nulls(decoded.num_rows, pa.int64()))
    return _of_rows((row, None) for row in piece.rows())


def within(batch: pa.RecordBatch, keys: KeyRange) -> pa.RecordBatch:
    """The rows of the batch with keys in the range."""
    if keys.start is not None:
        batch = _where(batch, pc.greater_equal(batch["key"], pa.scalar(keys.start, pa.binary())))
    if keys.stop is not None:
        batch = _where(batch, pc.less(batch["key"], pa.scalar(keys.stop, pa.binary())))
    return batch


def without_system(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The changes without those of system rows."""
    system = within(batch, SYSTEM_KEYS)
    if not system.num_rows:
        return batch
    keys = batch["key"]
    below = pc.less(keys, pa.scalar(SYSTEM_START, pa.binary()))
    return batch.filter(pc.or_(below, pc.greater_equal(keys, pa.scalar(SYSTEM_STOP, pa.binary()))))


def _where(batch: pa.RecordBatch, wanted: pa.BooleanArray) -> pa.RecordBatch:
    return batch if wanted.true_count == len(wanted) else batch.filter(wanted)


def check_sequence(batch: pa.RecordBatch, seen_seq: int) -> int:
    """The largest sequence number so far. Raises `InvalidRequest` if one between `seen_seq` and a row is missing."""
    seqs = batch["seq"]
    reached = pc.cumulative_max(pa.concat_arrays([pa.array([seen_seq], pa.int64()), seqs]))
    before = reached[:-1]
    missing = pc.greater(seqs, pc.add(before, 1))
    if missing.true_count:
        for at in pc.indices_nonzero(missing).to_pylist():
            check_gapless(before[at].as_py(), seqs[at].as_py())
    last: int = reached[-1].as_py()
    return last


def _changes(rows: pa.RecordBatch, wal_ids: pa.Array) -> pa.RecordBatch:
    """Decoded rows with the columns of changes. Copies neither keys nor values."""
    kinds, value = rows["kind"], rows["value"]
    deletes = pc.equal(kinds, _TOMBSTONE)
    if deletes.true_count:
        _, offsets, data = value.buffers()
        value = pa.Array.from_buffers(
            pa.binary(), len(value), [pc.invert(deletes).buffers()[1], offsets, data]
        )
    cells = [_OPERATIONS.take(kinds), rows["key"], value, rows["seq"].view(pa.int64())]
    return pa.RecordBatch.from_arrays(
        [*cells, rows["created_ms"], rows["expires_ms"], wal_ids], schema=CHANGE_COLUMNS
    )


def _of_rows(rows: Iterable[tuple[EntryTuple, WalId | None]]) -> pa.RecordBatch:
    """Rows that were decoded one by one."""
    cells: list[tuple[Any, ...]] = [
        (
            _OPERATIONS[kind].as_py(),
            key,
            None if kind == TOMBSTONE else value,
            seq,
            created_ms,
            expires_ms,
            wal_id,
        )
        for (key, seq, kind, value, created_ms, expires_ms), wal_id in rows
    ]
    columns = zip(*cells, strict=True) if cells else repeat((), len(CHANGE_COLUMNS))
    arrays = [pa.array(list(each), field.type) for each, field in zip(columns, CHANGE_COLUMNS, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=CHANGE_COLUMNS)
