"""Many connections open a new SQLite commit log at once: none of them finds it locked."""

from __future__ import annotations

import multiprocessing
import sqlite3
from functools import partial
from pathlib import Path

import pytest

from flagstone.errors import Unavailable
from flagstone.runtime.sync import Event, start_thread
from flagstone.store.commit_log import CommitRecord, RecordState
from flagstone.store.commit_log.sqlite import SqliteCommitLog

ROUNDS = 20
THREADS = 12


def insert(log: SqliteCommitLog, go: Event, number: int, outcomes: list[object], *, close: bool) -> None:
    go.wait(30)
    try:
        outcomes.append(log.insert(CommitRecord(f"d/{number}", f"s{number}", 1, RecordState.PENDING, 0)))
    except Exception as error:  # noqa: BLE001 - the test compares it
        outcomes.append(error)
    if close:
        log.close()


def open_together(logs: list[SqliteCommitLog], *, close: bool = False) -> list[object]:
    go, outcomes = Event(), list[object]()
    threads = [
        start_thread(partial(insert, log, go, number, outcomes, close=close), name=f"opener-{number}")
        for number, log in enumerate(logs)
    ]
    go.set()
    for thread in threads:
        thread.join(60)
    return outcomes


@pytest.mark.slow
def test_threads_that_share_a_new_log_open_it_once(tmp_path: Path) -> None:
    for number in range(ROUNDS):
        log = SqliteCommitLog(tmp_path / f"{number}.db", synchronous="OFF")
        assert open_together([log] * THREADS) == [True] * THREADS
        assert len([*log.records("")]) == THREADS
        log.close()


def open_and_close(file: str) -> list[str]:
    """The errors of several connections of this process that open the commit log at once and close it."""
    logs = [SqliteCommitLog(file, synchronous="OFF") for _ in range(4)]
    outcomes = open_together(logs, close=True)
    return [repr(outcome) for outcome in outcomes if isinstance(outcome, Exception)]


@pytest.mark.slow
def test_processes_that_open_and_close_a_new_log_together_never_find_it_locked(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as processes:
        for number in range(ROUNDS):
            errors = processes.map(open_and_close, [str(tmp_path / f"{number}.db")] * 4, chunksize=1)
            assert errors == [[]] * 4


def test_a_log_that_stays_locked_is_unavailable_after_the_busy_timeout(tmp_path: Path) -> None:
    file = tmp_path / "locked.db"
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("begin exclusive")
    log = SqliteCommitLog(file, busy_timeout_s=0.2)
    with pytest.raises(Unavailable, match="locked"):
        log.find("d")
    holder.close()
    assert log.find("d") is None
    log.close()
