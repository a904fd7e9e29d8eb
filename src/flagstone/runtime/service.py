"""Background work under supervision: a failure always reaches the caller.

A service is one step of work that says when it wants to run again. The supervisor gives each a thread, and
when one of them raises, stops them all and keeps the exception for whoever calls next. Nothing is restarted
here: a service that can go on after an error handles that error itself.
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
        """What errors and logs call it."""
        ...

    def run_once(self) -> float | None:
        """Do one step; return the seconds until the next one, or None when there will be none.

        Must leave things such that a process killed between two steps loses nothing.
        """
        ...


class Supervisor:
    """Runs services, each in a thread of its own, until `stop` or until one of them fails.

    Its threads are daemons: the interpreter exits without a `stop`, after a short grace, and the services
    are cut off as if the process had crashed. In a forked child the threads are gone and every call
    raises `Closed`.
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
        """Run `service` from now on. Starting one that already runs is an error.

        Raises:
            Closed: the supervisor was stopped, or belongs to the process this one was forked from.
            FlagstoneError: a service has failed, and all have stopped.

        """
        self.raise_failure()
        with self._lock:
            if self._stopping:
                # Another service may have failed since we looked: then that is the reason.
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
        """Let the service take its next step now; if it is taking one, another follows at once.

        One that has finished, or was never started, stays as it is.
        """
        self._check_process()
        runner = self._runners.get(id(service))
        if runner is not None:
            runner.wakeup.set()

    @property
    def failure(self) -> FlagstoneError | None:
        """The first failure, or None while all is well; a foreign exception has become `InternalError`."""
        return self._failure

    def raise_failure(self) -> None:
        """Raise the first failure if there is one: the same kind, with a note that names the service.

        Each call raises an exception of its own, because threads may not share a traceback; the original is
        its cause.
        """
        self._check_process()
        if self._failure is not None:
            raise _retold(self._failure) from self._failure

    def on_failure(self, callback: Callable[[FlagstoneError], None]) -> None:
        """Call `callback` once with the first failure, in the failing thread; now if it is already there."""
        self._check_process()
        with self._lock:
            failure = self._failure
            if failure is None:
                self._callbacks.append(callback)
        if failure is not None:
            callback(failure)

    def stop(self, timeout: float | None = None) -> None:
        """Let every service finish the step it is in, and wait for all of them. May be called again.

        Called from inside a service it does not wait for that one.

        Raises:
            Unavailable: some service is still in its step after `timeout` seconds; the message names it.

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
                # A wake-up during the step is kept for the next one.
                runner.wakeup.wait(delay)
        except BaseException as error:  # noqa: BLE001 - handed to the caller, whatever it is
            self._fail(service, error)
        finally:
            with self._lock:
                self._runners.pop(id(service), None)

    def _fail(self, service: Service, error: BaseException) -> None:
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
            except Exception as broken:  # noqa: BLE001 - one callback must not keep the others from knowing
                failure.add_note(f"and telling about it failed: {_describe(broken)}")

    def _begin_stop(self) -> list[_Runner]:
        with self._lock:
            self._stopping = True
            runners = list(self._runners.values())
        for runner in runners:
            runner.wakeup.set()
        return runners

    def _check_process(self) -> None:
        # Before any lock: a thread of the parent may have held it at the moment of the fork.
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


def _retold(failure: FlagstoneError) -> FlagstoneError:
    # Not through the constructor, whose parameters a subclass may have changed: this must never fail.
    fresh = type(failure).__new__(type(failure), *failure.args)
    fresh.__dict__.update(failure.__dict__)
    fresh.__notes__ = list(failure.__notes__)
    return fresh


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


# Exit hooks run newest first. The pool was imported above, so services end while their pools still work.
atexit.register(_at_exit)
