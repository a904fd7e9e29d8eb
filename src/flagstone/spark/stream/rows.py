"""The rows of a micro-batch, read by the tasks of Spark as Arrow batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition

from flagstone.changes.change import WalFiles
from flagstone.changes.columns import (
    CHANGE_COLUMNS,
    FileRows,
    check_sequence,
    decode_load,
    file_batches,
    within,
    without_system,
)
from flagstone.errors import InvalidRequest
from flagstone.loads.rows import LoadRows
from flagstone.metadata.annotations import Position
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.pool import shared_pool
from flagstone.spark.address import DatabaseAddress, open_store, open_wal_store
from flagstone.spark.error_translation import in_task
from flagstone.spark.held_state import CheckpointRead
from flagstone.spark.row_mapping import read_schema
from flagstone.spark.scan import FlagstoneReader, KeyPartition
from flagstone.spark.selection import Wanted
from flagstone.spark.stream.former import BaseState, FormerRows
from flagstone.spark.stream.options import StreamOptions
from flagstone.spark.stream.partitions import (
    LoadPartition,
    MarkerPartition,
    RangeDeletePartition,
    ReplacePartition,
    SnapshotPartition,
    WalPartition,
)
from flagstone.spark.stream.range_deletes import range_delete_rows
from flagstone.spark.stream.shape import BEFORE, OVERWRITE
from flagstone.types import WalId
from flagstone.wal.replay import open_wal

_ROW_COLUMNS: Final = ("key", "value", "seq", "created_ms", "expires_ms")


class BatchRows:
    """Reads the partitions of one stream. Opens the stores for each partition."""

    def __init__(self, options: StreamOptions) -> None:
        self._options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The changes of a partition; none for the partition that Spark adds when there is none."""
        with in_task():
            if isinstance(partition, SnapshotPartition):
                yield from self._snapshot(partition)
            elif isinstance(partition, WalPartition):
                yield from self._with_former(self._wal(partition), partition.base, partition.first)
            elif isinstance(partition, LoadPartition):
                yield from self._with_former(self._load(partition), partition.base, partition.next_id)
            elif isinstance(partition, RangeDeletePartition):
                yield range_delete_rows(partition.load, self._options.keys)
            elif isinstance(partition, ReplacePartition):
                yield from self._replaced(partition)
            elif isinstance(partition, MarkerPartition):
                yield overwrite_marker(partition.seq)

    def _with_former(
        self, batches: Iterable[pa.RecordBatch], base: BaseState | None, first: int
    ) -> Iterator[pa.RecordBatch]:
        """The batches, with the former values if the stream has them. `first` is the first WAL file of the batches."""
        if base is None or not self._options.before:
            yield from batches
            return
        with self._former(base, first) as former:
            for batch in batches:
                yield batch.append_column(BEFORE, former.before(batch))

    @contextmanager
    def _former(self, base: BaseState, first: int) -> Iterator[FormerRows]:
        since = (
            self._shown(batch) for batch in file_batches(self._files(range(base.position.next_id, first)))
        )
        with closing(FormerRows(self._options, base, since)) as former:
            yield former

    def _replaced(self, partition: ReplacePartition) -> Iterator[pa.RecordBatch]:
        """Deletes of the keys that went, and puts of all rows that came. Holds the rows that came."""
        came = list(self._snapshot(SnapshotPartition(partition.wanted, partition.checkpoint)))
        keys = pa.chunked_array([batch["key"] for batch in came], pa.binary()).combine_chunks()
        replaced: list[pa.RecordBatch] = []
        with self._former(partition.base, partition.next_id) as former:
            for batch in former.scan(partition.wanted.keys):
                stays = pc.is_in(batch["key"], value_set=keys)
                if self._options.before:
                    replaced.append(batch.filter(stays))
                yield as_deletes(batch.filter(pc.invert(stays)), partition.seq)
        was = pa.Table.from_batches(replaced) if replaced else None
        for batch in came:
            yield with_former(batch, was)

    def _wal(self, partition: WalPartition) -> Iterator[pa.RecordBatch]:
        seen = last_seq_before(wal_files(self._options.address), partition.first, partition.begin)
        for batch in file_batches(self._files(range(partition.first, partition.stop))):
            if not self._options.allow_gaps:
                seen = check_sequence(batch, seen)
            yield self._shown(batch)

    def _shown(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The changes that the stream delivers."""
        wanted = within(batch, self._options.keys)
        return wanted if self._options.read.include_system else without_system(wanted)

    def _files(self, wal_ids: Iterable[int]) -> Iterator[FileRows]:
        wal = wal_files(self._options.address)
        for wal_id, stored in wal.fetch(map(WalId, wal_ids)):
            if stored is None:
                wal.read(wal_id)  # raises the error for a deleted file
                raise InvalidRequest(f"WAL file {wal_id} is missing")
            yield FileRows(wal_id, open_wal(stored, wal.paths.wal(wal_id)))

    def _load(self, partition: LoadPartition) -> Iterator[pa.RecordBatch]:
        store, paths = open_store(self._options.address)
        loads, keys = LoadRows(store, paths, pool=shared_pool()), self._options.keys
        for piece in loads.encoded(partition.load, partition.sst, keys):
            yield self._shown(decode_load(piece))

    def _snapshot(self, partition: SnapshotPartition) -> Iterator[pa.RecordBatch]:
        reader = snapshot_of(self._options, partition.checkpoint)
        for batch in reader.read(KeyPartition(partition.wanted)):
            yield as_puts(batch)


def overwrite_marker(seq: int) -> pa.RecordBatch:
    """The row that stands for the end of everything before it; its key is empty."""
    cells = {"op": [OVERWRITE], "key": [b""], "seq": [seq]}
    arrays = [pa.array(cells.get(field.name, [None]), field.type) for field in CHANGE_COLUMNS]
    return pa.RecordBatch.from_arrays(arrays, schema=CHANGE_COLUMNS)


def as_deletes(rows: pa.RecordBatch, seq: int) -> pa.RecordBatch:
    """Keys that are gone as changes that delete them; `before` is the value that each had."""
    count = rows.num_rows
    cells = {
        "op": pa.repeat("delete", count),
        "key": rows["key"],
        "seq": pa.repeat(pa.scalar(seq, pa.int64()), count),
    }
    arrays = [cells.get(field.name, pa.nulls(count, field.type)) for field in CHANGE_COLUMNS]
    batch = pa.RecordBatch.from_arrays(arrays, schema=CHANGE_COLUMNS)
    return batch.append_column(BEFORE, rows["value"])


def with_former(rows: pa.RecordBatch, was: pa.Table | None) -> pa.RecordBatch:
    """The changes with the values that their keys had in the table, null for other keys."""
    if was is None or not was.num_rows:
        return rows.append_column(BEFORE, pa.nulls(rows.num_rows, pa.binary()))
    at = pc.index_in(rows["key"], value_set=was["key"].combine_chunks())
    return rows.append_column(BEFORE, was["value"].combine_chunks().take(at))


def last_seq_before(wal: WalFiles, end: int, begin: Position) -> int:
    """The last sequence number before WAL file `end`, for a consumer that begins at `begin`."""
    for wal_id in range(end - 1, begin.next_id - 1, -1):
        rows = wal.find_rows(WalId(wal_id))
        if rows is None:
            break
        if rows.count:
            return max(begin.after_seq, rows.last_seq)
    return begin.after_seq


def as_puts(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Rows of the database as changes that put them."""
    count = rows.num_rows
    cells = {name: rows[name] for name in _ROW_COLUMNS}
    cells |= {"op": pa.repeat("put", count), "wal_id": pa.nulls(count, pa.int64())}
    arrays = [cells[field.name].cast(field.type) for field in CHANGE_COLUMNS]
    return pa.RecordBatch.from_arrays(arrays, schema=CHANGE_COLUMNS)


def snapshot_of(options: StreamOptions, checkpoint: str) -> FlagstoneReader:
    """The wanted keys of the database at the checkpoint, with all columns."""
    read = replace(options.read, columns=_ROW_COLUMNS, row_mapping=None, raw=True)
    return FlagstoneReader(CheckpointRead(read, checkpoint), read_schema(_ROW_COLUMNS))


def snapshot_parts(options: StreamOptions, checkpoint: str) -> list[Wanted]:
    """The key ranges that the tasks of a copy read."""
    return [part.wanted for part in snapshot_of(options, checkpoint).plan()]


def wal_files(address: DatabaseAddress) -> WalFiles:
    """The WAL of the database at the address."""
    main, paths = open_store(address)
    return WalFiles(open_wal_store(address, main), paths, ManifestStore(main, paths))
