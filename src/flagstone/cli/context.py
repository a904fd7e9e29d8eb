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
    further_paths: tuple[str, ...] = ()
    store: str | None = None
    wal_store: str | None = None
    store_options: tuple[str, ...] = ()
    settings_file: str | None = None
    timeout_s: float = 10.0
    json: bool = False

    def require_path(self) -> str:
        """The database that was named. `--help` of a command needs none, everything else does."""
        self.require_paths()
        if len(self.paths) > 1:
            raise InvalidRequest(
                f"--path names {len(self.paths)} databases; only garbage collection takes more than one"
            )
        return self.paths[0]

    @property
    def paths(self) -> tuple[str, ...]:
        """All databases that were named."""
        return (*((self.path,) if self.path else ()), *self.further_paths)

    def require_paths(self) -> None:
        """Refuse a call that names no database."""
        if not self.paths:
            raise InvalidRequest(
                "which database? name it before the command: flagstone --path s3://bucket/db COMMAND "
                "(or set FLAGSTONE_PATH)"
            )

    def each(self) -> list[Invocation]:
        """The same call for each of the databases that were named."""
        return [replace(self, path=path, further_paths=()) for path in self.paths]

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
