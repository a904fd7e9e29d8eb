"""One task of a bulk load: builds and uploads SSTs from Arrow batches, without a Python object per row.

An invalid row (a null, an unknown operation, a key out of the declared order) ends the task, and so the load, with an
error that names the problem. No manifest ever refers to the SSTs that were uploaded by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from flagstone.errors import InternalError, InvalidRequest
from flagstone.kernels.columns import NOTHING, fixed, present, view, words
from flagstone.spark.address import open_store
from flagstone.spark.load.heartbeat import Heartbeat
from flagstone.spark.load.plan import LoadPlan, MadeSst, commit_sst, load_output
from flagstone.spark.load.segments import split_by_segment
from flagstone.spark.options import WriteOptions
from flagstone.sst.builder import RowColumns, SstBuilder
from flagstone.types import MERGE, TOMBSTONE, VALUE

_OPS: Final = pa.array(["put", "delete", "merge"])
_KINDS: Final = pa.array([VALUE, TOMBSTONE, MERGE], pa.uint8())


def write_ssts(batches: Iterable[pa.RecordBatch], plan: LoadPlan, options: WriteOptions) -> list[MadeSst]:
    """Build and upload the SSTs of one partition. They overlap only if its rows are not in key order.

    Raises:
        InvalidRequest: rows declared as sorted are not, a key occurs twice and duplicates are refused, or a row is
            invalid.

    """
    store, paths = open_store(plan.address)
    made: list[MadeSst] = []
    heartbeat, extractor = Heartbeat(plan), options.load_segment_extractor()
    source = iter(batches)
    rows = (as_rows(batch, options, plan.created_ms) for batch in source)
    stretches = iter([check_sorted(rows)]) if options.presorted else ordered_stretches(rows)
    with load_output(store, paths, plan) as output:

        def finish(writer: SstBuilder, *, has_merges: bool) -> None:
            built = writer.finish_if_any()
            if built is not None:
                made.append(commit_sst(output, built, has_merges=has_merges))

        for stretch in stretches:
            writer = SstBuilder(options.sst_options, open_sink=output.open, max_bytes=options.max_sst_bytes)
            merges, segment = False, b""
            rows_once = one_per_key(stretch, refuse=options.duplicates == "error")
            pieces = (
                ((b"", batch) for batch in rows_once)
                if extractor is None
                else split_by_segment(rows_once, extractor)
            )
            for prefix, batch in pieces:
                heartbeat.touch()
                if prefix != segment:
                    finish(writer, has_merges=merges)
                    segment = prefix
                merges = merges or _has_merges(batch)
                columns, at = row_columns(batch), 0
                while at < batch.num_rows:
                    at = writer.write_columns(columns, at, seq=plan.seq, created_ms=plan.created_ms)
                    if writer.full:
                        finish(writer, has_merges=merges)
            finish(writer, has_merges=merges)
    if next(source, None) is not None:
        raise InternalError("a task of a load ended before its last row; nothing of the load is visible")
    return made


def as_rows(batch: pa.RecordBatch, options: WriteOptions, created_ms: int) -> pa.RecordBatch:
    """The batch with the columns of rows: `key`, `value`, and if the batch has them, `kind` and `expires_ms`."""
    if options.row_mapping is not None:
        batch = options.row_mapping.encode(batch)
    names = batch.schema.names
    keys = batch.column(names.index(options.key_column))
    values = batch.column(names.index(options.value_column))
    columns: dict[str, Any] = {"key": _binary(keys, options.key_column)}
    if "op" in names:
        kinds = _kinds(batch.column(names.index("op")))
        deleted = pc.equal(kinds, pa.scalar(TOMBSTONE, pa.uint8()))
        # A tombstone has no value, even if the column has one.
        columns["value"] = _binary(
            pc.if_else(deleted, pa.scalar(b"", pa.binary()), values.cast(pa.binary())), options.value_column
        )
        columns["kind"] = kinds
    else:
        columns["value"] = _binary(values, options.value_column)
    if "expires_ms" in names:
        columns["expires_ms"] = _milliseconds(batch.column(names.index("expires_ms")))
    elif "ttl_ms" in names:
        ttl = batch.column(names.index("ttl_ms")).cast(pa.int64())
        if pc.any(pc.less(ttl, 0)).as_py():
            raise InvalidRequest("column 'ttl_ms' has negative numbers; use null for rows that never expire")
        try:
            columns["expires_ms"] = pc.add_checked(ttl, pa.scalar(created_ms, pa.int64()))
        except pa.ArrowInvalid:
            raise InvalidRequest(
                "column 'ttl_ms' has a number that is too large; use null for rows that never expire"
            ) from None
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def one_per_key(batches: Iterable[pa.RecordBatch], *, refuse: bool = False) -> Iterator[pa.RecordBatch]:
    """Keep the last of consecutive rows with the same key, or raise with `refuse`. A merge operand is never dropped."""
    held: pa.RecordBatch | None = None  # its last row is kept only if the next batch begins with another key
    for batch in batches:
        if not batch.num_rows:
            continue
        if held is not None:
            last = held.num_rows - 1
            if held["key"][last] == batch["key"][0]:
                pair = pa.concat_batches([held.slice(last), batch.slice(0, 1)])
                _check_repeated(pair, pa.array([False]), refuse=refuse)
                held = held.slice(0, last)
            if held.num_rows:
                yield held
        keys = batch["key"]
        last_of_key = pc.not_equal(keys[:-1], keys[1:])
        if last_of_key.false_count:
            _check_repeated(batch, last_of_key, refuse=refuse)
            held = batch.filter(pa.concat_arrays([last_of_key, pa.array([True])]))
        else:
            held = batch
    if held is not None:
        yield held


def row_columns(batch: pa.RecordBatch) -> RowColumns:
    """The rows of `as_rows` in the form of `SstBuilder.write_columns`, without a copy."""
    names = batch.schema.names
    kinds = fixed(batch["kind"], 1) if "kind" in names else NOTHING
    expires, has_expires = NOTHING.cast("q"), NOTHING
    if "expires_ms" in names:
        expires = words(batch["expires_ms"]).cast("B").cast("q")
        has_expires = present(batch["expires_ms"])
    return (batch.num_rows, *_spans(batch["key"]), *_spans(batch["value"]), kinds, expires, has_expires)


def _spans(column: pa.Array) -> tuple[memoryview, memoryview]:
    """Offsets and bytes of a binary column: row `i` is `data[offsets[i] : offsets[i + 1]]`."""
    _, offsets, data = column.buffers()
    return view(offsets, "i")[column.offset : column.offset + len(column) + 1], view(data, "B")


def _check_repeated(batch: pa.RecordBatch, last_of_key: Any, *, refuse: bool) -> None:
    repeated = pc.invert(last_of_key)
    kinds = batch["kind"] if "kind" in batch.schema.names else None
    if kinds is not None:
        merge = pc.equal(kinds, pa.scalar(MERGE, pa.uint8()))
        lost = pc.and_(repeated, pc.or_(merge[:-1], merge[1:]))
        if lost.true_count:
            key = batch["key"].slice(0, len(lost)).filter(lost)[0].as_py()
            raise InvalidRequest(
                f"the key {key!r} occurs more than once, and as a merge: one load holds one row per key. Fold the rows "
                "of a key before loading them"
            )
    if refuse:
        key = batch["key"].slice(0, len(repeated)).filter(repeated)[0].as_py()
        raise InvalidRequest(
            f"the key {key!r} occurs more than once; remove the rows, or use duplicates='last'"
        )


def _binary(column: Any, name: str) -> Any:
    if column.null_count:
        raise InvalidRequest(f"column {name!r} has {column.null_count} nulls; every row needs one")
    return column.cast(pa.binary())


def _milliseconds(times: Any) -> Any:
    """Whole numbers as they are, and timestamps as milliseconds since the epoch, rounded down."""
    if not pa.types.is_timestamp(times.type):
        return times.cast(pa.int64())
    whole = pc.floor_temporal(times, unit="millisecond")
    return whole.cast(pa.timestamp("ms", times.type.tz)).cast(pa.int64())


def _kinds(ops: Any) -> Any:
    """The kinds of the rows; a null operation is a put."""
    positions = pc.index_in(pc.utf8_lower(pc.fill_null(ops.cast(pa.string()), "put")), value_set=_OPS)
    if positions.null_count:
        unknown = ops.filter(pc.is_null(positions))[0].as_py()
        raise InvalidRequest(f"column 'op' has {unknown!r}; it is put, delete or merge")
    return _KINDS.take(positions)


def _has_merges(batch: pa.RecordBatch) -> bool:
    return "kind" in batch.schema.names and bool(
        pc.any(pc.equal(batch["kind"], pa.scalar(MERGE, pa.uint8()))).as_py()
    )


SORT_BYTES: Final = 256 * 1024 * 1024
"""How much of an unordered partition is sorted at a time. Sorting needs about twice as much memory."""

_MAX_SORT_BYTES: Final = 1024 * 1024 * 1024
"""The limit for huge values: an Arrow column holds at most 2 GiB."""


def check_sorted(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same batches. Raises `InvalidRequest` for a key below the key before it."""
    last: bytes | None = None
    for batch in batches:
        if not follows(batch, last):
            raise InvalidRequest(
                "the rows of a partition are not sorted by key; leave `sorted` out, use "
                'flagstone.spark.bulk_load, or df.repartitionByRange("key").sortWithinPartitions("key") before write'
            )
        last = _last_key(batch, last)
        yield batch


