"""What was written, under the names SlateDB's dashboards know.

Nothing is counted per write: rows and bytes are read off the memtables, and batches off the sequence numbers, of
which every batch takes one. The caller holds the lock that orders writes.
"""

from __future__ import annotations

from typing import Final

from flagstone.kernels import memtable as kernel
from flagstone.runtime import metric_names as names
from flagstone.runtime.metrics import Metrics
from flagstone.types import VALUE
from flagstone.write.memtables import Memtables


def _row_overhead() -> int:
    probe = kernel.Memtable()
    probe.insert(b"k", 1, VALUE, b"", None, None)
    size: int = probe.size()
    return size - 1


_ROW_OVERHEAD: Final = _row_overhead()
"""What a memtable needs for a row beside its key and value."""


class WriteCounts:
    """The write counters of one database. Rows that replay found are not writes of this process."""

    def __init__(self, metrics: Metrics, memtables: Memtables, *, last_seq: int) -> None:
        self._rows, self._bytes = memtables.rows, memtables.written_bytes
        self._freezes = memtables.freezes
        self._seq = last_seq
        self._write_ops = metrics.counter(names.DB_WRITE_OPS)
        self._batches = metrics.counter(names.DB_WRITE_BATCH_COUNT)
        self._write_bytes = metrics.counter(names.DB_MEMTABLE_WRITE_BYTES)
        self._unflushed = metrics.gauge(names.DB_TOTAL_MEM_SIZE_BYTES)
        self._unlogged = metrics.gauge(names.WAL_BUFFER_ESTIMATED_BYTES)
        self._freeze_count = metrics.counter(names.MEMTABLE_FLUSH_MEMTABLE_FREEZE_COUNT)

    def skipped(self, numbers: int) -> None:
        """So many sequence numbers were used by a bulk load, not by batches."""
        self._seq += numbers

    def report(self, memtables: Memtables, last_seq: int) -> None:
        """Bring the counters up to date."""
        rows, size = memtables.rows - self._rows, memtables.written_bytes - self._bytes
        self._write_ops.add(rows)
        self._write_bytes.add(size - rows * _ROW_OVERHEAD)
        self._batches.add(last_seq - self._seq)
        self._freeze_count.add(memtables.freezes - self._freezes)
        self._rows, self._bytes = memtables.rows, memtables.written_bytes
        self._freezes, self._seq = memtables.freezes, last_seq
        self._unflushed.set(memtables.unflushed_bytes)
        self._unlogged.set(memtables.written_bytes - memtables.bytes_logged)
