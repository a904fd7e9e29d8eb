"""Garbage collection: `run-garbage-collection` and `schedule-garbage-collection`."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from flagstone.cli.context import AsJson, Invocation, invocation
from flagstone.cli.output import print_json, print_json_line, print_line, print_table, working
from flagstone.cli.parsing import parse_duration, parse_lifetime
from flagstone.cli.process import UNAVAILABLE, service
from flagstone.errors import InvalidRequest, Unavailable
from flagstone.inspector.text import size_text

if TYPE_CHECKING:
    from flagstone.cli.connection import Connection
    from flagstone.config import GarbageCollectorOptions
    from flagstone.gc.report import GarbageReport


_log = logging.getLogger("flagstone.gc")


class Resource(StrEnum):
    """The kinds of garbage: SlateDB's names, and `two-phase`, which only Flagstone has."""

    manifest = "manifest"
    wal = "wal"
    wal_fence = "wal-fence"
    compacted = "compacted"
    compactions = "compactions"
    detach = "detach"
    two_phase = "two-phase"


NoBoundary = Annotated[
    bool,
    typer.Option(
        "--disable-boundary-files",
        help="Delete metadata without writing boundary files first; safe only if no other process writes.",
    ),
]
Paths = Annotated[
    list[str] | None,
    typer.Option("--path", "-p", help="One more database, like --path before the command. May be repeated."),
]
Prefix = Annotated[
    str | None,
    typer.Option(help="Every database below this address, such as s3://bucket/tenants or a folder."),
]
_FORM: Final = "min_age=DURATION,period=DURATION"


def _schedule(what: str) -> Any:
    return typer.Option(metavar="SCHEDULE", help=f"When to collect {what}: {_FORM}.")


