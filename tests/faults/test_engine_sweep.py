"""Every store call of a workload fails in every way; every row acknowledged as durable is there afterwards.

The first run counts the calls. Then each of them in turn fails before its effect, fails after it, or ends the
process before or after it; the database is then opened and read on the healthy store. A fault that
retries overcome must not show; after a crash the acknowledged rows are there, and no row that was never written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from flagstone.config import CompactorOptions, Settings
from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.errors import FlagstoneError
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from flagstone.testing.faults import Crashed, Effect, Fault, FaultyStore
from flagstone.write.batch import WriteBatch
from kit.databases import eventually
from kit.faults import struck_calls

HANG_S = 30.0
MORE_CALLS = 8  # background work overlaps in different ways: some runs make a few calls more than the first
EFFECTS: list[Effect] = ["error", "lost_reply", "slow", "crash", "crash_after"]


@dataclass
class Ledger:
    """What the workload wrote, in order, and how much of it was acknowledged as durable."""

    written: list[dict[bytes, bytes | None]] = field(default_factory=list)
    acknowledged: int = 0

    def states(self) -> list[dict[bytes, bytes]]:
        """What may be found: one state for every prefix of the writes that holds all acknowledged ones."""
        state: dict[bytes, bytes] = {}
        found = [dict(state)] if self.acknowledged == 0 else []
        for number, write in enumerate(self.written, 1):
            for key, value in write.items():
                if value is None:
                    state.pop(key, None)
                else:
                    state[key] = value
            if number >= self.acknowledged:
                found.append(dict(state))
        return found


def settings(*, wal_enabled: bool = True, compacting: bool = False) -> Settings:
    return Settings(
        wal_enabled=wal_enabled,
        flush_interval=None,
        manifest_poll_interval=timedelta(hours=1),
        l0_sst_size_bytes=1200,
        sst_block_size=1024,
        min_filter_keys=1,
        l0_max_ssts=1000,
        l0_max_ssts_per_key=1000,
        compactor_options=CompactorOptions() if compacting else None,
        garbage_collector_options=None,
    )


def run_workload(ledger: Ledger, open_: Callable[[], Db]) -> None:
    db = open_()
    try:
        put(db, ledger, b"a", b"1")
        put(db, ledger, b"b", b"2", durable=True)
        put(db, ledger, b"a", b"3" * 400)
        batch = WriteBatch()
        batch.put(b"c", b"4")
        batch.put(b"d", b"5")
        batch.delete(b"b")
        ledger.written.append({b"c": b"4", b"d": b"5", b"b": None})
        db.write(batch, await_durable=True)
        ledger.acknowledged = len(ledger.written)
        transaction = db.transaction("serializable")
        transaction.put(b"j", transaction[b"c"])
        transaction.delete(b"c")
        ledger.written.append({b"j": b"4", b"c": None})
        transaction.commit(await_durable=True)
        ledger.acknowledged = len(ledger.written)
        put(db, ledger, b"e", b"6")
        flush(db, ledger, "wal")
        flush(db, ledger, "memtable")
        for number in range(6):
            put(db, ledger, b"f%d" % number, b"7" * 400)
        put(db, ledger, b"g", b"8", durable=True)
        put(db, ledger, b"h", b"9")
        close(db, ledger)
        db = open_()
        assert dict(db.scan()) == ledger.states()[-1]
        put(db, ledger, b"i", b"10")
        put(db, ledger, b"a", b"11", durable=True)
        close(db, ledger)
    except BaseException:
        with suppress(FlagstoneError, Crashed):
            db.close()
        raise


def put(db: Db, ledger: Ledger, key: bytes, value: bytes, *, durable: bool = False) -> None:
    # Noted before: a write whose acknowledgement never came may have been done all the same.
    ledger.written.append({key: value})
    db.put(key, value, await_durable=durable)
    if durable:
        ledger.acknowledged = len(ledger.written)


def flush(db: Db, ledger: Ledger, kind: str) -> None:
    # Without a WAL, rows are durable only in SSTs.
    db.flush("wal" if kind == "wal" and db._engine.env.settings.wal_enabled else "memtable")
    ledger.acknowledged = len(ledger.written)


def close(db: Db, ledger: Ledger) -> None:
    # Also a close that fails halfway may have flushed everything; only one that returns has promised so.
    db.close()
    ledger.acknowledged = len(ledger.written)


def run_with(
    faults: list[Fault], *, wal_enabled: bool, compacting: bool = False
) -> tuple[int, BaseException | None]:
    """One case: the workload under faults, then a check of the rows. Returns the number of calls and the error."""
    # Small parts, so that SSTs are uploaded in several.
    clock, inner, ledger = VirtualClock(), MemoryStore(part_bytes=400), Ledger()
    store = FaultyStore(inner, faults, clock=clock)
    options = settings(wal_enabled=wal_enabled, compacting=compacting)
    raised: list[BaseException | None] = [None]

    def run() -> None:
        try:
            run_workload(ledger, lambda: open_database("db", store=store, settings=options, clock=clock))
        except BaseException as error:  # noqa: BLE001 - judged below
            raised[0] = error

    within_time(run, faults)
    if isinstance(raised[0], AssertionError):
        raise raised[0]
    found: list[dict[bytes, bytes]] = []

    def look() -> None:
        with open_database("db", store=inner, settings=options, clock=clock) as db:
            found.append(dict(db.scan()))

    within_time(look, faults)
    assert found
    assert found[0] in ledger.states(), (found[0], ledger)
    report = Admin("db", store=inner).verify()
    assert report.ok, report
    return len(store.calls), raised[0]


def within_time(work: Callable[[], None], about: object) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), f"hangs with {about}"


def engine_threads() -> list[str]:
    own = ("flagstone-wal", "flagstone-memtable-flush", "flagstone-manifest-follower", "flagstone-flush")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(own)]


@pytest.mark.slow
@pytest.mark.parametrize("wal_enabled", [True, False], ids=["wal", "no wal"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_fault_at_any_store_call_loses_no_acknowledged_row(effect: Effect, wal_enabled: bool) -> None:
    calls, raised = run_with([], wal_enabled=wal_enabled)
    assert raised is None
    for nth in struck_calls(calls + MORE_CALLS):
        fault = Fault(effect, nth=nth, delay_s=30.0)
        made, raised = run_with([fault], wal_enabled=wal_enabled)
        if effect in ("crash", "crash_after"):
            assert made < nth or isinstance(raised, Crashed | FlagstoneError), (fault, raised)
        else:
            assert raised is None, (fault, raised)
    print(f"{calls + MORE_CALLS} calls, struck by {effect}")


@pytest.mark.slow
@pytest.mark.parametrize("effect", EFFECTS)
def test_a_fault_at_any_store_call_of_a_compacting_database_loses_no_acknowledged_row(effect: Effect) -> None:
    calls, raised = run_with([], wal_enabled=True, compacting=True)
    assert raised is None
    # Every third: background work shifts the calls anyway, and from run to run others are hit.
    for nth in struck_calls(calls + MORE_CALLS, stride=3):
        fault = Fault(effect, nth=nth, delay_s=30.0)
        made, raised = run_with([fault], wal_enabled=True, compacting=True)
        if effect in ("crash", "crash_after"):
            assert made < nth or isinstance(raised, Crashed | FlagstoneError), (fault, raised)
        else:
            assert raised is None, (fault, raised)


def test_a_crashed_store_leaves_no_thread() -> None:
    before = engine_threads()
    for nth in (5, 8, 12, 16):
        run_with([Fault("crash", nth=nth)], wal_enabled=True)
    # A thread that has been ended may need a moment.
    eventually(lambda: len(engine_threads()) <= len(before), engine_threads)
