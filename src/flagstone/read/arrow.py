"""Scans as Arrow record batches, without a Python object per row where that is possible.

Blocks whose keys only one source has are decoded into columns, and vector operations filter the rows that the read may
not see. Merged rows and blocks with merge operands go through the same sieve as in any scan.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.columns import MAX_COLUMN_BYTES, SCHEMA, decode_columns
from flagstone.kernels import scan
from flagstone.kernels.columns import binaries, bitmap, constant, numbers, room, view
from flagstone.read.drivers import next_chunk
from flagstone.read.scan_cursor import Chunk, ScanCursor, ScanRequest, make_sieve, resume_at
from flagstone.read.view import ReadView
from flagstone.sst.store import SstStore
from flagstone.types import MERGE, VALUE, EntryTuple

COLUMNS: Final = ("key", "value", "seq", "created_ms", "expires_ms")
DEFAULT_BATCH_ROWS: Final = 65_536
_BLOCKS_AT_ONCE: Final = 512
_MAX_GROUP_BYTES: Final = 64 * 1024 * 1024
_MAX_BATCH_BYTES: Final = 1024 * 1024 * 1024
_INDEX_OF: Final = {name: index for index, name in enumerate(COLUMNS)}
_FALSE, _TRUE = (pa.Array.from_buffers(pa.bool_(), 1, [None, pa.py_buffer(bytes([bit]))]) for bit in (0, 1))


def scan_arrow(
    ssts: SstStore,
    view: ReadView,
    request: ScanRequest,
    *,
    columns: Sequence[str] = ("key", "value"),
    batch_rows: int | None = DEFAULT_BATCH_ROWS,
) -> pa.RecordBatchReader:
    """The rows of a scan as batches of `batch_rows` (the last, and those of large rows, may be smaller), by key.

    With None, batches are returned as they are decoded, a few thousand rows each, without another copy.

    Iterating the result blocks, and raises errors of the store and of damaged blocks. The request must neither go
    backward nor have a limit.
    """
    schema = _schema_of(columns)
    if batch_rows is not None and batch_rows < 1:
        raise InvalidRequest(f"batch_rows is {batch_rows}; use 1 or more")
    if request.reverse or request.limit is not None:
        raise InvalidRequest("an Arrow scan goes forward and has no limit; stop reading when you have enough")
    sink = ArrowSink(replace(request, whole_rows=True), schema)
    cursor = ScanCursor(view, request, sink=sink, blocks_at_once=_BLOCKS_AT_ONCE)
    batches = _batches(ssts, cursor)
    if batch_rows is not None:
        batches = _rebatch(batches, batch_rows)
    return pa.RecordBatchReader.from_batches(schema, batches)


def to_batches(chunks: Iterator[Chunk], columns: Sequence[str]) -> pa.RecordBatchReader:
    """The rows of a scan that gives Python rows, as batches; pairs have only the columns key and value."""
    schema = _schema_of(columns)
    return pa.RecordBatchReader.from_batches(schema, (_batch(chunk, schema) for chunk in chunks))


def _schema_of(columns: Sequence[str]) -> pa.Schema:
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown or not columns:
        raise InvalidRequest(f"columns {list(columns)} are not available; choose from {', '.join(COLUMNS)}")
    return pa.schema([SCHEMA.field(name) for name in columns])


class ArrowSink:
    """A sink whose chunks are record batches."""

    def __init__(self, request: ScanRequest, schema: pa.Schema) -> None:
        self._sieve = make_sieve(request)
        self._chooser = scan.ColumnSieve(request.max_seq, request.now_ms, not request.include_expired)
        self._max_seq = constant(request.max_seq, pa.uint64())
        self._now_ms = None if request.include_expired else constant(request.now_ms, pa.int64())
        self._schema = schema
        self._values = "value" in schema.names
        self._done = 0

    def add_blocks(self, blocks: list[bytes], start: bytes | None, stop: bytes | None, out: Chunk) -> None:
        self._done = 0
        for group in _groups(blocks):
            batch = None if self._sieve.collecting() else _decode(group, values=self._values)
            if batch is None or pc.any(pc.equal(batch["kind"], constant(MERGE, pa.uint8()))).as_py():
                rows: Chunk = []
                self._sieve.add_blocks(group, start, stop, rows)
                self._append(rows, out)
            else:
                visible = self._visible(batch, start, stop)
                if visible.num_rows:
                    out.append(visible.select(self._schema.names))
            self._done += len(group)

    def add_chunk(
        self,
        data: bytes | memoryview,
        bounds: array[int],
        start: bytes | None,
        stop: bytes | None,
        out: Chunk,
    ) -> None:
        """`add_blocks` for blocks inside `data`, each from one bound to the next. Copies only visible rows."""
        batch = None if self._sieve.collecting() else self._choose(data, bounds, start, stop)
        if batch is None:
            # Merge operands, or damage: the sieve folds operands and raises the detailed error.
            blocks = [bytes(data[bounds[at] : bounds[at + 1]]) for at in range(0, len(bounds), 2)]
            self.add_blocks(blocks, start, stop, out)
        elif batch.num_rows:
            out.append(batch)

    def blocks_done(self) -> int:
        return self._done + self._sieve.blocks_done()

    def add_rows(self, rows: list[EntryTuple], out: Chunk) -> None:
        shown: Chunk = []
        self._sieve.add_rows(rows, shown)
        self._append(shown, out)

    def finish(self, out: Chunk) -> None:
        shown: Chunk = []
        self._sieve.finish(shown)
        self._append(shown, out)

    def resume_at(self, head: bytes, out: Chunk) -> bytes:
        rest: Chunk = []
        at = resume_at(self._sieve, head, rest)
        self._append(rest, out)
        return at

    def _choose(
        self, data: bytes | memoryview, bounds: array[int], start: bytes | None, stop: bytes | None
    ) -> pa.RecordBatch | None:
        measured = self._chooser.measure(data, bounds)
        if measured is None or max(measured[1:]) > MAX_COLUMN_BYTES:
            return None
        rows, key_bytes, value_bytes = measured
        names = self._schema.names
        valued, numbered = rows if self._values else 0, rows if "seq" in names else 0
        created, expiring = (rows if name in names else 0 for name in ("created_ms", "expires_ms"))
        key_offsets, keys = room(4 * (rows + 1)), room(key_bytes)
        value_offsets, values = room(4 * (valued + 1) if valued else 0), room(value_bytes if valued else 0)
        seqs, created_ms, expires_ms = room(8 * numbered), room(8 * created), room(8 * expiring)
        has_created, has_expires = room(created), room(expiring)
        shown = self._chooser.fill(
            data,
            bounds,
            self._sieve.decided_key(),
            start,
            stop,
            view(key_offsets, "i"),
            view(keys, "B"),
            view(value_offsets, "i"),
            view(values, "B"),
            view(seqs, "Q"),
            view(created_ms, "q"),
            view(has_created, "B"),
            view(expires_ms, "q"),
            view(has_expires, "B"),
        )
        if shown < 0:
            return None
        self._sieve.pass_over(self._chooser.decided_key())
        buffers = {
            "key": lambda: [None, key_offsets, keys],
            "value": lambda: [None, value_offsets, values],
            "seq": lambda: [None, seqs],
            "created_ms": lambda: [bitmap(has_created, shown), created_ms],
            "expires_ms": lambda: [bitmap(has_expires, shown), expires_ms],
        }
        arrays = [pa.Array.from_buffers(field.type, shown, buffers[field.name]()) for field in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _visible(self, batch: pa.RecordBatch, start: bytes | None, stop: bytes | None) -> pa.RecordBatch:
        """The rows that the read sees: the newest visible version of each key, if it is a value."""
        if start is not None and batch["key"][0].as_py() < start:
            batch = batch.filter(pc.greater_equal(batch["key"], constant(start, pa.binary())))
        if stop is not None and batch.num_rows and batch["key"][-1].as_py() >= stop:
            batch = batch.filter(pc.less(batch["key"], constant(stop, pa.binary())))
        batch = _where(batch, pc.less_equal(batch["seq"], self._max_seq))
        if not batch.num_rows:
            return batch
        keys = batch["key"]
        fresh = pc.not_equal(keys[1:], keys[:-1])
        first = _TRUE if keys[0].as_py() != self._sieve.decided_key() else _FALSE
        self._sieve.pass_over(keys[-1].as_py())
        shown = pc.and_(
            pa.concat_arrays([first, fresh]), pc.equal(batch["kind"], constant(VALUE, pa.uint8()))
        )
        if self._now_ms is not None and batch["expires_ms"].null_count < batch.num_rows:
            alive = pc.fill_null(pc.greater(batch["expires_ms"], self._now_ms), constant(True, pa.bool_()))
            shown = pc.and_(shown, alive)
        return _where(batch, shown)

    def _append(self, rows: Chunk, out: Chunk) -> None:
        if rows:
            out.append(_batch(rows, self._schema))


def _batch(rows: Chunk, schema: pa.Schema) -> pa.RecordBatch:
    arrays = [_column([row[_INDEX_OF[field.name]] for row in rows], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _column(cells: list[Any], kind: pa.DataType) -> pa.Array:
    return binaries(cells, kind) if pa.types.is_binary(kind) else numbers(cells, kind)


def _groups(blocks: list[bytes]) -> Iterator[list[bytes]]:
    """The blocks in groups whose columns take at most about `_MAX_GROUP_BYTES`."""
    group: list[bytes] = []
    size = 0
    for block in blocks:
        if group and size + len(block) > _MAX_GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(block)
        size += len(block)
    yield group


def _decode(blocks: list[bytes], *, values: bool) -> pa.RecordBatch | None:
    """The blocks as columns. On failure None: the sieve then reads the blocks and raises the detailed error."""
    try:
        return decode_columns(blocks, values=values)
    except (CorruptData, InvalidRequest):
        return None


def _where(batch: pa.RecordBatch, mask: Any) -> pa.RecordBatch:
    return batch if mask.true_count == len(mask) else batch.filter(mask)


def _batches(ssts: SstStore, cursor: ScanCursor) -> Iterator[pa.RecordBatch]:
    while (chunk := next_chunk(ssts, cursor)) is not None:
        yield from chunk


def _rebatch(batches: Iterator[pa.RecordBatch], batch_rows: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of one size; smaller if rows are so large that a column would overflow."""
    held: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if held and size + batch.nbytes > _MAX_BATCH_BYTES:
            yield pa.concat_batches(held)
            held, rows, size = [], 0, 0
        held.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows < batch_rows:
            continue
        joined = pa.concat_batches(held)
        while rows >= batch_rows:
            yield joined.slice(0, batch_rows)
            joined = joined.slice(batch_rows)
            rows -= batch_rows
        held, size = [joined], joined.nbytes
    if rows:
        yield pa.concat_batches(held)
