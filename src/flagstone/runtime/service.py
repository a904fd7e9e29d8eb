"""Background services and their supervisor, which passes every failure on to the caller.

A service does one step of work and returns when it wants to run again. The supervisor runs each service in its own
thread. If one of them raises, the supervisor stops all and raises the exception at the next call. It restarts no
service: a service that can continue after an error handles that error itself.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from typing import Protocol
from weakref import WeakSet

from flagstone.errors import Closed, FlagstoneError, InternalError, Unavailable
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.pool import EXIT_GRACE_SECONDS
from flagstone.runtime.sync import Lock, ThreadHandle, Wakeup, simulated, start_thread, thread_ident

_log = logging.getLogger("flagstone.runtime")


class Service(Protocol):
    """One kind of background work."""

    @property
    def name(self) -> str:
        """The name in errors and log lines."""
        ...

    def run_once(self) -> float | None:
        """Do one step; return the seconds until the next one, or None if there is none.

        If the process is killed between two steps, nothing may be lost.
        """
        ...


class Supervisor:
    """Runs services, each in its own thread, until `stop` is called or one of them fails.

    The threads are daemons. If the interpreter exits without `stop`, it waits a short time, and then the services end
    as in a crash. In a forked child there are no threads, and every call raises `Closed`.
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._pid = os.getpid()
        self._lock = Lock()
        self._runners: dict[int, _Runner] = {}
        self._stopping = False
        self._failure: FlagstoneError | None = None
        self._callbacks: list[Callable[[FlagstoneError], None]] = []
        if not simulated():  # simulated threads do not outlive their simulator
            _supervisors.add(self)

    def start(self, service: Service) -> None:
        """Run `service` from now on. Starting a running service is an error.

        Raises:
            Closed: the supervisor was stopped, or belongs to the parent process.
            FlagstoneError: a service has failed, and all have stopped.

        """
        self.raise_failure()
        with self._lock:
            if self._stopping:
                # Another service may have failed since the check above; then that is the reason.
                self.raise_failure()
                raise Closed(f"cannot start {service.name}: its database is closing; open it again")
            if id(service) in self._runners:
                raise InternalError(f"service {service.name} was started twice")
            runner = self._runners[id(service)] = _Runner(service)
            try:
                runner.thread = start_thread(lambda: self._run(runner), name=f"flagstone-{service.name}")
            except RuntimeError as error:
                del self._runners[id(service)]
                raise Unavailable(f"the system refuses to start a thread for {service.name}") from error

    def wake(self, service: Service) -> None:
        """Let the service do its next step now; if it is in a step, another one follows at once.

        No effect if the service has finished or was never started.
        """
        self._check_process()
        runner = self._runners.get(id(service))
        if runner is not None:
            runner.wakeup.set()

    @property
    def failure(self) -> FlagstoneError | None:
        """The first failure, or None. An exception that is not a `FlagstoneError` becomes an `InternalError`."""
        return self._failure

    def raise_failure(self) -> None:
        """Raise the first failure, if there is one: the same kind of error, with a note that names the service.

        Each call raises a new exception, because threads must not share a traceback; the original is its cause.
        """
        self._check_process()
        if self._failure is not None:
            raise _copied(self._failure) from self._failure

    def on_failure(self, callback: Callable[[FlagstoneError], None]) -> None:
        """Call `callback` once with the first failure, in the failing thread; at once if there is a failure already."""
        self._check_process()
        with self._lock:
            failure = self._failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            callback(failure)

    def stop(self, timeout: float | None = None) -> None:
        """Let every service finish its current step, and wait for all of them. May be called again.

        If a service calls it, it does not wait for that service.

        Raises:
            Unavailable: a service is still in its step after `timeout` seconds; the message names it.

        """
        self._check_process()
        runners = self._begin_stop()
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        for runner in runners:
            if runner.thread is not None and runner.ident != thread_ident():
                runner.thread.join(None if deadline is None else max(0.0, deadline - self._clock.monotonic()))
        stuck = [
            runner.service.name
            for runner in runners
            if runner.thread is not None and runner.thread.is_alive() and runner.ident != thread_ident()
        ]
        if stuck:
            raise Unavailable(
                f"{', '.join(stuck)} did not stop within {timeout} s, probably waiting for the object store; "
                "try again, or end the process: nothing acknowledged as durable will be lost"
            )

    def _run(self, runner: _Runner) -> None:
        runner.ident = thread_ident()
        service = runner.service
        try:
            while not self._stopping:
                delay = service.run_once()
                if delay is None:
                    break
                # If `wake` was called during the step, this returns at once.
                runner.wakeup.wait(delay)
        except BaseException as error:  # noqa: BLE001 - the next caller gets every error
            self.fail(service, error)
        finally:
            with self._lock:
                self._runners.pop(id(service), None)

    def fail(self, service: Service, error: BaseException) -> None:
        """The service cannot continue: stop all services, and raise `error` at every later call.

        The supervisor calls it when a step raises. A thread that does a step of the service itself calls it, too.
        """
        failure = _as_flagstone_error(service, error)
        _log.error("failed service name=%s kind=%s error=%s", service.name, type(failure).__name__, error)
        with self._lock:
            first = self._failure
            if first is None:
                self._failure = failure
            else:
                first.add_note(f"then background service {service.name} failed too: {_describe(error)}")
            callbacks, self._callbacks = self._callbacks, []
        self._begin_stop()
        for callback in callbacks:
            try:
                callback(failure)
            except Exception as broken:  # noqa: BLE001 - the other callbacks must be called as well
                failure.add_note(f"and a callback for this failure failed: {_describe(broken)}")

    def _begin_stop(self) -> list[_Runner]:
        with self._lock:
            self._stopping = True
            runners = list(self._runners.values())
        for runner in runners:
            runner.wakeup.set()
        return runners

    def _check_process(self) -> None:
        # Checked before taking any lock: a thread of the parent may have held the lock at the fork.
        if os.getpid() != self._pid:
            raise Closed(
                "this database was opened before the process forked, and its background work stayed "
                "in the parent; open it again in the child",
                reason="failed",
            )


class _Runner:
    def __init__(self, service: Service) -> None:
        self.service = service
        self.wakeup = Wakeup()
        self.thread: ThreadHandle | None = None
        self.ident: int | None = None


def _as_flagstone_error(service: Service, error: BaseException) -> FlagstoneError:
    if isinstance(error, FlagstoneError):
        failure: FlagstoneError = error
    else:
        failure = InternalError(f"background service {service.name} failed: {_describe(error)}")
        failure.__cause__ = error
    failure.add_note(f"in background service {service.name}")
    return failure


def _copied(failure: FlagstoneError) -> FlagstoneError:
    # Without the constructor, which may have other parameters in a subclass: this must never fail.
    copy = type(failure).__new__(type(failure), *failure.args)
    copy.__dict__.update(failure.__dict__)
    copy.__notes__ = list(failure.__notes__)
    return copy


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


_supervisors: WeakSet[Supervisor] = WeakSet()


def _at_exit() -> None:
    alive = [supervisor for supervisor in _supervisors if supervisor._pid == os.getpid()]  # noqa: SLF001
    for supervisor in alive:
        supervisor._begin_stop()  # noqa: SLF001
    for supervisor in alive:
        try:
            supervisor.stop(EXIT_GRACE_SECONDS)
        except Unavailable as stuck:
            _log.warning("left services running at exit: %s", stuck)


# Exit hooks run in reverse order. The pool's hook was registered first, so services end while their pools still work.
atexit.register(_at_exit)
