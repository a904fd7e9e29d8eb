"""A stream of changes: the whole database at one moment, if wanted, and then its log, file by file.

An offset says how far a query has come: `wal_id` is the next file of the log, `seq` the last sequence number before
it, and `checkpoint` the one that a copy of the whole database was read from. Spark stores the end of a micro-batch
before it runs it, so a batch that is repeated reads exactly the same. A file holds whole batches of writes: no
transaction is ever split between two micro-batches.

The log is kept for the consumer from before the first offset is given out until Spark says that a batch is done.
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

from flagstone.db.admin import Admin
from flagstone.errors import InvalidRequest
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.runtime.pool import shared_pool
from flagstone.spark.filters import Wanted
from flagstone.spark.options import ReadOptions
from flagstone.spark.plan import open_store
from flagstone.spark.reading import FlagstoneReader, KeyPartition, PinnedRead
from flagstone.spark.schema import arrow_schema, read_schema
from flagstone.spark.stream_options import StreamOptions
from flagstone.store.resolve import resolve_wal_store
from flagstone.store.retrying import patient
from flagstone.types import WalId
from flagstone.wal.changes import Change, change_of
from flagstone.wal.encoding import decode_wal
from flagstone.wal.fetching import fetch_in_order
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
_ROWS_PER_BATCH: Final = 16_384
_LOOK_EVERY_S: Final = 1.0
"""How long a query that has read everything waits before it looks for more."""

Offset = dict[str, Any]
BEGIN: Final[Offset] = {"wal_id": 0, "seq": 0, "checkpoint": ""}
"""Where a query stands that has not read anything."""


@dataclass
class LogPartition(InputPartition):
    """Files of the log from `first` up to, not including, `stop`; `after_seq` is the last number before, if known."""

    first: int
    stop: int
    after_seq: int | None

    def __init__(self, first: int, stop: int, after_seq: int | None) -> None:
        super().__init__(None)
        self.first, self.stop, self.after_seq = first, stop, after_seq


@dataclass
class SnapshotPartition(InputPartition):
    """Some keys of the database as the checkpoint shows it."""

    wanted: Wanted
    checkpoint: str

    def __init__(self, wanted: Wanted, checkpoint: str) -> None:
        super().__init__(None)
        self.wanted, self.checkpoint = wanted, checkpoint


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
        self._until: int | None = None
        self._idle_until = -math.inf
        self._position: PinnedPosition | None = None

    def __getstate__(self) -> dict[str, Any]:
        # The pin belongs to the process that gives out offsets; tasks need none.
        return {**vars(self), "_position": None}

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
        self._until = files[-1].wal_id + 1 if files else 1

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """How far the next micro-batch goes.

        Raises:
            InvalidRequest: a file was removed before it was read, or the database changed without its log.

        """
        pinned = self._pinned(start)
        if start == BEGIN:
            return self._first_offset(pinned)
        pinned.tend()
        first = int(start["wal_id"])
        if self._until is not None and first >= self._until:
            return start
        # Spark asks again and again while there is nothing to do; the store should not notice.
        if self._clock.monotonic() < self._idle_until:
            return start
        log = self._log()
        files = log.files(first)
        end = plan_end(files, first, limit, self._until)
        if end == first:
            if files and files[0].wal_id > first:
                log.read(first)  # says that it was removed, and what is left
            self._check_log_is_all(start)
            self._idle_until = self._clock.monotonic() + _LOOK_EVERY_S
            return start
        return {"wal_id": end, "seq": self._last_seq(end, int(start["seq"]), first), "checkpoint": ""}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        if start == end:  # nothing is new, and a copy must not come twice
            return []
        if end["checkpoint"]:
            snapshot = self._snapshot(end["checkpoint"])
            return [SnapshotPartition(part.wanted, end["checkpoint"]) for part in snapshot.plan()]
        first, stop = int(start["wal_id"]) or int(end["wal_id"]), int(end["wal_id"])
        if first >= stop:
            return []
        groups = min(self._options.partitions, stop - first)
        edges = [first + (stop - first) * at // groups for at in range(groups + 1)]
        known: list[int | None] = [int(start["seq"]), *([None] * (groups - 1))]
        return [LogPartition(a, b, seq) for (a, b), seq in zip(pairwise(edges), known, strict=True)]

    def commit(self, end: Offset) -> None:
        if self._position is not None:
            self._position.use(WalId(int(end["wal_id"])), int(end["seq"]))

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
            for changes in _chunks(self._changes(partition), _ROWS_PER_BATCH):
                columns = zip(*changes, strict=True)
                arrays = [
                    pa.array(list(cells), field.type) for cells, field in zip(columns, schema, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _changes(self, partition: LogPartition) -> Iterator[Change]:
        seen = partition.after_seq
        if seen is None:
            seen = self._last_seq(partition.first, 0, 1)
        for wal_id, rows in self._files(range(partition.first, partition.stop)):
            for row in rows:
                if seen and row[1] > seen + 1 and not self._options.allow_gaps:
                    raise _gap(seen, row[1])
                seen = max(seen, row[1])
                yield change_of(row, wal_id)

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
            store, paths = open_store(self._options.place)
            pin = LogPin(
                ManifestStore(store, paths),
                store,
                self._options.consumer,
                lifetime=self._options.pin_lifetime,
                clock=self._clock,
                ids=SYSTEM_IDS,
            )
            position = PinnedPosition(pin, self._clock)
            position.begin(WalId(int(start["wal_id"])) if start != BEGIN else None, self._oldest)
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
            first = int(self._oldest())
        elif starting == "latest":
            files = self._log().files()
            first = files[-1].wal_id + 1 if files else 1
        else:
            first = int(starting)
        pinned.begin(WalId(first), self._oldest)
        return {"wal_id": first, "seq": 0, "checkpoint": ""}

    def _last_seq(self, end: int, known: int, first: int) -> int:
        """The last sequence number in the files from `first` up to `end`, or `known` where they are all empty."""
        for wal_id in range(end - 1, first - 1, -1):
            try:
                changes = self._log().read(wal_id).changes
            except InvalidRequest:
                return known
            if changes:
                return max(known, changes[-1].seq)
        return known

    def _check_log_is_all(self, start: Offset) -> None:
        """Raise if rows came into the database without the log: waiting for them there would be in vain."""
        seen = int(start["seq"])
        store, paths = open_store(self._options.place)
        latest = ManifestStore(store, paths).require_latest().value
        if self._options.allow_gaps or not 0 < seen < latest.last_l0_seq:
            return
        # Asked again after the manifest: the file may have been written since.
        if not self._log().files(int(start["wal_id"])):
            raise _gap(seen, latest.last_l0_seq + 1)


def _gap(seen: int, found: int) -> InvalidRequest:
    return InvalidRequest(
        f"sequence numbers {seen + 1} to {found - 1} are not in the log: they came by a bulk load or from a writer "
        "without a log, or an older state was restored. Begin again with a new Spark checkpoint and a copy of the "
        "database, or set allow_gaps"
    )


def _chunks(changes: Iterable[Change], size: int) -> Iterator[list[Change]]:
    chunk: list[Change] = []
    for change in changes:
        chunk.append(change)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
