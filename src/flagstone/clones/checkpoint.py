"""Checkpoints: entries in the manifest that keep one manifest, and all it refers to, from garbage collection.

Each change is one manifest, written by the process that needs it: the writer, a reader, an operator. A crash before the
write leaves nothing behind.

The state of a checkpoint is the SSTs of its manifest, and the WAL files after that manifest's `replay_after_wal_id` up
to its `wal_id_last_seen`. Of those files only rows after `last_l0_seq` count; the others are in SSTs.

A final checkpoint names its clone (`metadata.borrowing`). The clone needs it as long as the clone's manifest exists and
lists the checkpoint, and the clone was not destroyed. The first manifest of a clone is written before
the checkpoint, so if the clone has no manifest, no process is still creating the clone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Final
from uuid import UUID

from flagstone.clones.origin import load_destroyed
from flagstone.config.durations import as_duration
from flagstone.errors import CorruptData, InvalidRequest
from flagstone.loads.edit import settle_load_records
from flagstone.metadata.annotations import RETENTION_MANIFEST_ID, borrower_of, decode_retention
from flagstone.metadata.borrowing import could_be_final, find_borrowers, lists_final
from flagstone.metadata.manifest import Checkpoint, Manifest, add_checkpoint, remove_checkpoint
from flagstone.metadata.sequenced import Versioned
from flagstone.metadata.stores import ManifestStore
from flagstone.runtime.clock import Clock
from flagstone.runtime.ids import Ids
from flagstone.runtime.pool import IoPool, shared_pool
from flagstone.store.paths import DbPaths
from flagstone.store.port import ObjectMissing, ObjectStore
from flagstone.types import EntryTuple, KeyRange, ManifestId, WalId
from flagstone.wal.replay import replay

_SHORTEST: Final = timedelta(seconds=1)
_LAST_SECOND: Final = 2**32 - 1


def create_checkpoint(
    manifests: ManifestStore,
    *,
    clock: Clock,
    ids: Ids,
    lifetime: timedelta | str | None = None,
    name: str | None = None,
    source: UUID | None = None,
    last_wal_id: WalId | None = None,
) -> tuple[Checkpoint, Versioned[Manifest]]:
    """Keep the current state, or the state of the checkpoint `source`; returns the checkpoint and the new manifest.

    A checkpoint of the current state names the manifest that adds it. It covers the WAL up to `wal_id_last_seen` of
    that manifest, so a caller that knows of later files passes `last_wal_id`. Without a lifetime it stays until it is
    deleted.

    Raises:
        InvalidRequest: the lifetime is shorter than a second, there is no checkpoint `source` or it has
            expired, or the database is a clone that is not finished.

    """
    checkpoint_id = ids.uuid()
    lifetime = check_lifetime(lifetime)
    if name is not None and not isinstance(name, str):
        raise InvalidRequest(f"the name of a checkpoint is a text, not {type(name).__name__}")

    def edit(now: Versioned[Manifest]) -> Manifest:
        now_s = clock.now_ms() // 1000
        require_initialized(now.value)
        if source is not None:
            manifest_id = require_live_checkpoint(now.value, source, now_s=now_s).manifest_id
            seen = now.value.wal_id_last_seen
        else:
            manifest_id = ManifestId(now.next_id)
            seen = max(now.value.wal_id_last_seen, last_wal_id or now.value.wal_id_last_seen)
        created = Checkpoint(checkpoint_id, manifest_id, now_s, expiry(now_s, lifetime), name)
        return add_checkpoint(replace(now.value, wal_id_last_seen=seen), created)

    written = manifests.update(edit)
    return require_checkpoint(written.value, checkpoint_id), written


def refresh_checkpoint(
    manifests: ManifestStore, checkpoint_id: UUID, *, clock: Clock, lifetime: timedelta | str | None = None
) -> Checkpoint:
    """Set the checkpoint to expire `lifetime` from now, or never."""

    def edit(now: Versioned[Manifest]) -> Manifest:
        held = require_checkpoint(now.value, checkpoint_id)
        renewed = Checkpoint(
            held.id, held.manifest_id, held.created_s, expiry(clock.now_ms() // 1000, lifetime), held.name
        )
        return add_checkpoint(now.value, renewed)

    return require_checkpoint(manifests.update(edit).value, checkpoint_id)


def delete_checkpoint(manifests: ManifestStore, checkpoint_id: UUID) -> None:
    """Delete the checkpoint. If it does not exist, nothing changes."""

    def edit(now: Versioned[Manifest]) -> Manifest:
        held = now.value.checkpoint(checkpoint_id)
        left = remove_checkpoint(now.value, checkpoint_id)
        # Bulk loads kept only for that consumer get an expiry; those that expired are left to garbage collection.
        return left if held is None or decode_retention(held) is None else settle_load_records(left, now_s=0)

    manifests.update(edit)


def replace_checkpoint(
    manifests: ManifestStore,
    old: UUID,
    *,
    clock: Clock,
    ids: Ids,
    lifetime: timedelta | None,
) -> tuple[Checkpoint, Versioned[Manifest]]:
    """Replace a reader checkpoint by one of the current state, in one manifest."""
    checkpoint_id = ids.uuid()

    def edit(now: Versioned[Manifest]) -> Manifest:
        now_s = clock.now_ms() // 1000
        created = Checkpoint(checkpoint_id, ManifestId(now.next_id), now_s, expiry(now_s, lifetime))
        return add_checkpoint(remove_checkpoint(now.value, old), created)

    written = manifests.update(edit)
    return require_checkpoint(written.value, checkpoint_id), written


def require_checkpoint(manifest: Manifest, checkpoint_id: UUID) -> Checkpoint:
    """The checkpoint of that id; raises `InvalidRequest` if the manifest has none."""
    found = manifest.checkpoint(checkpoint_id)
    if found is None:
        raise InvalidRequest(f"no checkpoint {checkpoint_id}: it was deleted, or expired and was collected")
    return found


def require_live_checkpoint(manifest: Manifest, checkpoint_id: UUID, *, now_s: int) -> Checkpoint:
    """The checkpoint of that id, for a caller that uses its state.

    Raises `InvalidRequest` if there is none, if it has expired, or if it is a retention checkpoint.
    """
    found = require_checkpoint(manifest, checkpoint_id)
    if not found.manifest_id:
        raise InvalidRequest(
            f"the checkpoint {checkpoint_id} keeps the WAL for a consumer of changes and has no state; "
            "use another one"
        )
    if is_expired(found, now_s):
        raise InvalidRequest(
            f"the checkpoint {checkpoint_id} expired {now_s - (found.expires_s or 0)} s ago, so its state may be "
            "deleted at any time; refresh it first, or use a newer one"
        )
    return found


def load_checkpointed(manifests: ManifestStore, checkpoint: Checkpoint) -> Versioned[Manifest]:
    """The manifest that a checkpoint names. If it is missing the database is damaged: the checkpoint keeps it.

    Raises:
        InvalidRequest: it is a retention checkpoint or the record of a range delete, which have no state.

    """
    consumer = decode_retention(checkpoint)
    if consumer is not None:
        raise InvalidRequest(
            f"the checkpoint {checkpoint.id} only keeps the WAL for the consumer {consumer.name!r}; it has no state"
        )
    if checkpoint.manifest_id == RETENTION_MANIFEST_ID:
        raise InvalidRequest(f"the checkpoint {checkpoint.id} only records a range delete; it has no state")
    try:
        return Versioned(checkpoint.manifest_id, manifests.load(checkpoint.manifest_id))
    except ObjectMissing:
        raise CorruptData(
            f"missing, but the checkpoint {checkpoint.id} names it",
            object=manifests.paths.manifest(checkpoint.manifest_id),
        ) from None


def unflushed_rows(
    wal_store: ObjectStore, paths: DbPaths, manifest: Manifest, *, pool: IoPool | None = None
) -> Iterator[EntryTuple]:
    """The rows of a checkpoint's state that only the WAL holds, in commit order."""
    files = replay(
        wal_store,
        paths,
        manifest.replay_after_wal_id,
        manifest.wal_id_last_seen,
        skip_through_seq=manifest.last_l0_seq,
        writers=manifest.writer_epoch,
        pool=pool or shared_pool(),
    )
    for file in files:
        yield from file.rows


