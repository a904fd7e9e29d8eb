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
from functools import partial
from random import Random
from typing import Any, Final
from unittest.mock import patch

from flagstone.changes.reader import WalReader
from flagstone.config import CompactorOptions
from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.db.reader.reader import DbReader, open_reader
from flagstone.db.writer.database import Db
from flagstone.errors import Closed, FlagstoneError, InvalidRequest, Unavailable
from flagstone.format.filter import FixedPrefix
from flagstone.lsm.segments import SegmentExtractor
from flagstone.metadata.manifest_codec import load_manifest
from flagstone.runtime import sync
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.store.commit_log import CommitRecord
from flagstone.store.memory import MemoryStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.store.two_phase import TwoPhaseStore
from flagstone.testing.simulation.cast import ROLES, Role
from flagstone.testing.simulation.clones import Clones, manage_clones, write_to_clones
from flagstone.testing.simulation.compactors import coordinate, work
from flagstone.testing.simulation.damage import require_reported
from flagstone.testing.simulation.databases import MAIN_PATH, Concatenation, TrackedDatabase
from flagstone.testing.simulation.decoding import remembered_decoding
from flagstone.testing.simulation.feeds import Subscription, consume, follow, require_complete
from flagstone.testing.simulation.loads import load
from flagstone.testing.simulation.network import Conditions, Link, Network
from flagstone.testing.simulation.operators import operate, require_no_damage
from flagstone.testing.simulation.oracle import Violation
from flagstone.testing.simulation.plan import Plan, plan_world
from flagstone.testing.simulation.readers import read, reread
from flagstone.testing.simulation.restores import require_restored
from flagstone.testing.simulation.scheduler import Crashed, Machine, Process, Scheduler, Task, describe
from flagstone.testing.simulation.session import Session
from flagstone.testing.simulation.stores import LogLink, WalLink

_QUIET_LIMIT_S: Final = 4 * 3600.0
"""How long the quiet time may take until everything works again."""


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


_MAINS: Final[dict[Role, Callable[[World, Process], None]]] = {
    "compactor": coordinate,
    "worker": work,
    "consumer": consume,
    "feed": consume,
    "cloner": manage_clones,
    "clone_writer": write_to_clones,
    "loader": load,
}
"""What the processes of each role do."""


