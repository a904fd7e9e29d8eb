"""The stores, settings and extensions of a database that is open for writing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from flagstone.compaction.extensions import Executor, Scheduler
from flagstone.config import Settings
from flagstone.format.codec import Codec
from flagstone.format.filter import BloomPolicy, PrefixExtractor
from flagstone.lsm.compaction_filter import CompactionFilterFactory
from flagstone.lsm.merge_operator import CountingOperator, MergeOperator
from flagstone.lsm.segments import SegmentExtractor
from flagstone.runtime import metric_names
from flagstone.runtime.budget import MemoryBudget
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.pool import IoPool
from flagstone.sst.builder import SstOptions
from flagstone.store.caching import CachingStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the parts of an engine share: stores, settings, clock, ids, threads, and the extensions of the user."""

    store: ObjectStore
    wal_store: ObjectStore
    disk_cache: CachingStore | None
    paths: DbPaths
    settings: Settings
    clock: Clock
    ids: Ids
    metrics: Metrics
    pool: IoPool
    merge_operator: MergeOperator | None = None
    extractor: SegmentExtractor | None = None
    prefix_extractor: PrefixExtractor | None = None
    compaction_filter: CompactionFilterFactory | None = None
    scheduler: Scheduler | None = None
    executor: Executor | None = None
    compaction_pool: ThreadPoolExecutor | None = None
    memory: MemoryBudget | None = None

    def counted_operator(self, path: Literal["read", "flush", "compact"]) -> MergeOperator | None:
        """The merge operator; the metric of `path` counts the operands that it folds."""
        if self.merge_operator is None:
            return None
        counter = self.metrics.counter(metric_names.MERGE_OPERATOR_OPERANDS, path=path)
        return CountingOperator(self.merge_operator, counter.add)

    @property
    def sst_options(self) -> SstOptions:
        """How this database writes its SSTs."""
        settings = self.settings
        bits = settings.filter_bits_per_key
        return SstOptions(
            block_bytes=settings.sst_block_size,
            codec=Codec.NONE
            if settings.compression_codec is None
            else Codec[settings.compression_codec.upper()],
            min_filter_keys=settings.min_filter_keys,
            filters=() if bits is None else (BloomPolicy(bits, self.prefix_extractor),),
        )
