"""An HTTP proxy between a client and a server on this machine, which injects faults.

    with FaultProxy(upstream_port) as proxy:
        proxy.inject(Fault.APPLIED_THEN_RESET, method="PUT")
        ...

Each injected fault hits the next matching request, once. The most important ones let the server apply the request
and lose only the answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Self

DROPPED_S = 3600.0
HEAD_BYTES = 256 * 1024


class Fault(Enum):
    """The kinds of faults of a request."""

    REFUSED = auto()
    """Answered 503, never forwarded."""
    RESET = auto()
    """The connection breaks, the request is never forwarded."""
    SILENCE = auto()
    """The client gets no answer, and the request is never forwarded."""
    TRUNCATED = auto()
    """The connection breaks in the middle of the answer's body."""
    APPLIED_THEN_REFUSED = auto()
    """The server applies the request, but the client gets 503."""
    APPLIED_THEN_RESET = auto()
    """The server applies the request, then the connection breaks."""
    APPLIED_THEN_SILENCE = auto()
    """The server applies the request, but the client gets no answer."""


@dataclass(frozen=True)
class Request:
    """The head of a request, on which rules match."""

    method: str
    target: str
    head: bytes


@dataclass(eq=False)
class _Rule:
    fault: Fault
    matches: Callable[[Request], bool]


class FaultProxy:
    """A proxy in front of `127.0.0.1:upstream_port`, running in a thread; leave the `with` block to stop it."""

    def __init__(self, upstream_port: int) -> None:
        self.port = 0
        self.struck: list[tuple[Fault, Request]] = []
        self._upstream_port = upstream_port
        self._rules: list[_Rule] = []
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def inject(
        self, fault: Fault, *, method: str, where: Callable[[Request], bool] = lambda _: True, times: int = 1
    ) -> None:
        """Let `fault` hit the next `times` requests of that method for which `where` is true."""
        for _ in range(times):
            self._rules.append(_Rule(fault, lambda request: request.method == method and where(request)))

    def forget(self) -> None:
        """Remove the faults that have not hit a request yet."""
        self._rules.clear()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[None]] = set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                await self._converse(reader, writer)
            except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
                pass  # the client or the server closed the connection, or the proxy is closing
            finally:
                tasks.discard(task)
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=256, limit=HEAD_BYTES)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                body = await _read_body(reader, head)
                method, target = head.split(b" ", 2)[:2]
                request = Request(method.decode(), target.decode(), head)
                fault = self._apply_fault(request)
                if fault is Fault.REFUSED:
                    writer.write(_unavailable())
                    continue
                if fault is Fault.RESET:
                    writer.transport.abort()
                    return
                if fault is Fault.SILENCE:
                    await asyncio.sleep(DROPPED_S)
                if upstream is None:
                    upstream = await asyncio.open_connection(
                        "127.0.0.1", self._upstream_port, limit=HEAD_BYTES
                    )
                upstream[1].write(head + body)
                answer_head = await upstream[0].readuntil(b"\r\n\r\n")
                answer_body = (
                    b"" if _bodyless(request, answer_head) else await _read_body(upstream[0], answer_head)
                )
                if fault is Fault.APPLIED_THEN_REFUSED:
                    writer.write(_unavailable())
                    continue
                if fault is Fault.APPLIED_THEN_RESET:
                    writer.transport.abort()
                    return
                if fault is Fault.APPLIED_THEN_SILENCE:
                    await asyncio.sleep(DROPPED_S)
                if fault is Fault.TRUNCATED:
                    writer.write(answer_head + answer_body[: len(answer_body) // 2])
                    await writer.drain()
                    writer.transport.abort()
                    return
                writer.write(answer_head + answer_body)
                await writer.drain()
                if b"connection: close" in answer_head.lower():
                    return
        finally:
            if upstream is not None:
                upstream[1].close()
                with suppress(OSError):
                    await upstream[1].wait_closed()

    def _apply_fault(self, request: Request) -> Fault | None:
        for rule in self._rules:
            if rule.matches(request):
                self._rules.remove(rule)
                self.struck.append((rule.fault, request))
                return rule.fault
        return None


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    headers = _headers(head)
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        return await _read_chunks(reader)
    return await reader.readexactly(int(headers.get(b"content-length", b"0")))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    chunks = b""
    while True:
        line = await reader.readline()
        size = int(line.partition(b";")[0], 16)
        chunks += line + await reader.readexactly(size + 2)
        if size == 0:
            return chunks


def _headers(head: bytes) -> dict[bytes, bytes]:
    pairs = (line.partition(b":") for line in head.split(b"\r\n")[1:] if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _bodyless(request: Request, answer_head: bytes) -> bool:
    return request.method == "HEAD" or answer_head.split(b" ", 2)[1] in (b"204", b"304")


def _unavailable() -> bytes:
    body = b"<Error><Code>SlowDown</Code></Error>"
    return b"HTTP/1.1 503 Slow Down\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
