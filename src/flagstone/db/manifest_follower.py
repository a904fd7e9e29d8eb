"""The background service that learns what others did to a database: a compactor, an operator, a newer writer."""

from __future__ import annotations

import logging
from typing import Protocol

from flagstone.errors import Unavailable

_log = logging.getLogger("flagstone.db")


class Following(Protocol):
    """What it needs of the engine."""

    def refresh(self) -> None: ...

    def expire_read_points(self) -> None: ...


class ManifestFollower:
    """A background service that looks for manifests others wrote, and ends what was left open too long."""

    name = "manifest-follower"

    def __init__(self, engine: Following, interval_s: float) -> None:
        self._engine = engine
        self._interval_s = interval_s

    def run_once(self) -> float | None:
        """Look once. A store that does not answer is asked again at the next turn."""
        self._engine.expire_read_points()
        try:
            self._engine.refresh()
        except Unavailable as error:
            _log.warning("cannot look for a newer manifest error=%s", error)
        return self._interval_s
