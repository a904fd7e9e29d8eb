"""Range deletes of an open database: few rows become tombstones, many disappear with one manifest.

A range delete with a manifest is done like the adoption of a bulk load. Writes wait while the memtables are flushed and
the manifest is written (`flagstone.loads.range_delete`). So a put that returned before is deleted, and a put that
begins after the call returned survives. The manifest follower does it in its own thread, between its polls: it never
adopts a load at the same time, and an interrupt (Ctrl-C) of the caller does not cut it off.

If the store does not answer, the delete is in doubt: the manifest may have been written. Writes wait until the store
answers, because the next row needs a sequence number above that of the delete if it was written. The caller gets
`Unavailable` at once.

A crash before the manifest leaves all rows, one after it leaves none.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Final

from flagstone.config import CompactorOptions
from flagstone.db.writer.background import Maintenance
from flagstone.db.writer.environment import Environment
from flagstone.errors import CorruptData, FlagstoneError, Unavailable
from flagstone.loads.range_delete import RangeDelete, apply_range_delete
from flagstone.lsm.system_rows import visible_ranges
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.range_cut import highest_run, overlaps
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime import metric_names as names
from flagstone.types import KeyRange, Seq, Ulid
from flagstone.write.durability import WriteHandle
from flagstone.write.flusher import Flusher
from flagstone.write.manifest import WriterManifest
from flagstone.write.writer_state import WriterState

_log = logging.getLogger("flagstone.db")

_ATTEMPTS: Final = 10
_LONGEST_HOLD_S: Final = 10.0


@dataclass(slots=True, eq=False)
class _Request:
    """A range delete that a caller waits for.

    `flushed` is False if L0 had no room for the last rows. `seq` is the number of the delete; None without rows.
    """

    keys: KeyRange
    done: bool = False
    flushed: bool = False
    seq: Seq | None = None
    error: FlagstoneError | None = None


class RangeDeletes:
    """Deletes ranges by manifest. `delete` may be called from any thread; `run` only by the manifest follower."""

    def __init__(
        self,
        env: Environment,
        state: WriterState,
        manifest: WriterManifest,
        flusher: Flusher,
        maintenance: Maintenance,
        *,
        wake: Callable[[], None],
    ) -> None:
        self._env = env
        self._state = state
        self._manifest = manifest
        self._flusher = flusher
        self._maintenance = maintenance
        self._wake = wake
        options = env.settings.compactor_options or CompactorOptions()
        self._lifetime_s = int(options.checkpoint_lifetime.total_seconds())
        self._requests: deque[_Request] = deque()
        self._doubtful: RangeDelete | None = None
        """The delete that may be in the newest manifest. Writers wait while there is one."""
        self._count = env.metrics.counter(names.DB_RANGE_DELETES)

    @property
    def expected(self) -> bool:
        """Whether a range delete waits to be done, or is in doubt."""
        return bool(self._requests) or self._doubtful is not None

    @property
    def in_doubt(self) -> bool:
        """Whether it is unknown if the last range delete was written."""
        return self._doubtful is not None

    # -- the caller's thread ------------------------------------------------------------------------------

    def delete(self, keys: KeyRange) -> WriteHandle | None:
        """Delete all rows of the range with one manifest, and return when it is written; None if there was none.

        Raises:
            Unavailable: the store did not answer, so the outcome is unknown; or L0 never had room for the memtables.

        """
        state = self._state
        for _ in range(_ATTEMPTS):
            # The long flush comes before writes have to wait. It waits for room in L0 as any flush does.
            state.flush_memtables()
            request = _Request(keys)
            self._requests.append(request)
            self._wake()
            self._await(request)
            if request.seq is not None:
                return WriteHandle(state, request.seq, self._env.clock.now_ms())
            if request.flushed:
                return None
        raise Unavailable(
            f"the range was not deleted: {_ATTEMPTS} times L0 had no room for what was written meanwhile; wait for the "
            "compactor, and delete the range again"
        )

    def _await(self, request: _Request) -> None:
        state = self._state
        state.changed.wait_for(lambda: request.done or state.now.failure is not None)
        if not request.done:
            state.raise_failure()
        if request.error is not None:
            raise copy(request.error)  # threads may not share a traceback

    # -- the thread of the manifest follower ---------------------------------------------------------------

    def run(self) -> None:
        """Settle the delete in doubt, then do those that callers wait for.

        Raises:
            Closed: a newer writer owns the database.

        """
        try:
            self._settle()
        except Unavailable as error:
            _log.warning("cannot settle a range delete yet error=%s", error)
            return
        while self._requests and self._doubtful is None:
            request = self._requests[0]
            try:
                self._perform(request)
            except Unavailable as error:
                request.error = error if self._doubtful is None else _unknown(error)
            except CorruptData as error:  # of the compactions file, before anything was done
                request.error = error
            self._requests.popleft()
            request.done = True
            self._state.notify()

    def _perform(self, request: _Request) -> None:
        state, keys = self._state, request.keys
        # Before the manifest: every job that is listed later names runs of the manifest that is cut.
        jobs = self._maintenance.fetch_jobs()
        job_run = -1 if jobs is None else highest_run(jobs)
        try:
            state.hold()
            state.flush_memtables(unless=lambda: self._flusher.pause is not None, timeout_s=_LONGEST_HOLD_S)
            last_seq = state.last_seq
            request.flushed = state.now.is_flushed(last_seq)
            if not request.flushed:
                return
            # Without a WAL, rows are in SSTs a moment before they count as durable.
            state.wait_durable(last_seq, _LONGEST_HOLD_S)
            if not any(overlaps(self._manifest.current.value, part) for part in visible_ranges(keys)):
                return
            ids = self._env.ids
            now_ms = self._env.clock.now_ms()
            self._doubtful = RangeDelete(keys, Seq(last_seq + 1), now_ms, ids.uuid(), ids.uuid(), job_run)
            self._settle()
            request.seq = Seq(last_seq + 1)
        finally:
            if self._doubtful is None:
                state.release()

    def _settle(self) -> None:
        """Write the delete in doubt, unless it is written. Then let writers go on."""
        delete = self._doubtful
        if delete is None:
            return
        # An answer ends the doubt: an earlier attempt has written its manifest by now, or never will.
        written = self._commit(delete)
        # First the view, then the number: a read at the number of the delete must not find the rows.
        self._manifest.adopt(written)
        self._state.skip_to(delete.seq, list(delete.parts))
        self._maintenance.note_load(written.value)
        self._count.add()
        _log.info("deleted a range seq=%d manifest=%d", delete.seq, written.id)
        self._doubtful = None
        self._state.release()

    def _commit(self, delete: RangeDelete) -> Versioned[Manifest]:
        limit_s = self._env.settings.manifest_update_timeout.total_seconds()
        return self._manifest.commit(
            lambda now: apply_range_delete(
                now,
                delete,
                # Writers wait, and all their rows are in the WAL: the delete belongs after its last file.
                last_wal_id=self._state.last_wal_id,
                lifetime_s=self._lifetime_s,
                new_id=self._new_id,
            ),
            timeout_s=min(_LONGEST_HOLD_S, limit_s),
        )

    def _new_id(self, time_ms: int) -> Ulid:
        return Ulid(time_ms << 80 | self._env.ids.ulid() & ((1 << 80) - 1))


def _unknown(error: Unavailable) -> Unavailable:
    return Unavailable(
        "the store did not answer, so it is unknown whether the range was deleted; writes wait until it answers: "
        f"{error}"
    )
