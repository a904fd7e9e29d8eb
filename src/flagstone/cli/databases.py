"""Whole databases: `delete-db`, `purge-db`, `stats`, `inspect`, `verify` and `repair`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flagstone.cli.checkpoints import DryRun
from flagstone.cli.context import (
    AsJson,
    Invocation,
    OnSpark,
    SparkConf,
    invocation,
    parse_conf,
    spark_arguments,
    spark_session,
)
from flagstone.cli.output import (
    can_ask,
    confirm,
    console,
    print_facts,
    print_json,
    print_line,
    print_table,
    working,
)
from flagstone.cli.parsing import parse_lifetime, parse_merge_operator
from flagstone.cli.process import DAMAGE, service
from flagstone.cli.rows import MergeWith
from flagstone.errors import InvalidRequest
from flagstone.inspector.text import size_text, time_text

if TYPE_CHECKING:
    from flagstone.cli.connection import Connection
    from flagstone.clones.destroy import Destruction
    from flagstone.inspector.snapshot import DatabaseSnapshot
    from flagstone.repair.plan import RepairReport
    from flagstone.verification.report import Report


def delete_db(
    context: typer.Context,
    yes: Annotated[
        bool, typer.Option("--confirm", "--yes", "-y", help="Delete it, without being asked.")
    ] = False,
    soft: Annotated[
        bool,
        typer.Option(
            "--soft",
            help="Only mark it as destroyed, so that it no longer opens; garbage collection deletes it later.",
        ),
    ] = False,
    grace: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="With --soft: how long to keep it; by default 1day."),
    ] = None,
    dry_run: DryRun = False,
    json: AsJson = False,
) -> None:
    """Delete the database, and its checkpoints in the databases whose SSTs it uses.

    Refused while it has a checkpoint, of a clone for instance; a soft deletion waits until the last one is gone. A
    running writer is fenced. On a terminal it asks first. Elsewhere, as in SlateDB, without --confirm it only prints
    what it would delete.

    For example:

        flagstone -p s3://bucket/shop delete-db --dry-run
        flagstone -p s3://bucket/shop delete-db --soft --grace 7days
        flagstone -p s3://bucket/shop delete-db --confirm
    """
    call = invocation(context, json=json)
    kept_for = parse_lifetime(grace)
    if kept_for is not None and not soft:
        raise InvalidRequest("--grace works only with a soft deletion; add --soft")
    connection = call.connect(long_work=True)
    admin = connection.admin()
    if dry_run or not (yes or can_ask()):
        _print_destruction(call, admin.destroy(soft, dry_run=True), dry_run=True)
        if not dry_run:
            sys.stderr.write("flagstone: nothing was deleted; add --confirm to delete it\n")
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
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete them, without being asked.")] = False,
    min_age: Annotated[
        str | None,
        typer.Option(
            "--min-age",
            metavar="DURATION",
            help="Refuse if the database was deleted more recently than that; by default 1day.",
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Delete the few small objects that remain of a deleted database.

    These objects make late requests of its former processes fail, which could otherwise damage the next database at
    this path. Use it only after every process that used the database has ended.

    For example:

        flagstone -p s3://bucket/shop purge-db --yes
    """
    call = invocation(context, json=json)
    age = parse_lifetime(min_age)
    connection = call.connect(long_work=True)
    if not yes:
        confirm(f"this deletes the last objects of {connection.root} in {connection.store.url}", yes=False)
    admin = connection.admin()
    deleted = admin.purge() if age is None else admin.purge(min_age=age)
    if call.json:
        print_json({"deleted": list(deleted)})
    else:
        print_line(f"{len(deleted):,} objects deleted")


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
        print_line(path)
    if due is not None:
        print_line(
            f"marked as destroyed; garbage collection deletes it after {due}, when it has no checkpoint left"
        )
    else:
        print_line(f"{len(done.deleted):,} objects {'would be deleted' if dry_run else 'deleted'}")
        if done.kept:
            print_line(
                f"{len(done.kept):,} small objects stay, so that no id is used again; purge-db deletes them"
            )
    for reason in done.unreleased:
        print_line(f"not released: {reason}; if no clone needs it, use delete-checkpoint")


def stats(context: typer.Context, json: AsJson = False) -> None:
    """Show sizes, levels, WAL, checkpoints, borrowed SSTs and space that is not live.

    Reads the current manifest and those of its checkpoints, and lists the objects. Reads no SST and writes nothing.
    The last line counts the requests.

    For example:

        flagstone -p s3://bucket/shop stats
        flagstone -p s3://bucket/shop --json stats | jq .tables.unreferenced.bytes
    """
    call = invocation(context, json=json)
    connection = call.connect()
    from flagstone.inspector.snapshot import take_snapshot
    from flagstone.kernels import COMPILED

    with working("reading", connection):
        seen = take_snapshot(connection.store, connection.wal_store, connection.root)
    if call.json:
        form = "compiled" if COMPILED else "interpreted"
        print_json(
            {**seen.facts(), **seen.overview.to_dict(), "requests": _requests(connection), "kernels": form}
        )
    else:
        _print_stats(connection, seen)


