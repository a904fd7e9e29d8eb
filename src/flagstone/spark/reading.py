"""A DataFrame over one moment of a database: pinned and planned on the driver, read by tasks on their own.

Tasks open the pinned state and read their key range straight from the store. What the log held at that moment and no
table does yet, every task reads for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from flagstone.config import ReaderSettings
from flagstone.db.admin import Admin
from flagstone.db.reader import DbReader, open_reader
from flagstone.errors import InvalidRequest
from flagstone.maintenance.compaction.inputs import TableFetcher
from flagstone.maintenance.compaction.split import Anchor, sample_view
from flagstone.metadata.manifest import Manifest
from flagstone.read.scan import ScanRequest
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.pool import shared_pool
from flagstone.spark.causes import in_task
from flagstone.spark.direct import only_source, read_directly
from flagstone.spark.filters import Wanted, narrow
from flagstone.spark.options import ReadOptions
from flagstone.spark.partitioning import plan_count, plan_partitions, split_points
from flagstone.spark.plan import open_store
from flagstone.spark.progress import database_name
from flagstone.spark.schema import arrow_schema, check_read_schema
from flagstone.spark.structure import narrow_range
from flagstone.store.paths import DbPaths
from flagstone.views.checkpoint import parse_checkpoint_id, require_live_checkpoint

_log = logging.getLogger("flagstone.spark")

CHECKPOINT_NAME: Final = "spark read"

_MAX_INDEXES: Final = 1024
"""Of a database with more tables than this, tables count whole: their borders are fine enough."""

_POINTS_PER_TASK: Final = 1024


@dataclass(frozen=True, slots=True)
class PinnedRead:
    """One moment of a database, held by a checkpoint."""

    options: ReadOptions
    checkpoint: str

    def open(self) -> DbReader:
        """A reader of that moment; it writes nothing and follows nobody."""
        options = self.options
        return open_reader(
            options.place.path,
            **options.place.arguments,
            checkpoint=self.checkpoint,
            as_of=options.as_of,
            merge_operator=options.load_merge_operator(),
            settings=ReaderSettings(block_cache_bytes=0),
        )


def pin(options: ReadOptions) -> PinnedRead:
    """Hold what the options say with a checkpoint: the one they name, or a new one that expires by itself.

    A crash afterwards leaves a checkpoint that expires.

    Raises:
        InvalidRequest: there is no database, no such checkpoint, or the moment is not to be had any more.

    """
    place = options.place
    admin = Admin(place.path, **place.arguments)
    options.load_merge_operator()
    if options.checkpoint is not None:
        held = parse_checkpoint_id(options.checkpoint)
        require_live_checkpoint(admin.manifest().value, held, now_s=SYSTEM_CLOCK.now_ms() // 1000)
        return PinnedRead(options, str(held))
    if options.as_of is None:
        created = admin.create_checkpoint(options.lifetime, name=CHECKPOINT_NAME)
        return PinnedRead(options, str(created.id))
    # Finds the stored state that shows the moment, and which checkpoint, if any, it belongs to.
    with open_reader(place.path, **place.arguments, as_of=options.as_of) as reader:
        status = reader.status()
        created = admin.create_checkpoint(options.lifetime, source=status["checkpoint"], name=CHECKPOINT_NAME)
    # From here on by number: tasks need not find out again what was current at a time.
    return PinnedRead(replace(options, as_of=status["last_seq"]), str(created.id))


@dataclass
class KeyPartition(InputPartition):
    """What one task reads."""

    wanted: Wanted

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(None)
        self.wanted = wanted


class FlagstoneReader(DataSourceReader):
    """Plans and reads. Pickles; opens the database anew wherever it arrives."""

    def __init__(self, pinned: PinnedRead, schema: StructType) -> None:
        structure = pinned.options.structure
        if structure is None:
            check_read_schema(schema)
        self._structure = None if structure is None else structure.for_reading(schema)
        self._pinned = pinned
        self._schema = schema
        wanted, points = Wanted(pinned.options.keys), pinned.options.points
        self._wanted = wanted if points is None else wanted.among(points)

    def partitions(self) -> Sequence[InputPartition]:
        return self.plan()

    def plan(self) -> list[KeyPartition]:
        """The wanted keys in parts of about equal size."""
        options, wanted = self._pinned.options, self._wanted
        if wanted.empty:
            return [KeyPartition(replace(wanted, points=()))]
        if wanted.points is not None:
            count = plan_count(
                len(wanted.points), partitions=options.partitions, partition_bytes=_POINTS_PER_TASK
            )
            return [
                KeyPartition(replace(wanted, points=group)) for group in split_points(wanted.points, count)
            ]
        with self._pinned.open() as reader:
            manifest = reader.manifest()
        anchors = list(fetch_anchors(options, manifest, wanted))
        count = plan_count(
            sum(anchor.size for anchor in anchors),
            partitions=options.partitions,
            partition_bytes=options.partition_bytes,
        )
        planned = [KeyPartition(Wanted(keys)) for keys in plan_partitions(anchors, wanted.keys, count)]
        _log.info(
            "planned read database=%s checkpoint=%s partitions=%d bytes=%d",
            database_name(options.place),
            self._pinned.checkpoint,
            len(planned),
            sum(anchor.size for anchor in anchors),
        )
        return planned

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, KeyPartition), "partitions() makes no others"
        wanted = partition.wanted
        if wanted.points == ():
            return
        schema, structure = arrow_schema(self._schema), self._structure
        columns = tuple(self._schema.fieldNames())
        with in_task(), self._pinned.open() as reader:
            if structure is None:
                yield from _shaped(self._rows(reader, wanted, columns), schema)
                return
            raw = self._rows(reader, wanted, structure.raw_columns(columns))
            yield from _shaped((structure.decode(batch, schema) for batch in raw), schema)

    def _rows(self, reader: DbReader, wanted: Wanted, columns: Sequence[str]) -> Iterable[pa.RecordBatch]:
        options = self._pinned.options
        if wanted.points is not None:
            return [_point_rows(reader, wanted.points, columns, options)]
        status = reader.status()
        store, paths = open_store(options.place)
        # Rows of the log would have to be merged in; where they are, the ordinary scan does that.
        alone = only_source(reader.manifest(), wanted.keys, paths) if not status["memtable_bytes"] else None
        if alone is not None:
            request = ScanRequest(
                keys=wanted.keys,
                max_seq=status["last_seq"],
                now_ms=SYSTEM_CLOCK.now_ms(),
                include_expired=options.include_expired,
                merge_operator=options.load_merge_operator(),
                whole_rows=True,
            )
            return read_directly(store, alone, request, columns)
        batches: Iterable[pa.RecordBatch] = reader.scan_arrow(
            wanted.keys.start,
            wanted.keys.stop,
            columns=columns,
            batch_rows=options.batch_rows,
            include_expired=options.include_expired,
        )
        return batches


class PushingReader(FlagstoneReader):
    """The same, with key filters pushed down. Spark refuses a reader that can do this where it is switched off."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Take the filters on keys; give back the others for Spark to apply."""
        if self._structure is not None:
            found = narrow_range(self._structure, arrow_schema(self._schema), filters)
            self._wanted = self._wanted.within(found)
            yield from filters
            return
        for each in filters:
            narrowed = narrow(self._wanted, each)
            if narrowed is None:
                yield each
            else:
                self._wanted = narrowed


