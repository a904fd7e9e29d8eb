"""A DataFrame over one moment of a database: pinned and planned on the driver, read by tasks on their own.

Tasks open the pinned state and read their key range straight from the store. What the log held at that moment and no
table does yet, every task reads for itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from flagstone.clones.checkpoint import parse_checkpoint_id, require_live_checkpoint
from flagstone.compaction.inputs import Anchor, Part, Source, SstFetcher, sample_view
from flagstone.config import ReaderSettings
from flagstone.db.reader.reader import DbReader, open_reader
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.columns import SCHEMA
from flagstone.metadata.manifest import Manifest
from flagstone.read.arrow import ArrowSink
from flagstone.read.scan_cursor import Chunk, ScanRequest
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.pool import shared_pool
from flagstone.spark.address import open_store
from flagstone.spark.error_translation import in_task
from flagstone.spark.filters import Wanted, narrow, narrow_range
from flagstone.spark.options import ReadOptions
from flagstone.spark.row_mapping import arrow_schema, check_read_schema
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import KeyRange

_log = logging.getLogger("flagstone.spark")

CHECKPOINT_NAME: Final = "spark read"

_MAX_INDEXES: Final = 1024
"""Of a database with more tables than this, tables count whole: their borders are fine enough."""

_POINTS_PER_TASK: Final = 1024


@dataclass(frozen=True, slots=True)
class CheckpointRead:
    """One moment of a database, held by a checkpoint."""

    options: ReadOptions
    checkpoint: str

    def open(self) -> DbReader:
        """A reader of that moment; it writes nothing and follows nobody."""
        options = self.options
        return open_reader(
            options.address.path,
            **options.address.arguments,
            checkpoint=self.checkpoint,
            as_of=options.as_of,
            merge_operator=options.load_merge_operator(),
            settings=ReaderSettings(block_cache_bytes=0),
        )


def hold_checkpoint(options: ReadOptions) -> CheckpointRead:
    """Hold what the options say with a checkpoint: the one they name, or a new one that expires by itself.

    A crash afterwards leaves a checkpoint that expires.

    Raises:
        InvalidRequest: there is no database, no such checkpoint, or the moment is not to be had any more.

    """
    address = options.address
    admin = address.admin()
    options.load_merge_operator()
    if options.checkpoint is not None:
        held = parse_checkpoint_id(options.checkpoint)
        require_live_checkpoint(admin.manifest().value, held, now_s=SYSTEM_CLOCK.now_ms() // 1000)
        return CheckpointRead(options, str(held))
    if options.as_of is None:
        created = admin.create_checkpoint(options.lifetime, name=CHECKPOINT_NAME)
        return CheckpointRead(options, str(created.id))
    # Finds the stored state that shows the moment, and which checkpoint, if any, it belongs to.
    with open_reader(address.path, **address.arguments, as_of=options.as_of) as reader:
        status = reader.status()
        created = admin.create_checkpoint(options.lifetime, source=status["checkpoint"], name=CHECKPOINT_NAME)
    # From here on by number: tasks need not find out again what was current at a time.
    return CheckpointRead(replace(options, as_of=status["last_seq"]), str(created.id))


@dataclass
class KeyPartition(InputPartition):
    """What one task reads."""

    wanted: Wanted

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(None)
        self.wanted = wanted


class FlagstoneReader(DataSourceReader):
    """Plans and reads. Pickles; opens the database anew wherever it arrives."""

    def __init__(self, pinned: CheckpointRead, schema: StructType) -> None:
        row_mapping = pinned.options.row_mapping
        if row_mapping is None:
            check_read_schema(schema)
        self._row_mapping = None if row_mapping is None else row_mapping.for_reading(schema)
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
            options.address.name,
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
        schema, row_mapping = arrow_schema(self._schema), self._row_mapping
        columns = tuple(self._schema.fieldNames())
        with in_task(), self._pinned.open() as reader:
            if row_mapping is None:
                yield from _shaped(self._rows(reader, wanted, columns), schema)
                return
            raw = self._rows(reader, wanted, row_mapping.raw_columns(columns))
            yield from _shaped((row_mapping.decode(batch, schema) for batch in raw), schema)

    def _rows(self, reader: DbReader, wanted: Wanted, columns: Sequence[str]) -> Iterable[pa.RecordBatch]:
        options = self._pinned.options
        if wanted.points is not None:
            return [_point_rows(reader, wanted.points, columns, options)]
        status = reader.status()
        store, paths = open_store(options.address)
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
        if self._row_mapping is not None:
            found = narrow_range(self._row_mapping, arrow_schema(self._schema), filters)
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
    store, own = open_store(options.address)
    fetcher = SstFetcher(store)
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
            arrays = [_cast(batch.column(at), field.type) for at, field in enumerate(schema)]
        except pa.ArrowInvalid as error:
            raise InvalidRequest(
                f"a row does not fit the schema that was asked for: {error}; read keys and values as binary"
            ) from None
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(column: Any, kind: pa.DataType) -> Any:
    return column if column.type == kind else column.cast(kind)


_FETCH_BYTES: Final = 2 * 1024 * 1024
"""From the first request on: each becomes a batch, and Spark likes batches of ten thousand rows and more."""

_FETCH_TASKS: Final = 4


def only_source(manifest: Manifest, keys: KeyRange, paths: DbPaths) -> list[Part] | None:
    """The parts of the one run or L0 table that has these keys, in order; None when there are several. Pure."""
    if manifest.segments or manifest.segment_extractor_name is not None:
        return None
    found: list[list[Part]] = []
    for views in (*((view,) for view in manifest.tree.l0), *(run.views for run in manifest.tree.runs)):
        parts = []
        for view in views:
            table = manifest.table(view)
            inside = view.effective_range(table.info).intersect(keys)
            if not inside.empty:
                owner = manifest.path_of_owner(table.id)
                parts.append(
                    Part(table, (paths if owner is None else DbPaths(owner)).table(table.id), inside)
                )
        if parts:
            found.append(parts)
    return None if len(found) > 1 else found[0] if found else []


def read_directly(
    store: ObjectStore, parts: Sequence[Part], request: ScanRequest, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """The rows that a scan of `request` would give, of the only source that has any.

    Raises:
        CorruptData: naming the object.
        Unavailable: the store did not answer, or a table is gone.

    """
    sink = ArrowSink(request, pa.schema([SCHEMA.field(name) for name in columns]))
    source = Source(
        parts,
        SstFetcher(store),
        pool=shared_pool(),
        bytes_to_fetch=_FETCH_BYTES,
        max_fetch_tasks=_FETCH_TASKS,
        first_bytes=_FETCH_BYTES,
    )
    try:
        while (chunk := source.next_chunk()) is not None:
            out: Chunk = []
            try:
                sink.add_chunk(chunk.data, chunk.bounds, chunk.low, chunk.high, out)
            except CorruptData as error:
                raise error.within(chunk.part.path) from None
            yield from out
        rest: Chunk = []
        sink.finish(rest)
        yield from rest
    finally:
        source.close()


def plan_count(total_bytes: int, *, partitions: int | None, partition_bytes: int) -> int:
    """How many partitions: as asked for, or as many as make each about `partition_bytes`."""
    return partitions if partitions is not None else max(1, -(-total_bytes // partition_bytes))


def plan_partitions(anchors: Iterable[Anchor], keys: KeyRange, count: int) -> list[KeyRange]:
    """Ranges that touch each other and together are `keys`: `count`, or fewer where there are too few anchors.

    An anchor says how many bytes begin at its key; those of all tables of all levels count together.
    """
    inside = sorted((anchor for anchor in anchors if anchor.key in keys), key=lambda anchor: anchor.key)
    total = sum(anchor.size for anchor in inside)
    boundaries: list[bytes] = []
    passed, last = 0, keys.start or b""
    for anchor in inside:
        if len(boundaries) == count - 1:
            break
        if anchor.key > last and passed * count >= total * (len(boundaries) + 1):
            boundaries.append(anchor.key)
            last = anchor.key
        passed += anchor.size
    edges = [keys.start, *boundaries, keys.stop]
    return [KeyRange(start, stop) for start, stop in pairwise(edges)]


def split_points(points: Sequence[bytes], count: int) -> list[tuple[bytes, ...]]:
    """The keys in `count` groups of neighbours, none empty."""
    groups = max(1, min(count, len(points)))
    edges = [len(points) * at // groups for at in range(groups + 1)]
    return [tuple(points[start:stop]) for start, stop in pairwise(edges) if stop > start]
