"""Requests and replies get lost between client and server; a repeated request must not lose to its own first try."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from flagstone.errors import Unavailable
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.port import ObjectChanged, ObjectExists, ObjectStore
from flagstone.store.resolve import resolve
from flagstone.store.retrying import RetryPolicy
from kit.faults import STRIDE
from servers.fault_proxy import Fault, FaultProxy
from servers.s3 import S3Server

pytestmark = pytest.mark.slow

ROUNDS = 32 // STRIDE
# Impatient, so that a silent server is given up quickly.
POLICY = RetryPolicy(deadline_s=20, initial_backoff_s=0.01, max_backoff_s=0.1)
TIMEOUT_S = 0.5

WRITE_FAULTS = [
    Fault.APPLIED_THEN_RESET,
    Fault.APPLIED_THEN_REFUSED,
    Fault.APPLIED_THEN_SILENCE,
    Fault.RESET,
    Fault.REFUSED,
    Fault.SILENCE,
]


@pytest.fixture
def proxy(ministack: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(ministack.port) as proxy:
        yield proxy


@pytest.fixture
def store(ministack: S3Server, proxy: FaultProxy) -> ObjectStore:
    """The store behind the faulty proxy."""
    return resolve(ministack.url, retry=POLICY, timeout=TIMEOUT_S, **ministack.options(port=proxy.port))


@pytest.fixture
def direct(ministack: S3Server) -> ObjectStore:
    """The same store without the proxy."""
    return resolve(ministack.url, **ministack.options())


@pytest.fixture
def paths() -> list[str]:
    folder = f"lost-replies/{SYSTEM_IDS.token()}"
    return [f"{folder}/{number:03}" for number in range(ROUNDS)]


def _strike_writes(proxy: FaultProxy, fault: Fault, paths: list[str]) -> None:
    for path in paths:
        proxy.inject(fault, method="PUT", where=lambda request, path=path: path in request.target)


def _for_each(paths: list[str], step: Callable[[str], None]) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(step, paths))


@pytest.mark.parametrize("fault", WRITE_FAULTS, ids=lambda fault: fault.name.lower())
def test_a_create_whose_reply_is_lost_succeeds(
    proxy: FaultProxy, store: ObjectStore, direct: ObjectStore, paths: list[str], fault: Fault
) -> None:
    _strike_writes(proxy, fault, paths)

    def create(path: str) -> None:
        version = store.put_if_absent(path, path.encode())
        assert direct.head(path).version == version
        assert direct.get(path).data == path.encode()

    _for_each(paths, create)
    assert [struck for struck, _ in proxy.struck] == [fault] * ROUNDS


@pytest.mark.parametrize("fault", WRITE_FAULTS, ids=lambda fault: fault.name.lower())
def test_an_update_whose_reply_is_lost_succeeds(
    proxy: FaultProxy, store: ObjectStore, direct: ObjectStore, paths: list[str], fault: Fault
) -> None:
    _strike_writes(proxy, fault, paths)

    def update(path: str) -> None:
        version = store.put_if_match(path, b"new", direct.put_if_absent(path, b"old"))
        assert direct.head(path).version == version
        assert direct.get(path).data == b"new"

    _for_each(paths, update)
    assert [struck for struck, _ in proxy.struck] == [fault] * ROUNDS


@pytest.mark.parametrize("fault", WRITE_FAULTS, ids=lambda fault: fault.name.lower())
def test_a_refused_create_raises_object_exists_through_any_network_fault(
    proxy: FaultProxy, store: ObjectStore, direct: ObjectStore, paths: list[str], fault: Fault
) -> None:
    _strike_writes(proxy, fault, paths)

    def lose(path: str) -> None:
        direct.put_if_absent(path, b"same bytes")
        with pytest.raises(ObjectExists):
            store.put_if_absent(path, b"same bytes")

    _for_each(paths, lose)
    assert [struck for struck, _ in proxy.struck] == [fault] * ROUNDS


@pytest.mark.parametrize("fault", WRITE_FAULTS, ids=lambda fault: fault.name.lower())
def test_a_refused_update_never_succeeds_through_any_network_fault(
    proxy: FaultProxy, store: ObjectStore, direct: ObjectStore, paths: list[str], fault: Fault
) -> None:
    _strike_writes(proxy, fault, paths)

    def lose(path: str) -> None:
        stale = direct.put_if_absent(path, b"old")
        direct.put_if_match(path, b"newer", stale)
        # After a lost reply the client cannot know whether the first try was applied and then replaced.
        with pytest.raises((ObjectChanged, Unavailable)):
            store.put_if_match(path, b"mine", stale)
        with pytest.raises(ObjectChanged):
            store.put_if_match(path, b"mine", stale)
        assert direct.get(path).data == b"newer"

    _for_each(paths, lose)
    assert [struck for struck, _ in proxy.struck] == [fault] * ROUNDS


@pytest.mark.parametrize("fault", [Fault.TRUNCATED, Fault.RESET, Fault.REFUSED, Fault.SILENCE])
def test_a_read_is_repeated_until_it_is_complete(
    proxy: FaultProxy, store: ObjectStore, direct: ObjectStore, paths: list[str], fault: Fault
) -> None:
    data = bytes(range(256)) * 400
    direct.put(paths[0], data)
    for read in (
        lambda: store.get(paths[0]).data,
        lambda: store.get_range(paths[0], 0, len(data)),
        lambda: store.get_ranges(paths[0], [(0, len(data))])[0],
        lambda: store.get_tail(paths[0], len(data)).data,
    ):
        proxy.inject(fault, method="GET", times=2)
        assert read() == data
        proxy.forget()
    assert len(proxy.struck) >= 4
