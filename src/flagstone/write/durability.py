"""The handle that a write returns: with it a caller waits until the write is on the store."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from flagstone.config.durations import as_duration
from flagstone.errors import Unavailable
from flagstone.types import Seq

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future

    from flagstone.write.writer_state import WriterState

    Waiter = tuple[int, int, AbstractEventLoop, Future[None]]
    """(sequence number, tie breaker, loop, future): the smallest sequence number is durable first."""


class DurabilityTimeout(Unavailable, TimeoutError):
    """The write did not become durable in time. It may still do so: wait again, or give up on it."""


class WriteHandle:
    """What a write returns: its sequence number, and a way to wait until it is on the store.

    `handle.wait()` blocks and `await handle` suspends until then. Either makes the WAL writer write at once, together
    with all writes of other callers so far. Not waiting is fine: the write becomes durable on its own.
    """

    __slots__ = ("_state", "created_ms", "seq")

    def __init__(self, state: WriterState, seq: Seq, created_ms: int) -> None:
        self._state = state
        self.seq: Seq = seq
        self.created_ms: int = created_ms

    def __repr__(self) -> str:
        level = "durable" if self._state.durable_seq >= self.seq else "in memory"
        return f"WriteHandle(seq={self.seq}, created_ms={self.created_ms}, {level})"

    def done(self) -> bool:
        """Whether the write is on the store. Never blocks; raises the failure if it will never be there."""
        return self._state.is_durable(self.seq)

    def wait(self, timeout: timedelta | str | float | None = None) -> None:
        """Block until the write, and every earlier one, is on the store.

        A bare number is seconds, as in Python's own `wait`.

        Raises:
            TimeoutError: not within `timeout` (also an `Unavailable`). The write is still on its way.
            Closed: a newer writer took over, or the database failed, before that. The write may be lost.

        """
        if isinstance(timeout, str | timedelta):
            timeout = as_duration(timeout, "timeout").total_seconds()
        self._state.wait_durable(self.seq, timeout)

    def __await__(self) -> Generator[Future[None], None, None]:
        return self._state.wait_durable_async(self.seq)


def wake_waiters(waiters: list[Waiter]) -> None:
    """Resume the coroutines that wait."""
    for _, _, loop, future in waiters:
        # The loop may have been closed meanwhile: then no coroutine waits.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(_settle, future)


def _settle(future: Future[None]) -> None:
    # A cancelled future is done already.
    if not future.done():
        future.set_result(None)
