from __future__ import annotations

from collections.abc import Callable

import pytest

from flagstone.errors import InvalidRequest
from flagstone.runtime.metrics import Metrics
from flagstone.store.counting import CountingStore
from flagstone.store.memory import MemoryStore
from flagstone.store.port import ObjectChanged, ObjectExists, ObjectMissing


def test_requests_and_bytes_are_counted_by_verb() -> None:
    store = CountingStore(MemoryStore(), component="db")
    version = store.put("a/x", b"12345")
    store.put_if_absent("a/y", b"123")
    store.put_if_match("a/x", b"123456", version)
    store.get("a/x")
    store.get_range("a/x", 1, 3)
    store.get_ranges("a/x", [(0, 1), (2, 4)])
    store.get_tail("a/x", 2)
    store.get_if_changed("a/x", store.head("a/x").version)
    list(store.list("a"))
    store.copy("a/x", "a/z")
    store.delete("a/x")
    store.delete_many(["a/y", "a/z"])

    totals = store.totals()

    assert set(totals["requests"].values()) == {1}
    assert len(totals["requests"]) == 13
    assert totals["errors"] == {}
    assert totals["bytes_written"] == 5 + 3 + 6
    assert totals["bytes_read"] == 6 + 2 + 3 + 2


def test_invalid_requests_are_counted_as_errors_and_refusals_are_not() -> None:
    store = CountingStore(MemoryStore(), component="db")
    store.put("x", b"")
    version = store.put("x", b"")
    store.put("x", b"")
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (ObjectMissing, lambda: store.get("none")),
        (ObjectExists, lambda: store.put_if_absent("x", b"")),
        (ObjectChanged, lambda: store.put_if_match("x", b"", version)),
        (InvalidRequest, lambda: store.get_range("x", 5, 1)),
    ]
    for error, call in calls:
        with pytest.raises(error):
            call()

    assert store.totals()["errors"] == {"get_range": 1}


def test_metrics_have_slatedbs_names() -> None:
    metrics = Metrics()
    store = CountingStore(MemoryStore(), component="wal", store_type="wal", metrics=metrics)
    store.put("x", b"123")
    store.get("x")

    found = metrics.as_dict()

    labels = "{api=put,component=wal,op=put,store_type=wal}"
    assert found[f"slatedb.object_store.request_count{labels}"] == 1
    assert found[f"slatedb.object_store.error_count{labels}"] == 0
    assert found[f"slatedb.object_store.request_duration_seconds{labels}"].count == 1  # type: ignore[union-attr]
    assert found["flagstone.object_store.bytes{component=wal,direction=write,op=put}"] == 3
    assert found["flagstone.object_store.bytes{component=wal,direction=read,op=get}"] == 3


def test_reset_clears_the_totals_and_keeps_the_metrics() -> None:
    metrics = Metrics()
    store = CountingStore(MemoryStore(), component="db", metrics=metrics)
    store.put("x", b"123")

    store.reset()

    assert store.totals() == {"requests": {}, "errors": {}, "bytes_read": 0, "bytes_written": 0}
    assert metrics.as_dict()["flagstone.object_store.bytes{component=db,direction=write,op=put}"] == 3
