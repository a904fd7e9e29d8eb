"""Opening, taking over, flushing, compacting and closing are one line each in the log."""

from __future__ import annotations

import logging

import pytest

import flagstone
from flagstone import Admin, Settings
from flagstone.store.memory import MemoryStore

QUIET = Settings(compactor_options=None, garbage_collector_options=None)


def test_every_event_of_a_database_is_one_line_with_its_values(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    with caplog.at_level(logging.INFO, logger="flagstone"):
        for _ in range(2):
            with flagstone.open("db", store=store, settings=QUIET) as db:
                db.put(b"secret-key", b"secret-value")
                db.flush()
        Admin("db", store=store).compact(full=True)
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]

    events = [line.split(" path=")[0].split(" last_seq=")[0].split(" job=")[0] for line in lines]
    assert [event for event in events if event in ("opened", "took over", "flushed memtable", "closed")] == [
        *("opened", "flushed memtable", "closed"),
        *("took over", "opened", "flushed memtable", "closed"),
    ]
    assert {"started compaction", "committed compaction"} <= set(events)
    opened = next(line for line in lines if line.startswith("opened"))
    assert "path=db" in opened
    assert "epoch=1 " in opened
    assert next(line for line in lines if line.startswith("took over")).endswith("epoch=2 former_epoch=1")
    assert all("\n" not in line and "secret" not in line for line in lines)
