"""A worker: claims compaction jobs, passes them to an executor, and reports the results.

Any number of workers, Flagstone's and SlateDB's, serve one database from any machine. A claim is an edit of the
compactions file; of two workers that claim one job, the second finds it taken. While a worker works it renews its
claims and records its progress. A worker that stops renewing loses its jobs to another one, which continues from the
recorded progress.

A crash leaves the job running in the file until the coordinator reclaims it. Objects that were uploaded but not
recorded become garbage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from flagstone.compaction import lifecycle
from flagstone.compaction.commit import source_bytes
from flagstone.compaction.extensions import Cancelled, CompactionTask, Executor
from flagstone.compaction.shared_state import Board
from flagstone.compaction.validation import find_commit_problem
from flagstone.config.settings import CompactionWorkerOptions
from flagstone.errors import Closed, FlagstoneError, InternalError, Unavailable
from flagstone.metadata.compactions import Compactions, Job, JobContext, TieredSpec
from flagstone.metadata.compactions import Worker as Claim
from flagstone.metadata.manifest import Manifest, SsTable
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime import metric_names as names
from flagstone.runtime.ids import ulid_text
from flagstone.runtime.pool import Future, IoPool, wait_for_all
from flagstone.types import Ulid

_log = logging.getLogger("flagstone.compaction")

_POLL_JITTER: Final = 0.5
_FIRST_RETRY_S: Final = 1.0
_LONGEST_RETRY_S: Final = 300.0
_STORE_RETRY_S: Final = 1.0
_IDLE_S: Final = 3600.0


class SourcesGone(Unavailable):
    """The sources of a job are not where the job names them: a bulk load moved them, or another job merged them.

    Only the coordinator can tell whether the job is done or must be planned again.
    """


@dataclass(slots=True)
class _Execution:
    """One running job. The executor's threads set `context`; `cancelled` never changes back to False."""

    job: Job
    context: JobContext | None
    cancelled: bool = False
    future: Future[tuple[SsTable, ...]] = field(default_factory=Future)

    def record(self, context: JobContext) -> None:
        self.context = context