def require_flushed(
    wal_store: ObjectStore, paths: DbPaths, manifest: Manifest, keys: KeyRange | None = None
) -> None:
    """Raise `InvalidRequest` if the WAL holds rows in the range that are not in SSTs."""
    row = next(
        (row for row in unflushed_rows(wal_store, paths, manifest) if keys is None or row[0] in keys), None
    )
    if row is not None:
        raise InvalidRequest(
            f"the WAL of {paths.root!r} holds rows that are not in SSTs yet, the first for the key {row[0][:40]!r}; "
            "a projection or union uses only SSTs: call flush() on the open database, or open and close it once, and "
            "try again"
        )


def is_expired(checkpoint: Checkpoint, now_s: int) -> bool:
    """Whether garbage collection may remove it."""
    return checkpoint.expires_s is not None and checkpoint.expires_s <= now_s


def require_initialized(manifest: Manifest, path: str | None = None) -> None:
    """Refuse a clone that is not finished: no checkpoint keeps its SSTs yet."""
    if not manifest.initialized:
        where = "the database" if path is None else f"the database at {path!r}"
        raise InvalidRequest(
            f"{where} is a clone that is not finished; repeat the call that makes it, or destroy it"
        )


def find_checkpoint(
    given: UUID | str, manifest: Callable[[], Manifest], *, now_s: int, newest: bool = False
) -> UUID:
    """The id of the checkpoint with this id or name. Only a name needs the manifest.

    Raises:
        InvalidRequest: no live checkpoint has the name, or several have it and `newest` is False.

    """
    try:
        return parse_checkpoint_id(given)
    except InvalidRequest:
        if not isinstance(given, str):
            raise
    found = [each for each in manifest().checkpoints if each.name == given and not is_expired(each, now_s)]
    if not found:
        raise InvalidRequest(f"no checkpoint has the id or name {given!r}; list-checkpoints shows both")
    if len(found) > 1 and not newest:
        raise InvalidRequest(
            f"{len(found)} checkpoints have the name {given!r}; give the id of one: "
            f"{', '.join(str(each.id) for each in found)}"
        )
    return max(found, key=lambda each: (each.created_s, each.manifest_id)).id


