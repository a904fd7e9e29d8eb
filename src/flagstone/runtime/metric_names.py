"""The names of all metrics: first those of SlateDB 0.17, so that existing dashboards work with Flagstone.

A comment after a name lists its labels. Metrics that SlateDB does not have start with `flagstone.`. `metric_help` says
what each one counts. Only code that counts uses a name; a test finds a name that no code uses.
"""

from __future__ import annotations

from typing import Final

from flagstone.runtime.metrics import Metrics

DB_REQUEST_COUNT: Final = "slatedb.db.request_count"  # op: get, scan, flush
DB_WRITE_OPS: Final = "slatedb.db.write_ops"
DB_WRITE_BATCH_COUNT: Final = "slatedb.db.write_batch_count"
DB_BACKPRESSURE_COUNT: Final = "slatedb.db.backpressure_count"
DB_L0_STALL_COUNT: Final = "slatedb.db.l0_stall_count"  # type: num_ssts, num_ssts_per_key
DB_IMMUTABLE_MEMTABLE_FLUSHES: Final = "slatedb.db.immutable_memtable_flushes"
DB_TOTAL_MEM_SIZE_BYTES: Final = "slatedb.db.total_mem_size_bytes"
DB_L0_SST_COUNT: Final = "slatedb.db.l0_sst_count"
DB_SEGMENT_MAX_L0_SST_COUNT: Final = "slatedb.db.segment_max_l0_sst_count"
DB_SORTED_RUN_COUNT: Final = "slatedb.db.sorted_run_count"
DB_SST_VIEW_COUNT: Final = "slatedb.db.sst_view_count"
DB_SST_COUNT: Final = "slatedb.db.sst_count"
DB_EXTERNAL_DB_COUNT: Final = "slatedb.db.external_db_count"
DB_L0_FLUSH_BYTES: Final = "slatedb.db.l0_flush_bytes"
DB_MEMTABLE_WRITE_BYTES: Final = "slatedb.db.memtable_write_bytes"
DB_SST_FILTER_POSITIVE_COUNT: Final = "slatedb.db.sst_filter_positive_count"  # kind: point, prefix, range
DB_SST_FILTER_NEGATIVE_COUNT: Final = "slatedb.db.sst_filter_negative_count"  # kind
DB_SST_FILTER_FALSE_POSITIVE_COUNT: Final = "slatedb.db.sst_filter_false_positive_count"  # kind

WAL_BUFFER_FLUSHES: Final = "slatedb.wal.wal_buffer_flushes"
WAL_BUFFER_FLUSH_REQUESTS: Final = "slatedb.wal.wal_buffer_flush_requests"
WAL_BUFFER_ESTIMATED_BYTES: Final = "slatedb.wal.wal_buffer_estimated_bytes"
WAL_FLUSH_BYTES: Final = "slatedb.wal.wal_flush_bytes"

# entry_kind: filter, index, data_block, stats; result: hit, miss
DB_CACHE_ACCESS_COUNT: Final = "slatedb.db_cache.access_count"
DB_CACHE_ERROR_COUNT: Final = "slatedb.db_cache.error_count"

COMPACTOR_BYTES_COMPACTED: Final = "slatedb.compactor.bytes_compacted"  # worker_id
COMPACTOR_EPOCH: Final = "slatedb.compactor.epoch"
COMPACTOR_LAST_COMPACTION_TIMESTAMP_SEC: Final = "slatedb.compactor.last_compaction_timestamp_sec"
COMPACTOR_RUNNING_COMPACTIONS: Final = "slatedb.compactor.running_compactions"  # worker_id
COMPACTOR_TOTAL_BYTES_BEING_COMPACTED: Final = "slatedb.compactor.total_bytes_being_compacted"
COMPACTOR_TOTAL_THROUGHPUT_BYTES_PER_SEC: Final = "slatedb.compactor.total_throughput_bytes_per_sec"
COMPACTOR_SSTS_WRITTEN: Final = "slatedb.compactor.ssts_written"  # worker_id
COMPACTOR_JOBS_CLAIMED: Final = "slatedb.compactor.jobs_claimed"
COMPACTOR_JOBS_RECLAIMED: Final = "slatedb.compactor.jobs_reclaimed"
COMPACTOR_WORKER_LAST_HEARTBEAT_MS: Final = "slatedb.compactor.worker_last_heartbeat_ms"  # worker_id
# entry_type: value, merge
COMPACTOR_EXPIRED_ENTRIES_PURGED: Final = "slatedb.compactor.expired_entries_purged"

