"""`flagstone stats`: what the database looks like, on one page."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import typer

from flagstone.cli.context import AsJson, invocation
from flagstone.cli.output import print_facts, print_json, print_table, say
from flagstone.cli.progress import working
from flagstone.inspector.text import size_text

if TYPE_CHECKING:
    from flagstone.cli.connection import Connection
    from flagstone.inspector.looking import Seen


def stats(context: typer.Context, json: AsJson = False) -> None:
    """Show sizes, levels, log, checkpoints, borrowed tables and waste.

    Reads the current manifest, those its checkpoints pin, and lists the objects; no table is read, nothing is
    written. The last line tells what that took.

    For example:

        flagstone -p s3://bucket/shop stats
        flagstone -p s3://bucket/shop --json stats | jq .tables.unreferenced.bytes
    """
    call = invocation(context, json=json)
    connection = call.connect()
    from flagstone.inspector.looking import look

    with working("looking", connection):
        seen = look(connection.store, connection.wal_store, connection.root)
    if call.json:
        print_json({**seen.facts(), **seen.overview.to_dict(), "requests": _requests(connection)})
    else:
        _print(connection, seen)


def _requests(connection: Connection) -> dict[str, int]:
    found: dict[str, int] = {}
    for counter in connection.counters:
        for verb, count in counter.totals()["requests"].items():
            found[verb] = found.get(verb, 0) + count
    return dict(sorted(found.items()))


def _print(connection: Connection, seen: Seen) -> None:
    facts, found, manifest = seen.facts(), seen.overview, seen.manifest.value
    tables, log, checkpoints = found.tables, found.log, facts["checkpoints"]
    held = (
        f"{checkpoints['total']}: {checkpoints['named']} named, {checkpoints['permanent']} permanent, "
        f"{checkpoints['expired']} expired"
    )
    print_facts(
        [
            ("manifest", facts["manifest_id"]),
            ("state", None if facts["initialized"] else "not initialized: a clone under construction"),
            ("epochs", f"writer {facts['writer_epoch']}, compactor {facts['compactor_epoch']}"),
            ("last flush", f"sequence number {facts['last_l0_seq']:,}, {facts['last_l0_time'] or 'never'}"),
            ("live tables", _weight(tables.live)),
            ("borrowed", _weight(tables.borrowed) if tables.borrowed.count else None),
            ("pinned only", _weight(tables.pinned) if tables.pinned.count else None),
            ("unreferenced", _weight(tables.unreferenced) if tables.unreferenced.count else None),
            ("log to replay", f"{_weight(log.to_replay)}, after {log.replay_after}"),
            ("log flushed", _weight(log.flushed) if log.flushed.count else None),
            ("fences", log.fences),
            ("checkpoints", held),
            (
                "space amplification",
                _ratio(found.space_amplification, "estimate: the trees over their oldest runs"),
            ),
            ("storage overhead", _ratio(found.storage_overhead, "all objects over live tables")),
        ],
        title=f"{connection.root} in {connection.store.url}",
    )
    for tree in found.trees:
        say("")
        name = f"segment {tree.prefix}" if tree.prefix else "tree"
        rows: list[tuple[Any, ...]] = [("L0", tree.l0.count, size_text(tree.l0.bytes))]
        rows += [(f"run {run.id}", run.tables, size_text(run.bytes)) for run in tree.runs]
        print_table((name, "tables", "size"), rows, empty="no data")
    if manifest.external_dbs:
        say("")
        external = [(entry.path, entry.tables, size_text(entry.bytes)) for entry in found.external_dbs]
        print_table(("external database", "tables", "size"), external, empty="")
    say("")
    folders = [(folder, weight.count, size_text(weight.bytes)) for folder, weight in found.objects.items()]
    print_table(("folder", "objects", "size"), folders, empty="no objects")
    say("")
    asked = ", ".join(f"{count} {verb}" for verb, count in _requests(connection).items())
    print_facts([("requests", f"{connection.requests} ({asked}), {size_text(connection.bytes_moved)}")])


def _weight(weight: Any) -> str:
    return f"{weight.count:,}, {size_text(weight.bytes)}"


def _ratio(ratio: float | None, meaning: str) -> str | None:
    return None if ratio is None else f"{ratio:.2f}× ({meaning})"


COMMANDS: Final[tuple[Callable[..., None], ...]] = (stats,)
