"""Serves the page of `flagstone inspect` to browsers on this machine only.

The address holds a random token, without which every request is refused, so that other users of the machine cannot
read the database. A request for another host name is refused, so that another site cannot read it by DNS rebinding.
The page may load nothing but its own files: whatever keys and values contain, a browser runs no script of theirs.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qsl

from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.inspector.inspection import Inspection
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.sync import Event, Lock, start_thread

LOOPBACK: Final = "127.0.0.1"
MAX_CONNECTIONS: Final = 32
"""Of all pages together. Each has a thread; a page has one for its events and up to five for its requests."""

_CHECK_STOP_S: Final = 0.2
_CLIENT_TIMEOUT_S: Final = 10
_MAX_QUERY: Final = 65_000
"""About the longest line that the standard library's server reads: keys of up to 32,000 bytes can be asked for."""

_URI_TOO_LONG: Final = 414
_TOO_LONG: Final = "the page shows only keys of up to 32,000 bytes; use flagstone get or scan for longer ones"
_ASSETS: Final = {
    "": ("page.html", "text/html"),
    "page.css": ("page.css", "text/css"),
    "page.js": ("page.js", "text/javascript"),
    "picture.js": ("picture.js", "text/javascript"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def serve(
    inspection: Inspection,
    *,
    port: int,
    refresh_s: float,
    stop: Event,
    ready: Callable[[str], None],
    ids: Ids = SYSTEM_IDS,
) -> None:
    """Answer requests until `stop` is set. Calls `ready` with the address first.

    Raises:
        InvalidRequest: the port is in use.

    """
    token = ids.uuid().hex
    try:
        server = _Server((LOOPBACK, port), _handler(inspection, token, refresh_s, stop))
    except OSError as error:
        raise InvalidRequest(
            f"cannot listen on port {port} of {LOOPBACK}: {error}; choose another port"
        ) from error
    with server:
        server.timeout = _CHECK_STOP_S
        ready(f"http://{LOOPBACK}:{server.server_port}/{token}/")
        while not stop.is_set():
            server.handle_request()


class _Server(HTTPServer):
    """One thread for each connection, and no more than `MAX_CONNECTIONS`: further ones are closed."""

    request_queue_size = MAX_CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = MAX_CONNECTIONS
        self._count = Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._count:
            if self._free == 0:
                self.shutdown_request(request)
                return
            self._free -= 1
        try:
            start_thread(lambda: self._process(request, client_address), name="flagstone-inspector")
        except RuntimeError:
            self._release(request)
            raise

    def _process(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:
            pass  # the browser closed the connection
        finally:
            self._release(request)

    def _release(self, request: Any) -> None:
        self.shutdown_request(request)
        with self._count:
            self._free += 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a connection that fails concerns only its browser."""


def _handler(
    inspection: Inspection, token: str, refresh_s: float, stop: Event
) -> type[BaseHTTPRequestHandler]:
    class Page(BaseHTTPRequestHandler):
        timeout = _CLIENT_TIMEOUT_S
        server_version = "flagstone"
        sys_version = ""

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            refused = refusal(self.headers.get_all("Host") or [], path, token, self.server.server_port)  # type: ignore[attr-defined]
            if refused is not None:
                self._answer(403, "text/plain", refused.encode())
                return
            name = path[len(token) + 2 :]
            if name in _ASSETS:
                file, kind = _ASSETS[name]
                self._answer(200, kind, files("flagstone.inspector").joinpath("assets", file).read_bytes())
            elif name == "events":
                self._stream()
            elif name.startswith("api/"):
                self._answer_api(name.removeprefix("api/"), query)
            else:
                self._answer(404, "text/plain", b"there is no such page\n")

        def _answer_api(self, name: str, query: str) -> None:
            status, document = ask(inspection, name, query)
            self._answer(status, "application/json", json.dumps(document).encode())

        def _stream(self) -> None:
            """Events until the browser goes away. Nothing is asked of the store while no page is open."""
            self._begin(200, "text/event-stream")
            while not stop.is_set():
                try:
                    event, document = "live", inspection.live()
                except FlagstoneError as error:
                    event, document = "problem", {"error": str(error)}
                self.wfile.write(f"event: {event}\ndata: {json.dumps(document)}\n\n".encode())
                self.wfile.flush()
                stop.wait(refresh_s)

        def _answer(self, status: int, kind: str, data: bytes) -> None:
            self._begin(status, kind, length=len(data))
            self.wfile.write(data)

        def _begin(self, status: int, kind: str, *, length: int | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            if length is not None:
                self.send_header("Content-Length", str(length))
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.end_headers()

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
            """Answer a malformed request without repeating any of it."""
            self.close_connection = True
            reason = _TOO_LONG if code == _URI_TOO_LONG else "the inspector answers GET requests only"
            self._answer(code, "application/json", json.dumps({"error": reason}).encode())

        def log_message(self, *_: object) -> None:
            """Log nothing: the path has the token, and pages ask every few seconds."""

    return Page


def refusal(hosts: list[str], path: str, token: str, port: int) -> str | None:
    """Why a request is refused, None if it is not. Takes the same time for every wrong token."""
    if hosts not in ([f"{LOOPBACK}:{port}"], [f"localhost:{port}"]):
        return "use the address that flagstone printed\n"
    given, slash, _ = path.removeprefix("/").partition("/")
    if not hmac.compare_digest(given.encode(), token.encode()) or not slash:
        return "the token is missing or wrong; use the address that flagstone printed\n"
    return None


def ask(inspection: Inspection, name: str, query: str) -> tuple[int, Mapping[str, Any]]:
    """The status and document for a request. Errors of the database become a document that the page shows."""
    if len(query) > _MAX_QUERY:
        return 414, {"error": _TOO_LONG}
    try:
        fields = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=20, errors="strict"))
        found = inspection.answer(name, fields)
    except InvalidRequest as error:
        return 400, {"error": str(error)}
    except ValueError:
        return 400, {"error": "the request is not a list of fields in UTF-8"}
    except FlagstoneError as error:
        return 503, {"error": str(error)}
    return (404, {"error": f"there is no document {name[:40]!r}"}) if found is None else (200, found)
