"""What every command knows: which database, and how to print."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from flagstone.db.admin import Admin


@dataclass(frozen=True, slots=True)
class Invocation:
    """The global options of one call."""

    path: str
    store: str | None
    wal_store: str | None
    json: bool

    @property
    def admin(self) -> Admin:
        return Admin(self.path, store=self.store, wal_store=self.wal_store)


def invocation(context: typer.Context) -> Invocation:
    """The global options, for a command."""
    found = context.obj
    assert isinstance(found, Invocation)
    return found
