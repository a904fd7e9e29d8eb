"""A stream of changes: the whole database at one moment, if wanted, then its log, file by file, and bulk loads.

An offset says how far a query has come: `wal_id` is the next file of the log, `seq` the last sequence number before
it, and `checkpoint` the one that a copy of the whole database was read from. Spark stores the end of a micro-batch
before it runs it, so a batch that is repeated reads exactly the same. A file holds whole batches of writes: no
transaction is ever split between two micro-batches. A bulk load is a micro-batch of its own, at the end of which
`wal_id` is what it was and `seq` the number of the load.

The log is kept for the consumer from before the first offset is given out until Spark says that a batch is done, and
the tables of loads are, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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

from flagstone.db.admin import Admin
from flagstone.errors import InvalidRequest
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.runtime.pool import shared_pool
from flagstone.spark.options import ReadOptions
from flagstone.spark.plan import open_store
from flagstone.spark.reading import FlagstoneReader, KeyPartition, PinnedRead
from flagstone.spark.schema import arrow_schema, read_schema
from flagstone.spark.stream_options import StreamOptions
from flagstone.spark.stream_parts import LoadPartition, LogPartition, SnapshotPartition, record_batches
from flagstone.store.resolve import resolve_wal_store
from flagstone.store.retrying import patient
from flagstone.types import WalId
from flagstone.wal.changes import Change, Position, change_of
from flagstone.wal.encoding import decode_wal
from flagstone.wal.fetching import fetch_in_order
from flagstone.wal.load_marks import ToldLoad, check_gapless, check_told, find_load, gone, next_load
from flagstone.wal.load_rows import LoadRows, fetch_load_tables
from flagstone.wal.pins import LogPin
from flagstone.wal.positions import PinnedPosition
from flagstone.wal.tail import WalFile, WalReader

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
_LOOK_EVERY_S: Final = 1.0
"""How long a query that has read everything waits before it looks for more."""

Offset = dict[str, Any]
BEGIN: Final[Offset] = {"wal_id": 0, "seq": 0, "checkpoint": ""}
"""Where a query stands that has not read anything."""


def plan_end(files: Sequence[WalFile], first: int, limit: ReadLimit, until: int | None) -> int:
    """The file behind the last one that a micro-batch beginning at `first` shall read. Pure.

    Only files that follow each other count; at least one is taken, however large. `until` is where to stop for good.
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
    """What Spark asks for offsets and rows. One process on the driver's machine asks, tasks read."""

    def __init__(self, options: StreamOptions, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._options = options
        self._clock = clock
        self._until: Position | None = None
        self._idle_until = -math.inf
        self._position: PinnedPosition | None = None
        self._known: ManifestStore | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The pin belongs to the process that gives out offsets; tasks need none.
        return {**vars(self), "_position": None, "_known": None}

    # -- on the driver ------------------------------------------------------------------------------------

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        return dict(BEGIN)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self._options
        if options.max_files is not None:
            return ReadMaxFiles(options.max_files)
        return ReadAllAvailable() if options.max_bytes is None else ReadMaxBytes(options.max_bytes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        files = self._log().files()
        # In this order: a load that comes after the last file is in the manifest, or it comes after this moment.
        last_seq = self._manifests().require_latest().value.last_l0_seq
        self._until = Position(WalId(files[-1].wal_id + 1 if files else 1), last_seq)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """How far the next micro-batch goes.

        Raises:
            InvalidRequest: a file was removed before it was read, or the database changed in a way that cannot be
                told as changes.

        """
        pinned = self._pinned(start)
        if start == BEGIN:
            return self._first_offset(pinned)
        pinned.tend()
        # Spark asks again and again while there is nothing to do; the store should not notice.
        if self._clock.monotonic() < self._idle_until:
            return start
        at = _position_of(start)
        log = self._log()
        files = log.files(at.next_id)
        # Read after the listing: what was loaded before one of these files was written is in this manifest. Of files
        # that a batch shall have it must be the latest beyond doubt, because Spark would repeat a wrong one for ever.
        manifest = (self._manifests().require_latest() if files else self._manifests().poll()).value
        load = self._next_load(manifest, at)
        if load is not None and at.next_id > load.place.wal_id:
            return self._load_offset(at, load)
        end = plan_end(files, at.next_id, limit, self._last_file(load))
        if end > at.next_id:
            last_seq = self._last_seq(end, at)
            return {"wal_id": end, "seq": last_seq, "checkpoint": ""}
        if self._until is None or at.next_id < self._until.next_id:
            if files and files[0].wal_id > at.next_id:
                log.read(at.next_id)  # says that it was removed, and what is left
            self._check_log_is_all(at, manifest)
            self._idle_until = self._clock.monotonic() + _LOOK_EVERY_S
        return start

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        if start == end:  # nothing is new, and a copy must not come twice
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
        return [LogPartition(a, b, begin) for a, b in pairwise(edges)]

    def commit(self, end: Offset) -> None:
        if self._position is not None:
            self._position.use(_position_of(end))

    def stop(self) -> None:
        if self._position is not None:
            self._position.save()

    # -- in tasks -----------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition; none for the one that Spark makes up where there is none."""
        schema = arrow_schema(CHANGE_SCHEMA)
        if isinstance(partition, SnapshotPartition):
            yield from self._snapshot_rows(partition, schema)
        elif isinstance(partition, LogPartition):
            yield from record_batches(self._changes(partition), schema)
        elif isinstance(partition, LoadPartition):
            yield from record_batches(self._loaded(partition), schema)

    def _changes(self, partition: LogPartition) -> Iterator[Change]:
        seen = self._last_seq(partition.first, partition.begin)
        for wal_id, rows in self._files(range(partition.first, partition.stop)):
            for row in rows:
                if row[1] > seen + 1 and not self._options.allow_gaps:
                    check_gapless(seen, row[1])
                seen = max(seen, row[1])
                yield change_of(row, wal_id)

    def _loaded(self, partition: LoadPartition) -> Iterator[Change]:
        store, paths = open_store(self._options.place)
        rows = LoadRows(store, paths, pool=shared_pool())
        for piece in rows.pieces(partition.load, partition.table):
            for row in piece:
                yield change_of(row, None)

    def _files(self, wal_ids: Iterable[int]) -> Iterator[tuple[WalId, list[Any]]]:
        place = self._options.place
        main, paths = open_store(place)
        store = (
            main
            if place.wal_store is None
            else patient(resolve_wal_store(place.wal_store, main, place.store_options))
        )
        for wal_id, stored in fetch_in_order(store, paths, map(WalId, wal_ids), pool=shared_pool()):
            if stored is None:
                self._log().read(wal_id)  # says that it was removed, and what is left
                raise InvalidRequest(f"file {wal_id} of the log is missing")
            yield wal_id, decode_wal(stored, paths.wal(wal_id))

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
        read = ReadOptions(options.place, columns=_ROW_COLUMNS, merge_operator=options.merge_operator)
        return FlagstoneReader(PinnedRead(read, checkpoint), read_schema(_ROW_COLUMNS))

    def _log(self) -> WalReader:
        return WalReader(self._options.place.path, **self._options.place.arguments)

    def _pinned(self, start: Offset) -> PinnedPosition:
        """The pin of this consumer, which keeps the log from `start` on, or from its end for one that begins."""
        if self._position is None:
            store, _ = open_store(self._options.place)
            pin = LogPin(
                self._manifests(),
                store,
                self._options.consumer,
                lifetime=self._options.pin_lifetime,
                clock=self._clock,
                ids=SYSTEM_IDS,
            )
            position = PinnedPosition(pin, self._clock)
            position.begin(None if start == BEGIN else _position_of(start), self._oldest)
            self._position = position
        return self._position

    def _oldest(self) -> WalId:
        files = self._log().files()
        return files[0].wal_id if files else WalId(1)

    def _first_offset(self, pinned: PinnedPosition) -> Offset:
        """The end of the first micro-batch: of the copy, or nothing but the place to begin at."""
        starting, place = self._options.starting, self._options.place
        if starting == "snapshot":
            created = Admin(place.path, **place.arguments).create_checkpoint(
                self._options.snapshot_lifetime, name=f"spark stream {self._options.consumer}"
            )
            with PinnedRead(ReadOptions(place), str(created.id)).open() as reader:
                status = reader.status()
                next_id = reader.manifest().wal_id_last_seen + 1
            return {"wal_id": next_id, "seq": status["last_seq"], "checkpoint": str(created.id)}
        if starting == "earliest":
            first = Position(self._oldest())
        elif starting == "latest":
            first = self._end()
        else:
            first = Position(WalId(int(starting)))
        pinned.begin(first, self._oldest)
        return {"wal_id": first.next_id, "seq": first.after_seq, "checkpoint": ""}

    def _end(self) -> Position:
        """Behind everything there is now, in the log and in tables."""
        last_seq = self._manifests().require_latest().value.last_l0_seq
        files = self._log().files()
        if not files:
            return Position(WalId(1), last_seq)
        return Position(
            WalId(files[-1].wal_id + 1),
            self._last_seq(files[-1].wal_id + 1, Position(files[0].wal_id, last_seq)),
        )

    def _last_seq(self, end: int, begin: Position) -> int:
        """The last sequence number before file `end`, counted from `begin`."""
        for wal_id in range(end - 1, begin.next_id - 1, -1):
            try:
                changes = self._log().read(wal_id).changes
            except InvalidRequest:
                break
            if changes:
                return max(begin.after_seq, changes[-1].seq)
        return begin.after_seq

    # -- loads --------------------------------------------------------------------------------------------

    def _manifests(self) -> ManifestStore:
        if self._known is None:
            self._known = ManifestStore(*open_store(self._options.place))
        return self._known

    def _next_load(self, manifest: Manifest, at: Position) -> ToldLoad | None:
        """The load that comes next, unless it came after a query began that shall end."""
        load = next_load(manifest, at)
        if load is None or (self._until is not None and load.seq > self._until.after_seq):
            return None
        return load

    def _load_offset(self, at: Position, load: ToldLoad) -> Offset:
        if not self._options.allow_gaps:
            check_told(load, at.after_seq)
        return {"wal_id": at.next_id, "seq": load.seq, "checkpoint": ""}

    def _last_file(self, load: ToldLoad | None) -> int | None:
        """The file at which a micro-batch ends at the latest: behind it comes a load, or the end for good."""
        ends = [] if load is None else [load.place.wal_id + 1]
        if self._until is not None:
            ends.append(self._until.next_id)
        return min(ends, default=None)

    def _load_partitions(self, seq: int) -> list[InputPartition]:
        load = find_load(self._manifests().require_latest().value, seq)
        if load is None and not self._options.allow_gaps:
            raise gone(seq)
        if load is None or load.replaces:
            return []
        return [LoadPartition(load, table) for table in fetch_load_tables(self._manifests(), load)]

    def _check_log_is_all(self, at: Position, latest: Manifest) -> None:
        """Raise if rows came into the database without the log: waiting for them there would be in vain."""
        if self._options.allow_gaps or not 0 < at.after_seq < latest.last_l0_seq:
            return
        # Asked again after the manifest: the file may have been written since.
        if not self._log().files(at.next_id):
            check_gapless(at.after_seq, latest.last_l0_seq + 1)


def _position_of(offset: Offset) -> Position:
    return Position(WalId(int(offset["wal_id"])), int(offset["seq"]))
