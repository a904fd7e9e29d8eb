"""`flagstone.open_reader` and `DbReader`: reading a database that another process may be writing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self
from uuid import UUID

from flagstone.clones.checkpoint import find_checkpoint
from flagstone.clones.origin import load_origin, refuse_destroyed
from flagstone.config import ReaderSettings
from flagstone.db.collections import HasCollections
from flagstone.db.exit import UnclosedReader, watch
from flagstone.db.opening import suggests_options, warn_if_interpreted
from flagstone.db.read_methods import ReadContext, Reads
from flagstone.db.reader.as_of import AsOf, FormerState, check_as_of
from flagstone.db.reader.follower import Follower, ReaderParts, WalTail
from flagstone.db.reader.reader_checkpoint import (
    FixedCheckpoint,
    ManagedCheckpoint,
    NoCheckpoint,
    ReaderCheckpoint,
)
from flagstone.db.reporting import RequestReport
from flagstone.db.status import ReaderStatus
from flagstone.errors import InvalidRequest
from flagstone.lsm.merge_operator import MergeOperator, check_operator
from flagstone.lsm.segments import SegmentExtractor
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.read.view import ReadView
from flagstone.runtime import metric_names, prometheus
from flagstone.runtime.budget import process_budget
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.metrics import Metric, Metrics
from flagstone.runtime.pool import shared_pool
from flagstone.sst.cache import SstCache
from flagstone.sst.store import SstStore
from flagstone.store.caching import cached_on_disk
from flagstone.store.counting import CountingStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.store.remote_options import OptionValue
from flagstone.store.resolve import StoreLike, resolve_database, resolve_wal_store
from flagstone.store.retrying import RetryingStore, RetryPolicy
from flagstone.write.key_check import KeyRanges

ReaderMode = Literal["managed", "latest"]


class DbReader(Reads, HasCollections):
    """A database open for reading only. Safe to use from many threads; close it, or use it as a context manager.

    Shows what was on the store at the last poll: all of it is durable, so `durable_only` and `dirty` make no
    difference. While the store is out of reach, reads from memory still work, and polling resumes by itself. It is a
    `collections.abc.Mapping` from keys to values: `reader[key]`, `reader[b"a":b"b"]`, `for key in reader`.
    """

    def __init__(self, follower: Follower, parts: ReaderParts) -> None:
        self._follower = follower
        self._metrics = parts.metrics
        self._report = RequestReport(parts.metrics, clock=parts.clock, price_list=parts.settings.price_list)
        self._failing = parts.metrics.gauge(metric_names.READER_POLL_FAILING)
        self._context = ReadContext(
            parts.ssts,
            follower,
            clock=parts.clock,
            merge_operator=parts.merge_operator,
            key_ranges=parts.key_ranges,
        )
        self._watch = watch(self._context, UnclosedReader(follower))

    def refresh(self) -> None:
        """Show what is on the store now, without waiting for the next poll. A fixed checkpoint shows the same again.

        Raises:
            Unavailable: the store did not answer; the reader still shows the former state.

        """
        self._follower.refresh()

    def status(self) -> ReaderStatus:
        """What the reader shows and how it follows the database, as plain values."""
        self._measure()
        return ReaderStatus({**self._follower.status(), "cost": self._report.cost()})

    def metrics(self) -> dict[str, Any]:
        """All metrics under SlateDB's names."""
        return {metric.key: metric.value for metric in self._measure()}

    def metrics_text(self, *, labels: Mapping[str, str] | None = None) -> str:
        """All metrics as Prometheus scrapes them; `labels` are added to every sample. Makes no request."""
        return prometheus.render(self._measure(), labels=labels)

    def _measure(self) -> list[Metric]:
        self._context.ssts.report()
        self._report.update_reads(gets=self._context.gets, scans=self._context.scans)
        if not self.closed:  # a closed reader keeps its last figures
            self._report.update_shape(self._follower.state.manifest)
        self._failing.set(int(self._follower.poll_failing))
        return self._metrics.snapshot()

    def manifest(self) -> Manifest:
        """The manifest that the reader shows."""
        return self._follower.state.manifest.value

    def _newest_read_point(self) -> tuple[ReadView, int]:
        """The view that a read takes now, and the last sequence number that it shows."""
        return self._read_point(durable_only=False, dirty=False)

    @property
    def closed(self) -> bool:
        """Whether the reader was closed; every call then raises `Closed`."""
        return self._follower.closed

    def close(self) -> None:
        """Stop following and delete the checkpoint this reader holds. Closing twice is fine.

        If the reader is dropped without closing it, it is closed in the background, with a `ResourceWarning`. A killed
        process leaves a checkpoint behind, which expires.
        """
        try:
            self._follower.close()
        except Exception:
            self._watch.end()
            raise
        self._watch.end()  # not after an interrupt: the exit of the process then closes the reader

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        status = self._follower.status()
        return f"DbReader({status['path']!r}, store={status['store']!r}, {status['mode']}, {status['state']})"

    def _facts(self) -> dict[str, Any]:
        return self.status()

    def _read_point(self, *, durable_only: bool, dirty: bool) -> tuple[ReadView, int]:  # noqa: ARG002 - all is durable
        state = self._follower.state
        return state.view, state.seq


