"""A DataFrame that shows a database at a checkpoint: the driver plans the read, tasks read from the store.

Each task opens the checkpoint and reads its own key range. Rows that were only in the WAL at the checkpoint are not in
any SST, so each task reads those WAL files itself.
"""

from __future__ import annotations

import logging
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from flagstone.compaction.inputs import Anchor, Part, Source, SstFetcher, part_of, sample_view
from flagstone.db.reader.reader import DbReader
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.format.columns import SCHEMA
from flagstone.lsm.system_rows import is_system, visible_ranges
from flagstone.lsm.tree import SstView
from flagstone.metadata.manifest import Manifest
from flagstone.read.arrow import ArrowSink
from flagstone.read.scan_cursor import Chunk, ScanRequest
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.runtime.pool import shared_pool
from flagstone.spark.address import open_store
from flagstone.spark.arrow_filter import Bound, apply, bind, split
from flagstone.spark.error_translation import in_task
from flagstone.spark.filters import condition_of
from flagstone.spark.held_state import CheckpointRead, Renewal, explained
from flagstone.spark.options import ReadOptions
from flagstone.spark.row_mapping import arrow_schema
from flagstone.spark.row_shape import RowShape
from flagstone.spark.selection import Wanted
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import KeyRange

_log = logging.getLogger("flagstone.spark")

_MAX_INDEXES: Final = 1024
"""Above this number of SSTs the plan reads no index: the first keys of the SSTs are enough to split by."""

_POINTS_PER_TASK: Final = 1024

