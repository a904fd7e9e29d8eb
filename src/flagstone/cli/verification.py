"""`flagstone verify`: whether everything is there, and sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import typer

from flagstone.cli.context import AsJson, invocation
from flagstone.cli.exit_codes import DAMAGE
from flagstone.cli.output import console, print_json
from flagstone.cli.progress import working
from flagstone.cli.spark_jobs import OnSpark, SparkConf, parse_conf, spark_arguments, spark_session

if TYPE_CHECKING:
    from flagstone.maintenance.verification.report import Report

_STYLES: Final = {"damage": "bold red", "warning": "yellow", "note": "dim"}


def verify(
    context: typer.Context, spark: OnSpark = False, spark_conf: SparkConf = None, json: AsJson = False
) -> None:
    """Read every object and check every checksum, filter, order and reference.

    Changes nothing, and may run beside a writer. Exits with 6 when there is damage. Every byte of the database is
    read once: think of the transfer costs before verifying a large one from far away. With --spark tables and log are
    read by Spark's executors, many at once.

    For example:

        flagstone -p s3://bucket/shop verify
        flagstone -p s3://bucket/shop --json verify | jq '.findings[] | select(.severity == "damage")'
    """
    call = invocation(context, json=json)
    conf = parse_conf(spark_conf, spark=spark)
    connection = call.connect(patient=True)
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
        _print(report)
    if not report.ok:
        raise typer.Exit(DAMAGE)


def _print(report: Report) -> None:
    from rich.markup import escape

    with console() as shown:
        counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(report.objects.items()))
        shown.print(f"[bold]{escape(report.database)}[/bold], manifest {report.manifest_id}")
        shown.print(f"read {counts}: {report.bytes:,} bytes, {report.rows:,} rows")
        for finding in report.findings:
            style = _STYLES[finding.severity]
            place = finding.object if finding.offset is None else f"{finding.object} at byte {finding.offset}"
            shown.print(
                f"[{style}]{finding.severity:8}[/{style}]", f"{escape(place)}: {escape(finding.problem)}"
            )
        if report.ok:
            shown.print("[green]sound[/green]: every object is there and every checksum holds")
        else:
            shown.print(f"[bold red]damaged[/bold red]: {len(report.damage)} findings need an operator")


COMMANDS: Final[tuple[Callable[..., None], ...]] = (verify,)
