"""`top`: the rates of a running database, seen from outside: its manifests and the listing of its WAL."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from flagstone.cli.context import AsJson, Invocation, invocation
from flagstone.cli.output import moment_text, print_facts, print_json_line, print_line
from flagstone.cli.parsing import parse_duration
from flagstone.errors import InvalidRequest
from flagstone.inspector.text import size_text
from flagstone.runtime.clock import SYSTEM_CLOCK, Clock
from flagstone.store.paths import DbPaths

if TYPE_CHECKING:
    from flagstone.cli.connection import Connection

_CLEAR: Final = "\x1b[2J\x1b[H"


@dataclass(frozen=True, slots=True)
class Sample:
    """What the store shows of a database at one moment."""

    at_ms: int
    manifest_id: int
    writer_epoch: int
    last_l0_seq: int
    l0: dict[int, int]
    """The size of each L0 SST by its id."""

    runs: dict[int, int]
    """The size of each SST of the sorted runs by its id."""

    run_count: int
    checkpoints: int
    last_wal_id: int
    wal_files: int
    """The WAL files seen since the first sample."""

    wal_bytes: int
    """Their size."""

    requests: int
    """The requests that `top` has made."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two samples."""

    seconds: float
    rows: int
    """Sequence numbers that reached SSTs. A batch has one, so it counts batches, not rows, where there are batches."""

    wal_files: int
    wal_bytes: int
    flushes: int
    flushed_bytes: int
    compacted_ssts: int
    compacted_bytes: int
    """SSTs that are new in sorted runs: those of compactions and of bulk loads."""

    manifests: int
    requests: int


def plan_rates(before: Sample, after: Sample) -> Rates:
    """The differences of two samples. An SST that is both new and gone between them is not seen. Pure."""
    flushed = {sst: size for sst, size in after.l0.items() if sst not in before.l0}
    known = before.l0.keys() | before.runs.keys()
    compacted = {sst: size for sst, size in after.runs.items() if sst not in known and sst not in flushed}
    return Rates(
        seconds=max(after.at_ms - before.at_ms, 1) / 1000,
        rows=max(after.last_l0_seq - before.last_l0_seq, 0),
        wal_files=after.wal_files - before.wal_files,
        wal_bytes=after.wal_bytes - before.wal_bytes,
        flushes=len(flushed),
        flushed_bytes=sum(flushed.values()),
        compacted_ssts=len(compacted),
        compacted_bytes=sum(compacted.values()),
        manifests=after.manifest_id - before.manifest_id,
        requests=after.requests - before.requests,
    )


class Sampler:
    """Takes samples: one or two requests for the manifest, and one listing of the WAL files that are new."""

    def __init__(self, connection: Connection, clock: Clock = SYSTEM_CLOCK) -> None:
        from flagstone.metadata.stores import ManifestStore

        self._connection = connection
        self._clock = clock
        self._paths = DbPaths(connection.root)
        self._manifests = ManifestStore(connection.store, self._paths)
        self._wal_store = connection.wal_store or connection.store
        self._last_wal_id: int | None = None
        self._wal_files = 0
        self._wal_bytes = 0

    def take(self) -> Sample:
        """The present state. Raises `InvalidRequest` if there is no database, and `Unavailable`."""
        latest = self._manifests.latest()
        if latest is None:
            raise InvalidRequest(
                f"no database at {self._connection.root!r} in {self._connection.store.url}; check the path"
            )
        manifest = latest.value
        self._list_wal(max(manifest.replay_after_wal_id, 0))
        return Sample(
            at_ms=self._clock.now_ms(),
            manifest_id=latest.id,
            writer_epoch=manifest.writer_epoch,
            last_l0_seq=manifest.last_l0_seq,
            l0={
                view.sst_id: manifest.sst(view).info.estimated_size
                for tree in manifest.trees
                for view in tree.l0
            },
            runs={
                view.sst_id: manifest.sst(view).info.estimated_size
                for tree in manifest.trees
                for run in tree.runs
                for view in run.views
            },
            run_count=sum(len(tree.runs) for tree in manifest.trees),
            checkpoints=len(manifest.checkpoints),
            last_wal_id=self._last_wal_id or 0,
            wal_files=self._wal_files,
            wal_bytes=self._wal_bytes,
            requests=self._connection.requests,
        )

    def _list_wal(self, replay_after: int) -> None:
        from flagstone.types import WalId

        first = self._last_wal_id is None
        after = self._paths.wal(WalId(replay_after if self._last_wal_id is None else self._last_wal_id))
        last = replay_after if self._last_wal_id is None else self._last_wal_id
        for meta in self._wal_store.list(self._paths.wal_folder, after=after):
            wal_id = self._paths.parse_wal(meta.path)
            if wal_id is None:
                continue
            last = max(last, wal_id)
            if not first:
                self._wal_files += 1
                self._wal_bytes += meta.size
        self._last_wal_id = last


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
