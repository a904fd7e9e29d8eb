"""Checkpoints: `create-checkpoint`, `refresh-checkpoint`, `delete-checkpoint` and `list-checkpoints`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flagstone.cli.context import AsJson, Invocation, invocation
from flagstone.cli.output import moment_text, print_json, print_table, say
from flagstone.cli.parsing import parse_checkpoint, parse_lifetime, require_checkpoint_id
from flagstone.inspector.text import time_text

if TYPE_CHECKING:
    from flagstone.metadata.manifest import Checkpoint

Id = Annotated[
    str, typer.Option("--id", "-i", metavar="UUID", help="The checkpoint; list-checkpoints shows them.")
]
Lifetime = Annotated[
    str | None,
    typer.Option(
        "--lifetime",
        "-l",
        metavar="DURATION",
        help='How long it lives from now on, such as "7days 30min"; for ever, if not given.',
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Also if a living clone borrows by it, which loses its data then.")
]


def create_checkpoint(
    context: typer.Context,
    lifetime: Lifetime = None,
    source: Annotated[
        str | None,
        typer.Option("--source", "-s", metavar="UUID", help="Pin once more what this checkpoint pins."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="A name to find it by; need not be unique.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Pin what is on the store now, so that garbage collection leaves it alone.

    Everything durable is included, also what a running writer has only in its log. Prints the checkpoint's id.

    For example:

        flagstone -p s3://bucket/shop create-checkpoint --name nightly --lifetime "7days 30min"
        flagstone -p s3://bucket/shop create-checkpoint --source 01740ee5-6459-44af-9a45-85deb6e468e3
    """
    call = invocation(context, json=json)
    pinned, lives = parse_checkpoint(source), parse_lifetime(lifetime)
    _print(call, call.connect().admin().create_checkpoint(lives, pinned, name))


def refresh_checkpoint(
    context: typer.Context,
    id: Id,  # noqa: A002 - SlateDB's name
    lifetime: Lifetime = None,
    force: Force = False,
    json: AsJson = False,
) -> None:
    """Let a checkpoint live for another while, counted from now, or for ever.

    A checkpoint that a living clone borrows by keeps living for ever.

    For example:

        flagstone -p s3://bucket/shop refresh-checkpoint --id 01740ee5-6459-44af-9a45-85deb6e468e3 --lifetime 1day
    """
    call = invocation(context, json=json)
    checkpoint, lives = require_checkpoint_id(id), parse_lifetime(lifetime)
    _print(call, call.connect().admin().refresh_checkpoint(checkpoint, lives, force=force))


def delete_checkpoint(
    context: typer.Context,
    id: Id,  # noqa: A002 - SlateDB's name
    force: Force = False,
    json: AsJson = False,
) -> None:
    """Delete a checkpoint: what only it pins may be collected from now on.

    Refused while a living clone borrows by it: that clone would lose its data.

    For example:

        flagstone -p s3://bucket/shop delete-checkpoint --id 01740ee5-6459-44af-9a45-85deb6e468e3
    """
    call = invocation(context, json=json)
    checkpoint = require_checkpoint_id(id)
    call.connect().admin().delete_checkpoint(checkpoint, force=force)
    if call.json:
        print_json({"result": "success", "checkpoint_id": str(checkpoint)})
    else:
        say(f"checkpoint {checkpoint} is deleted")


def list_checkpoints(
    context: typer.Context,
    name: Annotated[str | None, typer.Option("--name", "-n", help="Only those of exactly this name.")] = None,
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
    """A table of checkpoints."""
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
        say(f"checkpoint {checkpoint.id} pins manifest {checkpoint.manifest_id} {until}")


COMMANDS: Final[tuple[Callable[..., None], ...]] = (
    create_checkpoint,
    refresh_checkpoint,
    delete_checkpoint,
    list_checkpoints,
)