def _requests(connection: Connection) -> dict[str, int]:
    found: dict[str, int] = {}
    for counter in connection.counters:
        for verb, count in counter.totals()["requests"].items():
            found[verb] = found.get(verb, 0) + count
    return dict(sorted(found.items()))


def _print_stats(connection: Connection, seen: DatabaseSnapshot) -> None:
    from flagstone.kernels import COMPILED

    facts, found, manifest = seen.facts(), seen.overview, seen.manifest.value
    ssts, wal, checkpoints = found.tables, found.log, facts["checkpoints"]
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
            ("live SSTs", _weight(ssts.live)),
            ("borrowed", _weight(ssts.borrowed) if ssts.borrowed.count else None),
            ("only in checkpoints", _weight(ssts.pinned) if ssts.pinned.count else None),
            ("unreferenced", _weight(ssts.unreferenced) if ssts.unreferenced.count else None),
            ("WAL to replay", f"{_weight(wal.to_replay)}, after {wal.replay_after}"),
            ("WAL flushed", _weight(wal.flushed) if wal.flushed.count else None),
            ("fences", wal.fences),
            ("checkpoints", held),
            (
                "space amplification",
                _ratio(found.space_amplification, "estimate: all levels over the oldest sorted runs"),
            ),
            ("storage overhead", _ratio(found.storage_overhead, "all objects over live SSTs")),
        ],
        title=f"{connection.root} in {connection.store.url}",
    )
    for tree in found.trees:
        print_line("")
        name = f"segment {tree.prefix}" if tree.prefix else "tree"
        rows: list[tuple[Any, ...]] = [("L0", tree.l0.count, size_text(tree.l0.bytes))]
        rows += [(f"run {run.id}", run.tables, size_text(run.bytes)) for run in tree.runs]
        print_table((name, "SSTs", "size"), rows, empty="no data")
    if manifest.external_dbs:
        print_line("")
        external = [(entry.path, entry.tables, size_text(entry.bytes)) for entry in found.external_dbs]
        print_table(("external database", "SSTs", "size"), external, empty="")
    print_line("")
    folders = [(folder, weight.count, size_text(weight.bytes)) for folder, weight in found.objects.items()]
    print_table(("folder", "objects", "size"), folders, empty="no objects")
    print_line("")
    by_kind = ", ".join(f"{count} {verb}" for verb, count in _requests(connection).items())
    slow = "interpreted, and slow: install a C compiler, then flagstone again"
    print_facts(
        [
            ("requests", f"{connection.requests} ({by_kind}), {size_text(connection.bytes_moved)}"),
            ("kernels", None if COMPILED else slow),
        ]
    )


def _weight(weight: Any) -> str:
    return f"{weight.count:,}, {size_text(weight.bytes)}"


def _ratio(ratio: float | None, meaning: str) -> str | None:
    return None if ratio is None else f"{ratio:.2f}× ({meaning})"


