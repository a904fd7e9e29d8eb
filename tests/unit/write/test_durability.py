from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from threading import Event, Lock, Semaphore, Thread
from typing import Any

import pytest

from flagstone.config import Settings
from flagstone.errors import Closed, InternalError, Unavailable
from flagstone.metadata.manifest import new_manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.metrics import Metrics
from flagstone.types import Seq, WalId
from flagstone.write.durability import DurabilityTimeout, WriteHandle
from flagstone.write.state import Memtables
from flagstone.write.writer_state import Recovered, WriterState


class Services:
    """The services of a writer: only requests to write the WAL matter here."""

    def __init__(self, wal_now: Callable[[], None]) -> None:
        self.wal_now = self.write_wal = wal_now

    def wal_soon(self) -> None: ...

    def flusher(self) -> None: ...

    def follower(self) -> None: ...


def writer_state(
    wal_now: Callable[[], None], *, last_seq: int = 0, synchronous_commit: bool = False
) -> WriterState:
    recovered = Recovered(Versioned(1, new_manifest()), Memtables(), last_seq, 0, WalId(0))
    view: Any = None  # nothing is read or flushed here
    state = WriterState(
        recovered,
        view,
        settings=Settings(synchronous_commit=synchronous_commit),
        clock=VirtualClock(),
        merge_operator=None,
        metrics=Metrics(),
    )
    state.wake = Services(wal_now)
    return state


def record(state: WriterState, *, synchronous: bool = False) -> WriteHandle:
    """A write without rows, which does not wait for earlier ones."""
    with state.lock:
        seq = state.last_seq + 1
        state._record(seq, seq, synchronous)
    return WriteHandle(state, Seq(seq), 1000)


class Writer:
    """A state, and a WAL that is written on request if `reachable`."""

    def __init__(self, *, reachable: bool = True, synchronous_commit: bool = False) -> None:
        self.asked: list[int] = []
        self.reachable = reachable
        self.state = writer_state(self.flush, last_seq=10, synchronous_commit=synchronous_commit)

    def flush(self) -> None:
        self.asked.append(self.state.last_seq)
        if self.reachable:
            self.state.advance_durable(self.state.last_seq)

    def write(self, *, synchronous: bool = False) -> WriteHandle:
        return record(self.state, synchronous=synchronous)

    @property
    def levels(self) -> tuple[int, int, int]:
        return self.state.durable_seq, self.state.committed_seq, self.state.last_seq


def fenced() -> Closed:
    return Closed("a newer writer has taken over", reason="fenced")


def waiting_thread(handle: WriteHandle) -> tuple[Thread, list[BaseException | None]]:
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            handle.wait(5)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the outcome
            outcome.append(error)
        else:
            outcome.append(None)

    thread = Thread(target=run)
    thread.start()
    return thread, outcome


# -- what is visible --------------------------------------------------------------------------------------


def test_a_write_that_does_not_wait_is_visible_at_once() -> None:
    writer = Writer()
    writer.write()

    assert writer.levels == (10, 11, 11)


def test_a_write_that_waits_for_durability_is_visible_at_once() -> None:
    writer = Writer()
    writer.write(synchronous=True)
    writer.write()

    assert writer.levels == (10, 12, 12)
    assert not writer.state._pending


def test_with_synchronous_commit_a_synchronous_write_is_visible_only_once_it_is_durable() -> None:
    writer = Writer(synchronous_commit=True)
    writer.write(synchronous=True)
    assert writer.levels == (10, 10, 11)
    assert list(writer.state._pending) == [11]

    writer.state.advance_durable(11)

    assert writer.levels == (11, 11, 11)
    assert not writer.state._pending


def test_with_synchronous_commit_later_writes_wait_until_they_are_visible() -> None:
    writer = Writer(reachable=False, synchronous_commit=True)
    writer.write(synchronous=True)
    later = writer.write()
    waiting = Thread(target=lambda: writer.state.wait_committed(later.seq))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()

    writer.state.advance_durable(11)

    waiting.join(5)
    assert not waiting.is_alive()
    assert writer.levels == (11, 12, 12)


def test_with_synchronous_commit_a_failure_reaches_later_writes_that_wait_for_visibility() -> None:
    writer = Writer(reachable=False, synchronous_commit=True)
    writer.write(synchronous=True)
    later = writer.write()
    writer.state.fail(fenced())

    with pytest.raises(Closed, match="taken over"):
        writer.state.wait_committed(later.seq)


