"""Garbage: `run-garbage-collection` and `schedule-garbage-collection`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from flagstone.cli.context import AsJson, Invocation, invocation
from flagstone.cli.exit_codes import UNAVAILABLE
from flagstone.cli.output import print_json, print_json_line, print_table, say
from flagstone.cli.parsing import parse_duration, parse_lifetime
from flagstone.cli.progress import working
from flagstone.cli.signals import service
from flagstone.errors import InvalidRequest
from flagstone.inspector.text import size_text

if TYPE_CHECKING:
    from flagstone.config import GarbageCollectorOptions
    from flagstone.maintenance.gc.report import GarbageReport


class Resource(StrEnum):
    """The kinds of garbage, under SlateDB's names, and those it has none for."""

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
        help="Do not write boundary files before metadata is deleted; only where nobody else can be writing.",
    ),
]
_FORM: Final = "min_age=DURATION,period=DURATION"


def _schedule(what: str) -> Any:
    return typer.Option(metavar="SCHEDULE", help=f"When to collect {what}: {_FORM}.")


def run_garbage_collection(
    context: typer.Context,
    resource: Annotated[
        list[Resource] | None,
        typer.Option("--resource", "-r", help="What to collect; everything, if not given. May be repeated."),
    ] = None,
    min_age: Annotated[
        str | None,
        typer.Option(
            "--min-age", "-m", metavar="DURATION", help="Spare what is younger than this; by default 5min."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    disable_boundary_files: NoBoundary = False,
    json: AsJson = False,
) -> None:
    """Delete, once and now, what nobody can need any more.

    The current state, whatever checkpoints and clones refer to, the log since the last flush and the work of running
    compactions always stay. WAL fences are deleted only when asked for by name. May run beside writers, compactors
    and other collectors.

    For example:

        flagstone -p s3://bucket/shop run-garbage-collection --dry-run
        flagstone -p s3://bucket/shop run-garbage-collection --resource wal --min-age 24h
        flagstone -p s3://bucket/shop run-garbage-collection -r manifest -r compacted -m "7days 30min"
    """
    call = invocation(context, json=json)
    age = parse_lifetime(min_age)
    kinds = None if not resource else [name.value.replace("-", "_") for name in resource]
    options = (call.settings().garbage_collector_options or _defaults()).replace(
        boundary_files_enabled=not disable_boundary_files
    )
    connection = call.connect(patient=True)
    with working("collecting garbage", connection):
        report = connection.admin().collect_garbage(
            kinds=kinds,  # type: ignore[arg-type]
            min_age=age,
            dry_run=dry_run,
            options=options,
        )
    _print(call, report)
    for error in report.errors:
        sys.stderr.write(f"flagstone: {error}\n")
    if report.errors:
        raise typer.Exit(UNAVAILABLE)


def schedule_garbage_collection(
    context: typer.Context,
    manifest: Annotated[str | None, _schedule("old manifests")] = None,
    wal: Annotated[str | None, _schedule("flushed log files")] = None,
    wal_fence: Annotated[str | None, _schedule("fences of former writers")] = None,
    compacted: Annotated[str | None, _schedule("tables that nothing refers to")] = None,
    compactions: Annotated[str | None, _schedule("old compactions files")] = None,
    detach: Annotated[
        str | None,
        typer.Option(metavar="period=DURATION", help="Release parents that a clone needs no more."),
    ] = None,
    disable_boundary_files: NoBoundary = False,
    json: AsJson = False,
) -> None:
    """Collect garbage again and again, each kind at its own pace, until interrupted.

    Tells on standard error what it does, with --json also on standard output: a line for every round that deleted
    something. What cannot be done is tried again at the next turn. Ctrl-C and SIGTERM end it after the current
    round; another one at once.

    For example:

        flagstone -p s3://bucket/shop schedule-garbage-collection --wal min_age=24h,period=6h
        flagstone -p ./shop schedule-garbage-collection --manifest min_age=7days,period=1day --detach period=1h
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
    from flagstone.db.garbage import open_collector
    from flagstone.maintenance.gc.options import kind_options
    from flagstone.maintenance.gc.service import GarbageCollection, run_until
    from flagstone.runtime.clock import SYSTEM_CLOCK
    from flagstone.store.paths import DbPaths

    connection = call.connect(patient=True)
    kinds = kind_options(options)
    collector = open_collector(
        connection.store,
        DbPaths(connection.root),
        kinds,
        wal_store=connection.wal_store,
        boundary_files=options.boundary_files_enabled,
    )

    def tell(report: GarbageReport) -> None:
        if call.json:
            print_json_line(report.to_dict())
            sys.stdout.flush()

    with service("schedule-garbage-collection") as stop:
        run_until(GarbageCollection(collector, kinds, clock=SYSTEM_CLOCK, collected=tell), stop)


class GcSchedule(NamedTuple):
    """How old garbage must be, and how often it is looked for."""

    min_age: timedelta
    period: timedelta


def parse_schedule(name: str, text: str) -> GcSchedule:
    """The schedule in `min_age=…,period=…`; SlateDB ignores other words there, so do we.

    Raises:
        InvalidRequest: one of the two is missing or no duration.

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
    """The collector's settings for these schedules; what has none is left alone.

    Raises:
        InvalidRequest: there is no schedule at all.

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
            f"the period of --{name.replace('_', '-')} is how long to wait; it must be positive"
        )
    return period


def _defaults() -> GarbageCollectorOptions:
    from flagstone.config import GarbageCollectorOptions

    return GarbageCollectorOptions()


def _print(call: Invocation, report: GarbageReport) -> None:
    if call.json:
        print_json({"result": "success" if report.ok else "incomplete", **report.to_dict()})
        return
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
    say(f"{report.deleted:,} objects deleted in {report.seconds:.1f} s, manifest {report.manifest_id}")


COMMANDS: Final[tuple[Callable[..., None], ...]] = (run_garbage_collection, schedule_garbage_collection)