def inspect(
    context: typer.Context,
    port: Annotated[
        int, typer.Option(help="The port on 127.0.0.1; 0 chooses a free one.", min=0, max=65535)
    ] = 0,
    refresh: Annotated[
        int, typer.Option(help="Seconds between two looks for news while a page is open.", min=1)
    ] = 5,
    merge_operator: MergeWith = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write a page without rows and history to this file, and end."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show a database in a browser on this machine: its tree, history, compactions, keys, sizes and dollars.

    Prints an address with a random token, which only this machine accepts. Writes nothing to the store, not even a
    checkpoint, and asks nothing while no page is open. Rows are read only when a page asks for them. Ctrl-C ends it.

    For example:

        flagstone -p s3://bucket/shop inspect
        flagstone -p s3://bucket/shop inspect --output shop.html
    """
    call = invocation(context, json=json)
    operator = parse_merge_operator(merge_operator)
    connection = call.connect()

    def report(**facts: str) -> None:
        if call.json:
            print_json(facts)
        else:
            print_line("; ".join(f"{name} {value}" for name, value in facts.items()))
        sys.stdout.flush()  # a program that starts this command reads the address from a pipe

    if output is not None:
        from flagstone.inspector.page import render
        from flagstone.inspector.snapshot import take_snapshot

        seen = take_snapshot(connection.store, connection.wal_store, connection.root, jobs=True)
        output.write_text(render(seen), encoding="utf-8")
        report(written=str(output))
        return
    from flagstone.inspector.inspection import inspect_database
    from flagstone.inspector.server import serve

    inspection = inspect_database(connection, merge_operator=operator, refresh_s=refresh)
    inspection.answer("state", {})  # a wrong path fails here, before the server starts
    try:
        with service("inspector") as stop:
            serve(
                inspection,
                port=port,
                refresh_s=refresh,
                stop=stop,
                ready=lambda address: report(open=address),
            )
    finally:
        inspection.close()


_SEVERITY_STYLES: Final = {"damage": "bold red", "warning": "yellow", "note": "dim"}
_NOUNS: Final = {
    "boundary": "boundary file",
    "compactions": "compactions file",
    "manifest": "manifest",
    "sst": "SST",
    "wal": "WAL file",
    "wal fence": "WAL fence",
}
"""The kinds of objects that a verification counts, in words."""


def verify(
    context: typer.Context, spark: OnSpark = False, spark_conf: SparkConf = None, json: AsJson = False
) -> None:
    """Read every object and check every checksum, filter, order and reference.

    Changes nothing and may run beside a writer. Exits with 6 if there is damage. It reads every byte of the database
    once, which may cost transfer fees outside the store's region. With --spark, Spark's executors read SSTs and WAL
    in parallel.

    For example:

        flagstone -p s3://bucket/shop verify
        flagstone -p s3://bucket/shop --json verify | jq '.findings[] | select(.severity == "damage")'
    """
    call = invocation(context, json=json)
    conf = parse_conf(spark_conf, spark=spark)
    connection = call.connect(long_work=True)
    if spark:
        with spark_session(conf, command="verify") as session, working("verifying", connection):
            from flagstone.spark import verify as verify_on_spark

            report = verify_on_spark(session, **spark_arguments(call), wal_store=call.wal_store)
    else:
        with working("verifying", connection) as progress:
            progress.expect_reading_all()
            report = connection.admin().verify()
    if call.json:
        print_json(report.to_dict())
    else:
        _print_verification(report)
    if not report.ok:
        raise typer.Exit(DAMAGE)


def _print_verification(report: Report) -> None:
    from rich.markup import escape

    with console() as shown:
        counts = ", ".join(
            f"{count:,} {_NOUNS[kind]}{'' if count == 1 else 's'}"
            for kind, count in sorted(report.objects.items())
        )
        shown.print(f"[bold]{escape(report.database)}[/bold], manifest {report.manifest_id}")
        shown.print(f"read {counts}: {report.bytes:,} bytes, {report.rows:,} rows")
        for finding in report.findings:
            style = _SEVERITY_STYLES[finding.severity]
            where = finding.object if finding.offset is None else f"{finding.object} at byte {finding.offset}"
            shown.print(
                f"[{style}]{finding.severity:8}[/{style}]", f"{escape(where)}: {escape(finding.problem)}"
            )
        if report.ok:
            shown.print("[green]sound[/green]: no object is missing and every checksum is right")
        else:
            shown.print(f"[bold red]damaged[/bold red]: {len(report.damage)} findings need an operator")


def repair(
    context: typer.Context,
    apply: Annotated[
        bool, typer.Option("--apply", help="Repair it. Without this the command only prints the plan.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --apply: do not ask.")] = False,
    json: AsJson = False,
) -> None:
    """Report what is wrong with a database that does not open, and what a repair gives up; with --apply, repair it.

    Handles WAL files that are out of order, damaged or missing, times in the future that stop writes, references to
    deleted objects, unreadable manifests and databases whose creation was interrupted. It does not touch a sound
    database and exits with 0. Exits with 6 while something is wrong.

    Stop the writer before --apply, which fences it. Every object that the repair removes is first copied below
    flagstone/repair/ of the database. If the command is interrupted, repeat it.

    For example:

        flagstone -p s3://bucket/shop repair
        flagstone -p s3://bucket/shop repair --apply --yes
    """
    call = invocation(context, json=json)
    connection = call.connect(long_work=True)
    admin = connection.admin()
    with working("searching for defects", connection):
        report = admin.repair()
    if apply and any(defect.remedy for defect in report.defects):
        if not call.json:
            _print_repair(report)
        confirm(_repair_consequence(report), yes=yes)
        with working("repairing", connection):
            report = admin.repair(plan_only=False)
    if call.json:
        print_json(report.to_dict())
    else:
        _print_repair(report)
    if not report.sound:
        raise typer.Exit(DAMAGE)


def _repair_consequence(report: RepairReport) -> str:
    losses = [defect.gives_up for defect in report.defects if defect.remedy and defect.gives_up]
    fenced = "a running writer is fenced"
    return f"this gives up {'; '.join(losses)}, and {fenced}" if losses else f"this gives up no row; {fenced}"


def _print_repair(report: RepairReport) -> None:
    from rich.markup import escape

    with console() as shown:
        shown.print(f"[bold]{escape(report.database)}[/bold], manifest {report.manifest_id}")
        for defect in report.defects:
            shown.print(f"[bold red]{defect.kind}[/bold red]", escape(f"{defect.object}: {defect.problem}"))
            shown.print("  remedy:  ", escape(defect.remedy or "none; an operator must examine it"))
            if defect.remedy:
                shown.print("  gives up:", escape(defect.gives_up or "nothing"))
        for path in report.kept_aside:
            shown.print("copied to:", escape(path))
        if not report.defects:
            shown.print("[green]sound[/green]: nothing to repair")
        elif report.applied:
            shown.print(f"[green]repaired[/green]: manifest {report.manifest_id}")
        elif any(defect.remedy for defect in report.defects):
            shown.print("[bold red]not repaired[/bold red]: --apply carries out the remedies above")
