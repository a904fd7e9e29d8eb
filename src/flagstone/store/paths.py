"""Every object name in a database, in both directions (SlateDB's layout).

    <root>/manifest/<20 digits>.manifest          <root>/wal/<20 digits>.sst
    <root>/compactions/<20 digits>.compactions    <root>/compacted/<ULID>.sst
    <root>/gc/manifest.boundary                   <root>/gc/compactions.boundary
    <root>/flagstone/<name>                       Flagstone only: SlateDB does not read this folder

Names are exact. For a file with any other name parsing gives None: listings skip it and nothing deletes it.
"""

from __future__ import annotations

import re
from typing import Final, Literal

from flagstone.errors import InvalidRequest
from flagstone.runtime.ids import parse_ulid, ulid_text
from flagstone.store.port import check_path
from flagstone.types import CompactionsId, ManifestId, Ulid, WalId

MANIFEST_FOLDER: Final = "manifest"
COMPACTIONS_FOLDER: Final = "compactions"
WAL_FOLDER: Final = "wal"
SST_FOLDER: Final = "compacted"
GC_FOLDER: Final = "gc"
OWN_FOLDER: Final = "flagstone"

BoundaryOf = Literal["manifest", "compactions"]

_MAX_ID: Final = 2**64 - 1
_NUMBERED: Final = re.compile(r"([0-9]{20})\.([a-z]+)\Z")


class DbPaths:
    """The names of one database's objects; `root` is its path inside the store, "" for the whole store."""

    __slots__ = (
        "_prefix",
        "compactions_folder",
        "gc_folder",
        "manifest_folder",
        "own_folder",
        "root",
        "sst_folder",
        "wal_folder",
    )

    def __init__(self, root: str) -> None:
        self.root: Final = root
        self._prefix: Final = f"{check_path(root)}/" if root else ""
        self.manifest_folder: Final = self._prefix + MANIFEST_FOLDER
        self.compactions_folder: Final = self._prefix + COMPACTIONS_FOLDER
        self.wal_folder: Final = self._prefix + WAL_FOLDER
        self.sst_folder: Final = self._prefix + SST_FOLDER
        self.gc_folder: Final = self._prefix + GC_FOLDER
        self.own_folder: Final = self._prefix + OWN_FOLDER

    def __repr__(self) -> str:
        return f"DbPaths({self.root!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DbPaths) and other.root == self.root

    def __hash__(self) -> int:
        return hash(self.root)

    def __reduce__(self) -> tuple[type[DbPaths], tuple[str]]:
        return (DbPaths, (self.root,))

    @property
    def folders(self) -> tuple[str, ...]:
        """Every folder in which a database has objects."""
        return (
            self.wal_folder,
            self.sst_folder,
            self.compactions_folder,
            self.gc_folder,
            self.manifest_folder,
            self.own_folder,
        )

    def manifest(self, manifest_id: ManifestId) -> str:
        return f"{self.manifest_folder}/{_digits(manifest_id)}.manifest"

    def compactions(self, compactions_id: CompactionsId) -> str:
        return f"{self.compactions_folder}/{_digits(compactions_id)}.compactions"

    def wal(self, wal_id: WalId) -> str:
        return f"{self.wal_folder}/{_digits(wal_id)}.sst"

    def sst(self, sst_id: Ulid) -> str:
        return f"{self.sst_folder}/{ulid_text(sst_id)}.sst"

    def boundary(self, of: BoundaryOf) -> str:
        """The object that holds the boundary: ids of that kind up to it may have been deleted."""
        return f"{self.gc_folder}/{of}.boundary"

    @property
    def clock_probe(self) -> str:
        """The object that a garbage collector writes and deletes to read the clock of the store."""
        return f"{self.gc_folder}/clock"

    def own(self, name: str) -> str:
        """An object that only Flagstone reads and writes, for what the manifest has no field for."""
        return f"{self.own_folder}/{name}"

    def parse_manifest(self, path: str) -> ManifestId | None:
        number = _parse_number(path, self.manifest_folder, "manifest")
        return None if number is None else ManifestId(number)

    def parse_compactions(self, path: str) -> CompactionsId | None:
        number = _parse_number(path, self.compactions_folder, "compactions")
        return None if number is None else CompactionsId(number)

    def parse_wal(self, path: str) -> WalId | None:
        number = _parse_number(path, self.wal_folder, "sst")
        return None if number is None else WalId(number)

    def parse_sst(self, path: str) -> Ulid | None:
        name = _name_in(path, self.sst_folder)
        if name is None or not name.endswith(".sst"):
            return None
        try:
            return parse_ulid(name.removesuffix(".sst"))
        except InvalidRequest:
            return None

    def parse_boundary(self, path: str) -> BoundaryOf | None:
        match _name_in(path, self.gc_folder):
            case "manifest.boundary":
                return "manifest"
            case "compactions.boundary":
                return "compactions"
            case _:
                return None


def folder_of(path: str) -> str:
    """The name of the folder an object lies in, such as `compacted`; "" at the top of the store."""
    return path.rpartition("/")[0].rpartition("/")[2]


def _digits(number: int) -> str:
    if not 0 <= number <= _MAX_ID:
        raise InvalidRequest(f"{number} is not an object id; need 0 <= id < 2**64")
    return f"{number:020d}"


def _name_in(path: str, folder: str) -> str | None:
    above, _, name = path.rpartition("/")
    return name if above == folder else None


def _parse_number(path: str, folder: str, extension: str) -> int | None:
    name = _name_in(path, folder)
    found = None if name is None else _NUMBERED.match(name)
    if found is None or found[2] != extension:
        return None
    number = int(found[1])
    return number if number <= _MAX_ID else None
