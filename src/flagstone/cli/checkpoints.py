"""Checkpoints and what is made from them: `create-checkpoint`, `list-checkpoints`, `clone`, `union`, `restore`, …"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flagstone.cli.context import AsJson, Invocation, invocation
from flagstone.cli.output import confirm, moment_text, print_json, print_line, print_table, working
from flagstone.cli.parsing import (
    KeyForm,
    parse_bytes,
    parse_lifetime,
)
from flagstone.errors import InvalidRequest
from flagstone.inspector.text import time_text
from flagstone.types import KeyRange

if TYPE_CHECKING:
    from flagstone.cli.connection import Connection
    from flagstone.metadata.manifest import Checkpoint, Manifest
    from flagstone.metadata.sequenced import Versioned

Id = Annotated[
    str,
    typer.Option(
        "--id", "-i", metavar="ID|NAME", help="The checkpoint: its id or name, as in list-checkpoints."
    ),
]
Lifetime = Annotated[
    str | None,
    typer.Option(
        "--lifetime",
        "-l",
        metavar="DURATION",
        help='How long it lives from now on, such as "7days 30min"; for ever if not given.',
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Also if a clone needs this checkpoint; the clone then loses data.")
]


def create_checkpoint(
    context: typer.Context,
    lifetime: Lifetime = None,
    source: Annotated[
        str | None,
        typer.Option("--source", "-s", metavar="ID|NAME", help="Keep the same manifest as this checkpoint."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="A name to find it by; it need not be unique.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Keep the current state from garbage collection.

    The checkpoint includes every durable row, also those that a running writer has only in its WAL. Prints its id.

    For example:

        flagstone -p s3://bucket/shop create-checkpoint --name nightly --lifetime "7days 30min"
        flagstone -p s3://bucket/shop create-checkpoint --source 01740ee5-6459-44af-9a45-85deb6e468e3
    """
    call = invocation(context, json=json)
    lifetime_given, connection = parse_lifetime(lifetime), call.connect()
    source_id = None if source is None else connection.checkpoint(source)
    _print(call, connection.admin().create_checkpoint(lifetime_given, source_id, name))


def refresh_checkpoint(
    context: typer.Context,
    id: Id,  # noqa: A002 - SlateDB's name
    lifetime: Lifetime = None,
    force: Force = False,
    json: AsJson = False,
) -> None:
    """Set the lifetime of a checkpoint, counted from now; without --lifetime it never expires.

    A checkpoint that a clone needs never expires.

    For example:

        flagstone -p s3://bucket/shop refresh-checkpoint --id nightly --lifetime 1day
    """
    call = invocation(context, json=json)
    lifetime_given, connection = parse_lifetime(lifetime), call.connect()
    checkpoint = connection.checkpoint(id, newest=False)
    _print(call, connection.admin().refresh_checkpoint(checkpoint, lifetime_given, force=force))


def delete_checkpoint(
    context: typer.Context,
    id: Id,  # noqa: A002 - SlateDB's name
    force: Force = False,
    json: AsJson = False,
) -> None:
    """Delete a checkpoint; garbage collection may then delete what only this checkpoint refers to.

    Refused while a clone needs the checkpoint: that clone would lose data.

    For example:

        flagstone -p s3://bucket/shop delete-checkpoint --id 01740ee5-6459-44af-9a45-85deb6e468e3
    """
    call = invocation(context, json=json)
    connection = call.connect()
    checkpoint = connection.checkpoint(id, newest=False)
    connection.admin().delete_checkpoint(checkpoint, force=force)
    if call.json:
        print_json({"result": "success", "checkpoint_id": str(checkpoint)})
    else:
        print_line(f"checkpoint {checkpoint} is deleted")


def list_checkpoints(
    context: typer.Context,
    name: Annotated[str | None, typer.Option("--name", "-n", help="Only checkpoints of this name.")] = None,
    json: AsJson = False,
) -> None:
    """List the checkpoints, oldest first.

    For example:

        flagstone -p s3://bucket/shop list-checkpoints
        flagstone -p s3://bucket/shop --json list-checkpoints --name nightly | jq -r '.[-1].id'
    """
    call = invocation(context, json=json)
    found = call.connect().admin().checkpoints(name)
    if call.json:
        from flagstone.cli.documents import checkpoint_document

        print_json([checkpoint_document(checkpoint) for checkpoint in found])
    else:
        print_checkpoints(found)


def print_checkpoints(checkpoints: Iterable[Checkpoint]) -> None:
    """Print a table of checkpoints."""
    rows = [
        (
            str(checkpoint.id),
            checkpoint.manifest_id,
            moment_text(checkpoint.created_s),
            moment_text(checkpoint.expires_s) or "never",
            checkpoint.name or "",
        )
        for checkpoint in checkpoints
    ]
    print_table(
        ("checkpoint", "manifest", "created", "expires", "name"),
        rows,
        empty="no checkpoints",
        whole=("checkpoint",),
    )


