from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from contextlib import suppress

import pytest

from flagstone.errors import Closed, InvalidRequest
from flagstone.runtime.pool import Future, IoPool, shared_pool
from kit.faults import Struck, Tracer


@pytest.fixture
def pool() -> IoPool:
    return IoPool(max_workers=4, name="test")


def threads_named(prefix: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def test_no_thread_starts_before_there_is_work() -> None:
    lazy = IoPool(max_workers=4, name="lazy")
    assert threads_named("lazy-") == []

    lazy.submit(int).result()
    assert len(threads_named("lazy-")) == 1
    lazy.close()


def test_an_idle_thread_is_used_again() -> None:
    pool = IoPool(max_workers=4, name="again")
    for _ in range(20):
        # The pool counts a call as done just after its future has the result, so it may start a second thread.
        pool.submit(int).result()

    assert len(threads_named("again-")) <= 2
    pool.close()


def test_a_future_has_the_result_or_the_exception(pool: IoPool) -> None:
    assert pool.submit(int, "12").result() == 12
    assert pool.submit(int, "11", base=2).result() == 3
    with pytest.raises(ValueError, match="invalid literal"):
        pool.submit(int, "x").result()


def test_at_most_max_workers_calls_run_at_once() -> None:
    pool = IoPool(max_workers=3, name="limit")
    together = threading.Barrier(3)
    futures = [pool.submit(together.wait, 5) for _ in range(6)]

    assert sorted(future.result(5) for future in futures) == [0, 0, 1, 1, 2, 2]
    assert len(threads_named("limit-")) == 3
    pool.close()


def test_map_keeps_the_order_of_its_items(pool: IoPool) -> None:
    assert pool.map_ordered(lambda n: n * n, range(50)) == [n * n for n in range(50)]
    assert pool.map_ordered(str, []) == []


def test_a_single_item_runs_in_the_callers_thread(pool: IoPool) -> None:
    assert pool.map_ordered(lambda _: threading.get_ident(), [1]) == [threading.get_ident()]


def test_map_waits_for_running_calls_and_raises_the_first_failure(pool: IoPool) -> None:
    ended: list[int] = []
    together = threading.Barrier(3)

    def call(n: int) -> None:
        together.wait(5)
        if n == 1:
            raise KeyError(n)
        threading.Event().wait(0.01)
        ended.append(n)

    with pytest.raises(KeyError, match="1"):
        pool.map_ordered(call, range(3))

    assert sorted(ended) == [0, 2]


def test_map_starts_no_call_after_a_failure() -> None:
    pool = IoPool(max_workers=1, name="single")
    started: list[int] = []

    def call(n: int) -> None:
        started.append(n)
        raise ValueError(n)

    with pytest.raises(ValueError, match="0"):
        pool.map_ordered(call, range(1_000))
    assert started == [0]
    pool.close()


def test_map_may_be_called_from_a_thread_of_the_pool(pool: IoPool) -> None:
    def outer(n: int) -> list[int]:
        return pool.map_ordered(lambda m: n * m, range(3))

    assert pool.map_ordered(outer, range(8)) == [[0, n, 2 * n] for n in range(8)]


def test_a_pool_without_threads_runs_calls_at_once_and_in_order() -> None:
    inline = IoPool(max_workers=0)
    order: list[int] = []

    future = inline.submit(order.append, 1)
    inline.map_ordered(order.append, [2, 3])

    assert future.done()
    assert order == [1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        inline.submit(lambda: 1 // 0).result()


def test_a_negative_size_raises_invalid_request() -> None:
    with pytest.raises(InvalidRequest, match="max_workers is -1"):
        IoPool(max_workers=-1)


@pytest.mark.parametrize("max_workers", [0, 2])
def test_closing_lets_submitted_calls_finish_and_refuses_new_ones(max_workers: int) -> None:
    pool = IoPool(max_workers=max_workers, name="closing")
    futures = [pool.submit(threading.Event().wait, 0.01) for _ in range(4)]

    pool.close()
    pool.close()

    assert not wait(futures, timeout=5).not_done
    with pytest.raises(Closed, match="closing is closed"):
        pool.submit(int)
    with pytest.raises(Closed, match="closing is closed"):
        pool.map_ordered(int, ["1"])


def test_the_threads_of_an_unreferenced_pool_end() -> None:
    pool = IoPool(max_workers=2, name="forgotten")
    pool.submit(int).result()
    (thread,) = threads_named("forgotten-")

    del pool
    gc.collect()
    thread.join(5)

    assert not thread.is_alive()


def test_a_thread_keeps_no_argument_of_an_ended_call_alive() -> None:
    class Block:
        pass

    pool = IoPool(max_workers=1, name="memory")

    block = Block()
    gone = weakref.ref(block)
    pool.submit(id, block).result()
    del block
    pool.submit(int).result()  # the only thread has finished the call before
    gc.collect()

    assert gone() is None
    pool.close()


def test_a_pickled_pool_is_a_new_pool_of_the_same_size(pool: IoPool) -> None:
    copy = pickle.loads(pickle.dumps(pool))

    assert copy is not pool
    assert copy.max_workers == 4
    assert copy.submit(int, "5").result() == 5


def test_there_is_one_shared_pool_per_process() -> None:
    assert shared_pool() is shared_pool()
    assert shared_pool().submit(int, "9").result() == 9


def test_a_forked_child_can_use_the_pools_of_its_parent(run_script: Callable[[str], str]) -> None:
    answer = run_script(
        """
        import os
        from flagstone.runtime.pool import IoPool, shared_pool
        pool, closed = IoPool(max_workers=2), IoPool(max_workers=2)
        assert pool.map_ordered(str, range(4)) == shared_pool().map_ordered(str, range(4))
        closed.close()
        child = os.fork()
        if child == 0:
            ok = pool.map_ordered(str, range(4)) == shared_pool().map_ordered(str, range(4)) == list("0123")
            try:
                closed.submit(int)
            except Exception as error:
                ok = ok and type(error).__name__ == "Closed"
            else:
                ok = False
            os._exit(0 if ok else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), pool.submit(int, "8").result())
        """
    )

    assert answer == "0 8"


def test_a_stuck_call_does_not_keep_the_interpreter_from_exiting(run_script: Callable[[str], str]) -> None:
    answer = run_script(
        """
        import threading
        from flagstone.runtime import pool as pools
        pools.EXIT_GRACE_SECONDS = 0.02
        pool = pools.IoPool(max_workers=1)
        started = threading.Event()
        pool.submit(lambda: (started.set(), threading.Event().wait()))
        pool.submit(print, "this must not run")
        started.wait()
        print("exiting")
        """
    )

    assert answer == "exiting"


def test_a_running_call_may_finish_while_the_interpreter_exits(
    run_script: Callable[[str], str],
) -> None:
    answer = run_script(
        """
        import threading, time
        from flagstone.runtime.pool import IoPool
        started = threading.Event()
        pool = IoPool(max_workers=1)
        pool.submit(lambda: (started.set(), time.sleep(0.03), print("uploaded")))
        started.wait()
        """
    )

    assert answer == "uploaded"


def test_a_cancelled_call_never_starts() -> None:
    pool = IoPool(max_workers=1, name="cancel")
    gate = threading.Event()
    pool.submit(gate.wait, 5)
    waiting = pool.submit(int)

    assert waiting.cancel()
    gate.set()

    with pytest.raises(CancelledError):
        waiting.result(5)
    pool.close()


def test_a_future_accepts_its_result_after_an_interrupt_of_the_waiting_thread() -> None:
    """Raises an exception at every bytecode of the wait; the thread with the result must never hang."""
    with_result = 0
    for at in range(10_000):
        future: Future[int] = Future()
        setter = threading.Thread(target=lambda future=future: future.set_result(7))
        with Tracer(at) as tracer, suppress(Struck):
            future.wait(0.0)
            setter.start()
            assert future.result(5) == 7
        if setter.ident is None:
            setter.start()
        setter.join(5)
        assert not setter.is_alive()
        assert future.result(0) == 7
        with_result += 1
        if not tracer.where:
            break
    assert with_result > 20
