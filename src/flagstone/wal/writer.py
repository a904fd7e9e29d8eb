"""The WAL writer: writes committed rows to the next WAL file, after the flush interval or when a caller waits.

WAL files are written one after the other. A caller that waits for durability makes the writer write the next file at
once, with all rows committed meanwhile (group commit). If the WAL id is taken, a newer writer has fenced this one: the
service stops, and no row that was not written is reported as durable.

On a disk or in memory, waking the thread of the service takes as long as writing the file. There a caller that waits
writes the file in its own thread, unless another thread is writing; then the service writes the next file, with the
rows of all callers that came meanwhile. A caller that is interrupted (Ctrl-C) leaves its file in the state of the
writer, and the next write of the WAL begins with that file. A caller does not retry: after an error of the store the
service does.

A WAL file is created only if its id is free. A newer writer's fence takes that id and so stops a replaced writer. If
garbage collection has deleted the fence, because replay starts behind it, the create succeeds and no replay ever reads
the rows. Therefore a writer reads the manifest after the create, before it reports anything as durable: if the manifest
names no newer writer, there was no fence that could have been deleted.

Reading the manifest costs two small requests, so the writer does not do it after every file. A result is trusted for a
while: a fence that did not exist then is not collected before it has a minimum age (a minute here, five by default),
and a faster writer must have met it. This assumes clocks of about the same speed. Where machines may be paused without
their clocks noticing, a `limit_s` of 0 reads the manifest after every file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import inf
from typing import Any, Final, Protocol

from flagstone.config import Settings
from flagstone.errors import Closed, FlagstoneError, Unavailable
from flagstone.format.codec import Codec
from flagstone.format.sst_info import SstType
from flagstone.runtime import metric_names as names
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.operations import Operation
from flagstone.runtime.service import Supervisor
from flagstone.runtime.sync import Lock
from flagstone.sst.builder import SstBuilder, SstOptions
from flagstone.store.paths import DbPaths
from flagstone.store.port import NEARBY, ObjectExists, ObjectStore
from flagstone.types import WalId
from flagstone.wal.uploads import FIRST_PAUSE_S, LONGEST_PAUSE_S, Uploads

_log = logging.getLogger("flagstone.wal")

Attempt = Callable[[Callable[[], object], str], None]
"""Makes a request for the object at a path, once or until it succeeds."""

_STREAM_BYTES: Final = 1 << 18
"""One step fills half of the buffer."""
_LARGE_STEP_BYTES: Final = 1 << 20
_LARGE_CHUNKS: Final = 16
"""A span of so many chunks of a memtable, 4 MiB, goes into the file in larger steps: after each step other threads run,
and if they are busy writing, the file takes longer and has to hold more rows.
"""
_IDLE_S: Final = 3600.0


TRUSTED_S: Final = 20.0
"""How long one read of the manifest is trusted; a third of the youngest age at which fences are collected."""


def trusted_s(settings: Settings) -> float:
    """How long a writer with these settings trusts one read of the manifest; 0 if its own collector deletes fences."""
    collector = settings.garbage_collector_options
    fences = None if collector is None else collector.wal_fence_options
    return TRUSTED_S if fences is None or fences.dry_run else 0.0


class Refreshing(Protocol):
    """The writer's manifest."""

    def refresh(self) -> None:
        """Read the newest manifest. Raises `Closed` when a newer writer owns the database."""
        ...


class Ownership:
    """Reads the manifest again if the last read is too old."""

    def __init__(self, manifest: Refreshing, *, clock: Clock, limit_s: float = TRUSTED_S) -> None:
        self._manifest = manifest
        self._clock = clock
        self._limit_s = limit_s
        self._confirmed_at: tuple[float, int] | None = None

    def ensure(self) -> None:
        """Return if this process was the writer all the time until now. Call it after a WAL file was created.

        Raises:
            Closed: a newer writer owns the database; no replay may ever read the file that was just created.
            Unavailable: the manifest cannot be read; try again before reporting anything.

        """
        # Before the read: the result holds for some moment after this one.
        asked_at = (self._clock.monotonic(), self._clock.now_ms())
        if self._confirmed_at is not None and self._elapsed_s(self._confirmed_at, asked_at) < self._limit_s:
            return
        self._manifest.refresh()
        self._confirmed_at = asked_at

    def lost(self) -> Closed:
        """The error for a WAL id that another writer took, with the name of that writer if the manifest has it."""
        try:
            self._manifest.refresh()
        except Closed as fenced:
            return fenced
        return Closed("another writer has taken the next WAL id of this one", reason="fenced")

    @staticmethod
    def _elapsed_s(since: tuple[float, int], now: tuple[float, int]) -> float:
        # A suspended machine may not count that time as elapsed. Its wall clock is corrected sooner.
        return max(now[0] - since[0], (now[1] - since[1]) / 1000)


