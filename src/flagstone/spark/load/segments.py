"""Loads into databases with segments: every SST has the keys of one segment, and joins the tree of that segment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from flagstone.errors import InvalidRequest
from flagstone.lsm.segments import SegmentExtractor, route
from flagstone.spark.load.plan import MadeSst
from flagstone.types import KeyRange


def split_by_segment(
    batches: Iterable[pa.RecordBatch], extractor: SegmentExtractor
) -> Iterator[tuple[bytes, pa.RecordBatch]]:
    """Batches in key order, cut where a segment ends, each with its segment."""
    for batch in batches:
        keys, at = batch["key"], 0
        while at < batch.num_rows:
            prefix = route(extractor, keys[at].as_py())
            stop = _first_beyond(keys, at, KeyRange.of_prefix(prefix).stop)
            yield prefix, batch.slice(at, stop - at)
            at = stop


def _first_beyond(keys: pa.Array, low: int, stop: bytes | None) -> int:
    """The number of the first key from `low` on that is not below `stop`."""
    high = len(keys)
    while stop is not None and low < high:
        middle = (low + high) // 2
        if keys[middle].as_py() < stop:
            low = middle + 1
        else:
            high = middle
    return high


def by_segment(made: Sequence[MadeSst], extractor: SegmentExtractor | None) -> dict[bytes, list[MadeSst]]:
    """The SSTs of each segment, in the order of their first appearance; all under b"" without segments."""
    if extractor is None:
        return {b"": list(made)} if made else {}
    grouped: dict[bytes, list[MadeSst]] = {}
    for each in made:
        info = each.sst.info
        prefix = route(extractor, info.first_entry or b"")
        if not (info.last_entry or b"").startswith(prefix):
            raise InvalidRequest(
                f"an SST of the load has keys from {info.first_entry!r} to {info.last_entry!r}, which the segment "
                f"extractor {extractor.name!r} puts into more than one segment: a task used another extractor"
            )
        grouped.setdefault(prefix, []).append(each)
    return grouped
