"""Every store call of a range delete fails in every way: afterwards all of the range is there, or all of it is gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Literal

import pytest

import flagstone
from faults.test_engine_sweep import EFFECTS, MORE_CALLS, Ledger, close, flush, put, settings, within_time
from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.errors import FlagstoneError, Unavailable
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from flagstone.store.retrying import RetryingStore, RetryPolicy
from flagstone.testing.faults import Crashed, Effect, Fault, FaultyStore
from flagstone.types import KeyRange
from kit.databases import MANUAL, eventually
from kit.faults import struck_calls

KEYS = KeyRange(b"b", b"e")


def delete_by_manifest(db: Db, keys: KeyRange) -> None:
    """As `delete_range` does for more than a hundred rows."""
    db._engine.services.range_deletes.delete(keys)


def run_workload(ledger: Ledger, open_: Callable[[], Db]) -> None:
    db = open_()
    try:
        for key in (b"a", b"b", b"c", b"d", b"e"):
            put(db, ledger, key, b"flushed" + key)
        flush(db, ledger, "memtable")
        put(db, ledger, b"c", b"only in memory")
        delete_range(db, ledger)
        put(db, ledger, b"d", b"later", durable=True)
        delete_range(db, ledger)
        put(db, ledger, b"b", b"last")
        close(db, ledger)
        db = open_()
        assert dict(db.scan()) == ledger.states()[-1]
        close(db, ledger)
    except BaseException:
        with suppress(FlagstoneError, Crashed):
            db.close()
        raise


def delete_range(db: Db, ledger: Ledger) -> None:
    ledger.written.append(dict.fromkeys((b"b", b"c", b"d")))
    delete_by_manifest(db, KEYS)
    ledger.acknowledged = len(ledger.written)


def run_with(faults: list[Fault], *, wal_enabled: bool) -> tuple[int, BaseException | None]:
    clock, inner, ledger = VirtualClock(), MemoryStore(), Ledger()
    store = FaultyStore(inner, faults, clock=clock)
    options = settings(wal_enabled=wal_enabled)
    raised: list[BaseException | None] = [None]

    def run() -> None:
        try:
            run_workload(ledger, lambda: open_database("db", store=store, settings=options, clock=clock))
        except BaseException as error:  # noqa: BLE001 - judged below
            raised[0] = error

    within_time(run, faults)
    if isinstance(raised[0], AssertionError):
        raise raised[0]
    with open_database("db", store=inner, settings=options, clock=clock) as db:
        assert dict(db.scan()) in ledger.states(), (dict(db.scan()), ledger, faults)
    assert Admin("db", store=inner).verify().ok
    return len(store.calls), raised[0]


@pytest.mark.slow
@pytest.mark.parametrize("wal_enabled", [True, False], ids=["wal", "no wal"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_fault_at_any_store_call_leaves_all_of_a_range_delete_or_nothing(
    effect: Effect, wal_enabled: bool
) -> None:
    calls, raised = run_with([], wal_enabled=wal_enabled)
    assert raised is None
    for nth in struck_calls(calls + MORE_CALLS, stride=2):
        made, raised = run_with([Fault(effect, nth=nth, delay_s=30.0)], wal_enabled=wal_enabled)
        if effect in ("crash", "crash_after"):
            assert made < nth or isinstance(raised, Crashed | FlagstoneError), (nth, raised)
        else:
            assert raised is None, (nth, raised)


@contextmanager
def in_doubt(effect: Literal["error", "lost_reply"]) -> Iterator[tuple[Db, FaultyStore]]:
    """A database whose range delete got no answer from the store, which is still silent."""
    store = FaultyStore(MemoryStore())
    impatient = RetryingStore(store, policy=RetryPolicy(attempts=2, initial_backoff_s=0.1))
    with flagstone.open("db", store=impatient, settings=MANUAL.replace(manifest_poll_interval="50ms")) as db:
        for key in (b"a", b"c", b"e"):
            db.put(key, b"before")
        db.flush()
        store.faults = [
            Fault(effect, nth=None, op="put_if_absent", path="*/manifest/*"),
            Fault("error", nth=None, op="[!p]*", path="*/manifest*"),
        ]
        with pytest.raises(Unavailable, match="unknown whether the range was deleted"):
            delete_by_manifest(db, KEYS)
        yield db, store


@pytest.mark.parametrize("effect", ["error", "lost_reply"])
def test_writes_wait_until_the_store_says_whether_a_range_was_deleted(
    effect: Literal["error", "lost_reply"],
) -> None:
    with in_doubt(effect) as (db, store):
        writing = Thread(target=lambda: db.put(b"d", b"later", await_durable=True))
        writing.start()
        writing.join(0.2)
        assert writing.is_alive()
        store.faults = []
        writing.join(20)
        assert dict(db.scan()) == {b"a": b"before", b"d": b"later", b"e": b"before"}
        changes = [
            (change.op, change.key, change.seq)
            for batch in flagstone.WalReader("db", store=store).follow(timeout_s=0)
            for change in batch.changes
        ]
        assert changes[3:] == [("delete_range", b"b", 4), ("put", b"d", 5)]


def test_a_database_can_be_closed_while_a_range_delete_is_in_doubt() -> None:
    with in_doubt("lost_reply") as (db, store):
        store.faults = []
        db.close()
        with flagstone.open("db", store=store, settings=MANUAL) as again:
            assert dict(again.scan()) == {b"a": b"before", b"e": b"before"}


def test_a_range_delete_of_a_replaced_writer_is_refused_and_deletes_nothing() -> None:
    store = MemoryStore()
    loser = flagstone.open("db", store=store, settings=MANUAL.replace(manifest_poll_interval="1h"))
    loser.put(b"c", b"kept", await_durable=True)
    with flagstone.open("db", store=store, settings=MANUAL) as winner:
        with pytest.raises(flagstone.Closed):
            delete_by_manifest(loser, KEYS)
        eventually(lambda: loser.closed)
        assert dict(winner.scan()) == {b"c": b"kept"}
    loser.close()
