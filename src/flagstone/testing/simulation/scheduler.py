"""Tasks that take turns under one seed, in virtual time.

A simulated thread is a greenlet. Exactly one runs at a time, in one thread of the operating system. Before it takes a
lock, waits, sleeps or sends a request it may have to hand over to another task; a seeded generator decides. A turn
takes a microsecond, and time jumps to the next timer when no task can run. The same seed gives the same run.

Greenlets switch in about a microsecond, twenty times faster than threads hand over, and a switch copies the C stack, so
it also works below a compiled kernel that calls back into Python.

A machine has a clock of its own. Each life of a machine is a `Process`. A crash ends all its tasks: each gets `Crashed`
where it stands, and every further lock, wait or request of that process raises `Crashed` at once, so handlers and
`finally` blocks on the way out have no effect outside the memory that is gone.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import Any, Final, TypeVar

from greenlet import getcurrent, greenlet

from flagstone.errors import FlagstoneError
from flagstone.testing.simulation.primitives import SimulatedLock, SimulatedQueue, SimulatedThread

T = TypeVar("T")

START_MS: Final = 1_750_000_000_000
"""The wall clock at the start of every simulation."""

_STALE_TIMERS: Final = 4096
_TURN_NS: Final = 1_000
"""A turn takes a moment, so that code which waits for time to pass gets there."""


class Crashed(BaseException):
    """The machine of this task has crashed. Not an `Exception`, so that product code does not handle it."""


class Deadlock(Exception):
    """No task can run and no timer is set, but a task that must end has not."""


class Machine:
    """A computer with a wall clock that may be wrong and may run fast or slow. It survives its crashes."""

    def __init__(self, scheduler: Scheduler, name: str, *, offset_ms: int = 0, drift: float = 0.0) -> None:
        self.scheduler = scheduler
        self.name = name
        self.offset_ms = offset_ms
        self.rate: Final = 1.0 + drift
        self.lives: int = 0
        self.paused: bool = False
        self.stalled: list[Task] = []

    def now_ms(self) -> int:
        return START_MS + self.offset_ms + int(self.scheduler.now_ns * self.rate) // 1_000_000

    def monotonic(self) -> float:
        return self.scheduler.now_ns * self.rate / 1e9

    def sleep(self, seconds: float) -> None:
        self.scheduler.park(max(0.0, seconds) / self.rate)

    def boot(self) -> Process:
        """The next life of the machine, with empty memory."""
        self.lives += 1
        return Process(self, self.lives)

    def pause(self, seconds: float) -> None:
        """Run none of its tasks for that long. Its clocks go on."""
        if not self.paused:
            self.paused = True
            self.scheduler.after(seconds, self._resume)

    def _resume(self) -> None:
        self.paused = False
        for task in self.stalled:
            self.scheduler.make_ready(task)
        self.stalled = []


class Process:
    """One life of a machine: its tasks, and the objects that they share."""

    def __init__(self, machine: Machine, life: int) -> None:
        self.machine = machine
        self.name: str = f"{machine.name}.{life}"
        self.dead = False
        self.tasks: dict[int, Task] = {}
        self.objects: dict[Any, Any] = {}


class Task:
    """A simulated thread. `error` is what it raised, if anything."""

    __slots__ = (
        "body",
        "ended",
        "error",
        "greenlet",
        "joining",
        "name",
        "number",
        "parked",
        "process",
        "turn",
        "woken",
    )

    def __init__(self, number: int, name: str, process: Process, run: Callable[[], object]) -> None:
        self.number: int = number
        self.name: str = f"{process.name}/{name}"
        self.process: Process = process
        self.ended: bool = False
        self.error: BaseException | None = None
        self.parked: bool = False
        self.woken: bool = False
        self.turn: int = 0
        self.body: Callable[[], object] | None = run
        self.joining: list[Task] = []
        self.greenlet: greenlet | None = None

    def __repr__(self) -> str:
        return f"Task({self.name})"


class Scheduler:
    """The simulated world's time and turns. It provides the primitives of `flagstone.runtime.sync`."""

    def __init__(
        self, seed: int, *, switch_rate: float = 0.2, trace: Callable[[str], None] | None = None
    ) -> None:
        self.random: Final = random.Random(seed)
        self.now_ns: int = 0
        self.switches: int = 0
        self.digest: int = 0
        self.failures: list[Task] = []
        self.current: Task | None = None
        self.on_switch: Callable[[Task], None] | None = None
        self._draw = self.random.random
        self._switch_rate = switch_rate
        self._trace = trace
        self._ready: list[Task] = []
        self._timers: list[tuple[int, int, Task | Callable[[], None], int]] = []
        self._stale = 0
        self._numbers = 0
        self._hub: Any = None

    # -- running ------------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool]) -> None:
        """Give turns until the condition holds. Raises `Deadlock` if it never will."""
        self._hub = getcurrent()
        ready, draw, timers = self._ready, self._draw, self._timers
        while not until():
            if not ready or (timers and timers[0][0] <= self.now_ns):
                self._advance()
                continue
            count = len(ready)
            at = int(draw() * count) if count > 1 else 0
            task = ready[at]
            last = ready.pop()
            if at < count - 1:
                ready[at] = last
            machine = task.process.machine
            if machine.paused:
                machine.stalled.append(task)
                continue
            self._resume(task)

    def _resume(self, task: Task) -> None:
        if self.on_switch is not None:
            self.on_switch(task)
        if task.ended:
            return
        self.switches += 1
        self.now_ns += _TURN_NS
        self.digest = zlib.crc32(b"%d %d" % (task.number, self.now_ns), self.digest)
        self.current = task
        if task.greenlet is None:
            task.greenlet = greenlet(self._body, self._hub)
            task.greenlet.switch(task)
        else:
            task.greenlet.switch()
        self.current = None

    def _body(self, task: Task) -> None:
        try:
            run, task.body = task.body, None
            assert run is not None
            run()
        except Crashed:
            pass
        except BaseException as error:  # noqa: BLE001 - reported with its task
            task.error = error
            if not task.process.dead:
                self.failures.append(task)
        self._end(task)

    def _end(self, task: Task) -> None:
        task.ended = True
        task.process.tasks.pop(task.number, None)
        for waiting in task.joining:
            self.wake(waiting)
        task.joining.clear()

    def _advance(self) -> None:
        while self._timers:
            when, _, target, turn = heappop(self._timers)
            if isinstance(target, Task):
                if not target.parked or target.turn != turn:
                    self._stale -= 1
                    continue
                self.now_ns = max(self.now_ns, when)
                target.parked = False
                self._ready.append(target)
            else:
                self.now_ns = max(self.now_ns, when)
                target()
            return
        raise Deadlock("no task can run and no timer is set")

    # -- tasks --------------------------------------------------------------------------------------------

    def spawn(self, run: Callable[[], object], name: str, process: Process) -> Task:
        """A task that runs from now on."""
        self._numbers += 1
        task = Task(self._numbers, name, process, run)
        if not process.dead:
            process.tasks[task.number] = task
            self._ready.append(task)
        return task

    def crash(self, process: Process) -> None:
        """End the process: its memory is gone, and its requests under way go on without it."""
        self.note(f"crash {process.name}")
        process.dead = True
        own = self.current
        for task in list(process.tasks.values()):
            if task is not own:
                self._unwind(task)
        process.objects.clear()
        if own is not None and own.process is process:
            raise Crashed

    def shut_down(self, processes: Iterable[Process]) -> None:
        """End every process and forget what was to happen."""
        for process in processes:
            if not process.dead:
                self.crash(process)
        self._ready.clear()
        self._timers.clear()
        self.on_switch = None

    def _unwind(self, task: Task) -> None:
        if task.parked:
            self._stale += 1
        task.parked = False
        if task.greenlet is None:
            self._end(task)
            return
        before, self.current = self.current, task
        task.greenlet.parent = getcurrent()
        task.greenlet.throw(Crashed)
        self.current = before

    def make_ready(self, task: Task) -> None:
        self._ready.append(task)

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back after that much time, outside of every task. The callback must not block."""
        self._numbers += 1
        heappush(self._timers, (self.now_ns + int(seconds * 1e9), self._numbers, callback, 0))

    def note(self, line: str) -> None:
        """Add an event to the trace."""
        self.digest = zlib.crc32(line.encode(), self.digest)
        if self._trace is not None:
            name = "-" if self.current is None else self.current.name
            self._trace(f"{self.now_ns / 1e9:16.6f} {name}: {line}")

    # -- scheduling points --------------------------------------------------------------------------------

    def point(self) -> None:
        """A moment at which another task may go first."""
        task = self.current
        if task is None:
            return
        if task.process.dead:
            raise Crashed
        if self._draw() < self._switch_rate:
            self._ready.append(task)
            self._hub.switch()
            if task.process.dead:
                raise Crashed

    def park(self, timeout_s: float | None = None) -> bool:
        """Stop the running task until `wake`; False if `timeout_s` passed first."""
        task = self.current
        if task is None:
            raise RuntimeError("only a task can wait; this is a callback of the simulator")
        if task.process.dead:
            raise Crashed
        task.parked = True
        task.woken = False
        task.turn += 1
        if timeout_s is not None:
            self._numbers += 1
            heappush(self._timers, (self.now_ns + int(timeout_s * 1e9), self._numbers, task, task.turn))
        self._hub.switch()
        if task.process.dead:
            raise Crashed
        return task.woken

    def wake(self, task: Task) -> None:
        """Let a parked task go on. One that is not parked stays as it is."""
        if task.parked:
            task.parked = False
            task.woken = True
            self._ready.append(task)
            self._stale += 1
            if self._stale > _STALE_TIMERS:
                self._drop_stale_timers()

    def _drop_stale_timers(self) -> None:
        kept = [
            timer
            for timer in self._timers
            if not isinstance(timer[2], Task) or (timer[2].parked and timer[2].turn == timer[3])
        ]
        self._timers[:] = kept
        heapify(self._timers)
        self._stale = 0

    # -- the primitives of flagstone.runtime.sync -----------------------------------------------------------

    def lock(self) -> SimulatedLock:
        return SimulatedLock(self)

    def queue(self) -> SimulatedQueue:
        return SimulatedQueue(self)

    def thread(self, run: Callable[[], None], name: str) -> SimulatedThread:
        return SimulatedThread(self, run, name)

    def thread_ident(self) -> int:
        return 0 if self.current is None else self.current.number

    def monotonic(self) -> float:
        return self.now_ns / 1e9 if self.current is None else self.current.process.machine.monotonic()

    def of_process(self, make: Callable[[], T]) -> T:
        if self.current is None:
            raise RuntimeError("only a task belongs to a process")
        objects = self.current.process.objects
        if make not in objects:
            objects[make] = make()
        found: T = objects[make]
        return found


def describe(error: BaseException) -> str:
    """The error for a trace: product errors by kind and message, others by kind alone."""
    if isinstance(error, FlagstoneError):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__