def ordered_stretches(
    batches: Iterable[pa.RecordBatch], sort_bytes: int = SORT_BYTES
) -> Iterator[Iterator[pa.RecordBatch]]:
    """The rows in stretches, each in key order; one stretch with the same batches if the rows are in order.

    The first stretch ends where the order ends. The rest is sorted in parts of `sort_bytes`; rows of one key keep
    their order. The caller must consume a stretch before it requests the next one.
    """
    source = _Pushback(iter(batches))
    yield source.while_ordered()
    while True:
        part: list[pa.RecordBatch] = []
        size = 0
        for batch in source:
            if part and size + batch.nbytes > _MAX_SORT_BYTES:
                source.put_back(batch)
                break
            part.append(batch)
            size += batch.nbytes
            if size >= sort_bytes:
                break
        if not part:
            return
        yield iter([_sorted(part)])


def follows(batch: pa.RecordBatch, last: bytes | None) -> bool:
    """Whether the keys of a batch ascend and begin at or above `last`."""
    keys = batch["key"]
    if not len(keys):
        return True
    if last is not None and keys[0].as_py() < last:
        return False
    return bool(len(keys) < 2 or pc.all(pc.less_equal(keys[:-1], keys[1:])).as_py())


class _Pushback:
    """An iterator that stops where the order ends, and then continues with the batch at which it stopped."""

    def __init__(self, source: Iterator[pa.RecordBatch]) -> None:
        self._source = source
        self._held: list[pa.RecordBatch] = []

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while self._held:
            yield self._held.pop()
        # Not `yield from`: closing this generator would also close the source and lose its rows.
        for batch in self._source:  # noqa: UP028
            yield batch

    def put_back(self, batch: pa.RecordBatch) -> None:
        self._held.append(batch)

    def while_ordered(self) -> Iterator[pa.RecordBatch]:
        last: bytes | None = None
        for batch in self._source:
            if not follows(batch, last):
                self.put_back(batch)
                return
            last = _last_key(batch, last)
            yield batch


def _last_key(batch: pa.RecordBatch, before: bytes | None) -> bytes | None:
    last: bytes | None = batch["key"][-1].as_py() if batch.num_rows else before
    return last


def _sorted(part: list[pa.RecordBatch]) -> pa.RecordBatch:
    joined = pa.concat_batches(part)
    # A stable sort keeps the last row of a key last.
    return joined.take(pc.sort_indices(joined["key"]))
