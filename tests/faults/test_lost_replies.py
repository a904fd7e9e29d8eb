"""Requests and replies get lost between client and server; a repeated request must not lose to its own first try."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import pytest

from flagstone.errors import Unavailable
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.port import ObjectChanged, ObjectExists, ObjectStore
from flagstone.store.resolve import resolve
from flagstone.store.retrying import RetryPolicy
from flagstone.store.writing import ObjectWriter
from kit.faults import STRIDE
from servers.fault_proxy import Fault, FaultProxy, Request
from servers.s3 import S3Server

pytestmark = pytest.mark.slow

ROUNDS = 32 // STRIDE
# Impatient, so that a silent server is given up quickly.
POLICY = RetryPolicy(deadline_s=20, initial_backoff_s=0.01, max_backoff_s=0.1)
TIMEOUT_S = 0.5
ForEach = Callable[[Callable[[str], None]], None]

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
def patient(ministack: S3Server, proxy: FaultProxy) -> ObjectStore:
    """The same, with the time that a part of 8 MiB takes on a busy machine."""
    return resolve(ministack.url, retry=POLICY, timeout=4.0, **ministack.options(port=proxy.port))


@pytest.fixture
def direct(ministack: S3Server) -> ObjectStore:
    """The same store without the proxy."""
    return resolve(ministack.url, **ministack.options())


@pytest.fixture
def paths() -> list[str]:
    folder = f"lost-replies/{SYSTEM_IDS.token()}"
    return [f"{folder}/{number:03}" for number in range(ROUNDS)]


@pytest.fixture(params=WRITE_FAULTS, ids=lambda fault: fault.name.lower())
def for_each(request: pytest.FixtureRequest, proxy: FaultProxy, paths: list[str]) -> ForEach:
    """Does a step for every path, while one write to each path meets the fault."""

    def run(step: Callable[[str], None]) -> None:
        for path in paths:
            proxy.inject(request.param, method="PUT", where=lambda request, path=path: path in request.target)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(step, paths))
        assert [struck for struck, _ in proxy.struck] == [request.param] * ROUNDS

    return run


def test_a_create_whose_reply_is_lost_succeeds(
    store: ObjectStore, direct: ObjectStore, for_each: ForEach
) -> None:
    def create(path: str) -> None:
        version = store.put_if_absent(path, path.encode())
        assert direct.head(path).version == version
        assert direct.get(path).data == path.encode()

    for_each(create)


def test_an_update_whose_reply_is_lost_succeeds(
    store: ObjectStore, direct: ObjectStore, for_each: ForEach
) -> None:
    def update(path: str) -> None:
        version = store.put_if_match(path, b"new", direct.put_if_absent(path, b"old"))
        assert direct.head(path).version == version
        assert direct.get(path).data == b"new"

    for_each(update)


def test_a_refused_create_raises_object_exists_through_any_network_fault(
    store: ObjectStore, direct: ObjectStore, for_each: ForEach
) -> None:
    def lose(path: str) -> None:
        direct.put_if_absent(path, b"same bytes")
        with pytest.raises(ObjectExists):
            store.put_if_absent(path, b"same bytes")

    for_each(lose)


def test_a_refused_update_never_succeeds_through_any_network_fault(
    store: ObjectStore, direct: ObjectStore, for_each: ForEach
) -> None:
    def lose(path: str) -> None:
        stale = direct.put_if_absent(path, b"old")
        direct.put_if_match(path, b"newer", stale)
        # After a lost reply the client cannot know whether the first try was applied and then replaced.
        with pytest.raises((ObjectChanged, Unavailable)):
            store.put_if_match(path, b"mine", stale)
        with pytest.raises(ObjectChanged):
            store.put_if_match(path, b"mine", stale)
        assert direct.get(path).data == b"newer"

    for_each(lose)


def is_part(request: Request) -> bool:
    return "partNumber=2" in request.target


def is_commit(request: Request) -> bool:
    return "uploadId=" in request.target


@pytest.mark.parametrize(("method", "where"), [("PUT", is_part), ("POST", is_commit)], ids=["part", "commit"])
@pytest.mark.parametrize("fault", WRITE_FAULTS, ids=lambda fault: fault.name.lower())
def test_an_upload_survives_a_fault_at_a_part_and_at_its_commit(
    proxy: FaultProxy,
    patient: ObjectStore,
    direct: ObjectStore,
    paths: list[str],
    fault: Fault,
    method: str,
    where: Callable[[Request], bool],
) -> None:
    writer = ObjectWriter(patient, paths[0])
    proxy.inject(fault, method=method, where=where)
    data = bytes(range(256)) * (80 * 1024)
    writer.write(data)
    writer.commit()

    assert [struck for struck, _ in proxy.struck] == [fault]
    assert direct.get(paths[0]).data == data


def test_an_upload_that_was_given_up_is_aborted_on_the_service(
    ministack: S3Server, patient: ObjectStore, paths: list[str]
) -> None:
    writer = ObjectWriter(patient, paths[0])
    writer.write(bytes(20 << 20))
    assert unfinished_uploads(ministack, paths[0]) == 1

    writer.abort()

    assert unfinished_uploads(ministack, paths[0]) == 0
    assert list(patient.list(paths[0].rpartition("/")[0])) == []


def unfinished_uploads(server: S3Server, path: str) -> int:
    with urlopen(f"http://127.0.0.1:{server.port}/{server.bucket}?uploads") as answer:
        return int(answer.read().decode().count(f"<Key>{path}</Key>"))


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
