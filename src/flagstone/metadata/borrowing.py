"""Which final checkpoint of a lender belongs to which clone. Decisions are pure; `release_final` carries them out.

A clone keeps the SSTs it borrows by a checkpoint without expiry in the lender, the *final checkpoint*. Its name holds
the path of the clone (`annotations`). So the lender's manifest decides for which database a checkpoint is kept: a copy
of the clone's folder, or a manifest that lists the checkpoints of others, does not own what it lists.

SlateDB gives final checkpoints no name. Such a checkpoint is released only if it has the shape of a final checkpoint
and no other database of the store lists it. Where that cannot be shown it is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Final, NamedTuple
from uuid import UUID

from flagstone.errors import FlagstoneError, Unavailable
from flagstone.metadata.annotations import borrower_of
from flagstone.metadata.manifest import Checkpoint, Manifest, remove_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.store.paths import MANIFEST_FOLDER, SST_FOLDER, WAL_FOLDER, DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore

_MOST_LISTED: Final = 50_000
"""How many object names a search of all databases may list before it gives up."""


class Owner(Enum):
    """Which clone a final checkpoint belongs to, by its name."""

    GONE = "the lender does not have it"
    OURS = "it has the name of this clone"
    OTHER = "it has another name"
    UNNAMED = "it has no name"


class Release(NamedTuple):
    """The result of a release. `kept` is the reason why the checkpoint still exists, None when it is gone.

    `foreign`: the checkpoint is provably not this clone's, so the clone may forget it.
    """

    kept: str | None = None
    foreign: bool = False


def owner_of(held: Checkpoint | None, borrower: str) -> Owner:
    """Whether the checkpoint, as the lender has it, belongs to the clone at `borrower`."""
    if held is None:
        return Owner.GONE
    if held.name is None:
        return Owner.UNNAMED
    return Owner.OURS if borrower_of(held) == borrower else Owner.OTHER


def could_be_final(held: Checkpoint, named: Manifest) -> bool:
    """Whether an unnamed checkpoint has the shape of a final one. `named` is the manifest it names.

    A final checkpoint never expires, and names a manifest that another checkpoint kept before: that manifest does not
    list it. A checkpoint of the current state is listed by the manifest it names.
    """
    return held.expires_s is None and named.checkpoint(held.id) is None


def lists_final(manifest: Manifest, lender: str, checkpoint_id: UUID) -> bool:
    """Whether the manifest of a clone lists that checkpoint of `lender`."""
    return any(db.path == lender and db.final_checkpoint_id == checkpoint_id for db in manifest.external_dbs)


def release_final(
    store: ObjectStore, lender: ManifestStore, checkpoint_id: UUID | None, *, borrower: str
) -> Release:
    """Remove the checkpoint by which `borrower` borrows, if it provably belongs to the borrower. Can be repeated.

    A lender that is gone needs no release. Writes one manifest of the lender; a crash before it changes nothing.
    """
    latest = None if checkpoint_id is None else lender.latest()
    if checkpoint_id is None or latest is None:
        return Release()
    held = latest.value.checkpoint(checkpoint_id)
    verdict = _judge(store, lender, held, borrower)
    if held is None or verdict.kept is not None:
        return verdict

    def edit(now: Versioned[Manifest]) -> Manifest | None:
        current = now.value.checkpoint(checkpoint_id)
        # The decision was made by name: it does not hold for a checkpoint that has another name by now.
        if current is None or current.name != held.name:
            return None
        return remove_checkpoint(now.value, checkpoint_id)

    lender.update(edit)
    return verdict


def find_borrowers(store: ObjectStore, lender: str, checkpoint_id: UUID) -> tuple[str, ...] | None:
    """The paths of all databases of the store that list the checkpoint; None when they cannot be determined.

    Costs a few list requests and one manifest per database of the store. For unnamed checkpoints only. The result is
    None where a manifest is damaged, the store must not be listed, or holds too many objects. A store that does not
    respond raises `Unavailable`: the next attempt may succeed.
    """
    try:
        return tuple(
            root
            for root in _databases(store)
            if (latest := ManifestStore(store, DbPaths(root)).latest()) is not None
            and lists_final(latest.value, lender, checkpoint_id)
        )
    except Unavailable:
        raise
    except (FlagstoneError, _TooManyObjects):
        return None


def _judge(store: ObjectStore, lender: ManifestStore, held: Checkpoint | None, borrower: str) -> Release:
    """Whether the checkpoint may be released for `borrower`."""
    path = lender.paths.root
    match owner_of(held, borrower):
        case Owner.GONE | Owner.OURS:
            return Release()
        case Owner.OTHER:
            assert held is not None, "it has a name"
            other = borrower_of(held)
            whose = f"is kept for the clone at {other!r}" if other is not None else f"is named {held.name!r}"
            return Release(f"the checkpoint {held.id} of {path!r} {whose}, not for {borrower!r}", True)
    assert held is not None, "it has no name"
    what = f"the checkpoint {held.id} of {path!r} has no name"
    try:
        named = lender.load(held.manifest_id)
    except ObjectMissing:
        return Release(f"{what}, and the manifest it names is missing")
    if not could_be_final(held, named):
        return Release(f"{what} and was not made for a clone", True)
    known = find_borrowers(store, path, held.id)
    if known is None:
        return Release(
            f"{what}, and the databases of the store could not all be read to see which one needs it"
        )
    others = ", ".join(repr(root) for root in known if root != borrower)
    return Release(f"{what}, and {others} needs it as well" if others else None)


class _TooManyObjects(Exception):
    """The store holds more objects than a search of all databases may list."""


def _databases(store: ObjectStore) -> Iterator[str]:
    """The paths of all databases of a store, ascending. Skips SSTs and WAL files without listing them."""
    listed, after, more = 0, None, True
    while more:
        more = False
        for meta in store.list("", after=after):
            listed += 1
            if listed > _MOST_LISTED:
                raise _TooManyObjects
            root, _, folder = meta.path.rpartition("/")[0].rpartition("/")
            if folder not in (MANIFEST_FOLDER, SST_FOLDER, WAL_FOLDER):
                continue
            paths = DbPaths(root)
            found = paths.parse_manifest(meta.path) is not None
            if found:
                yield root
            if found or paths.parse_sst(meta.path) is not None or paths.parse_wal(meta.path) is not None:
                # "0" follows "/": the next listed object comes after all objects of this folder.
                after, more = f"{root}/{folder}0" if root else f"{folder}0", True
                break
