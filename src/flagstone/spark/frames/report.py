"""`table_report`: how many rows and bytes a key range has, from the manifest, and indexes and statistics of SSTs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Unpack

from flagstone.compaction.inputs import Part, SstFetcher, part_of
from flagstone.errors import InvalidRequest
from flagstone.format.sst import open_part
from flagstone.format.sst_info import SstStats, decode_stats
from flagstone.runtime.pool import shared_pool
from flagstone.spark.address import open_store
from flagstone.spark.frames.count import FACTS
from flagstone.spark.frames.plan import ReadArguments, plan_read
from flagstone.spark.scan import FlagstoneReader, single_source
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from flagstone.metadata.manifest import Manifest

_BROADCAST: Final = "spark.sql.autoBroadcastJoinThreshold"
_ROW_OVERHEAD: Final = 16
"""What a row takes in a broadcast table, besides its key and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReport:
    """The size of a database, or of a key range of it.

    `exact` tells whether `rows` is the number of rows; otherwise it is an estimate, usually too large: it counts old
    versions and expired rows, and cuts SSTs at blocks. `bytes` is the size of the rows' keys and values, estimated if a
    range begins or ends within an SST. `stored_bytes` is what they take on the store, compressed.
    """

    rows: int
    exact: bool
    bytes: int
    stored_bytes: int
    ssts: int
    sources: int
    wal_bytes: int

    def broadcastable(self, spark: SparkSession) -> bool:
        """Whether the rows are below the session's threshold for broadcast joins."""
        limit = threshold(str(spark.conf.get(_BROADCAST, "10485760b")))
        return limit >= 0 and self.bytes + self.rows * _ROW_OVERHEAD + self.wal_bytes <= limit


def table_report(
    url: str | os.PathLike[str], *, spark: SparkSession | None = None, **arguments: Unpack[ReadArguments]
) -> TableReport:
    """The size of what `read` with the same arguments would read. Reads no rows and writes nothing.

    `where` counts only as far as it selects key ranges. A session is needed only if it has the options of the store.

    Raises:
        InvalidRequest: an argument is wrong, or there is no such database.
        Unavailable: the store did not answer.

    """
    given: Any = {"snapshot": "latest", **arguments, "columns": ["seq"]}
    plan = plan_read(url, given, spark=spark)
    held = replace(plan, options=replace(plan.options, snapshot="latest")).hold()
    with held.open() as reader:
        status, manifest = reader.status(), reader.manifest()
    store, paths = open_store(held.options.address)
    ranges = FlagstoneReader(held, plan.schema).ranges()
    options = held.options
    former = options.as_of is not None
    filtered = bool(options.where) or not plan.complete or options.points is not None
    whole = not (former or filtered or status["memtable_bytes"])
    return measure(store, paths, manifest, ranges, wal_bytes=int(status["memtable_bytes"]), whole=whole)


def measure(
    store: ObjectStore,
    paths: DbPaths,
    manifest: Manifest,
    ranges: Iterable[Any],
    *,
    wal_bytes: int,
    whole: bool,
) -> TableReport:
    """The report on some key ranges of a manifest. With `whole`, all rows in them are meant, and are in SSTs."""
    trees = manifest.trees
    sources = [
        views
        for tree in trees
        for views in (*((each,) for each in tree.l0), *(run.views for run in tree.runs))
    ]
    fetcher = SstFetcher(store)
    rows = size = stored = 0
    seen: set[int] = set()
    used: set[int] = set()
    parts: list[Part] = []
    asked = list(ranges)
    for number, views in enumerate(sources):
        for view in views:
            part = part_of(manifest, view, paths)
            for keys in asked:
                cut = part.within(keys)
                if not cut.keys.empty:
                    parts.append(cut)
                    seen.add(cut.sst.id)
                    used.add(number)
    for part_rows, part_bytes, part_stored in shared_pool().map_ordered(
        lambda part: _measure_part(store, fetcher, part), parts
    ):
        rows, size, stored = rows + part_rows, size + part_bytes, stored + part_stored
    exact = _known_rows(manifest, paths, asked) if whole else None
    return TableReport(
        rows=rows if exact is None else exact,
        exact=exact is not None or (not parts and not wal_bytes),
        bytes=size,
        stored_bytes=stored,
        ssts=len(seen),
        sources=len(used),
        wal_bytes=wal_bytes,
    )


def _known_rows(manifest: Manifest, paths: DbPaths, ranges: list[Any]) -> int | None:
    """The number of rows, if `count` has learned it and none of them expires."""
    total = 0
    for keys in ranges:
        parts = single_source(manifest, keys, paths)
        facts = None if parts is None else [FACTS.find(part) for part in parts]
        if facts is None or any(fact is None or fact.first_expiry_ms is not None for fact in facts):
            return None
        total += sum(fact.rows for fact in facts if fact is not None)
    return total


def _measure_part(store: ObjectStore, fetcher: SstFetcher, part: Part) -> tuple[int, int, int]:
    """Rows, bytes of keys and values, and stored bytes of the blocks of a part."""
    index = fetcher.fetch_index(part.sst, part.path)
    first = [at for at in range(len(index)) if at + 1 == len(index) or _after(index.first_keys[at + 1], part)]
    kept = [at for at in first if part.keys.stop is None or at == 0 or index.first_keys[at] < part.keys.stop]
    stored = sum(index.stops[at] - index.offsets[at] for at in kept)
    stats = fetch_stats(store, part)
    if stats is None or len(stats.blocks) != len(index):
        return 0, stored, stored
    share = sum(stats.blocks[at].num_puts + stats.blocks[at].num_merges for at in kept)
    entries = stats.num_puts + stats.num_merges + stats.num_deletes
    raw = stats.raw_key_size + stats.raw_val_size
    return share, raw * share // max(entries, 1), stored


def _after(separator: bytes, part: Part) -> bool:
    """Whether a block that ends before `separator` can have keys of the part."""
    return part.keys.start is None or separator > part.keys.start


def fetch_stats(store: ObjectStore, part: Part) -> SstStats | None:
    """The statistics of an SST, if it has any."""
    info = part.sst.info
    if not info.stats_len:
        return None
    stored = store.get_range(part.path, info.stats_offset, info.stats_offset + info.stats_len)
    return decode_stats(open_part(stored, info, part.path, info.stats_offset))


def threshold(text: str) -> int:
    """Bytes from a setting of Spark, such as `10MB`, `10485760b` or `-1`."""
    units = {"b": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
    plain = text.strip().lower().removesuffix("b") or "0"
    unit = units.get(plain[-1:], 1)
    digits = plain.rstrip("kmgt")
    try:
        return int(digits) * unit
    except ValueError:
        raise InvalidRequest(f"{_BROADCAST} is {text!r}, which is not a size") from None
