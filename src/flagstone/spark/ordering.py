"""Brings the rows of a task into key order, and leaves those alone that are in order already."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from flagstone.errors import InvalidRequest

SORT_BYTES: Final = 256 * 1024 * 1024
"""How much of an unordered partition is sorted at a time: about twice as much memory is needed for it."""

_MAX_SORT_BYTES: Final = 1024 * 1024 * 1024
"""A column holds 2 GiB at most; huge values are not sorted together beyond this."""


def check_sorted(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same batches. Raises `InvalidRequest` where a key is below the one before."""
    last: bytes | None = None
    for batch in batches:
        if not follows(batch, last):
            raise InvalidRequest(
                "the rows of a partition are not sorted by key, as was said; leave `sorted` out, use "
                'flagstone.spark.bulk_load, or df.repartitionByRange("key").sortWithinPartitions("key") before write'
            )
        last = _last_key(batch, last)
        yield batch


def ordered_stretches(
    batches: Iterable[pa.RecordBatch], sort_bytes: int = SORT_BYTES
) -> Iterator[Iterator[pa.RecordBatch]]:
    """The rows in one or more stretches, each in key order; one stretch, row for row, where they are so already.

    Rows are passed on as long as they are in order. The rest is sorted in parts of `sort_bytes`; rows of one key stay
    in their order. Each stretch must be used up before the next is asked for.
    """
    source = _Pushback(iter(batches))
    yield source.while_ordered()
    while True:
        part: list[pa.RecordBatch] = []
        size = 0
        for batch in source:
            if part and size + batch.nbytes > _MAX_SORT_BYTES:
                source.put_back(batch)
                break
            part.append(batch)
            size += batch.nbytes
            if size >= sort_bytes:
                break
        if not part:
            return
        yield iter([_sorted(part)])


def follows(batch: pa.RecordBatch, last: bytes | None) -> bool:
    """Whether the keys of a batch ascend, from `last` on."""
    keys = batch["key"]
    if not len(keys):
        return True
    if last is not None and keys[0].as_py() < last:
        return False
    return bool(len(keys) < 2 or pc.all(pc.less_equal(keys[:-1], keys[1:])).as_py())


class _Pushback:
    """An iterator that stops where the order ends, and can then go on with what it stopped at."""

    def __init__(self, source: Iterator[pa.RecordBatch]) -> None:
        self._source = source
        self._held: list[pa.RecordBatch] = []

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        while self._held:
            yield self._held.pop()
        # Not `yield from`: who stops iterating here would end the source with it, and lose its rows.
        for batch in self._source:  # noqa: UP028
            yield batch

    def put_back(self, batch: pa.RecordBatch) -> None:
        self._held.append(batch)

    def while_ordered(self) -> Iterator[pa.RecordBatch]:
        last: bytes | None = None
        for batch in self._source:
            if not follows(batch, last):
                self.put_back(batch)
                return
            last = _last_key(batch, last)
            yield batch


def _last_key(batch: pa.RecordBatch, before: bytes | None) -> bytes | None:
    last: bytes | None = batch["key"][-1].as_py() if batch.num_rows else before
    return last


def _sorted(part: list[pa.RecordBatch]) -> pa.RecordBatch:
    joined = pa.concat_batches(part)
    # Stable, so that the last row of a key stays the last.
    return joined.take(pc.sort_indices(joined["key"]))