@suggests_options("flagstone.open_reader")
def open_reader(
    path: str | os.PathLike[str],
    *,
    store: StoreLike | None = None,
    store_options: Mapping[str, OptionValue] | None = None,
    wal_store: StoreLike | None = None,
    checkpoint: UUID | str | None = None,
    as_of: AsOf | None = None,
    mode: ReaderMode = "managed",
    merge_operator: MergeOperator | None = None,
    segment_extractor: SegmentExtractor | None = None,
    settings: ReaderSettings | Mapping[str, Any] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    ids: Ids = SYSTEM_IDS,
) -> DbReader:
    """Open a database for reading, beside its writer. Addresses are those of `flagstone.open`.

    `managed` follows the database and holds what it shows with a reader checkpoint, so that garbage collection keeps
    it. `latest` also follows the database but writes nothing: use it with read-only access to the store. With
    `checkpoint`, an id or a name, the reader shows that checkpoint (the newest of the name), writes nothing and does
    not follow. The reader reads the rows that are only in the WAL into memory, unless `settings.skip_wal_replay`; each
    memtable takes up to `settings.max_memtable_bytes`.

    With `as_of` the reader shows a former state and does not follow: everything up to a sequence number, or
    everything created up to a datetime. It begins with the SSTs of the latest manifest or of a checkpoint (only of
    `checkpoint`, if one is given) and reads the WAL up to that moment into memory. It can show the moment of each
    checkpoint, and every later moment for which the WAL is still there (a retention checkpoint, `WalReader(pin=...)`,
    keeps it). It refuses a moment whose versions may have been dropped; it never shows a part of it. A time before the
    SSTs of all these states is rounded down to about a minute (see `Admin.sequence_at`). Rows that have expired by now
    are hidden, whatever the moment.

    Raises:
        InvalidRequest: there is no database or no such checkpoint, an argument does not fit it, or the moment is no
            longer stored.
        Unavailable: the store did not answer.

    """
    if mode not in ("managed", "latest"):
        raise InvalidRequest(f"mode is 'managed' or 'latest', not {mode!r}")
    warn_if_interpreted()
    settings = ReaderSettings.of(settings)
    parts = prepare_reader(
        path,
        store=store,
        store_options=store_options,
        wal_store=wal_store,
        merge_operator=merge_operator,
        segment_extractor=segment_extractor,
        settings=settings,
        clock=clock,
        ids=ids,
    )
    manifests, lifetime = parts.manifests, settings.checkpoint_lifetime
    checkpoint_id = None
    if checkpoint is not None:
        now_s = clock.now_ms() // 1000
        checkpoint_id = find_checkpoint(
            checkpoint, lambda: manifests.require_latest().value, now_s=now_s, newest=True
        )
    if as_of is not None:
        former = FormerState(parts, check_as_of(as_of, now_ms=clock.now_ms()))
        hold = mode == "managed" and checkpoint is None
        return DbReader(former.open(only=checkpoint_id, hold=hold), parts)
    shown: ReaderCheckpoint
    if checkpoint_id is not None:
        shown = FixedCheckpoint(manifests, checkpoint_id)
    elif mode == "latest":
        shown = NoCheckpoint(manifests)
    else:
        shown = ManagedCheckpoint(manifests, lifetime=lifetime, clock=clock, ids=ids)
    tail = None if settings.skip_wal_replay else parts.tail
    follower = parts.follow(shown, tail, polls=checkpoint_id is None)
    follower.start()
    return DbReader(follower, parts)


