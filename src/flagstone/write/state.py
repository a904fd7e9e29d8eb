"""What an open database consists of at one moment, and the single assignment that takes it to the next one.

An exception can strike between any two steps of a writer: Ctrl-C, a full memory. So everything that must agree (the
manifest, the memtables, what reads see of both, whether writes are let in) is one immutable `State`, and every change
builds the next `State` aside and then shows it at once. What is cut off before that assignment never happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from flagstone.errors import Closed, FlagstoneError
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import Versioned
from flagstone.runtime.sync import Lock, Waiters
from flagstone.types import Seq, WalId
from flagstone.write.backpressure import plan_write_pause
from flagstone.write.memtables import FrozenMemtable, Memtables


@dataclass(frozen=True, slots=True)
class State:
    """One moment of an open database.

    `view` is what reads see: the memtables above the SSTs of the manifest. `held` asks writers to wait, `refusal`
    turns them away, `closed` ends reads as well. `writable` says whether a write may go ahead: it is the one thing
    that every write looks at.
    """

    manifest: Versioned[Manifest]
    memtables: Memtables
    view: Any
    max_unflushed_bytes: int
    held: bool = False
    refusal: FlagstoneError | None = None
    closed: Closed | None = None
    writable: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "writable", not (self.held or self.crowded) and self.refusal is None)

    @property
    def crowded(self) -> bool:
        """Whether writers wait until a frozen memtable is in an SST.

        An active memtable alone never holds writers up: freezing it is what would make room.
        """
        pause = plan_write_pause(
            unflushed_bytes=self.memtables.unflushed_bytes, max_unflushed_bytes=self.max_unflushed_bytes
        )
        return pause is not None and bool(self.memtables.frozen)

    def with_memtables(self, memtables: Memtables) -> State:
        """The same SSTs below other memtables."""
        return replace(self, memtables=memtables, view=self._view(self.manifest, memtables, self.view))

    def freeze(self, *, last_seq: int, last_tick_ms: int, replay_after: WalId) -> State:
        """Begin a new memtable; unchanged when the active one is empty."""
        memtables = self.memtables.freeze(
            last_seq=Seq(last_seq), last_tick_ms=last_tick_ms, replay_after=replay_after
        )
        return self if memtables is self.memtables else self.with_memtables(memtables)

    def adopt(
        self, latest: Versioned[Manifest], prepared: Any, flushed: FrozenMemtable | None = None
    ) -> State:
        """Go on with a newer manifest, of whose SSTs `prepared` is the view, and without the memtable it took in.

        A manifest that is not newer changes nothing; the memtable is dropped all the same.
        """
        manifest, base = (latest, prepared) if latest.id > self.manifest.id else (self.manifest, self.view)
        memtables = self.memtables if flushed is None else self.memtables.without(flushed)
        return replace(
            self, manifest=manifest, memtables=memtables, view=self._view(manifest, memtables, base)
        )

    def _view(self, manifest: Versioned[Manifest], memtables: Memtables, base: Any) -> Any:
        """What reads see. A memtable whose flush the manifest knows is left out: its merges would count twice."""
        if self.closed is not None:
            return self.view
        in_ssts = manifest.value.last_l0_seq
        waiting = (frozen.table for frozen in memtables.frozen if frozen.last_seq > in_ssts)
        return base.with_memtables((memtables.active, *waiting))


class WriterState:
    """The state of an open database, the lock that orders its changes, and the threads that wait for one.

    Reads take `now` without the lock. A change is made by assigning `now` with the lock held, after `changed` was
    notified.
    """

    __slots__ = ("changed", "lock", "now")

    def __init__(self, state: State, lock: Lock) -> None:
        self.now: State = state
        self.lock: Lock = lock
        self.changed: Waiters = Waiters(lock)

    def update(self, change: Any) -> State:
        """Take the lock and go on with `change(now)`; returns the new state."""
        with self.lock:
            self.changed.notify_all()
            self.now = change(self.now)
            return self.now
