"""A DataFrame that shows a database at a checkpoint: the driver plans the read, tasks read from the store.

Each task opens the checkpoint and reads its own key range. Rows that were only in the WAL at the checkpoint are not in
any SST, so each task reads those WAL files itself.
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
from flagstone.compaction.inputs import Anchor, Part, Source, SstFetcher, part_of, sample_view
from flagstone.config import ReaderSettings
from flagstone.db.reader.reader import DbReader, open_reader
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.columns import SCHEMA
from flagstone.lsm.system_rows import is_system, visible_ranges
from flagstone.lsm.tree import SstView
from flagstone.metadata.manifest import Manifest
from flagstone.read.arrow import ArrowSink
from flagstone.read.scan_cursor import Chunk, ScanRequest
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.pool import shared_pool
from flagstone.schema import TableSchema
from flagstone.spark.address import open_store
from flagstone.spark.error_translation import in_task
from flagstone.spark.filters import Wanted, narrow, narrow_range
from flagstone.spark.malformed import MalformedRows
from flagstone.spark.options import ReadOptions
from flagstone.spark.row_mapping import RowMapping, arrow_schema, check_read_schema
from flagstone.spark.stored_schema import fetch_schema, find_schema, plan_read
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import KeyRange

_log = logging.getLogger("flagstone.spark")

CHECKPOINT_NAME: Final = "spark read"

_MAX_INDEXES: Final = 1024
"""Above this number of SSTs the plan reads no index: the first keys of the SSTs are enough to split by."""

_POINTS_PER_TASK: Final = 1024


@dataclass(frozen=True, slots=True)
class CheckpointRead:
    """The state of a database at a checkpoint, and its stored schema if it is read by that."""

    options: ReadOptions
    checkpoint: str
    table: TableSchema | None = None
    table_prefix: bytes = b""

    def open(self) -> DbReader:
        """A reader at the checkpoint. It writes nothing and does not poll for newer manifests."""
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
    """Find the checkpoint that the options name, or create one for the state they name.

    A new checkpoint expires after `options.lifetime`, also when this process crashes.

    Raises:
        InvalidRequest: there is no database or no such checkpoint, or the state at `as_of` is not available.

    """
    address = options.address
    admin = address.admin()
    options.load_merge_operator()
    if options.checkpoint is not None:
        held = parse_checkpoint_id(options.checkpoint)
        require_live_checkpoint(admin.manifest().value, held, now_s=SYSTEM_CLOCK.now_ms() // 1000)
        return _with_table(CheckpointRead(options, str(held)))
    if options.as_of is None:
        created = admin.create_checkpoint(options.lifetime, name=CHECKPOINT_NAME)
        return _with_table(CheckpointRead(options, str(created.id)))
    # The reader finds the manifest that shows this state, and the checkpoint that keeps the manifest, if any.
    with open_reader(address.path, **address.arguments, as_of=options.as_of) as reader:
        status = reader.status()
        created = admin.create_checkpoint(options.lifetime, source=status["checkpoint"], name=CHECKPOINT_NAME)
    # By sequence number from here on, so that tasks need not translate a time again.
    return _with_table(CheckpointRead(replace(options, as_of=status["last_seq"]), str(created.id)))


def _with_table(held: CheckpointRead) -> CheckpointRead:
    """The same with the schema that the database had at the checkpoint."""
    if held.options.raw:
        return held
    with held.open() as reader:
        table, prefix = find_schema(reader, held.options.prefix)
    other = held.options.schema_of
    if table is None and other is not None:
        table, prefix = fetch_schema(replace(held.options.address, path=other)), b""
        if table is None:
            raise InvalidRequest(f"the database at {other!r}, which 'schema.of' names, stores no schema")
    return replace(held, table=table, table_prefix=prefix)


@dataclass
class KeyPartition(InputPartition):
    """The keys that one task reads."""

    wanted: Wanted

    def __init__(self, wanted: Wanted) -> None:
        super().__init__(None)
        self.wanted = wanted


class FlagstoneReader(DataSourceReader):
    """Plans partitions on the driver and reads them in tasks. Pickles; each process opens the database itself."""

    def __init__(self, held: CheckpointRead, schema: StructType) -> None:
        self._row_mapping = plan_read(held.options, schema, held.table, held.table_prefix)
        if self._row_mapping is None:
            check_read_schema(schema)
        self._held = held
        self._schema = schema
        wanted, points = Wanted(held.options.keys), held.options.points
        self._wanted = wanted if points is None else wanted.among(points)

    def partitions(self) -> Sequence[InputPartition]:
        return self.plan()

    def plan(self) -> list[KeyPartition]:
        """Partitions of about equal size that cover the wanted keys."""
        options, wanted = self._held.options, self._wanted
        if wanted.empty:
            return [KeyPartition(replace(wanted, points=()))]
        if wanted.points is not None:
            count = plan_count(
                len(wanted.points), partitions=options.partitions, partition_bytes=_POINTS_PER_TASK
            )
            return [
                KeyPartition(replace(wanted, points=group)) for group in split_points(wanted.points, count)
            ]
        with self._held.open() as reader:
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
            self._held.checkpoint,
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
        with in_task(), self._held.open() as reader:
            if row_mapping is None:
                yield from _shaped(self._rows(reader, wanted, columns), schema)
                return
            raw = self._rows(reader, wanted, row_mapping.raw_columns(columns, self._malformed.column))
            yield from _shaped(self._decoded(raw, row_mapping, schema), schema)

    @property
    def _malformed(self) -> MalformedRows:
        return self._held.options.malformed

    def _decoded(
        self, raw: Iterable[pa.RecordBatch], row_mapping: RowMapping, schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        malformed = 0
        for batch in raw:
            decoded, bad = row_mapping.decode(batch, schema, self._malformed)
            malformed += bad
            yield decoded
        if malformed:
            _log.warning(
                "malformed rows=%d database=%s mode=%s",
                malformed,
                self._held.options.address.name,
                self._malformed.mode,
            )

    def _rows(self, reader: DbReader, wanted: Wanted, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        options = self._held.options
        if wanted.points is not None:
            points = [key for key in wanted.points if options.include_system or not is_system(key)]
            yield _point_rows(reader, points, columns, options)
            return
        for keys in (wanted.keys,) if options.include_system else visible_ranges(wanted.keys):
            yield from self._range_rows(reader, replace(wanted, keys=keys), columns)

    def _range_rows(
        self, reader: DbReader, wanted: Wanted, columns: Sequence[str]
    ) -> Iterable[pa.RecordBatch]:
        options = self._held.options
        status = reader.status()
        store, paths = open_store(options.address)
        # Rows from the WAL must be merged with the SSTs, which only the ordinary scan does.
        alone = single_source(reader.manifest(), wanted.keys, paths) if not status["memtable_bytes"] else None
        if alone is not None:
            request = ScanRequest(
                keys=wanted.keys,
                max_seq=status["last_seq"],
                now_ms=SYSTEM_CLOCK.now_ms(),
                include_expired=options.include_expired,
                merge_operator=options.load_merge_operator(),
                whole_rows=True,
            )
            return scan_single_source(store, alone, request, columns)
        batches: Iterable[pa.RecordBatch] = reader.scan_arrow(
            wanted.keys.start,
            wanted.keys.stop,
            columns=columns,
            batch_rows=options.batch_rows,
            include_expired=options.include_expired,
            include_system=options.include_system,
        )
        return batches


class PushingReader(FlagstoneReader):
    """A reader with filter push-down on keys. Spark refuses such a reader if push-down is switched off."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Apply the filters on keys; return the others, which Spark applies."""
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
    """How many bytes begin at which key, for all SSTs with wanted keys."""
    store, paths = open_store(options.address)
    fetcher = SstFetcher(store)
    found = _parts_within(manifest, manifest.views, paths, wanted.keys)
    if len(found) > _MAX_INDEXES:
        for part in found:
            yield Anchor(part.keys.start or b"", part.sst.info.estimated_size)
        return
    indexes = shared_pool().map_ordered(lambda part: fetcher.fetch_index(part.sst, part.path), found)
    for part, index in zip(found, indexes, strict=True):
        sampled = sample_view(index, part.keys, part.sst.info.estimated_size)
        # The index has the first block under an empty key; the anchor begins at the first key of the SST.
        stride = index.stops[min(len(index), -(-len(index) // 128)) - 1] - index.offsets[0]
        yield Anchor(part.keys.start or b"", stride)
        yield from sampled.anchors


def _point_rows(
    reader: DbReader, points: Sequence[bytes], columns: Sequence[str], options: ReadOptions
) -> pa.RecordBatch:
    """The rows of single keys. Bloom filters skip the SSTs without them."""
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
    """The batches with exactly the types that Spark expects."""
    for batch in batches:
        try:
            arrays = [_cast(batch.column(at), field.type) for at, field in enumerate(schema)]
        except pa.ArrowInvalid as error:
            raise InvalidRequest(
                f"a row does not fit the schema of the read: {error}; read keys and values as binary"
            ) from None
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(column: Any, kind: pa.DataType) -> Any:
    return column if column.type == kind else column.cast(kind)


_FETCH_BYTES: Final = 2 * 1024 * 1024
"""The size of every request, the first one included: a request becomes a batch, and small batches slow Spark down."""

_FETCH_TASKS: Final = 4


def single_source(manifest: Manifest, keys: KeyRange, paths: DbPaths) -> list[Part] | None:
    """The parts of the only sorted run or L0 SST with these keys, in order; None if there are several. Pure."""
    if manifest.segments or manifest.segment_extractor_name is not None:
        return None
    sources = (*((view,) for view in manifest.tree.l0), *(run.views for run in manifest.tree.runs))
    found = [parts for views in sources if (parts := _parts_within(manifest, views, paths, keys))]
    return None if len(found) > 1 else found[0] if found else []


def _parts_within(manifest: Manifest, views: Iterable[SstView], paths: DbPaths, keys: KeyRange) -> list[Part]:
    """The parts of the views with some of the keys."""
    parts = (part_of(manifest, view, paths).within(keys) for view in views)
    return [part for part in parts if not part.keys.empty]


def scan_single_source(
    store: ObjectStore, parts: Sequence[Part], request: ScanRequest, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """Fast path: the rows of a scan over a single source, with blocks decoded straight to Arrow, without merging.

    Raises:
        CorruptData: an SST is damaged; the error names it.
        Unavailable: the store did not answer, or an SST is gone.

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
    """The number of partitions: `partitions` if given, else so many that each has about `partition_bytes`."""
    return partitions if partitions is not None else max(1, -(-total_bytes // partition_bytes))


def plan_partitions(anchors: Iterable[Anchor], keys: KeyRange, count: int) -> list[KeyRange]:
    """Split `keys` into `count` adjacent ranges of about equal size, or into fewer if there are too few anchors.

    An anchor says how many bytes begin at its key. The sizes of all SSTs are added up.
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
    """Split the keys into `count` groups of consecutive keys, or into fewer: no group is empty."""
    groups = max(1, min(count, len(points)))
    edges = [len(points) * at // groups for at in range(groups + 1)]
    return [tuple(points[start:stop]) for start, stop in pairwise(edges) if stop > start]
