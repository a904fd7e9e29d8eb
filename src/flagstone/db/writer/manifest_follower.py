"""The background service that follows what other processes do: a compactor, an operator, a newer writer."""

from __future__ import annotations

import logging
from typing import Any, Final

from flagstone.db.writer.load_adoption import LoadAdoption
from flagstone.errors import Unavailable
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime.service import Supervisor
from flagstone.write.flusher import Flusher
from flagstone.write.manifest import WriterManifest
from flagstone.write.writer_state import WriterState

_log = logging.getLogger("flagstone.db")

_SLOWDOWN: Final = 10
_SLOWEST_S: Final = 10.0


class ManifestFollower:
    """Polls for manifests of other processes, adopts bulk loads, and ends snapshots past their deadline.

    It polls once per interval while this writer or another process writes, or while a write waits for another
    process. Otherwise it polls less and less often: a sole writer would pay for thousands of equal answers a day.
    Nothing urgent depends on it: a replaced writer is refused at its next WAL file, and one that only reads notices
    within ten seconds. A flush reads the newest manifest anyway.
    """

    name = "manifest-follower"

    def __init__(
        self,
        state: WriterState,
        manifest: WriterManifest,
        flusher: Flusher,
        loads: LoadAdoption,
        *,
        interval_s: float,
        supervisor: Supervisor,
    ) -> None:
        self._state = state
        self._manifest = manifest
        self._flusher = flusher
        self._loads = loads
        self._interval_s = interval_s
        self._supervisor = supervisor
        self._quiet = 0
        self._last_seq = state.last_seq
        self._just_opened = True
        self._hurries = False

    def run_once(self) -> float | None:
        """Poll once. If the store does not answer, the next step tries again."""
        self._loads.announce()
        if self._just_opened:
            self._just_opened = False
            return self._interval_s
        self._state.expire_reads()
        try:
            newer = self._manifest.poll()
            self._loads.run()
        except Unavailable as error:
            _log.warning("cannot poll for a newer manifest error=%s", error)
            newer = True
        last_seq, self._last_seq = self._last_seq, self._state.last_seq
        self._hurries = self._flusher.pause is not None or self._loads.expected
        busy = newer or self._hurries or last_seq != self._last_seq
        self._quiet = 0 if busy else self._quiet + 1
        return plan_delay(self._interval_s, self._quiet)

    def hurry(self) -> None:
        """Poll now, and then once per interval while the writer waits for another process."""
        if not self._hurries:
            self._hurries = True
            self._supervisor.wake(self)

    def before_adoption(self, latest: Versioned[Manifest], forest: Any) -> None:
        """Nothing to do."""

    def after_adoption(self, latest: Versioned[Manifest]) -> None:  # noqa: ARG002 - it is the current one
        """Hurry if the manifest announces a bulk load."""
        if not self._hurries and self._loads.expected:
            self.hurry()


def plan_delay(interval_s: float, quiet: int) -> float:
    """Seconds until the next poll after `quiet` polls without news: the interval, doubling up to ten intervals.

    At most ten seconds, the interval of a reader, unless the interval itself is longer.
    """
    slowed_s = interval_s * min(1 << min(quiet, 8), _SLOWDOWN)
    return min(slowed_s, max(interval_s, _SLOWEST_S))
