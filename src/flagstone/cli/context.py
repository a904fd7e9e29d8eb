"""What every command knows: which database, how long to wait for it, and how to print."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from flagstone.errors import InvalidRequest

if TYPE_CHECKING:
    from flagstone.cli.connection import Connection
    from flagstone.config import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """The global options of one call."""

    path: str | None = None
    store: str | None = None
    wal_store: str | None = None
    store_options: tuple[str, ...] = ()
    settings_file: str | None = None
    timeout_s: float = 10.0
    json: bool = False

    def require_path(self) -> str:
        """The database that was named. `--help` of a command needs none, everything else does."""
        if not self.path:
            raise InvalidRequest(
                "which database? name it before the command: flagstone --path s3://bucket/db COMMAND "
                "(or set FLAGSTONE_PATH)"
            )
        return self.path

    def connect(self, *, patient: bool = False) -> Connection:
        """The stores of the database; see `connection.connect`."""
        # The engine is imported by commands that use it, so that `--help` and completion are quick.
        from flagstone.cli.connection import connect

        return connect(self, patient=patient)

    def settings(self) -> Settings:
        """The settings to work with: those of `--settings`, or the defaults."""
        from flagstone.config import Settings

        return Settings() if self.settings_file is None else Settings.from_file(self.settings_file)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
"""An option of every command, which may also be given before it."""


def invocation(context: typer.Context, *, json: bool) -> Invocation:
    """The global options, for a command; `json` is its own option of that name."""
    found = context.obj
    assert isinstance(found, Invocation)
    return replace(found, json=found.json or json)