def parse_checkpoint_id(checkpoint: UUID | str) -> UUID:
    """The id, also from its text."""
    if isinstance(checkpoint, UUID):
        return checkpoint
    try:
        return UUID(checkpoint)
    except (ValueError, AttributeError, TypeError):
        raise InvalidRequest(f"a checkpoint is given by its UUID, not {checkpoint!r}") from None


def check_lifetime(lifetime: timedelta | str | None) -> timedelta | None:
    """The lifetime of a checkpoint, or None for ever. Raises `InvalidRequest` for anything else."""
    if lifetime is None:
        return None
    checked = as_duration(lifetime, "lifetime")
    if checked < _SHORTEST:
        raise InvalidRequest(f"a checkpoint lives at least one second, not {checked}; None means for ever")
    return checked


def expiry(now_s: int, lifetime: timedelta | str | None) -> int | None:
    """When a checkpoint of that lifetime expires, in whole seconds."""
    lifetime = check_lifetime(lifetime)
    if lifetime is None:
        return None
    expires_s = now_s + int(lifetime.total_seconds())
    if expires_s > _LAST_SECOND:
        raise InvalidRequest(f"a lifetime of {lifetime} ends after the year 2106; None means for ever")
    return expires_s


def require_unneeded(store: ObjectStore, lender: ManifestStore, checkpoint: Checkpoint) -> None:
    """Raise `InvalidRequest`, with the name of the clone, if an existing clone borrows by this checkpoint of `lender`.

    A checkpoint without a name may be one that SlateDB placed. If it could be a final checkpoint, all databases of the
    store are read; if that fails, `InvalidRequest` is raised as well.
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
        return False  # its manifest is gone, so it keeps nothing


def _needs(store: ObjectStore, borrower: str, lender: str, checkpoint: Checkpoint) -> bool:
    paths = DbPaths(borrower)
    latest = ManifestStore(store, paths).latest()
    return (
        latest is not None
        and lists_final(latest.value, lender, checkpoint.id)
        and load_destroyed(store, paths) is None
    )
