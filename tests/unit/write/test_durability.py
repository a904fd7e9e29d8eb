from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from threading import Event, Lock, Thread

import pytest

from flagstone.errors import Closed, InternalError, Unavailable
from flagstone.types import Seq
from flagstone.write.durability import DurabilityTimeout, DurabilityTracker, WriteHandle


class Writer:
    """A tracker, and a log that is flushed when somebody asks for it and `reachable` says so."""

    def __init__(self, *, reachable: bool = True, synchronous_commit: bool = False) -> None:
        self.asked: list[int] = []
        self.reachable = reachable
        self.tracker = DurabilityTracker(10, request_flush=self.flush, synchronous_commit=synchronous_commit)

    def flush(self, seq: int) -> None:
        self.asked.append(seq)
        if self.reachable:
            self.tracker.advance_durable(self.tracker.last_seq)

    def write(self, *, synchronous: bool = False) -> WriteHandle:
        tracker = self.tracker
        with tracker.lock:
            seq = tracker.last_seq + 1
            tracker.record(seq, synchronous=synchronous)
        return WriteHandle(tracker, Seq(seq), 1000)

    @property
    def levels(self) -> tuple[int, int, int]:
        return self.tracker.durable_seq, self.tracker.committed_seq, self.tracker.last_seq


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


def test_an_asynchronous_write_is_visible_at_once() -> None:
    writer = Writer()
    writer.write()

    assert writer.levels == (10, 11, 11)


def test_a_synchronous_write_is_visible_at_once_too() -> None:
    writer = Writer()
    writer.write(synchronous=True)
    writer.write()

    assert writer.levels == (10, 12, 12)
    assert writer.tracker.pending_commits == 0


def test_with_synchronous_commit_a_synchronous_write_is_visible_only_once_it_is_durable() -> None:
    writer = Writer(synchronous_commit=True)
    writer.write(synchronous=True)
    assert writer.levels == (10, 10, 11)
    assert writer.tracker.pending_commits == 1

    writer.tracker.advance_durable(11)

    assert writer.levels == (11, 11, 11)
    assert writer.tracker.pending_commits == 0


def test_with_synchronous_commit_later_writes_wait_until_they_are_visible() -> None:
    writer = Writer(reachable=False, synchronous_commit=True)
    writer.write(synchronous=True)
    later = writer.write()
    waiting = Thread(target=lambda: writer.tracker.wait_committed(later.seq))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()

    writer.tracker.advance_durable(11)

    waiting.join(5)
    assert not waiting.is_alive()
    assert writer.levels == (11, 12, 12)


def test_with_synchronous_commit_a_later_write_hears_that_it_will_never_be_visible() -> None:
    writer = Writer(reachable=False, synchronous_commit=True)
    writer.write(synchronous=True)
    later = writer.write()
    writer.tracker.fail(fenced())

    with pytest.raises(Closed, match="taken over"):
        writer.tracker.wait_committed(later.seq)


def test_with_synchronous_commit_what_comes_after_a_synchronous_write_becomes_visible_with_it() -> None:
    writer = Writer(synchronous_commit=True)
    for synchronous in (False, True, False, False, True, False):
        writer.write(synchronous=synchronous)
    assert writer.levels == (10, 11, 16)

    writer.tracker.advance_durable(11)
    assert writer.levels == (11, 11, 16)
    writer.tracker.advance_durable(12)
    assert writer.levels == (12, 14, 16)
    writer.tracker.advance_durable(16)
    assert writer.levels == (16, 16, 16)


def test_durability_never_goes_back() -> None:
    writer = Writer()
    writer.write()
    writer.tracker.advance_durable(11)
    writer.tracker.advance_durable(10)

    assert writer.levels == (11, 11, 11)


def test_what_was_never_written_cannot_be_durable() -> None:
    with pytest.raises(InternalError):
        Writer().tracker.advance_durable(11)


def test_numbers_only_grow() -> None:
    writer = Writer()

    with pytest.raises(InternalError):
        writer.tracker.record(10)


# -- waiting ----------------------------------------------------------------------------------------------


def test_waiting_asks_for_a_flush_at_once_and_carries_earlier_writes_along() -> None:
    writer = Writer()
    earlier, handle = writer.write(), writer.write()
    assert not handle.done()

    handle.wait()

    assert writer.asked == [12]
    assert handle.done()
    assert earlier.done()
    earlier.wait()
    assert writer.asked == [12]


def test_waiting_stops_after_its_timeout_and_can_be_taken_up_again() -> None:
    writer = Writer(reachable=False)
    handle = writer.write()

    with pytest.raises(TimeoutError, match="write 11 is not durable") as caught:
        handle.wait(0.001)
    assert isinstance(caught.value, Unavailable)
    assert isinstance(caught.value, DurabilityTimeout)
    assert not handle.done()
    writer.tracker.advance_durable(11)
    handle.wait(0)


def test_threads_that_wait_wake_when_their_own_write_is_durable() -> None:
    asked = Event()
    tracker = DurabilityTracker(0, request_flush=lambda seq: asked.set() if seq == 2 else None)
    with tracker.lock:
        for seq in range(1, 4):
            tracker.record(seq)
    handles = [WriteHandle(tracker, Seq(seq), 0) for seq in (1, 2, 3)]
    threads = [waiting_thread(handle) for handle in handles]
    assert asked.wait(5)

    tracker.advance_durable(2)
    for thread, outcome in threads[:2]:
        thread.join(5)
        assert outcome == [None]
    assert threads[2][0].is_alive()
    tracker.advance_durable(3)
    threads[2][0].join(5)

    assert threads[2][1] == [None]


