"""What a load has fixed when it begins, and what its tasks hand back: small values that travel between processes."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from flagstone.errors import InvalidRequest
from flagstone.metadata.manifest import SsTable
from flagstone.runtime.ids import SYSTEM_IDS
from flagstone.spark.options import Place
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectStore
from flagstone.store.resolve import resolve_database
from flagstone.store.retrying import patient
from flagstone.types import Seq, Ulid


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What was fixed when a load began. Travels to every task and to the commit.

    Without a `mark` the load has claimed the database as its writer, under `epoch`; with one it is handed over to the
    writer of that epoch, or a later one.
    """

    place: Place
    epoch: int
    seq: Seq
    created_ms: int
    id_ms: int
    mark: UUID | None = None


@dataclass(frozen=True, slots=True)
class MadeTable:
    """A table that a task uploaded."""

    table: SsTable
    rows: int
    bytes: int
    has_merges: bool = False


def open_store(place: Place) -> tuple[ObjectStore, DbPaths]:
    """The store of a database and the names of its objects; retries included."""
    found, root = resolve_database(place.path, place.store, place.store_options)
    if not root:
        raise InvalidRequest(f"{place.path!r} names a whole store; a database needs a path inside it")
    return patient(found), DbPaths(root)


def new_table_id(plan: LoadPlan) -> Ulid:
    """A fresh id, stamped with the begin of the load whatever the clock of this machine says."""
    return stamped(plan.id_ms)


def stamped(time_ms: int) -> Ulid:
    """A fresh id of that very millisecond."""
    return Ulid((time_ms << 80) | (SYSTEM_IDS.ulid() & ((1 << 80) - 1)))
