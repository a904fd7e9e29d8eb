"""The log writer: puts what was committed into the next WAL file, soon, or at once when somebody waits.

Files are written one after the other. Whoever waits for durability makes the next file be written immediately;
all that was committed meanwhile rides in it (group commit). A number that is already taken means that a newer
writer has fenced this one: nothing more is written, and nothing that was not written is reported as durable.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from flagstone.errors import Closed, Unavailable
from flagstone.format.codec import Codec
from flagstone.format.sst_info import SstType
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.sync import Lock
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectExists, ObjectStore
from flagstone.table.builder import TableBuilder, TableOptions
from flagstone.types import WalId

_log = logging.getLogger("flagstone.wal")

_STREAM_BYTES: Final = 1 << 18
"""A step fills half of it."""
_IDLE_S: Final = 3600.0
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0


class Span(Protocol):
    """Rows of one memtable, in commit order."""

    @property
    def table(self) -> Any: ...

    @property
    def start(self) -> tuple[int, int]: ...

    @property
    def stop(self) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class LogSource:
    """What the writer needs of the commit side.

    `seal` gives what the next file must hold with the last sequence number in it. `logged` hears of every file
    that is on the store, `fenced` is asked for the error to raise when somebody else took our number. `confirm` is
    called between a file's creation and `logged`, and raises when the file does not count (see `ownership.py`).
    """

    seal: Callable[[], tuple[list[Any], int]]
    logged: Callable[[WalId, int], None]
    fenced: Callable[[], Closed]
    confirm: Callable[[], None] = lambda: None


class WalWriter:
    """A background service. `request` and `arm` may be called from any thread and never block."""

    name = "wal"

    def __init__(
        self,
        store: ObjectStore,
        paths: DbPaths,
        source: LogSource,
        *,
        next_id: WalId,
        codec: Codec,
        flush_interval_s: float | None,
        max_retries: int | None,
        clock: Clock,
        ids: Ids,
        metrics: Metrics,
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._paths = paths
        self._source = source
        self._next_id = next_id
        self._options = TableOptions(codec=codec)
        self._flush_interval_s = flush_interval_s
        self._max_retries = max_retries
        self._clock = clock
        self._ids = ids
        self._wake = wake
        self._lock = Lock()
        self._requested = False
        self._due_at: float | None = None
        self._stream = bytearray(_STREAM_BYTES)
        self._flushes = metrics.counter("slatedb.wal.wal_buffer_flushes")
        self._requests = metrics.counter("slatedb.wal.wal_buffer_flush_requests")
        self._flush_bytes = metrics.counter("slatedb.wal.wal_flush_bytes")

    def request(self, _seq: int = 0) -> None:
        """Write what there is as soon as the file before is done."""
        self._requests.add()
        with self._lock:
            self._requested = True
        self._wake()

    def arm(self) -> None:
        """There is something to write; it may wait for the flush interval."""
        if self._flush_interval_s is None:
            return
        with self._lock:
            if self._due_at is None:
                self._due_at = self._clock.monotonic() + self._flush_interval_s
        self._wake()

    def run_once(self) -> float | None:
        """Write one file if it is time, and say when to come back."""
        with self._lock:
            due_at, requested = self._due_at, self._requested
            wait_s = _IDLE_S if due_at is None else due_at - self._clock.monotonic()
            if not requested and wait_s > 0:
                return wait_s
            self._requested, self._due_at = False, None
        self.write_file()
        with self._lock:
            return (
                0.0
                if self._requested
                else _IDLE_S
                if self._due_at is None
                else max(0.0, self._due_at - self._clock.monotonic())
            )

    def write_file(self) -> None:
        """Put everything committed so far into one file, if there is anything.

        A crash before the file is there loses the rows, none of which was reported as durable; after, replay
        finds them. Raises `Closed` when a newer writer owns the log.
        """
        spans, last_seq = self._source.seal()
        if not spans:
            return
        data = self._encode(spans)
        wal_id = self._next_id
        self._put(self._paths.wal(wal_id), data)
        self._patiently(self._source.confirm, self._paths.wal(wal_id))
        self._next_id = WalId(wal_id + 1)
        self._flushes.add()
        self._flush_bytes.add(len(data))
        self._source.logged(wal_id, last_seq)

    def _encode(self, spans: list[Span]) -> bytes:
        builder = TableBuilder(self._options, sst_type=SstType.WAL)
        for span in spans:
            position = span.start
            while position != span.stop:
                # A step at a time: other threads get their turn in between.
                position, used = span.table.log_stream(position, span.stop, self._stream)
                with memoryview(self._stream)[:used] as rows:
                    builder.add_log_rows(rows)
        if len(self._stream) > _STREAM_BYTES:
            # It grew for a large row, which need not be followed by others.
            self._stream = bytearray(_STREAM_BYTES)
        return builder.finish().data

    def _put(self, path: str, data: bytes) -> None:
        # One token for all tries, so that a file whose answer was lost is recognised as ours.
        token = self._ids.token()
        try:
            self._patiently(lambda: self._store.put_if_absent(path, data, token=token), path)
        except ObjectExists:
            raise self._source.fenced() from None

    def _patiently(self, request: Callable[[], object], path: str) -> None:
        pause_s = _FIRST_PAUSE_S
        tries = 0
        while True:
            try:
                request()
            except Unavailable as error:
                tries += 1
                if self._max_retries is not None and tries > self._max_retries:
                    raise
                _log.warning("cannot write the log path=%s tries=%d error=%s", path, tries, error)
                self._clock.sleep(self._ids.jitter(pause_s, 0.5))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                return
