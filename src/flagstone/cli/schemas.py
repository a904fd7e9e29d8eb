"""Stored schemas: `schema`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flagstone.cli.context import AsJson, invocation
from flagstone.cli.output import print_json, print_line, print_table
from flagstone.cli.parsing import KeyForm, parse_bytes, show_key
from flagstone.cli.process import ABSENT

if TYPE_CHECKING:
    from flagstone.schema import TableSchema


def schema(
    context: typer.Context,
    prefix: Annotated[
        str | None, typer.Option(help="Only the schema of the rows whose keys begin with this.")
    ] = None,
    key: Annotated[
        KeyForm,
        typer.Option(
            help="How prefixes are given and shown; auto is text, or hexadecimal with a leading 0x."
        ),
    ] = KeyForm.auto,
    versions: Annotated[
        bool, typer.Option("--versions", help="Show every version, not only the current one.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Show the schemas of structured rows: key columns, value columns, types.

    A database has one schema for all its rows, or one for each prefix, such as that of a collection. With --json all
    versions are shown.

    For example:

        flagstone -p s3://bucket/shop schema
        flagstone -p s3://bucket/shop schema --versions
        flagstone -p s3://bucket/shop --json schema --prefix orders/ | jq '.[0].versions[-1].columns'
    """
    call = invocation(context, json=json)
    wanted = None if prefix is None else parse_bytes(prefix, key, what="prefix")
    found = call.connect().admin().schemas()
    if wanted is not None:
        found = {name: each for name, each in found.items() if name == wanted}
    if call.json:
        print_json([_document(show_key(name, key, for_json=True), each) for name, each in found.items()])
    else:
        for name, each in found.items():
            _print(show_key(name, key, for_json=False), each, every_version=versions)
        if not found:
            print_line("no schema is stored" + ("" if wanted is None else " for that prefix"))
    if not found:
        sys.exit(ABSENT)


def _document(prefix: str, schema: TableSchema) -> dict[str, Any]:
    return {
        "prefix": prefix,
        "value_format": schema.value_format,
        "key_columns": _columns(schema.key),
        "versions": [
            {"version": version.number, "columns": _columns(version.columns)} for version in schema.versions
        ],
    }


def _columns(columns: Any) -> list[dict[str, Any]]:
    from flagstone.schema.table_schema import type_text

    return [
        {"name": column.name, "type": type_text(column.type), "nullable": column.nullable}
        for column in columns
    ]


def _print(prefix: str, schema: TableSchema, *, every_version: bool) -> None:
    from flagstone.schema.table_schema import type_text

    shown = schema.versions if every_version else (schema.current,)
    for version in shown:
        where = f"keys that begin with {prefix}" if prefix else "all keys"
        print_line(f"{where}: version {version.number}, values of the format {schema.value_format}")
        rows = [(f"key {at}", column) for at, column in enumerate(schema.key, 1)]
        rows += [("value", column) for column in version.columns]
        print_table(
            ["", "column", "type", "null"],
            [
                (place, column.name, type_text(column.type), "yes" if column.nullable else "no")
                for place, column in rows
            ],
            empty="",
        )
