"""`flagstone repair`: what is wrong with a database, what mending it gives up, and doing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flagstone.cli.confirming import confirm
from flagstone.cli.context import AsJson, invocation
from flagstone.cli.exit_codes import DAMAGE
from flagstone.cli.output import console, print_json
from flagstone.cli.progress import working

if TYPE_CHECKING:
    from flagstone.maintenance.repair.plan import RepairReport


def repair(
    context: typer.Context,
    apply: Annotated[
        bool, typer.Option("--apply", help="Do it. Without this the command only says what it would do.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --apply: do not ask.")] = False,
    json: AsJson = False,
) -> None:
    """Say what is wrong with a database that does not open, and what repairing it gives up; with --apply, do it.

    Knows WAL files that are out of order, damaged or missing, times in the future that stop writes, references to
    objects that are gone, unreadable manifests and half-made databases. A sound database is not touched: exit code 0.
    Exits with 6 when something is wrong and was not mended.

    Stop the writer before --apply: one that is at work is fenced. What is removed is copied below flagstone/repair/
    of the database first. An interrupted repair is repeated by the same command.

    For example:

        flagstone -p s3://bucket/shop repair
        flagstone -p s3://bucket/shop repair --apply --yes
    """
    call = invocation(context, json=json)
    connection = call.connect(patient=True)
    admin = connection.admin()
    with working("looking for defects", connection):
        report = admin.repair()
    if apply and any(defect.remedy for defect in report.defects):
        if not call.json:
            _print(report)
        confirm(_consequence(report), yes=yes)
        with working("repairing", connection):
            report = admin.repair(plan_only=False)
    if call.json:
        print_json(report.to_dict())
    else:
        _print(report)
    if not report.sound:
        raise typer.Exit(DAMAGE)


def _consequence(report: RepairReport) -> str:
    prices = [defect.gives_up for defect in report.defects if defect.remedy and defect.gives_up]
    fenced = "a writer that is at work is fenced"
    return f"this gives up {'; '.join(prices)}, and {fenced}" if prices else f"this gives up no row; {fenced}"


def _print(report: RepairReport) -> None:
    from rich.markup import escape

    with console() as shown:
        shown.print(f"[bold]{escape(report.database)}[/bold], manifest {report.manifest_id}")
        for defect in report.defects:
            shown.print(f"[bold red]{defect.kind}[/bold red]", escape(f"{defect.object}: {defect.problem}"))
            shown.print("  remedy:  ", escape(defect.remedy or "none; an operator must look"))
            if defect.remedy:
                shown.print("  gives up:", escape(defect.gives_up or "nothing"))
        for path in report.kept_aside:
            shown.print("kept aside:", escape(path))
        if not report.defects:
            shown.print("[green]sound[/green]: nothing to repair")
        elif report.applied:
            shown.print(f"[green]repaired[/green]: manifest {report.manifest_id}")
        elif any(defect.remedy for defect in report.defects):
            shown.print("[bold red]not repaired[/bold red]: --apply does what is listed under remedy")


COMMANDS: Final[tuple[Callable[..., None], ...]] = (repair,)
