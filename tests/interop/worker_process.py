"""Runs one of our compaction workers in its own process, which a test kills.

    worker_process.py FOLDER PATH SSTS

It hangs when it has recorded SSTS more finished SSTs than it found. It keeps renewing its claim and its record, so
that the test knows how far it came.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from flagstone.compaction.executor import LocalExecutor, Merging
from flagstone.compaction.extensions import CompactionTask
from flagstone.config import CompactionWorkerOptions
from flagstone.db.admin.admin import Admin
from flagstone.lsm.operators import Concatenate
from flagstone.metadata.compactions import JobContext
from flagstone.metadata.manifest import SsTable
from flagstone.sst.builder import SstOptions
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths

MAX_SST_BYTES = 8_192


class HangingExecutor:
    """Merges until enough SSTs are recorded, and then hangs."""

    def __init__(self, inner: LocalExecutor, ssts: int) -> None:
        self.inner = inner
        self.ssts = ssts

    def run(
        self, task: CompactionTask, *, record: Callable[[JobContext], None], cancelled: Callable[[], bool]
    ) -> tuple[SsTable, ...]:
        found = recorded(task.context)

        def note(context: JobContext) -> None:
            record(context)
            if recorded(context) - found >= self.ssts:
                threading.Event().wait()

        return self.inner.run(task, record=note, cancelled=cancelled)


def recorded(context: JobContext | None) -> int:
    return 0 if context is None else sum(len(part.output_ssts) for part in context.subcompactions)


def local_executor(folder: str, path: str, *, max_subcompactions: int = 1, **options: Any) -> LocalExecutor:
    """With small SSTs, so that a small job has many."""
    return LocalExecutor(
        LocalStore(folder),
        DbPaths(path),
        Merging(
            work=CompactionWorkerOptions(
                max_sst_size=MAX_SST_BYTES,
                max_subcompactions=max_subcompactions,
                max_fetch_tasks=1,
                bytes_to_fetch=65_536,
            ),
            sst=SstOptions(block_bytes=1024),
            merge_operator=Concatenate(),
        ),
        **options,
    )


def worker_options() -> CompactionWorkerOptions:
    return CompactionWorkerOptions(
        compactions_poll_interval=timedelta(milliseconds=20), heartbeat_interval=timedelta(milliseconds=50)
    )


def main(folder: str, path: str, ssts: str) -> None:
    executor = HangingExecutor(local_executor(folder, path), int(ssts))
    Admin(path, store=LocalStore(folder)).run_worker(options=worker_options(), executor=executor)


if __name__ == "__main__":
    main(*sys.argv[1:])
