"""Thread pools for blocking store calls.

The engine answers from memory in the caller's thread; requests over the network run here, many at once. Threads start
when there is work for them, are daemons, and are replaced in a forked child.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future as StandardFuture
from queue import Empty
from threading import Lock, RLock
from typing import Final, NamedTuple, ParamSpec, TypeVar
from weakref import WeakSet, finalize

from flagstone.errors import Closed, InvalidRequest
from flagstone.runtime.sync import (
    Event,
    Queue,
    Thread,
    monotonic,
    new_thread,
    of_process,
    simulated,
    thread_ident,
)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_U = TypeVar("_U")

DEFAULT_WORKERS: Final = 128
"""Far more than there are cores, because store calls mostly wait: a read of a hundred keys makes a hundred at once."""

EXIT_GRACE_SECONDS: Final = 1.0
"""How long the interpreter's exit waits for running calls and services: long enough for an upload that is nearly
done, short enough that a dead network does not keep the process alive."""


class _FutureLock(type(RLock())):  # type: ignore[misc]
    """The lock of a future, acquired and released by C code. Futures here wait without it."""

    def wait(self, timeout: float | None = None) -> None: ...

    def notify_all(self) -> None: ...


class Future(StandardFuture[_T]):
    """A future of the standard library that stays usable after an interrupt of a waiting thread.

    The standard future waits in Python code that holds its lock. A Ctrl-C there leaves the lock held, and the thread
    with the result waits for it for ever (see `flagstone.runtime.sync`).
    """

    def __init__(self) -> None:
        super().__init__()
        self._condition = _FutureLock()
        self._settled = Event()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until there is a result or an exception, or it is cancelled; False after `timeout` seconds."""
        return self.done() or self._settled.wait(timeout)

    def result(self, timeout: float | None = None) -> _T:
        self.wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.wait(timeout)
        return super().exception(0)

    def set_result(self, result: _T) -> None:
        super().set_result(result)
        self._settled.set()

    def set_exception(self, exception: BaseException | None) -> None:
        super().set_exception(exception)
        self._settled.set()

    def cancel(self) -> bool:
        cancelled = super().cancel()
        if cancelled:
            self._settled.set()
        return cancelled


