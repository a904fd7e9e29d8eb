"""A stream of changes: optionally a copy of the whole database, then the WAL files and bulk loads in commit order.

Spark stores the end of a micro-batch (`flagstone.spark.stream.offsets`) before it runs the batch, so a repeated batch
reads exactly the same. A WAL file holds whole batches of writes: no transaction is ever split between micro-batches.
A bulk load is a micro-batch of its own, at the end of which `wal_id` is unchanged and `seq` is the sequence number of
the load.

A retention checkpoint, created before the first offset, keeps WAL files and SSTs of loads until Spark commits a batch.
What comes next is decided by `flagstone.changes.step.plan_step`, as in the change reader.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxFiles,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from flagstone.changes.change import WalFile, WalFiles
from flagstone.changes.retention import ConsumerPosition, RetentionCheckpoint
from flagstone.changes.step import ChangesMissing, ReadFiles, ReadLoad, check_gapless, plan_step
from flagstone.errors import InvalidRequest
from flagstone.loads.edit import VisibleLoad, find_load, next_load
from flagstone.loads.rows import fetch_load_ssts, load_gone
from flagstone.metadata.annotations import Position
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, ulid_text
from flagstone.spark.address import open_store
from flagstone.spark.stream.bases import Bases, position_at, version_at
from flagstone.spark.stream.former import BaseState
from flagstone.spark.stream.lag import Lag, measure_lag
from flagstone.spark.stream.offsets import (
    BEGIN,
    CONSUMER,
    OVERWRITTEN,
    REPLACES,
    Offset,
    is_begin,
    is_past,
    offset_at,
    plan_end,
    position_of,
    until_fence,
    version_of,
    with_version,
)
from flagstone.spark.stream.options import StreamOptions
from flagstone.spark.stream.partitions import (
    NO_VERSIONS,
    LoadPartition,
    MarkerPartition,
    RangeDeletePartition,
    ReplacePartition,
    SnapshotPartition,
    StreamPartition,
    Versions,
    WalPartition,
)
from flagstone.spark.stream.range_deletes import check_shown
from flagstone.spark.stream.rows import BatchRows, last_seq_before, snapshot_parts, wal_files
from flagstone.spark.stream.shape import CHANGE_SCHEMA, NO_TABLE, StoredTable, StreamShape, fetch_table
from flagstone.types import WalId

_POLL_S: Final = 1.0
"""How long a query that has read everything waits before it polls the store."""

_COUNTS: Final = 4096
"""Of how many WAL files the number of rows is remembered."""


class ChangeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets and rows for Spark. One process on the driver's machine requests offsets, tasks read rows."""

    def __init__(
        self,
        options: StreamOptions,
        schema: StructType = CHANGE_SCHEMA,
        *,
        stored: StoredTable = NO_TABLE,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._options = options
        self._shape = StreamShape.of(schema, options, stored)
        self._clock = clock
        self._until: Position | None = None
        self._idle_until = -math.inf
        self._position: ConsumerPosition | None = None
        self._manifest_store: ManifestStore | None = None
        self._base_states: Bases | None = None
        self._base: BaseState | None = None
        self._lag: Lag | None = None
        self._retention: RetentionCheckpoint | None = None
        self._lapsed = False
        self._counts: dict[WalId, int] = {}
        self._fitting: set[int] = set()

    def __getstate__(self) -> dict[str, Any]:
        # The position belongs to the process that gives out offsets; tasks need none.
        return {
            **vars(self),
            "_position": None,
            "_retention": None,
            "_manifest_store": None,
            "_base_states": None,
        }

    # -- on the driver ------------------------------------------------------------------------------------

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        if self._options.consumer is not None:
            return dict(BEGIN)
        # Spark stores it with the offsets of the query, so the query has the same name after a restart.
        return {**BEGIN, CONSUMER: f"spark query {ulid_text(SYSTEM_IDS.ulid(self._clock.now_ms()))}"}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self._options
        if options.max_rows is not None:
            return ReadMaxRows(options.max_rows)
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
        try:
            return self._plan(start, limit)
        except InvalidRequest as error:
            if self._lapsed:
                raise self._lapse(start, error) from error
            if self._was_passed(start):
                raise self._shared(start, error) from error
            raise

    def reportLatestOffset(self) -> dict[str, int] | None:  # noqa: N802
        """The end of the changes, and how much of them the present micro-batch leaves; Spark shows it as it is."""
        return None if self._lag is None else self._lag.report(self._clock.now_ms())

    def _plan(self, start: Offset, limit: ReadLimit) -> Offset:
        consumer = self._consumer(start)
        if is_begin(start):
            return self._first_offset(consumer, start)
        consumer.tend()
        # Spark calls this in a loop while nothing is new; only one call per interval may reach the store.
        if self._clock.monotonic() < self._idle_until:
            return start
        if start.get(OVERWRITTEN):
            return self._copy(start)
        try:
            self._check_schema(start)
            return self._next_offset(start, limit)
        except ChangesMissing:
            if self._options.on_overwrite == "fail":
                raise
            return self._go_on(start)

    def _next_offset(self, start: Offset, limit: ReadLimit) -> Offset:
        at, until = position_of(start), self._until
        wal = self._wal()
        files = list(wal.files(at.next_id))
        # Read after the listing: a load that came before one of these files is in this manifest. If there are files, it
        # must be the latest manifest beyond doubt, because Spark would repeat a wrong batch for ever.
        manifest = (self._manifests().require_latest() if files else self._manifests().poll()).value
        allowed = files if self._options.on_overwrite == "fail" else until_fence(files)
        stop = plan_end(
            allowed, at.next_id, limit, None if until is None else until.next_id, rows_of=self._count_rows
        )
        step = plan_step(
            at, self._next_load(manifest, at), stop=WalId(stop), allow_gaps=self._options.allow_gaps
        )
        end = start
        if isinstance(step, ReadLoad):
            check_shown(step.load, self._options, typed=self._shape.row_mapping is not None)
            end = offset_at(Position(at.next_id, step.load.seq), of=start)
        elif isinstance(step, ReadFiles):
            if self._options.on_overwrite != "fail":
                self._check_first(allowed, at)
            end = offset_at(Position(step.stop, last_seq_before(wal, step.stop, at)), of=start)
        elif until is None or at.next_id < until.next_id:
            if files and files[0].wal_id > at.next_id:
                wal.read(at.next_id)  # raises the error for a deleted file
            self._check_wal_has_all(at, manifest)
            self._idle_until = self._clock.monotonic() + _POLL_S
        self._lag = measure_lag(files, manifest, position_of(end))
        if self._options.needs_base:
            base = self._base_at(start)
            planned = sum(file.size for file in files if file.wal_id < end["wal_id"])
            self._bases(start).tend(position_of(end), base, planned)
        return end

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        if start == end:  # nothing is new; the copy must not be read twice
            return []
        parts = self._parts(start, end)
        if not end.get(OVERWRITTEN):
            versions = Versions(version_of(end), version_of(start if end.get(REPLACES) else end))
            for part in parts:
                part.versions = versions
        return parts

    def _parts(self, start: Offset, end: Offset) -> Sequence[StreamPartition]:
        begin, checkpoint = position_of(start), end["checkpoint"]
        if end.get(OVERWRITTEN):
            return [MarkerPartition(begin.after_seq)]
        if checkpoint:
            parts = snapshot_parts(self._options, checkpoint)
            if not end.get(REPLACES):
                return [SnapshotPartition(keys, checkpoint) for keys in parts]
            base, seq = self._base_at(start), int(end["seq"])
            return [ReplacePartition(keys, checkpoint, seq, begin.next_id, base) for keys in parts]
        if is_begin(start):
            return []
        former = self._base_at(start) if self._options.before else None
        stop = int(end["wal_id"])
        if begin.next_id == stop:
            return self._load_partitions(int(end["seq"]), stop, former)
        groups = min(self._options.partitions, stop - begin.next_id)
        edges = [begin.next_id + (stop - begin.next_id) * at // groups for at in range(groups + 1)]
        return [WalPartition(a, b, begin, former) for a, b in pairwise(edges)]

    def commit(self, end: Offset) -> None:
        if self._position is not None:
            # The WAL since the base is needed as well.
            self._position.use(position_of(end) if self._base is None else self._base.position)

    def stop(self) -> None:
        if self._position is not None:
            self._position.save()

    # -- in tasks -----------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a partition; none for the partition that Spark adds when `partitions` returns none."""
        versions = partition.versions if isinstance(partition, StreamPartition) else NO_VERSIONS
        return self._shape.shaped(BatchRows(self._options).read(partition), versions)

    # -- parts --------------------------------------------------------------------------------------------

    def _wal(self) -> WalFiles:
        return wal_files(self._options.address)

    def _count_rows(self, wal_id: WalId) -> int:
        """The rows of a WAL file, which never changes once it has rows."""
        if wal_id not in self._counts:
            rows = self._wal().find_rows(wal_id)
            self._counts = {known: count for known, count in self._counts.items() if known > wal_id - _COUNTS}
            self._counts[wal_id] = 0 if rows is None else rows.count
        return self._counts[wal_id]

    def _name(self, offset: Offset) -> str:
        name = self._options.consumer or offset.get(CONSUMER)
        if not name:
            raise InvalidRequest(
                "this query began with the option 'consumer', and does not have it now; give it the same name again"
            )
        return str(name)

    def _consumer(self, start: Offset) -> ConsumerPosition:
        """The consumer, whose retention checkpoint keeps the WAL from `start` on."""
        if self._position is None:
            store, _ = open_store(self._options.address)
            checkpoint = RetentionCheckpoint(
                self._manifests(),
                store,
                self._name(start),
                lifetime=self._options.retention_lifetime,
                clock=self._clock,
                ids=SYSTEM_IDS,
            )
            self._lapsed = not is_begin(start) and checkpoint.find() is None
            self._retention = checkpoint
            position = ConsumerPosition(checkpoint, self._clock)
            begin = None if is_begin(start) else position_of(start)
            if begin is not None and self._options.needs_base:
                begin = self._base_at(start).position
            position.begin(begin, self._wal())
            self._position = position
        return self._position

    def _was_passed(self, start: Offset) -> bool:
        """Whether another query with the same name has moved the retention checkpoint past this one."""
        if is_begin(start) or self._retention is None:
            return False
        self._retention.find()
        return is_past(self._retention.found, position_of(start))

    def _shared(self, start: Offset, error: InvalidRequest) -> InvalidRequest:
        """The error of a query whose changes are gone because another query with its name has read them."""
        return InvalidRequest(
            f"{error}. Another query with the consumer name {self._name(start)!r} has read further than this one, and "
            "changes are kept only for the further one: give each query its own option 'consumer', and start this one "
            "over with an empty checkpointLocation and starting=snapshot"
        )

    def _lapse(self, start: Offset, error: InvalidRequest) -> InvalidRequest:
        """The error of a query that was away for longer than its retention checkpoint."""
        lifetime = self._options.retention_lifetime
        kept = "" if lifetime is None else f", {lifetime} after the query last renewed it"
        return InvalidRequest(
            f"{error}. When this query started, the retention checkpoint of its consumer {self._name(start)!r} was "
            f"gone: it had expired{kept}, or was released. Start over with a new copy of the database: an empty "
            "checkpointLocation and starting=snapshot. The option 'pin_lifetime' sets how long changes are kept for a "
            "query that does not run"
        )

    def _first_offset(self, consumer: ConsumerPosition, begin: Offset) -> Offset:
        """The end of the first micro-batch: the copy, or an empty batch at the position where the query starts."""
        starting = self._options.starting
        if starting == "snapshot":
            return self._copy(begin)
        if starting == "earliest":
            first = Position(self._wal().oldest())
        elif starting == "latest" and self._options.needs_base:
            self._base = self._bases(begin).create()
            first = self._base.position
        elif starting == "latest":
            first = self._end()
        else:
            first = Position(WalId(int(starting)))
        consumer.begin(first, self._wal())
        version = fetch_table(self._options).version if starting == "latest" else None
        return with_version(offset_at(first, of=begin), version, of=begin)

    def _copy(self, start: Offset) -> Offset:
        """The end of a micro-batch that copies the database as it is now."""
        created = self._options.address.admin().create_checkpoint(
            self._options.snapshot_lifetime, name=f"spark stream {self._name(start)}"
        )
        if self._options.needs_base:
            self._base = self._bases(start).create(created.id)
            position = self._base.position
        else:
            position = position_at(self._options, str(created.id))
        offset = offset_at(position, checkpoint=str(created.id), of=start)
        return with_version(offset, version_at(self._options, str(created.id)), of=start)

    def _check_schema(self, start: Offset) -> None:
        """Raise if the columns of the stream cannot hold the changes that come next.

        Raises:
            ChangesMissing: so it is, and the stream can go on with a copy instead.
            InvalidRequest: so it is, and it cannot.

        """
        number = version_of(start)
        if number is None or number in self._fitting:
            return
        try:
            self._shape.at(number)
        except InvalidRequest as error:
            going = self._options.on_overwrite
            same = going == "delete_and_put" and not self._options.before and self._shape.has_key_of(number)
            raise (ChangesMissing if going == "marker" or same else InvalidRequest)(str(error)) from error
        self._fitting.add(number)

    def _go_on(self, start: Offset) -> Offset:
        """The end of a micro-batch that goes on where changes are missing: after an overwrite or a restored state.

        A marker is a micro-batch of its own, before that of the copy: rows of one micro-batch have no order.
        """
        if self._options.on_overwrite == "marker":
            return {**offset_at(position_of(start), of=start), OVERWRITTEN: True}
        former = self._base_at(start)
        end = {**self._copy(start), REPLACES: True}
        self._base = former  # until the micro-batch is done
        return end

    def _check_first(self, files: Sequence[WalFile], at: Position) -> None:
        """Raise `ChangesMissing` if sequence numbers are missing before the first rows of the files."""
        for file in files:
            rows = self._wal().find_rows(file.wal_id) if file.size else None
            if rows is not None and rows.count:
                check_gapless(at.after_seq, rows.first_seq)
                return

    def _bases(self, offset: Offset) -> Bases:
        if self._base_states is None:
            self._base_states = Bases(self._options, self._name(offset), self._manifests(), self._clock)
        return self._base_states

    def _base_at(self, start: Offset) -> BaseState:
        self._base = self._bases(start).at(position_of(start))
        return self._base

    def _end(self) -> Position:
        """The position after everything in the WAL and in SSTs."""
        last_seq = self._manifests().require_latest().value.last_l0_seq
        wal = self._wal()
        files = list(wal.files())
        if not files:
            return Position(WalId(1), last_seq)
        end = WalId(files[-1].wal_id + 1)
        return Position(end, last_seq_before(wal, end, Position(files[0].wal_id, last_seq)))

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

    def _load_partitions(self, seq: int, next_id: int, base: BaseState | None) -> list[StreamPartition]:
        load = find_load(self._manifests().require_latest().value, seq)
        if load is None and not self._options.allow_gaps:
            raise load_gone(seq)
        if load is None or load.replaces:
            return []
        if load.deleted is not None:
            # Planned by a run with other options, perhaps.
            check_shown(load, self._options, typed=self._shape.row_mapping is not None)
            return [RangeDeletePartition(load)]
        return [LoadPartition(load, sst, next_id, base) for sst in fetch_load_ssts(self._manifests(), load)]

    def _check_wal_has_all(self, at: Position, latest: Manifest) -> None:
        """Raise if the SSTs have rows that are neither in the WAL nor in a load: the stream cannot deliver them."""
        if self._options.allow_gaps or not 0 < at.after_seq < latest.last_l0_seq:
            return
        # List again after the manifest was read: the file may have been written since.
        if next(self._wal().files(at.next_id), None) is None:
            check_gapless(at.after_seq, latest.last_l0_seq + 1)