def fetch_anchors(options: ReadOptions, manifest: Manifest, wanted: Wanted) -> Iterator[Anchor]:
    """How many bytes begin at which key, of all tables that have wanted keys."""
    store, own = open_store(options.place)
    fetcher = TableFetcher(store)
    found = []
    for view in manifest.views:
        table = manifest.table(view)
        keys = view.effective_range(table.info).intersect(wanted.keys)
        if not keys.empty:
            owner = manifest.path_of_owner(table.id)
            found.append((table, (own if owner is None else DbPaths(owner)).table(table.id), keys))
    if len(found) > _MAX_INDEXES:
        for table, _, keys in found:
            yield Anchor(keys.start or b"", table.info.estimated_size)
        return
    indexes = shared_pool().map_ordered(lambda each: fetcher.fetch_index(each[0], each[1]), found)
    for (table, _, keys), index in zip(found, indexes, strict=True):
        sampled = sample_view(index, keys, table.info.estimated_size)
        # Its first block stands under an empty key in the index; here it begins where the table does.
        stride = index.stops[min(len(index), -(-len(index) // 128)) - 1] - index.offsets[0]
        yield Anchor(keys.start or b"", stride)
        yield from sampled.anchors


def _point_rows(
    reader: DbReader, points: Sequence[bytes], columns: Sequence[str], options: ReadOptions
) -> pa.RecordBatch:
    """The rows of some keys; filters spare the tables that do not have them."""
    usable = [key for key in points if key]
    if set(columns) <= {"key", "value"}:
        values = reader.multi_get(usable, include_expired=options.include_expired)
        found = [(key, value) for key, value in zip(usable, values, strict=True) if value is not None]
        cells: dict[str, list[Any]] = {
            "key": [key for key, _ in found],
            "value": [value for _, value in found],
        }
    else:
        rows = [reader.get_row(key, include_expired=options.include_expired) for key in usable]
        cells = {name: [getattr(row, name) for row in rows if row is not None] for name in columns}
    return pa.RecordBatch.from_arrays([pa.array(cells[name]) for name in columns], names=list(columns))


def _shaped(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The batches with exactly the types Spark expects."""
    for batch in batches:
        try:
            arrays = [_cast(batch.column(place), field.type) for place, field in enumerate(schema)]
        except pa.ArrowInvalid as error:
            raise InvalidRequest(
                f"a row does not fit the schema that was asked for: {error}; read keys and values as binary"
            ) from None
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(column: Any, kind: pa.DataType) -> Any:
    return column if column.type == kind else column.cast(kind)
