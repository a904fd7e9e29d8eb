"""The facts of a repair: every manifest, compactions file, boundary and WAL file, and which SSTs exist.

`read_facts` reads them, and writes nothing. SSTs are listed, not read; `verify` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

from flagstone.errors import CorruptData, FlagstoneError, InvalidRequest
from flagstone.format.sst import FOOTER_BYTES, decode_rows, decode_sst
from flagstone.format.sst_info import SstType
from flagstone.metadata.boundary import Boundary
from flagstone.metadata.compactions import Compactions
from flagstone.metadata.destruction import find_mark
from flagstone.metadata.manifest import Manifest
from flagstone.metadata.parallel_wal import allowed_hole, settled_end
from flagstone.metadata.sequenced import SequencedObject
from flagstone.metadata.stores import CompactionsStore, ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.pool import shared_pool
from flagstone.store.paths import BoundaryOf, DbPaths
from flagstone.store.port import ObjectMeta, ObjectMissing, ObjectStore
from flagstone.types import CompactionsId, EntryTuple, ManifestId, Ulid, WalId
from flagstone.wal.frontier import FENCE, VOID
from flagstone.wal.replay import decode_wal, replay

_ATTEMPTS: Final = 5
_NEWEST_FORMAT: Final = 2
_PLAUSIBLE_FORMAT: Final = 32
"""Later releases use higher format numbers; a damaged file rarely begins with so small a number."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WalFile:
    """One WAL file. `rows` are those that could be read, in commit order; none for a fence.

    `problem` is why the file is damaged. `rows` are then the rows of its sound blocks.
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
    """A manifest or compactions file that cannot be decoded, and why. `newer`: a later release may write its format."""

    problem: str
    newer: bool = False


@dataclass(frozen=True, slots=True)
class BoundaryFact:
    """The boundary of one kind: its id, 0 if there is none, or why it cannot be read."""

    value: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that was read. `ssts` are the sizes of the SSTs that exist, by path, including those of lenders.

    `lenders` is for every lender whether it has a manifest. `replay_problem` is the error that opening would raise
    about the WAL. `has_origin` is whether the database was begun as a clone.
    """

    database: str
    paths: DbPaths
    now_ms: int
    manifests: Mapping[int, Manifest | Unreadable] = field(default_factory=dict)
    compactions: Mapping[int, Compactions | Unreadable] = field(default_factory=dict)
    manifest_boundary: BoundaryFact = BoundaryFact()
    compactions_boundary: BoundaryFact = BoundaryFact()
    wal: Mapping[int, WalFile] = field(default_factory=dict)
    ssts: Mapping[str, int] = field(default_factory=dict)
    lenders: Mapping[str, bool] = field(default_factory=dict)
    replay_problem: str | None = None
    has_origin: bool = False

    @property
    def newest_id(self) -> int | None:
        """The highest manifest id, readable or not. Manifest 0 holds retention checkpoints and is not part of it."""
        return max((number for number in self.manifests if number > 0), default=None)

    @property
    def base_id(self) -> int | None:
        """The id of the newest manifest that can be read."""
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
        """The newest manifest that can be read: the repair starts from it."""
        found = None if self.base_id is None else self.manifests[self.base_id]
        return found if isinstance(found, Manifest) else None

    @property
    def destroyed(self) -> bool:
        """Whether the newest readable manifest marks the database as destroyed."""
        return self.base is not None and find_mark(self.base) is not None

    def sst_path(self, manifest: Manifest, sst_id: Ulid) -> str:
        """The path of an SST of the manifest: in the database's own folder, or in its lender's."""
        owner = manifest.path_of_owner(sst_id)
        return (self.paths if owner is None else DbPaths(owner)).sst(sst_id)


def read_facts(
    store: ObjectStore,
    wal_store: ObjectStore,
    paths: DbPaths,
    *,
    clock: Clock,
    has_origin: bool = False,
) -> Facts:
    """Read everything that a plan needs. A writer may be active: if the manifest has changed, all is read again.

    While the newest manifest stays the same, no collector deletes what that manifest refers to. If the database changes
    faster than it can be read, the facts are inconsistent; the caller compares two plans.
    """
    for _ in range(_ATTEMPTS):
        facts = _read(store, wal_store, paths, clock=clock, has_origin=has_origin)
        newest = max((number for number in _listed_ids(store, paths) if number), default=None)
        if newest == facts.newest_id:
            break
    return facts


