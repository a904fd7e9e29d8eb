"""A world of machines around one database: writers that come and go, readers, an operator, and everything that fails.

`World.run` lives through a troubled time and then a quiet one. In the troubled time the director crashes and pauses
machines, shifts clocks and disturbs the network. In the quiet time everything must work again: a writer opens the
database, every acknowledged write is there, garbage is collected and `verify` finds nothing.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from flagstone.config import (
    CompactionWorkerOptions,
    CompactorOptions,
    GarbageCollectorOptions,
    GcDirectoryOptions,
    GcFenceOptions,
    ReaderSettings,
    SchedulerOptions,
    Settings,
)
from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.db.reader.reader import open_reader
from flagstone.db.writer.database import Db
from flagstone.errors import Closed, FlagstoneError, InvalidRequest, TransactionConflict, Unavailable
from flagstone.runtime import sync
from flagstone.runtime.ids import Ids
from flagstone.store.memory import MemoryStore
from flagstone.testing.simulation.network import Conditions, Fault, Link, Network
from flagstone.testing.simulation.oracle import Branch, Change, Intent, Oracle, Violation
from flagstone.testing.simulation.scheduler import Crashed, Machine, Process, Scheduler, Task, describe

PATH: Final = "db"
_QUIET_LIMIT_S: Final = 4 * 3600.0
"""How long the quiet time may take until everything works again."""
_GARBAGE_AGE: Final = timedelta(seconds=300)


class Concatenation:
    """The merge operator of simulated databases."""

    def merge(self, key: bytes, existing: bytes | None, operand: bytes) -> bytes:  # noqa: ARG002
        return (existing or b"") + operand


@dataclass(frozen=True, slots=True)
class Plan:
    """What one seed simulates. All of it is drawn from the seed."""

    seed: int
    hours: float
    writers: int
    readers: int
    clients: int
    keys: int
    switch_rate: float
    settings: Settings
    rates: dict[Fault, float]
    latency_s: float
    crash_every_s: float
    pause_every_s: float
    jump_every_s: float
    outage_every_s: float
    busy_s: float
    idle_s: float


@dataclass(slots=True)
class Outcome:
    """What a run did. `problem` is None if everything was as it must be."""

    seed: int
    problem: str | None = None
    simulated_s: float = 0.0
    switches: int = 0
    digest: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    acknowledged: int = 0
    reads: int = 0
    store: MemoryStore | None = None


def plan_world(seed: int, *, hours: float | None = None) -> Plan:
    """The world of a seed: sizes, settings and rates."""
    draw = Ids(seed)
    pick = lambda *choices: choices[int(draw.uniform(0, len(choices)))]  # noqa: E731
    trouble = pick(0.0, 0.3, 1.0, 3.0)
    rates: dict[Fault, float] = {
        "refused": 0.02 * trouble,
        "lost_reply": 0.02 * trouble,
        "late": pick(0.0, 0.005, 0.02) * trouble,
        "repeated": 0.01 * trouble,
        "slow": 0.02 * trouble,
        "full": pick(0.0, 0.002) * trouble,
    }
    compactor = CompactorOptions(
        scheduler_options=SchedulerOptions(min_compaction_sources=pick(2, 3, 4), max_compaction_sources=8),
        worker=CompactionWorkerOptions(max_sst_size=pick(2_000, 8_000), max_subcompactions=pick(1, 4)),
    )
    garbage = GcDirectoryOptions(interval=timedelta(seconds=pick(60, 600)), min_age=_GARBAGE_AGE)
    fences = GcFenceOptions(interval=timedelta(seconds=600), min_age=_GARBAGE_AGE, dry_run=pick(True, False))
    settings = Settings(
        l0_sst_size_bytes=pick(600, 2_000, 6_000),
        l0_max_ssts=pick(4, 8),
        l0_flush_parallelism=pick(1, 4),
        max_unflushed_bytes=pick(6_000, 1 << 20),
        flush_interval=pick(None, timedelta(milliseconds=100), timedelta(seconds=5)),
        wal_enabled=pick(True, True, True, False),
        synchronous_commit=pick(False, False, True),
        manifest_poll_interval=timedelta(seconds=pick(1, 10)),
        sst_block_size=1024,
        compactor_options=pick(compactor, compactor, None),
        on_clock_regression="hold",
        garbage_collector_options=pick(
            None,
            GarbageCollectorOptions(
                manifest_options=garbage,
                wal_options=garbage,
                wal_fence_options=fences,
                compacted_options=garbage,
                compactions_options=garbage,
            ),
        ),
    )
    return Plan(
        seed=seed,
        hours=hours if hours is not None else pick(0.2, 1.0, 6.0, 48.0),
        writers=pick(1, 2, 3),
        readers=pick(0, 1, 2),
        clients=pick(1, 2, 4),
        keys=pick(3, 12, 60),
        switch_rate=pick(0.02, 0.2, 0.6),
        settings=settings,
        rates=rates,
        latency_s=pick(0.001, 0.02, 0.3),
        crash_every_s=pick(60.0, 900.0, 20_000.0),
        pause_every_s=pick(120.0, 3_000.0, 50_000.0),
        jump_every_s=pick(600.0, 10_000.0, 1e9),
        outage_every_s=pick(600.0, 5_000.0, 1e9),
        busy_s=pick(5.0, 60.0),
        idle_s=pick(1.0, 60.0, 3_000.0),
    )


class World:
    """One simulation."""

    def __init__(self, plan: Plan, *, trace: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.scheduler = Scheduler(plan.seed, switch_rate=plan.switch_rate, trace=trace)
        self.random = self.scheduler.random
        self.store = MemoryStore(clock=Machine(self.scheduler, "store"))
        self.network = Network(self.scheduler, self.store)
        self.oracle = Oracle()
        self.outcome = Outcome(plan.seed)
        self.done = self.outcome.operations
        self.quiet = False
        self.violation: BaseException | None = None
        self._tokens = 0
        self._latest_ms = 0
        self._machines: list[Machine] = []
        self._processes: dict[str, Process] = {}
        self._checkpoints: dict[UUID, dict[bytes, bytes]] = {}

    # -- running ------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Simulate, check, and report. Never raises for what the database did."""
        outcome, scheduler = self.outcome, self.scheduler
        with _deterministic(), sync.install(scheduler):
            try:
                self._live()
            except Violation as violation:
                outcome.problem = str(violation)
            finally:
                for process in self._processes.values():
                    scheduler.crash(process)
        outcome.simulated_s = scheduler.now_ns / 1e9
        outcome.switches = scheduler.switches
        outcome.digest = scheduler.digest
        outcome.faults = self.network.faults
        outcome.requests = self.network.requests.total()
        outcome.acknowledged = self.oracle.acknowledged
        outcome.reads = self.oracle.reads
        outcome.store = self.store
        return outcome

    def _live(self) -> None:
        plan = self.plan
        self.network.conditions = Conditions(rates=plan.rates, latency_s=plan.latency_s)
        drift = lambda: self.random.uniform(-0.001, 0.001)  # noqa: E731
        offset = lambda: self.random.choice((0, 0, self.random.randrange(-2_000, 2_000)))  # noqa: E731
        for number in range(plan.writers):
            self._start(Machine(self.scheduler, f"w{number}", offset_ms=offset(), drift=drift()), self._write)
        for number in range(plan.readers):
            self._start(Machine(self.scheduler, f"r{number}", offset_ms=offset(), drift=drift()), self._read)
        self._start(Machine(self.scheduler, "op", offset_ms=offset(), drift=drift()), self._operate)
        self._disturb("crash", plan.crash_every_s, self._crash_one)
        self._disturb("pause", plan.pause_every_s, self._pause_one)
        self._disturb("clock", plan.jump_every_s, self._shift_one)
        self._disturb("outage", plan.outage_every_s, self._begin_outage)
        self._advance(plan.hours * 3600)
        self._calm_down()
        self._require_recovery()

    def _advance(self, seconds: float) -> None:
        end = self.scheduler.now_ns + int(seconds * 1e9)
        self.scheduler.after(seconds, lambda: None)
        self.scheduler.run(lambda: self.scheduler.now_ns >= end or self.violation is not None)
        self._check_violation()

    def _check_violation(self) -> None:
        failed = self.scheduler.failures[0].error if self.scheduler.failures else None
        found = self.violation or failed
        if found is not None:
            if isinstance(found, Violation):
                raise found
            raise Violation(f"unexpected {describe(found)}: {found}") from found

    def _start(self, machine: Machine, main: Callable[[Process], None]) -> None:
        self._machines.append(machine)
        self._boot(machine, main)

    def _boot(self, machine: Machine, main: Callable[[Process], None]) -> None:
        if self.quiet:
            return
        process = self._processes[machine.name] = machine.boot()
        process.objects["main"] = main
        self.scheduler.note(f"boot {process.name}")
        self.scheduler.spawn(lambda: self._guarded(main, process), "main", process)

    def _guarded(self, body: Callable[..., None], *arguments: Any) -> None:
        try:
            body(*arguments)
        except Crashed:
            raise
        except BaseException as error:  # noqa: BLE001 - the run ends with it
            if self.violation is None:
                self.violation = error

    # -- disturbances -------------------------------------------------------------------------------------

    def _disturb(self, kind: str, every_s: float, strike: Callable[[], None]) -> None:
        def again() -> None:
            if not self.quiet:
                self.network.faults[kind] += 1
                strike()
                self.scheduler.after(self.random.expovariate(1 / every_s), again)

        self.scheduler.after(self.random.expovariate(1 / every_s), again)

    def _crash_one(self) -> None:
        machine = self.random.choice(self._machines)
        process = self._processes[machine.name]
        main = process.objects.get("main")
        if main is None or process.dead:
            return
        # At a scheduling point of one of its tasks, some turns from now.
        countdown = self.random.randrange(1, 40)

        def strike(task: Task) -> None:
            nonlocal countdown
            if task.process is process:
                countdown -= 1
                if countdown <= 0:
                    self.scheduler.on_switch = None
                    self._crash(process, main)

        self.scheduler.on_switch = strike

    def _crash(self, process: Process, main: Callable[[Process], None]) -> None:
        self.scheduler.crash(process)
        delay_s = self.random.choice((0.1, 5.0, 120.0, 4_000.0))
        self.scheduler.after(delay_s, lambda: self._boot(process.machine, main))

    def _pause_one(self) -> None:
        machine = self.random.choice(self._machines)
        seconds = self.random.choice((0.5, 15.0, 45.0, 400.0, 4_000.0, 90_000.0))
        self.scheduler.note(f"pause {machine.name} for {seconds} s")
        machine.pause(seconds)

    def _shift_one(self) -> None:
        machine = self.random.choice(self._machines)
        self._window(0, machine)
        machine.offset_ms += self.random.choice((-3_600_000, -20_000, -1_500, 1_500, 20_000, 3_600_000))
        self.scheduler.note(f"clock of {machine.name} is off by {machine.offset_ms} ms")

    def _begin_outage(self) -> None:
        machine = self.random.choice((None, *self._machines))
        seconds = self.random.choice((1.0, 30.0, 600.0))
        self.scheduler.note(f"outage of {machine.name if machine else 'the store'} for {seconds} s")
        if machine is None:
            self.network.conditions.outage = True
        else:
            self.network.cut_off.add(machine.name)

        def end() -> None:
            if machine is None:
                self.network.conditions.outage = False
            else:
                self.network.cut_off.discard(machine.name)

        self.scheduler.after(seconds, end)

    # -- the quiet time -----------------------------------------------------------------------------------

    def _calm_down(self) -> None:
        self.scheduler.note("the quiet time begins")
        self.quiet = True
        self.scheduler.on_switch = None
        self.network.conditions = replace(self.network.conditions, rates={}, outage=False)
        self.network.cut_off.clear()
        for machine in self._machines:
            self.scheduler.crash(self._processes[machine.name])
            self._window(0, machine)
            machine.offset_ms = 0

    def _require_recovery(self) -> None:
        """Everything works again within a bounded time, and nothing is left over."""
        machine = Machine(self.scheduler, "judge")
        process = self._processes["judge"] = machine.boot()
        task = self.scheduler.spawn(lambda: self._guarded(self._judge, process), "main", process)
        end = self.scheduler.now_ns + int((_QUIET_LIMIT_S + 400_000) * 1e9)
        self.scheduler.run(
            lambda: task.ended or self.violation is not None or self.scheduler.now_ns >= end
        )
        self._check_violation()
        if not task.ended:
            raise Violation(f"not everything works again {_QUIET_LIMIT_S} s after the last fault")

    def _judge(self, process: Process) -> None:
        machine = process.machine
        while self.network.in_flight or any(each.paused for each in self._machines):
            machine.sleep(60)
        started_s = machine.monotonic()
        with self._open(process) as db:
            branch = self._opened(db, machine)
            for number in range(5):
                self._put(db, branch, b"judge %d" % number)
            self._scan(db, branch, machine)
            db.flush()
        admin = self._admin(process)
        for checkpoint, rows in self._checkpoints.items():
            self._reread(process, checkpoint, rows)
            admin.delete_checkpoint(checkpoint, force=True)
        report = admin.verify()
        damage = [finding for finding in report.findings if finding.severity == "damage"]
        if damage:
            raise Violation(f"verify: {damage[0]}")
        if machine.monotonic() - started_s > _QUIET_LIMIT_S:
            raise Violation(f"recovery took {machine.monotonic() - started_s:.0f} s")
        self._require_clean_store(process)

    def _require_clean_store(self, process: Process) -> None:
        """After some rounds of garbage collection nothing is left that no manifest refers to."""
        machine, admin = process.machine, self._admin(process)
        # Past the checkpoints that crashed processes left behind, and past every clock that ran ahead.
        machine.sleep(50_000)
        with self._open(process) as db:
            branch = self._opened(db, machine)
            # SSTs that are not older than the newest of L0 may belong to a flush under way.
            self._put(db, branch, b"judge")
            db.flush()
            self._scan(db, branch, machine)
        for _ in range(2):
            machine.sleep(4_000)
            report = admin.collect_garbage(min_age=timedelta())
            if report.errors:
                raise Violation(f"garbage collection in the quiet time: {report.errors[0]}")
        found = admin.verify()
        if found.findings:
            raise Violation(f"left over after garbage collection: {found.findings[0]}")

    # -- writers ------------------------------------------------------------------------------------------

    def _write(self, process: Process) -> None:
        machine = process.machine
        while True:
            machine.sleep(self.random.expovariate(1 / self.plan.idle_s))
            try:
                db = self._open(process)
            except (Closed, Unavailable) as error:
                self.scheduler.note(f"cannot open: {describe(error)}")
                continue
            self.done["open"] += 1
            branch = self._opened(db, machine)
            clients = [
                sync.start_thread(lambda: self._guarded(self._serve, db, branch, process), name=f"client{number}")  # noqa: B023
                for number in range(self.plan.clients)
            ]
            for client in clients:
                client.join()
            try:
                db.close()
            except (Closed, Unavailable) as error:
                self.scheduler.note(f"close: {describe(error)}")
            self.done["close"] += 1

    def _open(self, process: Process) -> Db:
        settings = self.plan.settings
        if self.quiet and settings.compactor_options is None:
            # A full L0 stops flushes until a compactor makes room.
            settings = replace(settings, compactor_options=CompactorOptions())
        return open_database(
            PATH,
            store=Link(self.network, process),
            settings=settings,
            merge_operator=Concatenation(),
            clock=process.machine,
            ids=self._ids(process),
        )

    def _opened(self, db: Db, machine: Machine) -> Branch:
        status = db.status()
        branch = self.oracle.opened(status["writer_epoch"], status["last_seq"])
        self.scheduler.note(f"opened epoch={branch.epoch} last_seq={branch.base_seq}")
        before_ms = machine.now_ms()
        try:
            with db.snapshot() as snapshot, snapshot.scan(include_expired=True) as rows:
                found = list(rows.rows())
        except (Closed, Unavailable):
            return branch
        self.oracle.audit(branch, found, self._window(before_ms, machine))
        return branch

    def _serve(self, db: Db, branch: Branch, process: Process) -> None:
        machine = process.machine
        end_s = machine.monotonic() + self.random.expovariate(1 / self.plan.busy_s)
        actions = (
            self._put, self._put, self._delete, self._merge, self._batch, self._get, self._get, self._scan_now,
            self._snapshot, self._transact, self._transact, self._flush, self._checkpoint, self._wait_durable,
        )
        while machine.monotonic() < end_s and not db.closed:
            action = self.random.choice(actions)
            try:
                action(db, branch, machine=machine)
            except (Closed, Unavailable) as error:
                self.scheduler.note(f"{action.__name__}: {describe(error)}")
                if isinstance(error, Closed):
                    return
            self.done[action.__name__.strip("_")] += 1
            machine.sleep(self.random.expovariate(2.0))

    def _put(self, db: Db, branch: Branch, key: bytes | None = None, *, machine: Machine | None = None) -> None:
        lifetime_s = self.random.choice((2, 40, 4_000)) if key is None and self.random.random() < 0.2 else None
        key = key or self._key()
        if lifetime_s is not None and machine is not None and not key.startswith(b"m"):
            expires_ms = machine.now_ms() + 1000 * lifetime_s
            change = Change("put", key, self._token(), expires_ms)
            self._commit(branch, [change], lambda: db.put(key, change.value, expire_at=expires_ms))
        else:
            change = Change("put", key, self._token())
            durable = machine is None or self.random.random() < 0.3
            self._commit(branch, [change], lambda: db.put(key, change.value), durable=durable)

    def _delete(self, db: Db, branch: Branch, *, machine: Machine) -> None:  # noqa: ARG002
        key = self._key()
        self._commit(branch, [Change("delete", key)], lambda: db.delete(key))

    def _merge(self, db: Db, branch: Branch, *, machine: Machine) -> None:  # noqa: ARG002
        change = Change("merge", b"m" + self._key()[1:], self._token())
        self._commit(branch, [change], lambda: db.merge(change.key, change.value))

    def _batch(self, db: Db, branch: Branch, *, machine: Machine) -> None:  # noqa: ARG002
        from flagstone.write.batch import WriteBatch  # noqa: PLC0415

        changes, batch = {}, WriteBatch()
        for _ in range(self.random.randrange(2, 6)):
            key = self._key()
            if key in changes:
                continue
            if self.random.random() < 0.3:
                changes[key] = Change("delete", key)
                batch.delete(key)
            else:
                changes[key] = Change("put", key, self._token())
                batch.put(key, changes[key].value)
        self._commit(
            branch, list(changes.values()), lambda: db.write(batch), durable=self.random.random() < 0.3
        )

    def _commit(
        self, branch: Branch, changes: list[Change], write: Callable[[], Any], *, durable: bool = False
    ) -> None:
        intent = self.oracle.begin(branch, changes)
        handle = write()
        self._settle(branch, intent, handle, durable=durable)

    def _settle(self, branch: Branch, intent: Intent, handle: Any, *, durable: bool) -> None:
        self.oracle.settle(branch, intent, handle.seq)
        self.scheduler.note(f"wrote {handle.seq}: {len(intent.changes)} rows")
        if durable:
            handle.wait()
            self.oracle.acknowledge(branch, handle.seq)

    def _wait_durable(self, db: Db, branch: Branch, *, machine: Machine) -> None:  # noqa: ARG002
        seq = db.status()["last_seq"]
        db.flush("wal" if self.plan.settings.wal_enabled else "memtable")
        self.oracle.acknowledge(branch, seq)

    def _flush(self, db: Db, branch: Branch, *, machine: Machine) -> None:  # noqa: ARG002
        db.flush()

    def _get(self, db: Db, branch: Branch, *, machine: Machine) -> None:
        key = self._key()
        low, before_ms = db.status()["committed_seq"], machine.now_ms()
        value = db.get(key)
        high = db.status()["last_seq"]
        self.oracle.expect(branch, key, value, (low, high), self._window(before_ms, machine))

    def _scan_now(self, db: Db, branch: Branch, *, machine: Machine) -> None:
        self._scan(db, branch, machine)

    def _scan(self, db: Db, branch: Branch, machine: Machine) -> None:
        with db.snapshot() as snapshot:
            before_ms = machine.now_ms()
            rows = dict(snapshot.scan(reverse=self.random.random() < 0.3))
            self.oracle.expect_all(
                branch, rows, (snapshot.seq, snapshot.seq), self._window(before_ms, machine)
            )

    def _snapshot(self, db: Db, branch: Branch, *, machine: Machine) -> None:
        """A snapshot shows the same for as long as it lives."""
        with db.snapshot() as snapshot:
            for _ in range(self.random.randrange(2, 5)):
                key, before_ms = self._key(), machine.now_ms()
                value = snapshot.get(key)
                self.oracle.expect(
                    branch, key, value, (snapshot.seq, snapshot.seq), self._window(before_ms, machine)
                )
                machine.sleep(self.random.choice((0.01, 1.0, 100.0)))

    def _transact(self, db: Db, branch: Branch, *, machine: Machine) -> None:
        serializable = self.random.random() < 0.5
        transaction = db.transaction("serializable" if serializable else "snapshot")
        read: set[bytes] = set()
        changes: dict[bytes, Change] = {}
        intent: Intent | None = None
        try:
            for _ in range(self.random.randrange(1, 5)):
                key = self._key()
                if self.random.random() < 0.5:
                    before_ms = machine.now_ms()
                    value = transaction.get(key)
                    if key in changes:
                        if value != changes[key].value:
                            raise Violation(f"a transaction does not see its own write of {key!r}")
                    else:
                        read.add(key)
                        seqs = (transaction.seq, transaction.seq)
                        self.oracle.expect(branch, key, value, seqs, self._window(before_ms, machine))
                else:
                    changes[key] = Change("put", key, self._token())
                    transaction.put(key, changes[key].value)
                machine.sleep(self.random.choice((0.001, 0.1, 2.0)))
            if not changes:
                transaction.rollback()
                return
            intent = self.oracle.begin(branch, changes.values())
            handle = transaction.commit()
        except TransactionConflict:
            if intent is not None:
                self.oracle.drop(branch, intent)
            self.done["conflict"] += 1
            return
        assert handle is not None
        self._settle(branch, intent, handle, durable=self.random.random() < 0.3)
        self._check_isolation(branch, transaction.seq, handle.seq, set(changes), read if serializable else set())

    def _check_isolation(self, branch: Branch, start: int, end: int, written: set[bytes], read: set[bytes]) -> None:
        """No other write of the same keys, nor of what a serializable transaction read, falls into its lifetime."""
        for key in written | read:
            between = [
                version.seq for version in branch.versions.get(key, ()) if start < version.seq < end
            ]
            if between:
                raise Violation(
                    f"the transaction from {start} to {end} committed, but write {between[0]} changed {key!r}"
                )

    def _checkpoint(self, db: Db, branch: Branch, *, machine: Machine) -> None:  # noqa: ARG002
        if len(self._checkpoints) > 5 or self.random.random() < 0.5:
            return
        created = db.checkpoint(scope=self.random.choice(("all", "durable")))
        process = self._processes[machine.name]
        self._checkpoints[created.id] = self._rows_of(process, created.id)

    # -- readers and the operator -------------------------------------------------------------------------

    def _rows_of(self, process: Process, checkpoint: UUID) -> dict[bytes, bytes]:
        with open_reader(
            PATH,
            store=Link(self.network, process),
            checkpoint=checkpoint,
            merge_operator=Concatenation(),
            clock=process.machine,
            ids=self._ids(process),
        ) as reader, reader.scan(include_expired=True) as rows:
            return dict(rows)

    def _reread(self, process: Process, checkpoint: UUID, rows: dict[bytes, bytes]) -> None:
        found = self._rows_of(process, checkpoint)
        if found != rows:
            changed = sorted(key for key in {*found, *rows} if found.get(key) != rows.get(key))
            raise Violation(f"checkpoint {checkpoint} shows other rows than before: {changed[:3]}")
        self.done["reread"] += 1

    def _read(self, process: Process) -> None:
        machine = process.machine
        while True:
            machine.sleep(self.random.expovariate(1 / self.plan.idle_s))
            try:
                self._follow(process)
            except (Closed, Unavailable, InvalidRequest) as error:
                if isinstance(error, InvalidRequest) and self.done["open"] and "no database" not in str(error):
                    raise
                self.scheduler.note(f"reader: {describe(error)}")

    def _follow(self, process: Process) -> None:
        machine = process.machine
        settings = ReaderSettings(
            manifest_poll_interval=timedelta(seconds=1), checkpoint_lifetime=timedelta(seconds=60)
        )
        with open_reader(
            PATH,
            store=Link(self.network, process),
            mode=self.random.choice(("managed", "latest")),
            settings=settings,
            merge_operator=Concatenation(),
            clock=machine,
            ids=self._ids(process),
        ) as reader:
            shown = 0
            for _ in range(self.random.randrange(1, 8)):
                machine.sleep(self.random.expovariate(0.5))
                low, before_ms = reader.status()["last_seq"], machine.now_ms()
                rows = dict(reader.scan())
                high = reader.status()["last_seq"]
                if low < shown:
                    raise Violation(f"a reader showed sequence number {shown}, and then {low}")
                shown = low
                branch = self.oracle.latest
                if branch is not None and low == high:
                    self.oracle.expect_all(branch, rows, (low, low), self._window(before_ms, machine))
                self.done["reader scan"] += 1

    def _operate(self, process: Process) -> None:
        machine = process.machine
        while True:
            machine.sleep(self.random.expovariate(1 / (10 * self.plan.idle_s)))
            try:
                self._maintain(process)
            except (Closed, Unavailable, TransactionConflict) as error:
                self.scheduler.note(f"operator: {describe(error)}")
            except InvalidRequest as error:
                if self.done["open"] and "no database" not in str(error):
                    raise

    def _maintain(self, process: Process) -> None:
        admin, choice = self._admin(process), self.random.randrange(4)
        if choice == 0:
            admin.collect_garbage(min_age=_GARBAGE_AGE)
            self.done["collect"] += 1
        elif choice == 1:
            admin.compact(full=self.random.random() < 0.5, merge_operator=Concatenation())
            self.done["compact"] += 1
        elif choice == 2 and self._checkpoints:
            checkpoint = self.random.choice(list(self._checkpoints))
            self._reread(process, checkpoint, self._checkpoints[checkpoint])
            if self.random.random() < 0.3:
                del self._checkpoints[checkpoint]
                admin.delete_checkpoint(checkpoint)
        else:
            report = admin.verify()
            damage = [finding for finding in report.findings if finding.severity == "damage"]
            if damage:
                raise Violation(f"verify: {damage[0]}")
            self.done["verify"] += 1

    # -- small things -------------------------------------------------------------------------------------

    def _admin(self, process: Process) -> Admin:
        return Admin(
            PATH, store=Link(self.network, process), clock=process.machine, ids=self._ids(process)
        )

    def _ids(self, process: Process) -> Ids:
        return Ids(self.random.getrandbits(64), clock=process.machine)

    def _key(self) -> bytes:
        return b"%s%03d" % (self.random.choice((b"k", b"k", b"m")), self.random.randrange(self.plan.keys))

    def _token(self) -> bytes:
        self._tokens += 1
        return b"%d%s;" % (self._tokens, b"." * self.random.choice((0, 30, 200)))

    def _window(self, before_ms: int, machine: Machine) -> tuple[int, int]:
        """The times between which a read judged expiry: from the reader's clock to the latest that any clock showed.

        The clock of the machine that compacts decides which rows it drops as expired.
        """
        self._latest_ms = max(self._latest_ms, machine.now_ms(), *(each.now_ms() for each in self._machines))
        return (before_ms, self._latest_ms)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Without the garbage collector, whose moments depend on the machine, and without logging."""
    gc.disable()
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()
        gc.collect()


def simulate(seed: int, *, hours: float | None = None, trace: Callable[[str], None] | None = None) -> Outcome:
    """Live through the world of a seed."""
    return World(plan_world(seed, hours=hours), trace=trace).run()


__all__ = ["FlagstoneError", "Outcome", "Plan", "World", "plan_world", "simulate"]
