"""`flagstone verify`: whether everything is there, and sound."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.markup import escape

from flagstone.cli.context import invocation
from flagstone.cli.exit_codes import DAMAGE
from flagstone.maintenance.verification.report import Report

_STYLES = {"damage": "bold red", "warning": "yellow", "note": "dim"}


def verify(context: typer.Context) -> None:
    """Read every object and check every checksum, filter, order and reference.

    Changes nothing, and may run beside a writer. Exits with 6 when there is damage.
    """
    call = invocation(context)
    report = call.admin.verify()
    if call.json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report)
    if not report.ok:
        raise typer.Exit(DAMAGE)


def _print(report: Report) -> None:
    console = Console(highlight=False, soft_wrap=True)
    counts = ", ".join(f"{count:,} {kind}" for kind, count in sorted(report.objects.items()))
    console.print(f"[bold]{report.database}[/bold], manifest {report.manifest_id}")
    console.print(f"read {counts}: {report.bytes:,} bytes, {report.rows:,} rows")
    for finding in report.findings:
        style = _STYLES[finding.severity]
        place = finding.object if finding.offset is None else f"{finding.object} at byte {finding.offset}"
        console.print(
            f"[{style}]{finding.severity:8}[/{style}]", f"{escape(place)}: {escape(finding.problem)}"
        )
    if report.ok:
        console.print("[green]sound[/green]: every object is there and every checksum holds")
    else:
        console.print(f"[bold red]damaged[/bold red]: {len(report.damage)} findings need an operator")
