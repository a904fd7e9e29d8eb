"""Bulk loads: `loads`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from flagstone.cli.context import AsJson, invocation
from flagstone.cli.output import moment_text, print_json, print_line, print_table
from flagstone.inspector.text import size_text


def loads(
    context: typer.Context,
    cancel: Annotated[
        str | None,
        typer.Option("--cancel", metavar="UUID", help="Cancel this load and delete its SSTs."),
    ] = None,
    json: AsJson = False,
) -> None:
    """List the bulk loads of Spark, or cancel one that is not finished.

    A load whose driver was killed is shown as dead after a few minutes, and garbage collection deletes it.

    For example:

        flagstone -p s3://bucket/shop loads
        flagstone -p s3://bucket/shop loads --cancel 01740ee5-6459-44af-9a45-85deb6e468e3
    """
    call = invocation(context, json=json)
    if cancel is not None:
        from flagstone.clones.checkpoint import parse_checkpoint_id

        load_id = parse_checkpoint_id(cancel)
        deleted = call.connect().admin().cancel_load(load_id)
        if call.json:
            print_json({"result": "success", "load_id": str(load_id), "deleted_ssts": deleted})
        else:
            print_line(f"load {load_id} is cancelled, {deleted} SSTs are deleted")
        return
    found = call.connect().admin().loads()
    if call.json:
        print_json([{**asdict(each), "id": str(each.id)} for each in found])
        return
    rows = [
        (
            str(each.id),
            each.state if each.alive or each.state in ("done", "refused") else "dead",
            moment_text(each.began_s),
            moment_text(each.expires_s) or "when it was read",
            each.ssts,
            size_text(each.bytes),
            each.reason or each.query,
        )
        for each in found
    ]
    columns = ("load", "state", "began", "record expires", "SSTs", "size", "note")
    print_table(columns, rows, empty="no bulk loads", whole=("load",))