# resource: manifest, wal, wal_fence, compacted, compactions, detach
GC_DELETED_COUNT: Final = "slatedb.gc.deleted_count"
GC_COUNT: Final = "slatedb.gc.count"
GC_VERSION_COUNT: Final = "slatedb.gc.version_count"  # resource: manifest, compactions

MEMTABLE_FLUSH_MEMTABLE_FREEZE_COUNT: Final = "slatedb.memtable_flush.memtable_freeze_count"
MEMTABLE_FLUSH_CHECKPOINT_REQUEST_COUNT: Final = "slatedb.memtable_flush.checkpoint_request_count"
MEMTABLE_FLUSH_FLUSH_REQUEST_COUNT: Final = "slatedb.memtable_flush.flush_request_count"
MEMTABLE_FLUSH_L0_UPLOAD_COUNT: Final = "slatedb.memtable_flush.l0_upload_count"
MEMTABLE_FLUSH_L0_FLUSH_COUNT: Final = "slatedb.memtable_flush.l0_flush_count"
MEMTABLE_FLUSH_MANIFEST_REFRESH_COUNT: Final = "slatedb.memtable_flush.manifest_refresh_count"

# component: db, compactor, …; store_type: main, wal; op: get, put, delete; api: the request itself
OBJECT_STORE_REQUEST_COUNT: Final = "slatedb.object_store.request_count"
OBJECT_STORE_ERROR_COUNT: Final = "slatedb.object_store.error_count"
OBJECT_STORE_REQUEST_DURATION_SECONDS: Final = "slatedb.object_store.request_duration_seconds"

OBJECT_STORE_CACHE_PART_HIT_COUNT: Final = "slatedb.object_store_cache.part_hit_count"
OBJECT_STORE_CACHE_PART_ACCESS_COUNT: Final = "slatedb.object_store_cache.part_access_count"
OBJECT_STORE_CACHE_CACHE_KEYS: Final = "slatedb.object_store_cache.cache_keys"
OBJECT_STORE_CACHE_CACHE_BYTES: Final = "slatedb.object_store_cache.cache_bytes"
OBJECT_STORE_CACHE_EVICTED_KEYS: Final = "slatedb.object_store_cache.evicted_keys"
OBJECT_STORE_CACHE_EVICTED_BYTES: Final = "slatedb.object_store_cache.evicted_bytes"

MERGE_OPERATOR_OPERANDS: Final = "slatedb.merge_operator_operands"  # path: read, flush, compact

COMPACTOR_COORDINATOR_FAILURES: Final = "flagstone.compactor.coordinator_failures"
COMPACTOR_JOB_FAILURES: Final = "flagstone.compactor.job_failures"
COMPACTOR_MERGE_SECONDS: Final = "flagstone.compactor.merge_seconds"
COMPACTOR_ROWS_WRITTEN: Final = "flagstone.compactor.rows_written"

# op: put, get, multi_get, scan, flush, memtable_flush, wal_upload
DB_OPERATION_SECONDS: Final = "flagstone.db.operation_seconds"
DB_MANIFEST_ID: Final = "flagstone.db.manifest_id"
DB_LAST_L0_SEQ: Final = "flagstone.db.last_l0_seq"
DB_LIVE_BYTES: Final = "flagstone.db.live_bytes"
DB_CHECKPOINT_COUNT: Final = "flagstone.db.checkpoint_count"
DB_WRITER_EPOCH: Final = "flagstone.db.writer_epoch"

