"""`flagstone.open_reader` and `DbReader`: reading a database that another process may be writing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self
from uuid import UUID

from flagstone.config import ReaderSettings
from flagstone.db.as_of import FormerState
from flagstone.db.exit import UnclosedReader, watch
from flagstone.db.following import Following, LogTail
from flagstone.db.pins import FixedPin, LatestPin, ManagedPin, Pin
from flagstone.db.reading import ReadPlace, Reads
from flagstone.db.reporting import RequestReport
from flagstone.db.views import Views
from flagstone.errors import InvalidRequest
from flagstone.lsm.merge_operator import MergeOperator
from flagstone.lsm.segments import SegmentExtractor
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.stores import ManifestStore
from flagstone.read.view import ReadView
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.pool import shared_pool
from flagstone.store.caching import cached_on_disk
from flagstone.store.counting import CountingStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.store.remote_options import OptionValue
from flagstone.store.resolve import StoreLike, resolve_database, resolve_wal_store
from flagstone.store.retrying import RetryingStore, RetryPolicy
from flagstone.table.cache import TableCache
from flagstone.table.table_store import TableStore
from flagstone.views.checkpoint import parse_checkpoint_id
from flagstone.views.history import AsOf, check_as_of
from flagstone.views.marks import load_origin, refuse_destroyed
from flagstone.write.range_gate import KeyRanges

ReaderMode = Literal["managed", "latest"]


class DbReader(Reads):
    """A database open for reading only. Safe to use from many threads; close it, or use it as a context manager.

    Shows what is on the store as of the last poll: all of it is durable, so `durable_only` and `dirty` make no
    difference. `reader[key]` and `key in reader` work as on a dictionary. When the store is out of reach, reads
    of what is in memory go on, and polling resumes by itself.
    """

    def __init__(
        self,
        following: Following,
        metrics: Metrics,
        *,
        clock: Clock,
        merge_operator: MergeOperator | None,
        key_ranges: KeyRanges | None = None,
    ) -> None:
        self._following = following
        self._metrics = metrics
        self._report = RequestReport(metrics)
        self._place = ReadPlace(
            following.views.tables,
            clock=clock,
            merge_operator=merge_operator,
            refresh=following.poll,
            view=lambda: following.state.view,
            retained_seq=lambda: following.state.manifest.value.recent_snapshot_min_seq,
            key_ranges=key_ranges,
        )
        self._watch = watch(self._place, UnclosedReader(following))

    def refresh(self) -> None:
        """Show what is on the store now, without waiting for the next poll. A fixed checkpoint shows the same again.

        Raises:
            Unavailable: the store did not answer; what was shown before still is.

        """
        self._following.poll()

    def status(self) -> dict[str, Any]:
        """What an operator wants to know, as plain values."""
        return self._following.status()

    def metrics(self) -> dict[str, Any]:
        """All metrics under SlateDB's names."""
        self._place.tables.report()
        self._report.update_reads(gets=self._place.gets, scans=self._place.scans)
        return self._metrics.as_dict()

    def manifest(self) -> Manifest:
        """The manifest that is shown."""
        return self._following.state.manifest.value

    @property
    def closed(self) -> bool:
        """Whether it was closed; every call then raises `Closed`."""
        return self._following.closed

    def close(self) -> None:
        """Stop following and delete the checkpoint this reader holds. Closing twice is fine.

        A reader that is collected without it is closed in the background, with a `ResourceWarning`. A process that is
        killed leaves a checkpoint behind, which expires.
        """
        try:
            self._following.close()
        except Exception:
            self._watch.end()
            raise
        self._watch.end()  # not after an interrupt: then the exit goes on with closing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        status = self._following.status()
        return f"DbReader({status['path']!r}, store={status['store']!r}, {status['mode']}, {status['state']})"

    def _look(self, *, durable_only: bool, dirty: bool) -> tuple[ReadView, int]:  # noqa: ARG002 - all is durable
        state = self._following.state
        return state.view, state.seq


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
    settings: ReaderSettings | None = None,
    clock: Clock = SYSTEM_CLOCK,
    ids: Ids = SYSTEM_IDS,
) -> DbReader:
    """Open a database for reading; its writer does not notice. Addresses are those of `flagstone.open`.

    `managed` follows the database and holds what it shows with a checkpoint of its own, so that garbage collection
    spares it. `latest` follows it, too, but writes nothing, for those who may only read the store. With
    `checkpoint` the reader shows what that one pins, writes nothing and does not follow. What the log holds
    beyond the tables is read into memory, unless `settings.skip_wal_replay`; each memtable takes up to
    `settings.max_memtable_bytes`.

    With `as_of` the reader shows a former state and does not follow: everything up to a sequence number, or
    everything created up to a datetime. It begins with the tables of the latest manifest or of a checkpoint (only of
    `checkpoint`, if one is given) and adds the log up to that moment, which it reads into memory. So what can be had
    is every moment from the oldest checkpoint on for which the log is still there (a `WalReader` with a pin keeps
    it), and that of each checkpoint itself. A moment whose versions may have been dropped is refused, never shown
    in part. A time before the tables of all these states is rounded down to a minute or so (see
    `Admin.sequence_at`). Rows that have expired by now are hidden, whatever the moment.

    Raises:
        InvalidRequest: there is no database or no such checkpoint, an argument does not fit it, or the moment is
            not to be had any more.
        Unavailable: the store did not answer.

    """
    if mode not in ("managed", "latest"):
        raise InvalidRequest(f"mode is 'managed' or 'latest', not {mode!r}")
    settings = settings or ReaderSettings()
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
    checkpoint_id = None if checkpoint is None else parse_checkpoint_id(checkpoint)
    if as_of is not None:
        former = FormerState(manifests, check_as_of(as_of, now_ms=clock.now_ms()), clock=clock, ids=ids)
        hold = mode == "managed" and checkpoint is None
        following = former.open(parts.follow, parts.tail, only=checkpoint_id, lifetime=lifetime, hold=hold)
        return parts.reader(following)
    pin: Pin
    if checkpoint_id is not None:
        pin = FixedPin(manifests, checkpoint_id)
    elif mode == "latest":
        pin = LatestPin(manifests)
    else:
        pin = ManagedPin(manifests, lifetime=lifetime, clock=clock, ids=ids)
    tail = None if settings.skip_wal_replay else parts.tail
    following = parts.follow(pin, tail, polls=checkpoint_id is None)
    following.start()
    return parts.reader(following)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderParts:
    """What a reader is made of, before it is decided what it shows."""

    store: ObjectStore
    paths: DbPaths
    manifests: ManifestStore
    tables: TableStore
    tail: LogTail
    metrics: Metrics
    settings: ReaderSettings
    clock: Clock
    merge_operator: MergeOperator | None
    extractor: SegmentExtractor | None
    key_ranges: KeyRanges | None

    def follow(
        self, pin: Pin, tail: LogTail | None, *, max_seq: int | None = None, polls: bool = True
    ) -> Following:
        """The part that shows what `pin` says, not started yet."""
        interval_s = self.settings.manifest_poll_interval.total_seconds()
        return Following(
            self.store,
            pin,
            Views(self.tables),
            tail,
            paths=self.paths,
            extractor=self.extractor,
            clock=self.clock,
            poll_interval_s=interval_s if polls else None,
            max_seq=max_seq,
        )

    def reader(self, following: Following) -> DbReader:
        """The face of a reader that was started."""
        return DbReader(
            following,
            self.metrics,
            clock=self.clock,
            merge_operator=self.merge_operator,
            key_ranges=self.key_ranges,
        )


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
    """Everything up to the decision what to show. Raises `InvalidRequest` when there is no database."""
    found, root = resolve_database(path, store, store_options)
    if not root:
        raise InvalidRequest(f"{os.fspath(path)!r} names a whole store; a database needs a path inside it")
    metrics, paths, pool = Metrics(), DbPaths(root), shared_pool()
    policy = RetryPolicy(attempts=_attempts(settings.object_store_max_retries))

    def dressed(plain: ObjectStore) -> ObjectStore:
        patient = (
            plain
            if isinstance(plain, RetryingStore)
            else RetryingStore(plain, policy=policy, clock=clock, ids=ids, metrics=metrics)
        )
        return CountingStore(patient, component="reader", metrics=metrics)

    main = dressed(found)
    manifests = ManifestStore(main, paths, metrics=metrics, clock=clock, ids=ids)
    looks: tuple[Callable[[], Any], ...] = (
        manifests.latest,
        partial(load_origin, main, paths),
    )
    latest, origin = pool.map_ordered(lambda look: look(), looks)
    if latest is None:
        raise InvalidRequest(f"no database at {root!r} in {main.url}; check the path, or create it first")
    refuse_destroyed(latest.value, main, paths)
    cache = TableCache(capacity_bytes=settings.block_cache_bytes + settings.meta_cache_bytes, metrics=metrics)
    tail = LogTail(
        main if wal_store is None else dressed(resolve_wal_store(wal_store, main, store_options)),
        paths,
        max_memtable_bytes=settings.max_memtable_bytes,
        pool=pool,
    )
    on_disk = cached_on_disk(main, settings.object_store_cache_options, metrics=metrics)
    return ReaderParts(
        store=main,
        paths=paths,
        manifests=manifests,
        tables=TableStore(on_disk, paths, cache=cache, pool=pool, metrics=metrics),
        tail=tail,
        metrics=metrics,
        settings=settings,
        clock=clock,
        merge_operator=merge_operator,
        extractor=segment_extractor,
        key_ranges=None if origin is None or origin.writable is None else KeyRanges(origin.writable),
    )


def _attempts(max_retries: int | None) -> int | None:
    return None if max_retries is None else max_retries + 1
