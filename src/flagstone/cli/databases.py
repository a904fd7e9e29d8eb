"""Whole databases: `clone`, `union`, `restore` and `delete-db`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flagstone.cli.binary import KeyForm, parse_bytes
from flagstone.cli.confirming import can_ask, confirm
from flagstone.cli.context import AsJson, Invocation, invocation
from flagstone.cli.output import print_json, say
from flagstone.cli.parsing import parse_checkpoint, parse_lifetime, require_checkpoint_id
from flagstone.cli.progress import working
from flagstone.errors import InvalidRequest
from flagstone.inspector.text import time_text
from flagstone.types import KeyRange

if TYPE_CHECKING:
    from flagstone.cli.connection import Connection
    from flagstone.metadata.manifest import Manifest
    from flagstone.metadata.sequenced import Versioned
    from flagstone.views.destroy import Destruction

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")]
To = Annotated[
    str,
    typer.Argument(help="The new database: a path inside the same store, or an address that leads there."),
]


def clone(
    context: typer.Context,
    to: To,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="UUID", help="Clone what this checkpoint pins instead of the current state."),
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Only keys that begin with this.")] = None,
    start: Annotated[str | None, typer.Option(help="Only keys from this one on.")] = None,
    stop: Annotated[str | None, typer.Option(help="Only keys before this one.")] = None,
    key: Annotated[
        KeyForm, typer.Option(help="How keys are given; auto is text, or hexadecimal with a leading 0x.")
    ] = KeyForm.auto,
    json: AsJson = False,
) -> None:
    """Make a database that begins with what this one holds; both go their own ways from there.

    No table is copied: the clone borrows them, and this database keeps them for it. With a prefix or range it holds
    that part only, and takes no write and no read outside of it. If it is interrupted, the same call finishes it;
    where a database is already, it is refused.

    For example:

        flagstone -p s3://bucket/shop clone shop-test
        flagstone -p s3://bucket/shop clone s3://bucket/eu --prefix eu/
        flagstone -p ./shop clone ./before --checkpoint 01740ee5-6459-44af-9a45-85deb6e468e3
    """
    call = invocation(context, json=json)
    keys = _key_range(prefix, start, stop, key)
    source = parse_checkpoint(checkpoint)
    connection = call.connect(patient=True)
    target = _neighbour(connection, to)
    with working(f"cloning to {to}", connection):
        made = connection.admin().clone(target, checkpoint=source, range=keys)
    _print_made(call, connection, target, made)


def union(
    context: typer.Context,
    to: To,
    sources: Annotated[list[str], typer.Argument(help="The other databases to take in, of the same store.")],
    json: AsJson = False,
) -> None:
    """Make one database of this one and others that hold different keys.

    All must be flushed, and none may have keys between those of another. No table is copied: the new database
    borrows them. If it is interrupted, the same call finishes it.

    For example:

        flagstone -p s3://bucket/eu union world us asia
        flagstone -p ./part-1 union ./whole ./part-2 ./part-3
    """
    call = invocation(context, json=json)
    connection = call.connect(patient=True)
    target = _neighbour(connection, to)
    others = [_neighbour(connection, source) for source in sources]
    with working(f"uniting {1 + len(others)} databases", connection):
        made = connection.admin().union(target, others)
    _print_made(call, connection, target, made)


def restore(
    context: typer.Context,
    id: Annotated[  # noqa: A002 - as with the other commands about checkpoints
        str, typer.Option("--id", "-i", "--checkpoint", metavar="UUID", help="The checkpoint to go back to.")
    ],
    save: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="First keep the present state as a checkpoint of this name, to be able to return.",
        ),
    ] = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Make what a checkpoint pins the current state again; what was written since is given up.

    A writer or compactor that is at work is replaced: it learns it at its next write. Checkpoints stay.

    For example:

        flagstone -p s3://bucket/shop restore --id 01740ee5-6459-44af-9a45-85deb6e468e3 --save before-restore
        flagstone -p s3://bucket/shop restore --id 01740ee5-6459-44af-9a45-85deb6e468e3 --dry-run
    """
    call = invocation(context, json=json)
    wanted = require_checkpoint_id(id)
    connection = call.connect(patient=True)
    admin = connection.admin()
    entry = next((found for found in admin.checkpoints() if found.id == wanted), None)
    if entry is None:
        raise InvalidRequest(f"no checkpoint {wanted}: it was deleted, or expired and was collected")
    consequence = (
        f"this puts {connection.root} back to {time_text(entry.created_s)} (manifest {entry.manifest_id})"
    )
    if dry_run:
        now, then = admin.manifest(), admin.manifest(entry.manifest_id)
        if call.json:
            print_json({"dry_run": True, "checkpoint_id": str(wanted), "manifest_id": entry.manifest_id})
        else:
            given_up = now.value.last_l0_seq - then.value.last_l0_seq
            say(f"{consequence}; {max(given_up, 0):,} flushed sequence numbers would be given up")
        return
    confirm(f"{consequence} and gives up what was written since", yes=yes)
    saved = None if save is None else admin.create_checkpoint(name=save)
    with working("restoring", connection):
        made = admin.restore(wanted)
    if call.json:
        kept = None if saved is None else str(saved.id)
        print_json({"checkpoint_id": str(wanted), "manifest_id": made.id, "saved_checkpoint_id": kept})
    else:
        kept = "" if saved is None else f"; the state before is checkpoint {saved.id}"
        say(f"manifest {made.id} has the state of checkpoint {wanted}{kept}")


