"""The checkpoints of DataFrames: renewed while a frame can still be used, deleted when it is garbage.

Spark shares one object among all frames, views and cached plans that derive from a read. A weak reference to it shows
when the last of them is gone, which a reference to the Python object alone cannot. A crash of this process leaves the
checkpoints behind, and they expire within minutes.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from flagstone.errors import FlagstoneError, InvalidRequest
from flagstone.runtime.service import Supervisor
from flagstone.runtime.sync import Lock
from flagstone.spark.held_state import CheckpointRead
from flagstone.spark.job_control import session_ended

_log = logging.getLogger("flagstone.spark")

_STEPS_PER_LIFE: Final = 4
"""A checkpoint is looked after this many times in its life, so that an outage of half its life does not lose it."""


class FrameCheckpoints:
    """Renews and deletes checkpoints, one step at a time; as a background service of the driver's process."""

    name: Final = "frame-checkpoints"

    def __init__(self) -> None:
        self._lock = Lock()
        self._entries: list[FrameCheckpoint] = []
        self._pid = os.getpid()
        self._supervisor: Supervisor | None = None

    def keep(self, held: CheckpointRead, in_use: Callable[[], bool]) -> FrameCheckpoint:
        """Renew the checkpoint while `in_use` returns True, and delete it afterwards."""
        if os.getpid() != self._pid:
            # A forked child has no thread of its parent, whose frames it cannot use.
            self._lock, self._entries, self._pid, self._supervisor = Lock(), [], os.getpid(), None
        entry = FrameCheckpoint(held, in_use)
        with self._lock:
            self._entries.append(entry)
            if self._supervisor is None:
                self._supervisor = Supervisor()
                # Registered after the supervisor's own handler, so that it runs before it.
                atexit.register(self.release_all)
                self._supervisor.start(self)
        self._supervisor.wake(self)
        return entry

    def run_once(self) -> float | None:
        """Renew or delete every checkpoint for which it is time; returns the seconds until the next step."""
        with self._lock:
            entries = list(self._entries)
        for entry in entries:
            if entry.in_use():
                entry.renew()
            else:
                self.release(entry)
        with self._lock:
            return min((entry.step_s for entry in self._entries), default=3600.0)

    def release(self, entry: FrameCheckpoint) -> None:
        """Delete one checkpoint. If that fails, it expires."""
        with self._lock:
            if entry not in self._entries:
                return
            self._entries.remove(entry)
        entry.delete()

    def release_all(self) -> None:
        """Delete all checkpoints: the process ends. A forked child deletes none."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            entries = list(self._entries)
        for entry in entries:
            self.release(entry)


class FrameCheckpoint:
    """The checkpoint of one frame. `in_use` tells whether a frame that needs it exists."""

    def __init__(self, held: CheckpointRead, in_use: Callable[[], bool]) -> None:
        assert held.checkpoint is not None, "a read without a checkpoint keeps nothing"
        self._held = held
        self._checkpoint = held.checkpoint
        self._clock = held.options.address.clock
        self.in_use: Callable[[], bool] = in_use
        self.step_s: float = held.options.lifetime.total_seconds() / _STEPS_PER_LIFE
        self._renewed_at = self._clock.monotonic()

    def renew(self) -> None:
        """Let it expire a lifetime from now, if it is time for that. If that fails, the next step tries again."""
        if self._clock.monotonic() - self._renewed_at < self.step_s * 0.9:
            return
        try:
            self._held.options.address.admin().refresh_checkpoint(
                self._checkpoint, self._held.options.lifetime
            )
            self._renewed_at = self._clock.monotonic()
        except Exception as error:  # noqa: BLE001 - the other frames must be renewed as well
            _log.warning("could not renew the checkpoint of a frame id=%s error=%s", self._checkpoint, error)

    def delete(self) -> None:
        """Delete it. If that fails, it expires."""
        with suppress(FlagstoneError):
            self._held.options.address.admin().delete_checkpoint(self._checkpoint)


FRAME_CHECKPOINTS: Final = FrameCheckpoints()
"""Those of this process."""


def keep_while_used(spark: Any, frame: Any, held: CheckpointRead) -> None:
    """Keep the checkpoint of `held` while `frame`, or a frame, view or cache derived from it, exists."""
    if held.checkpoint is not None:
        FRAME_CHECKPOINTS.keep(held, use_of(spark, frame))


@contextmanager
def kept(held: CheckpointRead, *, owned: bool) -> Iterator[None]:
    """Renew the checkpoint during a job, and delete it at the end. With `owned` False its owner does both."""
    if not owned or held.checkpoint is None:
        yield
        return
    entry = FRAME_CHECKPOINTS.keep(held, lambda: True)
    try:
        yield
    finally:
        FRAME_CHECKPOINTS.release(entry)


def use_of(spark: Any, frame: Any) -> Callable[[], bool]:
    """A function that tells whether a frame, or one derived from it, can still be used.

    True for as long as the session runs if this Spark does not show its plans.
    """
    if not hasattr(frame, "_jdf"):
        # Spark Connect: the plans of derived frames refer to the plan of their parent.
        plan = getattr(frame, "_plan", None)
        alive: Callable[[], object] = (lambda: True) if plan is None else weakref.ref(plan)
        return lambda: alive() is not None
    try:
        shared = spark._jvm.java.lang.ref.WeakReference(_shared_object(frame))  # noqa: SLF001
    except Exception:  # noqa: BLE001 - another Spark release: its plans have other methods
        return lambda: not session_ended(spark)
    return lambda: not session_ended(spark) and _is_referred(spark, shared)


def _shared_object(frame: Any) -> Any:
    """What all plans that derive from the frame share: the table of a read, or the function of a map."""
    plan = frame._jdf.queryExecution().analyzed()  # noqa: SLF001
    if plan.getClass().getSimpleName() == "MapInArrow":
        return plan.functionExpr().func()
    leaves = plan.collectLeaves()
    if leaves.length() != 1:
        raise InvalidRequest("the plan has several leaves")
    return leaves.apply(0).table()


def _is_referred(spark: Any, shared: Any) -> bool:
    try:
        return not shared.refersTo(None)
    except Exception:  # noqa: BLE001 - the Java process does not answer
        return not session_ended(spark)
