"""Compaction jobs: `read-compactions`, `list-compactions`, `read-compaction` and `submit-compaction`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flagstone.cli.context import AsJson, invocation
from flagstone.cli.manifests import End, Start
from flagstone.cli.output import print_facts, print_json, print_table
from flagstone.errors import InvalidRequest
from flagstone.inspector.text import size_text, time_text

if TYPE_CHECKING:
    from flagstone.metadata.compactions import Job


class SchedulerName(StrEnum):
    """Who turns a request into jobs."""

    size_tiered = "size-tiered"


def read_compactions(
    context: typer.Context,
    id: Annotated[  # noqa: A002 - SlateDB's name
        int | None,
        typer.Option("--id", "-i", min=0, help="The number of the file; the current one if not given."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show a compactions file: the jobs that wait, run, or were the last to end.

    For example:

        flagstone -p s3://bucket/shop read-compactions
        flagstone -p s3://bucket/shop --json read-compactions | jq '.recent_compactions[].status'
    """
    call = invocation(context, json=json)
    found = call.connect().admin().compactions(id)
    if call.json:
        from flagstone.cli.documents import compactions_document

        print_json(compactions_document(found.id, found.value))
    else:
        print_facts([("compactor epoch", found.value.compactor_epoch)], title=f"compactions file {found.id}")
        print_jobs(found.value.jobs)


def list_compactions(
    context: typer.Context, start: Start = None, end: End = None, json: AsJson = False
) -> None:
    """List the stored compactions files, or those from --start up to --end without it.

    For people their numbers, times and sizes; as JSON their whole contents as well, which takes one request each.

    For example:

        flagstone -p s3://bucket/shop list-compactions
        flagstone -p s3://bucket/shop --json list-compactions --start 10
    """
    call = invocation(context, json=json)
    admin = call.connect().admin()
    listed = [
        entry
        for entry in admin.list_compactions()
        if (start is None or entry.id >= start) and (end is None or entry.id < end)
    ]
    if not call.json:
        rows = [
            (entry.id, time_text(entry.meta.last_modified_ms / 1000), size_text(entry.meta.size))
            for entry in listed
        ]
        print_table(("compactions", "written", "size"), rows, empty="no compactions files")
        return
    from flagstone.cli.documents import compactions_document, object_document
    from flagstone.runtime.pool import shared_pool

    contents = shared_pool().map_ordered(lambda entry: admin.compactions(entry.id).value, listed)
    print_json(
        [
            {**compactions_document(entry.id, compactions), **object_document(entry.meta)}
            for entry, compactions in zip(listed, contents, strict=True)
        ]
    )


def read_compaction(
    context: typer.Context,
    id: Annotated[str, typer.Option("--id", "-i", metavar="ULID", help="The job.")],  # noqa: A002 - SlateDB's name
    compactions_id: Annotated[
        int | None, typer.Option(min=0, help="The compactions file to look in; the current one if not given.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show one compaction job.

    Ended jobs leave the current file soon; an older one may still have them.

    For example:

        flagstone -p s3://bucket/shop read-compaction --id 01M7H672VDPJ8NQS1NJCA6V8M9
        flagstone -p s3://bucket/shop read-compaction --id 01M7H672VDPJ8NQS1NJCA6V8M9 --compactions-id 7
    """
    from flagstone.runtime.ids import parse_ulid

    call = invocation(context, json=json)
    job_id = parse_ulid(id)
    found = call.connect().admin().compactions(compactions_id)
    job = found.value.job(job_id)
    if job is None:
        raise InvalidRequest(
            f"compactions file {found.id} has no job {id}; list-compactions shows older files"
        )
    if call.json:
        from flagstone.cli.documents import job_document

        print_json(job_document(job))
    else:
        print_jobs([job])


def submit_compaction(
    context: typer.Context,
    request: Annotated[
        str,
        typer.Option(
            help='What to do, as JSON: "Full", {"FullSegment": {"segment": …}}, or {"Spec": {"sources": […], '
            '"destination": …}}; sources are {"SstView": ULID} and {"SortedRun": number}.'
        ),
    ],
    scheduler: Annotated[
        SchedulerName, typer.Option(help="Who turns the request into jobs.")
    ] = SchedulerName.size_tiered,
    json: AsJson = False,
) -> None:
    """Ask the coordinator of the database, wherever it runs, for a compaction.

    Returns when the request is noted; `compact` does the work itself and waits for the end.

    For example:

        flagstone -p s3://bucket/shop submit-compaction --request '"Full"'
        flagstone -p ./shop submit-compaction --request '{"Spec": {"sources": [{"SortedRun": 3}], "destination": 3}}'
    """
    del scheduler  # there is one
    call = invocation(context, json=json)
    from flagstone.cli.compaction_requests import plan_request

    admin = call.connect().admin()
    specs = plan_request(request, admin.manifest().value, admin.compactions().value)
    submitted = {admin.submit_compaction(spec) for spec in specs}
    jobs = [job for job in admin.compactions().value.jobs if job.id in submitted]
    if call.json:
        from flagstone.cli.documents import job_document

        print_json([job_document(job) for job in jobs])
    else:
        print_jobs(jobs, empty="nothing to compact")


def print_jobs(jobs: Iterable[Job], *, empty: str = "no jobs") -> None:
    """A table of jobs."""
    from flagstone.cli.documents import job_document

    rows = []
    for job in jobs:
        shown = job_document(job)
        spec = shown["spec"]
        sources = ", ".join(
            f"run {name}" if kind == "SortedRun" else name
            for source in spec["sources"]
            for kind, name in source.items()
        )
        into = "nothing" if spec["destination"] is None else f"run {spec['destination']}"
        worker = "" if job.worker is None else job.worker.id
        rows.append(
            (
                shown["id"],
                shown["status"],
                spec["segment"],
                sources,
                into,
                size_text(shown["bytes_processed"]),
                worker,
            )
        )
    print_table(
        ("job", "status", "segment", "sources", "into", "written", "worker"),
        rows,
        empty=empty,
        whole=("job",),
    )


COMMANDS: Final[tuple[Callable[..., None], ...]] = (
    read_compactions,
    list_compactions,
    read_compaction,
    submit_compaction,
)
