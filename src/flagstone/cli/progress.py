"""What a person sees while work takes long: on standard error, and only when that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flagstone.inspector.text import size_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from flagstone.cli.connection import Connection


class Progress:
    """How far the work is, as far as it tells; without a total it is only known that it goes on."""

    def __init__(self, title: str, connection: Connection, *, shown: bool) -> None:
        self.title = title
        self.shown = shown
        self._done = 0
        self._total: int | None = None
        self._reads_all = False
        self._connection = connection

    def update(self, done: int, total: int | None) -> None:
        """`done` of `total` bytes, files or whatever the work counts."""
        self._done, self._total = done, total

    def expect_reading_all(self) -> None:
        """The work reads every object of the database: what was read so far tells how far it is.

        Costs a listing, so only where somebody is watching.
        """
        if self.shown:
            self._reads_all = True
            self._total = self._connection.stored_bytes()

    def __rich__(self) -> RenderableType:
        from rich.columns import Columns
        from rich.progress_bar import ProgressBar

        moved = f"{self._connection.requests:,} requests, {size_text(self._connection.bytes_moved)}"
        parts: list[Any] = [_dim(self.title), _dim(moved)]
        if self._total:
            done = self._connection.bytes_moved if self._reads_all else self._done
            share = min(done / self._total, 1.0)
            parts[1:1] = [ProgressBar(total=1.0, completed=share, width=30), _dim(f"{share:4.0%}")]
        return Columns(parts, padding=(0, 2))


@contextmanager
def working(title: str, connection: Connection) -> Iterator[Progress]:
    """Show `title`, the requests so far and, if the work says it, how much of it is done."""
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
