"""Serves the page of `flagstone inspect` to browsers on this machine only."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Final

from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.runtime.sync import Event

LOOPBACK: Final = "127.0.0.1"
_CHECK_STOP_S: Final = 0.2
_CLIENT_TIMEOUT_S: Final = 10


def serve(render: Callable[[], str], *, port: int, stop: Event, ready: Callable[[str], None]) -> None:
    """Answer every request for `/` with a new page until `stop` is set. Calls `ready` with the address first.

    Raises:
        InvalidRequest: the port is in use.

    """
    try:
        server = HTTPServer((LOOPBACK, port), _handler(render))
    except OSError as error:
        raise InvalidRequest(
            f"cannot listen on port {port} of {LOOPBACK}: {error}; choose another port"
        ) from error
    with server:
        server.timeout = _CHECK_STOP_S
        ready(f"http://{LOOPBACK}:{server.server_port}/")
        while not stop.is_set():
            server.handle_request()


def _handler(render: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Page(BaseHTTPRequestHandler):
        timeout = (
            _CLIENT_TIMEOUT_S  # the server handles one request at a time, so a slow client must not block it
        )

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in (LOOPBACK, "localhost"):
                # Another host name means DNS rebinding: another site tries to read the page through the browser.
                self.send_error(403, "use the address that flagstone printed")
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
            """Log nothing, because the page reloads every few seconds."""

    return Page
