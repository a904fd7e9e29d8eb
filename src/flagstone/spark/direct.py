"""The quick way to read a key range: where one source alone has it, blocks become columns without a merge.

That is what a bulk load or a full compaction leaves behind. Chunks of many blocks are fetched and checked at once,
ahead of need, as a compaction does it. What a reader may see is decided by the same sink as in any Arrow scan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa

from flagstone.errors import CorruptData
from flagstone.format.columns import SCHEMA
from flagstone.maintenance.compaction.inputs import Part, Source, TableFetcher
from flagstone.metadata.manifest import Manifest
from flagstone.read.arrow import ArrowSink
from flagstone.read.scan import Chunk, ScanRequest
from flagstone.runtime.pool import shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import KeyRange

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
        TableFetcher(store),
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