def test_with_synchronous_commit_writes_after_a_synchronous_one_become_visible_with_it() -> None:
    writer = Writer(synchronous_commit=True)
    for synchronous in (False, True, False, False, True, False):
        writer.write(synchronous=synchronous)
    assert writer.levels == (10, 11, 16)

    writer.state.advance_durable(11)
    assert writer.levels == (11, 11, 16)
    writer.state.advance_durable(12)
    assert writer.levels == (12, 14, 16)
    writer.state.advance_durable(16)
    assert writer.levels == (16, 16, 16)


def test_the_durable_sequence_number_never_decreases() -> None:
    writer = Writer()
    writer.write()
    writer.state.advance_durable(11)
    writer.state.advance_durable(10)

    assert writer.levels == (11, 11, 11)


def test_a_sequence_number_beyond_the_last_write_cannot_become_durable() -> None:
    with pytest.raises(InternalError):
        Writer().state.advance_durable(11)


# -- waiting ----------------------------------------------------------------------------------------------


def test_waiting_requests_a_flush_that_includes_earlier_writes() -> None:
    writer = Writer()
    earlier, handle = writer.write(), writer.write()
    assert not handle.done()

    handle.wait()

    assert writer.asked == [12]
    assert handle.done()
    assert earlier.done()
    earlier.wait()
    assert writer.asked == [12]


def test_a_wait_that_timed_out_can_be_repeated() -> None:
    writer = Writer(reachable=False)
    handle = writer.write()

    with pytest.raises(TimeoutError, match="write 11 is not durable") as caught:
        handle.wait(0.001)
    assert isinstance(caught.value, Unavailable)
    assert isinstance(caught.value, DurabilityTimeout)
    assert not handle.done()
    writer.state.advance_durable(11)
    handle.wait(0)


def test_threads_that_wait_wake_when_their_own_write_is_durable() -> None:
    asked = Semaphore(0)
    state = writer_state(asked.release)
    threads = [waiting_thread(record(state)) for _ in range(3)]
    assert all(asked.acquire(timeout=5) for _ in threads)

    state.advance_durable(2)
    for thread, outcome in threads[:2]:
        thread.join(5)
        assert outcome == [None]
    assert threads[2][0].is_alive()
    state.advance_durable(3)
    threads[2][0].join(5)

    assert threads[2][1] == [None]


