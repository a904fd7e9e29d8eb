"""Eight writers create the same object at once, hundreds of times: exactly one succeeds each time.

A few rounds are not enough: a server once passed 200 rounds and then let two writers win in 2 of 800. So
`make faults` sets `LONG_RACES`; `make test` runs an eighth of the rounds.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.commit_log import CommitLog
from flagstone.store.commit_log.dynamodb import DynamoDbCommitLog
from flagstone.store.commit_log.postgres import PostgresCommitLog
from flagstone.store.commit_log.sqlite import SqliteCommitLog
from flagstone.store.port import ObjectChanged, ObjectExists, ObjectStore
from flagstone.store.remote import RemoteStore
from flagstone.store.two_phase import TwoPhaseStore
from kit.two_phase import PlainStore
from servers.commit_logs import NewLog
from servers.s3 import S3Server

pytestmark = pytest.mark.slow

WRITERS = 8
SHARE = 1 if os.environ.get("LONG_RACES") else 8


def race(store: ObjectStore, *, rounds: int) -> None:
    """Let the writers race, and check that each round had one winner and that the object has its bytes."""
    folder = f"race/{SYSTEM_IDS.token()}"
    together = threading.Barrier(WRITERS, timeout=60)
    wins: list[list[int]] = [[] for _ in range(rounds)]

    def write(writer: int) -> None:
        for number in range(rounds):
            together.wait()
            try:
                store.put_if_absent(f"{folder}/{number:04}", b"%d" % writer)
            except ObjectExists:
                continue
            wins[number].append(writer)

    with ThreadPoolExecutor(WRITERS) as threads:
        list(threads.map(write, range(WRITERS)))
    assert [number for number, winners in enumerate(wins) if len(winners) != 1] == []
    listed = [meta.path for meta in store.list(folder)]
    assert listed == [f"{folder}/{number:04}" for number in range(rounds)]
    for path, winners in zip(listed[:50], wins, strict=False):
        assert store.get(path).data == b"%d" % winners[0]


def count_together(store: ObjectStore, *, threads: int, each: int) -> None:
    """Let threads increment one counter by conditional updates, and check that no increment is lost."""
    path = f"count/{SYSTEM_IDS.token()}"
    store.put_if_absent(path, b"0")

    def count(_: int) -> None:
        done = 0
        while done < each:
            seen = store.get(path)
            try:
                store.put_if_match(path, b"%d" % (int(seen.data) + 1), seen.meta.version)
            except ObjectChanged:
                continue
            done += 1

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(count, range(threads)))
    assert int(store.get(path).data) == threads * each


def test_one_creator_wins_on_ministack(ministack: S3Server) -> None:
    race(RemoteStore(ministack.url, options=ministack.options()), rounds=800 // SHARE)


@pytest.fixture
def log(new_log: NewLog) -> CommitLog:
    return new_log()


ROUNDS = {SqliteCommitLog: 800, PostgresCommitLog: 200, DynamoDbCommitLog: 100}


def test_one_creator_wins_on_the_two_phase_store(log: CommitLog) -> None:
    base = PlainStore()
    race(TwoPhaseStore(base, log), rounds=ROUNDS[type(log)] // SHARE)  # type: ignore[index]
    assert base.temporaries() == []
    assert log.pending("") == []


def test_no_increment_is_lost_on_the_two_phase_store(log: CommitLog) -> None:
    base = PlainStore()
    count_together(TwoPhaseStore(base, log), threads=4, each=25)
    assert len(base.temporaries()) == 1
    assert log.pending("") == []