READER_POLL_FAILING: Final = "flagstone.reader.poll_failing"

DB_CACHE_BYTES: Final = "flagstone.db_cache.bytes"
DB_CACHE_EVICTIONS: Final = "flagstone.db_cache.evictions"

GC_DELETED_BYTES: Final = "flagstone.gc.deleted_bytes"  # resource
GC_ERROR_COUNT: Final = "flagstone.gc.error_count"  # resource

BOUNDARY_ADVANCE_ATTEMPTS: Final = "flagstone.metadata.boundary_advance_attempts"  # boundary: its path
BOUNDARY_CHECK_SECONDS: Final = "flagstone.metadata.boundary_check_seconds"  # boundary
BOUNDARY_REJECTED_WRITES: Final = "flagstone.metadata.boundary_rejected_writes"  # boundary

COST_REQUESTS: Final = (
    "flagstone.cost.requests"  # component: see store/cost.py; kind: put, get, head, list, …
)
COST_BYTES: Final = "flagstone.cost.bytes"  # component, direction: read, write
DB_RANGE_DELETES: Final = "flagstone.db.range_deletes"
DB_UPTIME_SECONDS: Final = "flagstone.db.uptime_seconds"

OBJECT_STORE_BYTES: Final = "flagstone.object_store.bytes"  # component, op, direction: read, write
OBJECT_STORE_RETRY_COUNT: Final = "flagstone.object_store.retry_count"

SLATEDB_NAMES: Final = frozenset(
    value for value in list(globals().values()) if isinstance(value, str) and value.startswith("slatedb.")
)
"""The names above that SlateDB has, too."""

FLAGSTONE_NAMES: Final = frozenset(
    value for value in list(globals().values()) if isinstance(value, str) and value.startswith("flagstone.")
) - {__name__, __package__}
"""The names above that only Flagstone has."""


_RESOURCES: Final = ("manifest", "wal", "wal_fence", "compacted", "compactions", "detach")

_LABELLED: Final[dict[str, list[dict[str, str]]]] = {
    DB_SST_FILTER_POSITIVE_COUNT: [{"kind": kind} for kind in ("point", "prefix", "range")],
    DB_SST_FILTER_NEGATIVE_COUNT: [{"kind": kind} for kind in ("point", "prefix", "range")],
    DB_SST_FILTER_FALSE_POSITIVE_COUNT: [{"kind": kind} for kind in ("point", "prefix", "range")],
    DB_CACHE_ACCESS_COUNT: [
        {"entry_kind": kind, "result": result}
        for kind in ("filter", "index", "data_block", "stats")
        for result in ("hit", "miss")
    ],
    DB_CACHE_ERROR_COUNT: [{}],
    COMPACTOR_EXPIRED_ENTRIES_PURGED: [{"entry_type": kind} for kind in ("value", "merge")],
    GC_DELETED_COUNT: [{"resource": kind} for kind in _RESOURCES],
    GC_DELETED_BYTES: [{"resource": kind} for kind in _RESOURCES],
    GC_ERROR_COUNT: [{"resource": kind} for kind in _RESOURCES],
    MEMTABLE_FLUSH_MANIFEST_REFRESH_COUNT: [{}],
    MERGE_OPERATOR_OPERANDS: [{"path": path} for path in ("read", "flush", "compact")],
}


def register(metrics: Metrics) -> None:
    """Create the counters that may stay at zero for long, so that they appear from the start, as in SlateDB."""
    for name, labels in _LABELLED.items():
        for each in labels:
            metrics.counter(name, **each)
    for resource in ("manifest", "compactions"):
        metrics.gauge(GC_VERSION_COUNT, resource=resource)
