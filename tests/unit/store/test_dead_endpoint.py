"""A store that does not answer: a warning within seconds names the request, and the error begins with the cause."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from itertools import pairwise

import pytest

from flagstone.errors import Unavailable
from flagstone.runtime.clock import VirtualClock
from flagstone.runtime.ids import Ids
from flagstone.store import unanswered
from flagstone.store.memory import MemoryStore
from flagstone.store.port import StoredObject
from flagstone.store.remote import RemoteStore, network_cause
from flagstone.store.retrying import RetryingStore, RetryPolicy
from flagstone.store.unanswered import REQUESTS

OPTIONS: dict[str, str | bool | int | float] = {
    "allow_http": True,
    "region": "x",
    "access_key_id": "id",
    "secret_access_key": "very-secret",
    "timeout": "1s",
}


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A server that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def remote(port: int, **more: str) -> RemoteStore:
    return RemoteStore("s3://bucket", options={**OPTIONS, "endpoint": f"http://127.0.0.1:{port}", **more})


def test_the_error_begins_with_the_cause_and_names_the_server(closed_port: int) -> None:
    store = RetryingStore(remote(closed_port), policy=RetryPolicy(attempts=2, initial_backoff_s=0.01))
    with pytest.raises(Unavailable) as dead:
        store.get("shop/x")
    assert str(dead.value).startswith(
        f"connection refused (127.0.0.1:{closed_port}): get of shop/x in s3://bucket failed after 2 attempts in"
    )
    assert "very-secret" not in str(dead.value)


def test_a_server_that_does_not_answer_is_named_with_its_cause(silent_port: int) -> None:
    with pytest.raises(
        Unavailable, match=rf"^no answer in time \(127\.0\.0\.1:{silent_port}\): get of x failed"
    ):
        remote(silent_port).get("x")


def test_a_request_without_an_answer_is_reported_while_it_waits(
    silent_port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client gives up after its timeout of 30 seconds by default, and only then raises an error."""
    monkeypatch.setattr(REQUESTS, "after_s", 0.2)
    unanswered._warned.clear()
    with caplog.at_level(logging.WARNING, "flagstone.store"), pytest.raises(Unavailable):
        remote(silent_port, timeout="3s").get("shop/x")
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(
        "a request to the store has no answer yet, still waiting request=get path=shop/x"
    )
    assert "store=s3://bucket" in warning
    assert "very-secret" not in warning


def test_an_unknown_host_is_named_with_its_cause() -> None:
    with pytest.raises(Unavailable, match=r"^no such host \(store\.invalid\): get of x failed"):
        remote(1, endpoint="http://store.invalid").get("x")


def test_the_cause_does_not_repeat_a_user_name_of_the_address() -> None:
    text = "HttpError { kind: Connect }\n uri: Some(\n  http://user:secret@host:9/bucket/a,\n"
    assert network_cause(text) == "no connection (host:9)"
    assert network_cause("status code: 503") is None


class Dead(MemoryStore):
    def get(self, path: str) -> StoredObject:
        raise Unavailable(f"get of {path} failed: nothing listens")


def test_a_failing_request_is_reported_within_two_seconds_and_then_every_ten() -> None:
    clock = VirtualClock()
    moments: list[float] = []

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            moments.append(clock.monotonic())

    handler = Noted(logging.WARNING)
    logging.getLogger("flagstone.store").addHandler(handler)
    try:
        with pytest.raises(Unavailable, match=r"^nothing listens: get of a in memory:// failed after"):
            RetryingStore(Dead(), clock=clock, ids=Ids(3)).get("a")
    finally:
        logging.getLogger("flagstone.store").removeHandler(handler)
    assert 0.5 <= moments[0] < 2
    assert all(later - earlier >= 10 for earlier, later in pairwise(moments))
    assert 5 <= len(moments) <= 6


def test_the_warning_names_cause_request_and_store(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    store = RetryingStore(Dead(), policy=RetryPolicy(deadline_s=2), clock=clock, ids=Ids(3))
    for _ in range(5):
        with pytest.raises(Unavailable):
            store.get("shop/a")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "error=nothing listens request=get path=shop/a store=memory://" in record.getMessage()


def test_one_failure_that_passes_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    class Flaky(MemoryStore):
        failures = 2

        def get(self, path: str) -> StoredObject:
            self.failures -= 1
            if self.failures >= 0:
                raise Unavailable("503")
            return super().get(path)

    inner = Flaky()
    inner.put("a", b"1")
    assert RetryingStore(inner, clock=VirtualClock()).get("a").data == b"1"
    assert not caplog.records
