"""Rows: `get`, `put`, `delete`, `scan` and `diff`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flagstone.cli.context import AsJson, Invocation, invocation
from flagstone.cli.output import print_json, print_json_line, print_line
from flagstone.cli.parsing import (
    KeyForm,
    ValueForm,
    key_form,
    parse_as_of,
    parse_bytes,
    parse_lifetime,
    parse_merge_operator,
    screen_text,
    show_key,
    show_value,
)
from flagstone.cli.process import ABSENT
from flagstone.errors import InvalidRequest
from flagstone.inspector.text import json_text, line_text

if TYPE_CHECKING:
    from flagstone.types import Row

Key = Annotated[str, typer.Argument(help="The key, as text unless --hex or --base64 says otherwise.")]
Hex = Annotated[
    bool, typer.Option("--hex", help="The key is given in hexadecimal digits, with or without 0x.")
]
Base64 = Annotated[bool, typer.Option("--base64", help="The key is given in base64.")]
Checkpoint = Annotated[
    str | None,
    typer.Option(metavar="ID|NAME", help="Read the state of this checkpoint instead of the current one."),
]
AsOf = Annotated[
    str | None,
    typer.Option(
        metavar="MOMENT",
        help='Read an earlier state: a sequence number, or a time such as 2026-11-16T03:00:00Z, "2h ago", @1794798585.',
    ),
]
MergeWith = Annotated[
    str | None,
    typer.Option(
        "--merge-operator",
        metavar="NAME",
        help="Combine merge operands with this operator: counter, concatenate, set-union, maximum, minimum, "
        "json-merge-patch, or module:attribute.",
    ),
]


def get(
    context: typer.Context,
    key: Key,
    as_hex: Hex = False,
    as_base64: Base64 = False,
    checkpoint: Checkpoint = None,
    as_of: AsOf = None,
    include_expired: Annotated[
        bool, typer.Option("--include-expired", help="Show the row even if it has expired.")
    ] = False,
    merge_operator: MergeWith = None,
    json: AsJson = False,
) -> None:
    """Print the value of one key; exit with 1 if there is none.

    A pipe or file gets the value byte for byte. A terminal shows it as text, or as 0x… if it is not text. --json
    adds its sequence number and times. Writes nothing and may run beside a writer.

    For example:

        flagstone -p s3://bucket/shop get user/42
        flagstone -p s3://bucket/shop get --hex 0x0001ff > value.bin
        flagstone -p s3://bucket/shop get user/42 --checkpoint nightly
    """
    call = invocation(context, json=json)
    wanted = parse_bytes(key, key_form(hex_given=as_hex, base64_given=as_base64))
    operator, moment = parse_merge_operator(merge_operator), parse_as_of(as_of)
    connection = call.connect()
    with connection.reader(checkpoint=checkpoint, as_of=moment, merge_operator=operator) as reader:
        row = reader.get_row(wanted, include_expired=include_expired)
    if row is None:
        hint = "; for a key in hexadecimal add --hex" if key[:2].lower() == "0x" and not as_hex else ""
        sys.stderr.write(f"flagstone: no value for the key {line_text(wanted)}{hint}\n")
        if call.json:
            print_json(None)
        raise typer.Exit(ABSENT)
    if call.json:
        print_json(row_json(row))
    elif sys.stdout.isatty():
        print_line(screen_text(row.value))
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(row.value)
        sys.stdout.buffer.flush()


def put(
    context: typer.Context,
    key: Key,
    value: Annotated[
        str, typer.Argument(help="The value: text, @FILE for a file's bytes, or - for standard input.")
    ],
    as_hex: Hex = False,
    as_base64: Base64 = False,
    value_form: Annotated[
        KeyForm,
        typer.Option(
            "--value-form",
            help="How the value is written; the bytes of a file or standard input are used as is.",
        ),
    ] = KeyForm.utf8,
    ttl: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="The row expires after this time, such as 7days or 1h30m."),
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Create the database if there is none.")] = False,
    json: AsJson = False,
) -> None:
    """Set one key, durably.

    The command opens the database for writing, which fences a running writer: its next write fails. If a database is
    in use, write through the process that has it open.

    For example:

        flagstone -p ./shop put user/42 '{"name": "Ada"}' --create
        flagstone -p ./shop put image/7 @picture.png --ttl "7days 30min"
        echo -n hello | flagstone -p ./shop put --hex 00ff -
    """
    call = invocation(context, json=json)
    wanted = parse_bytes(key, key_form(hex_given=as_hex, base64_given=as_base64))
    lifetime = parse_lifetime(ttl)
    content = _read_value(value, value_form)
    with call.connect(long_work=True).database(call.settings(), create=create) as database:
        handle = database.put(wanted, content, ttl=lifetime, await_durable=True)
    _print_written(call, wanted, handle.seq, f"{len(content):,} bytes")


def delete(
    context: typer.Context,
    key: Annotated[
        str | None, typer.Argument(help="The key, as text unless --hex or --base64 says otherwise.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Delete every key that begins with this.")] = None,
    start: Annotated[
        str | None, typer.Option("--from", "--start", help="Delete every key from this one on.")
    ] = None,
    stop: Annotated[
        str | None, typer.Option("--to", "--stop", help="Delete every key up to this one, without it.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete a range without being asked.")] = False,
    as_hex: Hex = False,
    as_base64: Base64 = False,
    json: AsJson = False,
) -> None:
    """Delete one key, or all keys of a range, durably.

    A range disappears with one manifest, however large it is. The command first shows how many rows it holds, counted
    up to 10,000, and the size of the SSTs that hold them, and asks. It opens the database for writing, which fences a
    running writer: its next write fails.

    For example:

        flagstone -p ./shop delete user/42
        flagstone -p ./shop delete --hex 0x00ff
        flagstone -p ./shop delete --prefix session/ --yes
        flagstone -p ./shop delete --from 2024-01 --to 2025-01
    """
    call = invocation(context, json=json)
    form = key_form(hex_given=as_hex, base64_given=as_base64)
    bounds = [
        None if text is None else parse_bytes(text, form, what=name)
        for name, text in (("from", start), ("to", stop), ("prefix", prefix))
    ]
    if any(bound is not None for bound in bounds):
        if key is not None:
            raise InvalidRequest("delete one key, or a range by --prefix or by --from and --to, not both")
        # Imported here: help must not wait for the engine.
        from flagstone.cli.range_delete import delete_range

        delete_range(call, *bounds, yes=yes)
        return
    if key is None:
        raise InvalidRequest("name the key to delete, or a range by --prefix or by --from and --to")
    wanted = parse_bytes(key, form)
    with call.connect(long_work=True).database(call.settings()) as database:
        handle = database.delete(wanted, await_durable=True)
    _print_written(call, wanted, handle.seq, "deleted")


def scan(
    context: typer.Context,
    prefix: Annotated[str | None, typer.Option(help="Only keys that begin with this.")] = None,
    start: Annotated[str | None, typer.Option("--start", "--from", help="From this key on.")] = None,
    stop: Annotated[str | None, typer.Option("--stop", "--to", help="Up to this key, without it.")] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", "--max-keys", min=0, help="At most this many rows.")
    ] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="From the last key to the first.")] = False,
    key: Annotated[
        KeyForm,
        typer.Option(help="How keys are given and shown; auto is text, or hexadecimal with a leading 0x."),
    ] = KeyForm.auto,
    value: Annotated[
        ValueForm, typer.Option(help="How values are shown; none leaves them out.")
    ] = ValueForm.auto,
    as_hex: Annotated[bool, typer.Option("--hex", help="Short for --key hex.")] = False,
    as_base64: Annotated[bool, typer.Option("--base64", help="Short for --key base64.")] = False,
    count: Annotated[bool, typer.Option("--count", help="Only count the rows and their bytes.")] = False,
    checkpoint: Checkpoint = None,
    as_of: AsOf = None,
    include_expired: Annotated[
        bool, typer.Option("--include-expired", help="Also show expired rows.")
    ] = False,
    include_system: Annotated[
        bool,
        typer.Option(
            "--include-system", help="Also show rows of Flagstone itself: schemas, stream progress."
        ),
    ] = False,
    merge_operator: MergeWith = None,
    json: AsJson = False,
) -> None:
    """Print rows in key order, one per line: the key, a tab, the value.

    With --json every line is one row: key, value, seq, created_ms, expires_ms. Writes nothing and may run beside a
    writer; all rows are of one moment.

    For example:

        flagstone -p s3://bucket/shop scan --prefix user/ --limit 10
        flagstone -p s3://bucket/shop scan --from 0x00 --to 0x10 --value len
        flagstone -p s3://bucket/shop --json scan --reverse | jq -r .key
        flagstone -p s3://bucket/shop scan --as-of "2h ago" --count
    """
    call = invocation(context, json=json)
    form = key_form(hex_given=as_hex, base64_given=as_base64, default=key)
    if prefix is not None and (start is not None or stop is not None):
        raise InvalidRequest("scan by --prefix or by --start and --stop, not both")
    bounds = [
        None if text is None else parse_bytes(text, form, what=name)
        for name, text in (("prefix", prefix), ("start", start), ("stop", stop))
    ]
    operator, moment = parse_merge_operator(merge_operator), parse_as_of(as_of)
    connection = call.connect()
    with (
        connection.reader(checkpoint=checkpoint, as_of=moment, merge_operator=operator) as reader,
        reader.scan(
            bounds[1],
            bounds[2],
            prefix=bounds[0],
            reverse=reverse,
            limit=limit,
            include_expired=include_expired,
            include_system=include_system,
        ) as found,
    ):
        if count:
            _count(call, found)
        elif call.json:
            for row in found.rows():
                print_json_line(row_json(row, form, value))
        else:
            print_pairs(found, form, value)


def row_json(row: Row, key: KeyForm = KeyForm.auto, value: ValueForm = ValueForm.auto) -> dict[str, Any]:
    """A row for JSON."""
    shown = {
        "key": show_key(row.key, key, for_json=True),
        "value": show_value(row.value, value, for_json=True),
        "seq": row.seq,
        "created_ms": row.created_ms,
        "expires_ms": row.expires_ms,
    }
    if value is ValueForm.none:
        del shown["value"]
    return shown


def print_pairs(pairs: Iterable[tuple[bytes, bytes]], key: KeyForm, value: ValueForm) -> None:
    """Print rows, one per line."""
    write = sys.stdout.write
    for row_key, row_value in pairs:
        shown = show_value(row_value, value, for_json=False)
        name = show_key(row_key, key, for_json=False)
        write(f"{name}\n" if shown is None else f"{name}\t{shown}\n")


def _count(call: Invocation, pairs: Iterable[tuple[bytes, bytes]]) -> None:
    entries = size = 0
    for key, value in pairs:
        entries += 1
        size += len(key) + len(value)
    if call.json:
        print_json({"entries": entries, "bytes": size})
    else:
        print_line(f"{entries} entries, {size} bytes")


def _read_value(text: str, form: KeyForm) -> bytes:
    if text == "-":
        return sys.stdin.buffer.read()
    if not text.startswith("@"):
        return parse_bytes(text, form, what="value")
    try:
        return Path(text[1:]).read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"cannot read the value from {text[1:]}: {error.strerror}; to store text that begins with @, give - and "
            "pipe the text to standard input"
        ) from None


def _print_written(call: Invocation, key: bytes, seq: int, what: str) -> None:
    if call.json:
        print_json({"key": json_text(key), "seq": seq})
    else:
        print_line(f"{line_text(key)}: {what}, sequence number {seq}")


def diff(
    context: typer.Context,
    before: Annotated[str, typer.Argument(metavar="ID|NAME", help="The checkpoint to start from.")],
    after: Annotated[str, typer.Argument(metavar="ID|NAME", help="The checkpoint to compare it with.")],
    prefix: Annotated[str | None, typer.Option(help="Only keys that begin with this.")] = None,
    key: Annotated[
        KeyForm,
        typer.Option(help="How keys are given and shown; auto is text, or hexadecimal with a leading 0x."),
    ] = KeyForm.auto,
    value: Annotated[
        ValueForm, typer.Option(help="How values are shown; none leaves them out.")
    ] = ValueForm.auto,
    merge_operator: MergeWith = None,
    json: AsJson = False,
) -> None:
    """Print the keys whose rows differ between two checkpoints, in key order.

    A line begins with + for an added key, - for a removed key and ~ for a changed one, followed by the new value (for
    - by the old one). With --json every line has key, before and after. SSTs that both checkpoints share are read
    only where it is necessary.

    For example:

        flagstone -p ./shop diff 01740ee5-6459-44af-9a45-85deb6e468e3 912803c8-7a32-4920-8a42-5abb398157ac
        flagstone -p ./shop --json diff 01740ee5-… 912803c8-… --prefix user/ | jq .key
    """
    call = invocation(context, json=json)
    wanted = None if prefix is None else parse_bytes(prefix, key, what="prefix")
    operator = parse_merge_operator(merge_operator)
    connection = call.connect()
    first, second = connection.checkpoint(before), connection.checkpoint(after)
    found = connection.admin().diff(first, second, prefix=wanted, merge_operator=operator)

    def shown(row: Row | None) -> Any:
        return None if row is None else show_value(row.value, value, for_json=call.json)

    for change in found:
        name = show_key(change.key, key, for_json=call.json)
        old, new = shown(change.before), shown(change.after)
        if call.json:
            print_json_line({"key": name, "before": old, "after": new})
            continue
        sign = "+" if change.before is None else "-" if change.after is None else "~"
        text = old if change.after is None else new
        sys.stdout.write(f"{sign} {name}\n" if text is None else f"{sign} {name}\t{text}\n")