def _print(call: Invocation, checkpoint: Checkpoint) -> None:
    if call.json:
        from flagstone.cli.documents import checkpoint_document

        print_json(checkpoint_document(checkpoint))
    else:
        expires = time_text(checkpoint.expires_s)
        until = "until it is deleted" if expires is None else f"until {expires}"
        print_line(f"checkpoint {checkpoint.id} keeps manifest {checkpoint.manifest_id} {until}")


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would happen.")]


To = Annotated[
    str,
    typer.Argument(help="The new database: a path inside the same store, or its address there."),
]


def clone(
    context: typer.Context,
    to: To,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="ID|NAME", help="Clone the state of this checkpoint instead of the current one."
        ),
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Only keys that begin with this.")] = None,
    start: Annotated[str | None, typer.Option(help="Only keys from this one on.")] = None,
    stop: Annotated[str | None, typer.Option(help="Only keys before this one.")] = None,
    key: Annotated[
        KeyForm, typer.Option(help="How keys are given; auto is text, or hexadecimal with a leading 0x.")
    ] = KeyForm.auto,
    json: AsJson = False,
) -> None:
    """Create a database that starts with the rows of this one; later writes to one do not reach the other.

    No SST is copied: the clone uses the SSTs of this database, which keeps them. With a prefix or range the clone
    has only those keys, and refuses reads and writes of others. If the command is interrupted, repeat it to finish.
    Refused if there is a database at the path already.

    For example:

        flagstone -p s3://bucket/shop clone shop-test
        flagstone -p s3://bucket/shop clone s3://bucket/eu --prefix eu/
        flagstone -p ./shop clone ./before --checkpoint nightly
    """
    call = invocation(context, json=json)
    keys = _clone_range(prefix, start, stop, key)
    connection = call.connect(long_work=True)
    source = None if checkpoint is None else connection.checkpoint(checkpoint)
    target = _neighbour(connection, to)
    with working(f"cloning to {to}", connection):
        made = connection.admin().clone(target, checkpoint=source, range=keys)
    _print_created(call, connection, target, made)


def union(
    context: typer.Context,
    to: To,
    sources: Annotated[list[str], typer.Argument(help="The other databases, in the same store.")],
    json: AsJson = False,
) -> None:
    """Create one database from this one and others that have different keys.

    All must be flushed, and their key ranges must not overlap. No SST is copied: the new database uses the SSTs of
    the others. If the command is interrupted, repeat it to finish.

    For example:

        flagstone -p s3://bucket/eu union world us asia
        flagstone -p ./part-1 union ./whole ./part-2 ./part-3
    """
    call = invocation(context, json=json)
    connection = call.connect(long_work=True)
    target = _neighbour(connection, to)
    others = [_neighbour(connection, source) for source in sources]
    with working(f"uniting {1 + len(others)} databases", connection):
        made = connection.admin().union(target, others)
    _print_created(call, connection, target, made)


def restore(
    context: typer.Context,
    id: Annotated[  # noqa: A002 - as with the other commands about checkpoints
        str,
        typer.Option("--id", "-i", "--checkpoint", metavar="ID|NAME", help="The checkpoint to go back to."),
    ],
    save: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="First keep the current state as a checkpoint of this name, so that you can return to it.",
        ),
    ] = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Make the state of a checkpoint the current state again; later writes are given up.

    A running writer or compactor is fenced: its next write fails. Checkpoints stay.

    For example:

        flagstone -p s3://bucket/shop restore --id 01740ee5-6459-44af-9a45-85deb6e468e3 --save before-restore
        flagstone -p s3://bucket/shop restore --id nightly --dry-run
    """
    call = invocation(context, json=json)
    connection = call.connect(long_work=True)
    wanted = connection.checkpoint(id, newest=False)
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
            print_line(f"{consequence}; {max(given_up, 0):,} flushed sequence numbers would be given up")
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
        print_line(f"manifest {made.id} has the state of checkpoint {wanted}{kept}")


def _clone_range(prefix: str | None, start: str | None, stop: str | None, form: KeyForm) -> KeyRange | None:
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
    """The address, absolute if it is relative to the current folder. A bare name is a path inside the store."""
    relative = address.startswith(("./", "../")) or address in (".", "..")
    return str(Path(address).absolute()) if relative and connection.store.url.startswith("file:") else address


def _print_created(call: Invocation, connection: Connection, to: str, made: Versioned[Manifest]) -> None:
    if call.json:
        from flagstone.cli.documents import manifest_document

        print_json(
            {"path": to, "store": connection.store.url, "manifest": manifest_document(made.id, made.value)}
        )
    else:
        ssts, lenders = len(made.value.ssts), len(made.value.external_dbs)
        print_line(f"{to}: manifest {made.id}, {ssts:,} SSTs borrowed from {lenders:,} databases")