def _read(
    store: ObjectStore,
    wal_store: ObjectStore,
    paths: DbPaths,
    *,
    clock: Clock,
    has_origin: bool,
) -> Facts:
    # Boundaries first: they only grow, and a file above each of them exists from then on.
    manifest_boundary = _boundary(store, paths, "manifest")
    compactions_boundary = _boundary(store, paths, "compactions")
    manifests = _versions(
        store, ManifestStore(store, paths, clock=clock), lambda number: paths.manifest(ManifestId(number))
    )
    compactions = _versions(
        store,
        CompactionsStore(store, paths, clock=clock),
        lambda number: paths.compactions(CompactionsId(number)),
    )
    states = [found for found in manifests.values() if isinstance(found, Manifest)]
    lenders = sorted({lender.path for state in states for lender in state.external_dbs})
    ssts: dict[str, int] = {}
    for owner in (paths, *map(DbPaths, lenders)):
        ssts |= {
            meta.path: meta.size
            for meta in store.list(owner.sst_folder)
            if owner.parse_sst(meta.path) is not None
        }
    facts = Facts(
        database=f"{store.url} {paths.root}".strip(),
        paths=paths,
        now_ms=clock.now_ms(),
        manifests=manifests,
        compactions=compactions,
        manifest_boundary=manifest_boundary,
        compactions_boundary=compactions_boundary,
        wal=_wal_files(wal_store, paths),
        ssts=ssts,
        lenders={path: any(True for _ in _listed_ids(store, DbPaths(path))) for path in lenders},
        has_origin=has_origin,
    )
    return replace(facts, replay_problem=_replay_problem(wal_store, facts))


def _listed_ids(store: ObjectStore, paths: DbPaths) -> Iterable[int]:
    found = (paths.parse_manifest(meta.path) for meta in store.list(paths.manifest_folder))
    return (number for number in found if number is not None)


def _is_newer(store: ObjectStore, path: str) -> bool:
    """Whether a later release may write the format version at the head of the object."""
    try:
        return _NEWEST_FORMAT < int.from_bytes(store.get_range(path, 0, 2), "big") <= _PLAUSIBLE_FORMAT
    except (ObjectMissing, InvalidRequest):
        return False


def _versions(
    store: ObjectStore, versions: SequencedObject[T], path_of: Callable[[int], str]
) -> dict[int, T | Unreadable]:
    def load(number: int) -> T | Unreadable | None:
        try:
            return versions.load(number)
        except CorruptData as error:
            return Unreadable(error.problem, newer=_is_newer(store, path_of(number)))
        except ObjectMissing:
            return None  # deleted between listing and reading

    numbers = [entry.id for entry in versions.list()]
    loaded = shared_pool().map_ordered(load, numbers)
    return {number: found for number, found in zip(numbers, loaded, strict=True) if found is not None}


def _boundary(store: ObjectStore, paths: DbPaths, of: BoundaryOf) -> BoundaryFact:
    try:
        return BoundaryFact(Boundary(store, paths.boundary(of)).read())
    except CorruptData as error:
        return BoundaryFact(problem=error.problem)


def _wal_files(wal_store: ObjectStore, paths: DbPaths) -> dict[int, WalFile]:
    listed = [
        (wal_id, meta)
        for meta in wal_store.list(paths.wal_folder)
        if (wal_id := paths.parse_wal(meta.path)) is not None
    ]
    load: Callable[[tuple[WalId, ObjectMeta]], WalFile | None] = lambda entry: _wal_file(wal_store, *entry)  # noqa: E731
    files = shared_pool().map_ordered(load, listed)
    return {file.id: file for file in files if file is not None}


def _wal_file(wal_store: ObjectStore, wal_id: WalId, meta: ObjectMeta) -> WalFile | None:
    try:
        data = wal_store.get(meta.path).data
    except ObjectMissing:
        return None  # deleted between listing and reading
    rows, problem = read_wal(data, meta.path)
    return WalFile(wal_id, meta.path, len(data), tuple(rows), problem)


def read_wal(data: bytes, path: str) -> tuple[list[EntryTuple], str | None]:
    """The rows of a WAL file, and its problem; of a damaged file the rows of its sound blocks."""
    if data in (FENCE, VOID):
        return [], None
    if len(data) <= FOOTER_BYTES:
        return [], f"cut to {len(data)} bytes"
    try:
        return decode_wal(data, path), None
    except CorruptData as error:
        problem = str(error).removeprefix(f"{path}: ").removeprefix(f"{path} ")
    rows: list[EntryTuple] = []
    try:
        image = decode_sst(data, path)
        if image.info.sst_type is not SstType.WAL:
            return [], problem
        for number in range(len(image.index)):
            try:
                rows += decode_rows(image.block(number), image.version)
            except CorruptData:
                continue
    except CorruptData:
        pass
    return rows, problem


def _replay_problem(wal_store: ObjectStore, facts: Facts) -> str | None:
    """The error that opening would raise about the WAL; None if it can be replayed."""
    base = facts.base
    needed = [] if base is None else [wal_id for wal_id in facts.wal if wal_id > base.replay_after_wal_id]
    if base is None or not needed:
        return None
    last = max(needed)
    for missing in range(last - 1, last - 1 - allowed_hole(base), -1):
        if missing not in facts.wal:
            last = missing - 1  # the files after a hole that a crash of a parallel writer explains
    try:
        for _ in replay(
            wal_store,
            facts.paths,
            base.replay_after_wal_id,
            WalId(last),
            skip_through_seq=base.last_l0_seq,
            writers=base.writer_epoch,
            settled=settled_end(base),
            pool=shared_pool(),
        ):
            pass
    except CorruptData as error:
        return error.problem
    except FlagstoneError as error:
        return str(error)
    return None
