"""Faults at every store call of a writer that adopts a load: the load becomes visible completely, and no row is lost.

The first run counts the calls. Then each call in turn fails before its effect, fails after it, or ends the process
before or after it. Retries must hide an error; after a crash the next writer adopts the load.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cache

import pytest

from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.db.reader.feed import open_feed
from flagstone.errors import FlagstoneError
from flagstone.loads.notice import load_notice
from flagstone.metadata.stores import ManifestStore
from flagstone.spark.address import DatabaseAddress, open_store
from flagstone.spark.load.commit import commit_load
from flagstone.spark.load.request import begin_load
from flagstone.spark.load.task import write_ssts
from flagstone.spark.options import WriteOptions
from flagstone.store.resolve import resolve_database
from flagstone.testing.faults import Crashed, Effect, Fault, FaultyStore
from kit.databases import QUIET
from kit.faults import struck_calls
from kit.spark_loads import batch_of, pairs

SETTINGS = QUIET.replace(manifest_poll_interval=timedelta(milliseconds=30))
LOADED = {b"%03d" % number: b"loaded" for number in range(50)}
MOST_CALLS = 25
ALL_BUT_WAL = "db/[!w]*"

pytestmark = pytest.mark.slow


def adopt_with(name: str, fault: Fault | None) -> int:
    """Run one case; returns the number of store calls of the writer, without the WAL, while it adopts the load."""
    address = DatabaseAddress(f"memory://load-request-{name}/db")
    inner, root = resolve_database(address.path, None, None)
    faulty = FaultyStore(inner)
    db = open_database(root, store=faulty, settings=SETTINGS)
    manifests = ManifestStore(*open_store(address))
    while load_notice(*open_store(address)).epoch != manifests.require_latest().value.writer_epoch:
        pass
    acknowledged = {b"007": b"older than the load", b"own": b"row"}
    for key, value in acknowledged.items():
        db.put(key, value, await_durable=True)
    with open_feed(address.path, "copy") as feed:
        assert feed.snapshot is not None
        began = dict(feed.snapshot.scan())
        feed.copied()
    plan = begin_load(address)
    options = WriteOptions(address, hand_over_timeout=timedelta(seconds=60))
    made = write_ssts([batch_of(pairs(LOADED))], plan, options)
    db.put(b"unflushed", b"row", await_durable=True)
    acknowledged[b"unflushed"] = b"row"
    before = len(faulty.calls)
    if fault is not None:
        faulty.faults.append(fault)
    stop = threading.Event()

    def write() -> None:
        number = 0
        with suppress(FlagstoneError, Crashed):
            while not stop.is_set():
                key = b"w%04d" % number
                db.put(key, b"%d" % number, await_durable=True)
                acknowledged[key] = b"%d" % number
                number += 1
                stop.wait(0.01)

    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(write)
        committing = pool.submit(commit_load, plan, options, made)
        try:
            if fault is not None and fault.effect.startswith("crash"):
                while not faulty.dead and not committing.done():
                    pass
                if faulty.dead:
                    with open_database(root, store=inner, settings=SETTINGS):
                        committing.result(60)
            report = committing.result(60)
        finally:
            stop.set()
        writing.result(60)
    calls = sum(not path.startswith("db/wal/") for _, path in faulty.calls[before:])
    faulty.faults.clear()
    with suppress(FlagstoneError, Crashed):
        db.close()
    with open_database(root, store=inner, settings=SETTINGS) as after:
        found, expected = dict(after.scan()), {**acknowledged, **LOADED}
        assert {key: found.get(key) for key in expected} == expected
        # A write without a reply before the crash may be there, or not.
        assert len(found.keys() - expected.keys()) <= 1
        loaded = after.get_row(b"007")
        assert loaded is not None
        assert (loaded.seq, report.rows) == (plan.seq, len(LOADED))
        after.put(b"007", b"newer than the load", await_durable=True)
        assert after.get(b"007") == b"newer than the load"
        changes = [change for batch in feed.follow(timeout_s=0) for change in batch.changes]
        copied = {**began, **{change.key: change.value for change in changes}}
        assert copied == dict(after.scan()), "a feed that began before the load has every change"
        assert len({(change.seq, change.key) for change in changes}) == len(changes)
    assert Admin(address.path).verify().ok
    return calls


@cache
def calls_without_faults() -> int:
    return adopt_with("counted", None)


@pytest.mark.parametrize("effect", ["error", "lost_reply", "crash", "crash_after"])
def test_a_fault_at_any_store_call_adopts_a_load_completely_or_not_at_all(effect: Effect) -> None:
    calls = min(calls_without_faults(), MOST_CALLS)
    assert calls > 4
    print(f"{calls} calls")
    for nth in struck_calls(calls):
        adopt_with(f"{effect}-{nth}", Fault(nth=nth, effect=effect, path=ALL_BUT_WAL))
