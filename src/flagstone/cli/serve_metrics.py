"""`serve-metrics`: the shape and the sizes of databases, for Prometheus."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flagstone.cli.context import AsJson, invocation
from flagstone.cli.output import print_json_line, print_line
from flagstone.cli.process import service
from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.runtime.sync import Event

if TYPE_CHECKING:
    import flagstone
    from flagstone.cli.connection import Connection

_LOOPBACK: Final = ("127.0.0.1", "localhost")
_CHECK_STOP_S: Final = 0.2
_CLIENT_TIMEOUT_S: Final = 5


def serve_metrics(
    context: typer.Context,
    host: Annotated[
        str,
        typer.Option(help="The address to listen on. Other machines can reach it only if you change this."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 chooses a free one.", min=0, max=65535)] = 9464,
    path: Annotated[
        list[str] | None,
        typer.Option("--path", "-p", help="A database; may be repeated. Also before the command."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Serve metrics of one or more databases to Prometheus, at /metrics, until Ctrl-C.

    Follows each database as a reader that writes nothing, so read access to the store is enough. It serves what can be
    seen on the store: SSTs, sorted runs, manifest and sequence numbers, and its own requests. Numbers of the writer's
    process, such as its writes and latencies, are only there: use `db.metrics_text()`.

    For example:

        flagstone -p s3://bucket/shop serve-metrics
        flagstone serve-metrics -p s3://bucket/shop -p s3://bucket/users --port 9100
    """
    call = invocation(context, json=json)
    wanted = [*call.paths, *(path or ())]
    if not wanted:
        call.require_paths()
    connections = [replace(call, path=each, further_paths=()).connect() for each in dict.fromkeys(wanted)]
    with ExitStack() as opened:
        readers = [(opened.enter_context(_follow(each)), each) for each in connections]
        databases = [(reader, {"database": each.root, "store": each.store.url}) for reader, each in readers]

        def ready(address: str) -> None:
            if call.json:
                print_json_line({"address": address, "databases": [labels for _, labels in databases]})
            else:
                print_line(f"metrics of {len(databases)} at {address}; Ctrl-C ends it")
            sys.stdout.flush()

        with service("metrics server") as stop:
            serve(lambda: _text(databases), host=host, port=port, stop=stop, ready=ready)


def _follow(connection: Connection) -> flagstone.DbReader:
    """A reader that writes nothing and does not read the rows of the WAL into memory."""
    import flagstone

    return flagstone.open_reader(
        connection.root,
        store=connection.store,
        wal_store=connection.wal_store,
        mode="latest",
        settings=flagstone.ReaderSettings(skip_wal_replay=True),
    )


def _text(databases: list[tuple[flagstone.DbReader, dict[str, str]]]) -> str:
    from flagstone.db.reporting import measure
    from flagstone.runtime.prometheus import render_several

    return render_several((measure(reader), labels) for reader, labels in databases)


def serve(
    render: Callable[[], str], *, host: str, port: int, stop: Event, ready: Callable[[str], None]
) -> None:
    """Answer requests for `/metrics` until `stop` is set. Calls `ready` with the address first.

    Raises:
        InvalidRequest: the address cannot be listened on.

    """
    try:
        server = HTTPServer((host, port), _handler(render, only_here=host in _LOOPBACK))
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(
            f"cannot listen on port {port} of {host!r}: {error}; choose another one"
        ) from error
    with server:
        server.timeout = _CHECK_STOP_S
        ready(f"http://{host}:{server.server_port}/metrics")
        while not stop.is_set():
            server.handle_request()


def _handler(render: Callable[[], str], *, only_here: bool) -> type[BaseHTTPRequestHandler]:
    class Scrape(BaseHTTPRequestHandler):
        timeout = _CLIENT_TIMEOUT_S  # one request at a time: a slow client must not block it for long

        def do_GET(self) -> None:
            if only_here and self.headers.get("Host", "").rpartition(":")[0] not in _LOOPBACK:
                # Another host name means DNS rebinding: another site tries to read through a browser.
                self.send_error(403, "use the address that flagstone printed")
                return
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "the metrics are at /metrics")
                return
            from flagstone.runtime.prometheus import CONTENT_TYPE

            try:
                status, kind, data = 200, CONTENT_TYPE, render().encode()
            except FlagstoneError as error:
                status, kind, data = 503, "text/plain; charset=utf-8", f"{error}\n".encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Log nothing: Prometheus scrapes every few seconds."""

    return Scrape
