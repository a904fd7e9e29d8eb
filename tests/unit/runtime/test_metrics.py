from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from flagstone.errors import InvalidRequest
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.metrics import Distribution, Metric, Metrics


@pytest.fixture
def eager_thread_switches() -> Iterator[None]:
    """Lets threads interrupt each other as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_counter_counts() -> None:
    counter = Metrics().counter("reads")
    counter.add()
    counter.add(41)

    assert counter.value == 42


def test_a_gauge_can_be_set_and_changed_by_an_amount() -> None:
    gauge = Metrics().gauge("bytes")
    gauge.set(10)
    gauge.add(-2.5)

    assert gauge.value == 7.5


@pytest.mark.usefixtures("eager_thread_switches")
def test_concurrent_counts_are_all_counted() -> None:
    metrics = Metrics()
    counter, gauge, histogram = metrics.counter("c"), metrics.gauge("g"), metrics.histogram("h")

    def count() -> None:
        for _ in range(3_000):
            counter.add()
            gauge.add(2)
            histogram.record(1.0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (counter.value, gauge.value, histogram.value.count) == (12_000, 24_000, 12_000)


def test_the_same_name_and_labels_are_the_same_instrument() -> None:
    metrics = Metrics()

    assert metrics.counter("requests", op="get", api="head") is metrics.counter(
        "requests", api="head", op="get"
    )
    assert metrics.counter("requests", op="get") is not metrics.counter("requests", op="put")
    assert metrics.counter("requests", level=1) is metrics.counter("requests", level="1")


def test_a_label_may_have_the_name_name() -> None:
    assert Metrics().counter("requests", name="x").value == 0


def test_one_name_for_two_kinds_raises_invalid_request() -> None:
    metrics = Metrics()
    metrics.counter("requests")

    with pytest.raises(InvalidRequest, match="already a counter; it cannot also be a gauge"):
        metrics.gauge("requests")


def test_a_histogram_counts_observations_in_buckets() -> None:
    histogram = Metrics().histogram("seconds")
    for seconds in (0.001, 0.002, 20.0):
        histogram.record(seconds)

    seen = histogram.value
    assert (seen.count, seen.minimum, seen.maximum) == (3, 0.001, 20.0)
    assert seen.sum == pytest.approx(20.003)
    assert dict(zip(seen.boundaries, seen.bucket_counts, strict=False))[0.001] == 1
    assert seen.bucket_counts[-1] == 1
    assert len(seen.bucket_counts) == len(seen.boundaries) + 1


def test_an_empty_histogram_has_neither_minimum_nor_maximum() -> None:
    assert Metrics().histogram("seconds").value == Distribution(
        0, 0.0, None, None, Metrics().histogram("x").value.boundaries, (0,) * 14
    )


def test_a_timer_records_elapsed_time_also_if_the_block_raises() -> None:
    clock = VirtualClock()
    histogram = Metrics(clock=clock).histogram("seconds")

    def slow_failure() -> None:
        clock.advance(500)
        raise KeyError

    with histogram.timer():
        clock.advance(250)
    with pytest.raises(KeyError), histogram.timer():
        slow_failure()

    assert histogram.value.sum == pytest.approx(0.75)
    assert histogram.value.count == 2


def test_a_snapshot_is_sorted_by_name_and_labels() -> None:
    metrics = Metrics()
    metrics.gauge("b").set(1.5)
    metrics.counter("a", op="put").add(2)
    metrics.counter("a", op="get").add(1)

    assert metrics.snapshot() == [
        Metric("a", "counter", (("op", "get"),), 1),
        Metric("a", "counter", (("op", "put"),), 2),
        Metric("b", "gauge", (), 1.5),
    ]


def test_as_dict_has_keys_of_name_and_labels() -> None:
    metrics = Metrics()
    metrics.counter("requests", op="get", api="head").add(3)
    metrics.gauge("bytes").set(7)

    assert metrics.as_dict() == {"bytes": 7, "requests{api=head,op=get}": 3}


def test_a_pickled_registry_is_empty() -> None:
    metrics = Metrics()
    metrics.counter("requests").add()

    assert pickle.loads(pickle.dumps(metrics)).snapshot() == []


def test_a_child_forked_while_a_count_was_in_progress_does_not_hang(run_script: Callable[[str], str]) -> None:
    answer = run_script(
        """
        import os
        from flagstone.runtime.metrics import Metrics
        metrics = Metrics()
        counter = metrics.counter("requests")
        counter._lock.acquire(); metrics._lock.acquire()
        child = os.fork()
        if child == 0:
            counter.add(); metrics.snapshot()
            os._exit(counter.value)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )

    assert answer == "1"
