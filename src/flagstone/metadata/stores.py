"""The two sequenced objects of a database, bound to their names: its manifests and its compactions files."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

from flagstone.errors import InvalidRequest
from flagstone.metadata.boundary import Boundary
from flagstone.metadata.compactions import (
    Compactions,
    check_compactions,
    encode_compactions,
    load_compactions,
)
from flagstone.metadata.destruction import another_database, incarnation, is_vacant, settle_at
from flagstone.metadata.invariants import check_manifest
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.manifest_codec import encode_manifest, load_manifest
from flagstone.metadata.sequenced import Naming, SequencedConflict, SequencedObject, Versioned
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.metrics import Metrics
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import CompactionsId, ManifestId


class NoDatabase(InvalidRequest):
    """There is no database at the path: there never was one, or it was destroyed."""


class ManifestStore(SequencedObject[Manifest]):
    """The manifests of one database. Every manifest written keeps the rules of `invariants.py`.

    `check` are those rules; only restore, repair and destruction pass others.

    One instance follows one database. Once it has read a manifest, it raises `Closed` when that database was destroyed,
    also when another one has been created at the path since. A vacant path has no database: `latest` is None there.
    """

    def __init__(
        self,
        store: ObjectStore,
        paths: DbPaths,
        *,
        metrics: Metrics | None = None,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
        check: Callable[[Manifest, Manifest | None], None] = check_manifest,
    ) -> None:
        self.paths = paths
        self._guard: Callable[[Manifest], None] | None = None
        naming: Naming[Manifest] = Naming(
            kind="manifest",
            folder=paths.manifest_folder,
            path_of=lambda version_id: paths.manifest(ManifestId(version_id)),
            parse=paths.parse_manifest,
            encode=encode_manifest,
            decode=load_manifest,
            check=check,
        )
        boundary = Boundary(store, paths.boundary("manifest"), metrics=metrics)
        super().__init__(store, naming, boundary, clock=clock, ids=ids)

    def guarded(self, guard: Callable[[Manifest], None]) -> ManifestStore:
        """The same manifests for one owner of a role: every edit first calls `guard` with the manifest it changes."""
        bound = copy(self)
        bound._guard = guard  # noqa: SLF001 - an instance of this class
        return bound

    def latest(self) -> Versioned[Manifest] | None:
        """The current manifest; None where there is no database.

        Raises:
            Closed: the database that this instance follows was destroyed.

        """
        found = self.latest_stored()
        return None if found is None or is_vacant(found.value) else found

    def latest_stored(self) -> Versioned[Manifest] | None:
        """The current manifest, also that of a vacant path."""
        return super().latest()

    def require_latest(self) -> Versioned[Manifest]:
        """The current manifest; raises InvalidRequest where there is no database."""
        found = self.latest()
        if found is None:
            raise NoDatabase(f"no database at {self.paths.root!r} in {self._store.url}; check the path")
        return found

    def create_next(self, value: Manifest, base: Versioned[Manifest] | None) -> Versioned[Manifest]:
        """As for every sequenced object. The first manifest at a vacant path continues the ids of the last database.

        The vacancy is the one that `latest` read; if there is a newer manifest by now, this one loses.
        """
        known = self._known
        if base is None and known is not None:
            if not is_vacant(known.value):
                raise SequencedConflict(f"there is a database at {self.paths.root!r} already")
            base, value = known, settle_at(value, known.value)
        if base is not None and self._guard is not None:
            self._guard(base.value)
        return super().create_next(value, base)

    def _recognize(self, found: Versioned[Manifest]) -> None:
        known = self._known
        if known is not None and known.id < incarnation(found.value):
            raise another_database(self.paths.root)

    def _assumed(self) -> Versioned[Manifest] | None:
        known = super()._assumed()
        return None if known is None or is_vacant(known.value) else known


class CompactionsStore(SequencedObject[Compactions]):
    """The compactions files of one database; none exists before a coordinator has been started."""

    def __init__(
        self,
        store: ObjectStore,
        paths: DbPaths,
        *,
        metrics: Metrics | None = None,
        clock: Clock = SYSTEM_CLOCK,
        ids: Ids = SYSTEM_IDS,
    ) -> None:
        self.paths = paths
        naming: Naming[Compactions] = Naming(
            kind="compactions file",
            folder=paths.compactions_folder,
            path_of=lambda version_id: paths.compactions(CompactionsId(version_id)),
            parse=paths.parse_compactions,
            encode=encode_compactions,
            decode=load_compactions,
            check=check_compactions,
        )
        boundary = Boundary(store, paths.boundary("compactions"), metrics=metrics)
        super().__init__(store, naming, boundary, clock=clock, ids=ids)
