"""Requests to the server of `flagstone inspect`: of an ordinary client, byte by byte, and of a script of its page."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from http.client import HTTPConnection
from typing import NamedTuple
from urllib.parse import urlsplit

from kit.browser import Browser


class Answer(NamedTuple):
    """One answer; a script sees no headers."""

    status: int
    text: str
    headers: Mapping[str, str]


def answer_of(address: str, path: str, *, method: str = "GET", **headers: str) -> Answer:
    """The answer to one request for a path of that server."""
    connection = HTTPConnection("127.0.0.1", port_of(address), timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = Answer(answer.status, answer.read().decode(), answer.headers)
    connection.close()
    return found


def raw_answer(address: str, request: bytes) -> bytes:
    """Everything that the server sends after these bytes."""
    with socket.create_connection(("127.0.0.1", port_of(address)), timeout=10) as connection:
        connection.sendall(request)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    return answer


def answer_in_page(browser: Browser, path: str, **options: str) -> Answer:
    """The answer that a script of the page gets which the browser shows; the path is relative to the page."""
    found = browser.run(
        f"fetch(location.href + {json.dumps(path)}, {json.dumps(options)})"
        ".then(async (answer) => ({status: answer.status, text: await answer.text()}))"
    )
    return Answer(found["status"], found["text"], {})


def port_of(address: str) -> int:
    return urlsplit(address).port or 0
