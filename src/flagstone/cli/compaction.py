"""Compactions: `compact`, `run-compactor`, `run-worker`, and the commands that read and submit jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Annotated, cast

import typer

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
from flagstone.cli.manifests import End, Start, entries_between, entry_documents, print_entries
from flagstone.cli.output import print_facts, print_json, print_line, print_table, working
from flagstone.cli.parsing import KeyForm, parse_bytes, parse_duration, parse_lifetime, parse_merge_operator
from flagstone.cli.process import service
from flagstone.cli.rows import MergeWith
from flagstone.errors import InvalidRequest
from flagstone.inspector.text import size_text

if TYPE_CHECKING:
    from flagstone.compaction.on_demand import Progress
    from flagstone.config import CompactorOptions
    from flagstone.config.settings import CodecName
    from flagstone.db.admin.admin import Admin
    from flagstone.metadata.compactions import Job
    from flagstone.metadata.manifest import Manifest
    from flagstone.types import Ulid


def compact(
    context: typer.Context,
    full: Annotated[
        bool, typer.Option("--full", help="Merge everything into one sorted run, whatever its size.")
    ] = False,
    segment: Annotated[
        str | None,
        typer.Option(metavar="PREFIX", help="With --full: only this segment; text, or hexadecimal with 0x."),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Give up after this time; finished jobs stay finished."),
    ] = None,
    patience: Annotated[
        str,
        typer.Option(
            metavar="DURATION",
            help="How long to wait for a coordinator in another process to accept the jobs.",
        ),
    ] = "20s",
    merge_operator: MergeWith = None,
    spark: OnSpark = False,
    spark_conf: SparkConf = None,
    json: AsJson = False,
) -> None:
    """Compact now, in this process or on Spark, and return when it is done.

    Without --full it does the jobs that the policy of the settings picks. May run beside a writer: a running
    coordinator gets the jobs and this process works for it; if none answers, this process coordinates. If it is
    interrupted, any coordinator can continue its jobs. SSTs are compressed like the newest SST, unless --settings
    says otherwise.

    For example:

        flagstone -p s3://bucket/shop compact
        flagstone -p s3://bucket/shop compact --full --deadline 1h --patience 0s
        flagstone -p s3://bucket/shop compact --full --spark --spark-conf spark.master=spark://host:7077
    """
    call = invocation(context, json=json)
    conf = parse_conf(spark_conf, spark=spark)
    prefix = None if segment is None else parse_bytes(segment, KeyForm.auto, what="segment")
    timeout, wait_for_coordinator = parse_lifetime(deadline), parse_duration(patience)
    operator = parse_merge_operator(merge_operator)
    connection = call.connect(long_work=True)
    admin = connection.admin()
    options = _options(call, admin)
    latest: list[Progress] = []
    with ExitStack() as work:
        compact_now: Callable[..., list[Ulid]] = admin.compact
        if spark:
            session = work.enter_context(spark_session(conf, command="compact"))
            from flagstone.spark import compact as compact_on_spark

            compact_now = partial(compact_on_spark, session, **spark_arguments(call))
        bar = work.enter_context(working("compacting", connection))

        def note(progress: Progress) -> None:
            latest[:] = [progress]
            bar.update(progress.bytes_written, progress.bytes_to_read)

        jobs = compact_now(
            full=full,
            segment=prefix,
            options=options,
            merge_operator=operator,
            progress=note,
            timeout=timeout,
            patience=wait_for_coordinator,
        )
    from flagstone.runtime.ids import ulid_text

    written, read = (latest[0].bytes_written, latest[0].bytes_to_read) if latest else (0, 0)
    if call.json:
        print_json({"jobs": [ulid_text(job) for job in jobs], "bytes_read": read, "bytes_written": written})
    elif jobs:
        print_line(f"{len(jobs)} jobs done: {size_text(read)} merged into {size_text(written)}")
    else:
        print_line("nothing to compact")


def run_compactor(
    context: typer.Context,
    no_embedded_worker: Annotated[
        bool,
        typer.Option("--no-embedded-worker", help="Only coordinate; workers in other processes do the jobs."),
    ] = False,
    merge_operator: MergeWith = None,
    json: AsJson = False,
) -> None:
    """Coordinate and do the compactions of a database until interrupted.

    Takes over from a running coordinator, SlateDB's or Flagstone's. Logs to standard error. After Ctrl-C or SIGTERM
    it releases unfinished jobs with their partial results, and ends.

    For example:

        flagstone -p s3://bucket/shop run-compactor
        flagstone -p s3://bucket/shop --settings SlateDb.toml run-compactor --no-embedded-worker
    """
    call = invocation(context, json=json)
    operator = parse_merge_operator(merge_operator)
    admin = call.connect(long_work=True).admin()
    options = _options(call, admin)
    if no_embedded_worker:
        options = options.replace(worker=None)
    with service("run-compactor") as stop:
        admin.run_compactor(options=options, merge_operator=operator, stop=stop)


def run_worker(
    context: typer.Context,
    merge_operator: MergeWith = None,
    spark: OnSpark = False,
    spark_conf: SparkConf = None,
    json: AsJson = False,
) -> None:
    """Do the compaction jobs of a coordinator in another process until interrupted.

    The coordinator may be SlateDB's or Flagstone's, and any number of workers may serve it. Logs to standard error.
    After Ctrl-C or SIGTERM it releases unfinished jobs with their partial results, and ends. With --spark it splits
    every job into key ranges, which Spark's executors merge; they need this package and access to the store.

    For example:

        flagstone -p s3://bucket/shop run-worker
        flagstone -p s3://bucket/shop run-worker --spark --spark-conf spark.master=spark://host:7077
        flagstone -p s3://bucket/shop --settings SlateDb.toml run-worker --merge-operator counter
    """
    call = invocation(context, json=json)
    conf = parse_conf(spark_conf, spark=spark)
    operator = parse_merge_operator(merge_operator)
    admin = call.connect(long_work=True).admin()
    options = _options(call, admin)
    if not spark:
        with service("run-worker") as stop:
            admin.run_worker(options=options.worker, merge_operator=operator, stop=stop)
        return
    # Spark installs a handler for Ctrl-C when it starts; the service starts later and replaces it.
    with spark_session(conf, command="run-worker") as session, service("run-worker") as stop:
        from flagstone.spark import run_worker as work_on_spark

        work_on_spark(
            session, **spark_arguments(call), options=options.worker, merge_operator=operator, stop=stop
        )


def _options(call: Invocation, admin: Admin) -> CompactorOptions:
    """The compactor's settings. Without a settings file, SSTs are compressed like the newest SST.

    SlateDB's own tools write them uncompressed, and so undo the compression that the writer chose.
    """
    from flagstone.config import CompactionWorkerOptions, CompactorOptions

    settings = call.settings()
    options = settings.compactor_options or CompactorOptions()
    worker = options.worker or CompactionWorkerOptions()
    codec = worker.compression_codec or settings.compression_codec
    if call.settings_file is None:
        codec = newest_codec(admin.manifest().value)
    return options.replace(worker=worker.replace(compression_codec=codec))


def newest_codec(manifest: Manifest) -> CodecName | None:
    """The codec of the newest SST; None if it is not compressed, or if there is no SST."""
    if not manifest.ssts:
        return None
    title = manifest.ssts[max(manifest.ssts)].info.codec.title
    return None if title == "None" else cast("CodecName", title)


class SchedulerName(StrEnum):
    """The scheduler that turns a request into jobs."""

    size_tiered = "size-tiered"


def read_compactions(
    context: typer.Context,
    id: Annotated[  # noqa: A002 - SlateDB's name
        int | None,
        typer.Option("--id", "-i", min=0, help="The id of the file; the current one if not given."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show a compactions file: the jobs that wait or run, and the last ones that ended.

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
    """List the stored compactions files, or those with ids from --start to before --end.

    Prints ids, times and sizes. With --json it also reads each file, which takes one request per file.

    For example:

        flagstone -p s3://bucket/shop list-compactions
        flagstone -p s3://bucket/shop --json list-compactions --start 10
    """
    call = invocation(context, json=json)
    admin = call.connect().admin()
    listed = entries_between(admin.list_compactions(), start, end)
    if not call.json:
        print_entries("compactions", listed, empty="no compactions files")
        return
    from flagstone.cli.documents import compactions_document

    print_json(
        entry_documents(listed, lambda found: compactions_document(found, admin.compactions(found).value))
    )


def read_compaction(
    context: typer.Context,
    id: Annotated[str, typer.Option("--id", "-i", metavar="ULID", help="The job.")],  # noqa: A002 - SlateDB's name
    compactions_id: Annotated[
        int | None, typer.Option(min=0, help="The compactions file to read; the current one if not given.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show one compaction job.

    The current file drops jobs soon after they end; an older file may still have them.

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
        SchedulerName, typer.Option(help="The scheduler that turns the request into jobs.")
    ] = SchedulerName.size_tiered,
    json: AsJson = False,
) -> None:
    """Ask the coordinator of the database for a compaction.

    Returns when the request is stored; `compact` does the work itself and waits until it is done.

    For example:

        flagstone -p s3://bucket/shop submit-compaction --request '"Full"'
        flagstone -p ./shop submit-compaction --request '{"Spec": {"sources": [{"SortedRun": 3}], "destination": 3}}'
    """
    del scheduler  # there is only one
    call = invocation(context, json=json)
    from flagstone.cli.documents import plan_request

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
    """Print a table of jobs."""
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
