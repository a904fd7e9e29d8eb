"""What a repair knows about a database: everything it read, as values. Nothing here touches the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flagstone.metadata.compactions import Compactions
from flagstone.metadata.destruction import find_mark
from flagstone.metadata.manifest import Manifest
from flagstone.store.paths import DbPaths
from flagstone.types import EntryTuple, Ulid


@dataclass(frozen=True, slots=True)
class WalFile:
    """One WAL file. `rows` are those that could be read, in commit order; none for a fence.

    `problem` says why the file is damaged. `rows` then holds what its sound blocks hold.
    """

    id: int
    path: str
    size: int
    rows: tuple[EntryTuple, ...] = ()
    problem: str | None = None

    @property
    def min_seq(self) -> int | None:
        return min((row[1] for row in self.rows), default=None)

    @property
    def max_seq(self) -> int | None:
        return max((row[1] for row in self.rows), default=None)


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A stored version that cannot be decoded, and why. `newer`: its format is one that a later release may write."""

    problem: str
    newer: bool = False


@dataclass(frozen=True, slots=True)
class BoundaryFact:
    """The boundary of one kind: its number, 0 when there is none, or why it is no boundary."""

    value: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that was read. `tables` are the sizes of the SSTs that exist, by path, lenders' included.

    `lenders` says of every database that SSTs are borrowed from whether it has a manifest. `replay_problem` is what
    opening would say about the WAL. `has_origin` says whether there is a record of the clone that was begun here.
    """

    database: str
    paths: DbPaths
    now_ms: int
    manifests: Mapping[int, Manifest | Unreadable] = field(default_factory=dict)
    compactions: Mapping[int, Compactions | Unreadable] = field(default_factory=dict)
    manifest_boundary: BoundaryFact = BoundaryFact()
    compactions_boundary: BoundaryFact = BoundaryFact()
    wal: Mapping[int, WalFile] = field(default_factory=dict)
    tables: Mapping[str, int] = field(default_factory=dict)
    lenders: Mapping[str, bool] = field(default_factory=dict)
    replay_problem: str | None = None
    has_origin: bool = False

    @property
    def newest_id(self) -> int | None:
        """The highest number of a manifest, readable or not. Manifest 0 belongs to no history."""
        return max((number for number in self.manifests if number > 0), default=None)

    @property
    def base_id(self) -> int | None:
        """The newest manifest that can be read."""
        return max(
            (
                number
                for number, found in self.manifests.items()
                if number > 0 and isinstance(found, Manifest)
            ),
            default=None,
        )

    @property
    def base(self) -> Manifest | None:
        """The state to start from."""
        found = None if self.base_id is None else self.manifests[self.base_id]
        return found if isinstance(found, Manifest) else None

    @property
    def destroyed(self) -> bool:
        """Whether the newest manifest that can be read says that the database was destroyed."""
        return self.base is not None and find_mark(self.base) is not None

    def table_path(self, manifest: Manifest, sst_id: Ulid) -> str:
        """Where an SST of the manifest is: in its own folder, or in that of the database that lends it."""
        owner = manifest.path_of_owner(sst_id)
        return (self.paths if owner is None else DbPaths(owner)).table(sst_id)