def delete_db(
    context: typer.Context,
    yes: Annotated[
        bool, typer.Option("--confirm", "--yes", "-y", help="Delete it, without being asked.")
    ] = False,
    soft: Annotated[
        bool,
        typer.Option(
            "--soft", help="Mark it, refuse to open it, and let garbage collection delete it later."
        ),
    ] = False,
    grace: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="With --soft: how long to keep it; by default 1day."),
    ] = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Delete the database and release what it borrowed from others.

    Refused while somebody holds a checkpoint of it, a clone for instance; a soft deletion waits for that. Whoever has
    it open for writing is replaced. On a terminal it asks; otherwise, as in SlateDB, without --confirm it only says
    what would be deleted.

    For example:

        flagstone -p s3://bucket/shop delete-db --dry-run
        flagstone -p s3://bucket/shop delete-db --soft --grace 7days
        flagstone -p s3://bucket/shop delete-db --confirm
    """
    call = invocation(context, json=json)
    kept_for = parse_lifetime(grace)
    if kept_for is not None and not soft:
        raise InvalidRequest("--grace says how long a soft deletion waits; add --soft")
    connection = call.connect(patient=True)
    admin = connection.admin()
    if dry_run or not (yes or can_ask()):
        _print_destruction(call, admin.destroy(soft, dry_run=True), dry_run=True)
        if not dry_run:
            sys.stderr.write("flagstone: nothing was deleted; say --confirm to do it\n")
        return
    if not yes:
        doomed = admin.destroy(soft, dry_run=True).deleted
        confirm(
            f"this deletes {connection.root} in {connection.store.url}: {len(doomed):,} objects", yes=False
        )
    with working("deleting", connection):
        done = admin.destroy(soft) if kept_for is None else admin.destroy(soft, grace=kept_for)
    _print_destruction(call, done, dry_run=False)


def purge_db(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it, without being asked.")] = False,
    min_age: Annotated[
        str | None,
        typer.Option(
            "--min-age",
            metavar="DURATION",
            help="Refuse if it was deleted more recently than that; by default 1day.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Delete the few small objects that a deleted database has left.

    They keep late requests of its former processes from being taken for those of the next database at this path. Only
    when every process that used the database has ended.

    For example:

        flagstone -p s3://bucket/shop purge-db --yes
    """
    call = invocation(context, json=json)
    age = parse_lifetime(min_age)
    connection = call.connect(patient=True)
    if not yes:
        confirm(f"this removes what is left of {connection.root} in {connection.store.url}", yes=False)
    admin = connection.admin()
    deleted = admin.purge() if age is None else admin.purge(min_age=age)
    if call.json:
        print_json({"deleted": list(deleted)})
    else:
        say(f"{len(deleted):,} objects deleted")


def _key_range(prefix: str | None, start: str | None, stop: str | None, form: KeyForm) -> KeyRange | None:
    if prefix is not None:
        if start is not None or stop is not None:
            raise InvalidRequest("clone by --prefix or by --start and --stop, not both")
        return KeyRange.of_prefix(parse_bytes(prefix, form, what="prefix"))
    if start is None and stop is None:
        return None
    first = None if start is None else parse_bytes(start, form, what="start")
    last = None if stop is None else parse_bytes(stop, form, what="stop")
    return KeyRange(first or None, last)


def _neighbour(connection: Connection, address: str) -> str:
    """The address, with a folder relative to here made absolute: a bare name is one inside the store."""
    here = address.startswith(("./", "../")) or address in (".", "..")
    return str(Path(address).absolute()) if here and connection.store.url.startswith("file:") else address


def _print_made(call: Invocation, connection: Connection, to: str, made: Versioned[Manifest]) -> None:
    if call.json:
        from flagstone.cli.documents import manifest_document

        print_json(
            {"path": to, "store": connection.store.url, "manifest": manifest_document(made.id, made.value)}
        )
    else:
        tables, owners = len(made.value.ssts), len(made.value.external_dbs)
        say(f"{to}: manifest {made.id}, {tables:,} tables borrowed from {owners:,} databases")


def _print_destruction(call: Invocation, done: Destruction, *, dry_run: bool) -> None:
    due = None if done.due_ms is None else time_text(done.due_ms / 1000)
    if call.json:
        print_json(
            {
                "dry_run": dry_run,
                "state": done.verdict.name.lower(),
                "deleted": list(done.deleted),
                "kept": list(done.kept),
                "due_time": due,
                "checkpoints": [str(checkpoint.id) for checkpoint in done.checkpoints],
                "unreleased": list(done.unreleased),
            }
        )
        return
    for path in done.deleted if dry_run else ():
        say(path)
    if due is not None:
        say(f"marked; garbage collection deletes it after {due}, once nobody holds a checkpoint of it")
    else:
        say(f"{len(done.deleted):,} objects {'would be deleted' if dry_run else 'deleted'}")
        if done.kept:
            say(f"{len(done.kept):,} small objects stay, which keep its ids from being used again (purge-db)")
    for reason in done.unreleased:
        say(f"not released: {reason}; if no clone needs it, use delete-checkpoint")


COMMANDS: Final[tuple[Callable[..., None], ...]] = (clone, union, restore, delete_db, purge_db)
