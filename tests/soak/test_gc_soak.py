"""An eager garbage collector beside writers, readers and clones deletes no needed object, and leaves few unused ones.

`make gc-soak` runs ten minutes and more, a test run some seconds.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from flagstone.store.commit_log.sqlite import SqliteCommitLog
from flagstone.store.local import LocalStore
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectStore
from flagstone.store.two_phase import TwoPhaseStore
from soak.gc_soak import Soak

SECONDS = float(os.environ.get("GC_SOAK_SECONDS", "0"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Crashed writers complain, and rightly."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def make_store(kind: str, folder: Path) -> ObjectStore:
    match kind:
        case "memory":
            return MemoryStore()
        case "folder":
            return LocalStore(folder, fsync=False)
        case _:
            return TwoPhaseStore(MemoryStore(), SqliteCommitLog(folder / "commits.db", synchronous="OFF"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", ["memory", "folder", "two-phase"])
def test_an_eager_collector_beside_writers_readers_and_clones_deletes_no_needed_object(
    kind: str, tmp_path: Path
) -> None:
    soak = Soak(
        make_store(kind, tmp_path), seconds=SECONDS / 3 or 2, seed=int(os.environ.get("GC_SOAK_SEED", "1"))
    )
    soak.run()
    counts = dict(sorted(soak.counts.items()))
    print(kind, counts, "most objects at once:", soak.most_objects)
    if soak.failures:
        raise AssertionError(f"{len(soak.failures)} failed, after {counts}") from soak.failures[0]

    left = soak.settle()
    print(left)
    assert left["unused manifests"] == 0
    assert left["compactions files"] == 1
    # Another compactor may continue what the last one had not finished when its database was closed.
    assert left["unused tables"] <= 16
    assert left["unused WAL files"] == 0
    assert counts["writes"] > 0
    if SECONDS:  # a busy machine may not come to all of it in a few seconds
        assert min(counts[each] for each in ("crashes", "deleted compacted", "clones", "snapshots")) > 0
