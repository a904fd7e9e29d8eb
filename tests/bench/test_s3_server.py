"""The server that both engines meet in `bench.remote` keeps the store contract."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from bench.latency_store import Profile, Wait
from bench.prices import S3_STANDARD
from bench.s3_server import Bucket, Request, Server

from flagstone.store.port import ObjectStore
from flagstone.store.remote import RemoteStore
from flagstone.testing.store_contract import StoreContract

_NEAR = Wait(1e-6, 2e-6)
NEAR = Profile("near", _NEAR, _NEAR, _NEAR, _NEAR, _NEAR, bytes_per_second=1e12, prices=S3_STANDARD)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(Server(NEAR).listen())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield listening.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    listening.close()
    for task in asyncio.all_tasks(loop):
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()


@pytest.mark.slow
class TestS3ServerContract(StoreContract):
    @pytest.fixture
    def store(self, port: int) -> ObjectStore:
        return RemoteStore(
            "s3://bench",
            options={
                "endpoint": f"http://127.0.0.1:{port}",
                "region": "us-east-1",
                "access_key_id": "bench",
                "secret_access_key": "bench",
                "virtual_hosted_style_request": False,
                "allow_http": True,
            },
            pickle_secrets=True,
        )


def asked(method: str, key: str = "", *, body: bytes = b"", query: str = "", **headers: str) -> Request:
    pairs = [part.partition("=") for part in query.split("&") if part]
    return Request(
        method, key, {name: text for name, _, text in pairs},
        {name.replace("_", "-"): text for name, text in headers.items()}, body,
    )  # fmt: skip


def test_a_multipart_upload_appears_when_completed_in_the_order_of_its_part_numbers() -> None:
    bucket = Bucket()
    started = bucket.answer(asked("POST", "big", query="uploads")).body.decode()
    upload = started.partition("<UploadId>")[2].partition("<")[0]

    bucket.answer(asked("PUT", "big", body=b"second", query=f"uploadId={upload}&partNumber=2"))
    bucket.answer(asked("PUT", "big", body=b"first-", query=f"uploadId={upload}&partNumber=1"))
    assert bucket.answer(asked("GET", "big")).status == 404
    assert bucket.answer(asked("POST", "big", query=f"uploadId={upload}")).status == 200

    assert bucket.answer(asked("GET", "big")).body == b"first-second"


def test_a_copy_has_the_same_bytes_and_a_missing_source_is_an_error() -> None:
    bucket = Bucket()
    bucket.answer(asked("PUT", "a", body=b"bytes"))

    assert bucket.answer(asked("PUT", "b", x_amz_copy_source="/bench/a")).status == 200
    assert bucket.answer(asked("PUT", "c", x_amz_copy_source="/bench/none")).status == 404

    assert bucket.answer(asked("GET", "b")).body == b"bytes"


@pytest.mark.parametrize(
    ("method", "query", "kind"),
    [
        ("GET", "", "get"), ("GET", "list-type=2", "list"), ("HEAD", "", "head"), ("PUT", "", "put"),
        ("POST", "uploads", "put"), ("POST", "delete", "delete"), ("DELETE", "", "delete"),
    ],
)  # fmt: skip
def test_requests_are_classified_as_they_are_billed(method: str, query: str, kind: str) -> None:
    assert asked(method, "key", query=query).kind == kind
