"""Asking before something is destroyed or replaced."""

from __future__ import annotations

import sys

import typer

from flagstone.cli.exit_codes import ABSENT
from flagstone.errors import InvalidRequest


def confirm(consequence: str, *, yes: bool) -> None:
    """Go on if the user agrees: with `--yes`, or asked on a terminal. Ends the command with 1 when declined.

    Raises:
        InvalidRequest: nobody is there to ask, and `--yes` was not given.

    """
    if yes:
        return
    if not can_ask():
        raise InvalidRequest(f"{consequence}; say --yes to do that without being asked")
    if not typer.confirm(f"{consequence}. Go on?", err=True):
        sys.stderr.write("nothing was changed\n")
        raise typer.Exit(ABSENT)


def can_ask() -> bool:
    """Whether somebody is there to answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()
