"""The output of commands: tables and lines for people, JSON for programs, progress and questions for terminals."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any, Final, Literal

import typer

from flagstone.cli.process import ABSENT
from flagstone.errors import InvalidRequest
from flagstone.inspector.text import size_text, time_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

    from flagstone.cli.connection import Connection

_NARROW: Final = 80
"""On a terminal with fewer columns, a table that does not fit is printed row by row."""

_WIDE: Final = 10_000
"""The width of a table that is written to a pipe, so that its lines are not folded."""


def print_json(value: Any) -> None:
    """Print one JSON document."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=_ascii_only()) + "\n")


def print_json_line(value: Any) -> None:
    """Print one of many JSON documents, each on its own line."""
    sys.stdout.write(json.dumps(value, ensure_ascii=_ascii_only()) + "\n")


@contextmanager
def console() -> Iterator[Console]:
    """A console on standard output. In a pipe, lines are not folded and have no trailing blanks."""
    from rich.console import Console

    if sys.stdout.isatty():
        yield Console(highlight=False, soft_wrap=True)
        return
    text = StringIO()
    yield Console(highlight=False, soft_wrap=True, width=_WIDE, file=text)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def print_facts(facts: Iterable[tuple[str, Any]], *, title: str | None = None) -> None:
    """Print names and values, one pair per line, without the pairs whose value is None."""
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
    """Print rows under headings, or the text `empty` if there are no rows.

    Numbers are aligned to the right, and columns without any text are left out. On a narrow terminal long cells are
    folded, except those of the columns `whole`: users copy ids. On one that is narrower than the table would be with
    some room per column, each row is a list of names and values.
    """
    from rich.measure import Measurement
    from rich.table import Table

    rows = list(rows)
    if not rows:
        print_line(empty)
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
        wide = Measurement.get(shown, shown.options.update(max_width=_WIDE), table).maximum
        if sys.stdout.isatty() and shown.width < min(wide, _NARROW):
            for row in rows:
                shown.print(_record([(columns[position], row[position]) for position in used]))
            return
        shown.print(table)


def _record(cells: Sequence[tuple[str, Any]]) -> RenderableType:
    """One row on a narrow terminal: its first cell, and below it the others with their names."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in cells[1:]:
        if value not in ("", None):
            table.add_row(name, _plain(value))
    return Group(_plain(cells[0][1]), Padding(table, (0, 0, 0, 2)))


def print_line(text: str) -> None:
    """Print one line for people."""
    sys.stdout.write(f"{text}\n")


def moment_text(seconds: float | None) -> str | None:
    """A time for people: as `time_text`, with a blank where a line may break, and without fractions."""
    text = time_text(None if seconds is None else int(seconds))
    return None if text is None else text.replace("T", " ")


def _ascii_only() -> bool:
    """Whether JSON must escape all but ASCII, because the output is not UTF-8."""
    return (sys.stdout.encoding or "").lower() not in ("utf-8", "utf8")


def _plain(value: Any) -> Any:
    """The value as text in which rich does not interpret markup."""
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


class Progress:
    """A progress display: a sign that moves, the requests so far, and a bar if the total is known."""

    def __init__(self, title: str, connection: Connection, *, shown: bool) -> None:
        self.title = title
        self.shown = shown
        self._done = 0
        self._total: int | None = None
        self._reads_all = False
        self._connection = connection
        self._sign: RenderableType | None = None

    def update(self, done: int, total: int | None) -> None:
        """Show that `done` of `total` bytes, files or other units are done."""
        self._done, self._total = done, total

    def expect_reading_all(self) -> None:
        """Measure progress by the bytes read, for work that reads every object of the database.

        This costs a listing, so it does nothing if no progress is shown.
        """
        if self.shown:
            self._reads_all = True
            self._total = self._connection.stored_bytes()

    def __rich__(self) -> RenderableType:
        from rich.columns import Columns
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner

        if self._sign is None:
            self._sign = Spinner("line", style="dim")
        moved = f"{self._connection.requests:,} requests, {size_text(self._connection.bytes_moved)}"
        parts: list[Any] = [self._sign, _dim(self.title), _dim(moved)]
        if self._total:
            done = self._connection.bytes_moved if self._reads_all else self._done
            share = min(done / self._total, 1.0)
            parts[2:2] = [ProgressBar(total=1.0, completed=share, width=30), _dim(f"{share:4.0%}")]
        return Columns(parts, padding=(0, 2))


@contextmanager
def working(title: str, connection: Connection) -> Iterator[Progress]:
    """Show a progress display on a terminal while the block runs."""
    progress = Progress(title, connection, shown=sys.stderr.isatty())
    if not progress.shown:
        yield progress
        return
    from rich.console import Console
    from rich.live import Live

    with Live(progress, console=Console(stderr=True), transient=True, refresh_per_second=5):
        yield progress


def _dim(text: str) -> Text:
    from rich.text import Text

    return Text(text, style="dim")


def confirm(consequence: str, *, yes: bool) -> None:
    """Return if the user agrees, by `--yes` or by an answer on a terminal. Exits with 1 if the user declines.

    Raises:
        InvalidRequest: `--yes` was not given, and there is no terminal to ask on.

    """
    if yes:
        return
    if not can_ask():
        raise InvalidRequest(f"{consequence}; add --yes to do that without being asked")
    if not typer.confirm(f"{consequence}. Continue?", err=True):
        sys.stderr.write("nothing was changed\n")
        raise typer.Exit(ABSENT)


def can_ask() -> bool:
    """Whether the command runs on a terminal and can ask questions."""
    return sys.stdin.isatty() and sys.stderr.isatty()
