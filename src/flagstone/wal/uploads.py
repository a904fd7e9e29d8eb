"""WAL files on their way to the store: several at once, each by one request or two, finished in the order of their ids.

A store far away takes its time for each request. Several files under way at once shorten the wait for the next file.
They are finished in order: a file counts only when all files before it are on the store. At most `limit` files are
unfinished, so a writer that is replaced leaves at most that many ids in doubt (`flagstone.wal.takeover`). After a file
that several callers shared, the next one waits a moment for them.

A request that takes long is repeated after a while (a hedge), and the first success counts. Both requests create the
object only if it is absent, and both carry the same token, so the later one finds its own file.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from flagstone.errors import Unavailable
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.runtime.pool import Future, IoPool
from flagstone.store.port import ObjectExists, ObjectStore, ObjectVersion

_log = logging.getLogger("flagstone.wal")

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
_THREADS_PER_FILE: Final = 4
"""A slow request occupies its thread after another one has succeeded."""
_GATHER: Final = 0.1
"""The part of the time of an upload that the callers of a finished file get to write again."""
_WEIGHT: Final = 0.1
"""How much the last file counts in the average time of an upload."""


@dataclass(slots=True)
class Upload:
    """One WAL file under way. `file` is what the writer wants back."""

    file: Any
    path: str
    data: bytes
    token: str
    started_at: float
    hedge_at: float
    commits: int
    requests: list[Future[ObjectVersion]] = field(default_factory=list)
    retry_at: float = inf
    tries: int = 0

    def is_created(self) -> bool:
        """Whether a request has created the file.

        Raises:
            ObjectExists: another writer has taken the id.
            Unavailable: no request was answered; send another one.

        """
        answers = [request.exception() for request in self.requests if request.done()]
        errors = [error for error in answers if error is not None]
        if len(errors) < len(answers):
            return True
        for error in errors:
            if not isinstance(error, (ObjectExists, Unavailable)):
                raise error
        if not errors or len(errors) < len(self.requests):
            return False
        # None of the requests created the file, so the one that lost has not lost against another of ours.
        raise next((error for error in errors if isinstance(error, ObjectExists)), errors[-1])


def plan_gap_s(uploads: int, limit: int, mean_s: float) -> float:
    """Seconds between the starts of two files: those under way spread over the time of one upload. Pure.

    Without a gap the first of many callers that return at the same moment would take a file for itself.
    """
    return mean_s / limit if uploads else 0.0


class Uploads:
    """The unfinished WAL files of one writer, oldest first. One thread at a time may call it, and no call blocks.

    `wake` is called in another thread when a request has ended. Without `max_retries` retries never end.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        limit: int,
        hedge_after_s: float | None,
        max_retries: int | None,
        clock: Clock,
        ids: Ids,
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._limit = limit
        self._hedge_after_s = inf if hedge_after_s is None else hedge_after_s
        self._max_retries = max_retries
        self._clock = clock
        self._ids = ids
        self._wake = wake
        self._pool = IoPool(max_workers=_THREADS_PER_FILE * limit, name="flagstone-wal")
        self._unfinished: deque[Upload] = deque()
        self._started_at = self._gather_until = -inf
        self._mean_s = 0.0
        self._last_seq = 0

    def start_in_s(self) -> float:
        """Seconds until another file may be started; infinite while there are as many as allowed."""
        if len(self._unfinished) >= self._limit:
            return inf
        gap_s = plan_gap_s(len(self._unfinished), self._limit, self._mean_s)
        start_at = max(self._started_at + gap_s, self._gather_until)
        return max(0.0, start_at - self._clock.monotonic())

    def start(self, file: Any, path: str, data: bytes, token: str) -> None:
        """Send a file."""
        now = self._started_at = self._clock.monotonic()
        commits, self._last_seq = file.last_seq - self._last_seq, file.last_seq
        upload = Upload(file, path, data, token, now, now + self._hedge_after_s, commits)
        self._unfinished.append(upload)
        self._send(upload)

    def take_created(self) -> Upload | None:
        """The oldest file if it is on the store: it is finished. None if it is not.

        Raises:
            ObjectExists: another writer has taken the id of some file.
            Unavailable: a file was tried `max_retries` times.

        """
        for upload in self._unfinished:
            self._check(upload)
        if not self._unfinished or not self._unfinished[0].is_created():
            return None
        upload = self._unfinished.popleft()
        now = self._clock.monotonic()
        self._mean_s += _WEIGHT * (now - upload.started_at - self._mean_s)
        if upload.commits > 1:
            # Its callers write again at once. They share a file if the next one waits for them a moment.
            self._gather_until = now + _GATHER * self._mean_s
        return upload

    def send_more(self) -> float:
        """Send the requests that are due, again or a second time; returns the seconds until the next one."""
        now = self._clock.monotonic()
        next_at = inf
        for upload in self._unfinished:
            if any(request.done() and request.exception() is None for request in upload.requests):
                continue
            if min(upload.retry_at, upload.hedge_at) <= now:
                if upload.hedge_at <= now:
                    upload.hedge_at = inf
                upload.retry_at = inf
                self._send(upload)
            next_at = min(next_at, upload.retry_at, upload.hedge_at)
        return max(0.0, next_at - now)

    def close(self) -> None:
        """Start no more requests. Does not wait for those under way."""
        self._pool.close()

    def _send(self, upload: Upload) -> None:
        request = self._pool.submit(self._store.put_if_absent, upload.path, upload.data, token=upload.token)
        upload.requests.append(request)
        request.add_done_callback(lambda _: self._wake())

    def _check(self, upload: Upload) -> None:
        try:
            upload.is_created()
        except Unavailable as error:
            upload.tries += 1
            if self._max_retries is not None and upload.tries > self._max_retries:
                raise
            _log.warning("cannot write the WAL path=%s tries=%d error=%s", upload.path, upload.tries, error)
            pause_s = min(FIRST_PAUSE_S * 2 ** (upload.tries - 1), LONGEST_PAUSE_S)
            upload.requests.clear()
            upload.retry_at = self._clock.monotonic() + self._ids.jitter(pause_s, 0.5)
