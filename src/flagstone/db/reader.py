"""`flagstone.open_reader` and `DbReader`: reading a database that another process may be writing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self
from uuid import UUID

from flagstone.config import ReaderSettings
from flagstone.db.following import Following, LogTail
from flagstone.db.pins import FixedPin, LatestPin, ManagedPin, Pin
from flagstone.db.reading import ReadPlace, Reads
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

ReaderMode = Literal["managed", "latest"]


class DbReader(Reads):
    """A database open for reading only. Safe to use from many threads; close it, or use it as a context manager.

    Shows what is on the store as of the last poll: all of it is durable, so `durable_only` and `dirty` make no
    difference. `reader[key]` and `key in reader` work as on a dictionary. When the store is out of reach, reads
    of what is in memory go on, and polling resumes by itself.
    """

    def __init__(
        self, following: Following, metrics: Metrics, *, clock: Clock, merge_operator: MergeOperator | None
    ) -> None:
        self._following = following
        self._metrics = metrics
        self._place = ReadPlace(
            following.views.tables,
            clock=clock,
            merge_operator=merge_operator,
            refresh=following.poll,
            view=lambda: following.state.view,
        )

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
        return self._metrics.as_dict()

    def manifest(self) -> Manifest:
        """The manifest that is shown."""
        return self._following.state.manifest.value

    @property
    def closed(self) -> bool:
        return self._following.closed

    def close(self) -> None:
        """Stop following and delete the checkpoint this reader holds. Closing twice is fine.

        A process that ends without it leaves a checkpoint behind, which expires.
        """
        self._following.close()

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

    Raises:
        InvalidRequest: there is no database or no such checkpoint, or an argument does not fit it.
        Unavailable: the store did not answer.

    """
    if mode not in ("managed", "latest"):
        raise InvalidRequest(f"mode is 'managed' or 'latest', not {mode!r}")
    found, root = resolve_database(path, store, store_options)
    if not root:
        raise InvalidRequest(f"{os.fspath(path)!r} names a whole store; a database needs a path inside it")
    settings = settings or ReaderSettings()
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
    if manifests.latest() is None:
        raise InvalidRequest(f"no database at {root!r} in {main.url}; check the path, or create it first")
    cache = TableCache(capacity_bytes=settings.block_cache_bytes + settings.meta_cache_bytes, metrics=metrics)
    tail = LogTail(
        main if wal_store is None else dressed(resolve_wal_store(wal_store, main, store_options)),
        paths,
        max_memtable_bytes=settings.max_memtable_bytes,
        pool=pool,
    )
    pin: Pin
    if checkpoint is not None:
        pin = FixedPin(manifests, _checkpoint_id(checkpoint))
    elif mode == "latest":
        pin = LatestPin(manifests)
    else:
        pin = ManagedPin(manifests, lifetime=settings.checkpoint_lifetime, clock=clock, ids=ids)
    on_disk = cached_on_disk(main, settings.object_store_cache_options, metrics=metrics)
    following = Following(
        main,
        pin,
        Views(TableStore(on_disk, paths, cache=cache, pool=pool, metrics=metrics)),
        None if settings.skip_wal_replay else tail,
        paths=paths,
        extractor=segment_extractor,
        clock=clock,
        poll_interval_s=None if checkpoint is not None else settings.manifest_poll_interval.total_seconds(),
    )
    following.start()
    return DbReader(following, metrics, clock=clock, merge_operator=merge_operator)


def _attempts(max_retries: int | None) -> int | None:
    return None if max_retries is None else max_retries + 1


def _checkpoint_id(checkpoint: UUID | str) -> UUID:
    if isinstance(checkpoint, UUID):
        return checkpoint
    try:
        return UUID(checkpoint)
    except (ValueError, AttributeError, TypeError):
        raise InvalidRequest(f"a checkpoint is named by its UUID, not {checkpoint!r}") from None
