"""The compaction methods of `Admin`: list jobs, submit them, and run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from flagstone.clones.origin import refuse_destroyed
from flagstone.compaction.compactor import Compactor
from flagstone.compaction.coordinator import mint_job
from flagstone.compaction.executor import LocalExecutor, Merging
from flagstone.compaction.extensions import Executor, Scheduler
from flagstone.compaction.on_demand import PATIENCE_S, CompactNow, Planner, Progress
from flagstone.compaction.picker import plan_full
from flagstone.compaction.policy import new_scheduler, new_survey
from flagstone.compaction.shared_state import Board
from flagstone.compaction.validation import find_problem
from flagstone.config import CompactionWorkerOptions, CompactorOptions, as_duration
from flagstone.errors import InvalidRequest
from flagstone.format.codec import Codec
from flagstone.lsm.compaction_filter import CompactionFilterFactory
from flagstone.lsm.merge_operator import MergeOperator, check_operator
from flagstone.metadata.compactions import Compactions, Job, Spec, add_job
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Listed, Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.sync import Event
from flagstone.sst.builder import SstOptions
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import Ulid

_POLL_S: Final = 0.2
_NO_TIME: Final = timedelta(0)
_QUICK: Final = timedelta(seconds=1)


class AdminCompaction:
    """Compaction jobs: list, submit, run. A base class of `Admin`, which opens the stores."""

    _store: ObjectStore
    _paths: DbPaths
    _clock: Clock
    _ids: Ids

    # -- listing and submitting ---------------------------------------------------------------------------

    def list_compactions(self) -> list[Listed]:
        """The stored compactions files, ascending; none before the first coordinator has started."""
        return list(self._compactions_store().list())

    def compactions(self, id: int | None = None) -> Versioned[Compactions]:  # noqa: A002 - the name users know
        """One compactions file with its id, by default the latest one.

        Raises:
            InvalidRequest: there is no such compactions file, or no coordinator was ever started.

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
            ids = [entry.id for entry in store.list()]
            if not ids:
                raise self._never_coordinated() from None
            raise InvalidRequest(
                f"no compactions file {id} of {self._paths.root!r}: stored are {ids[0]} to {ids[-1]}, without "
                "those that were collected in between"
            ) from None

    def submit_compaction(self, spec: Spec) -> Ulid:
        """Submit a compaction job to the coordinator, in whichever process it runs; returns the id of the job.

        The job is checked against the current manifest. If the database changes before the coordinator starts the job,
        the coordinator may refuse it: the job then fails, and nothing else happens.

        Raises:
            InvalidRequest: the compaction is not possible, or no coordinator was ever started.

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
                raise InvalidRequest(f"the compaction is not possible: {problem}")
            submitted = mint_job(now.value, self._ids)
            return add_job(now.value, Job(submitted, spec))

        jobs.update(edit)
        return submitted

    # -- running -----------------------------------------------------------------------------------------

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
        """Compact now, and return the ids of the jobs when they are done.

        With `full` every tree (or that of `segment`) becomes one sorted run of what it holds at the beginning; if other
        compactions never pause, of everything except their inputs. Without `full` the jobs are those that the
        policy in `options` proposes, until it proposes no more. It works beside a writer: a running coordinator gets
        the jobs, and this process works on them, too. If no coordinator answers within `patience`, this process
        coordinates until the jobs are done. SST settings and concurrency are those of `options`.

        Raises:
            InvalidRequest: there is no database or no such segment, or merge operands without a `merge_operator`.
            Unavailable: not done within `timeout`, or the store did not answer. Committed jobs stay.

        """
        timeout = None if timeout is None else as_duration(timeout, "timeout", minimum=_NO_TIME)
        patience = as_duration(patience, "patience", minimum=_NO_TIME)
        options = options or CompactorOptions()
        work = options.worker or CompactionWorkerOptions()
        board = self._board(options)
        manifest = board.fetch_manifest().value
        if segment is not None and manifest.tree_of(segment) is None:
            raise InvalidRequest(f"there is no segment {segment!r} in {self._paths.root!r}")
        executor = executor or self._executor(work, merge_operator, compaction_filter, board.metrics)

        return CompactNow(
            board,
            (lambda now, jobs: plan_full(now, jobs, segment)) if full else self._planner(options),
            executor,
            options,
            work.replace(compactions_poll_interval=min(work.compactions_poll_interval, _QUICK)),
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
        """Coordinate the compactions of the database, and run them, until `stop` is set or the call is interrupted.

        With `options.worker` None it only coordinates, and `run_worker` in other processes runs the jobs. `scheduler`
        and `executor` replace the policy in `options` and the merging in this process.

        Raises:
            Closed: a newer coordinator has fenced this one.
            InvalidRequest: there is no database.

        """
        options = options or CompactorOptions()
        board = self._board(options)
        if options.worker is not None and executor is None:
            executor = self._executor(options.worker, merge_operator, compaction_filter, board.metrics)
        self._run_until(
            stop,
            Compactor(
                board,
                coordinate=options,
                work=options.worker,
                executor=executor,
                scheduler=scheduler,
                survey=None if scheduler is not None else new_survey(options, self._store, self._paths),
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
        """Run the jobs of a coordinator in another process, until `stop` is set or the call is interrupted.

        Any number of workers may serve one database. The coordinator may be SlateDB's.

        Raises:
            InvalidRequest: there is no database.

        """
        work = options or CompactionWorkerOptions()
        board = self._board(CompactorOptions())
        executor = executor or self._executor(work, merge_operator, compaction_filter, board.metrics)
        self._run_until(stop, Compactor(board, coordinate=None, work=work, executor=executor))

    def _planner(self, options: CompactorOptions) -> Planner:
        """The jobs that the policy proposes, which first reads what it must know of the runs."""
        survey = new_survey(options, self._store, self._paths)
        scheduler = new_scheduler(options, survey)

        def plan(manifest: Manifest, jobs: Compactions) -> Sequence[Spec]:
            while survey is not None and survey.read(manifest):
                pass
            return scheduler.plan(manifest, jobs)

        return plan

    def _run_until(self, stop: Event | None, compactor: Compactor) -> None:
        compactor.board.fetch_manifest()  # raises here, in the caller's thread, if there is no database
        stopping = Event() if stop is None else stop
        compactor.start()
        try:
            while not stopping.wait(_POLL_S) and not compactor.ended:
                pass
        finally:
            compactor.stop()
        compactor.raise_failure()

    def _board(self, options: CompactorOptions) -> Board:
        manifests = ManifestStore(self._store, self._paths, clock=self._clock, ids=self._ids)
        timeout_s = options.manifest_update_timeout.total_seconds()
        return Board(
            manifests,
            self._compactions_store(),
            clock=self._clock,
            ids=self._ids,
            update_timeout_s=timeout_s,
        )

    def _executor(
        self,
        work: CompactionWorkerOptions,
        merge_operator: MergeOperator | None,
        compaction_filter: CompactionFilterFactory | None,
        metrics: Metrics,
    ) -> LocalExecutor:
        check_operator(merge_operator)
        codec = Codec.NONE if work.compression_codec is None else Codec[work.compression_codec.upper()]
        return LocalExecutor(
            self._store,
            self._paths,
            Merging(
                work=work,
                sst=SstOptions(codec=codec, min_filter_keys=work.min_filter_keys),
                merge_operator=merge_operator,
                compaction_filter=compaction_filter,
            ),
            ids=self._ids,
            metrics=metrics,
        )

    def _compactions_store(self) -> CompactionsStore:
        return CompactionsStore(self._store, self._paths, clock=self._clock, ids=self._ids)

    def _never_coordinated(self) -> InvalidRequest:
        return InvalidRequest(
            f"no compactions file of {self._paths.root!r}: no coordinator was ever started; open the database with "
            "its compactor enabled, run a compactor beside it, or compact it now with Admin.compact"
        )
