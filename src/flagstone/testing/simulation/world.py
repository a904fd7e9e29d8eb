"""A world of machines around one database: writers that come and go, readers, an operator, and everything that fails.

`World.run` lives through a troubled time and then a quiet one. In the troubled time the director crashes and pauses
machines, shifts clocks and disturbs the network. In the quiet time everything must work again: a writer opens the
database, every acknowledged write is there, garbage is collected and `verify` finds nothing.
"""

from __future__ import annotations

import gc
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random, SystemRandom
from typing import Any, Final
from unittest.mock import patch

from flagstone.config import CompactorOptions, Settings
from flagstone.db.admin.admin import Admin
from flagstone.db.open import open_database
from flagstone.db.reader.reader import DbReader, open_reader
from flagstone.db.writer.database import Db
from flagstone.errors import Closed, CorruptData, FlagstoneError, InvalidRequest, Unavailable
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
from flagstone.testing.simulation.aio import use_asyncio
from flagstone.testing.simulation.cast import ROLES, Role
from flagstone.testing.simulation.clones import Clones, manage_clones, write_to_clones
from flagstone.testing.simulation.compactors import coordinate, work
from flagstone.testing.simulation.databases import MAIN_PATH, Concatenation, TrackedDatabase
from flagstone.testing.simulation.decoding import remembered_decoding
from flagstone.testing.simulation.director import Director
from flagstone.testing.simulation.feeds import Subscription, consume
from flagstone.testing.simulation.history import Violation
from flagstone.testing.simulation.judge import QUIET_LIMIT_S, judge
from flagstone.testing.simulation.loads import load
from flagstone.testing.simulation.network import Conditions, Link, Network
from flagstone.testing.simulation.operators import operate
from flagstone.testing.simulation.plan import Plan, plan_world
from flagstone.testing.simulation.readers import read
from flagstone.testing.simulation.restores import restore
from flagstone.testing.simulation.scheduler import Crashed, Machine, Process, Scheduler, describe
from flagstone.testing.simulation.session import Session
from flagstone.testing.simulation.stores import DamageableStore, LogLink, WalLink

_FRAMES: Final = 8


@dataclass(slots=True)
class Outcome:
    """What a run did. `problem` is None if everything was as it must be."""

    seed: int
    cast: frozenset[Role] = frozenset()
    problem: str | None = None
    simulated_s: float = 0.0
    switches: int = 0
    digest: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    acknowledged: int = 0
    reads: int = 0
    rows: dict[bytes, bytes] | None = None
    """What the database shows in the end, without rows that expire; None before the end."""
    store: MemoryStore | None = None
    wal_store: MemoryStore | None = None


_MAINS: Final[dict[Role, Callable[[World, Process], None]]] = {
    "compactor": coordinate,
    "worker": work,
    "consumer": consume,
    "feed": consume,
    "cloner": manage_clones,
    "clone_writer": write_to_clones,
    "loader": load,
    "restore": restore,
    "aio": use_asyncio,
}
"""What the processes of each role do."""


