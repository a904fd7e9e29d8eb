"""Cache and filter counters of reads, under SlateDB's names.

Each SST counts its hits without a lock, and a report of the metrics collects them. Misses are counted with each
request. With interpreted kernels two threads that count at once may lose a count.
"""

from __future__ import annotations

from flagstone.runtime import metric_names
from flagstone.runtime.metrics import Metrics
from flagstone.sst.reader import Sst


class ReadCounts:
    """The counters of one database's reads."""

    def __init__(self, metrics: Metrics) -> None:
        kinds = ("filter", "index", "data_block")
        hits, misses = (
            [
                metrics.counter(metric_names.DB_CACHE_ACCESS_COUNT, entry_kind=kind, result=result)
                for kind in kinds
            ]
            for result in ("hit", "miss")
        )
        self._filter_hits, self._index_hits, self._block_hits = hits
        self._filter_misses, self._index_misses, self._block_misses = misses
        self._positives, self._negatives, self._false_positives = (
            metrics.counter(name, kind="point")
            for name in (
                metric_names.DB_SST_FILTER_POSITIVE_COUNT,
                metric_names.DB_SST_FILTER_NEGATIVE_COUNT,
                metric_names.DB_SST_FILTER_FALSE_POSITIVE_COUNT,
            )
        )

    def meta_missed(self, sst: Sst) -> None:
        """A request fetches the index and the filters of an SST."""
        self._index_misses.add()
        if sst.info.filter_len:
            self._filter_misses.add()

    def blocks_missed(self, count: int) -> None:
        """A request fetches `count` blocks."""
        self._block_misses.add(count)

    def collect(self, sst: Sst) -> None:
        """Add what an SST has counted since the last call."""
        positives, negatives, false_positives, index_hits, block_hits = sst.take_counts()
        self._positives.add(positives)
        self._negatives.add(negatives)
        self._false_positives.add(false_positives)
        self._filter_hits.add(positives + negatives)
        self._index_hits.add(index_hits)
        self._block_hits.add(block_hits)