class Span(Protocol):
    """Rows of one memtable, in commit order."""

    @property
    def memtable(self) -> Any: ...

    @property
    def start(self) -> tuple[int, int]: ...

    @property
    def stop(self) -> tuple[int, int]: ...


class Sealed(Protocol):
    """The content of one WAL file, and the token that identifies it on the store."""

    @property
    def wal_id(self) -> WalId: ...

    @property
    def spans(self) -> Sequence[Any]: ...

    @property
    def last_seq(self) -> int: ...

    @property
    def token(self) -> str: ...


class WalSource(Protocol):
    """The state whose rows are written."""

    last_seq: int

    def unfinished_wal(self) -> Any:
        """The oldest sealed file that may not be on the store, or None."""
        ...

    def seal_wal(self, new_token: Callable[[], str]) -> Any:
        """The next file, with all rows that no other file has, or None without such rows."""
        ...

    def note_logged(self, file: Any) -> None:
        """The oldest sealed file is on the store, and so are all its rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WalOptions:
    """How WAL files are written: how many at once, and when a request is repeated while it is under way.

    Without `max_retries` retries never end.
    """

    codec: Codec
    flush_interval_s: float | None
    max_retries: int | None
    parallel: int = 1
    hedge_after_s: float | None = None


class WalWriter:
    """A background service. `request` and `arm` may be called from any thread and never block.

    `supervisor` is woken when there is something to write.
    """

    name = "wal"

    def __init__(
        self,
        store: ObjectStore,
        paths: DbPaths,
        source: WalSource,
        ownership: Ownership,
        options: WalOptions,
        *,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        supervisor: Supervisor,
    ) -> None:
        self._store = store
        self._paths = paths
        self._source = source
        self._ownership = ownership
        self._uploads = (
            None
            if options.parallel == 1 and options.hedge_after_s is None
            else Uploads(
                store,
                limit=options.parallel,
                hedge_after_s=options.hedge_after_s,
                max_retries=options.max_retries,
                clock=clock,
                ids=ids,
                wake=lambda: supervisor.wake(self),
            )
        )
        self._callers_write = self._uploads is None and store.url.startswith(NEARBY)
        self._options = SstOptions(codec=options.codec)
        self._flush_interval_s = options.flush_interval_s
        self._max_retries = options.max_retries
        self._clock = clock
        self._ids = ids
        self._supervisor = supervisor
        self._writing = Lock()
        """Held while a thread writes a file."""
        self._lock = Lock()
        self._requested = False
        self._due_at: float | None = None
        self._serving = False
        """Whether the service writes files, one after the other, for callers that wait."""
        self._files = 0
        """How many files were written."""
        self._wakes_at = inf
        """When the service wakes up by itself."""
        self._stream = bytearray(_STREAM_BYTES)
        self._builder: SstBuilder | None = None
        self._data = BytesIO()
        self._flushes = metrics.counter(names.WAL_BUFFER_FLUSHES)
        self._requests = metrics.counter(names.WAL_BUFFER_FLUSH_REQUESTS)
        self._flush_bytes = metrics.counter(names.WAL_FLUSH_BYTES)
        self._uploading = Operation(
            metrics.histogram(names.DB_OPERATION_SECONDS, op="wal_upload"), "wal_upload"
        )

    def request(self) -> None:
        """Write all committed rows as soon as the file under way is done."""
        self._requests.add()
        with self._lock:
            self._requested = True
        self._supervisor.wake(self)

    def arm(self) -> None:
        """Write committed rows when the flush interval has passed."""
        if self._flush_interval_s is None:
            return
        with self._lock:
            if self._due_at is None:
                self._due_at = self._clock.monotonic() + self._flush_interval_s
            too_late = self._due_at < self._wakes_at
        if too_late:
            self._supervisor.wake(self)

    def run_once(self) -> float | None:
        """Write one file if it is time; return the seconds until the next step."""
        if self._uploads is not None:
            return self._run_uploads(self._uploads)
        with self._lock:
            if not self._requested and (wait_s := self._plan_wait()) > 0:
                return wait_s
            self._requested, self._due_at = False, None
            self._serving = True
        with self._writing:
            self.write_file(self._with_retries)
        with self._lock:
            self._serving = self._requested
            return self._plan_wait()

    def write_now(self) -> None:
        """Write all committed rows in this thread, or request it if another thread is writing or the store is far away.

        Returns also if the rows could not be written: then the service continues, or has failed.
        """
        with self._lock:
            files = self._files
            alone = not (self._requested or self._serving or self._writing.locked())
        if alone and self._callers_write:
            try:
                with self._writing:
                    # Not if another caller was faster: many callers are better off with a file of the service.
                    if files == self._files:
                        self.write_file(_once)
                        return
            except Unavailable:
                pass
            except FlagstoneError as error:
                self._supervisor.fail(self, error)
                return
        self.request()

    def close(self) -> None:
        """Send no more files."""
        if self._uploads is not None:
            self._uploads.close()

    def _run_uploads(self, uploads: Uploads) -> float:
        """Finish the files that are on the store, in order; send the next one if it is time."""
        try:
            while (upload := uploads.take_created()) is not None:
                self._uploading.record(self._clock.monotonic() - upload.started_at)
                self._with_retries(self._ownership.ensure, upload.path)
                self._finish(upload.file, len(upload.data))
        except ObjectExists:
            raise self._ownership.lost() from None
        resend_s, start_s = uploads.send_more(), uploads.start_in_s()
        with self._lock:
            wait_s = self._plan_wait()
            start = wait_s <= 0 and start_s <= 0
            if start:
                self._requested, self._due_at = False, None
        if start:
            file = self._source.seal_wal(self._ids.token)
            if file is not None:
                uploads.start(file, self._paths.wal(file.wal_id), self._encode(file.spans), file.token)
            return 0.0
        with self._lock:
            # A file that must wait for others is sent when one of them is finished, which wakes the service.
            wait_s = min(_IDLE_S, resend_s, max(self._plan_wait(), start_s))
            self._wakes_at = self._clock.monotonic() + wait_s
            return wait_s

    def _plan_wait(self) -> float:
        """Seconds until the next step. The caller holds the lock."""
        now = self._clock.monotonic()
        wait_s = 0.0 if self._requested else _IDLE_S if self._due_at is None else max(0.0, self._due_at - now)
        self._wakes_at = now + wait_s
        return wait_s

    def write_file(self, attempt: Attempt) -> None:
        """Write all committed rows to one file, if there are any; before it, a file that was interrupted.

        A crash before the file exists loses the rows, none of which was reported as durable. After that, replay finds
        them. `attempt` decides how often a request is tried. Raises `Closed` when a newer writer owns the database.
        """
        last_seq = self._source.last_seq
        written = -1
        while written < last_seq:
            file = self._source.unfinished_wal() or self._source.seal_wal(self._ids.token)
            if file is None:
                return
            self._write(file, attempt)
            written = file.last_seq

    def _write(self, file: Sealed, attempt: Attempt) -> None:
        path, data = self._paths.wal(file.wal_id), self._encode(file.spans)
        try:
            with self._uploading.measure():
                attempt(lambda: self._store.put_if_absent(path, data, token=file.token), path)
        except ObjectExists:
            raise self._ownership.lost() from None
        attempt(self._ownership.ensure, path)
        self._finish(file, len(data))

    def _finish(self, file: Sealed, size: int) -> None:
        self._files += 1
        self._flushes.add()
        self._flush_bytes.add(size)
        self._source.note_logged(file)

    def _encode(self, spans: Sequence[Span]) -> bytes:
        if any(span.stop[0] - span.start[0] >= _LARGE_CHUNKS for span in spans):
            builder, self._stream = self._make_builder(_LARGE_STEP_BYTES), bytearray(2 * _LARGE_STEP_BYTES)
        else:
            # Kept from file to file. An exception leaves a builder with half a file, which is not used again.
            builder, self._builder = self._builder or self._make_builder(), None
        for span in spans:
            position = span.start
            while position != span.stop:
                # In steps: other threads run in between.
                position, used = span.memtable.wal_stream(position, span.stop, self._stream)
                with memoryview(self._stream)[:used] as rows:
                    builder.write(rows)
        if len(self._stream) > _STREAM_BYTES:
            # It is larger for this file only, or grew for a large row.
            self._stream = bytearray(_STREAM_BYTES)
            builder.finish()
        else:
            builder.finish()
            self._builder = builder
        # Not kept here: it may be as large as a memtable.
        data, self._data = self._data, BytesIO()
        return data.getvalue()

    def _make_builder(self, step_bytes: int | None = None) -> SstBuilder:
        return SstBuilder(
            self._options, open_sink=self._open_sink, sst_type=SstType.WAL, step_bytes=step_bytes
        )

    def _open_sink(self) -> BytesIO:
        self._data = BytesIO()
        return self._data

    def _with_retries(self, request: Callable[[], object], path: str) -> None:
        pause_s = FIRST_PAUSE_S
        tries = 0
        while True:
            try:
                request()
            except Unavailable as error:
                tries += 1
                if self._max_retries is not None and tries > self._max_retries:
                    raise
                _log.warning("cannot write the WAL path=%s tries=%d error=%s", path, tries, error)
                self._clock.sleep(self._ids.jitter(pause_s, 0.5))
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                return


def _once(request: Callable[[], object], _path: str) -> None:
    request()
