"""Manifests: `read-manifest` and `list-manifests`."""

from __future__ import annotations

import sys
from datetime import UTC
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from flagstone.cli.context import AsJson, Invocation, invocation
from flagstone.cli.output import print_facts, print_json, print_table, say
from flagstone.cli.parsing import parse_moment
from flagstone.cli.process import ABSENT
from flagstone.inspector.text import size_text, time_text

if TYPE_CHECKING:
    from flagstone.lsm.tree import SstView
    from flagstone.metadata.manifest import Manifest

Start = Annotated[int | None, typer.Option("--start", "-s", min=0, help="The first number to show.")]
End = Annotated[int | None, typer.Option("--end", "-e", min=0, help="The number to stop before.")]


def read_manifest(
    context: typer.Context,
    id: Annotated[  # noqa: A002 - SlateDB's name
        int | None,
        typer.Option("--id", "-i", min=0, help="The number of the manifest; the current one if not given."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Show a manifest: the state of the database at one moment.

    As JSON it has SlateDB's field names; keys are text, or 0x and hexadecimal digits when they are none.

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
    """List the stored manifests, or those from --start up to --end without it.

    For people their numbers, times and sizes, which takes one listing. As JSON their whole contents as well, which
    takes one request each: narrow it down where there are thousands.

    For example:

        flagstone -p s3://bucket/shop list-manifests
        flagstone -p s3://bucket/shop --json list-manifests --start 40 --end 50 | jq '.[].last_l0_seq'
    """
    call = invocation(context, json=json)
    admin = call.connect().admin()
    listed = [
        entry
        for entry in admin.manifests()
        if (start is None or entry.id >= start) and (end is None or entry.id < end)
    ]
    if not call.json:
        rows = [
            (entry.id, time_text(entry.meta.last_modified_ms / 1000), size_text(entry.meta.size))
            for entry in listed
        ]
        print_table(("manifest", "written", "size"), rows, empty="no manifests in that range")
        return
    from flagstone.cli.documents import manifest_document, object_document
    from flagstone.runtime.pool import shared_pool

    contents = shared_pool().map_ordered(lambda entry: admin.manifest(entry.id).value, listed)
    print_json(
        [
            {**manifest_document(entry.id, manifest), **object_document(entry.meta)}
            for entry, manifest in zip(listed, contents, strict=True)
        ]
    )


def _print(manifest_id: int, manifest: Manifest) -> None:
    ticked = manifest.last_l0_clock_tick
    print_facts(
        [
            ("state", None if manifest.initialized else "not initialized: a clone under construction"),
            ("epochs", f"writer {manifest.writer_epoch}, compactor {manifest.compactor_epoch}"),
            ("last flush", f"sequence number {manifest.last_l0_seq:,}"),
            ("last clock tick", time_text(ticked / 1000) if ticked > 0 else None),
            (
                "log",
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
    say("")
    print_table(
        ("segment", "level", "table", "size", "first key", "last key", "owner"),
        rows,
        empty="no tables",
        whole=("table",),
    )
    if manifest.checkpoints:
        from flagstone.cli.checkpoints import print_checkpoints

        say("")
        print_checkpoints(manifest.checkpoints)
    if manifest.external_dbs:
        say("")
        print_table(
            ("external database", "tables", "final checkpoint"),
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
    """Which of the two neighbours is meant when there is no exact answer."""

    up = "up"
    down = "down"


Round = Annotated[
    Rounding,
    typer.Option(
        case_sensitive=False, help="Take the last known point before it (down), or the first from it on (up)."
    ),
]


def seq_to_ts(
    context: typer.Context,
    seq: Annotated[int, typer.Argument(min=0, help="The sequence number.")],
    round: Round = Rounding.down,  # noqa: A002 - SlateDB's name
    json: AsJson = False,
) -> None:
    """Tell when a sequence number was current; exit with 1 when that is not known.

    The manifest remembers one point a minute at most, and fewer of the distant past.

    For example:

        flagstone -p s3://bucket/shop seq-to-ts 1234567
        flagstone -p s3://bucket/shop seq-to-ts 1234567 --round up
    """
    call = invocation(context, json=json)
    found = call.connect().admin().time_of(seq, rounding=round.value)
    if found is None:
        _unknown(call, "ts", f"nothing is known about when the sequence number {seq} was current")
        return
    text = found.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if call.json:
        print_json({"seq": seq, "ts": text, "ts_secs": int(found.timestamp())})
    else:
        say(text)


def ts_to_seq(
    context: typer.Context,
    ts: Annotated[
        str, typer.Argument(help="Seconds since the epoch, or a time such as 2026-11-16T03:00:00Z.")
    ],
    round: Round = Rounding.down,  # noqa: A002 - SlateDB's name
    json: AsJson = False,
) -> None:
    """Tell which sequence number was current at a time; exit with 1 when that is not known.

    The manifest remembers one point a minute at most, and fewer of the distant past.

    For example:

        flagstone -p s3://bucket/shop ts-to-seq 1794798585
        flagstone -p s3://bucket/shop ts-to-seq 2026-11-16T03:00:00Z --round up
    """
    call = invocation(context, json=json)
    moment = parse_moment(ts)
    found = call.connect().admin().sequence_at(moment, rounding=round.value)
    if found is None:
        _unknown(call, "seq", f"nothing is known about which sequence number was current at {ts}")
    elif call.json:
        print_json({"ts": moment.isoformat().replace("+00:00", "Z"), "seq": found})
    else:
        say(str(found))


def _unknown(call: Invocation, field: str, problem: str) -> None:
    if call.json:
        print_json({field: None})
    sys.stderr.write(f"flagstone: {problem}\n")
    raise typer.Exit(ABSENT)
