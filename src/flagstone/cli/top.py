"""`top`: the rates of a running database, seen from outside: its manifests and the listing of its WAL."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flagstone.cli.context import AsJson, Invocation, invocation
from flagstone.cli.output import moment_text, print_facts, print_json_line, print_line
from flagstone.cli.parsing import parse_duration
from flagstone.errors import InvalidRequest
from flagstone.inspector.text import size_text
from flagstone.runtime.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from flagstone.cli.connection import Connection
    from flagstone.inspector.rates import Rates, Sample, Sampler

_CLEAR: Final = "\x1b[2J\x1b[H"


def top(
    context: typer.Context,
    interval: Annotated[
        str, typer.Option("--interval", "-i", metavar="DURATION", help="The time between two looks.")
    ] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Show the rates of one interval, and end.")] = False,
    json: AsJson = False,
) -> None:
    """Show what a running database does: WAL, flushes, compactions and sizes, with their rates.

    Polls the manifest and lists new WAL files, three or four requests each time; reads no row and writes nothing. Reads
    are not visible from outside of a process: see the metrics of the database there. With --json, or if standard output
    is no terminal, it prints one line per interval. Ctrl-C ends it.

    For example:

        flagstone -p s3://bucket/shop top
        flagstone -p s3://bucket/shop --json top --once --interval 10s
    """
    from flagstone.inspector.rates import Sampler

    call = invocation(context, json=json)
    seconds = parse_duration(interval).total_seconds()
    if seconds < 0.1:
        raise InvalidRequest(f"--interval is {interval!r}; use 100ms or more")
    connection = call.connect()
    watched = _watch(Sampler(connection), seconds)
    for before, after in islice(watched, 1) if once else watched:
        _show(call, connection, before, after, alone=once)


def _watch(sampler: Sampler, seconds: float) -> Iterator[tuple[Sample, Sample]]:
    before = sampler.take()
    while True:
        SYSTEM_CLOCK.sleep(seconds)
        after = sampler.take()
        yield before, after
        before = after


def _show(call: Invocation, connection: Connection, before: Sample, after: Sample, *, alone: bool) -> None:
    from flagstone.inspector.rates import plan_rates

    rates = plan_rates(before, after)
    if call.json:
        print_json_line(document(before, after, rates))
        sys.stdout.flush()
        return
    if not sys.stdout.isatty() and not alone:
        print_line(
            f"{moment_text(after.at_ms / 1000)}  WAL {_per_second(rates.wal_bytes, rates)}  flushes {rates.flushes}  "
            f"compacted {size_text(rates.compacted_bytes)}  L0 {len(after.l0)}  runs {after.run_count}"
        )
        sys.stdout.flush()
        return
    if not alone:
        sys.stdout.write(_CLEAR)
    restarted = after.writer_epoch != before.writer_epoch
    print_facts(
        [
            ("time", f"{moment_text(after.at_ms / 1000)}, {rates.seconds:.1f} s"),
            ("writer", f"epoch {after.writer_epoch}{', opened just now' if restarted else ''}"),
            ("WAL", f"{_per_second(rates.wal_bytes, rates)}, {rates.wal_files / rates.seconds:.1f} files/s"),
            (
                "flushes",
                f"{rates.flushes}, {size_text(rates.flushed_bytes)}, {rates.rows / rates.seconds:,.0f} numbers/s",
            ),
            ("compacted", f"{rates.compacted_ssts} SSTs, {_per_second(rates.compacted_bytes, rates)}"),
            ("L0", f"{len(after.l0)} SSTs, {size_text(sum(after.l0.values()))}"),
            ("sorted runs", f"{after.run_count}, {size_text(sum(after.runs.values()))}"),
            ("manifest", f"{after.manifest_id} (+{rates.manifests})"),
            ("checkpoints", after.checkpoints),
            ("top itself", f"{rates.requests / rates.seconds:.1f} requests/s"),
        ],
        title=f"{connection.root} in {connection.store.url}",
    )


def document(before: Sample, after: Sample, rates: Rates) -> dict[str, Any]:
    """A sample and the rates since the one before, for JSON."""
    return {
        "time_ms": after.at_ms,
        "seconds": rates.seconds,
        "manifest_id": after.manifest_id,
        "writer_epoch": after.writer_epoch,
        "writer_changed": after.writer_epoch != before.writer_epoch,
        "last_l0_seq": after.last_l0_seq,
        "last_wal_id": after.last_wal_id,
        "l0": {"ssts": len(after.l0), "bytes": sum(after.l0.values())},
        "runs": {"count": after.run_count, "ssts": len(after.runs), "bytes": sum(after.runs.values())},
        "checkpoints": after.checkpoints,
        "wal_files": rates.wal_files,
        "wal_bytes": rates.wal_bytes,
        "flushes": rates.flushes,
        "flushed_bytes": rates.flushed_bytes,
        "flushed_sequence_numbers": rates.rows,
        "compacted_ssts": rates.compacted_ssts,
        "compacted_bytes": rates.compacted_bytes,
        "manifests": rates.manifests,
        "requests": rates.requests,
    }


def _per_second(size: int, rates: Rates) -> str:
    return f"{size_text(round(size / rates.seconds))}/s"