class IoPool:
    """At most `max_workers` threads, started one by one as calls overlap.

    `max_workers=0` runs every call in the caller's thread, in order; simulated runs use this. After `close`, or when
    the last reference is gone, submitted calls finish and then the threads end. When the interpreter exits, calls
    that have not started are cancelled and running calls get a short time to finish. In a forked child the pool is
    new and empty; a future from before the fork gets its result in the parent only. A pickled copy is a new pool of
    the same size.
    """

    def __init__(self, *, max_workers: int = DEFAULT_WORKERS, name: str = "flagstone-io") -> None:
        if max_workers < 0:
            raise InvalidRequest(f"max_workers is {max_workers}; use 0 (no threads) or more")
        self._max_workers = max_workers
        self._name = name
        self._closed = False
        self._create_workers()
        if not simulated():  # simulated threads do not outlive their simulator
            _pools.add(self)

    def __reduce__(self) -> tuple[object, tuple[int, str]]:
        return (_reopen, (self._max_workers, self._name))

    @property
    def max_workers(self) -> int:
        return self._max_workers

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        """Start `fn` as soon as a thread is free; the future gets its result or exception.

        If no thread can be started (the system has none left, or the interpreter is exiting), the caller's thread runs
        it. A call that runs in the pool must not wait for such a future, because then all threads could wait.

        Raises:
            Closed: the pool was closed.

        """
        future: Future[_T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - the thread that waits for the future gets every error
                future.set_exception(error)
            else:
                future.set_result(result)

        if self._max_workers == 0:
            self._check_open()
            call()
        elif not self._workers.queue(_Task(call, future.cancel)):
            call()
        return future

    def map_ordered(self, fn: Callable[[_T], _U], items: Iterable[_T]) -> list[_U]:
        """`[fn(item) for item in items]`, with several calls at once; returns when every call has ended.

        After a failure no further call starts. The method waits for the running calls and raises the exception of the
        first failed item. A single item, and any call from one of the pool's own threads, runs in the caller's thread:
        a pool that waits for itself would never return.
        """
        work = list(items)
        if len(work) <= 1 or self._max_workers == 0 or self._workers.includes(thread_ident()):
            self._check_open()
            return [fn(item) for item in work]
        failed = False

        def attempt(item: _T) -> _U:
            nonlocal failed
            if failed:
                raise _Skipped
            try:
                return fn(item)
            except BaseException:
                failed = True
                raise

        futures = [self.submit(attempt, item) for item in work]
        try:
            wait_for_all(futures)
        except BaseException:  # an interrupt from the keyboard: wait until no call runs any more
            failed = True
            wait_for_all(futures)
            raise
        errors = [future.exception() for future in futures]
        first = next(
            (error for error in errors if error is not None and not isinstance(error, _Skipped)), None
        )
        if first is None:
            return [future.result() for future in futures]
        try:
            raise first
        finally:
            # The traceback refers to this frame, which would keep every result until Python's garbage collection.
            del futures, errors, first

    def close(self) -> None:
        """Refuse new calls; calls that were submitted before still run. Does not wait; may be called again."""
        self._closed = True
        self._end_workers()

    def _check_open(self) -> None:
        if self._closed:
            raise _closed(self._name)

    def _create_workers(self) -> None:
        self._workers = _Workers(self._max_workers, self._name)
        self._end_workers = finalize(self, _Workers.end, self._workers)
        self._end_workers.atexit = False  # the exit hook of this module does it, and waits for running calls

    def _start_over_in_child(self) -> None:
        self._end_workers.detach()
        self._create_workers()
        if self._closed:
            self._end_workers()


def wait_for_all(futures: Iterable[Future[_T]], timeout: float | None = None) -> bool:
    """Wait until every future has a result, an exception or was cancelled; False after `timeout` seconds."""
    deadline = None if timeout is None else monotonic() + timeout
    return all(
        future.wait(None if deadline is None else max(0.0, deadline - monotonic())) for future in futures
    )


class _Skipped(Exception):
    """Another item failed before this item started."""


class _Task(NamedTuple):
    run: Callable[[], None]
    cancel: Callable[[], bool]


class _Workers:
    """The threads of one pool and their queue. It has no reference to the pool, so that the pool can be collected."""

    def __init__(self, max_workers: int, name: str) -> None:
        self._max_workers = max_workers
        self._name = name
        self._tasks: Queue[_Task | None] = Queue()
        # Reentrant: Python's garbage collection may call `end` while this thread holds the lock.
        self._lock = RLock()
        self._threads: list[Thread] = []
        self._idents: set[int] = set()
        self._outstanding = 0  # queued or running
        self._ended = False

    def queue(self, task: _Task) -> bool:
        """Queue the task; False if there is no thread to run it and none can be started."""
        with self._lock:
            if self._ended:
                raise _closed(self._name)
            if self._outstanding >= len(self._threads) < self._max_workers:
                self._add_thread()
            if not self._threads:
                return False
            self._outstanding += 1
            self._tasks.put(task)
            return True

    def includes(self, ident: int) -> bool:
        """Whether the thread with that identity is one of these."""
        return ident in self._idents

    def end(self) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
            # The queue is first in, first out: a thread ends only after all tasks that were queued before.
            for _ in self._threads:
                self._tasks.put(None)

    def cancel_queued(self) -> None:
        try:
            while True:
                task = self._tasks.get_nowait()
                if task is not None:
                    task.cancel()
        except Empty:
            return

    def join(self, deadline: float) -> None:
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - monotonic()))

    def _add_thread(self) -> None:
        thread = new_thread(self._work, name=f"{self._name}-{len(self._threads)}")
        # Added before it runs: `end` ends only threads in the list.
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.remove(thread)  # the other threads or the caller run the task

    def _work(self) -> None:
        self._idents.add(thread_ident())
        while (task := self._tasks.get()) is not None:
            task.run()
            del task  # an idle thread must not keep the last call's arguments alive
            with self._lock:
                self._outstanding -= 1


def cores() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def shared_pool() -> IoPool:
    """The pool that this process shares; users never close it.

    Under a simulator every simulated process has a pool of its own.
    """
    global _shared  # noqa: PLW0603
    pool = of_process(IoPool)
    if pool is not None:
        return pool
    with _shared_lock:
        if _shared is None:
            _shared = IoPool()
        return _shared


def _closed(name: str) -> Closed:
    return Closed(f"thread pool {name} is closed; open the database again")


def _reopen(max_workers: int, name: str) -> IoPool:
    return IoPool(max_workers=max_workers, name=name)


_pools: WeakSet[IoPool] = WeakSet()
_shared: IoPool | None = None
_shared_lock = Lock()


def _after_fork_in_child() -> None:
    global _shared_lock  # noqa: PLW0603
    _shared_lock = Lock()
    for pool in _pools:
        pool._start_over_in_child()  # noqa: SLF001


def _at_exit() -> None:
    deadline = monotonic() + EXIT_GRACE_SECONDS
    workers_of_all = [pool._workers for pool in _pools]  # noqa: SLF001
    for workers in workers_of_all:
        workers.cancel_queued()
        workers.end()
    for workers in workers_of_all:
        workers.join(deadline)


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
