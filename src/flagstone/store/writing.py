"""Objects that are written piece by piece, while the next piece is made."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

from flagstone.errors import FlagstoneError
from flagstone.store.port import ObjectVersion, Piece, Upload


class Destination(Protocol):
    """The two methods of an object store that write an object without a condition."""

    def put(self, path: str, data: bytes) -> ObjectVersion: ...

    def upload(self, path: str) -> Upload: ...


class ObjectWriter:
    """Writes one object: by one `put` if it is smaller than a part, otherwise by an upload in parts.

    It holds less than one part in memory. Nothing is visible before `commit`; a crash before it leaves what
    `Upload` says.
    """

    def __init__(self, destination: Destination, path: str) -> None:
        self._destination = destination
        self._path = path
        self._upload = destination.upload(path)
        self._buffer = bytearray()
        self._sent = 0
        self.whole: bytes | None = None
        """After the commit of a small object, all its bytes."""

    @property
    def size(self) -> int:
        """How many bytes were written so far."""
        return self._sent + len(self._buffer)

    def write(self, piece: Piece) -> None:
        """Append bytes. The caller may use their memory again."""
        limit = self._upload.part_bytes
        with memoryview(piece) as rest:
            at = 0
            while at < len(rest):
                if not self._buffer and len(rest) - at >= limit:
                    self._send(rest[at:])
                    return
                taken = min(limit - len(self._buffer), len(rest) - at)
                self._buffer += rest[at : at + taken]
                at += taken
                if len(self._buffer) == limit:
                    self._send_buffer()

    def commit(self) -> None:
        """Make the object visible. Raises `Unavailable` if the store does not answer; then write it again."""
        if not self._sent:
            whole = bytes(self._buffer)
            self._destination.put(self._path, whole)
            self.whole = whole
            return
        if self._buffer:
            self._send_buffer()
        self._upload.commit()

    def abort(self) -> None:
        """Discard what was written. If that fails it stays behind as after a crash."""
        with suppress(FlagstoneError):
            self._upload.abort()

    def _send_buffer(self) -> None:
        self._send(self._buffer)
        self._buffer = bytearray()

    def _send(self, part: Piece) -> None:
        self._upload.write(self._sent, part)
        self._sent += len(part)
