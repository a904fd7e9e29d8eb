"""The tree as a picture: one lane per table of L0 and per run, tables where their keys are. Pure.

Keys have no distances, so the axis counts tables: a key stands where its rank among all borders of tables is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Final, NamedTuple

from flagstone.inspector.text import line_text, size_text
from flagstone.lsm.tree import SstView, Tree
from flagstone.metadata.manifest import Manifest
from flagstone.runtime.ids import ulid_text
from flagstone.types import KeyRange

_WIDTH: Final = 1000
_LANE: Final = 22
_LABEL: Final = 90
_NARROWEST: Final = 2.0
MOST_TABLES: Final = 5000
_LONGEST_KEY: Final = 60


class Lane(NamedTuple):
    """One source of reads, newest first: its name, its weight, and its tables with the keys they show."""

    name: str
    bytes: int
    tables: tuple[tuple[SstView, KeyRange, int], ...]


def lanes(manifest: Manifest, tree: Tree) -> list[Lane]:
    """The lanes of a tree in the order in which reads ask them."""
    found = [_lane(manifest, "L0", (view,)) for view in tree.l0]
    return found + [_lane(manifest, f"run {run.id}", run.views) for run in tree.runs]


def draw(shown: Sequence[Lane]) -> str:
    """An SVG of the lanes; a table tells its id, size and keys to whoever points at it."""
    borders = sorted({border for lane in shown for _, keys, _ in lane.tables for border in _borders(keys)})
    scale = (_WIDTH - _LABEL) / max(1, len(borders) - 1)

    def place(key: bytes) -> float:
        return _LABEL + bisect_left(borders, key) * scale

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_LANE * max(1, len(shown))}" role="img" aria-label="tables by key">',
        *(part for at, lane in enumerate(shown) for part in _draw_lane(lane, at * _LANE, place)),
        "</svg>",
    ]
    return "".join(parts)


def _draw_lane(lane: Lane, top: int, place: Callable[[bytes], float]) -> Iterable[str]:
    yield f'<text x="0" y="{top + 15}">{escape(lane.name)}</text>'
    kind = "l0" if lane.name == "L0" else "run"
    for view, keys, size in lane.tables:
        first, last = _borders(keys)
        left = place(first)
        width = max(_NARROWEST, place(last) - left)
        told = f"{ulid_text(view.sst_id)}\n{size_text(size)}\n{_key(first)} … {_key(last)}"
        yield (
            f'<rect class="{kind}" x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{_LANE - 6}" rx="2">'
            f"<title>{escape(told)}</title></rect>"
        )


def _lane(manifest: Manifest, name: str, views: Sequence[SstView]) -> Lane:
    tables = [(view, manifest.table(view).info) for view in views]
    return Lane(
        name,
        sum(info.estimated_size for _, info in tables),
        tuple((view, view.effective_range(info), info.estimated_size) for view, info in tables),
    )


def _borders(keys: KeyRange) -> tuple[bytes, bytes]:
    """The first key, and one that no table begins before: an open end is drawn as if it were the start."""
    first = keys.start or b""
    return first, keys.stop or first


def _key(key: bytes) -> str:
    text = line_text(key)
    return text if len(text) <= _LONGEST_KEY else f"{text[:_LONGEST_KEY]}…"