def test_many_threads_write_and_wait_while_one_flushes() -> None:
    wanted = Event()
    stop = Event()
    tracker = DurabilityTracker(0, request_flush=lambda seq: wanted.set())
    rounds, callers = 50, 8

    def flush() -> None:
        while not stop.is_set():
            wanted.wait(1)
            wanted.clear()
            tracker.advance_durable(tracker.last_seq)

    def call(number: int) -> None:
        for turn in range(rounds):
            with tracker.lock:
                seq = tracker.last_seq + 1
                tracker.record(seq, synchronous=(turn + number) % 2 == 0)
            WriteHandle(tracker, Seq(seq), 0).wait(10)
            assert tracker.durable_seq >= seq
            assert tracker.committed_seq >= seq

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

    assert tracker.durable_seq == tracker.committed_seq == tracker.last_seq == rounds * callers


# -- failing ----------------------------------------------------------------------------------------------


def test_a_failure_reaches_everyone_who_waits_and_everyone_who_comes_later() -> None:
    asked = Event()
    tracker = DurabilityTracker(0, request_flush=lambda seq: asked.set())
    with tracker.lock:
        tracker.record(1)
        tracker.record(2)
    first, second = WriteHandle(tracker, Seq(1), 0), WriteHandle(tracker, Seq(2), 0)
    tracker.advance_durable(1)
    thread, outcome = waiting_thread(second)
    assert asked.wait(5)

    tracker.fail(fenced())
    thread.join(5)

    (error,) = outcome
    assert isinstance(error, Closed)
    assert error.reason == "fenced"
    for attempt in (second.wait, second.done, tracker.raise_failure):
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
    writer.tracker.fail(fenced())
    writer.tracker.advance_durable(12)

    assert writer.levels == (10, 10, 12)
    with pytest.raises(Closed):
        handle.wait()


def test_the_first_failure_counts_and_keeps_its_notes() -> None:
    writer = Writer(reachable=False)
    handle = writer.write()
    first = Unavailable("the store is gone")
    first.add_note("in background service wal")
    writer.tracker.fail(first)
    writer.tracker.fail(fenced())

    assert writer.tracker.failure is first
    with pytest.raises(Unavailable, match="gone") as caught:
        handle.wait()
    assert caught.value.__notes__ == ["in background service wal"]
    assert caught.value.__cause__ is first


# -- awaiting ---------------------------------------------------------------------------------------------


def test_awaiting_what_is_durable_does_not_suspend() -> None:
    writer = Writer()
    handle = writer.write()
    writer.tracker.advance_durable(11)

    with pytest.raises(StopIteration):
        next(handle.__await__())
    assert writer.asked == []


def test_awaiting_asks_for_a_flush_and_is_woken_from_another_thread() -> None:
    asked = Event()
    tracker = DurabilityTracker(0, request_flush=lambda seq: asked.set())

    async def main() -> list[bool]:
        with tracker.lock:
            for seq in (1, 2, 3):
                tracker.record(seq, synchronous=True)
        handles = [WriteHandle(tracker, Seq(seq), 0) for seq in (3, 1, 2)]

        async def use(handle: WriteHandle) -> bool:
            await handle
            return handle.done()

        return await asyncio.wait_for(asyncio.gather(*map(use, handles)), 5)

    def flush() -> None:
        assert asked.wait(5)
        for seq in (1, 2, 3):
            tracker.advance_durable(seq)

    thread = Thread(target=flush)
    thread.start()

    assert asyncio.run(main()) == [True, True, True]
    thread.join(5)
    assert tracker.committed_seq == 3


def test_a_flush_that_ends_before_the_waiting_begins_is_not_missed() -> None:
    writer = Writer()

    async def main() -> None:
        await writer.write(synchronous=True)

    asyncio.run(asyncio.wait_for(main(), 5))


def test_a_flush_between_looking_and_waiting_is_not_missed() -> None:
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
    tracker = DurabilityTracker(0, request_flush=lambda seq: None, lock=lock)  # type: ignore[arg-type]
    tracker.record(1)
    lock.before = lambda: tracker.advance_durable(1)

    async def main() -> None:
        await WriteHandle(tracker, Seq(1), 0)

    asyncio.run(asyncio.wait_for(main(), 5))


def test_awaiting_raises_the_failure() -> None:
    writer = Writer(reachable=False)

    async def main() -> None:
        handle = writer.write()
        waiting = asyncio.ensure_future(_awaited(handle))
        await asyncio.sleep(0)
        writer.tracker.fail(fenced())
        with pytest.raises(Closed, match="newer writer"):
            await waiting
        with pytest.raises(Closed, match="newer writer"):
            await handle

    asyncio.run(main())


def test_a_cancelled_wait_and_a_closed_loop_disturb_nobody() -> None:
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
        writer.tracker.advance_durable(writer.tracker.last_seq)
        await waiting

    asyncio.run(abandon())
    asyncio.run(cancel_and_go_on())
    assert writer.tracker.durable_seq == writer.tracker.last_seq
    gc.collect()


async def _awaited(handle: WriteHandle) -> None:
    await handle


def test_a_handle_shows_what_became_of_the_write() -> None:
    writer = Writer()
    handle = writer.write()
    assert repr(handle) == "WriteHandle(seq=11, created_ms=1000, in memory)"
    handle.wait()

    assert repr(handle) == "WriteHandle(seq=11, created_ms=1000, durable)"
    assert (handle.seq, handle.created_ms) == (11, 1000)
