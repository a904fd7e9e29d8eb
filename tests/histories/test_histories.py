"""Recorded histories of real databases are linearizable, in both commit modes. `make histories` runs long ones."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import pytest

from flagstone.db.read_methods import Reads
from flagstone.db.writer.transaction import Snapshot
from flagstone.write.conflicts import ConflictTracker, TransactionState
from flagstone.write.writer_state import WriterState
from histories.checker import check
from histories.workload import run_clients, total

TRANSACTIONS = int(os.environ.get("HISTORY_TRANSACTIONS", "600"))
TRANSACTIONS_OF_A_HISTORY = 5_000
SEED = int(os.environ.get("HISTORY_SEED", "1"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("synchronous_commit", [False, True], ids=["default commit", "synchronous commit"])
def test_a_recorded_history_has_no_anomaly(synchronous_commit: bool) -> None:
    settings = {"synchronous_commit": synchronous_commit}
    calls: Counter[str] = Counter()
    operations = transactions = 0
    while transactions < TRANSACTIONS:
        run = run_clients(
            transactions=min(TRANSACTIONS - transactions, TRANSACTIONS_OF_A_HISTORY),
            seed=SEED + transactions,
            settings=settings,
        )
        found = check(run.ops)
        kinds = Counter(anomaly.kind for anomaly in found)
        assert not found, f"{kinds} in {len(run.ops)} operations; the first: {found[0].why}"
        operations += len(run.ops)
        transactions += total(run)
        calls += run.calls
    print(f"{transactions} transactions, {operations} operations, 0 anomalies: {dict(sorted(calls.items()))}")
    assert min(calls[f"{isolation} transactions"] for isolation in ("snapshot", "serializable")) > 0
    assert min(calls[name] for name in ("durable writes", "durable reads", "snapshots", "flushes")) > 0


def no_check(tracker: ConflictTracker, state: Any) -> None:
    """Every transaction may commit."""


def no_reads(state: TransactionState, read: Any) -> None:
    """A serializable transaction forgets what it read."""


def one_by_one(reads: Any, keys: list[bytes], **options: Any) -> list[bytes | None]:
    """Many keys are read at many moments."""
    values = []
    for key in keys:
        values.append(reads.get(key, **options))
        time.sleep(0.0002)  # other threads write
    return values


def newest(snapshot: Snapshot, *, durable_only: bool, dirty: bool) -> Any:
    """A snapshot shows what is newest."""
    return snapshot._context.source.view, snapshot._engine.state.committed_seq


def at_once(state: WriterState, seq: int) -> None:
    """A write returns before the ones before it are committed."""


BROKEN: list[tuple[list[tuple[type, str]], Any, str]] = [
    ([(ConflictTracker, "check")], no_check, "lost update"),
    ([(TransactionState, "track_read"), (TransactionState, "track_range")], no_reads, "cycle"),
    ([(Reads, "multi_get")], one_by_one, "fractured read"),
    ([(Snapshot, "_read_point")], newest, "wrong snapshot"),
    ([(WriterState, "wait_committed")], at_once, "lost own write"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "broken", "kind"), BROKEN, ids=[broken.__name__ for _, broken, _ in BROKEN]
)
def test_the_checker_finds_an_anomaly_in_a_database_without_one_rule(
    places: list[tuple[type, str]], broken: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in places:
        monkeypatch.setattr(owner, name, broken)
    found: Counter[str] = Counter()
    for seed in range(5):
        run = run_clients(transactions=600, seed=seed, settings={"synchronous_commit": broken is at_once})
        found.update(anomaly.kind for anomaly in check(run.ops))
        if found[kind]:
            break
    assert found[kind], found