def test_many_threads_that_wait_for_one_flushing_thread_all_return() -> None:
    wanted = Event()
    stop = Event()
    state = writer_state(wanted.set)
    rounds, callers = 50, 8

    def flush() -> None:
        while not stop.is_set():
            wanted.wait(1)
            wanted.clear()
            state.advance_durable(state.last_seq)

    def call(number: int) -> None:
        for turn in range(rounds):
            handle = record(state, synchronous=(turn + number) % 2 == 0)
            handle.wait(10)
            assert state.durable_seq >= handle.seq
            assert state.committed_seq >= handle.seq

    flusher = Thread(target=flush)
    flusher.start()
    threads = [Thread(target=call, args=(number,)) for number in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    stop.set()
    wanted.set()
    flusher.join(5)

    assert state.durable_seq == state.committed_seq == state.last_seq == rounds * callers


# -- failing ----------------------------------------------------------------------------------------------


def test_a_failure_is_raised_to_all_present_and_later_waiters() -> None:
    asked = Event()
    state = writer_state(asked.set)
    first, second = record(state), record(state)
    state.advance_durable(1)
    thread, outcome = waiting_thread(second)
    assert asked.wait(5)

    state.fail(fenced())
    thread.join(5)

    (error,) = outcome
    assert isinstance(error, Closed)
    assert error.reason == "fenced"
    for attempt in (second.wait, second.done, state.raise_failure):
        with pytest.raises(Closed, match="newer writer") as caught:
            attempt()
        assert caught.value is not error
        assert caught.value.reason == "fenced"
    first.wait()
    assert first.done()


def test_nothing_becomes_durable_or_visible_after_a_failure() -> None:
    writer = Writer(reachable=False, synchronous_commit=True)
    writer.write(synchronous=True)
    handle = writer.write()
    writer.state.fail(fenced())
    writer.state.advance_durable(12)

    assert writer.levels == (10, 10, 12)
    with pytest.raises(Closed):
        handle.wait()


def test_the_first_failure_is_raised_with_its_notes() -> None:
    writer = Writer(reachable=False)
    handle = writer.write()
    first = Unavailable("the store is gone")
    first.add_note("in background service wal")
    writer.state.fail(first)
    writer.state.fail(fenced())

    assert writer.state.now.failure is first
    with pytest.raises(Unavailable, match="gone") as caught:
        handle.wait()
    assert caught.value.__notes__ == ["in background service wal"]
    assert caught.value.__cause__ is first


# -- awaiting ---------------------------------------------------------------------------------------------


def test_awaiting_a_durable_write_does_not_suspend() -> None:
    writer = Writer()
    handle = writer.write()
    writer.state.advance_durable(11)

    with pytest.raises(StopIteration):
        next(handle.__await__())
    assert writer.asked == []


def test_awaiting_requests_a_flush_and_wakes_from_another_thread() -> None:
    asked = Event()
    state = writer_state(asked.set)

    async def main() -> list[bool]:
        first, second, third = (record(state, synchronous=True) for _ in range(3))
        handles = [third, first, second]

        async def use(handle: WriteHandle) -> bool:
            await handle
            return handle.done()

        return await asyncio.wait_for(asyncio.gather(*map(use, handles)), 5)

    def flush() -> None:
        assert asked.wait(5)
        for seq in (1, 2, 3):
            state.advance_durable(seq)

    thread = Thread(target=flush)
    thread.start()

    assert asyncio.run(main()) == [True, True, True]
    thread.join(5)
    assert state.committed_seq == 3


def test_a_flush_that_ends_before_the_wait_starts_is_noticed() -> None:
    writer = Writer()

    async def main() -> None:
        await writer.write(synchronous=True)

    asyncio.run(asyncio.wait_for(main(), 5))


def test_a_flush_between_the_check_and_the_wait_is_noticed() -> None:
    class Interrupted:
        """A lock before whose next acquisition something happens."""

        def __init__(self) -> None:
            self._lock = Lock()
            self.before: Callable[[], None] | None = None
            self.acquire, self.release = self._lock.acquire, self._lock.release

        def __enter__(self) -> bool:
            before, self.before = self.before, None
            if before is not None:
                before()
            return self._lock.__enter__()

        def __exit__(self, *error: object) -> None:
            self._lock.release()

    lock = Interrupted()
    state = writer_state(lambda: None)
    state.lock = lock  # type: ignore[assignment]
    record(state)
    lock.before = lambda: state.advance_durable(1)

    async def main() -> None:
        await WriteHandle(state, Seq(1), 0)

    asyncio.run(asyncio.wait_for(main(), 5))


def test_awaiting_raises_the_failure() -> None:
    writer = Writer(reachable=False)

    async def main() -> None:
        handle = writer.write()
        waiting = asyncio.ensure_future(_awaited(handle))
        await asyncio.sleep(0)
        writer.state.fail(fenced())
        with pytest.raises(Closed, match="newer writer"):
            await waiting
        with pytest.raises(Closed, match="newer writer"):
            await handle

    asyncio.run(main())


def test_a_cancelled_wait_and_a_closed_loop_do_not_disturb_other_waiters() -> None:
    writer = Writer(reachable=False)

    async def abandon() -> None:
        waiting = asyncio.ensure_future(_awaited(writer.write()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    async def cancel_and_go_on() -> None:
        await abandon()
        other = writer.write()
        waiting = asyncio.ensure_future(_awaited(other))
        await asyncio.sleep(0)
        writer.state.advance_durable(writer.state.last_seq)
        await waiting

    asyncio.run(abandon())
    asyncio.run(cancel_and_go_on())
    assert writer.state.durable_seq == writer.state.last_seq
    gc.collect()


async def _awaited(handle: WriteHandle) -> None:
    await handle


def test_a_write_handle_reports_pending_durable_and_failed() -> None:
    writer = Writer()
    handle = writer.write()
    assert repr(handle) == "WriteHandle(seq=11, created_ms=1000, in memory)"
    handle.wait()

    assert repr(handle) == "WriteHandle(seq=11, created_ms=1000, durable)"
    assert (handle.seq, handle.created_ms) == (11, 1000)
