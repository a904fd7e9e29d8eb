"""The part of `Admin` that deals with compaction: looking at jobs, submitting them, and doing them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Final

from flagstone.config import CompactionWorkerOptions, CompactorOptions, as_duration
from flagstone.errors import InvalidRequest
from flagstone.format.codec import Codec
from flagstone.lsm.compaction_filter import CompactionFilterFactory
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.maintenance.compaction.board import Board
from flagstone.maintenance.compaction.compactor import Compactor
from flagstone.maintenance.compaction.coordinator import Coordinator, LocalWorker
from flagstone.maintenance.compaction.executor import LocalExecutor
from flagstone.maintenance.compaction.now import PATIENCE_S, CompactNow, NoIdeas, Progress
from flagstone.maintenance.compaction.picker import Scheduler, plan_compactions, plan_full
from flagstone.maintenance.compaction.task import Executor
from flagstone.maintenance.compaction.validation import find_problem
from flagstone.maintenance.compaction.worker import Worker
from flagstone.metadata.compactions import Compactions, Job, Spec, add_job
from flagstone.metadata.sequenced import Listed, Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids, ulid_ms
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.sync import Event
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.table.builder import TableOptions
from flagstone.types import Ulid
from flagstone.views.marks import refuse_destroyed

_LOOK_S: Final = 0.2
_NO_TIME: Final = timedelta(0)
_QUICK: Final = timedelta(seconds=1)


class AdminCompaction:
    """Compaction jobs: list, submit, execute. Made by `Admin`, which opens the stores."""

    _store: ObjectStore
    _paths: DbPaths
    _clock: Clock
    _ids: Ids

    # -- looking and submitting ---------------------------------------------------------------------------

    def list_compactions(self) -> list[Listed]:
        """The stored versions of the compactions file, ascending; none before a coordinator was started."""
        return list(self._compactions_store().list())

    def compactions(self, id: int | None = None) -> Versioned[Compactions]:  # noqa: A002 - the name users know
        """One version of the compactions file, by default the current one, with its number.

        Raises:
            InvalidRequest: there is no such version, or no coordinator was ever started.

        """
        store = self._compactions_store()
        if id is None:
            found = store.latest()
            if found is None:
                raise self._never_coordinated()
            return found
        try:
            return Versioned(id, store.load(id))
        except ObjectMissing:
            numbers = [entry.id for entry in store.list()]
            if not numbers:
                raise self._never_coordinated() from None
            raise InvalidRequest(
                f"no compactions file {id} of {self._paths.root!r}: stored are {numbers[0]} to {numbers[-1]}, less "
                "what was collected in between"
            ) from None

    def submit_compaction(self, spec: Spec) -> Ulid:
        """Ask the coordinator, wherever it runs, for a compaction; returns the id of the job.

        It is checked against the database as it is now. The coordinator may refuse it later, when the database has
        changed meanwhile: the job then ends as failed, and nothing else happens.

        Raises:
            InvalidRequest: the compaction makes no sense, or no coordinator was ever started.

        """
        jobs = self._compactions_store()
        if jobs.latest() is None:
            raise self._never_coordinated()
        submitted = Ulid(0)

        def edit(now: Versioned[Compactions]) -> Compactions:
            nonlocal submitted
            manifest = ManifestStore(self._store, self._paths).require_latest().value
            refuse_destroyed(manifest, self._store, self._paths)
            problem = find_problem(spec, manifest, now.value)
            if problem is not None:
                raise InvalidRequest(f"the compaction makes no sense: {problem}")
            newest = now.value.newest_job
            submitted = self._ids.ulid(0 if newest is None else ulid_ms(newest))
            return add_job(now.value, Job(submitted, spec))

        jobs.update(edit)
        return submitted

    # -- doing it -----------------------------------------------------------------------------------------

    def compact(
        self,
        *,
        full: bool = False,
        segment: bytes | None = None,
        options: CompactorOptions | None = None,
        merge_operator: MergeOperator | None = None,
        compaction_filter: CompactionFilterFactory | None = None,
        executor: Executor | None = None,
        progress: Callable[[Progress], None] = lambda _: None,
        timeout: timedelta | str | None = None,
        patience: timedelta | str = timedelta(seconds=PATIENCE_S),
    ) -> list[Ulid]:
        """Compact now, and return when it is done: the ids of the jobs.

        With `full` every tree (or that of `segment`) becomes one run, of all it holds at the beginning; under a
        writer so busy that compactions never pause, of all that those leave alone. Otherwise what the size-tiered
        scheduler would do is done until it has no more ideas. Works beside a writer: a living
        coordinator gets the jobs, and this process helps it. If none answers within `patience`, this process
        coordinates for the moment. Table settings and concurrency are those of `options`.

        Raises:
            InvalidRequest: there is no database or no such segment, or merges without a `merge_operator`.
            Unavailable: not done within `timeout`, or the store did not answer. What was committed stays.

        """
        timeout = None if timeout is None else as_duration(timeout, "timeout", minimum=_NO_TIME)
        patience = as_duration(patience, "patience", minimum=_NO_TIME)
        options = options or CompactorOptions()
        work = options.worker or CompactionWorkerOptions()
        board, metrics = self._board(options), Metrics()
        manifest = board.fetch_manifest().value
        if segment is not None and manifest.tree_of(segment) is None:
            raise InvalidRequest(f"there is no segment {segment!r} in {self._paths.root!r}")
        executor = executor or self._executor(work, merge_operator, compaction_filter, metrics)

        def make_worker(accepts: Callable[[Ulid], bool]) -> Worker:
            return Worker(
                board,
                executor,
                work.replace(compactions_poll_interval=min(work.compactions_poll_interval, _QUICK)),
                clock=self._clock,
                ids=self._ids,
                metrics=metrics,
                accepts=accepts,
            )

        def make_coordinator(worker: Worker) -> Coordinator:
            return Coordinator(
                board,
                options,
                clock=self._clock,
                ids=self._ids,
                metrics=metrics,
                scheduler=NoIdeas(),
                local=LocalWorker(worker.id, worker.slots),
            )

        return CompactNow(
            board,
            (lambda now, jobs: plan_full(now, jobs, segment))
            if full
            else (lambda now, jobs: plan_compactions(now, jobs, options)),
            make_worker,
            make_coordinator,
            self._clock,
            self._ids,
            fallback=(lambda now, jobs: plan_full(now, jobs, segment, around=True)) if full else None,
            once=full,
            progress=progress,
            patience_s=patience.total_seconds(),
        ).run(timeout_s=None if timeout is None else timeout.total_seconds())

    def run_compactor(
        self,
        *,
        options: CompactorOptions | None = None,
        scheduler: Scheduler | None = None,
        executor: Executor | None = None,
        merge_operator: MergeOperator | None = None,
        compaction_filter: CompactionFilterFactory | None = None,
        stop: Event | None = None,
    ) -> None:
        """Coordinate the compactions of the database, and do them, until `stop` is set or the call is interrupted.

        With `options.worker` None it only coordinates; `run_worker` elsewhere does the work. `scheduler` and
        `executor` replace the size-tiered choice and the merging in this process.

        Raises:
            Closed: a newer coordinator has taken over.
            InvalidRequest: there is no database.

        """
        options = options or CompactorOptions()
        metrics = Metrics()
        if options.worker is not None and executor is None:
            executor = self._executor(options.worker, merge_operator, compaction_filter, metrics)
        self._run_until(
            stop,
            Compactor(
                self._board(options),
                coordinate=options,
                work=options.worker,
                executor=executor,
                scheduler=scheduler,
                clock=self._clock,
                ids=self._ids,
                metrics=metrics,
            ),
        )

    def run_worker(
        self,
        *,
        options: CompactionWorkerOptions | None = None,
        executor: Executor | None = None,
        merge_operator: MergeOperator | None = None,
        compaction_filter: CompactionFilterFactory | None = None,
        stop: Event | None = None,
    ) -> None:
        """Do the compactions that a coordinator elsewhere decides, until `stop` is set or the call is interrupted.

        Any number of workers may serve one database. The coordinator may be SlateDB's.

        Raises:
            InvalidRequest: there is no database.

        """
        work = options or CompactionWorkerOptions()
        metrics = Metrics()
        self._run_until(
            stop,
            Compactor(
                self._board(CompactorOptions()),
                coordinate=None,
                work=work,
                executor=executor or self._executor(work, merge_operator, compaction_filter, metrics),
                clock=self._clock,
                ids=self._ids,
                metrics=metrics,
            ),
        )

    def _run_until(self, stop: Event | None, compactor: Compactor) -> None:
        compactor.board.fetch_manifest()  # while the caller can still be told that there is no database
        asked = Event() if stop is None else stop
        compactor.start()
        try:
            while not asked.wait(_LOOK_S) and not compactor.ended:
                pass
        finally:
            compactor.stop()
        compactor.raise_failure()

    def _board(self, options: CompactorOptions) -> Board:
        manifests = ManifestStore(self._store, self._paths, clock=self._clock, ids=self._ids)
        timeout_s = options.manifest_update_timeout.total_seconds()
        return Board(manifests, self._compactions_store(), update_timeout_s=timeout_s)

    def _executor(
        self,
        work: CompactionWorkerOptions,
        merge_operator: MergeOperator | None,
        compaction_filter: CompactionFilterFactory | None,
        metrics: Metrics,
    ) -> LocalExecutor:
        codec = Codec.NONE if work.compression_codec is None else Codec[work.compression_codec.upper()]
        return LocalExecutor(
            self._store,
            self._paths,
            options=TableOptions(codec=codec, min_filter_keys=work.min_filter_keys),
            max_sst_bytes=work.max_sst_size,
            max_subcompactions=work.max_subcompactions,
            max_fetch_tasks=work.max_fetch_tasks,
            bytes_to_fetch=work.bytes_to_fetch,
            merge_operator=merge_operator,
            compaction_filter=compaction_filter,
            ids=self._ids,
            clock=self._clock,
            metrics=metrics,
        )

    def _compactions_store(self) -> CompactionsStore:
        return CompactionsStore(self._store, self._paths, clock=self._clock, ids=self._ids)

    def _never_coordinated(self) -> InvalidRequest:
        return InvalidRequest(
            f"no compactions file of {self._paths.root!r}: no coordinator was ever started; open the database with "
            "its compactor on, run a compactor beside it, or compact it now with Admin.compact"
        )