_MIN_TASK_BYTES: Final = 8 * 1024 * 1024
"""A task with less than this costs more to start than its rows cost to read."""


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
        options = held.options
        self._held = held
        self._schema = schema
        self._shape = RowShape.of(options, schema, held.table, held.table_prefix)
        wanted = Wanted(options.keys)
        self._given = wanted if options.points is None else wanted.among(options.points)
        self._all: tuple[Bound, ...] = ()
        bound, complete = split(options.where, self._shape.types)
        if not complete:
            lost = next(each for each in options.where if bind(each, self._shape.types) is None)
            raise InvalidRequest(
                f"option 'where' has a condition on {lost.column!r} that does not fit its type, or there is no such "
                f"column among {', '.join(self._shape.types.names)}"
            )
        self._select(bound)

    def _select(self, conditions: Sequence[Bound]) -> None:
        """Return only rows that pass these conditions as well, and read only keys that can pass."""
        self._all = (*self._all, *conditions)
        self._wanted, self._conditions = self._shape.narrow(self._given, self._all)

    def ranges(self) -> list[KeyRange]:
        """The key ranges that this read scans; a single key is a range of its own."""
        wanted = self._wanted
        if wanted.points is not None:
            return [KeyRange(key, key + b"\0") for key in wanted.points]
        return [keys for part in wanted.parts for keys in self._visible(part) if not keys.empty]

    def whole_ranges(self) -> Sequence[KeyRange] | None:
        """The key ranges of which this read returns every row; None if it returns only some of them."""
        wanted = self._wanted
        several = wanted.points is not None or wanted.ranges is not None
        return None if several or self._conditions else self._visible(wanted.keys)

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
        total = sum(anchor.size for anchor in anchors)
        count = plan_count(
            total,
            partitions=options.partitions,
            partition_bytes=options.partition_bytes,
            parallelism=options.parallelism or os.cpu_count() or 1,
        )
        cut = (wanted.within(keys) for keys in plan_partitions(anchors, wanted.keys, count))
        planned = [KeyPartition(part) for part in cut if not part.empty]
        _log.info(
            "planned read database=%s checkpoint=%s partitions=%d bytes=%d",
            options.address.name,
            self._held.checkpoint,
            len(planned),
            total,
        )
        return planned or [KeyPartition(replace(wanted, points=()))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, KeyPartition), "partitions() makes no others"
        yield from self.read_wanted(partition.wanted)

    def read_wanted(self, wanted: Wanted) -> Iterator[pa.RecordBatch]:
        """The rows of a selection, with the columns of the schema. Tasks call it."""
        if wanted.empty:
            return
        schema, shape, left = arrow_schema(self._schema), self._shape, self._held.options.task_limit
        with in_task(), explained(self._held), self._held.open() as reader:
            renewal = Renewal(self._held, reader.status().get("checkpoint_expires_s"))
            raw = self._rows(reader, wanted, shape.raw_columns(self._conditions))
            for batch in _shaped(self._decoded(raw), shape.needed_types(self._conditions)):
                renewal.step()
                passing = apply(batch, self._conditions)
                shown = [passing.column(name) for name in schema.names]
                found = pa.RecordBatch.from_arrays(shown, schema=schema)
                if left is None:
                    yield found
                    continue
                yield found.slice(0, left)
                left -= found.num_rows
                if left <= 0:
                    return

    def _decoded(self, raw: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        malformed = 0
        decode = self._shape.decoder(self._conditions)
        for batch in raw:
            decoded, bad = decode(batch)
            malformed += bad
            yield decoded
        if malformed:
            _log.warning(
                "malformed rows=%d database=%s mode=%s",
                malformed,
                self._held.options.address.name,
                self._held.options.malformed.mode,
            )

    def _rows(self, reader: DbReader, wanted: Wanted, columns: Sequence[str]) -> Iterable[pa.RecordBatch]:
        options = self._held.options
        if wanted.points is not None:
            points = [key for key in wanted.points if options.include_system or not is_system(key)]
            return [_point_rows(reader, points, columns, options)]
        return chain.from_iterable(
            self._range_rows(reader, keys, columns) for part in wanted.parts for keys in self._visible(part)
        )

    def _visible(self, keys: KeyRange) -> Sequence[KeyRange]:
        """The range without system rows."""
        return (keys,) if self._held.options.include_system else visible_ranges(keys)

    def _range_rows(
        self, reader: DbReader, keys: KeyRange, columns: Sequence[str]
    ) -> Iterable[pa.RecordBatch]:
        options = self._held.options
        status = reader.status()
        store, paths = open_store(options.address)
        # Rows from the WAL must be merged with the SSTs, which only the ordinary scan does.
        alone = single_source(reader.manifest(), keys, paths) if not status["memtable_bytes"] else None
        if alone is not None:
            request = ScanRequest(
                keys=keys,
                max_seq=status["last_seq"],
                now_ms=SYSTEM_CLOCK.now_ms(),
                include_expired=options.include_expired,
                merge_operator=options.load_merge_operator(),
                whole_rows=True,
            )
            return scan_single_source(store, alone, request, columns)
        batches: Iterable[pa.RecordBatch] = reader.scan_arrow(
            keys.start,
            keys.stop,
            columns=columns,
            batch_rows=options.batch_rows,
            include_expired=options.include_expired,
            include_system=options.include_system,
        )
        return batches


class PushingReader(FlagstoneReader):
    """A reader with filter push-down. Spark refuses such a reader if push-down is switched off."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Apply the filters that mean the same here; return the others, which Spark applies."""
        found: list[Bound] = []
        for each in filters:
            condition = condition_of(each)
            bound = None if condition is None else bind(condition, self._shape.types)
            if bound is None:
                yield each
            else:
                found.append(bound)
        self._select(found)


def fetch_anchors(options: ReadOptions, manifest: Manifest, wanted: Wanted) -> Iterator[Anchor]:
    """How many bytes begin at which key, for all SSTs with wanted keys."""
    store, paths = open_store(options.address)
    fetcher = SstFetcher(store)
    found = [
        part
        for part in _parts_within(manifest, manifest.views, paths, wanted.keys)
        if wanted.ranges is None or any(not part.keys.intersect(keys).empty for keys in wanted.ranges)
    ]
    if len(found) > _MAX_INDEXES:
        for part in found:
            yield Anchor(part.keys.start or b"", part.sst.info.estimated_size)
        return
    indexes = shared_pool().map_ordered(lambda part: fetcher.fetch_index(part.sst, part.path), found)
    for part, index in zip(found, indexes, strict=True):
        sampled = sample_view(index, part.keys, part.sst.info.estimated_size)
        within = _within_ranges(sampled.anchors, wanted)
        # The index has the first block under an empty key; the anchor begins at the first key of the SST.
        stride = index.stops[min(len(index), -(-len(index) // 128)) - 1] - index.offsets[0]
        yield Anchor(part.keys.start or b"", stride)
        yield from within


def _within_ranges(anchors: Iterable[Anchor], wanted: Wanted) -> Iterator[Anchor]:
    if wanted.ranges is None:
        yield from anchors
        return
    starts = [keys.start or b"" for keys in wanted.ranges]
    for anchor in anchors:
        at = bisect_right(starts, anchor.key) - 1
        if at >= 0 and anchor.key in wanted.ranges[at]:
            yield anchor


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
    return pa.RecordBatch.from_arrays(
        [pa.array(cells[name], SCHEMA.field(name).type) for name in columns], names=list(columns)
    )


def _shaped(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The batches with exactly the types that Spark expects."""
    for batch in batches:
        try:
            arrays = [_cast(batch.column(field.name), field.type) for field in schema]
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
        reuse=True,  # the sink copies what is visible
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


def plan_count(
    total_bytes: int, *, partitions: int | None, partition_bytes: int, parallelism: int = 1
) -> int:
    """The number of partitions: `partitions` if given, else so many that each has at most `partition_bytes`.

    Then it becomes a multiple of `parallelism`, so that the last round of tasks leaves no core without work, unless
    the tasks would be tiny.
    """
    if partitions is not None:
        return partitions
    least = max(1, -(-total_bytes // partition_bytes))
    return max(least, min(-(-least // parallelism) * parallelism, total_bytes // _MIN_TASK_BYTES))


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
