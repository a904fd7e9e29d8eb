"""Manifests: `read-manifest`, `list-manifests`, `seq-to-ts` and `ts-to-seq`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flagstone.cli.context import AsJson, Invocation, invocation
from flagstone.cli.output import print_facts, print_json, print_line, print_table
from flagstone.cli.parsing import parse_moment
from flagstone.cli.process import ABSENT
from flagstone.inspector.text import size_text, time_text

if TYPE_CHECKING:
    from flagstone.lsm.tree import SstView
    from flagstone.metadata.manifest import Manifest
    from flagstone.metadata.sequenced import Listed

Start = Annotated[int | None, typer.Option("--start", "-s", min=0, help="The first id to show.")]
End = Annotated[int | None, typer.Option("--end", "-e", min=0, help="The id to stop before.")]


def read_manifest(
    context: typer.Context,
    id: Annotated[  # noqa: A002 - SlateDB's name
        int | None,
        typer.Option("--id", "-i", min=0, help="The id of the manifest; the current one if not given."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show a manifest: the state of the database at one moment.

    The JSON has SlateDB's field names. A key is text, or 0x and hexadecimal digits if it is not UTF-8.

    For example:

        flagstone -p s3://bucket/shop read-manifest
        flagstone -p s3://bucket/shop --json read-manifest --id 42 | jq '.l0[].sst.id'
    """
    call = invocation(context, json=json)
    found = call.connect().admin().manifest(id)
    if call.json:
        from flagstone.cli.documents import manifest_document

        print_json(manifest_document(found.id, found.value))
    else:
        _print(found.id, found.value)


def list_manifests(
    context: typer.Context, start: Start = None, end: End = None, json: AsJson = False
) -> None:
    """List the stored manifests, or those with ids from --start to before --end.

    Prints ids, times and sizes, which takes one listing. With --json it also reads each manifest, which takes one
    request per manifest: if there are thousands, use --start and --end.

    For example:

        flagstone -p s3://bucket/shop list-manifests
        flagstone -p s3://bucket/shop --json list-manifests --start 40 --end 50 | jq '.[].last_l0_seq'
    """
    call = invocation(context, json=json)
    admin = call.connect().admin()
    listed = entries_between(admin.manifests(), start, end)
    if not call.json:
        print_entries("manifest", listed, empty="no manifests in that range")
        return
    from flagstone.cli.documents import manifest_document

    print_json(entry_documents(listed, lambda found: manifest_document(found, admin.manifest(found).value)))


def entries_between(entries: Iterable[Listed], start: int | None, end: int | None) -> list[Listed]:
    """The entries with ids from `start` to before `end`."""
    return [
        entry for entry in entries if (start is None or entry.id >= start) and (end is None or entry.id < end)
    ]


def print_entries(heading: str, entries: Iterable[Listed], *, empty: str) -> None:
    """Print a table of ids, times and sizes."""
    rows = [
        (entry.id, time_text(entry.meta.last_modified_ms / 1000), size_text(entry.meta.size))
        for entry in entries
    ]
    print_table((heading, "written", "size"), rows, empty=empty)


