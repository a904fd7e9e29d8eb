"""The server of `flagstone inspect`: who is answered, with which headers, and what a browser may do with the answer."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

import flagstone
from flagstone import Settings
from flagstone.errors import InvalidRequest
from flagstone.inspector.server import MAX_CONNECTIONS, ask, refusal, serve
from flagstone.runtime.sync import Event
from kit.answers import answer_of, port_of, raw_answer
from kit.inspected import Place, inspected, place, served

TOKEN = "0123456789abcdef0123456789abcdef"
QUIET = Settings(compactor_options=None, garbage_collector_options=None)


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Place:
    tmp_path = tmp_path_factory.mktemp("inspected")
    with flagstone.open(tmp_path / "db", settings=QUIET) as db:
        db.put(b"<script>alert(1)</script>", b"<img src=x onerror=alert(1)>")
        db.flush()
    return place(tmp_path / "db")


@pytest.fixture(scope="module")
def address(where: Place) -> Iterator[str]:
    with inspected(where) as inspection, served(inspection) as found:
        yield found


def test_the_page_and_its_files_come_from_the_address(address: str) -> None:
    path = urlsplit(address).path
    for name, kind in [
        ("", "text/html"),
        ("page.css", "text/css"),
        ("page.js", "text/javascript"),
        ("picture.js", "text/javascript"),
        ("icon.svg", "image/svg+xml"),
        ("api/state", "application/json"),
        ("api/rows?prefix=%3C", "application/json"),
    ]:
        answer = answer_of(address, path + name)
        assert answer.status == 200
        assert answer.headers["Content-Type"] == f"{kind}; charset=utf-8"
    assert answer_of(address, path + "api/state", Host=f"localhost:{urlsplit(address).port}").status == 200


@pytest.mark.parametrize("name", ["", "page.js", "api/state", "api/none", "none", "api/rows?limit=x"])
def test_every_answer_forbids_scripts_of_others_frames_caches_and_guessed_types(
    address: str, name: str
) -> None:
    headers = answer_of(address, urlsplit(address).path + name).headers
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy
    assert "*" not in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers


WRONG_HOSTS = [
    "evil.example",
    "evil.example:{port}",
    "127.0.0.1",
    "127.0.0.1:1",
    "localhost",
    "127.0.0.1.evil.example:{port}",
    "localhost.evil.example:{port}",
    "0.0.0.0:{port}",
    "[::1]:{port}",
    "127.0.0.1:{port}@evil.example",
    "",
]


@pytest.mark.parametrize("host", WRONG_HOSTS)
def test_a_request_for_another_host_is_refused(address: str, where: Place, host: str) -> None:
    before = where.requests
    parts = urlsplit(address)
    for name in ("", "api/state", "events"):
        answer = answer_of(address, parts.path + name, Host=host.format(port=parts.port))
        assert answer.status == 403
    assert where.requests == before


def wrong_paths(token: str) -> list[str]:
    return [
        "/",
        "//",
        "/api/state",
        "/page.js",
        f"/{token}",
        f"/{token[:-1]}/",
        f"/{token}0/",
        f"/{token.upper()}x/",
        f"/x{token}/",
        f"/?token={token}",
        f"/%2F{token}/",
        f"/../{token}/api/state",
        f"/\xe9{token}/",
        f"/{'0' * len(token)}/api/rows",
        f"http://127.0.0.1/{token}/",
    ]


@pytest.mark.parametrize("number", range(15))
def test_a_request_without_the_token_is_refused(address: str, where: Place, number: int) -> None:
    token = urlsplit(address).path.strip("/")
    path = wrong_paths(token)[number]
    before = where.requests
    answer = raw_answer(
        address, f"GET {path} HTTP/1.0\r\nHost: {urlsplit(address).netloc}\r\n\r\n".encode("latin-1")
    )
    assert b" 403 " in answer.partition(b"\r\n")[0]
    assert token.encode() not in answer
    assert where.requests == before


def test_the_token_of_one_server_does_not_open_another(where: Place) -> None:
    with inspected(where) as inspection, served(inspection) as one, served(inspection) as other:
        assert urlsplit(one).path != urlsplit(other).path
        assert len(urlsplit(one).path) == 34
        assert answer_of(other, urlsplit(one).path).status == 403


def test_two_host_headers_are_refused() -> None:
    assert refusal(["127.0.0.1:80", "evil.example"], f"/{TOKEN}/", TOKEN, 80) is not None
    assert refusal([], f"/{TOKEN}/", TOKEN, 80) is not None
    assert refusal(["127.0.0.1:80"], f"/{TOKEN}/", TOKEN, 80) is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "<script>"])
def test_other_methods_than_get_are_refused_without_an_echo(address: str, method: str) -> None:
    answer = answer_of(address, urlsplit(address).path, method=method)
    assert answer.status in (400, 501)
    assert "script" not in answer.text
    assert answer.headers["Content-Type"].startswith("application/json")


@pytest.mark.parametrize(
    "name",
    [
        "../server.py",
        "assets/page.js",
        "page.html",
        "..%2fserver.py",
        "api/",
        "api/__class__",
        "api/state/",
        "%00",
    ],
)
def test_only_the_named_files_and_documents_exist(address: str, name: str) -> None:
    assert answer_of(address, urlsplit(address).path + name).status == 404


def test_bad_queries_are_answered_as_documents(where: Place) -> None:
    with inspected(where) as inspection:
        for query in ("manifest=x", "manifest=%ff", "&".join(f"a{at}=1" for at in range(50))):
            status, document = ask(inspection, "state", query)
            assert status == 400
            assert document["error"]


def test_a_key_that_is_too_long_for_an_address_is_refused_with_advice(address: str) -> None:
    for length in (65_100, 131_070):
        answer = answer_of(address, urlsplit(address).path + "api/key?id=" + "0" * length)
        assert answer.status == 414
        assert "flagstone get" in json.loads(answer.text)["error"]


def test_a_broken_request_line_is_refused(address: str) -> None:
    for line in (b"<script>alert(1)</script>", b"<script>alert(1)</script> x y z", b"GET / HTTP/<script>"):
        answer = raw_answer(address, line + b"\r\n\r\n")
        assert b"<script" not in answer
        assert answer.endswith(b'{"error": "the inspector answers GET requests only"}')


def test_events_are_pushed_until_the_page_goes_away(address: str, where: Place) -> None:
    connection = HTTPConnection("127.0.0.1", port_of(address), timeout=10)
    connection.request("GET", urlsplit(address).path + "events")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    for _ in range(2):
        assert answer.readline() == b"event: live\n"
        document = json.loads(answer.readline().removeprefix(b"data: "))
        assert document["manifest"] > 0
        assert answer.readline() == b"\n"
    assert set(where.store.totals()["requests"]) <= {"get", "get_range", "head", "list"}
    answer.close()
    connection.close()


def test_more_connections_than_allowed_are_closed_and_later_ones_are_answered(address: str) -> None:
    port = port_of(address)
    held = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(MAX_CONNECTIONS)]
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as refused:
            assert refused.recv(1) == b""
    finally:
        for each in held:
            each.close()
    for _ in range(1000):
        try:
            assert answer_of(address, urlsplit(address).path).status == 200
        except OSError:
            continue  # the server has not noticed yet that the others are gone
        break
    else:
        raise AssertionError("the server did not answer again")


def test_a_port_in_use_is_refused_with_advice(address: str, where: Place) -> None:
    with inspected(where) as inspection, pytest.raises(InvalidRequest, match="choose another"):
        serve(inspection, port=port_of(address), refresh_s=1, stop=Event(), ready=lambda _: None)
