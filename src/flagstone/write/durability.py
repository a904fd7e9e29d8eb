"""Which writes are on the store, which are visible, and which threads wait for that.

Every write has a sequence number; three numbers tell what became of all of them:

    durable_seq   up to here everything is on the store
    committed_seq up to here everything is visible to ordinary reads
    last_seq      up to here everything is in memory

A write is visible when its call returns, so `committed_seq` is `last_seq`. With `synchronous_commit` a synchronous
write (`await_durable`) is committed only when it is durable, and commits are strictly ordered: what comes after it
waits with it. `committed_seq` is then the number just before the first synchronous write that is on its way.
Everything above `durable_seq` is lost in a crash; none of it was ever reported as durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from copy import copy
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from flagstone.errors import FlagstoneError, InternalError, Unavailable
from flagstone.runtime.sync import Lock, Waiters
from flagstone.types import Seq

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future

    _Waiter = tuple[int, int, AbstractEventLoop, Future[None]]
    """(seq, tie breaker, loop, future): ordered by what is durable first."""


class DurabilityTimeout(Unavailable, TimeoutError):
    """The write did not become durable in time. It is still on its way and may yet: wait again, or give up on it."""


class DurabilityTracker:
    """Counts what the writer did and what the store has, and wakes those who wait for the one to reach the other.

    `lock` is the lock that orders writes; the tracker shares it, so that recording a write costs nothing extra.
    `request_flush` asks for everything up to a sequence number to be made durable soon; it is called without
    the lock, by each who begins to wait, and must not block. The three numbers may be read without the lock.
    """

    __slots__ = (
        "_changed",
        "_failure",
        "_pending",
        "_request_flush",
        "_ticket",
        "_waiters",
        "committed_seq",
        "durable_seq",
        "last_seq",
        "lock",
        "synchronous_commit",
    )

    def __init__(
        self,
        last_seq: int,
        *,
        request_flush: Callable[[int], None],
        synchronous_commit: bool = False,
        lock: Lock | None = None,
    ) -> None:
        self.lock: Lock = Lock() if lock is None else lock
        self.last_seq: int = last_seq
        self.durable_seq: int = last_seq
        self.committed_seq: int = last_seq
        self._changed = Waiters(self.lock)
        self._request_flush = request_flush
        self.synchronous_commit: bool = synchronous_commit
        self._pending: deque[int] = deque()
        self._waiters: list[_Waiter] = []
        self._ticket = 0
        self._failure: FlagstoneError | None = None

    @property
    def failure(self) -> FlagstoneError | None:
        """Why nothing will become durable any more; None while all is well."""
        return self._failure

    @property
    def pending_commits(self) -> int:
        """How many synchronous writes wait for the store."""
        return len(self._pending)

    def defers(self, synchronous: bool) -> bool:
        """Whether the next write, synchronous or not, becomes visible only when the store has it."""
        return self.synchronous_commit and (synchronous or bool(self._pending))

    def record(self, seq: int, *, synchronous: bool = False) -> None:
        """A write took this number: from here on it has happened. The caller holds `lock`, and numbers only ever grow.

        An exception in here leaves a write that has happened, and is visible with the next one at the latest.
        """
        if seq <= self.last_seq:
            raise InternalError(f"sequence number {seq} came after {self.last_seq}")
        if self.synchronous_commit and self.defers(synchronous):
            if synchronous:
                self._pending.append(seq)
            self.last_seq = seq
        else:
            self.last_seq = seq
            self.committed_seq = seq

    def skip_to(self, seq: int) -> None:
        """The numbers up to `seq` were used by rows that are on the store and in tables. The caller holds `lock`.

        Everything before them must be durable. A smaller number than the last one changes nothing.
        """
        if self.durable_seq != self.last_seq:
            raise InternalError(
                f"{self.last_seq} is not durable yet, only {self.durable_seq}: cannot go on at {seq}"
            )
        if seq > self.last_seq:
            self.last_seq = self.durable_seq = self.committed_seq = seq

    def advance_durable(self, seq: int) -> None:
        """Everything up to `seq` is on the store: commit what waited for it and wake who waited.

        A smaller number than before changes nothing, and so does any number after a failure: what was
        reported as failed must not turn out as a success for others.
        """
        with self.lock:
            if seq > self.last_seq:
                raise InternalError(
                    f"sequence number {seq} is durable, but only {self.last_seq} were given out"
                )
            if seq <= self.durable_seq or self._failure is not None:
                return
            self._changed.notify_all()
            self.durable_seq = seq
            pending = self._pending
            while pending and pending[0] <= seq:
                pending.popleft()
            self.committed_seq = pending[0] - 1 if pending else self.last_seq
            woken: list[_Waiter] = []
            while self._waiters and self._waiters[0][0] <= seq:
                woken.append(heappop(self._waiters))
        _wake(woken)

    def fail(self, error: FlagstoneError) -> None:
        """Nothing more will become durable: every present and later wait for what is not raises `error`.

        Synchronous writes under way, and all that came after them, stay invisible for ever. The first failure counts.
        """
        with self.lock:
            if self._failure is not None:
                return
            self._changed.notify_all()
            self._failure = error
            woken, self._waiters = self._waiters, []
        _wake(woken)

    def raise_failure(self) -> None:
        """Raise the failure if there is one, as an exception of its own: threads may not share a traceback."""
        failure = self._failure
        if failure is not None:
            fresh = copy(failure)
            fresh.__notes__ = list(getattr(failure, "__notes__", ()))
            raise fresh from failure

    def is_durable(self, seq: int) -> bool:
        """Whether that write is on the store. Raises the failure when it will never be."""
        if self.durable_seq >= seq:
            return True
        self.raise_failure()
        return False

    def wait(self, seq: int, timeout: float | None = None) -> None:
        """Block until everything up to `seq` is on the store, asking for a flush at once.

        Raises:
            DurabilityTimeout: it is not there after `timeout` seconds; it may still get there.
            FlagstoneError: it will never get there; the failure given to `fail`.

        """
        if self.is_durable(seq):
            return
        self._request_flush(seq)
        self._changed.wait_for(lambda: self.durable_seq >= seq or self._failure is not None, timeout=timeout)
        if not self.is_durable(seq):
            raise DurabilityTimeout(
                f"write {seq} is not durable after {timeout} s; the store has everything up to {self.durable_seq}"
            )

    def wait_committed(self, seq: int) -> None:
        """Block until the write is visible: until every synchronous write before it is on the store.

        Raises:
            FlagstoneError: it will never be; the failure given to `fail`.

        """
        self._request_flush(seq)
        self._changed.wait_for(lambda: self.committed_seq >= seq or self._failure is not None)
        if self.committed_seq < seq:
            self.raise_failure()

    def wait_async(self, seq: int) -> Generator[Future[None], None, None]:
        """The same for a coroutine of any event loop: `yield from` it in `__await__`. No thread waits meanwhile."""
        if self.is_durable(seq):
            return
        # Whoever awaits has imported it already; others need not pay for it.
        from asyncio import get_running_loop  # noqa: PLC0415

        loop = get_running_loop()
        future = loop.create_future()
        with self.lock:
            # Looked at under the lock: an advance in between would never come to this future.
            settled = self.durable_seq >= seq or self._failure is not None
            if not settled:
                self._ticket += 1
                heappush(self._waiters, (seq, self._ticket, loop, future))
        if not settled:
            self._request_flush(seq)
            yield from future
        if self.durable_seq < seq:
            self.raise_failure()


class WriteHandle:
    """What a write returns: its sequence number, and a way to wait until it is on the store.

    `handle.wait()` blocks and `await handle` suspends until then; either makes the log be written at once, with
    all that others have written meanwhile. Not waiting is fine: the write becomes durable on its own.
    """

    __slots__ = ("_tracker", "created_ms", "seq")

    def __init__(self, tracker: DurabilityTracker, seq: Seq, created_ms: int) -> None:
        self._tracker = tracker
        self.seq: Seq = seq
        self.created_ms: int = created_ms

    def __repr__(self) -> str:
        state = "durable" if self._tracker.durable_seq >= self.seq else "in memory"
        return f"WriteHandle(seq={self.seq}, created_ms={self.created_ms}, {state})"

    def done(self) -> bool:
        """Whether the write is on the store. Never blocks; raises the failure if it will never be there."""
        return self._tracker.is_durable(self.seq)

    def wait(self, timeout: float | None = None) -> None:
        """Block until the write, and every earlier one, is on the store.

        Raises:
            TimeoutError: not within `timeout` seconds (also an `Unavailable`). The write is still on its way.
            Closed: a newer writer took over, or the database was given up, before that: the write may be lost.

        """
        self._tracker.wait(self.seq, timeout)

    def __await__(self) -> Generator[Future[None], None, None]:
        return self._tracker.wait_async(self.seq)


def _wake(waiters: list[_Waiter]) -> None:
    for _, _, loop, future in waiters:
        # A loop that was closed in the meantime has nobody left to tell.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, future)


def _settle(future: Future[None]) -> None:
    # A cancelled one is settled already.
    if not future.done():
        future.set_result(None)
