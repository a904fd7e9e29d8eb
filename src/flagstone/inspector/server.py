"""Serves the page to browsers of this machine, and to nobody else."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Final

from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.runtime.sync import Event

LOOPBACK: Final = "127.0.0.1"
_LOOK_S: Final = 0.2
_CLIENT_TIMEOUT_S: Final = 10


def serve(render: Callable[[], str], *, port: int, stop: Event, ready: Callable[[str], None]) -> None:
    """Answer every request for `/` with a page made for it, until `stop` is set. `ready` hears the address.

    Raises:
        InvalidRequest: the port is taken.

    """
    try:
        server = HTTPServer((LOOPBACK, port), _handler(render))
    except OSError as error:
        raise InvalidRequest(
            f"cannot listen on port {port} of {LOOPBACK}: {error}; choose another one"
        ) from error
    with server:
        server.timeout = _LOOK_S
        ready(f"http://{LOOPBACK}:{server.server_port}/")
        while not stop.is_set():
            server.handle_request()


def _handler(render: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Page(BaseHTTPRequestHandler):
        timeout = _CLIENT_TIMEOUT_S  # one request at a time: nobody may keep the others waiting

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in (LOOPBACK, "localhost"):
                # A name that leads here is another site's attempt to read the page through somebody's browser.
                self.send_error(403, "ask for it by its address")
            elif self.path != "/":
                self.send_error(404)
            else:
                try:
                    self._answer(200, "text/html", render())
                except FlagstoneError as error:
                    self._answer(503, "text/plain", f"{error}\n")

        def _answer(self, status: int, kind: str, text: str) -> None:
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Say nothing: the page asks for itself every few seconds."""

    return Page
