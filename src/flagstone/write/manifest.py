"""The manifest of an open database: this writer edits it, and adopts the edits of other processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from flagstone.metadata.fencing import Fence
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.parallel_wal import renew_record
from flagstone.metadata.sequenced import UPDATE_TIMEOUT_S, Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.read.view import ReadView, ViewBuilder
from flagstone.runtime import metric_names as names
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.sync import Lock
from flagstone.types import ManifestId
from flagstone.write.state import FrozenMemtable
from flagstone.write.writer_state import WriterState

Edit = Callable[[Versioned[Manifest]], Manifest | None]


class ManifestListener(Protocol):
    """A part of the writer that follows the manifest. Neither method may block."""

    def before_adoption(self, latest: Versioned[Manifest], forest: Any) -> None:
        """Reads are about to use the SSTs of `latest`, which are those of `forest`."""
        ...

    def after_adoption(self, latest: Versioned[Manifest]) -> None:
        """`latest` is the current manifest."""
        ...


class WriterManifest:
    """Reads and edits the manifest as the writer that `fence` names. Set `listeners` before the first use."""

    def __init__(
        self,
        manifests: ManifestStore,
        fence: Fence,
        state: WriterState,
        views: ViewBuilder,
        *,
        metrics: Metrics,
    ) -> None:
        self.store = manifests
        self.fence = fence
        self.views = views
        self.listeners: tuple[ManifestListener, ...] = ()
        self._state = state
        self._adopting = Lock()
        self._refreshes = metrics.counter(names.MEMTABLE_FLUSH_MANIFEST_REFRESH_COUNT)
        self._refreshes.add()  # the one that opened the database

    @property
    def current(self) -> Versioned[Manifest]:
        """The newest manifest this process knows."""
        return self._state.now.manifest

    @property
    def view(self) -> ReadView:
        """What reads see now."""
        view: ReadView = self._state.now.view
        return view

    @property
    def retained_seq(self) -> int:
        """The smallest sequence number whose versions are all kept."""
        return self.current.value.recent_snapshot_min_seq

    def refresh(self) -> None:
        """Read the newest manifest and adopt it. Raises `Closed` when a newer writer owns the database."""
        latest = self.store.require_latest()
        self.fence.check(latest.value)
        self.adopt(latest)

    def poll(self) -> bool:
        """Poll for a newer manifest with one request; return True if one was adopted."""
        latest = self.store.poll()
        self._refreshes.add()
        self.fence.check(latest.value)
        newer = latest.id > self.current.id
        self.adopt(latest)
        return newer

    def update(self, edit: Edit) -> Versioned[Manifest]:
        """Commit an edit and adopt the result. Raises `Closed` when a newer writer owns the database."""
        written = self.commit(edit)
        self.adopt(written)
        return written

    def commit(self, edit: Edit, *, timeout_s: float = UPDATE_TIMEOUT_S) -> Versioned[Manifest]:
        """Commit an edit without adopting the result: reads do not see it yet."""

        def edited(now: Versioned[Manifest]) -> Manifest | None:
            changed = edit(now)
            if changed is None or changed == now.value:
                return changed
            return renew_record(changed, ManifestId(now.next_id))

        return self.store.update(self.fence.guard(edited), timeout_s=timeout_s)

    def adopt(self, latest: Versioned[Manifest], flushed: FrozenMemtable | None = None) -> None:
        """Make `latest` the current manifest, and drop the memtable whose rows it holds.

        If an exception cuts this off, the next call completes it, with a newer manifest or with the same one.
        """
        with self._adopting:
            newer = latest.id > self.current.id
            if not newer and flushed is None:
                return
            prepared = None
            if newer:
                # The expensive part, outside the lock that writes need.
                prepared = self.views.build(latest.value)
                # Before reads use these SSTs, so that no listener misses a read.
                for listener in self.listeners:
                    listener.before_adoption(latest, prepared.forest)
            self._state.adopt(latest, prepared, flushed)
        for listener in self.listeners:
            listener.after_adoption(latest)

    def abandon_in_child(self, renew: Callable[[Any], None]) -> None:
        """Free the lock in a forked child: a thread of the parent may have held it."""
        renew(self._adopting)
