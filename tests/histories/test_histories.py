"""Recorded histories of real databases are linearizable, in both commit modes. `make histories` runs long ones."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from histories.checker import check
from histories.workload import run_clients, total

TRANSACTIONS = int(os.environ.get("HISTORY_TRANSACTIONS", "1200"))
TRANSACTIONS_OF_A_HISTORY = 5_000
SEED = int(os.environ.get("HISTORY_SEED", "1"))


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
