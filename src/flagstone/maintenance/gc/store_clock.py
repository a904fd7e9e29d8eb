"""What time it is for the store, which stamps the objects whose age matters.

The clock of this machine may be hours off; comparing it with stamps of the store would make fresh objects look
old. So a collector writes a small object, and reads what time the store says it was written at. A folder needs no
question: its files carry this machine's time, and it may be so full that nothing can be written.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from flagstone.errors import Unavailable
from flagstone.store.local import LocalStore
from flagstone.store.port import ObjectMissing, ObjectStore, find_inside

_ATTEMPTS: Final = 5


class StoreClock:
    """The clock of `store`, asked at most once in its life: a moment in the past, but never in the future.

    A folder answers without a request. Elsewhere `path` names the object written for it. It is removed afterwards;
    after a crash it stays, empty and harmless, until the next question.
    """

    def __init__(self, store: ObjectStore, path: str) -> None:
        self._store = store
        self._path = path
        self._now_ms: int | None = None

    def now_ms(self) -> int:
        """The time, in milliseconds since the epoch. Three small requests the first time, none later."""
        if self._now_ms is None:
            folder = find_inside(self._store, LocalStore)
            self._now_ms = self._ask() if folder is None else folder.now_ms()
        return self._now_ms

    def _ask(self) -> int:
        for _ in range(_ATTEMPTS):
            self._store.put(self._path, b"")
            # Another collector may have removed what it takes for its own.
            with suppress(ObjectMissing):
                now_ms = self._store.head(self._path).last_modified_ms
                self._store.delete(self._path)
                return now_ms
        raise Unavailable(f"{self._path} vanishes as soon as it is written; is another collector at work?")
