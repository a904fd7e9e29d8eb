"""Renders the page of `flagstone inspect --output`: plain HTML without scripts. Pure.

The page shows the first and last keys of SSTs and the names of checkpoints, but no values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any, Final, NamedTuple

from flagstone.inspector.snapshot import DatabaseSnapshot, Weight
from flagstone.inspector.text import json_text, line_text, size_text, time_text
from flagstone.lsm.tree import SstView, Tree
from flagstone.metadata.compactions import Compactions, TieredSpec
from flagstone.metadata.manifest import Manifest
from flagstone.runtime.ids import ulid_ms, ulid_text
from flagstone.types import KeyRange

DOLLARS_PER_GIB_MONTH: Final = 0.023
"""S3's list price for its standard class, without requests."""

_GIB: Final = 1 << 30
_STYLE: Final = """
:root { color-scheme: light dark; --line: #c8ced8; --l0: #d98a3d; --run: #4f86c6; --dim: #69758a; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; font-weight: 500; color: var(--dim); }
td, th { padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
svg { width: 100%; font-size: 12px; } svg text { fill: currentColor; }
.l0 { fill: var(--l0); } .run { fill: var(--run); } .dim { color: var(--dim); }
"""


def render(seen: DatabaseSnapshot) -> str:
    """The whole page."""
    title = f"{seen.root} in {seen.url}"
    manifest = seen.manifest.value
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">manifest {seen.manifest.id}, read at {time_text(seen.now_s)}</p>',
        _facts(seen),
        *_trees(manifest),
        _jobs(seen.compactions),
        _checkpoints(seen),
        _folders(seen),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _facts(seen: DatabaseSnapshot) -> str:
    facts, found = seen.facts(), seen.overview
    stored = sum(weight.bytes for weight in found.objects.values())
    pairs: list[tuple[str, Any]] = [
        ("state", None if facts["initialized"] else "a clone that is not finished"),
        ("epochs", f"writer {facts['writer_epoch']}, compactor {facts['compactor_epoch']}"),
        ("last flush", f"sequence number {facts['last_l0_seq']:,}, {facts['last_l0_time'] or 'never'}"),
        ("live SSTs", _weight(found.tables.live)),
        ("borrowed SSTs", _weight(found.tables.borrowed) if found.tables.borrowed.count else None),
        ("SSTs only in checkpoints", _weight(found.tables.pinned) if found.tables.pinned.count else None),
        ("garbage, or work in progress", _weight(found.tables.unreferenced)),
        ("WAL to replay", _weight(found.log.to_replay)),
        ("space amplification", _ratio(found.space_amplification)),
        ("stored", f"{size_text(stored)}, about ${stored / _GIB * DOLLARS_PER_GIB_MONTH:,.2f} a month on S3"),
    ]
    rows = ((name, value) for name, value in pairs if value is not None)
    return _table((), rows)


def _trees(manifest: Manifest) -> Iterable[str]:
    named = [("", manifest.tree), *((json_text(each.prefix), each.tree) for each in manifest.segments)]
    for prefix, tree in named:
        if prefix or not manifest.segments:
            yield f"<h2>{'Tree' if not prefix else f'Segment {escape(prefix)}'}</h2>{_tree(manifest, tree)}"


def _tree(manifest: Manifest, tree: Tree) -> str:
    shown = lanes(manifest, tree)
    if not shown:
        return '<p class="dim">no SSTs yet</p>'
    count = sum(len(lane.ssts) for lane in shown)
    picture = draw(shown) if count <= MAX_SSTS else f'<p class="dim">{count:,} SSTs: too many to draw</p>'
    rows = [(lane.name, f"{len(lane.ssts):,}", size_text(lane.bytes)) for lane in shown]
    return picture + _table(("in read order", "SSTs", "size"), rows, numbers=(1, 2))


