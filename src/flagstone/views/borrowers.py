"""Checkpoints that living clones need: which they are, and the refusal to give them up.

A final checkpoint names its clone (`metadata.borrowing`). The clone needs it while it lives: its manifest exists and
lists the checkpoint, and the clone was not destroyed. The clone's first manifest is older than the checkpoint,
so a checkpoint whose clone has no manifest is not one that is still being placed.
"""

from __future__ import annotations

from flagstone.errors import InvalidRequest
from flagstone.metadata.borrowing import borrower_of, could_be_final, find_borrowers, lists_final
from flagstone.metadata.manifest import Checkpoint
from flagstone.metadata.stores import ManifestStore
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.views.marks import load_destroyed


def require_unneeded(store: ObjectStore, lender: ManifestStore, checkpoint: Checkpoint) -> None:
    """Raise `InvalidRequest`, naming the clone, if a living clone borrows by this checkpoint of `lender`.

    A checkpoint without a name may be one that SlateDB placed. If it has the shape of one, the databases of the store
    are asked; a store that cannot be read as a whole is a refusal as well.
    """
    path = lender.paths.root
    named = borrower_of(checkpoint)
    if named is not None:
        borrowers: tuple[str, ...] | None = (named,)
    elif checkpoint.name is None and _could_be_final(lender, checkpoint):
        borrowers = find_borrowers(store, path, checkpoint.id)
    else:
        return
    if borrowers is None:
        raise InvalidRequest(
            f"the checkpoint {checkpoint.id} of {path!r} may be what a clone borrows by, and the databases of "
            f"{store.url} could not all be read to find out; if no clone needs it, repeat this with force"
        )
    living = [borrower for borrower in borrowers if _needs(store, borrower, path, checkpoint)]
    if living:
        clones = ", ".join(map(repr, living))
        raise InvalidRequest(
            f"the clone at {clones} borrows SSTs of {path!r} by the checkpoint {checkpoint.id}, and loses them without "
            "it; destroy the clone, or compact it fully and collect its garbage, which releases the checkpoint; "
            "force gives the clone up"
        )


def _could_be_final(lender: ManifestStore, checkpoint: Checkpoint) -> bool:
    if checkpoint.expires_s is not None:
        return False
    try:
        return could_be_final(checkpoint, lender.load(checkpoint.manifest_id))
    except ObjectMissing:
        return False  # it pins nothing that is left


def _needs(store: ObjectStore, borrower: str, lender: str, checkpoint: Checkpoint) -> bool:
    paths = DbPaths(borrower)
    latest = ManifestStore(store, paths).latest()
    return (
        latest is not None
        and lists_final(latest.value, lender, checkpoint.id)
        and load_destroyed(store, paths) is None
    )
