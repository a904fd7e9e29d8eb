"""The compactor of one process: a coordinator, a worker, or both, with one `Board`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from flagstone.compaction.coordinator import Coordinator, LocalWorker
from flagstone.compaction.extensions import Executor, Scheduler
from flagstone.compaction.shared_state import Board
from flagstone.compaction.survey import Survey
from flagstone.compaction.worker import Worker
from flagstone.config.settings import CompactionWorkerOptions, CompactorOptions
from flagstone.errors import Closed, Unavailable
from flagstone.metadata.manifest import Manifest
from flagstone.runtime.pool import IoPool
from flagstone.runtime.service import Supervisor

_log = logging.getLogger("flagstone.compaction")

_STOP_TIMEOUT_S: Final = 30.0


class Compactor:
    """Runs in its own threads from `start` to `stop`; a failure in them never reaches the writer.

    With `coordinate` it schedules and commits jobs, with `executor` it executes them; it needs at least one of the two.
    Inside a writer (`embedded`) the engine passes on every manifest, and the store is read only for what other
    processes do. For `survey` and `stalled` see `Coordinator`.
    """

    def __init__(
        self,
        board: Board,
        *,
        coordinate: CompactorOptions | None,
        work: CompactionWorkerOptions | None,
        executor: Executor | None,
        scheduler: Scheduler | None = None,
        survey: Survey | None = None,
        embedded: bool = False,
        stalled: Callable[[Manifest], bool] | None = None,
    ) -> None:
        self.board = board
        self._supervisor = Supervisor(clock=board.clock)
        self.worker: Worker | None = None
        self.coordinator: Coordinator | None = None
        if work is not None and executor is not None:
            self.worker = Worker(
                board,
                executor,
                work,
                polls=coordinate is None,
                follows=lambda: self.coordinator is not None and self.coordinator.claimed,
            )
        if coordinate is not None:
            self.coordinator = Coordinator(
                board,
                coordinate,
                scheduler=scheduler,
                survey=survey,
                local=None if self.worker is None else LocalWorker(self.worker.id, self.worker.slots),
                embedded=embedded,
                stalled=stalled,
                on_end=self.halt,
            )
        board.changed = self._wake

    def start(self) -> None:
        """Begin in the background. The caller's thread makes no request."""
        for service in (self.coordinator, self.worker):
            if service is not None:
                self._supervisor.start(service)

    def halt(self) -> None:
        """Begin nothing more, without waiting: the worker returns its jobs as soon as it can."""
        if self.coordinator is not None:
            self.coordinator.stop()
        if self.worker is not None:
            self.worker.cancel()
        self._wake()

    def claim_back(self) -> None:
        """Claim the role of coordinator again, after this process itself took the role to add a bulk load."""
        if self.coordinator is not None:
            self.coordinator.claim_back()
        self._wake()

    def stop(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """End the work, and return the jobs that are not done, so that another worker can claim them.

        Raises:
            Unavailable: the store did not answer in time. The coordinator reclaims the jobs when the claims time out.

        """
        self.halt()
        self._supervisor.stop(timeout_s)
        # In a thread: retries against a store that is gone must not delay the caller.
        leaving = IoPool(max_workers=1, name="flagstone-compactor-leave")
        left = leaving.submit(self._leave, timeout_s)
        leaving.close()
        if not left.wait(2 * timeout_s):
            raise Unavailable("the compactor could not return its jobs: the store does not answer")
        error = left.exception()
        if error is not None:
            _log.warning("the compactor did not stop cleanly error=%s: %s", type(error).__name__, error)

    def _leave(self, timeout_s: float) -> None:
        if self.worker is not None:
            self.worker.stop(timeout_s)
        if self.coordinator is not None:
            self.coordinator.release()

    @property
    def ended(self) -> bool:
        """Whether it stopped by itself: a newer coordinator took over, or there was a bug."""
        fenced = self.coordinator is not None and self.coordinator.fenced
        return fenced or self._supervisor.failure is not None

    def raise_failure(self) -> None:
        """Raise the reason why it stopped by itself, if it did."""
        self._supervisor.raise_failure()
        if self.coordinator is not None:
            self.coordinator.raise_fenced()

    def status(self) -> dict[str, Any]:
        """Plain values for an operator."""
        crashed = self._supervisor.failure
        status: dict[str, Any] = {"state": "working", "failure": None}
        if self.coordinator is not None:
            status = self.coordinator.status()
        if crashed is not None:
            status |= {"state": "failed", "failure": str(crashed)}
        status["worker"] = None if self.worker is None else self.worker.status()
        return status

    def _wake(self) -> None:
        with suppress(Closed):  # a forked child has no thread to wake
            for service in (self.coordinator, self.worker):
                if service is not None:
                    self._supervisor.wake(service)