def _jobs(compactions: Compactions | None) -> str:
    rows = []
    for job in reversed(() if compactions is None else compactions.jobs):
        spec = job.spec
        done = sum(len(part.output_ssts) for part in job.context.subcompactions) if job.context else 0
        target = f"run {spec.destination}" if isinstance(spec, TieredSpec) else "dropped"
        rows.append(
            (
                time_text(ulid_ms(job.id) // 1000),
                ulid_text(job.id),
                job.status.name.lower(),
                f"{len(spec.l0_view_ids)} of L0, {len(spec.sorted_runs)} runs → {target}",
                f"{len(job.output_ssts) or done} SSTs",
            )
        )
    return "<h2>Compactions</h2>" + _table(
        ("begun", "job", "state", "sources", "written"), rows, empty="none"
    )


def _checkpoints(seen: DatabaseSnapshot) -> str:
    rows = [
        (
            entry.name or "",
            str(entry.id),
            entry.manifest_id,
            time_text(entry.created_s),
            "never" if entry.expires_s is None else time_text(entry.expires_s),
        )
        for entry in seen.manifest.value.checkpoints
    ]
    return "<h2>Checkpoints</h2>" + _table(("name", "id", "manifest", "made", "expires"), rows, empty="none")


def _folders(seen: DatabaseSnapshot) -> str:
    rows = [
        (folder, f"{weight.count:,}", size_text(weight.bytes))
        for folder, weight in seen.overview.objects.items()
    ]
    return "<h2>Objects</h2>" + _table(("folder", "objects", "size"), rows, numbers=(1, 2))


def _table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: Sequence[int] = (), empty: str = ""
) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = [
        "".join(
            f'<td class="number">{escape(str(cell))}</td>'
            if at in numbers
            else f"<td>{escape(str(cell))}</td>"
            for at, cell in enumerate(row)
        )
        for row in rows
    ]
    if not lines and empty:
        return f'<p class="dim">{escape(empty)}</p>'
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _weight(weight: Weight) -> str:
    return f"{weight.count:,}, {size_text(weight.bytes)}"


def _ratio(ratio: float | None) -> str | None:
    return None if ratio is None else f"{ratio:.2f}×"


_WIDTH: Final = 1000
_LANE: Final = 22
_LABEL: Final = 90
_NARROWEST: Final = 2.0
MAX_SSTS: Final = 5000
_LONGEST_KEY: Final = 60


class Lane(NamedTuple):
    """One L0 SST or one sorted run: its name, its size, and its SSTs with their key ranges and sizes."""

    name: str
    bytes: int
    ssts: tuple[tuple[SstView, KeyRange, int], ...]


def lanes(manifest: Manifest, tree: Tree) -> list[Lane]:
    """The lanes of a tree in the order in which a read searches them, newest first."""
    found = [_lane(manifest, "L0", (view,)) for view in tree.l0]
    return found + [_lane(manifest, f"run {run.id}", run.views) for run in tree.runs]


def draw(shown: Sequence[Lane]) -> str:
    """An SVG of the lanes. The tooltip of an SST shows its id, size and keys."""
    borders = sorted({border for lane in shown for _, keys, _ in lane.ssts for border in _borders(keys)})
    scale = (_WIDTH - _LABEL) / max(1, len(borders) - 1)

    def position(key: bytes) -> float:
        return _LABEL + bisect_left(borders, key) * scale

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_LANE * max(1, len(shown))}" role="img" aria-label="SSTs by key">',
        *(part for at, lane in enumerate(shown) for part in _draw_lane(lane, at * _LANE, position)),
        "</svg>",
    ]
    return "".join(parts)


def _draw_lane(lane: Lane, top: int, position: Callable[[bytes], float]) -> Iterable[str]:
    yield f'<text x="0" y="{top + 15}">{escape(lane.name)}</text>'
    kind = "l0" if lane.name == "L0" else "run"
    for view, keys, size in lane.ssts:
        first, last = _borders(keys)
        left = position(first)
        width = max(_NARROWEST, position(last) - left)
        tooltip = f"{ulid_text(view.sst_id)}\n{size_text(size)}\n{_key(first)} … {_key(last)}"
        yield (
            f'<rect class="{kind}" x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{_LANE - 6}" rx="2">'
            f"<title>{escape(tooltip)}</title></rect>"
        )


def _lane(manifest: Manifest, name: str, views: Sequence[SstView]) -> Lane:
    ssts = [(view, manifest.sst(view).info) for view in views]
    return Lane(
        name,
        sum(info.estimated_size for _, info in ssts),
        tuple((view, view.effective_range(info), info.estimated_size) for view, info in ssts),
    )


def _borders(keys: KeyRange) -> tuple[bytes, bytes]:
    """The two ends of a range. An open end is drawn at the start of the range."""
    first = keys.start or b""
    return first, keys.stop or first


def _key(key: bytes) -> str:
    text = line_text(key)
    return text if len(text) <= _LONGEST_KEY else f"{text[:_LONGEST_KEY]}…"
