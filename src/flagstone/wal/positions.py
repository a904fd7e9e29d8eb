"""Where a pinned consumer stands: what it was given, what it has used, and what the store knows of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from flagstone.errors import InvalidRequest
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime.clock import Clock
from flagstone.runtime.sync import Lock
from flagstone.types import WalId
from flagstone.wal.changes import Position, further
from flagstone.wal.pins import Decide, LogPin

SAVE_EVERY_S: Final = 10.0
"""How often a pin moves at most: each time is a manifest version."""


class PinnedPosition:
    """The position of one consumer, and the pin that keeps the log from there on. May be used by several threads."""

    def __init__(self, pin: LogPin, clock: Clock) -> None:
        self._pin = pin
        self._clock = clock
        self._saved: Position | None = None
        self._saved_at = 0.0
        self._turn = Lock()
        self.position: Position | None = None

    def begin(self, start: Position | None, oldest: Callable[[], WalId]) -> Position:
        """Find the pin again, or set it: at `start`, by default where it stood, else at the oldest file.

        Raises:
            InvalidRequest: the consumer has yet to copy the database.

        """
        if self.position is not None and start is None:
            self._check_copied(self.position)
            return self.position
        first = oldest() if start is None and self._pin.find() is None else None

        def where(held: Position | None) -> Position:
            if held is not None:
                self._check_copied(held)
            if held is not None and (start is None or start == Position(held.next_id)):
                return held
            return start or Position(first or WalId(1))

        placed, _ = self.place(lambda now, held: (now.value, where(held)))
        while first is not None and placed.next_id == first and (left := oldest()) > first:
            # A collector was faster than the pin: the oldest file there is now is another one.
            first, placed = left, Position(left)
            self.position = placed
            self.save()
        return placed

    def place(self, decide: Decide) -> tuple[Position, Versioned[Manifest]]:
        """Set the pin as `LogPin.place` does."""
        with self._turn:
            placed, written = self._pin.place(decide)
            self._note_saved(placed)
            self.position = placed
            return placed, written

    def reach(self, seq: int) -> None:
        """The consumer has copied the database up to `seq`: told to the store at once."""
        with self._turn:
            if self.position is not None:
                self.position = Position(self.position.next_id, seq)
                self._save()

    def use(self, position: Position) -> None:
        """The consumer needs nothing before `position` any more; told to the store now and then."""
        with self._turn:
            if self.position is None or not self.position.copied:
                raise InvalidRequest("nothing was followed yet, so nothing can be committed")
            # Batches may be used side by side and committed in another order; what is behind stays behind.
            self.position = further(self.position, position)
        self.tend()

    def tend(self) -> None:
        """Tell the store, if there is something to tell and it is time."""
        with self._turn:
            unsaved = self.position != self._saved
            if (unsaved and self._clock.monotonic() - self._saved_at >= SAVE_EVERY_S) or self._pin.due():
                self._save()

    def save(self) -> None:
        """Tell the store where the consumer stands."""
        with self._turn:
            if self.position != self._saved:
                self._save()

    def release(self) -> None:
        """Keep nothing for this consumer any more."""
        with self._turn:
            self._pin.release()
            self.position = self._saved = None

    def _save(self) -> None:
        if self.position is not None:
            self._pin.move(self.position)
            self._note_saved(self.position)

    def _check_copied(self, position: Position) -> None:
        if not position.copied:
            raise InvalidRequest(
                f"the consumer {self._pin.name!r} has yet to copy the database: open_feed gives it a snapshot, and "
                "copied() says that it is done"
            )

    def _note_saved(self, position: Position) -> None:
        self._saved, self._saved_at = position, self._clock.monotonic()
