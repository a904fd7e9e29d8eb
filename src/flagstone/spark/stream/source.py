"""A stream of changes: optionally a copy of the whole database, then the WAL files and bulk loads in commit order.

An offset is the position of a query: `wal_id` is the next WAL file, `seq` the last sequence number before it, and
`checkpoint` the checkpoint that a copy of the whole database was read from. Spark stores the end of a micro-batch
before it runs the batch, so a repeated batch reads exactly the same. A WAL file holds whole batches of writes: no
transaction is ever split between two micro-batches. A bulk load is a micro-batch of its own, at the end of which
`wal_id` is unchanged and `seq` is the sequence number of the load.

A retention checkpoint, created before the first offset, keeps WAL files and SSTs of loads until Spark commits a batch.
What comes next is decided by `flagstone.changes.step.plan_step`, as in the change reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from flagstone.changes.change import Change, WalFile, WalFiles, change_of, change_of_range
from flagstone.changes.retention import ConsumerPosition, RetentionCheckpoint
from flagstone.changes.step import ReadFiles, ReadLoad, check_gapless, plan_step
from flagstone.db.admin.admin import Admin
from flagstone.errors import InvalidRequest
from flagstone.loads.edit import VisibleLoad, find_load, next_load
from flagstone.loads.rows import LoadRows, fetch_load_ssts, load_gone
from flagstone.metadata.annotations import Position
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.runtime.pool import shared_pool
from flagstone.spark.address import open_store, open_wal_store
from flagstone.spark.filters import Wanted
from flagstone.spark.options import ReadOptions
from flagstone.spark.row_mapping import arrow_schema, read_schema
from flagstone.spark.scan import CheckpointRead, FlagstoneReader, KeyPartition
from flagstone.spark.stream.options import StreamOptions
from flagstone.types import EntryTuple, WalId
from flagstone.wal.replay import decode_wal

_ROWS_PER_BATCH: Final = 16_384


@dataclass
class WalPartition(InputPartition):
    """WAL files from `first` up to, not including, `stop`, of a micro-batch that begins at `begin`."""

    first: int
    stop: int
    begin: Position

    def __init__(self, first: int, stop: int, begin: Position) -> None:
        super().__init__(None)
        self.first, self.stop, self.begin = first, stop, begin


@dataclass
class LoadPartition(InputPartition):
    """One SST of a bulk load."""

    load: VisibleLoad
    sst: SsTable

    def __init__(self, load: VisibleLoad, sst: SsTable) -> None:
        super().__init__(None)
        self.load, self.sst = load, sst


@dataclass
class RangeDeletePartition(InputPartition):
    """A range delete: one change."""

    load: VisibleLoad

    def __init__(self, load: VisibleLoad) -> None:
        super().__init__(None)
        self.load = load


@dataclass
class SnapshotPartition(InputPartition):
    """A key range of the database at the checkpoint."""

    wanted: Wanted
    checkpoint: str

    def __init__(self, wanted: Wanted, checkpoint: str) -> None:
        super().__init__(None)
        self.wanted, self.checkpoint = wanted, checkpoint


def record_batches(changes: Iterable[Change], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The changes as Arrow record batches of a fixed size."""
    for chunk in _chunks(changes, _ROWS_PER_BATCH):
        columns = zip(*chunk, strict=True)
        arrays = [pa.array(list(cells), field.type) for cells, field in zip(columns, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _chunks(changes: Iterable[Change], size: int) -> Iterator[list[Change]]:
    chunk: list[Change] = []
    for change in changes:
        chunk.append(change)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


CHANGE_SCHEMA: Final = StructType(
    [
        StructField("op", StringType(), nullable=False),
        StructField("key", BinaryType(), nullable=False),
        StructField("value", BinaryType()),
        StructField("seq", LongType(), nullable=False),
        StructField("created_ms", LongType()),
        StructField("expires_ms", LongType()),
        StructField("wal_id", LongType()),
    ]
)
_ROW_COLUMNS: Final = ("key", "value", "seq", "created_ms", "expires_ms")
_POLL_S: Final = 1.0
"""How long a query that has read everything waits before it polls the store."""

Offset = dict[str, Any]
BEGIN: Final[Offset] = {"wal_id": 0, "seq": 0, "checkpoint": ""}
"""The offset of a query that has not read anything."""


def plan_end(files: Sequence[WalFile], first: int, limit: ReadLimit, until: int | None) -> int:
    """The end, exclusive, of the WAL files that a micro-batch beginning at `first` may read. Pure.

    Only files without a hole between them count; at least one is taken, however large. `until` is the end of the query.
    """
    end, size = first, 0
    for file in files:
        if file.wal_id != end or (until is not None and end >= until):
            break
        size += file.size
        if isinstance(limit, ReadMaxFiles) and end - first >= limit.max_files:
            break
        if isinstance(limit, ReadMaxBytes) and end > first and size > limit.max_bytes:
            break
        end += 1
    return end


class ChangeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets and rows for Spark. One process on the driver's machine requests offsets, tasks read rows."""

    def __init__(self, options: StreamOptions, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._options = options
        self._clock = clock
        self._until: Position | None = None
        self._idle_until = -math.inf
        self._position: ConsumerPosition | None = None
        self._manifest_store: ManifestStore | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The position belongs to the process that gives out offsets; tasks need none.
        return {**vars(self), "_position": None, "_manifest_store": None}

    # -- on the driver ------------------------------------------------------------------------------------

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        return dict(BEGIN)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self._options
        if options.max_files is not None:
            return ReadMaxFiles(options.max_files)
        return ReadAllAvailable() if options.max_bytes is None else ReadMaxBytes(options.max_bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        files = list(self._wal().files())
        # The manifest is read after the listing: a load that it does not have came after this call.
        last_seq = self._manifests().require_latest().value.last_l0_seq
        self._until = Position(WalId(files[-1].wal_id + 1 if files else 1), last_seq)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """The end of the next micro-batch.

        Raises:
            InvalidRequest: a WAL file was deleted before it was read, or the database changed in a way that cannot be
                delivered as changes.

        """
        consumer = self._consumer(start)
        if start == BEGIN:
            return self._first_offset(consumer)
        consumer.tend()
        # Spark calls this in a loop while nothing is new; only one call per interval may reach the store.
        if self._clock.monotonic() < self._idle_until:
            return start
        at, until = _position_of(start), self._until
        wal = self._wal()
        files = list(wal.files(at.next_id))
        # Read after the listing: a load that came before one of these files is in this manifest. If there are files, it
        # must be the latest manifest beyond doubt, because Spark would repeat a wrong batch for ever.
        manifest = (self._manifests().require_latest() if files else self._manifests().poll()).value
        stop = plan_end(files, at.next_id, limit, None if until is None else until.next_id)
        step = plan_step(
            at, self._next_load(manifest, at), stop=WalId(stop), allow_gaps=self._options.allow_gaps
        )
        if isinstance(step, ReadLoad):
            return {"wal_id": at.next_id, "seq": step.load.seq, "checkpoint": ""}
        if isinstance(step, ReadFiles):
            return {"wal_id": step.stop, "seq": self._last_seq(step.stop, at), "checkpoint": ""}
        if until is None or at.next_id < until.next_id:
            if files and files[0].wal_id > at.next_id:
                wal.read(at.next_id)  # raises the error for a deleted file
            self._check_wal_has_all(at, manifest)
            self._idle_until = self._clock.monotonic() + _POLL_S
        return start

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        if start == end:  # nothing is new; the copy must not be read twice
            return []
        if end["checkpoint"]:
            snapshot = self._snapshot(end["checkpoint"])
            return [SnapshotPartition(part.wanted, end["checkpoint"]) for part in snapshot.plan()]
        if start == BEGIN:
            return []
        begin, stop = _position_of(start), int(end["wal_id"])
        if begin.next_id == stop:
            return self._load_partitions(int(end["seq"]))
        groups = min(self._options.partitions, stop - begin.next_id)
        edges = [begin.next_id + (stop - begin.next_id) * at // groups for at in range(groups + 1)]
        return [WalPartition(a, b, begin) for a, b in pairwise(edges)]

    def commit(self, end: Offset) -> None:
        if self._position is not None:
            self._position.use(_position_of(end))

    def stop(self) -> None:
        if self._position is not None:
            self._position.save()

    # -- in tasks -----------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition; none for the partition that Spark adds when `partitions` returns none."""
        schema = arrow_schema(CHANGE_SCHEMA)
        if isinstance(partition, SnapshotPartition):
            yield from self._snapshot_rows(partition, schema)
        elif isinstance(partition, WalPartition):
            yield from record_batches(self._changes(partition), schema)
        elif isinstance(partition, LoadPartition):
            yield from record_batches(self._loaded(partition), schema)
        elif isinstance(partition, RangeDeletePartition):
            assert partition.load.deleted is not None
            yield from record_batches([change_of_range(partition.load, partition.load.deleted)], schema)

    def _changes(self, partition: WalPartition) -> Iterator[Change]:
        seen = self._last_seq(partition.first, partition.begin)
        for wal_id, rows in self._files(range(partition.first, partition.stop)):
            for row in rows:
                if row[1] > seen + 1 and not self._options.allow_gaps:
                    check_gapless(seen, row[1])
                seen = max(seen, row[1])
                yield change_of(row, wal_id)

    def _loaded(self, partition: LoadPartition) -> Iterator[Change]:
        store, paths = open_store(self._options.address)
        rows = LoadRows(store, paths, pool=shared_pool())
        for piece in rows.pieces(partition.load, partition.sst):
            for row in piece:
                yield change_of(row, None)

    def _files(self, wal_ids: Iterable[int]) -> Iterator[tuple[WalId, list[EntryTuple]]]:
        wal = self._wal()
        for wal_id, stored in wal.fetch(map(WalId, wal_ids)):
            if stored is None:
                wal.read(wal_id)  # raises the error for a deleted file
                raise InvalidRequest(f"WAL file {wal_id} is missing")
            yield wal_id, decode_wal(stored, wal.paths.wal(wal_id))

    def _snapshot_rows(self, partition: SnapshotPartition, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for batch in self._snapshot(partition.checkpoint).read(KeyPartition(partition.wanted)):
            rows = batch.num_rows
            cells = {name: batch.column(name) for name in _ROW_COLUMNS}
            cells |= {"op": pa.array(["put"] * rows), "wal_id": pa.nulls(rows, pa.int64())}
            arrays = [cells[field.name].cast(field.type) for field in schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    # -- parts --------------------------------------------------------------------------------------------

    def _snapshot(self, checkpoint: str) -> FlagstoneReader:
        options = self._options
        read = ReadOptions(options.address, columns=_ROW_COLUMNS, merge_operator=options.merge_operator)
        return FlagstoneReader(CheckpointRead(read, checkpoint), read_schema(_ROW_COLUMNS))

    def _wal(self) -> WalFiles:
        main, paths = open_store(self._options.address)
        store = open_wal_store(self._options.address, main)
        return WalFiles(store, paths, ManifestStore(main, paths))

    def _consumer(self, start: Offset) -> ConsumerPosition:
        """The consumer, whose retention checkpoint keeps the WAL from `start` on."""
        if self._position is None:
            store, _ = open_store(self._options.address)
            checkpoint = RetentionCheckpoint(
                self._manifests(),
                store,
                self._options.consumer,
                lifetime=self._options.retention_lifetime,
                clock=self._clock,
                ids=SYSTEM_IDS,
            )
            position = ConsumerPosition(checkpoint, self._clock)
            position.begin(None if start == BEGIN else _position_of(start), self._wal())
            self._position = position
        return self._position

    def _first_offset(self, consumer: ConsumerPosition) -> Offset:
        """The end of the first micro-batch: the copy, or an empty batch at the position where the query starts."""
        starting, address = self._options.starting, self._options.address
        if starting == "snapshot":
            created = Admin(address.path, **address.arguments).create_checkpoint(
                self._options.snapshot_lifetime, name=f"spark stream {self._options.consumer}"
            )
            with CheckpointRead(ReadOptions(address), str(created.id)).open() as reader:
                status = reader.status()
                next_id = reader.manifest().wal_id_last_seen + 1
            return {"wal_id": next_id, "seq": status["last_seq"], "checkpoint": str(created.id)}
        if starting == "earliest":
            first = Position(self._wal().oldest())
        elif starting == "latest":
            first = self._end()
        else:
            first = Position(WalId(int(starting)))
        consumer.begin(first, self._wal())
        return {"wal_id": first.next_id, "seq": first.after_seq, "checkpoint": ""}

    def _end(self) -> Position:
        """The position after everything in the WAL and in SSTs."""
        last_seq = self._manifests().require_latest().value.last_l0_seq
        files = list(self._wal().files())
        if not files:
            return Position(WalId(1), last_seq)
        return Position(
            WalId(files[-1].wal_id + 1),
            self._last_seq(files[-1].wal_id + 1, Position(files[0].wal_id, last_seq)),
        )

    def _last_seq(self, end: int, begin: Position) -> int:
        """The last sequence number before WAL file `end`, for a consumer that begins at `begin`."""
        wal = self._wal()
        for wal_id in range(end - 1, begin.next_id - 1, -1):
            try:
                changes = wal.read(WalId(wal_id)).changes
            except InvalidRequest:
                break
            if changes:
                return max(begin.after_seq, changes[-1].seq)
        return begin.after_seq

    # -- loads --------------------------------------------------------------------------------------------

    def _manifests(self) -> ManifestStore:
        if self._manifest_store is None:
            self._manifest_store = ManifestStore(*open_store(self._options.address))
        return self._manifest_store

    def _next_load(self, manifest: Manifest, at: Position) -> VisibleLoad | None:
        """The first load after the position; None if it came after `prepareForTriggerAvailableNow`."""
        load = next_load(manifest, at)
        if load is None or (self._until is not None and load.seq > self._until.after_seq):
            return None
        return load

    def _load_partitions(self, seq: int) -> list[InputPartition]:
        load = find_load(self._manifests().require_latest().value, seq)
        if load is None and not self._options.allow_gaps:
            raise load_gone(seq)
        if load is None or load.replaces:
            return []
        if load.deleted is not None:
            return [RangeDeletePartition(load)]
        return [LoadPartition(load, sst) for sst in fetch_load_ssts(self._manifests(), load)]

    def _check_wal_has_all(self, at: Position, latest: Manifest) -> None:
        """Raise if the SSTs have rows that are neither in the WAL nor in a load: the stream cannot deliver them."""
        if self._options.allow_gaps or not 0 < at.after_seq < latest.last_l0_seq:
            return
        # List again after the manifest was read: the file may have been written since.
        if next(self._wal().files(at.next_id), None) is None:
            check_gapless(at.after_seq, latest.last_l0_seq + 1)


def _position_of(offset: Offset) -> Position:
    return Position(WalId(int(offset["wal_id"])), int(offset["seq"]))
