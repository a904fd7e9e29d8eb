"""Without a WAL a flush makes rows durable: reads must not notice the moment in which it happens."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from flagstone.config import Settings
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.lsm.operators import Concatenate
from flagstone.store.memory import MemoryStore


def opened(*, synchronous_commit: bool) -> Db:
    settings = Settings(
        wal_enabled=False,
        flush_interval=None,
        compactor_options=None,
        garbage_collector_options=None,
        synchronous_commit=synchronous_commit,
    )
    return open_database("db", store=MemoryStore(), settings=settings, merge_operator=Concatenate())


def read_all_ways(db: Db) -> list[Any]:
    with db.snapshot() as snapshot:
        return [
            db.get(b"k"),
            dict(db.scan()).get(b"k"),
            snapshot.get(b"k"),
            db.get(b"sum"),
            db.get(b"k", durable_only=True),
        ]


@pytest.mark.parametrize("synchronous_commit", [False, True])
def test_without_a_wal_no_value_disappears_or_reverts_during_a_flush(synchronous_commit: bool) -> None:
    with opened(synchronous_commit=synchronous_commit) as db:
        db.put(b"k", b"0", await_durable=True)
        db.flush()
        engine, seen, watching = db._engine, [], threading.Event()
        adopt = engine.manifest.adopt

        def watched(*arguments: Any) -> None:
            seen.append(read_all_ways(db))
            adopt(*arguments)
            seen.append(read_all_ways(db))
            watching.set()

        engine.manifest.adopt = watched  # type: ignore[method-assign]
        db.put(b"k", b"1")
        db.merge(b"sum", b"a")
        db.merge(b"sum", b"b")
        db.put(b"k", b"2", await_durable=True)
        assert watching.wait(20)
        engine.manifest.adopt = adopt  # type: ignore[method-assign]
        assert len(seen) == 2
        for now, scanned, held, total, durable in seen:
            assert now == scanned == held
            assert now in (b"1", b"2")
            assert total == b"ab"
            assert durable in (b"0", b"2")
        assert [now for now, *_ in seen] == sorted(now for now, *_ in seen)


def test_a_snapshot_taken_between_upload_and_commit_of_a_flush_keeps_its_rows() -> None:
    """It is not known when the SST is built; the SST must have the version it reads all the same."""
    with opened(synchronous_commit=True) as db:
        db.put(b"k", b"old")
        engine, snapshots = db._engine, []
        commit = engine.manifest.commit

        def watched(*arguments: Any, **options: Any) -> Any:
            snapshots.append(db.snapshot())
            return commit(*arguments, **options)

        engine.manifest.commit = watched  # type: ignore[method-assign]
        waiting = threading.Thread(target=lambda: db.put(b"k", b"new", await_durable=True))
        waiting.start()
        waiting.join(20)
        assert not waiting.is_alive()
        (snapshot,) = snapshots
        # As after its SSTs were replaced: it looks at the newest view, at its own number.
        snapshot._view = engine.state.now.view
        assert snapshot.get(b"k") == b"old"
        assert db.get(b"k") == b"new"
        snapshot.close()


def test_without_a_wal_flushed_memtables_leave_memory() -> None:
    with opened(synchronous_commit=False) as db:
        for _ in range(3):
            db.put(b"k", b"0")
            db.flush("memtable")
        memtables = db._engine.state.now.memtables
        held = {id(memtable) for memtable, _ in memtables.unlogged}
        assert memtables.frozen == ()
        assert held <= {id(memtables.active)}