def run_garbage_collection(
    context: typer.Context,
    resource: Annotated[
        list[Resource] | None,
        typer.Option("--resource", "-r", help="What to collect; everything if not given. May be repeated."),
    ] = None,
    min_age: Annotated[
        str | None,
        typer.Option(
            "--min-age", "-m", metavar="DURATION", help="Keep objects younger than this; by default 5min."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only report what would be deleted.")] = False,
    disable_boundary_files: NoBoundary = False,
    path: Paths = None,
    prefix: Prefix = None,
    json: AsJson = False,
) -> None:
    """Delete objects that are no longer needed, once and now.

    Keeps the current state, everything that checkpoints and clones refer to, the WAL since the last flush and the
    output of running compactions. Deletes WAL fences only with --resource wal-fence. May run beside writers,
    compactors and other collectors. Deletes a softly destroyed database when its grace period is over; until then
    the report says what it waits for.

    For example:

        flagstone -p s3://bucket/shop run-garbage-collection --dry-run
        flagstone -p s3://bucket/shop run-garbage-collection --resource wal --min-age 24h
        flagstone -p s3://bucket/shop run-garbage-collection -r manifest -r compacted -m "7days 30min"
        flagstone run-garbage-collection --prefix s3://bucket/tenants
    """
    call = invocation(context, json=json)
    age = parse_lifetime(min_age)
    kinds = None if not resource else [name.value.replace("-", "_") for name in resource]
    options = (call.settings().garbage_collector_options or _defaults()).replace(
        boundary_files_enabled=not disable_boundary_files
    )
    from flagstone.metadata.stores import NoDatabase

    connections = _connections(call, path, prefix)
    several = prefix is not None or len(connections) > 1
    reports: list[GarbageReport] = []
    for connection in connections:
        with working(f"collecting garbage of {connection.root}", connection):
            try:
                report = connection.admin().collect_garbage(
                    kinds=kinds,  # type: ignore[arg-type]
                    min_age=age,
                    dry_run=dry_run,
                    options=options,
                )
            except NoDatabase:
                # Below a prefix there may be paths whose database is gone. A database given by --path must exist.
                if prefix is not None and connection.root not in _roots(call, path):
                    continue
                raise
        reports.append(report)
        if not call.json:
            if several:
                print_line(connection.root)
            _print(report)
        for error in report.errors:
            sys.stderr.write(f"flagstone: {connection.root}: {error}\n")
    if call.json:
        documents = [
            {"result": "success" if report.ok else "incomplete", **report.to_dict()} for report in reports
        ]
        print_json({"databases": documents} if several else documents[0])
    if any(report.errors for report in reports):
        raise typer.Exit(UNAVAILABLE)


def schedule_garbage_collection(
    context: typer.Context,
    manifest: Annotated[str | None, _schedule("old manifests")] = None,
    wal: Annotated[str | None, _schedule("flushed WAL files")] = None,
    wal_fence: Annotated[str | None, _schedule("fences of former writers")] = None,
    compacted: Annotated[str | None, _schedule("unreferenced SSTs")] = None,
    compactions: Annotated[str | None, _schedule("old compactions files")] = None,
    detach: Annotated[
        str | None,
        typer.Option(metavar="period=DURATION", help="Release lenders whose SSTs a clone no longer uses."),
    ] = None,
    disable_boundary_files: NoBoundary = False,
    path: Paths = None,
    prefix: Prefix = None,
    json: AsJson = False,
) -> None:
    """Collect garbage periodically, each kind at its own period, until interrupted or the database is gone.

    Logs to standard error; with --json it also prints a line for every round that deleted something. A round that
    fails is tried again at the next period. Ctrl-C and SIGTERM end it after the current round; a second one ends it
    at once. It serves every given database, and ends when the last of them was destroyed and deleted. With --prefix
    it searches for new databases every ten minutes and does not end by itself.

    For example:

        flagstone -p s3://bucket/shop schedule-garbage-collection --wal min_age=24h,period=6h
        flagstone -p ./shop schedule-garbage-collection --manifest min_age=7days,period=1day --detach period=1h
        flagstone schedule-garbage-collection --prefix s3://bucket/tenants --compacted min_age=1h,period=10min
    """
    call = invocation(context, json=json)
    given = {
        "manifest": manifest,
        "wal": wal,
        "wal_fence": wal_fence,
        "compacted": compacted,
        "compactions": compactions,
    }
    schedules = {name: parse_schedule(name, text) for name, text in given.items() if text is not None}
    options = plan_schedule(
        schedules, _parse_period("detach", detach), boundary_files=not disable_boundary_files
    )
    from flagstone.cli.connection import connect_below
    from flagstone.db.admin.garbage import open_collector
    from flagstone.gc.collector import GarbageCollection, run_all_until
    from flagstone.gc.plan import kind_options
    from flagstone.runtime.clock import SYSTEM_CLOCK
    from flagstone.store.paths import DbPaths

    kinds = kind_options(options)
    served: dict[str, GarbageCollection] = {}

    def serve(connection: Connection) -> GarbageCollection:
        collector = open_collector(
            connection.store,
            DbPaths(connection.root),
            kinds,
            wal_store=connection.wal_store,
            boundary_files=options.boundary_files_enabled,
        )
        served[connection.root] = GarbageCollection(
            collector, kinds, clock=SYSTEM_CLOCK, collected=print_report
        )
        return served[connection.root]

    def is_served(root: str) -> bool:
        # After a database is gone, a new one may be created at its path.
        return root in served and not served[root].gone

    def discover() -> list[GarbageCollection]:
        assert prefix is not None
        try:
            found = connect_below(call, prefix, long_work=True)
        except Unavailable as error:
            _log.warning("cannot search for databases prefix=%s error=%s", prefix, error)
            return []
        return [serve(connection) for connection in found if not is_served(connection.root)]

    def print_report(report: GarbageReport) -> None:
        if call.json:
            print_json_line(report.to_dict())
            sys.stdout.flush()

    services = [serve(connection) for connection in _connections(call, path, prefix)]
    with service("schedule-garbage-collection") as stop:
        run_all_until(services, stop, discover=None if prefix is None else discover)
        if not stop.is_set():
            _log.info("ended: every database is gone")


def _named(call: Invocation, path: list[str] | None) -> Invocation:
    """The call with the databases given before the command and after it, each once."""
    first, *further = dict.fromkeys((*call.paths, *(path or ()))) or [None]
    return replace(call, path=first, further_paths=tuple(filter(None, further)))


def _connections(call: Invocation, path: list[str] | None, prefix: str | None) -> list[Connection]:
    """The databases given by `--path`, and those below the prefix.

    Raises:
        InvalidRequest: no database is given, or there is none below the prefix.

    """
    named = _named(call, path)
    if prefix is None:
        named.require_paths()
    connections = [each.connect(long_work=True) for each in named.each()]
    if prefix is not None:
        from flagstone.cli.connection import connect_below

        known = {connection.root for connection in connections}
        connections += [
            found for found in connect_below(call, prefix, long_work=True) if found.root not in known
        ]
        if not connections:
            raise InvalidRequest(f"there is no database below {prefix!r}; check the address")
    return connections


def _roots(call: Invocation, path: list[str] | None) -> set[str]:
    return {each.connect().root for each in _named(call, path).each()}


class GcSchedule(NamedTuple):
    """How old garbage must be to be deleted, and how often the collector runs."""

    min_age: timedelta
    period: timedelta


def parse_schedule(name: str, text: str) -> GcSchedule:
    """The schedule written as `min_age=…,period=…`. Other words are ignored, as in SlateDB.

    Raises:
        InvalidRequest: one of the two is missing or is not a duration.

    """
    words = dict(part.split("=", 1) for part in text.split(",") if "=" in part)
    if not {"min_age", "period"} <= words.keys():
        raise InvalidRequest(
            f"--{name.replace('_', '-')} {text!r} is not {_FORM}, such as min_age=24h,period=6h"
        )
    return GcSchedule(parse_duration(words["min_age"]), _positive(name, words["period"]))


def plan_schedule(
    schedules: dict[str, GcSchedule], detach: timedelta | None, *, boundary_files: bool
) -> GarbageCollectorOptions:
    """The collector's settings for these schedules; a kind without a schedule is not collected.

    Raises:
        InvalidRequest: there is no schedule.

    """
    from flagstone.config import GarbageCollectorOptions
    from flagstone.config.settings import GcDetachOptions, GcDirectoryOptions, GcFenceOptions

    if not schedules and detach is None:
        raise InvalidRequest("nothing to collect; give at least one of --manifest, --wal, --compacted, …")

    def directory(name: str) -> GcDirectoryOptions | None:
        found = schedules.get(name)
        return None if found is None else GcDirectoryOptions(interval=found.period, min_age=found.min_age)

    fences = schedules.get("wal_fence")
    return GarbageCollectorOptions(
        manifest_options=directory("manifest"),
        wal_options=directory("wal"),
        wal_fence_options=None
        if fences is None
        else GcFenceOptions(interval=fences.period, min_age=fences.min_age, dry_run=False),
        compacted_options=directory("compacted"),
        compactions_options=directory("compactions"),
        detach_options=None if detach is None else GcDetachOptions(interval=detach),
        boundary_files_enabled=boundary_files,
    )


def _parse_period(name: str, text: str | None) -> timedelta | None:
    return None if text is None else _positive(name, text.removeprefix("period="))


def _positive(name: str, text: str) -> timedelta:
    period = parse_duration(text)
    if period <= timedelta():
        raise InvalidRequest(
            f"the period of --{name.replace('_', '-')} is {text!r}; use a duration above zero"
        )
    return period


def _defaults() -> GarbageCollectorOptions:
    from flagstone.config import GarbageCollectorOptions

    return GarbageCollectorOptions()


def _print(report: GarbageReport) -> None:
    for reason in report.waits_for:
        print_line(f"destroyed, but not deleted yet: {reason}")
    if report.gone:
        print_line("destroyed, and now deleted")
    rows = [
        (
            entry.kind.replace("_", "-"),
            entry.examined,
            entry.deleted,
            size_text(entry.bytes),
            "only reported" if entry.dry_run else "deleted",
        )
        for entry in report
    ]
    print_table(("kind", "examined", "garbage", "size", ""), rows, empty="nothing to collect")
    print_line(f"{report.deleted:,} objects deleted in {report.seconds:.1f} s, manifest {report.manifest_id}")