class World:
    """One simulation."""

    def __init__(self, plan: Plan, *, trace: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.scheduler: Scheduler = Scheduler(plan.seed, switch_rate=plan.switch_rate, trace=trace)
        self.random: Random = self.scheduler.random
        self.store: DamageableStore = DamageableStore(clock=Machine(self.scheduler, "store"))
        self.wal_store: DamageableStore = DamageableStore(clock=Machine(self.scheduler, "WAL store"))
        self._commits: dict[str, CommitRecord] = {}
        self.network: Network = Network(self.scheduler, self.store)
        self.main: TrackedDatabase = TrackedDatabase()
        self.outcome: Outcome = Outcome(plan.seed, plan.cast)
        self.done: Counter[str] = self.outcome.operations
        self.quiet: bool = False
        self.violation: BaseException | None = None
        self._tokens = 0
        self._latest_ms = 0
        self.machines: list[Machine] = []
        self.processes: dict[str, Process] = {}
        self.clones: Clones = Clones(self)
        self.subscriptions: dict[str, Subscription] = {}

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
                scheduler.shut_down(self.processes.values())
                gc.collect()
        outcome.simulated_s = scheduler.now_ns / 1e9
        outcome.switches = scheduler.switches
        outcome.digest = scheduler.digest
        outcome.faults = self.network.faults
        outcome.requests = self.network.requests.total()
        outcome.acknowledged = self.main.oracle.acknowledged
        outcome.reads = self.main.oracle.reads
        outcome.store, outcome.wal_store = self.store, self.wal_store
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
                for number in range(2 if role == "loader" else 1):
                    name = f"{role}{number + 1}" if number else role
                    self._start(name, partial(_MAINS[role], self))
        Director(self).start()
        self._advance(plan.hours * 3600)
        self._calm_down()
        self._require_recovery()

    def _is_idle(self, role: Role) -> bool:
        """Whether the role has nothing to do: changes need a WAL, and segments cannot be loaded in bulk.

        A restore is noticed when its manifest is created, which a two-phase store does in several steps.
        """
        without_wal = role in ("consumer", "feed") and not self.plan.settings.wal_enabled
        return (
            without_wal
            or (role == "loader" and "segments" in self.plan.cast)
            or (role == "restore" and "two_phase" in self.plan.cast)
        )

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
            raise Violation(f"unexpected {describe(found)}: {found}; {_raised_at(found)}") from found

    def _start(self, name: str, main: Callable[[Process], None]) -> None:
        offset_ms = self.random.choice((0, 0, self.random.randrange(-2_000, 2_000)))
        machine = Machine(self.scheduler, name, offset_ms=offset_ms, drift=self.random.uniform(-0.001, 0.001))
        self.machines.append(machine)
        self.boot(machine, main)

    def boot(self, machine: Machine, main: Callable[[Process], None]) -> None:
        if self.quiet:
            return
        process = self.processes[machine.name] = machine.boot()
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

    # -- the quiet time -----------------------------------------------------------------------------------

    def _calm_down(self) -> None:
        self.scheduler.note("the quiet time begins")
        self.quiet = True
        self.scheduler.on_switch = None
        self.network.conditions = replace(self.network.conditions, rates={}, aims=(), outage=False)
        self.network.cut_off.clear()
        self.mend()
        for machine in self.machines:
            self.scheduler.crash(self.processes[machine.name])
            self.window(0, machine)
            machine.offset_ms = 0

    def mend(self) -> None:
        """Put back the bytes of damaged objects that are still there."""
        for store in (self.store, self.wal_store):
            store.mend()

    def _require_recovery(self) -> None:
        """Everything works again within a bounded time, and nothing is left over."""
        machine = Machine(self.scheduler, "judge")
        process = self.processes["judge"] = machine.boot()
        task = self.scheduler.spawn(lambda: self._guarded(judge, self, process), "main", process)
        end = self.scheduler.now_ns + int((QUIET_LIMIT_S + 700_000) * 1e9)
        self.scheduler.run(lambda: task.ended or self.violation is not None or self.scheduler.now_ns >= end)
        self._check_violation()
        if not task.ended:
            raise Violation(f"not everything works again {QUIET_LIMIT_S} s after the last fault")

    # -- writers ------------------------------------------------------------------------------------------

    def _write(self, process: Process) -> None:
        machine = process.machine
        while True:
            machine.sleep(self.random.expovariate(1 / self.plan.idle_s))
            try:
                self.use(process, self.main)
            except (Closed, Unavailable, CorruptData) as error:
                if self.is_unexpected(error):
                    raise
                self.scheduler.note(f"cannot open: {describe(error)}")

    def use(
        self,
        process: Process,
        database: TrackedDatabase,
        *,
        holds: Callable[[bytes], bool] | None = None,
    ) -> None:
        """Open a database for writing, let clients use it, and close it. `holds` returns whether it can have a key."""
        db = self.open(process, database.path)
        self.done["open"] += 1
        serve = partial(self._guarded, Session(self, database, process, db, holds=holds).serve)
        clients = [sync.start_thread(serve, name=f"client{number}") for number in range(self.plan.clients)]
        for client in clients:
            client.join()
        try:
            db.close()
        except (Closed, Unavailable, CorruptData) as error:
            if self.is_unexpected(error):
                raise
            self.scheduler.note(f"close: {describe(error)}")
        self.done["close"] += 1

    def open(self, process: Process, path: str = MAIN_PATH, *, compactor: bool = True) -> Db:
        settings = self.settings
        if self.quiet:
            # A full L0 stops flushes until a compactor makes room.
            options = (settings.compactor_options or CompactorOptions()) if compactor else None
            settings = replace(settings, compactor_options=options)
        return open_database(path, **self.options(process), settings=settings, create=path == MAIN_PATH)

    @property
    def settings(self) -> Settings:
        """The settings of writers in the troubled time."""
        settings = self.plan.settings
        if not self.quiet and {"compactor", "only_compactor"} <= self.plan.cast:
            settings = replace(settings, compactor_options=None)
        return settings

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

    def options(self, process: Process) -> dict[str, Any]:
        """Arguments of everything that opens a database or a reader in that process."""
        return {
            **self.stores(process),
            "merge_operator": Concatenation(),
            "segment_extractor": self.extractor,
            "clock": process.machine,
            "ids": self.ids(process),
        }

    @property
    def extractor(self) -> SegmentExtractor | None:
        return FixedPrefix("first", 1) if "segments" in self.plan.cast else None

    def ids(self, process: Process) -> Ids:
        return Ids(self.random.getrandbits(64), clock=process.machine)

    def admin(self, process: Process, path: str = MAIN_PATH, **stores: ObjectStore) -> Admin:
        return Admin(path, **{**self.stores(process), **stores}, clock=process.machine, ids=self.ids(process))

    def open_reader(self, process: Process, path: str = MAIN_PATH, **options: Any) -> DbReader:
        return open_reader(path, **{**self.options(process), **options})

    def subscription(self, name: str) -> Subscription:
        """What the consumer of that name has received."""
        if name not in self.subscriptions:
            self.subscriptions[name] = Subscription(name, copies=name != "consumer")
        return self.subscriptions[name]

    def is_unexpected(self, error: FlagstoneError) -> bool:
        """Whether a process that looks for the database must not get this error."""
        if isinstance(error, CorruptData):
            return not self.was_damaged(error.object)
        return (
            isinstance(error, InvalidRequest) and bool(self.done["open"]) and "no database" not in str(error)
        )

    @property
    def is_damaging(self) -> bool:
        """Whether objects are damaged. A two-phase store copies objects, and a copy of a damaged one would stay."""
        return "damage" in self.plan.cast and "two_phase" not in self.plan.cast

    def was_damaged(self, path: str | None) -> bool:
        """Whether the bytes of that object were damaged at some time."""
        return path in self.store.ever_damaged or path in self.wal_store.ever_damaged

    def writer_epoch(self, path: str) -> int:
        """The epoch of the newest writer, as the store has it now."""
        paths = DbPaths(path)
        newest = [
            meta.path for meta in self.store.list(paths.manifest_folder) if paths.parse_manifest(meta.path)
        ][-1]
        return load_manifest(self.store.whole(newest), newest).writer_epoch

    def new_key(self) -> bytes:
        return b"%s%03d" % (self.random.choice((b"k", b"k", b"m")), self.random.randrange(self.plan.keys))

    def next_delete(self) -> int:
        """A number above all sequence numbers, for a range delete: its own is not known before it returns."""
        self._tokens += 1
        return 1 << 62 | self._tokens

    def new_value(self) -> bytes:
        self._tokens += 1
        return b"%d%s;" % (self._tokens, b"." * self.random.choice((0, 30, 200)))

    def window(self, before_ms: int, machine: Machine) -> tuple[int, int]:
        """The times between which a read judged expiry: from the reader's clock to the latest that any clock showed.

        The clock of the machine that compacts decides which rows it drops as expired.
        """
        self._latest_ms = max(self._latest_ms, machine.now_ms(), *(each.now_ms() for each in self.machines))
        return (before_ms, self._latest_ms)


def _raised_at(error: BaseException) -> str:
    """The innermost calls of an error that no promise explains, for a run that cannot be repeated."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return "raised at " + " < ".join(
        f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)
    )


class _Escaped:
    """Replaces the generator of the system: chance must come from the seed. Other threads keep the system's."""

    def __init__(self, system: Random) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        if not sync.simulated():
            return getattr(self._system, name)
        raise Violation(f"the product draws {name} from the system, and not from the ids that it was given")


@contextmanager
def _deterministic() -> Iterator[None]:
    """Without the garbage collector, whose moments depend on the machine, and without logging."""
    gc.disable()
    gc.freeze()  # so that the collection at the end looks at the objects of this world only
    logging.disable(logging.CRITICAL)
    try:
        with remembered_decoding(), patch.object(SYSTEM_IDS, "_random", _Escaped(SystemRandom())):
            yield
    finally:
        logging.disable(logging.NOTSET)
        gc.unfreeze()
        gc.enable()


def simulate(seed: int, *, hours: float | None = None, trace: Callable[[str], None] | None = None) -> Outcome:
    """Live through the world of a seed."""
    return World(plan_world(seed, hours=hours), trace=trace).run()
