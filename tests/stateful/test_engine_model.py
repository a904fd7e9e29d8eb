"""The engine against the model: after any operations every read equals the model's.

`make model` runs thousands of examples (`HYPOTHESIS_PROFILE=model`); an ordinary run only a few.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from flagstone.config import Settings
from flagstone.config.settings import CodecName
from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.db.writer.database import Db
from flagstone.db.writer.transaction import Snapshot, Transaction
from flagstone.errors import Closed, FlagstoneError, TransactionConflict
from flagstone.lsm.operators import Concatenate
from flagstone.lsm.segments import SegmentExtractor
from flagstone.runtime.clock import VirtualClock
from flagstone.store.memory import MemoryStore
from flagstone.store.retrying import RetryingStore
from flagstone.testing.faults import Crashed, Effect, Fault, FaultyStore
from flagstone.testing.model import Change, Model
from flagstone.types import MERGE, TOMBSTONE, VALUE, KeyRange
from flagstone.write.batch import WriteBatch

pytestmark = pytest.mark.slow

KEYS = [b"\x00", b"0", b"A", b"a", b"a\x00", b"a\x00b", b"a0", b"aZ", b"a\\", b"a\\0", b"ab"]
KEYS += [b"b", b"b" * 300, b"b\\", b"ba\xff", b"bb", b"\xff", b"\xff\xff"]
EDGES = [*KEYS, b"\\", b"aa", b"a\\\\", b"c", b"\xff\xff\xff"]

keys = st.sampled_from(KEYS)
edges = st.none() | st.sampled_from(EDGES)
values = st.binary(max_size=8) | st.sampled_from([b"x" * 200, b"y" * 700])
ttls = st.integers(1, 50)
changes = st.one_of(
    st.tuples(keys, st.just(VALUE), values, st.none() | ttls),
    st.tuples(keys, st.just(TOMBSTONE), st.just(b""), st.none()),
    st.tuples(keys, st.just(MERGE), st.binary(max_size=4), st.none()),
)


MOST_HICCUPS = 8


class EngineMachine(RuleBasedStateMachine):
    snapshots = Bundle("snapshots")
    transactions = Bundle("transactions")
    wal_enabled = True
    flush_interval: timedelta | None = None
    extractor: SegmentExtractor | None = None
    codec: CodecName | None = None

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.inner = MemoryStore()
        self.model = Model()
        self.life = 0  # handles of an earlier life are of no use any more
        self.db, self.store = self.open()

    def open(self) -> tuple[Db, FaultyStore]:
        store = FaultyStore(self.inner, clock=self.clock)
        self.life += 1
        return open_database(
            "db",
            # Retries on a clock of their own: with ours, rows would expire whenever the store hiccups.
            store=RetryingStore(store, clock=VirtualClock()),
            clock=self.clock,
            segment_extractor=self.extractor,
            merge_operator=Concatenate(),
            settings=Settings(
                wal_enabled=self.wal_enabled,
                flush_interval=self.flush_interval,
                compression_codec=self.codec,
                max_wal_flushes_before_l0_flush=4096 if self.flush_interval is None else 3,
                l0_sst_size_bytes=1024,
                sst_block_size=1024,
                min_filter_keys=1,
                l0_max_ssts=1000,
                l0_max_ssts_per_key=1000,
                compactor_options=None,
                garbage_collector_options=None,
            ),
        ), store

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    # -- writing

    @rule(change=changes, durable=st.booleans())
    def write_one(self, change: Change, durable: bool) -> None:
        key, kind, value, ttl = change
        if kind == VALUE:
            handle = self.db.put(key, value, ttl=None if ttl is None else f"{ttl}ms", await_durable=durable)
        elif kind == TOMBSTONE:
            handle = self.db.delete(key, await_durable=durable)
        else:
            handle = self.db.merge(key, value, await_durable=durable)
        self.model.commit(handle.seq, handle.created_ms, [change])
        assert not durable or handle.done()

    @rule(key=keys, operand=st.binary(max_size=4), ttl=ttls)
    def merge_for_a_while(self, key: bytes, operand: bytes, ttl: int) -> None:
        handle = self.db.merge(key, operand, ttl=f"{ttl}ms")
        self.model.commit(handle.seq, handle.created_ms, [(key, MERGE, operand, ttl)])

    @rule(batched=st.lists(changes, min_size=1, max_size=6), durable=st.booleans())
    def write_a_batch(self, batched: list[Change], durable: bool) -> None:
        batched = [(key, kind, value, None) for key, kind, value, _ in batched]
        batch = WriteBatch()
        fill(batch, batched)
        handle = self.db.write(batch, await_durable=durable)
        self.model.commit(handle.seq, handle.created_ms, batched)

    @rule(start=edges, stop=edges, by_manifest=st.booleans())
    def delete_a_range(self, start: bytes | None, stop: bytes | None, by_manifest: bool) -> None:
        if start is not None and stop is not None and start > stop:
            start, stop = stop, start
        wanted = KeyRange(start, stop)
        if by_manifest and not wanted.empty:
            # A range with so few rows becomes tombstones otherwise.
            handle = self.db._engine.services.range_deletes.delete(wanted)
            if handle is not None:
                self.model.delete_range(handle.seq, handle.created_ms, wanted)
        else:
            found = [key for key, _ in self.db.scan(start, stop, include_expired=True)]
            handle = self.db.delete_range(start, stop)
            if found:
                gone: list[Change] = [(key, TOMBSTONE, b"", None) for key in found]
                self.model.commit(handle.seq, handle.created_ms, gone)
        assert wanted.empty or self.db.status()["durable_seq"] == self.model.last_seq
        assert wanted.empty or not list(self.db.scan(start, stop, include_expired=True))

    @rule(ms=st.integers(1, 60))
    def time_passes(self, ms: int) -> None:
        self.clock.advance(ms)

    @rule()
    def flush_the_log(self) -> None:
        self.db.flush("wal" if self.wal_enabled else "memtable")
        assert self.db.status()["durable_seq"] == self.model.last_seq

    @rule()
    def flush_the_memtable(self) -> None:
        self.db.flush()
        assert self.db.status()["last_l0_seq"] == self.model.last_seq

    @rule(full=st.booleans())
    def compact(self, full: bool) -> None:
        # By another process, whose clock is not ours.
        admin = Admin("db", store=self.inner)
        before = {view.id for tree in self.db.manifest().trees for view in tree.l0}
        admin.compact(full=full, merge_operator=Concatenate(), patience=timedelta(0))
        self.db.checkpoint(
            scope="durable", lifetime=timedelta(seconds=1)
        )  # makes the engine read the manifest
        # Not "none at all": a memtable that was frozen earlier may have been flushed meanwhile.
        after = {view.id for tree in self.db.manifest().trees for view in tree.l0}
        assert not full or not before & after

    @rule(
        effect=st.sampled_from(["error", "lost_reply"]),
        nth=st.integers(1, 3),
        path=st.sampled_from(["*", "*/wal/*", "*/manifest/*", "*/compacted/*"]),
    )
    def the_store_hiccups_soon(self, effect: Effect, nth: int, path: str) -> None:
        # Not so many that one call could meet failures for longer than it is retried: that would be an outage.
        if len(self.store.faults) < MOST_HICCUPS:
            self.store.faults.append(Fault(effect, nth=nth, path=path))

    # -- reading

    @rule(key=keys)
    def read_one(self, key: bytes) -> None:
        expected = self.model.read(key, self.model.last_seq, self.now_ms)
        assert self.db.get_row(key) == expected
        assert self.db.get(key, b"default") == (b"default" if expected is None else expected.value)
        assert self.db.get_row(key, dirty=True) == expected

    @rule(asked=st.lists(keys, max_size=6))
    def read_many(self, asked: list[bytes]) -> None:
        rows = [self.model.read(key, self.model.last_seq, self.now_ms) for key in asked]
        assert self.db.multi_get(asked) == [None if row is None else row.value for row in rows]

    @rule()
    def read_what_is_durable(self) -> None:
        low = self.db.status()["durable_seq"]
        found = list(self.db.scan(durable_only=True).rows())
        high = self.db.status()["durable_seq"]
        possible = [self.model.scan(KeyRange(), seq, self.now_ms) for seq in range(low, high + 1)]
        assert found in possible

    @rule(
        start=edges,
        stop=edges,
        prefix=st.none() | st.sampled_from([b"a", b"b", b"\xff", b"a\x00", b"zz"]),
        reverse=st.booleans(),
        limit=st.none() | st.integers(0, 4),
    )
    def read_a_range(
        self, start: bytes | None, stop: bytes | None, prefix: bytes | None, reverse: bool, limit: int | None
    ) -> None:
        if start is not None and stop is not None and start > stop:
            start, stop = stop, start
        wanted = key_range(start, stop, prefix)
        expected = self.model.scan(wanted, self.model.last_seq, self.now_ms, reverse=reverse)[:limit]
        scan = self.db.scan(start, stop, prefix=prefix, reverse=reverse, limit=limit)
        assert list(scan.rows()) == expected
        pairs = self.db.scan(start, stop, prefix=prefix, reverse=reverse, limit=limit)
        assert list(pairs) == [(row.key, row.value) for row in expected]

    @rule(goal=st.sampled_from(EDGES), first=st.integers(0, 3), reverse=st.booleans())
    def seek_in_a_scan(self, goal: bytes, first: int, reverse: bool) -> None:
        everything = self.model.scan(KeyRange(), self.model.last_seq, self.now_ms, reverse=reverse)
        with self.db.scan(reverse=reverse) as scan:
            seen = [pair[0] for _, pair in zip(range(first), scan, strict=False)]
            scan.seek(goal)
            rest = [key for key, _ in scan]
        expected = [
            row.key for row in everything[first:] if (row.key <= goal if reverse else row.key >= goal)
        ]
        assert seen == [row.key for row in everything[:first]]
        assert rest == expected

    @invariant()
    def a_full_scan_equals_the_model(self) -> None:
        expected = self.model.scan(KeyRange(), self.model.last_seq, self.now_ms)
        assert list(self.db.scan()) == [(row.key, row.value) for row in expected]

    # -- snapshots and transactions

    @rule(target=snapshots)
    def take_a_snapshot(self) -> tuple[int, Snapshot]:
        snapshot = self.db.snapshot()
        assert snapshot.seq == self.model.last_seq
        return self.life, snapshot

    @rule(held=snapshots, key=keys)
    def read_a_snapshot(self, held: tuple[int, Snapshot], key: bytes) -> None:
        life, snapshot = held
        if life != self.life:
            return
        assert snapshot.get_row(key) == self.model.read(key, snapshot.seq, self.now_ms)
        assert list(snapshot.scan().rows()) == self.model.scan(KeyRange(), snapshot.seq, self.now_ms)

    @rule(held=consumes(snapshots))
    def close_a_snapshot(self, held: tuple[int, Snapshot]) -> None:
        _, snapshot = held
        snapshot.close()
        with pytest.raises(Closed):
            snapshot.get(b"a")

    @rule(target=transactions, isolation=st.sampled_from(["snapshot", "serializable"]))
    def begin(self, isolation: str) -> Running:
        return Running(self.life, self.db.transaction(isolation), isolation)  # type: ignore[arg-type]

    @rule(running=transactions, change=changes)
    def write_in_a_transaction(self, running: Running, change: Change) -> None:
        if running.life == self.life:
            change = (*change[:3], None)
            fill(running.transaction, [change])
            running.written.append(change)

    @rule(running=transactions, key=keys)
    def read_in_a_transaction(self, running: Running, key: bytes) -> None:
        if running.life != self.life:
            return
        running.read.add(key)
        expected = self.model.read(key, running.seq, self.now_ms, running.written, running.seq)
        assert running.transaction.get_row(key) == expected
        assert running.transaction.get(key) == (None if expected is None else expected.value)

    @rule(running=transactions, start=edges, stop=edges, reverse=st.booleans())
    def scan_in_a_transaction(
        self, running: Running, start: bytes | None, stop: bytes | None, reverse: bool
    ) -> None:
        if running.life != self.life:
            return
        if start is not None and stop is not None and start > stop:
            start, stop = stop, start
        wanted = KeyRange(start, stop)
        running.scanned.append(wanted)
        expected = self.model.scan(
            wanted, running.seq, self.now_ms, reverse=reverse, own=running.written, own_seq=running.seq
        )
        assert list(running.transaction.scan(start, stop, reverse=reverse).rows()) == expected

    @rule(running=consumes(transactions), durable=st.booleans())
    def commit(self, running: Running, durable: bool) -> None:
        if running.life != self.life:
            return
        if running.conflicts(self.model):
            with pytest.raises(TransactionConflict):
                running.transaction.commit(await_durable=durable)
            return
        handle = running.transaction.commit(await_durable=durable)
        assert (handle is None) == (not running.written)
        if handle is not None:
            self.model.commit(handle.seq, handle.created_ms, running.written)

    @rule(running=consumes(transactions))
    def roll_back(self, running: Running) -> None:
        if running.life == self.life:
            running.transaction.rollback()

    # -- ends and new beginnings

    @rule()
    def close_and_reopen(self) -> None:
        self.db.close()
        with pytest.raises(Closed):
            self.db.put(b"a", b"")
        self.db, self.store = self.open()
        assert self.db.status()["last_seq"] == self.model.last_seq

    @rule()
    def crash_and_reopen(self) -> None:
        durable = self.db.status()["durable_seq"]
        self.store.crash()
        with suppress(FlagstoneError, Crashed):
            self.db.close()
        self.db, self.store = self.open()
        self.check_recovered(durable)

    @precondition(lambda self: self.wal_enabled)
    @rule()
    def a_rival_takes_over(self) -> None:
        durable = self.db.status()["durable_seq"]
        loser = self.db
        self.db, self.store = self.open()
        self.check_recovered(durable)
        with pytest.raises(Closed) as refused:
            loser.put(b"a", b"too late", await_durable=True)
        assert refused.value.reason == "fenced"
        with pytest.raises(Closed):
            loser.get(b"a")
        loser.close()

    def check_recovered(self, durable: int) -> None:
        """What is there now is a prefix of the commits that holds at least all that was durable."""
        recovered = self.db.status()["last_seq"]
        assert durable <= recovered <= self.model.last_seq
        self.model.cut(recovered)

    def teardown(self) -> None:
        self.db.close()


class Running:
    """A transaction with its state in the model."""

    def __init__(self, life: int, transaction: Transaction, isolation: str) -> None:
        self.life = life
        self.transaction = transaction
        self.isolation = isolation
        self.seq = transaction.seq
        self.read: set[bytes] = set()
        self.scanned: list[KeyRange] = []
        self.written: list[Change] = []

    def __repr__(self) -> str:
        return f"Running({self.isolation}, seq={self.seq})"

    def conflicts(self, model: Model) -> bool:
        touched = model.touched_since(self.seq)
        deleted = [keys for seq, keys in model.deletes.items() if seq > self.seq]
        if any(change[0] in touched for change in self.written):
            return True
        if any(change[0] in keys for change in self.written for keys in deleted):
            return True
        return self.isolation == "serializable" and (
            bool(touched & self.read)
            or any(key in keys for keys in self.scanned for key in touched)
            or any(key in keys for keys in deleted for key in self.read)
            or any(not keys.intersect(scanned).empty for keys in deleted for scanned in self.scanned)
        )


class TimedEngineMachine(EngineMachine):
    """The same with a log that is written on its own."""

    flush_interval = timedelta(milliseconds=1)


class EngineWithoutLogMachine(EngineMachine):
    """The same where rows are durable only in SSTs."""

    wal_enabled = False


class FirstByte:
    name = "first-byte"

    def prefix(self, key: bytes) -> bytes:
        return key[:1]


class SegmentedEngineMachine(EngineMachine):
    """The same with a tree per first byte, and compressed."""

    extractor = FirstByte()
    codec = "Lz4"


def fill(target: WriteBatch | Transaction, batched: list[Change]) -> None:
    for key, kind, value, _ in batched:
        if kind == VALUE:
            target.put(key, value)
        elif kind == TOMBSTONE:
            target.delete(key)
        else:
            target.merge(key, value)


def key_range(start: bytes | None, stop: bytes | None, prefix: bytes | None) -> KeyRange:
    wanted = KeyRange(start, stop)
    return wanted if prefix is None else wanted.intersect(KeyRange.of_prefix(prefix))


RELAXED = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
PROFILE = settings().max_examples
# An everyday run is a smoke test; what `make model` and CI ask for they get.
BUDGET = settings(
    max_examples={50: 15, 200: 30}.get(PROFILE, PROFILE),
    suppress_health_check=RELAXED,
    stateful_step_count=40,
)

TestEngine = EngineMachine.TestCase
TestEngine.settings = BUDGET
TestTimedEngine = TimedEngineMachine.TestCase
TestTimedEngine.settings = BUDGET
TestEngineWithoutLog = EngineWithoutLogMachine.TestCase
TestEngineWithoutLog.settings = BUDGET
TestSegmentedEngine = SegmentedEngineMachine.TestCase
TestSegmentedEngine.settings = BUDGET
