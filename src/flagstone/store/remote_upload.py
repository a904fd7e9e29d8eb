"""Multipart uploads to S3, Google Cloud Storage and Azure Blob Storage, through obstore's writer.

obstore sends a few parts at a time in the background and sends a part again that fails. A failure that lasts shows at
a later part or at the commit, and then all parts are lost: the caller uploads the object again.

A commit whose answer is lost is settled as a conditional write is: the object carries the token of its upload.

A crash leaves an unfinished upload. obstore cannot list those, so the bucket needs a lifecycle rule that removes them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

from flagstone.errors import FlagstoneError, Unavailable
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.store.port import ObjectMissing, Piece, UploadLost

if TYPE_CHECKING:
    from obstore import WritableFile

    from flagstone.store.remote import RemoteStore

PART_BYTES: Final = 8 * 1024 * 1024

_PARTS_IN_FLIGHT: Final = 3
"""With the part that is being filled they take 32 MiB per upload."""


class RemoteUpload:
    """An upload to a remote store. Parts are copied, because obstore keeps references to them until they are sent."""

    part_bytes = PART_BYTES

    def __init__(self, store: RemoteStore, path: str) -> None:
        self._store = store
        self._path = path
        self._token = SYSTEM_IDS.token()
        self._writer: WritableFile | None = None
        self._size = 0
        self._state: Literal["open", "in doubt", "committed", "lost"] = "open"

    def write(self, start: int, part: Piece) -> None:
        writer = self._open_writer()
        if start < self._size:
            return
        content = bytes(part)
        try:
            self._store.ask("upload", self._path, lambda _: writer.write(content))
        except FlagstoneError as error:
            self.abort()
            if isinstance(error, Unavailable):
                raise UploadLost(str(error)) from None
            raise
        self._size += len(content)

    def commit(self) -> None:
        if self._state == "in doubt":
            self._state = "committed" if self._is_stored() else "lost"
        if self._state == "committed":
            return
        writer = self._open_writer()
        self._state = "in doubt"
        self._store.ask("upload", self._path, lambda _: writer.close())
        self._state = "committed"

    def abort(self) -> None:
        if self._state == "open":
            self._state = "lost"
            if self._writer is not None:
                with suppress(FlagstoneError):
                    self._store.ask("upload", self._path, _abort(self._writer))

    def _open_writer(self) -> WritableFile:
        if self._state != "open":
            raise UploadLost(f"the upload of {self._path} has failed or ended; its parts are gone")
        if self._writer is None:
            self._writer = self._store.open_writer(
                self._path, self._token, part_bytes=PART_BYTES, max_concurrency=_PARTS_IN_FLIGHT
            )
        return self._writer

    def _is_stored(self) -> bool:
        try:
            return self._store.head(self._path).token == self._token
        except ObjectMissing:
            return False


def _abort(writer: WritableFile) -> Callable[[object], None]:
    # Leaving its `with` block by an exception is the only way to abort it.
    return lambda _: writer.__exit__(UploadLost, UploadLost(), None)
