"""Short texts and HTML tables of rows, for `repr` and notebooks. Everything is escaped and bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import Any, Final

from flagstone.errors import FlagstoneError

PREVIEW_ROWS: Final = 10
"""How many rows a notebook shows of a scan or a range."""

_LONGEST: Final = 80
_CELL: Final = ' style="text-align:left;font-family:monospace"'
_FIRST: Final = ' style="text-align:left;font-family:monospace;white-space:nowrap"'


def shown(value: object) -> str:
    """The `repr` of a key or value; of a long one its beginning and its size."""
    if isinstance(value, bytes | str) and len(value) > _LONGEST:
        unit = "bytes" if isinstance(value, bytes) else "characters"
        return f"{value[: _LONGEST // 2]!r}… ({len(value)} {unit})"
    text = repr(value)
    return text if len(text) <= 2 * _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


def html_rows(
    title: str,
    rows: Iterable[tuple[object, ...]],
    *,
    more: bool,
    names: Iterable[str] = ("key", "value"),
    texts: bool = False,
) -> str:
    """A table of rows under a title. With `texts` the cells are words for people, else the `repr` of what is stored."""
    of = str if texts else shown
    head = "".join(f"<th{_CELL}>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td{_CELL if at else _FIRST}>{escape(of(cell))}</td>' for at, cell in enumerate(row))}</tr>"
        for row in rows
    )
    note = "<p>… and more rows</p>" if more else "" if body else "<p>no rows</p>"
    return f"<div><p><code>{escape(title)}</code></p><table><tr>{head}</tr>{body}</table>{note}</div>"


def html_preview(title: str, scan: Callable[[int], Iterable[tuple[object, ...]]]) -> str:
    """The first rows of a scan with a limit; if it fails, as that of a closed handle does, why."""
    try:
        rows = list(scan(PREVIEW_ROWS + 1))
    except FlagstoneError as error:
        return html_facts(title, {"no rows are shown": str(error)})
    return html_rows(title, rows[:PREVIEW_ROWS], more=len(rows) > PREVIEW_ROWS)


def html_facts(title: str, facts: Mapping[str, Any]) -> str:
    """A table of names and values; a mapping among the values becomes several lines."""
    lines = "".join(
        f"<tr><th{_CELL}>{escape(name)}</th><td{_CELL}>{escape(text)}</td></tr>"
        for name, text in _flat(facts)
    )
    return f"<div><p><code>{escape(title)}</code></p><table>{lines}</table></div>"


def brief(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that are known and are no groups of facts."""
    return {
        name: value for name, value in facts.items() if value is not None and not isinstance(value, Mapping)
    }


def _flat(facts: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value if isinstance(value, str) else shown(value)
