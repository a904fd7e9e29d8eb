"""Transactions as functions: run again after a conflict, a bounded number of times, with growing random pauses."""

from __future__ import annotations

import inspect
from typing import Final

from flagstone.errors import InvalidRequest, TransactionConflict
from flagstone.runtime.ids import Ids
from flagstone.write.conflicts import TransactionExpired

DEFAULT_RETRIES: Final = 10
_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.25
_DOUBLINGS: Final = 8


class Attempts:
    """Counts the attempts of one `run` and chooses the pauses between them."""

    def __init__(self, retries: int, ids: Ids) -> None:
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise InvalidRequest(f"retries is {retries!r}; use a whole number from 0")
        self._retries = retries
        self._ids = ids
        self._failed = 0

    def pause_s(self, conflict: TransactionConflict) -> float:
        """The pause before the next attempt. Raises the conflict if there is none.

        An expired transaction is not run again: it would take as long as before. Of `n` writers that collide, each
        waits for a random part of a window that doubles, up to a quarter of a second.
        """
        self._failed += 1
        if isinstance(conflict, TransactionExpired):
            raise conflict
        if self._failed > self._retries:
            conflict.add_note(
                f"after {self._failed} attempts; allow more retries, or let fewer writers change the same keys"
            )
            raise conflict
        window_s = min(_FIRST_PAUSE_S * 2 ** min(self._failed - 1, _DOUBLINGS), _LONGEST_PAUSE_S)
        return self._ids.uniform(0, window_s)


def refuse_coroutine(result: object) -> None:
    """Raise `InvalidRequest` for what a coroutine function returns when it is called without `await`."""
    if inspect.iscoroutine(result):
        result.close()
        raise InvalidRequest(
            "fn is a coroutine function, which a blocking database cannot await; use AsyncDb.run"
        )


def check_awaitable(result: object) -> None:
    """Raise `InvalidRequest` unless an event loop can await it."""
    if not inspect.isawaitable(result):
        raise InvalidRequest(
            "fn must be a coroutine function (async def), because its transaction is awaited"
        )
