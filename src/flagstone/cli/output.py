"""What commands print: tables and lines for people, JSON for programs, and nothing else on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any, Final, Literal

from flagstone.inspector.text import time_text

if TYPE_CHECKING:
    from rich.console import Console

_WIDE: Final = 10_000
"""Columns of a table that goes into a pipe: nobody wants it folded there."""


def print_json(value: Any) -> None:
    """One JSON document."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=_ascii_only()) + "\n")


def print_json_line(value: Any) -> None:
    """One of many JSON documents, each on a line of its own."""
    sys.stdout.write(json.dumps(value, ensure_ascii=_ascii_only()) + "\n")


@contextmanager
def console() -> Iterator[Console]:
    """Where people read. Into a pipe lines go unfolded, and without the blanks that fill up a table."""
    from rich.console import Console

    if sys.stdout.isatty():
        yield Console(highlight=False, soft_wrap=True)
        return
    text = StringIO()
    yield Console(highlight=False, soft_wrap=True, width=_WIDE, file=text)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def print_facts(facts: Iterable[tuple[str, Any]], *, title: str | None = None) -> None:
    """Names and values, one pair per line; pairs without a value are left out."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        if value is not None:
            table.add_row(name, _plain(value))
    with console() as shown:
        if title is not None:
            shown.print(_bold(title))
        shown.print(table)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, empty: str, whole: Sequence[str] = ()
) -> None:
    """Rows under headings. Numbers are aligned to the right; `empty` is said when there are none.

    Columns without any text are left out.
    On a narrow terminal long cells are folded, those of the columns `whole` last: ids are there to be copied.
    """
    from rich.table import Table

    rows = list(rows)
    if not rows:
        say(empty)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    used = [position for position in range(len(columns)) if any(row[position] != "" for row in rows)]
    for position in used:
        name = columns[position]
        numeric = all(isinstance(row[position], int | float | type(None)) for row in rows)
        justify: Literal["left", "right"] = "right" if numeric else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name in whole)
    for row in rows:
        table.add_row(*(_plain(row[position]) for position in used))
    with console() as shown:
        shown.print(table)


def say(text: str) -> None:
    """One line for a person."""
    sys.stdout.write(f"{text}\n")


def moment_text(seconds: float | None) -> str | None:
    """A moment for people: as `time_text`, with a blank where a line may break, and no fractions."""
    text = time_text(None if seconds is None else int(seconds))
    return None if text is None else text.replace("T", " ")


def _ascii_only() -> bool:
    """Whether JSON has to escape what is not ASCII, because the output is not UTF-8."""
    return (sys.stdout.encoding or "").lower() not in ("utf-8", "utf8")


def _plain(value: Any) -> Any:
    """Text that rich must not take for markup."""
    from rich.text import Text

    match value:
        case None:
            return Text("-", style="dim")
        case bool():
            return Text("yes" if value else "no")
        case int():
            return Text(f"{value:,}")
        case Text():
            return value
        case _:
            return Text(str(value))


def _bold(text: str) -> Any:
    from rich.text import Text

    return Text(text, style="bold")
