"""The newest manifest and compactions file that one process has seen, shared by its coordinator and its worker.

Both are decided on from memory, without a request. An edit is applied to the copy in memory without reading first if
that copy is recent (`SequencedObject.update`). So coordinator and worker of one process pass jobs to each other at the
cost of the writes alone, and a crash leaves a file that any other process, Flagstone's or SlateDB's, continues from.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from flagstone.errors import FlagstoneError
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.destruction import require_not_destroyed
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.sequenced import UPDATE_TIMEOUT_S, SequencedObject, Versioned
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.metrics import Metrics
from flagstone.runtime.sync import Lock

T = TypeVar("T")


class Board:
    """What coordinator and worker of one process share: the newest manifest and compactions file that the process has
    seen, clock, ids and metrics. Safe to use from many threads.

    `publish` is called with every manifest that is written here, `changed` after every new manifest or compactions
    file; both are called without a lock held, and must not raise.
    """

    def __init__(
        self,
        manifests: ManifestStore,
        compactions: CompactionsStore,
        *,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
        metrics: Metrics | None = None,
        publish: Callable[[Versioned[Manifest]], None] = lambda _: None,
        update_timeout_s: float = UPDATE_TIMEOUT_S,
    ) -> None:
        self.manifests = manifests
        self.compactions = compactions
        self.clock = clock
        self.ids = ids
        self.metrics: Metrics = metrics or Metrics()
        self.changed: Callable[[], None] = lambda: None
        self.publish = publish
        self._timeout_s = update_timeout_s
        self._manifest: Versioned[Manifest] | None = None
        self._jobs: Versioned[Compactions] | None = None
        # One edit at a time of each file, so that two threads of one process do not conflict.
        self._editing_manifest = Lock()
        self._editing_jobs = Lock()
        self._noting = Lock()

    @property
    def manifest(self) -> Versioned[Manifest] | None:
        """The newest manifest seen; None before the first."""
        return self._manifest

    @property
    def jobs(self) -> Versioned[Compactions] | None:
        """The newest compactions file seen; None before the first."""
        return self._jobs

    def note_manifest(self, seen: Versioned[Manifest]) -> None:
        """Keep a manifest that this process has read or written, if it is newer."""
        with self._noting:
            if self._manifest is not None and seen.id <= self._manifest.id:
                return
            self._manifest = seen
        self.changed()

    def note_jobs(self, seen: Versioned[Compactions]) -> None:
        """Keep a compactions file that this process has read or written, if it is newer."""
        with self._noting:
            if self._jobs is not None and seen.id <= self._jobs.id:
                return
            self._jobs = seen
        self.changed()

    def fetch_manifest(self) -> Versioned[Manifest]:
        """Read the current manifest from the store.

        Raises:
            Closed: the database was destroyed.

        """
        latest = self.manifests.poll()
        require_not_destroyed(latest.value)
        self.note_manifest(latest)
        return latest

    def fetch_jobs(self) -> Versioned[Compactions] | None:
        """Read the current compactions file from the store; None if no coordinator was ever started."""
        latest = self.compactions.latest() if self._jobs is None else self.compactions.poll()
        if latest is not None:
            self.note_jobs(latest)
        return latest

    def edit_manifest(self, edit: Callable[[Versioned[Manifest]], Manifest | None]) -> Versioned[Manifest]:
        """Apply `edit` to the current manifest; see `SequencedObject.update`."""
        with self._editing_manifest:
            written = self._edit(self.manifests, self._manifest, edit)
        self.note_manifest(written)
        self.publish(written)
        return written

    def edit_jobs(
        self, edit: Callable[[Versioned[Compactions]], Compactions | None]
    ) -> Versioned[Compactions]:
        """Apply `edit` to the current compactions file; see `SequencedObject.update`."""
        with self._editing_jobs:
            written = self._edit(self.compactions, self._jobs, edit)
        self.note_jobs(written)
        return written

    def _edit(
        self,
        stored: SequencedObject[T],
        known: Versioned[T] | None,
        edit: Callable[[Versioned[T]], T | None],
    ) -> Versioned[T]:
        with suppress(FlagstoneError):  # an error on old state is no result: `update` reads the current state
            if known is not None and edit(known) in (None, known.value):
                return known
        return stored.update(edit, timeout_s=self._timeout_s)