def prepare_reader(
    path: str | os.PathLike[str],
    *,
    store: StoreLike | None,
    store_options: Mapping[str, OptionValue] | None,
    wal_store: StoreLike | None,
    merge_operator: MergeOperator | None,
    segment_extractor: SegmentExtractor | None,
    settings: ReaderSettings,
    clock: Clock,
    ids: Ids,
) -> ReaderParts:
    """Open the stores and caches of a reader. Raises `InvalidRequest` when there is no database."""
    found, root = resolve_database(path, store, store_options)
    if not root:
        raise InvalidRequest(f"{os.fspath(path)!r} names a whole store; a database needs a path inside it")
    check_operator(merge_operator)
    metrics, paths, pool = Metrics(), DbPaths(root), shared_pool()
    policy = RetryPolicy(attempts=_attempts(settings.object_store_max_retries))

    def with_retries_and_metrics(plain: ObjectStore) -> ObjectStore:
        retrying = (
            plain
            if isinstance(plain, RetryingStore)
            else RetryingStore(plain, policy=policy, clock=clock, ids=ids, metrics=metrics)
        )
        return CountingStore(retrying, component="reader", metrics=metrics)

    main = with_retries_and_metrics(found)
    manifests = ManifestStore(main, paths, metrics=metrics, clock=clock, ids=ids)
    requests: tuple[Callable[[], Any], ...] = (manifests.latest, partial(load_origin, main, paths))
    latest, origin = pool.map_ordered(lambda request: request(), requests)
    if latest is None:
        raise InvalidRequest(f"no database at {root!r} in {main.url}; check the path, or create it first")
    refuse_destroyed(latest.value, main, paths)
    memory = None if settings.memory_budget is None else process_budget(settings.memory_budget)
    own = SstCache(capacity_bytes=settings.block_cache_bytes + settings.meta_cache_bytes, metrics=metrics)
    cache = own if memory is None else memory.share_cache(own)
    tail = WalTail(
        main
        if wal_store is None
        else with_retries_and_metrics(resolve_wal_store(wal_store, main, store_options)),
        paths,
        max_memtable_bytes=settings.max_memtable_bytes,
        pool=pool,
    )
    on_disk = cached_on_disk(main, settings.object_store_cache_options, metrics=metrics)
    return ReaderParts(
        store=main,
        paths=paths,
        manifests=manifests,
        ssts=SstStore(on_disk, paths, cache=cache, pool=pool, metrics=metrics, memory=memory),
        tail=tail,
        memory=memory,
        metrics=metrics,
        settings=settings,
        clock=clock,
        ids=ids,
        merge_operator=merge_operator,
        extractor=segment_extractor,
        key_ranges=None if origin is None or origin.writable is None else KeyRanges(origin.writable),
    )


def _attempts(max_retries: int | None) -> int | None:
    return None if max_retries is None else max_retries + 1
