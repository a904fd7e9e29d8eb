"""A database with a long past: L0 SSTs and runs in segments, borrowed SSTs, checkpoints, a running compaction."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import flagstone
from flagstone import Admin, Settings
from flagstone.metadata.compactions import (
    JobStatus,
    TieredSpec,
    Worker,
    edit_job,
)
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint, remove_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK
from flagstone.store.local import LocalStore
from flagstone.store.paths import DbPaths
from flagstone.types import ManifestId

QUIET = Settings(compactor_options=None, garbage_collector_options=None)


class UpToSlash:
    """The segment of a key is its beginning up to the first slash."""

    name = "up-to-slash"

    def prefix(self, key: bytes) -> bytes | None:
        return key[: key.index(b"/") + 1] if b"/" in key else None


def grow(folder: Path, *, manifests: int, mark: str = "") -> Path:
    """Create the database `shop`, a clone of `origin`, and its clone `copy`; return its path.

    `mark` is added to the names of databases, checkpoints and the worker.
    Its segment `orders/` has 5 L0 SSTs and 4 sorted runs, `users/` has 1 L0 SST and 1 run.
    """
    origin, shop = folder / f"origin{mark}", folder / f"shop{mark}"
    with flagstone.open(origin, settings=QUIET, segment_extractor=UpToSlash()) as db:
        _write(db, 0, 8000)
        db.put(b"users/ada", b'{"name": "Ada", "city": "London"}')
    Admin(origin).compact(full=True)
    Admin(origin).clone(shop)
    manifests_of = ManifestStore(LocalStore(folder), DbPaths(shop.name))
    for run in range(1, 4):
        with flagstone.open(shop, settings=QUIET, segment_extractor=UpToSlash()) as db:
            for flush in range(
                4
            ):  # as many as a compaction needs; the run of the origin is too large to join them
                _write(db, 2000 * run + 700 * flush, 100)
                db.flush()
        Admin(shop).compact()
        _pass(manifests_of, manifests // 5)
    with flagstone.open(shop, settings=QUIET, segment_extractor=UpToSlash()) as db:
        db.checkpoint(name=f"nightly{mark}", lifetime=timedelta(days=7))
        for flush in range(5):
            _write(db, 1300 * flush, 160)
            if flush == 4:
                db.put(b"users/ada", b'{"name": "Ada", "city": "Paris"}')
            db.flush()
    Admin(shop).clone(folder / f"copy{mark}")
    Admin(shop).create_checkpoint(name=f"before the move{mark}")
    _run_job(shop, manifests_of.require_latest().value, folder, worker=f"worker-1{mark}")
    _pass(manifests_of, manifests - manifests_of.require_latest().id)
    return shop


def _write(db: flagstone.Db, first: int, rows: int) -> None:
    for number in range(first, first + rows):
        db.put(b"orders/%06d" % number, b'{"order": %d, "total": %d.50}' % (number, number % 97) + b" " * 200)


def _pass(manifests: ManifestStore, number: int) -> None:
    """Write that many manifests, which add and remove a checkpoint as readers do."""
    mark = UUID(int=7)
    for _ in range(max(number, 0)):

        def edit(now: Versioned[Manifest]) -> Manifest:
            if now.value.checkpoint(mark) is not None:
                return remove_checkpoint(now.value, mark)
            return add_checkpoint(
                now.value, Checkpoint(mark, ManifestId(now.id), SYSTEM_CLOCK.now_ms() // 1000)
            )

        manifests.update(edit)


def _run_job(shop: Path, manifest: Manifest, folder: Path, *, worker: str) -> None:
    """A compaction that a worker has begun."""
    tree = manifest.tree_of(b"orders/")
    assert tree is not None
    job = Admin(shop).submit_compaction(
        TieredSpec(tuple(view.id for view in tree.l0[2:]), (tree.runs[0].id,), tree.runs[0].id, b"orders/")
    )
    store = CompactionsStore(LocalStore(folder), DbPaths(shop.name))
    for status in (JobStatus.SCHEDULED, JobStatus.RUNNING):
        claim = Worker(worker, SYSTEM_CLOCK.now_ms()) if status is JobStatus.RUNNING else None
        store.update(
            lambda now, status=status, claim=claim: edit_job(
                now.value, job, lambda old: replace(old, status=status, worker=claim)
            )
        )