class World:
    """One simulation."""

    def __init__(self, plan: Plan, *, trace: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.scheduler: Scheduler = Scheduler(plan.seed, switch_rate=plan.switch_rate, trace=trace)
        self.random: Random = self.scheduler.random
        self.store: MemoryStore = MemoryStore(clock=Machine(self.scheduler, "store"))
        self.wal_store: MemoryStore = MemoryStore(clock=Machine(self.scheduler, "WAL store"))
        self._commits: dict[str, CommitRecord] = {}
        self.network: Network = Network(self.scheduler, self.store)
        self.main: TrackedDatabase = TrackedDatabase()
        self.outcome: Outcome = Outcome(plan.seed)
        self.done: Counter[str] = self.outcome.operations
        self.quiet: bool = False
        self.violation: BaseException | None = None
        self._tokens = 0
        self._latest_ms = 0
        self._machines: list[Machine] = []
        self._processes: dict[str, Process] = {}
        self.clones: Clones = Clones(self)
        self._subscriptions: dict[str, Subscription] = {}

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
                scheduler.shut_down(self._processes.values())
                gc.collect()
        outcome.simulated_s = scheduler.now_ns / 1e9
        outcome.switches = scheduler.switches
        outcome.digest = scheduler.digest
        outcome.faults = self.network.faults
        outcome.requests = self.network.requests.total()
        outcome.acknowledged = self.main.oracle.acknowledged
        outcome.reads = self.main.oracle.reads
        outcome.store = self.store
        return outcome

    def _live(self) -> None:
        plan = self.plan
        self.network.conditions = Conditions(plan.rates, plan.aims, plan.latency_s)
        for number in range(plan.writers):
            self._start(f"w{number}", self._write)
        for number in range(plan.readers):
            self._start(f"r{number}", partial(read, self))
        self._start("op", partial(operate, self))
        for role in ROLES:
            if role in plan.cast and role in _MAINS and not self._is_idle(role):
                self._start(role, partial(_MAINS[role], self))
        self._disturb("crash", plan.crash_every_s, self._crash_one)
        self._disturb("pause", plan.pause_every_s, self._pause_one)
        self._disturb("clock", plan.jump_every_s, self._shift_one)
        self._disturb("outage", plan.outage_every_s, self._begin_outage)
        self._advance(plan.hours * 3600)
        self._calm_down()
        self._require_recovery()

    def _is_idle(self, role: Role) -> bool:
        """Whether the role has nothing to do: changes need a WAL, and segments cannot be loaded in bulk."""
        without_wal = role in ("consumer", "feed") and not self.plan.settings.wal_enabled
        return without_wal or (role == "loader" and "segments" in self.plan.cast)

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

    def _start(self, name: str, main: Callable[[Process], None]) -> None:
        offset_ms = self.random.choice((0, 0, self.random.randrange(-2_000, 2_000)))
        machine = Machine(self.scheduler, name, offset_ms=offset_ms, drift=self.random.uniform(-0.001, 0.001))
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
        seconds = self.random.choice(self.plan.pauses_s)
        self.scheduler.note(f"pause {machine.name} for {seconds} s")
        machine.pause(seconds)

    def _shift_one(self) -> None:
        machine = self.random.choice(self._machines)
        self.window(0, machine)
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
        self.network.conditions = replace(self.network.conditions, rates={}, aims=(), outage=False)
        self.network.cut_off.clear()
        for machine in self._machines:
            self.scheduler.crash(self._processes[machine.name])
            self.window(0, machine)
            machine.offset_ms = 0

    def _require_recovery(self) -> None:
        """Everything works again within a bounded time, and nothing is left over."""
        machine = Machine(self.scheduler, "judge")
        process = self._processes["judge"] = machine.boot()
        task = self.scheduler.spawn(lambda: self._guarded(self._judge, process), "main", process)
        end = self.scheduler.now_ns + int((_QUIET_LIMIT_S + 700_000) * 1e9)
        self.scheduler.run(lambda: task.ended or self.violation is not None or self.scheduler.now_ns >= end)
        self._check_violation()
        if not task.ended:
            raise Violation(f"not everything works again {_QUIET_LIMIT_S} s after the last fault")

    def _judge(self, process: Process) -> None:
        machine = process.machine
        while self.network.in_flight or any(each.paused for each in self._machines):
            machine.sleep(60)
        started_s = machine.monotonic()
        with self.open(process) as db:
            session = Session(self, self.main, process, db)
            for number in range(5):
                session.put_durably(b"judge %d" % number)
            session.scan()
            self._require_changes(process, db.status()["last_seq"])
            db.flush()
            machine.sleep(600)  # compactions come to an end
        self.clones.require_sound(process)
        admin = self.admin(process)
        restored = next(iter(self.main.checkpoints), None) if "restore" in self.plan.cast else None
        for checkpoint in self.main.checkpoints:
            reread(self, process, self.main, checkpoint)
            if checkpoint != restored:
                admin.delete_checkpoint(checkpoint, force=True)
        require_no_damage(admin)
        if machine.monotonic() - started_s > _QUIET_LIMIT_S:
            raise Violation(f"recovery took {machine.monotonic() - started_s:.0f} s")
        self._require_clean_store(process)
        # A two-phase store keeps some objects twice, so a damaged one may be of no consequence.
        if "damage" in self.plan.cast and "two_phase" not in self.plan.cast:
            require_reported(self, process)
        if restored is not None:
            require_restored(self, process, restored, self.main.checkpoints[restored])

    def _require_changes(self, process: Process, last_seq: int) -> None:
        """Every consumer gets to the end, has received everything, and leaves."""
        for subscription in self._subscriptions.values():
            follow(self, process, subscription, timeout_s=40.0)
            require_complete(subscription, self.main.oracle, last_seq)
            WalReader(
                MAIN_PATH,
                pin=subscription.name,
                **self.stores(process),
                clock=process.machine,
                ids=self.ids(process),
            ).release()

    def _require_clean_store(self, process: Process) -> None:
        """After some rounds of garbage collection nothing is left that no manifest refers to."""
        machine, admin = process.machine, self.admin(process)
        # Past the checkpoints that crashed processes left behind, and past every clock that ran ahead.
        # The record of a bulk load whose driver crashed stays for a day.
        machine.sleep(150_000 if "loader" in self.plan.cast else 50_000)
        self.clones.require_gone(process)
        with self.open(process, compactor=False) as db:
            session = Session(self, self.main, process, db)
            # SSTs that are not older than the newest of L0 may belong to a flush under way.
            session.put_durably(b"judge")
            db.flush()
            session.scan()
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
                self.use(process, self.main)
            except (Closed, Unavailable) as error:
                self.scheduler.note(f"cannot open: {describe(error)}")

    def use(self, process: Process, database: TrackedDatabase) -> None:
        """Open a database for writing, let clients use it, and close it."""
        db = self.open(process, database.path)
        self.done["open"] += 1
        serve = partial(self._guarded, Session(self, database, process, db).serve)
        clients = [sync.start_thread(serve, name=f"client{number}") for number in range(self.plan.clients)]
        for client in clients:
            client.join()
        try:
            db.close()
        except (Closed, Unavailable) as error:
            self.scheduler.note(f"close: {describe(error)}")
        self.done["close"] += 1

    def open(self, process: Process, path: str = MAIN_PATH, *, compactor: bool = True) -> Db:
        settings = self.plan.settings
        if self.quiet:
            # A full L0 stops flushes until a compactor makes room.
            options = (settings.compactor_options or CompactorOptions()) if compactor else None
            settings = replace(settings, compactor_options=options)
        elif "compactor" in self.plan.cast and "only_compactor" in self.plan.cast:
            settings = replace(settings, compactor_options=None)
        return open_database(
            path,
            **self.stores(process),
            settings=settings,
            merge_operator=Concatenation(),
            segment_extractor=self.extractor,
            create=path == MAIN_PATH,
            clock=process.machine,
            ids=self.ids(process),
        )

    # -- small things -------------------------------------------------------------------------------------

    def stores(self, process: Process) -> dict[str, Any]:
        """The stores as that process reaches them: arguments of everything that opens a database."""
        main: ObjectStore = Link(self.network, process)
        if "two_phase" in self.plan.cast:
            log = LogLink(self.network, process, self._commits)
            main = TwoPhaseStore(main, log, ids=self.ids(process), clock=process.machine)
        if "wal_store" not in self.plan.cast:
            return {"store": main}
        return {"store": main, "wal_store": WalLink(self.network, process, self.wal_store)}

    @property
    def extractor(self) -> SegmentExtractor | None:
        return FixedPrefix("first", 1) if "segments" in self.plan.cast else None

    def ids(self, process: Process) -> Ids:
        return Ids(self.random.getrandbits(64), clock=process.machine)

    def admin(self, process: Process, path: str = MAIN_PATH) -> Admin:
        return Admin(path, **self.stores(process), clock=process.machine, ids=self.ids(process))

    def open_reader(self, process: Process, path: str = MAIN_PATH, **options: Any) -> DbReader:
        return open_reader(
            path,
            **{**self.stores(process), **options},
            merge_operator=Concatenation(),
            segment_extractor=self.extractor,
            clock=process.machine,
            ids=self.ids(process),
        )

    def subscription(self, name: str) -> Subscription:
        """What the consumer of that name has received."""
        if name not in self._subscriptions:
            self._subscriptions[name] = Subscription(name, copies=name == "feed")
        return self._subscriptions[name]

    def is_unexpected(self, error: FlagstoneError) -> bool:
        """Whether a process that looks for the database must not get this error."""
        return (
            isinstance(error, InvalidRequest) and bool(self.done["open"]) and "no database" not in str(error)
        )

    def writer_epoch(self, path: str) -> int:
        """The epoch of the newest writer, as the store has it now."""
        paths = DbPaths(path)
        newest = [
            meta.path for meta in self.store.list(paths.manifest_folder) if paths.parse_manifest(meta.path)
        ][-1]
        return load_manifest(self.store.get(newest).data, newest).writer_epoch

    def new_key(self) -> bytes:
        return b"%s%03d" % (self.random.choice((b"k", b"k", b"m")), self.random.randrange(self.plan.keys))

    def new_value(self) -> bytes:
        self._tokens += 1
        return b"%d%s;" % (self._tokens, b"." * self.random.choice((0, 30, 200)))

    def window(self, before_ms: int, machine: Machine) -> tuple[int, int]:
        """The times between which a read judged expiry: from the reader's clock to the latest that any clock showed.

        The clock of the machine that compacts decides which rows it drops as expired.
        """
        self._latest_ms = max(self._latest_ms, machine.now_ms(), *(each.now_ms() for each in self._machines))
        return (before_ms, self._latest_ms)


class _Escaped:
    """Replaces the generator of the system: chance must come from the seed."""

    def __getattr__(self, name: str) -> Any:
        raise Violation(f"the product draws {name} from the system, and not from the ids that it was given")


@contextmanager
def _deterministic() -> Iterator[None]:
    """Without the garbage collector, whose moments depend on the machine, and without logging."""
    gc.disable()
    gc.freeze()  # so that the collection at the end looks at the objects of this world only
    logging.disable(logging.CRITICAL)
    try:
        with remembered_decoding(), patch.object(SYSTEM_IDS, "_random", _Escaped()):
            yield
    finally:
        logging.disable(logging.NOTSET)
        gc.unfreeze()
        gc.enable()


def simulate(seed: int, *, hours: float | None = None, trace: Callable[[str], None] | None = None) -> Outcome:
    """Live through the world of a seed."""
    return World(plan_world(seed, hours=hours), trace=trace).run()
