"""The two sequenced objects of a database, bound to their names: its manifests and its compactions files."""

from __future__ import annotations

from collections.abc import Callable

from flagstone.errors import InvalidRequest
from flagstone.metadata.boundary import Boundary
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.compactions_codec import decode_compactions, encode_compactions
from flagstone.metadata.invariants import check_compactions, check_manifest
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.manifest_codec import decode_manifest, encode_manifest
from flagstone.metadata.sequenced import Naming, SequencedObject, Versioned
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.runtime.ids import SYSTEM_IDS, Ids
from flagstone.runtime.metrics import Metrics
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.types import CompactionsId, ManifestId


class ManifestStore(SequencedObject[Manifest]):
    """The manifests of one database. Every version written keeps the rules of `invariants.py`.

    `check` are those rules; only who makes an older state the current one again passes others.
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
        naming: Naming[Manifest] = Naming(
            kind="manifest",
            folder=paths.manifest_folder,
            path_of=lambda version_id: paths.manifest(ManifestId(version_id)),
            parse=paths.parse_manifest,
            encode=encode_manifest,
            decode=decode_manifest,
            check=check,
        )
        boundary = Boundary(store, paths.boundary("manifest"), metrics=metrics)
        super().__init__(store, naming, boundary, clock=clock, ids=ids)

    def require_latest(self) -> Versioned[Manifest]:
        """The current version; raises InvalidRequest where there is no database."""
        found = self.latest()
        if found is None:
            raise InvalidRequest(f"no database at {self.paths.root!r} in {self._store.url}; check the path")
        return found


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
            decode=decode_compactions,
            check=check_compactions,
        )
        boundary = Boundary(store, paths.boundary("compactions"), metrics=metrics)
        super().__init__(store, naming, boundary, clock=clock, ids=ids)