@dataclass(slots=True)
class _Setback:
    """How often a job has failed in this worker, and when it may be tried again."""

    failures: int
    retry_at: float
    error: BaseException

    @property
    def reason(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"


class Worker:
    """A background service; wake it when `Board.changed` is called, which the worker does when a job has ended.

    With `polls=False` the coordinator of this process keeps the board's jobs up to date. A job is executed on the
    board's manifest while `follows` returns True, because the coordinator in this process has seen every commit;
    otherwise the manifest is read after the claim. `accepts` returns whether the worker may claim a job.
    """

    name = "compaction-worker"

    def __init__(
        self,
        board: Board,
        executor: Executor,
        options: CompactionWorkerOptions,
        *,
        polls: bool = True,
        follows: Callable[[], bool] = lambda: False,
        accepts: Callable[[Ulid], bool] = lambda _: True,
        pool: IoPool | None = None,
    ) -> None:
        clock, metrics = board.clock, board.metrics
        self.id: Final = board.ids.token()
        self.slots: Final = options.max_concurrent_compactions
        self._board = board
        self._executor = executor
        self._options = options
        self._clock = clock
        self._ids = board.ids
        self._polls = polls
        self._follows = follows
        self._accepts = accepts
        self._pool = pool or IoPool(max_workers=self.slots, name="flagstone-compaction")
        self._executions: dict[Ulid, _Execution] = {}
        self._setbacks: dict[Ulid, _Setback] = {}
        self._poll_at = clock.monotonic()
        self._beat_at = clock.monotonic()
        self._stopping = False
        self._failure: Exception | None = None
        self._claimed = metrics.counter(names.COMPACTOR_JOBS_CLAIMED)
        self._job_failures = metrics.counter(names.COMPACTOR_JOB_FAILURES)
        self._running = metrics.gauge(names.COMPACTOR_RUNNING_COMPACTIONS, worker_id=self.id)
        self._heartbeat = metrics.gauge(names.COMPACTOR_WORKER_LAST_HEARTBEAT_MS, worker_id=self.id)
        self._bytes_in_work = metrics.gauge(names.COMPACTOR_TOTAL_BYTES_BEING_COMPACTED)
        self._throughput = metrics.gauge(names.COMPACTOR_TOTAL_THROUGHPUT_BYTES_PER_SEC)
        self._bytes_compacted = metrics.counter(names.COMPACTOR_BYTES_COMPACTED, worker_id=self.id)
        self._ssts_written = metrics.counter(names.COMPACTOR_SSTS_WRITTEN, worker_id=self.id)

    # -- the service --------------------------------------------------------------------------------------

    def run_once(self) -> float | None:
        """Report, renew, claim and start. If the store does not answer, retry."""
        if self._stopping:
            return self._finish_stopping()
        try:
            self._step()
        except Closed as closed:
            self._failure = closed
            self.cancel()
            return self._finish_stopping()
        except Exception as error:  # noqa: BLE001 - a bug here must not end the jobs under way
            self._failure = error
            level = logging.WARNING if isinstance(error, Unavailable) else logging.ERROR
            _log.log(level, "worker cannot reach the compactions file error=%s", error)
            return _STORE_RETRY_S
        self._failure = None
        return self._delay_s()

    def cancel(self) -> None:
        """Begin nothing more, and cancel the jobs under way."""
        self._stopping = True
        for execution in list(self._executions.values()):
            execution.cancelled = True

    def stop(self, timeout_s: float) -> None:
        """After the service has ended: wait up to `timeout_s` for executions to stop, and return their jobs."""
        self.cancel()
        wait_for_all([execution.future for execution in self._executions.values()], timeout_s)
        self._return_jobs()
        self._pool.close()

    def setback(self, job_id: Ulid, *, at_least: int) -> BaseException | None:
        """The error of a job that failed in this worker, unless it may be temporary and `at_least` is not reached."""
        held = self._setbacks.get(job_id)
        if held is None or isinstance(held.error, SourcesGone):
            return None if held is None else held.error
        temporary = isinstance(held.error, Unavailable | OSError)
        return None if temporary and held.failures < at_least else held.error

    @property
    def busy(self) -> bool:
        """Whether this worker has a running job."""
        return bool(self._executions)

    def status(self) -> dict[str, Any]:
        """Plain values for an operator."""
        failure = self._failure
        return {
            "id": self.id,
            "failure": None if failure is None else f"{type(failure).__name__}: {failure}",
            "running": [ulid_text(job_id) for job_id in list(self._executions)],
            "setbacks": {
                ulid_text(job_id): {"failures": setback.failures, "reason": setback.reason}
                for job_id, setback in list(self._setbacks.items())
            },
        }

    def _finish_stopping(self) -> float | None:
        if any(not execution.future.done() for execution in self._executions.values()):
            return _STORE_RETRY_S
        self._return_jobs()
        return None

    def _return_jobs(self) -> None:
        """Report finished jobs and return the others, so that another worker continues them.

        If the store fails, the coordinator reclaims the jobs when their claims are not renewed.
        """
        try:
            jobs = self._board.jobs
            if jobs is not None and (self._executions or lifecycle.jobs_of(jobs.value, self.id)):
                self._board.edit_jobs(lambda now: self._settled(now.value))
        except FlagstoneError as error:
            _log.warning("could not return compaction jobs error=%s", error)
        self._executions.clear()
        self._running.set(0)

    # -- one step -----------------------------------------------------------------------------------------

    def _step(self) -> None:
        now = self._clock.monotonic()
        if self._polls and now >= self._poll_at:
            interval_s = self._options.compactions_poll_interval.total_seconds()
            self._poll_at = now + self._ids.jitter(interval_s, _POLL_JITTER)
            self._fetch_jobs()
        jobs = self._board.jobs
        if jobs is None:
            return
        beat = bool(self._executions) and now >= self._beat_at
        if beat or self._finished() or self._claims(jobs.value) != jobs.value:
            jobs = self._board.edit_jobs(lambda current: self._edited(current.value))
            self._beat_at = now + self._options.heartbeat_interval.total_seconds()
            self._heartbeat.set(self._clock.now_ms())
        self._reconcile(jobs)

    def _fetch_jobs(self) -> None:
        """Read the compactions file. If it was claimed since, the database may have been destroyed, or another one
        created at the same path: reading the manifest then raises `Closed`.
        """
        before, jobs = self._board.jobs, self._board.fetch_jobs()
        if jobs is None or before is None:
            return
        if jobs.value.compactor_epoch != before.value.compactor_epoch:
            self._board.fetch_manifest()

    def _edited(self, jobs: Compactions) -> Compactions:
        """The file with this worker's reports, renewed claims and new claims."""
        jobs = self._settled(jobs)
        going_on = {
            job_id: execution.context
            for job_id, execution in self._executions.items()
            if not execution.future.done()
        }
        return self._claims(lifecycle.renew_claims(jobs, self._claim(), going_on))

    def _settled(self, jobs: Compactions) -> Compactions:
        """Report the executions that succeeded, and return the jobs of those that failed or were cancelled."""
        outputs: dict[Ulid, tuple[SsTable, ...]] = {}
        unfinished: dict[Ulid, JobContext | None] = {}
        for job_id, execution in self._executions.items():
            done = execution.future.done()
            if done and execution.future.exception() is None:
                outputs[job_id] = execution.future.result()
            elif done or self._stopping:
                unfinished[job_id] = execution.context
        if self._stopping:
            # Also the jobs that the coordinator of this process claimed for this worker, which never began.
            own = lifecycle.jobs_of(jobs, self.id)
            unfinished |= {
                job_id: job.context for job_id, job in own.items() if job_id not in self._executions
            }
        jobs = lifecycle.report_jobs(jobs, self.id, outputs)
        return lifecycle.return_jobs(jobs, self.id, unfinished)

    def _claims(self, jobs: Compactions) -> Compactions:
        now = self._clock.monotonic()
        unwanted = {job_id for job_id, setback in self._setbacks.items() if setback.retry_at > now}
        unwanted |= self._executions.keys()  # a job that is being returned is not claimed in the same edit
        unwanted |= {job.id for job in jobs.jobs if not self._accepts(job.id)}
        return lifecycle.claim_jobs(jobs, self._claim(), slots=self.slots, unwanted=unwanted)

    def _claim(self) -> Claim:
        return Claim(self.id, self._clock.now_ms())

    def _finished(self) -> list[Ulid]:
        return [job_id for job_id, execution in self._executions.items() if execution.future.done()]

    def _reconcile(self, jobs: Versioned[Compactions]) -> None:
        """Make the executions match the file: start new jobs, cancel jobs that belong to another worker."""
        own = lifecycle.jobs_of(jobs.value, self.id)
        for job_id, execution in list(self._executions.items()):
            if execution.future.done() and job_id not in own:
                del self._executions[job_id]
                self._note_outcome(job_id, execution)
            elif job_id not in own and not execution.cancelled:
                _log.warning("lost compaction job=%s to another worker", ulid_text(job_id))
                execution.cancelled = True
        for job_id, job in own.items():
            if job_id not in self._executions:
                self._start(job)
        listed = {job.id for job in jobs.value.jobs}
        self._setbacks = {job_id: held for job_id, held in self._setbacks.items() if job_id in listed}
        self._running.set(len(self._executions))

    def _start(self, job: Job) -> None:
        self._claimed.add()
        execution = _Execution(job, job.context)
        if not self._executions:
            # The claim that was just written is the first heartbeat.
            self._beat_at = self._clock.monotonic() + self._options.heartbeat_interval.total_seconds()
        self._executions[job.id] = execution
        _log.info("started compaction job=%s resumed=%s", ulid_text(job.id), job.context is not None)
        execution.future = self._pool.submit(self._execute, execution)
        execution.future.add_done_callback(lambda _: self._board.changed())

    def _execute(self, execution: _Execution) -> tuple[SsTable, ...]:
        job = execution.job
        manifest = self._manifest()
        if not isinstance(job.spec, TieredSpec):
            raise InternalError(f"job {ulid_text(job.id)} is a drain, which needs no worker")
        problem = find_commit_problem(job.spec, manifest)
        if problem is not None:
            raise SourcesGone(f"job {ulid_text(job.id)} cannot be executed: {problem}")
        size = source_bytes(manifest, job.spec)
        self._bytes_in_work.add(size)
        started = self._clock.monotonic()
        try:
            task = CompactionTask(job_id=job.id, spec=job.spec, manifest=manifest, context=job.context)
            made = self._executor.run(task, record=execution.record, cancelled=lambda: execution.cancelled)
            self._bytes_compacted.add(size)
            self._ssts_written.add(len(made))
            self._throughput.set(size / max(self._clock.monotonic() - started, 1e-6))
            return made
        finally:
            self._bytes_in_work.add(-size)

    def _manifest(self) -> Manifest:
        known = self._board.manifest
        return known.value if self._follows() and known is not None else self._board.fetch_manifest().value

    def _note_outcome(self, job_id: Ulid, execution: _Execution) -> None:
        error = execution.future.exception()
        if error is None:
            self._setbacks.pop(job_id, None)
        elif not isinstance(error, Cancelled):
            before = self._setbacks.get(job_id)
            failures = 1 if before is None else before.failures + 1
            wait_s = min(_FIRST_RETRY_S * 2 ** min(failures - 1, 16), _LONGEST_RETRY_S)
            self._job_failures.add()
            setback = _Setback(failures, self._clock.monotonic() + wait_s, error)
            self._setbacks[job_id] = setback
            _log.error(
                "failed compaction job=%s failures=%d retry_s=%.0f error=%s",
                ulid_text(job_id),
                failures,
                wait_s,
                setback.reason,
            )

    def _delay_s(self) -> float:
        """The time until the next renewal, poll or retry."""
        now = self._clock.monotonic()
        times = [setback.retry_at for setback in self._setbacks.values() if setback.retry_at > now]
        if self._polls:
            times.append(self._poll_at)
        if self._executions:
            times.append(self._beat_at)
        return max(0.0, min(times, default=now + _IDLE_S) - now)
