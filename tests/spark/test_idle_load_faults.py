"""Faults at every store call of a driver whose load goes into an idle database and is overtaken by another load.

The calls include those of beginning, of the tasks, of the driver that opens the database itself, and of the copies with
another sequence number. After a fault all of the load is visible or none of it, the other load and earlier rows stay,
and what is left behind is deleted when the record of the load has lapsed.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from functools import cache

import pytest

from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.errors import FlagstoneError
from flagstone.loads.lifetime import LIFETIME_S
from flagstone.runtime.clock import VirtualClock
from flagstone.spark.address import DatabaseAddress
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.request import abort_load, begin_load
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectStore
from flagstone.testing.faults import Crashed, Effect, Fault, FaultyStore
from kit.databases import QUIET
from kit.faults import struck_calls
from kit.spark_loads import batch_of, pairs

BEFORE = {b"before": b"here", b"shared": b"before"}
OTHER = {b"other%d" % number: b"other" for number in range(20)} | {b"shared": b"other"}
LOADED = {b"k%03d" % number: b"loaded" for number in range(60)} | {b"shared": b"loaded"}

pytestmark = pytest.mark.slow


def load_rows(store: ObjectStore, clock: VirtualClock, overtaken_by: ObjectStore | None = None) -> None:
    """A load on `store`. With `overtaken_by`, another process loads on that store before the commit."""
    address = DatabaseAddress("db", store=store, clock=clock)
    options = WriteOptions(address, max_sst_bytes=1000, hand_over_timeout=timedelta(0))
    plan = begin_load(address)
    rows = OTHER if overtaken_by is None else LOADED
    try:
        made = write_ssts([batch_of(pairs(rows))], plan, options)
        if overtaken_by is not None:
            load_rows(overtaken_by, clock)
        commit_load(plan, options, made)
    except FlagstoneError:
        abort_load(plan)
        raise


def run_with(fault: Fault | None) -> int:
    """Run one case; returns the number of store calls of the load."""
    clock = VirtualClock()
    store = MemoryStore(clock=clock)
    with open_database("db", store=store, settings=QUIET, clock=clock) as db:
        for key, value in BEFORE.items():
            db.put(key, value, await_durable=True)
    failing = FaultyStore(store, [] if fault is None else [fault])
    failed = False
    try:
        load_rows(failing, clock, overtaken_by=store)
    except (Crashed, FlagstoneError):
        failed = True
    calls = len(failing.calls)
    if failed:
        # Another process repeats the load, as Spark's user does; the former one may still be in the database.
        with suppress(FlagstoneError):
            load_rows(store, clock)
    clock.advance(1000 * (LIFETIME_S + 1))
    with open_database("db", store=store, settings=QUIET, clock=clock) as db:
        found = dict(db.scan())
        loaded = {key for key in LOADED if key != b"shared" and key in found}
        assert loaded in (set(), LOADED.keys() - {b"shared"}), "all of the load, or nothing of it"
        assert failed or loaded
        assert (
            found.items()
            >= {b"before": b"here", **{key: OTHER[key] for key in OTHER if key != b"shared"}}.items()
        )
        assert found[b"shared"] == (b"other" if failed else b"loaded")
        db.put(b"after", b"here", await_durable=True)
        db.flush()
    admin = Admin("db", store=store, clock=clock)
    for held in admin.checkpoints():
        admin.delete_checkpoint(held.id)
    admin.collect_garbage(min_age=timedelta(0))
    ssts = sum(meta.path.endswith(".sst") for meta in store.list("db/compacted"))
    assert ssts == len(admin.manifest().value.ssts)
    assert admin.loads() == []
    assert admin.verify().ok
    return calls


@cache
def calls_without_faults() -> int:
    return run_with(None)


@pytest.mark.parametrize("effect", ["error", "lost_reply", "crash", "crash_after"])
def test_a_fault_at_any_store_call_of_an_overtaken_load_adds_all_of_it_or_nothing(effect: Effect) -> None:
    calls = calls_without_faults()
    assert calls > 80
    for nth in struck_calls(calls, stride=2 if effect.startswith("crash") else 5):
        try:
            run_with(Fault(nth=nth, effect=effect))
        except AssertionError as error:
            error.add_note(f"{effect} of call {nth} of {calls}")
            raise