def entry_documents(entries: Sequence[Listed], read: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """What `read` returns for the id of each entry, with the path, size and time of the object."""
    from flagstone.cli.documents import object_document
    from flagstone.runtime.pool import shared_pool

    contents = shared_pool().map_ordered(lambda entry: read(entry.id), entries)
    return [
        {**content, **object_document(entry.meta)} for entry, content in zip(entries, contents, strict=True)
    ]


def _print(manifest_id: int, manifest: Manifest) -> None:
    last_tick = manifest.last_l0_clock_tick
    print_facts(
        [
            ("state", None if manifest.initialized else "not initialized: a clone under construction"),
            ("epochs", f"writer {manifest.writer_epoch}, compactor {manifest.compactor_epoch}"),
            ("last flush", f"sequence number {manifest.last_l0_seq:,}"),
            ("last clock tick", time_text(last_tick / 1000) if last_tick > 0 else None),
            (
                "WAL",
                f"replay after {manifest.replay_after_wal_id:,}, last seen {manifest.wal_id_last_seen:,}",
            ),
            ("oldest snapshot", f"sequence number {manifest.recent_snapshot_min_seq:,}"),
            ("segment extractor", manifest.segment_extractor_name),
        ],
        title=f"manifest {manifest_id}",
    )
    named = [("", manifest.tree), *((_text(segment.prefix), segment.tree) for segment in manifest.segments)]
    rows = []
    for prefix, tree in named:
        rows += [(prefix, "L0", *_view(manifest, view)) for view in tree.l0]
        rows += [(prefix, f"run {run.id}", *_view(manifest, view)) for run in tree.runs for view in run.views]
    print_line("")
    print_table(
        ("segment", "level", "SST", "size", "first key", "last key", "owner"),
        rows,
        empty="no SSTs",
        whole=("SST",),
    )
    if manifest.checkpoints:
        from flagstone.cli.checkpoints import print_checkpoints

        print_line("")
        print_checkpoints(manifest.checkpoints)
    if manifest.external_dbs:
        print_line("")
        print_table(
            ("external database", "SSTs", "final checkpoint"),
            [
                (entry.path, len(entry.sst_ids), str(entry.final_checkpoint_id))
                for entry in manifest.external_dbs
            ],
            empty="",
            whole=("final checkpoint",),
        )


def _view(manifest: Manifest, view: SstView) -> tuple[str, str, str | None, str | None, str | None]:
    from flagstone.runtime.ids import ulid_text

    info = manifest.sst(view).info
    shown = view.effective_range(info)
    last = info.last_entry if view.visible_range is None else shown.stop
    return (
        ulid_text(view.sst_id),
        size_text(info.estimated_size),
        None if shown.start is None else _text(shown.start),
        None if last is None else _text(last),
        manifest.path_of_owner(view.sst_id) or "",
    )


def _text(key: bytes) -> str:
    from flagstone.inspector.text import line_text

    return line_text(key)


class Rounding(StrEnum):
    """Which of the two neighbouring points to use if none matches exactly."""

    up = "up"
    down = "down"


Round = Annotated[
    Rounding,
    typer.Option(
        case_sensitive=False, help="Use the last known point up to it (down), or the first from it on (up)."
    ),
]


def seq_to_ts(
    context: typer.Context,
    seq: Annotated[int, typer.Argument(min=0, help="The sequence number.")],
    round: Round = Rounding.down,  # noqa: A002 - SlateDB's name
    json: AsJson = False,
) -> None:
    """Print the time at which a sequence number was current; exit with 1 if it is not known.

    The manifest keeps at most one point per minute, and fewer for older times.

    For example:

        flagstone -p s3://bucket/shop seq-to-ts 1234567
        flagstone -p s3://bucket/shop seq-to-ts 1234567 --round up
    """
    call = invocation(context, json=json)
    found = call.connect().admin().time_of(seq, rounding=round.value)
    if found is None:
        _unknown(call, "ts", f"the manifest has no time for the sequence number {seq}")
        return
    text = found.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if call.json:
        print_json({"seq": seq, "ts": text, "ts_secs": int(found.timestamp())})
    else:
        print_line(text)


def ts_to_seq(
    context: typer.Context,
    ts: Annotated[
        str,
        typer.Argument(help='A time such as 2026-11-16T03:00:00Z or "2h ago", or seconds since the epoch.'),
    ],
    round: Round = Rounding.down,  # noqa: A002 - SlateDB's name
    json: AsJson = False,
) -> None:
    """Print the sequence number that was current at a time; exit with 1 if it is not known.

    The manifest keeps at most one point per minute, and fewer for older times.

    For example:

        flagstone -p s3://bucket/shop ts-to-seq 1794798585
        flagstone -p s3://bucket/shop ts-to-seq 2026-11-16T03:00:00Z --round up
    """
    call = invocation(context, json=json)
    moment = parse_moment(ts)
    found = call.connect().admin().sequence_at(moment, rounding=round.value)
    if found is None:
        _unknown(call, "seq", f"the manifest has no sequence number for the time {ts}")
    elif call.json:
        print_json({"ts": moment.isoformat().replace("+00:00", "Z"), "seq": found})
    else:
        print_line(str(found))


def _unknown(call: Invocation, field: str, problem: str) -> None:
    if call.json:
        print_json({field: None})
    sys.stderr.write(f"flagstone: {problem}\n")
    raise typer.Exit(ABSENT)
